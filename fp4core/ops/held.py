"""Tensor maxima that are sampled now and then and held in between: the outer scale of ``ue5m3`` operands.

    reference(step) = max |x| of the step             on steps 1, 1 + interval, 1 + 2 interval, ...
    reference(step) = the last sampled one            on the steps between

One reference each for X, W and dY of every linear layer, sample and hold and no history (arXiv 2609.02846,
github.com/MrHuff/ue5m3-fp4, docs/numerics.md). On a sampling step every call quantises with its own
tensor's maximum, and what is held afterwards is the largest of the step's micro-batches and ranks. A layer
that saw only zeros, or none of whose samples exists yet, uses each tensor's own maximum. A maximum that is
infinite or NaN is never held: the trainer leaves the weights alone after such a step, and what was held
before stays (the NaN itself still reaches the loss, through its own block).

A ``scale_target`` T other than the format's 448 maps the largest block to T: s = UE5M3(T amax_b / g) and
outer g / (6 T). That is the format's own rule under the reference FP32(g 448 / T), so quantisers know
nothing of it.

The numbers are state of the run, kept in its checkpoints: without them a resumed run would sample at once.
The custom ops that use them take no such argument, so a table is found by its number, which is part of the
layer's ``spec``. A trainer calls ``begin`` and ``finish`` around each step; nobody else needs to.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp4core import formats
from fp4core.formats import E4M3_MAX
from fp4core.ops import spec as specs
from fp4core.recipe import Operand

X, W, DY = range(3)
_OPERANDS = ("x", "w", "dy")
_numbers = itertools.count()
_tables: weakref.WeakValueDictionary[int, HeldAmax] = weakref.WeakValueDictionary()


class HeldAmax:
    """References of one model: FP32 [layers, 3] (x, w, dy); 0 where nothing was seen.

    Args:
        layers: rows of the table, block x 8 + linear.
        interval: steps from one sample to the next.
    """

    def __init__(self, layers: int, interval: int) -> None:
        self.layers, self.interval = layers, interval
        self.number = next(_numbers)
        self.epoch = 0  # grows with every step begun: encodings made under another reference are stale
        self.sampling = False
        self.gradient_scale = 1.0
        self._held = torch.zeros(layers, 3)
        self._seen = torch.zeros(layers, 3)
        _tables[self.number] = self

    def begin(self, step: int, gradient_scale: float = 1.0) -> None:
        """Start optimizer step ``step`` (1-based), or start it again.

        ``gradient_scale``: what the trainer multiplies every loss by beyond the mean over the global batch
        (the number of ranks, where gradients are averaged over them). dY's maxima are kept without it, so
        that a run goes on in another world size.
        """
        self.epoch += 1
        self.gradient_scale = gradient_scale
        self.sampling = (step - 1) % self.interval == 0
        if self.sampling:
            self._seen = torch.zeros_like(self._seen)

    def finish(self, largest: Callable[[Sequence[float]], Sequence[float]] | None = None) -> None:
        """End the step; a sampled one becomes the reference. ``largest`` takes the maximum over ranks."""
        if self.sampling:
            # infinity orders above every number on every rank, which NaN does not
            values = [v if math.isfinite(v) else math.inf for v in self._seen.flatten().tolist()]
            if largest is not None:
                values = largest(values)
            seen = torch.tensor(values, dtype=torch.float32, device=self._held.device).view(-1, 3)
            self._held = torch.where(seen.isinf(), self._held, seen)
        self.sampling = False

    def reference(self, x: Tensor, row: int, column: int, factor: float) -> Tensor:
        """FP32 0-dim reference of BF16 tensor ``x``, times ``factor``; notes its maximum on a sampling
        step."""
        if self._held.device != x.device:
            self._held, self._seen = self._held.to(x.device), self._seen.to(x.device)
        held, scale = self._held[row, column], self.gradient_scale if column == DY else 1.0
        if self.sampling:
            own = amax(x)
            self._seen[row, column] = torch.maximum(self._seen[row, column], own / scale)
            return own * factor
        return torch.where(held == 0, amax(x), held * scale) * factor

    def share(self, rows: Sequence[int], column: int) -> None:
        """Give all rows what the first one saw: linears of one input, which was looked at once."""
        if self.sampling and len(rows) > 1:
            self._seen[list(rows[1:]), column] = self._seen[rows[0], column]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; every number exact."""
        return {"interval": self.interval, "operands": list(_OPERANDS), "held": self._held.tolist()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Raises ValueError when it is another model's or another interval's."""
        rows = state.get("held")
        if state.get("interval") != self.interval or not isinstance(rows, list) or len(rows) != self.layers:
            raise ValueError(
                f"held amax: got {len(rows) if isinstance(rows, list) else 'no'} rows sampled every "
                f"{state.get('interval')} steps, needed {self.layers} rows every {self.interval}"
            )
        self._held = torch.tensor(rows, dtype=torch.float32, device=self._held.device).view(-1, 3)


def amax(x: Tensor) -> Tensor:
    """FP32 0-dim max |x|; NaN where x holds one."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return x.abs().amax().float()


def reference(x: Tensor, op: Operand, spec: str, producer: int, column: int) -> Tensor | None:
    """The reference amax to quantise ``x``, rounded to BF16, with; None where the format takes its own.

    Args:
        x: the tensor, BF16 or, of a weight, FP32.
        op: its operand. spec: of the layer. producer: the layer's producer id.
        column: ``X``, ``W`` or ``DY``.
    """
    if op.format == "bf16" or not formats.get(op.format).sampled_amax:
        return None
    x = x.to(torch.bfloat16)
    factor = 1.0 if op.scale_target is None else E4M3_MAX / op.scale_target
    number = specs.table(spec)
    table = None if number is None else _tables.get(number)
    if table is not None:
        return table.reference(x, producer // specs.VIEWS, column, factor)
    return None if factor == 1.0 else amax(x) * factor


def share_x(spec: str, producers: Sequence[int]) -> None:
    """After ``reference`` of an X that several linears take: all of them have seen it."""
    number = specs.table(spec)
    table = None if number is None else _tables.get(number)
    if table is not None:
        table.share([p // specs.VIEWS for p in producers], X)


def epoch(spec: str) -> int:
    """Changes whenever references of the layer may have changed; 0 where it holds none."""
    number = specs.table(spec)
    table = None if number is None else _tables.get(number)
    return 0 if table is None else table.epoch


def held_amax(model: nn.Module) -> HeldAmax | None:
    """The model's table, or None for a route that holds nothing."""
    return getattr(model, "held_amax", None)
