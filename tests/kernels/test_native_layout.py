"""The swizzled layout of block scales: the stated formula, both ways, with padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4core.kernels.native import layout


def numbered(rows: int, columns: int) -> torch.Tensor:
    """Bytes that repeat late and never with the layout's periods."""
    return (torch.arange(rows * columns) * 37 % 251 + 1).to(torch.uint8).view(rows, columns)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 21))
def test_every_scale_is_where_the_formula_says_and_padding_is_zero(rows: int, columns: int) -> None:
    scale = numbered(rows, columns)
    flat = layout.swizzle(scale).flatten()
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    per_row = -(-columns // 4)
    place = (r // 128 * per_row + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    assert torch.equal(flat[place], scale)
    assert int(place[-1, -1]) == layout.offset(rows - 1, columns - 1, columns)
    assert flat.count_nonzero() == rows * columns
    assert flat.numel() == -(-rows // 128) * per_row * 512


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 21), st.sampled_from([1, 16, 32]))
def test_unswizzle_inverts_swizzle(rows: int, columns: int, block_rows: int) -> None:
    scale = numbered(-(-rows // block_rows), columns)
    back = layout.unswizzle(layout.swizzle(scale, block_rows, rows), rows, columns, block_rows)
    assert torch.equal(back, scale)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.data())
def test_swizzle_inverts_unswizzle_of_whole_atoms(p: int, a: int, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    atoms = torch.randint(0, 256, (p, a, 512), generator=g, dtype=torch.uint8)
    assert torch.equal(layout.swizzle(layout.unswizzle(atoms, 128 * p, 4 * a)), atoms)


def test_layout_is_that_of_the_128_by_4_atom_published_for_cublas() -> None:
    # byte index -> (row, column) of the first 20 bytes of an atom: rows 32 apart, then the next row
    scale = torch.arange(512).view(128, 4)
    order = layout.swizzle((scale % 256).to(torch.uint8)).flatten()[:20].tolist()
    rows = [0, 32, 64, 96, 1]
    assert order == [int(scale[r, c]) % 256 for r in rows for c in range(4)]


@pytest.mark.parametrize(
    ("scale", "text"),
    [(torch.zeros(4), "needed a uint8 matrix"), (torch.zeros(4, 4), "needed a uint8 matrix")],
    ids=["vector", "float"],
)
def test_swizzle_says_what_it_needs(scale: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        layout.swizzle(scale)


def test_unswizzle_says_which_shape_it_needs() -> None:
    with pytest.raises(ValueError, match=r"130 x 5 scales need uint8 of shape \(2, 2, 512\)"):
        layout.unswizzle(torch.zeros(1, 2, 512, dtype=torch.uint8), 130, 5)
