"""FP4 pretraining numerics: formats, quantisers, exact GEMMs, drop-in linears.

The public names below are loaded on first use, so that ``import fp4core.recipe`` (which workflow
engines parse many times) never pays for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it
_PUBLIC = {
    "SRKey": "fp4core.ops.quantize",
    "QuantizedTensor": "fp4core.ops.quantize",
    "quantize": "fp4core.ops.quantize",
    "quantize_dual": "fp4core.ops.quantize",
    "matmul": "fp4core.ops.quantize",
    "Linear": "fp4core.ops.linear",
    "convert": "fp4core.ops.convert",
    "set_sr_state": "fp4core.ops.convert",
    "backends": "fp4core.ops.backends",
    "formats": "fp4core.formats",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        known = ", ".join(__all__)
        raise AttributeError(f"module 'fp4core' has no attribute {name!r}; public names: {known}")
    module = importlib.import_module(_PUBLIC[name])
    value = module if name == "formats" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
