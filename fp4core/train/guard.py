"""The deferred exactness check of a step: what stands between backward and the optimizer.

A backend that keeps operands in a carrier narrower than they need counts on the device what did not fit, and
says so once per step. The step's gradients are then thrown away and made again; stochastic rounding draws the
same bits, so nothing but time is lost.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from fp4core.ops import carrier
from fp4core.ops.linear import resolve_backend


class StepGuard(Protocol):
    """`begin` stands before every attempt at a step, `exact` after its backward pass.

    When `exact` is False the backend has adapted itself and the step is made again, `attempts` times in all.
    """

    attempts: int

    def begin(self) -> None: ...
    def exact(self) -> bool: ...


class CarrierGuard:
    """The carrier backend: a new reference, a wider type and BF16 are its three ways out."""

    attempts = 4

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        carrier.defer(model)

    def begin(self) -> None:
        # a resharded parameter changes without its version counter
        carrier.encode_weights(self._model)

    def exact(self) -> bool:
        return not carrier.misfits(self._model)


def step_guard(model: nn.Module, backend: str, device_type: str) -> StepGuard | None:
    """The guard that the backend of a model needs, None for backends that are always exact."""
    return CarrierGuard(model) if resolve_backend(backend, device_type) == "carrier" else None
