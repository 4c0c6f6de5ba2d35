"""The FP4 formats as frozen data: what one block of four-bit values and its scales mean.

``get(name)`` and ``names()`` are the whole interface. Nothing here computes, and nothing here needs
torch: quantisers, kernels, recipes and tables all read the same descriptors.
"""

from __future__ import annotations

import difflib

from fp4core.formats.descriptors import DESCRIPTORS, E2M1_VALUES, E4M3_MAX, UE5M3_MAX, Format

__all__ = ["E2M1_VALUES", "E4M3_MAX", "UE5M3_MAX", "Format", "get", "names"]

_BY_NAME = {descriptor.name: descriptor for descriptor in DESCRIPTORS}


def names() -> tuple[str, ...]:
    """Names of all formats, in the order of the format table.

    ``bf16`` is not among them: it is the absence of a format.
    """
    return tuple(_BY_NAME)


def get(name: str) -> Format:
    """The descriptor called ``name``.

    Raises:
        ValueError: no such format; the message names the nearest one and lists all.
    """
    if isinstance(name, Format):
        return name
    if name in _BY_NAME:
        return _BY_NAME[name]
    near = difflib.get_close_matches(str(name).lower(), _BY_NAME, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"unknown format {name!r}{hint} Known formats: {', '.join(_BY_NAME)}")
