"""How everything looks: one colour, marker and dash per route in every figure, sizes for print,
deterministic files.

Colours are the Okabe-Ito set and darker members of Paul Tol's muted set; routes of one family share a hue,
and every
route has its own marker, so that no figure depends on colour alone. Widths: one column 3.4 in, two columns
7 in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.data import Tidy

COLUMN = 3.4
PAGE = 7.0
FORMATS = ("pdf", "svg", "png")
DPI = 300
INK = "#1a1a1a"
GREY = "#767676"
FAINT = "#d0d0d0"

RC = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 7,
    "axes.labelsize": 7,
    "axes.titlesize": 7,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 4,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "axes.linewidth": 0.6,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.5,
    "axes.formatter.limits": (-4, 6),
    "axes.unicode_minus": True,
    "svg.hashsalt": "fp4core",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "figure.dpi": 100,
    "savefig.dpi": DPI,
    "hatch.linewidth": 0.5,
    "path.simplify": True,
}


FORMAT_ORDER = ("mxfp4", "mxfp4_w2d", "nvfp4_te", "nvfp4", "nvfp4_w2d", "nvfp4_cta", "nvfp4_cta_w2d", "ue5m3")


@dataclass(frozen=True)
class Look:
    """Colour, marker, dash pattern and short label of a route."""

    color: str
    marker: str
    dash: str | tuple
    short: str


_DASH = (0, (4, 1.5))
_DOTS = (0, (1.2, 1.2))
_DOTDASH = (0, (5, 1.5, 1.2, 1.5))
LOOKS = {
    "bf16": Look("#000000", "o", "-", "BF16"),
    "te_nvfp4": Look("#AA4499", "s", _DASH, "TE NVFP4"),
    "te_nvfp4_bf16x4": Look("#CC79A7", "D", "-", "TE, 4 BF16"),
    "nvfp4_global": Look("#B58900", "^", "-", "Global NVFP4"),
    "mxfp4_sr": Look("#56B4E9", "v", _DASH, "MXFP4"),
    "mxfp4_sr_h32": Look("#0072B2", "P", "-", "MXFP4 H32"),
    "nvfp4_cta": Look("#009E73", "<", "-", "CTA NVFP4"),
    "nvfp4_cta_h16": Look("#117733", ">", _DASH, "CTA NVFP4 H16"),
    "depth_hybrid_27_5": Look("#882255", "X", _DOTDASH, "Depth CTA/MX"),
    "operand_hybrid_h16": Look("#E69F00", "h", _DOTS, "Operand H16"),
    "operand_hybrid_h32": Look("#D55E00", "*", "-", "Operand H32"),
    "depth_hybrid_global_27_5": Look("#767676", "d", _DOTDASH, "Depth NV/MX"),
    # not part of the report, and called so
    "ue5m3": Look("#332288", "p", _DOTS, "UE5M3 (extra)"),
}
_SPARE_COLORS = ("#999933", "#44AA99", "#661100", "#6699CC", "#DDCC77", "#999999")
_SPARE_MARKERS = ("4", "8", "H", "1", "2", "3")


def look(slug: str, label: str | None = None, place: int = 0) -> Look:
    """Look of a route; a route that the ledger does not know gets a spare one by its place in the study."""
    if slug in LOOKS:
        return LOOKS[slug]
    name = label if label and len(label) <= 18 else slug.replace("_", " ")[:18]
    return Look(_SPARE_COLORS[place % 6], _SPARE_MARKERS[place % 6], _DASH, name)


def looks(tidy: Tidy) -> dict[str, Look]:
    """Look of every route that the study lists."""
    return {route.slug: look(route.slug, route.label, index) for index, route in enumerate(tidy.routes)}


def new(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    margins: tuple[float, float, float, float],
    sharex: bool | str = False,
    sharey: bool | str = False,
    **grid: object,
) -> tuple[Figure, np.ndarray]:
    """Figure of exactly width x height inches and its axes [rows, columns].

    margins: left, right, bottom, top in inches, so that a label's room does not depend on the height chosen.
    """
    left, right, bottom, top = margins
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), squeeze=False, gridspec_kw=grid, sharex=sharex, sharey=sharey
    )
    figure.subplots_adjust(
        left=left / width, right=1 - right / width, bottom=bottom / height, top=1 - top / height
    )
    return figure, axes


def panel(axes: Axes, letter: str, title: str = "") -> None:
    """Panel letter and title above the axes, on the left."""
    axes.set_title(f"{letter}  {title}" if title else letter)


def save(figure: Figure, target: str | Path | IO[bytes], kind: str) -> None:
    """Write ``figure`` as 'pdf', 'svg' or 'png' to a path or buffer, at exactly its size; the same figure
    gives the
    same bytes."""
    metadata = {
        "pdf": {"Creator": "fp4core", "Producer": None, "CreationDate": None},
        "svg": {"Creator": "fp4core", "Date": None},
        "png": {"Software": None},
    }[kind]
    figure.savefig(target, format=kind, metadata=metadata)


def in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Distinct ``names``, those of ``order`` first."""
    seen = list(dict.fromkeys(names))
    return [name for name in order if name in seen] + [name for name in seen if name not in order]
