"""Kernels run compiled where there is a GPU, interpreted elsewhere; the same tests hold them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any kernel is imported


@pytest.fixture
def attention_that_repeats() -> Iterator[None]:
    """On a GPU FlashAttention with its deterministic backward pass: cuDNN's does not repeat to the bit."""
    if not torch.cuda.is_available():
        yield
        return
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def fresh_groups() -> Iterator[None]:
    """No plan, encoding or mode of the carrier backend from another test."""
    from fp4core.ops import carrier_groups

    carrier_groups.forget()
    yield
    carrier_groups.forget()
