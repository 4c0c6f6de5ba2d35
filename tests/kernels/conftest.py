"""Kernels run compiled where there is a GPU, interpreted elsewhere; the same tests hold them."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any kernel is imported
