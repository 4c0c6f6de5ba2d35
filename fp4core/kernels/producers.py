"""Producers: one BF16 load, every view its consumers need.

``produce(x, row=..., col=...)`` reads a BF16 matrix [M, K] once and writes

    row view   [M, K]   blocks along K     the operand of a contraction over K
    col view   [K, M]   blocks along M     transposed, the operand of a contraction over M

in *carriers*: the decoded block values E2M1 x block scale in the narrowest type that holds them exactly, E5M2
or E4M3 after a power-of-two reference (MX formats), BF16 (all formats). Outer scales stay outside:

    decoded value = carrier x 2^ref x outer      (2^ref: MX formats; outer: 1/6, 1, or FP32 on the device)

Nothing is rounded a second time. A block that does not fit its FP8 carrier is counted in the view's state
(``misfits``) and its bytes are unspecified; the caller checks the counter before it trusts the step and
produces wider carriers instead.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fp4core import formats
from fp4core.kernels import mx
from fp4core.kernels._amax import chunk_amax, outer_scales
from fp4core.kernels._dual import dual_kernel
from fp4core.kernels._launch import GROUP, check_matrix, packed_instructions, padded, pointer, round_up, words

CARRIERS = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
STATE_WORDS = 4  # reference exponent, largest maximum, 0x8000 - smallest, misfits


@dataclass(frozen=True)
class View:
    """What a view should hold.

    Attributes:
        format: format name; a 2D format must be the same in both views.
        carrier: "e5m2", "e4m3" (MX formats only) or "bf16".
        rounding: "nearest" or "stochastic" (1D formats; column views only of NV-style formats).
        hadamard: "none", "plain16", "fixed16", "fixed32" (column views of 1D formats).
        transposed: whether a column view is stored as [K, M]; False keeps [M, K] (BF16 carriers, whose GEMM
            takes either), which costs no exchange through shared memory.
    """

    format: str
    carrier: str = "bf16"
    rounding: str = "nearest"
    hadamard: str = "none"
    transposed: bool = True


@dataclass(frozen=True)
class SR:
    """Random state of a stochastic view: ``state`` int64 [3] on the device (seed, step, global index of the
    first token), ``producer`` and ``col_producer`` the producer ids of the row and of the column view."""

    state: Tensor
    producer: int
    col_producer: int = 0


def new_state(views: int, device: torch.device | str, ref: int = 0) -> Tensor:
    """int32 [views, 4] states of MX views, all with reference exponent ``ref``."""
    state = torch.zeros(views, STATE_WORDS, dtype=torch.int32, device=device)
    state[:, 0] = ref
    return state


@functools.lru_cache(maxsize=64)
def _spans(carriers: tuple[str, ...], device: torch.device) -> Tensor:
    return torch.tensor([mx.SPANS[c] for c in carriers], dtype=torch.int32, device=device)


def advance(state: Tensor, carriers: list[str], headroom: int = 2) -> None:
    """Start a new step: references from the maxima seen, then forget what was seen. No synchronisation.

    Args:
        state: int32 [views, 4], overwritten. A view that saw nothing keeps its reference.
        carriers: carrier of each view.
        headroom: steps (factors of two) left above the largest block.
    """
    spans = _spans(tuple(carriers), state.device)
    top = ((state[:, 1] + 127) >> 7) - 127  # exponent of the smallest power of two above the maximum
    ref = (top + headroom - spans[:, 1]).clamp(spans[:, 2], spans[:, 3])
    state[:, 0] = torch.where(state[:, 1] > 0, ref, state[:, 0])
    state[:, 1:] = 0


def rule(name: str) -> str:
    """Kernel name of a format's scale rule (``mx`` rules; ``mx_finer`` is the 2D MX rule)."""
    fmt = formats.get(name)
    return "mx_finer" if fmt.finer_below is not None else fmt.algorithm


def held_range(carrier: str, ref: int) -> tuple[int, int]:
    """Smallest and largest block exponent k that a carrier with reference exponent ``ref`` holds exactly.

    Empty (largest below smallest) for a reference outside the carrier's own range.
    """
    low, high, first, last = mx.SPANS[carrier]
    return (ref + low, ref + high) if first <= ref <= last else (0, -1)


def is_mx(name: str) -> bool:
    """True for formats with power-of-two block scales, the ones FP8 carriers can hold."""
    return formats.get(name).block_scale == "e8m0"


@dataclass(frozen=True)
class Produced:
    """One view, ready for a GEMM.

    Attributes:
        data: the carrier, [rows, contraction]; padded with zeros to multiples of 32 in both.
        view: what it holds.
        shape: (rows, contraction) without padding.
        outer: FP32 outer scales on the device ([1], or one per 256 rows); None for MX formats, whose constant
            is ``formats.get(view.format).outer_constant``.
        state: int32 [4] of an MX view; state[0] is the reference exponent.
    """

    data: Tensor
    view: View
    shape: tuple[int, int]
    outer: Tensor | None = None
    state: Tensor | None = None


def _check_view(view: View, where: str) -> None:
    fmt = formats.get(view.format)
    if view.carrier not in CARRIERS:
        raise ValueError(f"produce: got carrier {view.carrier!r}; needed one of {sorted(CARRIERS)}")
    if view.carrier != "bf16" and not is_mx(view.format):
        raise ValueError(
            f"produce: got carrier {view.carrier!r} for {view.format!r}, whose block scales have a mantissa; "
            "needed 'bf16'"
        )
    if view.rounding not in ("nearest", "stochastic") or (
        view.rounding == "stochastic" and (fmt.two_d or (where == "col" and is_mx(view.format)))
    ):
        raise ValueError(
            f"produce: got rounding {view.rounding!r} for the {where} view of {view.format!r}; needed "
            "'nearest', or 'stochastic' for a 1D format (column views: NV-style ones)"
        )
    if not view.transposed and (where == "row" or view.carrier != "bf16"):
        raise ValueError(
            f"produce: got transposed=False for the {where} view in {view.carrier!r}; needed a BF16 column "
            "view"
        )
    if view.hadamard != "none" and (where == "row" or fmt.two_d):
        raise ValueError(
            f"produce: got hadamard {view.hadamard!r} for the {where} view of {view.format!r}; needed 'none' "
            "(rotations run along the tokens of a column view of a 1D format)"
        )


@dataclass(frozen=True)
class Scaling:
    """Wide scales of one NV-style view: FP32 ``amax`` ([1], or the chunk grid) and ``outer``."""

    amax: Tensor
    outer: Tensor


def scaling(view: View, where: str, chunks: Tensor, held_amax: Tensor | None = None) -> Scaling:
    """Scales of an NV-style view from the chunk grid of (for rotated views: the rotated) x.

    Args:
        view: the view.
        where: "row" or "col".
        chunks: FP32 grid of ``chunk_amax``.
        held_amax: FP32 [1], replaces the tensor amax of formats with a sampled one unless it is 0.
    """
    fmt = formats.get(view.format)
    if fmt.algorithm == "nv_cta":
        _, outer = outer_scales(chunks, "tensor" if fmt.two_d else where, fmt.outer_divisor)
        return Scaling(chunks, outer)
    if held_amax is not None and fmt.sampled_amax:
        chunks = torch.where(held_amax == 0, chunks.amax(), held_amax).reshape(1, 1)
    return Scaling(*outer_scales(chunks, "tensor", fmt.outer_divisor))


def produce(
    x: Tensor,
    row: View | None = None,
    col: View | None = None,
    *,
    row_state: Tensor | None = None,
    col_state: Tensor | None = None,
    row_scaling: Scaling | None = None,
    col_scaling: Scaling | None = None,
    sr: SR | None = None,
    row_out: Tensor | None = None,
    col_out: Tensor | None = None,
    scales: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Produced | None, Produced | None]:
    """Both views of a matrix from one load.

    Args:
        x: BF16 or FP32 (rounded to BF16) [M, K], contiguous.
        row, col: the views wanted.
        row_state, col_state: int32 [4] of MX views (``new_state``), read for the reference and updated; a
            fresh state with reference 0 is made for a BF16 carrier without one.
        row_scaling, col_scaling: scales of NV-style views; computed from x where left out.
        sr: random state of a stochastic row view.
        row_out, col_out: carriers to write instead of new ones: slices of a larger row-major matrix, so that
            several linears share one operand. Their first elements and strides are multiples of 4 bytes.
        scales: int32 [M] of ``row_scale.row_scales``: the row view, of an MX format in 1D blocks, is of each
            row times its scale.
        tile: how to cut the matrix; None takes ``default_tile``.

    Returns: (row view, column view), None for one not asked for. Dimensions are padded to multiples of 32
        with zeros.

    Raises:
        ValueError: views that the kernels do not make, a missing state or SR, K not a multiple of 16 with
            stochastic rounding.
    """
    check_matrix(x)
    m, k = x.shape
    plan = _plan(
        *(row, col, m, k, x.dtype == torch.float32, sr is not None, scales is not None),
        *(tile, packed_instructions(x.device)),
    )
    shared = plan.constants["SHARED"]
    row_state, row_scaling = _scales(x, row, "row", row_state, row_scaling, None)
    col_state, col_scaling = _scales(x, col, "col", col_state, col_scaling, row_scaling if shared else None)
    xp = padded(x)
    mp, kp = plan.padded
    row_out = _output(x, row, plan.padded, row_out)
    col_out = _output(x, col, plan.padded if plan.constants["COL_KEPT"] else (kp, mp), col_out)
    none = words(xp)  # stands in for absent pointers
    dual_kernel[plan.grid](
        none,
        pointer(row_out, none),
        pointer(col_out, none),
        none if row_state is None else row_state,
        none if col_state is None else col_state,
        none if row_scaling is None else row_scaling.amax,
        none if row_scaling is None else row_scaling.outer,
        none if col_scaling is None else col_scaling.amax,
        none if col_scaling is None else col_scaling.outer,
        none if sr is None else sr.state,
        none if scales is None else scales,
        0 if sr is None else sr.producer,
        0 if sr is None else sr.col_producer,
        mp,
        m,
        0 if col is None else col_out.stride(0) * col_out.element_size() // 4,
        1,
        ROW_STRIDE=0 if row is None else row_out.stride(0) * row_out.element_size() // 4,
        **plan.constants,
    )
    return (
        None if row is None else _produced(row_out, row, (m, k), row_state, row_scaling),
        None
        if col is None
        else _produced(col_out, col, (k, m), row_state if shared else col_state, col_scaling),
    )


class _Plan(NamedTuple):
    """What a launch of ``produce`` is, but for its tensors and its random state.

    Attributes:
        padded: rows and columns of x, padded.
        grid: programs.
        constants: of the kernel and its compiler, without ROW_STRIDE.
    """

    padded: tuple[int, int]
    grid: tuple[int]
    constants: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def _plan(
    row: View | None,
    col: View | None,
    m: int,
    k: int,
    fp32: bool,
    drawn: bool,
    scaled: bool,
    tile: Tile | None,
    packed: bool,
) -> _Plan:
    """How ``produce`` makes these views of an [m, k] matrix; ValueError as it says.

    Kept, as a step asks the same few questions hundreds of times and an answer takes as long as a launch.

    Args:
        row, col: the views. m, k: rows and columns of the matrix, without padding.
        fp32: whether the matrix is FP32. drawn: whether there is random state.
        scaled: whether rows have scales.
        tile: None takes ``default_tile``.
        packed: of ``packed_instructions``.
    """
    for view, where in ((row, "row"), (col, "col")):
        if view is not None:
            _check_view(view, where)
    row_sr = row is not None and row.rounding == "stochastic"
    col_sr = col is not None and col.rounding == "stochastic"
    if (row_sr or col_sr) and not drawn:
        raise ValueError(
            "produce: got stochastic rounding without random state; needed sr=SR(state, producer)"
        )
    if (row_sr or col_sr) and k % 16:
        raise ValueError(f"produce: got K = {k} with stochastic rounding; needed a multiple of 16")
    if scaled and (row is None or not is_mx(row.format) or formats.get(row.format).two_d):
        raise ValueError("produce: got scales of rows; needed a row view of an MX format in 1D blocks")
    mp, kp = round_up(m, 32), round_up(k, 32)
    cut = tile or default_tile(row, col)
    if scaled and not cut.row_tokens:
        cut = Tile(row_tokens=8)
    masked = mp % (cut.tokens * cut.groups) != 0 or kp % (2 * cut.words) != 0
    constants = {
        "K": kp,
        "PLACES": k,
        "ROW": "none" if row is None else rule(row.format),
        "ROW_CARRIER": "bf16" if row is None else row.carrier,
        "ROW_SR": row_sr,
        "SCALED": scaled,
        "COL": "none" if col is None else rule(col.format),
        "COL_CARRIER": "bf16" if col is None else col.carrier,
        "COL_HADAMARD": "none" if col is None else col.hadamard,
        "ROW_SQUARE": row is not None and formats.get(row.format).two_d,
        "COL_SQUARE": col is not None and formats.get(col.format).two_d,
        "SHARED": row is not None
        and col is not None
        and formats.get(row.format).two_d
        and row == replace(col, transposed=True),
        "COL_SR": col_sr,
        "COL_KEPT": col is not None and not col.transposed,
        "TAIL": col is not None and col.hadamard != "none" and m % GROUP[col.hadamard] != 0,
        "FP32": fp32,
        # rows of padding have no scale
        "MASKED": masked or (scaled and m != mp),
        "ASM": packed,
        "G": cut.groups,
        "T": cut.tokens,
        "ROW_T": cut.row_tokens,
        "W": cut.words,
        "VEC": cut.vector,
        "num_warps": cut.warps,
        **({"maxnreg": cut.registers} if cut.registers else {}),
    }
    programs = triton.cdiv(mp, cut.tokens * cut.groups) * triton.cdiv(kp, 2 * cut.words)
    return _Plan((mp, kp), (programs,), constants)


def _output(x: Tensor, view: View | None, shape: tuple[int, int], given: Tensor | None) -> Tensor | None:
    if view is None or given is None:
        return None if view is None else x.new_empty(shape, dtype=CARRIERS[view.carrier])
    if given.shape != shape or given.dtype != CARRIERS[view.carrier] or given.stride(1) != 1:
        raise ValueError(
            f"produce: got an output {tuple(given.shape)} of {given.dtype}, strides {given.stride()}; needed "
            f"{shape} of {CARRIERS[view.carrier]}, contiguous along its last axis"
        )
    return given


@dataclass(frozen=True)
class Tile:
    """One program's part of the matrix: groups x tokens rows, 2 words columns.

    Attributes:
        groups, tokens: G groups of T tokens; a warp holds whole groups.
        words: words of a row; with ``vector`` words per thread, 32 lanes make one row.
        vector: words a thread loads at once.
        warps: warps of the program, as many as groups.
        row_tokens: tokens of every group that the row view handles at a time, re-reading them; 0: all.
        registers: a bound on registers per thread, or None.
    """

    groups: int = 4
    tokens: int = 32
    words: int = 64
    vector: int = 2
    warps: int = 4
    row_tokens: int = 0
    registers: int | None = None


def default_tile(row: View | None, col: View | None) -> Tile:
    """Best tile of ``python -m fp4core.bench producers --tiles`` on an H200.

    Blocks of 16 let a thread hold 16 tokens, which doubles the warps in flight. Where the row view is long
    work (random bits, two divisions per block) it goes into a loop; where it is short the loop costs more
    than it saves.
    """
    views = [v for v in (row, col) if v is not None]
    two_d = formats.get(views[0].format).two_d
    if any(is_mx(v.format) for v in views):
        if two_d and not all(is_mx(v.format) for v in views):
            return Tile(groups=1, warps=1)
        if row is not None and row.rounding == "stochastic":
            return Tile(row_tokens=8)
        return Tile(registers=168)  # three programs on a multiprocessor
    plain = all(formats.get(v.format).algorithm == "nv_global" and v.hadamard == "none" for v in views)
    return Tile(tokens=16, row_tokens=0 if plain or two_d else 8)


def _scales(
    x: Tensor,
    view: View | None,
    where: str,
    state: Tensor | None,
    given: Scaling | None,
    other: Scaling | None,
) -> tuple[Tensor | None, Scaling | None]:
    if view is None:
        return None, None
    if is_mx(view.format):
        if state is None:
            if view.carrier != "bf16":
                raise ValueError(
                    f"produce: got carrier {view.carrier!r} without a state; needed "
                    f"{where}_state=new_state(...)[i], whose reference places its range"
                )
            state = new_state(1, x.device)[0]
        return state, None
    if given is None:
        given = other
    if given is None:
        plain, rotated = chunk_amax(x, hadamard=view.hadamard, plain=view.hadamard == "none")
        given = scaling(view, where, plain if view.hadamard == "none" else rotated)
    return None, given


def _produced(
    data: Tensor, view: View, shape: tuple[int, int], state: Tensor | None, scales: Scaling | None
) -> Produced:
    return Produced(data, view, shape, None if scales is None else scales.outer, state)
