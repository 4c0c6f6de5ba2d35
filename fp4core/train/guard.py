"""The deferred exactness check of a step: what stands between backward and the optimizer.

A backend that keeps operands in a carrier narrower than they need counts on the device what did not fit, and
says so once per step. The step's gradients are then thrown away and made again; stochastic rounding draws the
same bits, so nothing but time is lost.

The optimizer is launched before the host knows: the device has the verdict first, as a flag by which it
leaves the weights alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from fp4core.ops import carrier
from fp4core.ops.linear import resolve_backend

if TYPE_CHECKING:
    from fp4core.ops.carrier_groups import Reading

# Steps after which the carrier plans forget what was seen before the last window of as many. A repeated step
# is worth one contraction in BF16 for 400 to 2000 steps (NOTES.md), so none returns much sooner than that.
WINDOW = 500


class StepGuard(Protocol):
    """`begin` stands before every attempt (0, 1, ...) at a step, `flag` and then `exact` after its backward.

    `flag` queues the check and waits for nothing: 0-dim on the device, nonzero when a tensor of this rank did
    not fit its carrier; None when nothing is checked. `exact` says the same on the host, once per attempt: it
    waits for no more than the check and prepares the next attempt or step. When it is False on some rank the
    step is made again, `attempts` times in all.
    """

    attempts: int

    def begin(self, step: int, attempt: int) -> None: ...
    def flag(self) -> Tensor | None: ...
    def exact(self) -> bool: ...
    def state(self) -> list[Any]: ...
    def load(self, state: list[Any]) -> None: ...


class CarrierGuard:
    """The carrier backend, which checks every tensor of a repeated step as it is made: the second attempt is
    exact on the rank that asked for it; the others leave room for ranks that ask one after another."""

    attempts = 4

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._reading: Reading | None = None
        carrier.defer(model)

    def begin(self, step: int, attempt: int) -> None:
        self._reading = None  # of an attempt that an error ended
        if step % WINDOW == 0 and attempt == 0:
            carrier.turn(self._model)
        # a resharded parameter changes without its version counter
        carrier.encode_weights(self._model)

    def flag(self) -> Tensor | None:
        self._reading = carrier.reading(self._model)
        return None if self._reading is None else self._reading.flag

    def exact(self) -> bool:
        """Also without `flag` before it."""
        found, self._reading = self._reading or carrier.reading(self._model), None
        return found is None or not found.misfits()

    def state(self) -> list[Any]:
        """Every group's plan as JSON, as it is now: an asynchronous checkpoint writes it later.

        A product in BF16 sums in another order than one in FP8, so the types that a run has arrived at belong
        to it; the references only save a repeated step.
        """
        from fp4core.ops import carrier_groups

        return [
            {
                "producers": list(g.producers),
                "kinds": list(g.plan.kinds),
                "refs": list(g.plan.refs),
                "spans": list(g.plan.spans),
                "calibrated": list(g.calibrated),
                "fallbacks": dict(g.plan.fallbacks),
                "set_apart": g.plan.set_apart,
                "window": g.window(),
            }
            for g in carrier_groups.groups(self._model)
            if g.plan.mx
        ]

    def load(self, state: list[Any]) -> None:
        """Go on under the plans of `state()`. ValueError when they are another model's."""
        from fp4core.ops import carrier_groups

        layers = {m.producer: m for m in self._model.modules() if hasattr(m, "producer")}
        for entry in state:
            first = layers.get(entry["producers"][0])
            if first is None:
                raise ValueError(f"carrier plans: got producers {entry['producers']}, which no layer has")
            g = carrier_groups.group(entry["producers"], first.spec, first.weight.device)
            g.plan.kinds, g.plan.refs = list(entry["kinds"]), list(entry["refs"])
            g.plan.spans = [None if span is None else tuple(span) for span in entry["spans"]]
            g.plan.fallbacks, g.calibrated = dict(entry["fallbacks"]), list(entry["calibrated"])
            # checkpoints of earlier versions have neither
            g.plan.set_apart = entry.get("set_apart", False)
            if "window" in entry:
                g.set_window(entry["window"])
            g.resume()


def step_guard(model: nn.Module, backend: str, device_type: str) -> StepGuard | None:
    """The guard that the backend of a model needs, None for backends that are always exact."""
    return CarrierGuard(model) if resolve_backend(backend, device_type) == "carrier" else None
