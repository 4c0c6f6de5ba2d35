"""Transformer Engine, if it is here: one reason when it cannot be used, and the few of its calls that we
make.

Works with 2.8 (the first with NVFP4) up to below 3. Its defaults come from environment variables, so every
knob is set here, and no variable changes a number. Importing this module imports nothing of Transformer
Engine's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PACKAGE = "transformer-engine"
LOWEST, BELOW = (2, 8), (3, 0)
INSTALL = "pip install 'fp4core[te]'"
# the route's numerics as Transformer Engine spells them; a release knows those of these names that it had
KNOBS = {
    "disable_rht": False,
    "disable_stochastic_rounding": False,
    "disable_2d_quantization": False,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
    "nvfp4_4over6_e4m3_use_256": "all",
    "nvfp4_4over6_err_mode": "MAE",
    "backward_override": None,
    "fp8_dpa": False,
    "fp8_mha": False,
}


@dataclass(frozen=True)
class Calls:
    """What we use of Transformer Engine.

    Attributes:
        linear: class ``Linear``.
        autocast: () -> context manager in which its linears compute in NVFP4.
    """

    linear: type
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]


def version_problem() -> str:
    """Why the installed release (or none) will not do; "" when it will."""
    try:
        version = " ".join(str(importlib.metadata.version(PACKAGE)).split())
    except importlib.metadata.PackageNotFoundError:
        return f"Transformer Engine is not installed ({INSTALL})"
    # release of PEP 440: an epoch before it, pre-release and local parts after it decide nothing here
    found = re.match(r"v?(?:\d+!)?(\d+)(?:\.(\d+))?", version)
    if found is None:
        return f"Transformer Engine's version {version!r} cannot be read; needed 2.8 or later ({INSTALL})"
    numbers = (int(found[1]), int(found[2] or 0))
    if numbers < LOWEST:
        return f"Transformer Engine {version} is too old; NVFP4 needs 2.8 or later ({INSTALL})"
    if numbers >= BELOW:
        return f"Transformer Engine {version} is newer than what was checked; needed 2.8 or later, below 3"
    return ""


@functools.cache
def problem() -> str:
    """Why Transformer Engine cannot run NVFP4 here, in one clause; "" when it can."""
    found = version_problem()
    if found:
        return found
    if not torch.cuda.is_available():
        return "Transformer Engine needs a CUDA GPU of sm_100 or later, and none is visible to torch"
    try:
        available, reason = _support(importlib.import_module("transformer_engine.pytorch"))
        calls()
    except Exception as error:  # a compiled extension that does not load fails in many ways
        return f"Transformer Engine cannot be used ({type(error).__name__}: {_first_line(error)})"
    return "" if available else f"Transformer Engine says: {_first_line(reason)}"


def _first_line(text: object) -> str:
    return (str(text or "").strip().splitlines() or ["no reason given"])[0]


def _support(te: Any) -> tuple[bool, str]:
    if hasattr(te, "is_nvfp4_available"):
        return te.is_nvfp4_available(return_reason=True)
    return te.fp8.check_nvfp4_support()  # 2.8


@functools.cache
def calls() -> Calls:
    """Transformer Engine's names under ours. Raises ImportError or AttributeError where it lacks one."""
    te = importlib.import_module("transformer_engine.pytorch")
    kind = importlib.import_module("transformer_engine.common.recipe").NVFP4BlockScaling
    known = {field.name for field in dataclasses.fields(kind)}
    recipe = kind(**{name: value for name, value in KNOBS.items() if name in known})
    if hasattr(te, "autocast"):
        return Calls(te.Linear, lambda: te.autocast(enabled=True, recipe=recipe))
    return Calls(te.Linear, lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe))
