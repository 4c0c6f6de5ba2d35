"""Direct labels that do not overlap: at the ends of lines (one dimension) and beside points (two)."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox
from numpy.typing import ArrayLike

LABEL = 6.5


def spread(wanted: ArrayLike, gap: float, low: float, high: float) -> np.ndarray:
    """Positions closest to ``wanted`` (least squares) that are ``gap`` apart and inside [low, high].

    Keeps the order of ``wanted``. When they cannot all fit, they are spaced evenly over the whole range.
    """
    wanted = np.asarray(wanted, dtype=float)
    n = wanted.size
    if n == 0:
        return wanted
    if (n - 1) * gap > high - low:
        result = np.empty(n)
        result[np.argsort(wanted, kind="stable")] = np.linspace(low, high, n)
        return result
    order = np.argsort(wanted, kind="stable")
    shifted = wanted[order] - gap * np.arange(n)
    # Pool adjacent violators: the isotonic fit of the shifted positions is the least-squares answer.
    blocks: list[list[float]] = []
    for value in shifted:
        blocks.append([value, 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, weight = blocks.pop()
            total = weight + blocks[-1][1]
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * weight) / total, total]
    fitted = np.concatenate([np.full(int(weight), mean) for mean, weight in blocks])
    fitted = np.clip(fitted, low, high - gap * (n - 1))
    result = np.empty(n)
    result[order] = fitted + gap * np.arange(n)
    return result


def at_ends(
    axes: Axes, entries: list[dict], *, size: float = LABEL, offset: float = 5, reach: float = 8
) -> None:
    """Label lines to the right of ``axes``. Call it after the limits and the layout are final.

    entries: {x, y (data), text, color, marker (optional)}; x is where the line ends. A thin leader joins
    the line's
    end and its label. offset, reach: points from the axes' edge to the leader's bend and the text.
    """
    if not entries:
        return
    figure = axes.figure
    pixels = figure.dpi / 72
    box = axes.get_window_extent()
    ends = np.array([axes.transData.transform((e["x"], e["y"]))[1] for e in entries])
    gap = size * 1.22 * pixels
    places = spread(np.clip(ends, box.y0, box.y1), gap, box.y0 - gap * 0.3, box.y1 + gap * 0.3)
    to_axes = axes.transAxes.inverted()
    width = box.width
    for entry, place in zip(entries, places):
        y = to_axes.transform((0, place))[1]
        start = axes.transAxes.inverted().transform(axes.transData.transform((entry["x"], entry["y"])))
        start[1] = np.clip(start[1], 0, 1)
        bend, text_at = 1 + offset * pixels / width, 1 + (offset + reach) * pixels / width
        xs, ys = [start[0], max(start[0], 1.0), bend + (text_at - bend) * 0.5], [start[1], start[1], y]
        axes.plot(
            xs, ys, color=entry["color"], lw=0.5, alpha=0.7, transform=axes.transAxes, clip_on=False, zorder=1
        )
        if entry.get("marker"):
            axes.plot(
                [text_at],
                [y],
                entry["marker"],
                ms=3.2,
                color=entry["color"],
                transform=axes.transAxes,
                clip_on=False,
            )
            text_at += 4.5 * pixels / width
        text = axes.text(
            text_at, y, entry["text"], color=darker(entry["color"]), fontsize=size, transform=axes.transAxes,
            va="center", ha="left", clip_on=False,
        )  # fmt: skip
        _shorten(text, figure)


def _shorten(text, figure: Figure) -> None:
    """Cut a label that would leave the page, so that a long route name costs letters and not the label."""
    renderer, edge = figure.canvas.get_renderer(), figure.bbox.x1 - 1
    while text.get_window_extent(renderer).x1 > edge and len(text.get_text()) > 4:
        text.set_text(text.get_text().rstrip("…")[:-1] + "…")


def beside_points(
    axes: Axes, points: list[dict], *, size: float = LABEL, avoid: list[Bbox] | None = None
) -> list[tuple[Bbox, np.ndarray | None]]:
    """Label scatter points so that no text covers another, a point, or the axes' edge.

    points: {x, y (data), text, color}. Candidates lie on rings around the point; the cheapest wins, the
    most crowded point first, and more sweeps let early choices move. Far labels get a leader line, which
    keeps off the other points and labels. Returns every label's window box and its leader [2, 2] or None.
    """
    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    pixels = figure.dpi / 72
    at = np.array([axes.transData.transform((p["x"], p["y"])) for p in points])
    frame = axes.get_window_extent()
    sizes = []
    for point in points:
        text = axes.text(0, 0, point["text"], fontsize=size)
        box = text.get_window_extent(renderer)
        sizes.append((box.width + 1.5 * pixels, box.height + 0.5 * pixels))
        text.remove()
    reach = 2.6 * pixels
    dots = np.column_stack([at - reach, at + reach])
    fixed = np.array([box.extents for box in avoid or []], dtype=float).reshape(-1, 4)
    boxes = [_candidates(x, y, w, h, pixels) for (x, y), (w, h) in zip(at, sizes)]
    outside = [
        np.maximum(0, frame.x0 - box[:, 0])
        + np.maximum(0, box[:, 2] - frame.x1)
        + np.maximum(0, frame.y0 - box[:, 1])
        + np.maximum(0, box[:, 3] - frame.y1)
        for box, _ in boxes
    ]
    lines = [_leaders(start, box, ring) for start, (box, ring) in zip(at, boxes)]
    alone = []  # cost of every candidate whatever the other labels do
    for index, (box, ring) in enumerate(boxes):
        near = _shared(box, dots)
        near[:, index] *= 0.5
        crossed = _crossed(lines[index], np.delete(dots, index, 0)).sum(1)
        alone.append(
            2 * ring
            + 40 * near.sum(1)
            + CROSSED * crossed
            + 8 * _shared(box, fixed).sum(1)
            + 10 * outside[index] / pixels
        )
    distance = np.hypot(*(at[:, None] - at[None]).transpose(2, 0, 1))
    crowd = np.argsort(-(distance < 60 * pixels).sum(1), kind="stable")
    orders = [crowd, crowd[::-1], np.argsort(at[:, 1]), np.argsort(-at[:, 1]), np.argsort(-at[:, 0])]
    tried = [_place(order, [box for box, _ in boxes], lines, alone) for order in orders]
    _, chosen, leaders = min(tried, key=lambda one: one[0])
    placed = []
    for index, point in enumerate(points):
        box = Bbox.from_extents(*chosen[index])
        center = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
        x, y = axes.transData.inverted().transform(center)
        line = None if np.isnan(leaders[index]).any() else leaders[index]
        if line is not None:
            ex, ey = axes.transData.inverted().transform(line[1])
            axes.plot([point["x"], ex], [point["y"], ey], color=point["color"], lw=0.4, alpha=0.8, zorder=1)
        placed.append((box, line))
        halo = [withStroke(linewidth=1.6, foreground="white")]
        axes.text(
            x, y, point["text"], fontsize=size, color=darker(point["color"]), ha="center", va="center",
            path_effects=halo,
        )  # fmt: skip
    return placed


FAR = 2  # ring from which on a label needs a leader
CROSSED = 15  # cost of a leader through a point or a label; OVERLAP of two labels, all of the smaller
OVERLAP = 400


def _place(
    order: np.ndarray, boxes: list[np.ndarray], lines: list[np.ndarray], alone: list[np.ndarray]
) -> tuple[float, np.ndarray, np.ndarray]:
    """(total cost, boxes [n, 4], leaders [n, 2, 2]): each label in turn takes its cheapest candidate."""
    n = len(boxes)
    chosen, leaders, paid = np.full((n, 4), np.nan), np.full((n, 2, 2), np.nan), np.zeros(n)
    for _ in range(5):
        for index in order:
            box, rest = boxes[index], np.arange(n) != index
            crossed = _crossed(lines[index], chosen[rest]).sum(1) + _crossed(leaders[rest], box).sum(0)
            cost = alone[index] + OVERLAP * _shared(box, chosen[rest]).sum(1) + CROSSED * crossed
            best = int(np.argmin(cost))
            chosen[index], leaders[index], paid[index] = box[best], lines[index][best], cost[best]
    return float(paid.sum()), chosen, leaders


def _leaders(start: np.ndarray, boxes: np.ndarray, rings: np.ndarray) -> np.ndarray:
    """[n, 2, 2] from ``start`` to the nearest edge of every far box; NaN where the box is near."""
    ends = np.clip(start[None], boxes[:, :2], boxes[:, 2:])
    lines = np.stack([np.broadcast_to(start, ends.shape), ends], axis=1).astype(float)
    lines[rings < FAR] = np.nan
    return lines


def _crossed(lines: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Whether line [n, 2, 2] runs through box [m, 4]: bool [n, m], looked at in 40 points of the line."""
    t = np.linspace(0, 1, 42)[None, 1:-1, None]
    points = lines[:, None, 0] + t * (lines[:, None, 1] - lines[:, None, 0])  # [n, 40, 2]
    at = points[:, :, None]
    return ((at > boxes[None, None, :, :2]) & (at < boxes[None, None, :, 2:])).all(-1).any(1)


def _candidates(x: float, y: float, w: float, h: float, pixels: float) -> tuple[np.ndarray, np.ndarray]:
    """Boxes [n, 4] (x0, y0, x1, y1) of a w x h text on rings around (x, y), and their ring and side cost."""
    boxes, rings = [], []
    for ring, radius in enumerate((5, 9, 14, 20, 28, 38, 50, 64)):
        for angle in np.deg2rad((0, 180, 35, -35, 145, -145, 90, -90, 65, -65, 115, -115)):
            cx, cy = np.cos(angle), np.sin(angle)
            left = x + radius * pixels * cx + (-w if cx < -0.3 else 0 if cx > 0.3 else -w / 2)
            bottom = y + radius * pixels * cy + (-h / 2 if abs(cy) < 0.9 else 0 if cy > 0 else -h)
            boxes.append((left, bottom, left + w, bottom + h))
            rings.append(ring + (0.2 if cx < 0 else 0))
    return np.array(boxes), np.array(rings)


def _shared(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """``overlap`` of every box [n, 4] with every other [m, 4]: [n, m]; a NaN box overlaps nothing."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    area = np.prod(np.maximum(0, high - low), axis=2)
    sizes = [np.prod(b[:, 2:] - b[:, :2], axis=1) for b in (boxes, others)]
    least = np.minimum(sizes[0][:, None], sizes[1][None])
    return np.nan_to_num(area / np.maximum(least, 1e-9))


def overlap(a: Bbox, b: Bbox) -> float:
    """Shared area over the smaller box's area, 0 .. 1."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    if width <= 0 or height <= 0:
        return 0.0
    return float(width * height / max(1e-9, min(a.width * a.height, b.width * b.height)))


def darker(color: str, least: float = 4.5) -> str:
    """``color`` darkened until text in it has the contrast ``least`` on white (WCAG)."""
    from matplotlib.colors import to_hex, to_rgb

    rgb = np.array(to_rgb(color))

    def contrast(c):
        linear = np.where(c <= 0.03928, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
        return 1.05 / (float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05)

    while contrast(rgb) < least:
        rgb = rgb * 0.95
    return to_hex(rgb)


def text_boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """Text and window box of every text of ``figure`` that is drawn, for checks; ticks outside the
    limits are not."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    artists = list(figure.texts)
    insets = [inset for axes in figure.axes for inset in axes.child_axes]
    for axes in [*figure.axes, *insets]:
        if not axes.axison:
            artists += [axes.title, axes._left_title, *axes.texts]
            continue
        artists += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            margin = 1e-9 * max(abs(low), abs(high))
            artists.append(axis.get_offset_text())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if low - margin <= tick.get_loc() <= high + margin:
                    artists += [tick.label1, tick.label2]
        if axes.get_legend():
            artists += axes.get_legend().get_texts()
    for legend in figure.legends:
        artists += legend.get_texts()
    return [
        (a.get_text(), a.get_window_extent(renderer))
        for a in artists
        if a.get_visible() and a.get_text().strip()
    ]
