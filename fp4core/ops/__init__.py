"""Public operations: quantise, multiply, linear layers, conversion."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {"fake_quant": "fp4core.ops.quantize"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fp4core.ops' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
