"""The floors that benchmarks print: the right products, the right number of bytes."""

from __future__ import annotations

import pytest
import torch

from fp4core.bench import floors, workload
from fp4core.kernels._launch import interpreted
from fp4core.ops import carrier_groups

DEVICE = torch.device("cpu" if interpreted() else "cuda")


@pytest.mark.parametrize("route", ["mxfp4_sr", "nvfp4_cta"])
def test_the_products_of_a_group_have_the_layers_shapes(route, monkeypatch):
    carrier_groups.forget()
    monkeypatch.setattr(workload, "GROUPS", {"gate_up": (64, (96, 96), 4)})
    products = floors.Products(workload.GroupData.make("gate_up", 32, DEVICE), workload.route_spec(route))
    assert products.forward().shape == (32, 192)
    dx, dw = products.backward()
    assert dx.shape == (32, 64) and dw.shape == (192, 64)
    carrier_groups.forget()


def test_bytes_are_the_counted_ones():
    tokens = 16384
    assert floors.view_bytes("mxfp4_sr_h32") == 1 and floors.view_bytes("operand_hybrid_h16") == 2
    # per value: read in BF16 once, two FP8 views written
    down = tokens * (14336 + 4096) * 4 + 14336 * 4096 * 4
    assert floors.group_bytes("down", tokens, 1) == down
    # a block: 462,848 bytes per token and four per weight (NOTES.md counts the same from the boundaries)
    assert floors.block_bytes(tokens, 1) == tokens * 462848 + 4 * 218103808
