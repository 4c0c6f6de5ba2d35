"""The boundaries between a block's matrix products: fused where one kernel can do them, in series elsewhere.

A boundary turns what one product wrote into what the next ones read. Three schedules, all of them with equal
results, and equal carriers but for the rows that "fused" scales (``gradient_scales``):

    serial   the arithmetic writes BF16, the producers read it
    fused    the fastest on an H200 (NOTES.md), the default. One kernel does the arithmetic and makes the
             views of activations (the row view forward, the column view of what backward computes again).
             It makes those of gradients too behind attention, and behind SiLU where ``warp_tiles`` can;
             elsewhere that kernel has too many registers, and gradients go to the producers
    single   one kernel per boundary where every view is of one MX format

Formats whose scales wait for a tensor's or stripe's maximum are done in series under every schedule. Shapes:
T tokens, K hidden, F ffn features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from fp4core.kernels import fused_norm, fused_rope, fused_silu, row_scale
from fp4core.kernels.fused_rope_joint import rope_joint_backward
from fp4core.kernels.fused_swiglu import swiglu_backward
from fp4core.kernels.producers import CARRIERS, View
from fp4core.kernels.warp_tiles import takes
from fp4core.ops.carrier_encode import encode, encode_gradients, settled, view_of
from fp4core.ops.carrier_gemm import Carrier
from fp4core.ops.carrier_groups import Group
from fp4core.ops.carrier_plan import DY_COL, DY_ROW, WIDEST, X_COL, X_ROW, constant_of, is_mx

_BF16 = torch.bfloat16
Made = TypeVar("Made")


SCHEDULES = ("serial", "fused", "single")
_SCHEDULE = ["fused"]


@contextmanager
def schedule(name: str) -> Iterator[None]:
    """Within it every boundary is done as ``name`` says, one of ``SCHEDULES``: for benchmarks and tests."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule: got {name!r}, needed one of {', '.join(SCHEDULES)}")
    before, _SCHEDULE[0] = _SCHEDULE[0], name
    try:
        yield
    finally:
        _SCHEDULE[0] = before


def _mx_activations(g: Group, view: int) -> bool:
    """Whether the kernel that computes an activation also makes this view of it."""
    op = g.operands[view]
    return _SCHEDULE[0] != "serial" and is_mx(op) and op.rounding == "nearest"


def _mx_gradients(g: Group, *schedules: str) -> bool:
    row, col = g.operands[DY_ROW], g.operands[DY_COL]
    mx = is_mx(row) and row.format == col.format and col.rounding == "nearest"
    return mx and _SCHEDULE[0] in (schedules or ("single",))


def _carrier(g: Group, view: int, data: Tensor) -> Carrier:
    # called where the data is made: settling may move the reference for the steps to come
    return Carrier(data, g.plan.refs[view], constant_of(g.operands[view]))


def _view(g: Group, view: int, fused: bool) -> View | None:
    return view_of(g, view) if fused else None


@functools.cache
def _unread_state(device: torch.device) -> Tensor:
    """State of a BF16 view that everything fits: its reference is 0, what is noted in it nobody asks for."""
    return torch.zeros(4, dtype=torch.int32, device=device)


def _scales_gradients(g: Group) -> bool:
    return _SCHEDULE[0] == "fused" and "dgrad" in g.plan.mx


def gradient_scales(g: Group, *grads: Tensor, outliers: Tensor | None = None) -> Tensor | None:
    """Int32 [T] of ``row_scale.row_scales``, by which a group's row operand of gradients is scaled, or None.

    One reference then spans a token's own gradient instead of all tokens'; only FP8 carriers need one.

    Args:
        grads: the gradient [T, N], N a multiple of 128, or dQ, dK, dV [B, heads, S, 128].
        outliers: list for tokens that no FP8 carrier holds beside the others.
    """
    if not _scales_gradients(g):
        return None
    if grads[0].dim() == 2:
        grads = (grads[0].unflatten(1, (-1, 128)).transpose(0, 1)[None],)
    into = None if outliers is None else g.state[DY_ROW]
    return row_scale.row_scales(*grads, outliers=outliers, state=into, widest=WIDEST)


def norm_forward(
    g: Group, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Carrier, Tensor]:
    """(x + delta, row operand of its RMSNorm, rstd): the input of a group's Fprop."""
    if not _mx_activations(g, X_ROW):
        total, y, rstd = fused_norm.norm_forward(x, delta, weight, eps, None, None)
        return total, encode(g, y, X_ROW, None, None, g.producers[0])[0], rstd

    def make() -> tuple[Tensor, Carrier, Tensor]:
        view = view_of(g, X_ROW)
        total, row, rstd = fused_norm.norm_forward(x, delta, weight, eps, view, g.state[X_ROW])
        return total, _carrier(g, X_ROW, row), rstd

    return settled(g, [X_ROW], make)


def norm_backward(
    g: Group,
    before: Group | None,
    dy: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    rstd: Tensor,
    state: Tensor,
    scales: Tensor | None = None,
) -> tuple[Tensor, Carrier, list[Carrier], list[Carrier], Tensor]:
    """(dx, column operand of the norm's output, row and column operands of dx for ``before``, dweight).

    ``before``: the group whose output gradient dx is (the projection under the residual), or None.
    ``scales``: the rows of dy come times these, and those of dx's row operand leave times these.
    """
    y_fused = _mx_activations(g, X_COL)
    d_fused = before is not None and _mx_gradients(before)

    def make() -> tuple:
        stochastic = d_fused and before.operands[DY_ROW].rounding == "stochastic"
        dx, y, row, col, dw = fused_norm.norm_backward(
            dy,
            x,
            residual,
            weight,
            rstd,
            _view(g, X_COL, y_fused),
            _view(before, DY_ROW, d_fused),
            _view(before, DY_COL, d_fused),
            (
                g.state[X_COL] if y_fused else None,
                before.state[DY_ROW] if d_fused else None,
                before.state[DY_COL] if d_fused else None,
            ),
            (state, before.producers[0] + DY_ROW) if stochastic else None,
            scales,
        )
        if y_fused:
            y = _carrier(g, X_COL, y)
        if d_fused:
            row, col = [_carrier(before, DY_ROW, row)], [_carrier(before, DY_COL, col)]
        return dx, y, row, col, dw

    def checked() -> tuple:
        return settled(g, [X_COL], make) if y_fused else make()

    dx, y, row, col, dw = settled(before, [DY_ROW, DY_COL], checked) if d_fused else checked()
    if not y_fused:
        y = encode(g, y, None, X_COL, None, g.producers[0])[1]
    if before is not None and not d_fused:
        row, col = encode_gradients(before, [dx], state, True, True, scales)
    return dx, y, row or [], col or [], dw


@dataclass(frozen=True)
class Outliers:
    """Rows of a row operand that were set apart (``row_scale``), for the product that makes them.

    Attributes:
        listed: int32 [1 + n] of ``row_scale.outlier_list``.
        rows: BF16 carrier [T, K], of which only the listed rows are filled; not scaled.
        scales: int32 [T] of all rows, zero where listed until ``complete``.
    """

    listed: Tensor
    rows: Carrier
    scales: Tensor

    def complete(self, product: Tensor, w: Carrier) -> None:
        """Fill the listed rows of ``product`` [T, D], the other rows' A B^T with B ``w``; scales become 1."""
        alpha = self.rows.constant * w.constant * 2.0**w.ref
        row_scale.multiply_outliers(self.rows.data, w.data, alpha, self.listed, self.scales, product)


def rope_backward(
    g: Group, grads: Sequence[Tensor], cos: Tensor, sin: Tensor, state: Tensor
) -> tuple[list[Carrier], list[Carrier], Tensor | None, Outliers | None]:
    """Operands of (dQ, dK, dV) [B, heads, S, 128] rotated back by FP32 cos, sin [S, 64], for the q, k, v
    group, and the row operand's scales (``gradient_scales``), which the rows of dX come times until
    ``norm_backward`` takes them back.

    Last the rows that are not in the row operand, where the plan sets some apart.
    """
    t = grads[0].shape[0] * grads[0].shape[2]
    widths = [d.shape[1] * d.shape[3] for d in grads]

    def views(
        row: View,
        col: View | None,
        rows: Tensor,
        cols: Tensor | None,
        states: tuple[Tensor, Tensor],
        scales: Tensor | None,
        outliers: bool = False,
    ) -> None:
        at = 0
        table = fused_rope.rope_table(cos, sin, planes=False)
        for i, (d, width) in enumerate(zip(grads, widths)):
            fused_rope.rope_backward(
                d,
                table,
                rotate=i < 2,
                row=row,
                col=col,
                row_out=rows[:, at : at + width],
                col_out=None if cols is None else cols[at : at + width],
                states=states,
                sr=(state, g.producers[i] + DY_ROW) if row.rounding == "stochastic" else None,
                scales=scales,
                outliers=outliers,
            )
            at += width

    def set_apart(listed: Tensor, scales: Tensor) -> Outliers:
        row = replace(view_of(g, DY_ROW), carrier="bf16")
        rows = grads[0].new_empty((t, sum(widths)))
        unread = _unread_state(rows.device)
        views(row, None, rows, None, (unread, unread), scales, outliers=True)
        return Outliers(listed, Carrier(rows, 0, constant_of(g.operands[DY_ROW])), scales)

    def make() -> tuple[list[Carrier], list[Carrier], Tensor | None, Outliers | None]:
        row, col = view_of(g, DY_ROW), view_of(g, DY_COL)
        listed = None
        if g.plan.set_apart and row.carrier != "bf16" and _scales_gradients(g):
            listed = row_scale.outlier_list(t, grads[0].device)
        scales = gradient_scales(g, *grads, outliers=listed)
        rows = grads[0].new_empty((t, sum(widths)), dtype=CARRIERS[row.carrier])
        cols = grads[0].new_empty((sum(widths), t), dtype=CARRIERS[col.carrier])
        states = (g.state[DY_ROW], g.state[DY_COL])
        if takes(row, col) and widths[1] == widths[2]:
            planes = fused_rope.rope_table(cos, sin, planes=True)
            producers = [p + DY_ROW for p in g.producers]
            sr = (state, *producers) if row.rounding == "stochastic" else None
            rope_joint_backward(
                grads, planes, row=row, col=col, rows=rows, cols=cols, states=states, sr=sr, scales=scales
            )
        else:
            views(row, col, rows, cols, states, scales)
        made = [_carrier(g, DY_ROW, rows)], [_carrier(g, DY_COL, cols)], scales
        return *made, None if listed is None else set_apart(listed, scales)

    if _mx_gradients(g, "fused", "single"):  # little arithmetic, so one kernel is the faster one here
        g.plan.can_set_apart = _scales_gradients(g)
        return settled(g, [DY_ROW, DY_COL], make)
    scales = gradient_scales(g, *grads)
    table = fused_rope.rope_table(cos, sin, planes=False)
    flat = [d.new_empty((t, width)) for d, width in zip(grads, widths)]
    for i, (d, out) in enumerate(zip(grads, flat)):
        fused_rope.rope_backward(
            d, table, rotate=i < 2, row=None, col=None, row_out=out, col_out=None, states=None, sr=None
        )
    return *encode_gradients(g, flat, state, True, True, scales), scales, None


def silu_forward(g: Group, gate: Tensor, up: Tensor) -> Carrier:
    """Row operand of silu(gate) up, the input of the down group's Fprop."""
    if not _mx_activations(g, X_ROW):
        h = fused_silu.silu_forward(gate, up, None, None)
        return encode(g, h, X_ROW, None, None, g.producers[0])[0]

    def make() -> Carrier:
        return _carrier(g, X_ROW, fused_silu.silu_forward(gate, up, view_of(g, X_ROW), g.state[X_ROW]))

    return settled(g, [X_ROW], make)


def _silu_gradients(
    down: Group, taken: list[Tensor], gate: Tensor, up: Tensor, scales: Tensor | None
) -> tuple[list[Tensor], Carrier]:
    """([dgate, dup] in BF16, column operand of h for ``down``); other arguments as for ``silu_backward``."""
    dh = taken.pop()
    if not _mx_activations(down, X_COL):
        dgate, dup, h = fused_silu.silu_gradients(dh, gate, up, None, None, scales)
        del dh
        return [dgate, dup], encode(down, h, None, X_COL, None, down.producers[0])[1]

    def make() -> tuple[Tensor, Tensor, Carrier]:
        view, into = view_of(down, X_COL), down.state[X_COL]
        dgate, dup, h = fused_silu.silu_gradients(dh, gate, up, view, into, scales)
        return dgate, dup, _carrier(down, X_COL, h)

    dgate, dup, h = settled(down, [X_COL], make)
    return [dgate, dup], h


def silu_backward(
    g: Group,
    down: Group,
    taken: list[Tensor],
    gate: Tensor,
    up: Tensor,
    state: Tensor,
    use: Callable[[Carrier], Made],
    scales: Tensor | None = None,
) -> tuple[list[Carrier], list[Carrier], Made]:
    """(row operands, column operands of [dgate | dup] for their group, what ``use`` made of h).

    Args:
        taken: dh alone, taken out of the list, so that its memory is free when dgate and dup are encoded.
        use: takes the column operand of h for ``down`` (its Wgrad); for the same reason called as early as
            the schedule allows.
        scales: of ``gradient_scales``: rows of dh come times these, and those of the row operand leave so.
    """
    made = None
    if _silu_views(g, down) is not None:
        made = settled(
            g,
            [DY_ROW, DY_COL],
            lambda: settled(down, [X_COL], lambda: _silu_at_once(g, down, taken[0], gate, up, state, scales)),
        )
    if made is None:
        gradients, h = _silu_gradients(down, taken, gate, up, scales)
        used = use(h)
        del h
        rows, cols = encode_gradients(g, gradients, state, True, True, scales)
        return rows, cols, used
    taken.clear()
    rows, cols, h = made
    return rows, cols, use(h)


def _silu_views(g: Group, down: Group) -> tuple[View, View, View] | None:
    """Row and column view of [dgate | dup] and that of h, where the schedule has one kernel for all."""
    if not (_mx_gradients(g, "fused", "single") and _mx_activations(down, X_COL)):
        return None
    views = view_of(g, DY_ROW), view_of(g, DY_COL), view_of(down, X_COL)
    return views if _SCHEDULE[0] == "single" or takes(*views) else None


def _silu_at_once(
    g: Group, down: Group, dh: Tensor, gate: Tensor, up: Tensor, state: Tensor, scales: Tensor | None
) -> tuple[list[Carrier], list[Carrier], Carrier] | None:
    """``silu_backward``'s operands by one kernel; None where the plan has changed to types it cannot make."""
    views = _silu_views(g, down)
    if views is None:
        return None
    producers = (g.producers[0] + DY_ROW, g.producers[1] + DY_ROW)
    sr = (state, *producers) if views[0].rounding == "stochastic" else None
    states = (g.state[DY_ROW], g.state[DY_COL], down.state[X_COL])
    if takes(*views):
        rows, cols, h = swiglu_backward(dh, gate, up, *views, states, sr, scales)
    elif scales is None:
        rows, cols, h = fused_silu.silu_backward(dh, gate, up, *views, states, sr)
    else:
        raise ValueError("silu_backward: got scaled rows in one kernel; needed schedule 'fused'")
    return [_carrier(g, DY_ROW, rows)], [_carrier(g, DY_COL, cols)], _carrier(down, X_COL, h)
