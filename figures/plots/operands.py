"""Figure 04: the format, rounding and transform of every operand view, per route."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures import style
from figures.data import Tidy
from figures.tables.contracts import OPERANDS, STAR, exceptions

TINTS = {
    "bf16": "#f2f2f2",
    "mxfp4": "#cfe6f7",
    "nvfp4_te": "#ecd5e6",
    "nvfp4": "#f6e7b0",
    "nvfp4_cta": "#c5e8d9",
    "ue5m3": "#fbd3bd",
}
NAMES = {
    "bf16": "BF16",
    "mxfp4": "MXFP4",
    "nvfp4_te": "NVFP4 TE",
    "nvfp4": "NVFP4 global",
    "nvfp4_cta": "NVFP4 CTA",
    "ue5m3": "UE5M3",
}
SYMBOL = {"x": "X", "w": "W", "dy": "dY"}
TRANSFORM = {"plain16": "plain H16", "fixed16": "H16", "fixed32": "H32"}
VIEW = {"fprop": ("row X", "row W"), "dgrad": ("row dY", "column W"), "wgrad": ("column dY", "column X")}


def data_operand_map(tidy: Tidy) -> pd.DataFrame:
    return tidy.table("operands")


def caption_operand_map(tidy: Tidy) -> str:
    return (
        "Views of X, W and dY that the three contractions consume, and what each route makes of them: "
        "format (colour and name; 2D: two-dimensional weight blocks), SR: stochastic rounding, H16/H32: "
        "fixed-sign Hadamard transform on both operands of Wgrad. Rounding is to nearest where no SR is "
        "written. Operand hybrids mix formats across the contractions of one layer, depth hybrids across "
        "blocks. From the recipes."
    ) + "".join(f" {line}" for line in exceptions(tidy))


def _base(name: str) -> str:
    return name.removesuffix("_w2d")


def draw_operand_map(tidy: Tidy) -> Figure:
    frame = data_operand_map(tidy)
    lines = []
    for route in tidy.ordered(frame["route"]):
        mine = frame[frame["route"] == route]
        groups = list(mine.groupby(["first_block", "last_block"]))
        for index, ((first, last), group) in enumerate(groups):
            blocks = (
                "" if len(groups) == 1 else f"block {first}" if first == last else f"blocks {first}-{last}"
            )
            lines.append((route if index == 0 else None, blocks, group))
    row, left, top = 0.255, 1.52, 0.42
    height = top + row * len(lines) + 0.06
    figure, grid = style.new(style.PAGE, height, margins=(0, 0, 0, 0))
    axes = grid[0, 0]
    axes.set_axis_off()
    axes.set_xlim(0, style.PAGE)
    axes.set_ylim(height, 0)
    width = (style.PAGE - left - 0.06 - 0.16) / 6
    looks = style.looks(tidy)

    def x_of(place: int) -> float:
        return left + width * place + 0.08 * (place // 2)

    titles = {"fprop": "Fprop  Y = X Wᵀ", "dgrad": "Dgrad  dX = dY W", "wgrad": "Wgrad  dW = dYᵀ X"}
    for place, (contraction, _) in enumerate(OPERANDS):
        if place % 2 == 0:
            middle = (x_of(place) + x_of(place + 1) + width) / 2
            axes.text(middle, 0.12, titles[contraction], ha="center", va="center", fontweight="bold")
        view = VIEW[contraction][place % 2]
        axes.text(
            x_of(place) + width / 2, 0.31, view, ha="center", va="center", color=style.GREY, fontsize=6.5
        )
    for index, (route, blocks, group) in enumerate(lines):
        y = top + row * index
        if route is not None:
            if index:
                axes.plot([0.06, style.PAGE - 0.06], [y - 0.005] * 2, color=style.FAINT, lw=0.4, zorder=0)
            axes.text(
                0.06, y + row / 2, looks[route].short if route in looks else route, va="center", fontsize=7
            )
        if blocks:
            axes.text(
                left - 0.06, y + row / 2, blocks, va="center", ha="right", fontsize=6.5, color=style.GREY
            )
        cells = {(r.contraction, r.operand): r for r in group.itertuples()}
        for place, key in enumerate(OPERANDS):
            if key not in cells:
                continue
            cell = cells[key]
            base = _base(cell.format)
            tint = TINTS.get(base, "#e0e0e0")
            axes.add_patch(Rectangle((x_of(place), y + 0.015), width - 0.03, row - 0.03, fc=tint, ec="none"))
            text = NAMES.get(base, base) + (" 2D" if cell.format.endswith("_w2d") else "")
            text += STAR if isinstance(cell.exception, str) else ""
            axes.text(x_of(place) + 0.045, y + row / 2, text, va="center", fontsize=6)
            extra = ("SR " if cell.rounding == "stochastic" else "") + TRANSFORM.get(cell.hadamard, "")
            if extra.strip():
                axes.text(
                    x_of(place) + width - 0.06, y + row / 2, extra.strip(), va="center", ha="right",
                    fontsize=6,
                    fontweight="bold", color="#9c3d00",
                )  # fmt: skip
    return figure
