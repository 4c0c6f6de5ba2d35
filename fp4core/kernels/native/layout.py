"""The 128 x 4 layout of block scales that tcgen05, CUTLASS and cuBLAS share.

Scales of R rows and C columns (one column per block along the contraction) lie in *atoms* of 128 rows x 4
columns, 512 bytes each, atoms in row-major order, rows padded to 128 and columns to 4 with byte 0. The byte
of (r, c) is at

    ((r // 128) ceil(C / 4) + c // 4) 512 + (r mod 32) 16 + ((r mod 128) // 32) 4 + c mod 4

Shape suffixes: R rows, C columns, A atoms along the contraction, P atoms along the rows. Plain torch, any
device; the producers write this layout themselves, so these functions serve the public API, checks and
tests.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS, COLUMNS = 128, 4
ATOM = ROWS * COLUMNS


def atoms(rows: int, columns: int) -> tuple[int, int]:
    """(atoms along the rows, atoms along the contraction) of a scale matrix."""
    return -(-rows // ROWS), -(-columns // COLUMNS)


def offset(row: int, column: int, columns: int) -> int:
    """Place of one scale in the flat layout of a matrix with ``columns`` columns."""
    atom = (row // ROWS) * -(-columns // COLUMNS) + column // COLUMNS
    return atom * ATOM + (row % 32) * 16 + (row % ROWS) // 32 * 4 + column % COLUMNS


def swizzle(scale_RC: Tensor, block_rows: int = 1, rows: int | None = None) -> Tensor:
    """Row-major scale bytes to the layout.

    Args:
        scale_RC: uint8 [R, C]; for 2D formats [ceil(rows / block_rows), C].
        block_rows: rows under one scale; every row gets its copy.
        rows: rows of the quantised matrix where ``block_rows`` > 1.

    Returns:
        uint8 [P, A, 512].

    Raises:
        ValueError: not a uint8 matrix.
    """
    if scale_RC.dim() != 2 or scale_RC.dtype != torch.uint8:
        raise ValueError(
            f"swizzle: got {scale_RC.dtype} of shape {tuple(scale_RC.shape)}; needed a uint8 matrix "
            "(.view(torch.uint8) reinterprets float8 scales)"
        )
    if block_rows > 1:
        scale_RC = scale_RC.repeat_interleave(block_rows, 0)[:rows]
    p, a = atoms(*scale_RC.shape)
    padded = F.pad(scale_RC, (0, a * COLUMNS - scale_RC.shape[1], 0, p * ROWS - scale_RC.shape[0]))
    tiles = padded.view(p, 4, 32, a, COLUMNS)  # (row atom, row // 32, row % 32, column atom, column)
    return tiles.permute(0, 3, 2, 1, 4).reshape(p, a, ATOM)


def unswizzle(scale_PA: Tensor, rows: int, columns: int, block_rows: int = 1) -> Tensor:
    """Inverse of ``swizzle``: uint8 [ceil(rows / block_rows), columns], padding dropped.

    Raises:
        ValueError: the layout is not that of ``rows`` x ``columns`` scales.
    """
    p, a = atoms(rows, columns)
    if scale_PA.shape != (p, a, ATOM) or scale_PA.dtype != torch.uint8:
        raise ValueError(
            f"unswizzle: got {scale_PA.dtype} of shape {tuple(scale_PA.shape)}; {rows} x {columns} scales "
            f"need uint8 of shape {(p, a, ATOM)}"
        )
    tiles = scale_PA.view(p, a, 32, 4, COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(p * ROWS, a * COLUMNS)[:rows:block_rows, :columns].contiguous()
