"""From tensors to carriers: the producers of ``fp4core.kernels`` under a group's plan.

Every function here loops until the blocks fit when the group's mode says so (``carrier_groups``), and gives
``carrier_gemm.Carrier`` operands, contraction axis last. Shapes: T tokens, K input and N output features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fp4core import formats
from fp4core.kernels.producers import CARRIERS, SR, Produced, Scaling, View, produce, scaling
from fp4core.ops import held
from fp4core.ops.carrier_gemm import Carrier, Weights
from fp4core.ops.carrier_groups import Group, groups_of
from fp4core.ops.carrier_plan import DY_COL, DY_ROW, W_COL, W_ROW, X_COL, X_ROW, constant_of, is_mx
from fp4core.ops.quantize import SRKey, quantize
from fp4core.recipe import Operand

_TRIES = 5  # a new reference, rows set apart, a wider type, BF16; one to spare
_EPOCH = [0]


def view_of(g: Group, view: int) -> View:
    """What the producer should make of a view under the group's present plan.

    A column view in BF16 is not transposed: its product takes either layout, and the exchange costs time.
    """
    op: Operand = g.operands[view]
    kind = g.plan.kinds[view]
    return _view(op.format, kind, op.rounding, op.hadamard, kind != "bf16" or view not in (DY_COL, X_COL))


_view = functools.lru_cache(maxsize=None)(View)


def carrier_of(p: Produced, ref: int) -> Carrier:
    """A produced view as an operand, without padding."""
    fmt = formats.get(p.view.format)
    data = p.data if p.view.transposed else p.data.t()
    data = data[: p.shape[0], : p.shape[1]] if data.shape != p.shape else data
    constant = fmt.outer_constant if fmt.outer == "constant" else 1.0
    return Carrier(data, ref, constant, p.outer)


def settled(g: Group, views: Sequence[int], make: Callable[[], object]) -> object:
    """``make()`` until the views fit their carriers, or once where the group's mode defers the check."""
    for _ in range(_TRIES):
        made = make()
        if not g.must_check(views) or g.settle(views):
            return made
    names = ", ".join(g.operands[v].format for v in views)
    raise ValueError(
        f"carrier: got block exponents beyond what BF16 holds ({names}, producers {g.producers}); needed "
        "magnitudes between 2^-100 and 2^100"
    )


def _plain(x: Tensor, view: int) -> Carrier:
    """A BF16 operand that is not quantised."""
    return Carrier(x if view in (X_ROW, DY_ROW, W_ROW) else x.t())


def _held_scaling(g: Group, x: Tensor, view: int, producer: int) -> Scaling | None:
    """Scales of a format whose tensor maximum is sampled and held; None where it takes its own."""
    column = held.W if view in (W_ROW, W_COL) else held.X if view in (X_ROW, X_COL) else held.DY
    amax = held.reference(x, g.operands[view], g.spec, producer, column)
    if amax is None:
        return None
    where = "row" if view in (X_ROW, DY_ROW, W_ROW) else "col"
    return scaling(view_of(g, view), where, amax.reshape(1, 1))


def _stochastic_column(g: Group, x: Tensor, view: int, state: Tensor, producer: int) -> Carrier:
    """A stochastic MX column view, which no kernel makes: the reference's codes, decoded to BF16."""
    op = g.operands[view]
    seed, step, token = state.tolist()
    key = SRKey(seed, step, producer, token * x.shape[1])
    rotation = None if op.hadamard == "none" else op.hadamard
    q = quantize(
        x, op.format, rounding="stochastic", hadamard=rotation, key=key, transposed=True, backend="reference"
    )
    fmt = formats.get(op.format)
    constant, outer = (
        (fmt.outer_constant, None) if fmt.outer == "constant" else (1.0, q.outer_scale.reshape(-1))
    )
    return Carrier(q.decode_blocks().to(torch.bfloat16), 0, constant, outer)


def encode(
    g: Group,
    x: Tensor,
    row: int | None,
    col: int | None,
    state: Tensor | None = None,
    producer: int = 0,
    scales: Tensor | None = None,
) -> tuple[Carrier | None, Carrier | None]:
    """Row and column carriers of BF16 [T, F] as views ``row`` and ``col`` of the group, from one load.

    ``producer`` is the linear's id; stochastic views add their own number to it. ``scales``: of
    ``row_scale.row_scales``; the row carrier, of an MX format, is then of scaled rows.
    """
    if col is not None and g.operands[col].rounding == "stochastic" and is_mx(g.operands[col]):
        column = _stochastic_column(g, x, col, state, producer + col)
        return (None if row is None else encode(g, x, row, None, state, producer, scales)[0]), column
    asked = [v for v in (row, col) if v is not None]
    quantised = [v for v in asked if g.operands[v].format != "bf16"]
    _no_plain_rotation(g, asked)

    def make() -> tuple[Carrier | None, Carrier | None]:
        found = {v: _plain(x, v) for v in asked if v not in quantised}
        r = row if row in quantised else None
        c = col if col in quantised else None
        if r is not None or c is not None:
            drawn = any(v is not None and g.operands[v].rounding == "stochastic" for v in (r, c))
            sr = SR(state, producer + (r or 0), producer + (c or 0)) if drawn else None
            made = produce(
                x,
                row=None if r is None else view_of(g, r),
                col=None if c is None else view_of(g, c),
                row_state=None if r is None else g.state[r],
                col_state=None if c is None else g.state[c],
                row_scaling=None if r is None else _held_scaling(g, x, r, producer),
                col_scaling=None if c is None else _held_scaling(g, x, c, producer),
                sr=sr,
                scales=scales,
            )
            found |= {
                v: carrier_of(p, _ref(g, v)) for v, p in zip((r, c), made) if v is not None and p is not None
            }
        return found.get(row), found.get(col)

    return settled(g, quantised, make)


def _ref(g: Group, view: int) -> int:
    return g.plan.refs[view]


def _no_plain_rotation(g: Group, views: Sequence[int]) -> None:
    for v in views:
        if g.operands[v].format == "bf16" and g.operands[v].hadamard != "none":
            raise ValueError(
                "carrier: got a BF16 operand with a Hadamard rotation; needed a quantised format, or backend="
                "'reference'"
            )


def encode_gradients(
    g: Group, grads: list[Tensor], state: Tensor, rows: bool, cols: bool, scales: Tensor | None = None
) -> tuple[list[Carrier], list[Carrier]]:
    """Carriers of the output gradients [T, N_i] of a group's linears; ``scales`` as for ``encode``.

    MX row views of several linears lie side by side in one operand [T, sum N], so that Dgrad is one product;
    others, whose outer scales differ, and column carriers [N_i, T] stay one per linear. Gradients that are
    encoded one by one leave the list as they are done, so that their memory is free for the next one's views.
    """
    row, col = (DY_ROW if rows else None), (DY_COL if cols else None)
    ragged = any(n % 32 for dy in grads for n in dy.shape)
    apart = not is_mx(g.operands[DY_ROW]) or g.operands[DY_COL].rounding == "stochastic" or ragged
    if len(grads) == 1 or not rows or apart:
        pairs = [encode(g, grads.pop(0), row, col, state, p, scales) for p in g.producers]
        return [r for r, _ in pairs if r is not None], [c for _, c in pairs if c is not None]
    views = [v for v in (row, col) if v is not None]

    def make() -> tuple[list[Carrier], list[Carrier]]:
        t = grads[0].shape[0]
        total = sum(dy.shape[1] for dy in grads)
        joint = grads[0].new_empty((t, total), dtype=CARRIERS[g.plan.kinds[DY_ROW]])
        made_cols, at = [], 0
        for dy, producer in zip(grads, g.producers):
            sr = SR(state, producer + DY_ROW) if g.operands[DY_ROW].rounding == "stochastic" else None
            _, c = produce(
                dy,
                row=view_of(g, DY_ROW),
                col=None if col is None else view_of(g, DY_COL),
                row_state=g.state[DY_ROW],
                col_state=None if col is None else g.state[DY_COL],
                sr=sr,
                row_out=joint[:, at : at + dy.shape[1]],
                scales=scales,
            )
            at += dy.shape[1]
            if c is not None:
                made_cols.append(carrier_of(c, _ref(g, DY_COL)))
        return [Carrier(joint, _ref(g, DY_ROW), constant_of(g.operands[DY_ROW]))], made_cols

    return settled(g, [v for v in views if g.operands[v].format != "bf16"], make)


def encode_weights(g: Group, weights: Sequence[Tensor]) -> Weights:
    """The group's encoded weights; encoded again only when a parameter, the plan or the epoch changed.

    A parameter's version counter tells in-place updates. Under torch.distributed it does not (a resharded
    parameter is refilled behind its back), so there encodings are kept only between calls of ``new_epoch``.
    Weights that ``release`` has emptied are not read. RuntimeError where nothing stands in for them.
    """
    views = (W_ROW, W_COL)
    kinds = tuple((g.plan.kinds[v], g.plan.refs[v]) for v in views)
    key = (*_now(g), tuple(_place(w) for w in weights))
    if not all(w.data_ptr() for w in weights):
        return _standing_in(g, weights, kinds)
    if g.weights.key == (key, kinds) and _may_keep():
        return g.weights

    def make() -> Weights:
        rows, cols = [], []
        side = _joint_columns(g, weights)
        stack = _joint_rows(g, weights)
        at = 0
        for w, producer in zip(weights, g.producers):
            n = w.shape[0]
            r, c = _encode_weight(
                g,
                w.detach(),
                producer,
                None if stack is None else stack[at : at + n],
                None if side is None else side[:, at : at + n],
            )
            rows.append(r)
            cols.append(c)
            at += n
        if side is not None:
            cols = [Carrier(side, cols[0].ref, cols[0].constant)]
        joint = None if stack is None else Carrier(stack, rows[0].ref, rows[0].constant)
        return Weights(rows=rows, joint=joint, columns=cols)

    made: Weights = settled(g, [v for v in views if g.operands[v].format != "bf16"], make)
    made.key = (key, tuple((g.plan.kinds[v], g.plan.refs[v]) for v in views))
    if _may_keep():
        g.weights = made
        g.watch(weights)
    return made


def _now(g: Group) -> tuple[int, int]:
    return _EPOCH[0], held.epoch(g.spec)


def _place(w: Tensor) -> tuple:
    """Where a parameter is, its version and its shape."""
    return (w.data_ptr(), w._version, w.dtype, *w.shape)


def release(layers: Sequence[nn.Module]) -> int:
    """Empty the storage of these linears' weights whose encodings stand in for them; bytes freed.

    For whole weights that somebody else fills again before ``new_epoch``, as FSDP2 does with gathered
    parameters: each must have a storage of its own. Weights that are not encoded in this epoch, or whose
    encoding is a view of them (a recipe with BF16 weights), stay.
    """
    weights = {_place(m.weight): m.weight for m in layers if m.weight.data_ptr()}
    if not weights:  # every micro-step but the first
        return 0
    freed = 0
    for g in groups_of(layers):
        if not g.weights.key or not _may_keep():
            continue
        *now, places = g.weights.key[0]
        if tuple(now) != _now(g) or not all(place in weights for place in places):
            continue
        storages = [weights[place].untyped_storage() for place in places]
        addresses = {storage.data_ptr() for storage in storages}
        if addresses.isdisjoint(c.data.untyped_storage().data_ptr() for c in g.weights.carriers()):
            freed += sum(storage.nbytes() for storage in storages)
            for storage in storages:
                storage.resize_(0)
    return freed


def _standing_in(g: Group, weights: Sequence[Tensor], kinds: tuple) -> Weights:
    """The encodings of released weights, widened where the plan has changed: a carrier holds them exactly."""
    made = g.weights
    shapes = tuple(place[2:] for place in made.key[0][2]) if made.key else ()
    if not made.key or made.key[0][:2] != _now(g) or shapes != tuple((w.dtype, *w.shape) for w in weights):
        raise RuntimeError(
            f"carrier: got weights without storage (producers {g.producers}) that no encoding of this epoch "
            "stands in for; fill them first, as FSDP2's unshard() does, then call carrier.encode_weights"
        )
    if made.key[1] != kinds:
        (row, _), (col, _) = kinds
        if made.joint is None:
            joint, rows = None, [_as_kind(c, row) for c in made.rows]
        else:
            joint = _as_kind(made.joint, row)
            parts = joint.data.split([c.data.shape[0] for c in made.rows])
            rows = [dataclasses.replace(joint, data=part) for part in parts]
        columns = [_as_kind(c, col) for c in made.columns]
        key = (made.key[0], kinds)
        g.weights = Weights(key=key, rows=rows, joint=joint, columns=columns, sources=made.sources)
    return g.weights


def _as_kind(c: Carrier, kind: str) -> Carrier:
    """As it is where it has this type, else in BF16, in which either partner's product can be taken."""
    return c if c.data.dtype == CARRIERS[kind] else c.widened()


def _joint_rows(g: Group, weights: Sequence[Tensor]) -> Tensor | None:
    """Room for the row views of all linears in one operand: MX formats, whose outer scale is one constant."""
    if not is_mx(g.operands[W_ROW]) or any(n % 32 for w in weights for n in w.shape):
        return None
    total = sum(w.shape[0] for w in weights)
    return weights[0].new_empty((total, weights[0].shape[1]), dtype=CARRIERS[g.plan.kinds[W_ROW]])


def _joint_columns(g: Group, weights: Sequence[Tensor]) -> Tensor | None:
    """Room for W^T of all linears side by side, where Dgrad is one product: MX formats."""
    if not is_mx(g.operands[W_COL]) or any(n % 32 for w in weights for n in w.shape):
        return None
    total = sum(w.shape[0] for w in weights)
    return weights[0].new_empty((weights[0].shape[1], total), dtype=CARRIERS[g.plan.kinds[W_COL]])


def _encode_weight(
    g: Group, w: Tensor, producer: int, row_out: Tensor | None, col_out: Tensor | None
) -> tuple[Carrier, Carrier]:
    row, col = g.operands[W_ROW], g.operands[W_COL]
    if row == col and row.format == "bf16":
        return _plain(w.to(torch.bfloat16), W_ROW), _plain(w.to(torch.bfloat16), W_COL)
    shared = row == col and formats.get(row.format).two_d and view_of(g, W_ROW) == view_of(g, W_COL)
    if shared and g.plan.kinds[W_ROW] == "bf16" and col_out is None:
        scales = _held_scaling(g, w, W_ROW, producer)
        r, _ = produce(
            w, row=view_of(g, W_ROW), row_state=g.state[W_ROW], row_scaling=scales, row_out=row_out
        )
        rows = carrier_of(r, _ref(g, W_ROW))
        # one array serves both contractions: a BF16 product reads either layout
        return rows, Carrier(rows.data.t(), rows.ref, rows.constant, rows.outer)
    made = produce(
        w,
        row=None if row.format == "bf16" else view_of(g, W_ROW),
        col=None if col.format == "bf16" else view_of(g, W_COL),
        row_state=g.state[W_ROW],
        # one encoding, one state: a shared view reads and records the row view's
        col_state=g.state[W_ROW] if shared else g.state[W_COL],
        row_scaling=None if row.format == "bf16" else _held_scaling(g, w, W_ROW, producer),
        col_scaling=None if col.format == "bf16" else _held_scaling(g, w, W_COL, producer),
        row_out=row_out,
        col_out=col_out,
    )
    r = _plain(w.to(torch.bfloat16), W_ROW) if made[0] is None else carrier_of(made[0], _ref(g, W_ROW))
    c = (
        _plain(w.to(torch.bfloat16), W_COL)
        if made[1] is None
        else carrier_of(made[1], _ref(g, W_ROW if shared else W_COL))
    )
    return r, c


def new_epoch() -> None:
    """Forget every encoded weight: the next forward pass encodes again."""
    _EPOCH[0] += 1


def _may_keep() -> bool:
    return not dist.is_available() or not dist.is_initialized() or _EPOCH[0] > 0


__all__ = [
    "X_COL",
    "X_ROW",
    "carrier_of",
    "encode",
    "encode_gradients",
    "encode_weights",
    "new_epoch",
    "release",
    "view_of",
]
