"""Training on the carrier backend: when exactness is checked, and what it costs.

    carrier.defer(model)                        # once, before training
    for step in ...:
        forward, backward (any number of micro-batches)
        if carrier.misfits(model):              # one host synchronisation per step
            zero the gradients and repeat the step: stochastic rounding draws the same bits again
        optimizer step

A block whose scale does not fit its FP8 carrier is counted on the device by the kernel that meets it
("misfit"). Layers that were not deferred wait for that count at once and repeat the tensor with a better
reference or a wider type (E5M2 for E4M3, BF16 at half the rate in the end), so their results are always
exact. Deferred layers run ahead: results of a step with misfits must not be used, and ``misfits`` says so
once per step.

This module is cheap to import; without Triton, or on the reference backend, everything here does nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from fp4core.ops.carrier_groups import Group, Misfit, Reading

_GROUPS = "fp4core.ops.carrier_groups"
_ENCODE = "fp4core.ops.carrier_encode"


def _groups(model: nn.Module) -> list[Group]:
    """The model's groups so far; none before the backend was first used."""
    module = sys.modules.get(_GROUPS)
    return [] if module is None else module.groups(model)


def defer(model: nn.Module, deferred: bool = True) -> None:
    """Let (or stop letting) the model's linears run ahead of the misfit counts; see the module's text."""
    from fp4core.ops import carrier_groups

    carrier_groups.set_deferred(model, deferred)


def misfits(model: nn.Module) -> list[Misfit]:
    """Tensors of the last step whose blocks did not fit their carriers; empty when the step is exact.

    Synchronises once. The repeated step checks every tensor as it is made (a new reference, a wider type,
    BF16), so one repetition suffices; it is slower. Call it after backward and before the optimizer.
    """
    found = _groups(model)
    return sys.modules[_GROUPS].read(found) if found else []


def reading(model: nn.Module) -> Reading | None:
    """``misfits`` in two parts, for a caller that lets the device go on meanwhile; None without encodings.

    Queues a copy of the counts and their verdict on the device, ``flag``. ``misfits()`` of what is returned
    then waits for that copy, not for what was queued after it; it must come before the next forward pass.
    """
    found = _groups(model)
    return sys.modules[_GROUPS].Reading(found) if found else None


def encode_weights(model: nn.Module) -> None:
    """Forget the encoded weights: the next forward pass encodes them again.

    Needed after a change that no version counter shows: a resharded FSDP2 parameter, ``param.data = ...``.
    Under torch.distributed encodings are kept between micro-batches only after this was called in the present
    step.
    """
    module = sys.modules.get(_ENCODE)
    if module is not None:
        module.new_epoch()


def release_weights(model: nn.Module) -> int:
    """Free whole weights for which their encodings stand in until the next ``encode_weights``; bytes freed.

    For parameters that somebody fills again before they are read, as FSDP2 does when it gathers: their
    storage is emptied. Weights that a route keeps in BF16, or that were not encoded yet, stay as they are.
    """
    module = sys.modules.get(_ENCODE)
    return 0 if module is None else module.release(sys.modules[_GROUPS].linears(model))


def memory(model: nn.Module) -> int:
    """Bytes of encoded weights that the model's layers keep on the device."""
    return sum(g.weights.bytes() for g in _groups(model))


def turn(model: nn.Module) -> None:
    """Begin a new window of steps: plans hold what the present and the last window have seen.

    Call it every few hundred steps, between steps: contractions on BF16 carriers, or on a slower pair of FP8
    types, return to faster ones where all that the last window saw would leave them room.
    """
    found = _groups(model)
    if found:
        sys.modules[_GROUPS].turn(found)


def misfit_views(model: nn.Module) -> dict[str, int]:
    """Operand name ("dy_row", ...) -> tensors found not to fit when checked, over all layers, so far."""
    from fp4core.ops.carrier_plan import VIEW_NAMES

    total: Counter[str] = Counter()
    for g in _groups(model):
        total.update(dict(zip(VIEW_NAMES, g.misfits)))
    return {name: count for name, count in total.items() if count}


def counters(model: nn.Module) -> dict[str, int]:
    """What exactness cost so far, for the training metrics.

    Returns: ``misfits`` tensors found not to fit when checked, ``replays`` steps that were repeated, and the
    number of contractions now on ``fp8`` and ``bf16`` carriers among those that could use FP8.
    """
    total: Counter[str] = Counter(misfits=0, replays=0, fp8=0, bf16=0)
    for g in _groups(model):
        total["misfits"] += sum(g.misfits)
        total["replays"] += g.replays
        for kinds in g.plan.contraction_kinds().values():
            total["bf16" if "bf16" in kinds else "fp8"] += 1
    return dict(total)
