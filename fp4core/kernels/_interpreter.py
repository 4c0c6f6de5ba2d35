"""Make the Triton interpreter's loop bounds work with numpy 2.4 and up.

Triton 3.6 turns a scalar tensor into a Python index by ``int(array)``, and holds scalars as arrays of one element,
which numpy no longer converts. Importing this module puts ``.item()`` in between; it has no effect on compiled
kernels.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_original = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    _original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


if interpreter._patch_lang_tensor is not _patched and _original.__module__ == interpreter.__name__:
    interpreter._patch_lang_tensor = _patched
