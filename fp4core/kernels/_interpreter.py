"""Make the Triton interpreter do what compiled kernels do; no effect on those.

- Loop bounds with numpy 2.4 and up: Triton 3.6 turns a scalar tensor into a Python index by ``int(array)``,
  and holds scalars as arrays of one element, which numpy no longer converts. Here ``.item()`` comes between.
- FP32 to BF16 rounds to nearest even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_original = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    _original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


if interpreter._patch_lang_tensor is not _patched and _original.__module__ == interpreter.__name__:
    interpreter._patch_lang_tensor = _patched

_original_trunc = interpreter.InterpreterBuilder.create_fp_trunc


def _trunc(self: Any, source: Any, target: Any) -> Any:
    """FP32 to BF16 rounds to nearest even, as compiled kernels do; the interpreter truncates."""
    if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
        return _original_trunc(self, source, target)
    bits = np.ascontiguousarray(source.data).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded)
    return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)


if _original_trunc.__module__ == interpreter.__name__:
    interpreter.InterpreterBuilder.create_fp_trunc = _trunc
