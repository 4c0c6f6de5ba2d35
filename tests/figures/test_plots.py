"""Every figure: from tidy tables, at print size, no text over another, the same bytes every time."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from figures import analysis, labels, schema, style
from figures.__main__ import main
from figures.data import Tidy
from figures.labels import overlap, text_boxes
from figures.plots import FIGURES
from tests.figures import synthetic

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = {entry.name: entry for entry in FIGURES}


@pytest.mark.parametrize("name", ENTRIES)
def test_figure_is_written_in_three_formats(name, results):
    folder = results / "figures"
    assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert b"<svg" in (folder / f"{name}.svg").read_bytes()[:2000]
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def axis_labels_in_other_panels(figure) -> list[str]:
    """Axis labels that reach into the frame of another panel."""
    panels = [axes for axes in figure.axes if axes.axison]
    found = [label for axes in panels for label in (axes.xaxis.label, axes.yaxis.label) if label.get_text()]
    return [
        label.get_text()
        for label in found
        for other in panels
        if overlap(label.get_window_extent(), other.get_window_extent()) > 0
    ]


@pytest.mark.parametrize("name", ENTRIES)
def test_no_text_overlaps_or_leaves_the_page(name, tidy_three):
    with plt.rc_context(style.RC):
        figure = ENTRIES[name].draw(tidy_three)
        width, height = figure.get_size_inches()
        assert width in (style.COLUMN, style.PAGE) and height <= 9.5
        boxes = text_boxes(figure)
        edge_x, edge_y = width * figure.dpi, height * figure.dpi
        intruders = axis_labels_in_other_panels(figure)
        plt.close(figure)
    assert not intruders
    outside = [t for t, b in boxes if b.x0 < -1 or b.y0 < -1 or b.x1 > edge_x + 1 or b.y1 > edge_y + 1]
    assert not outside
    clashes = [
        (a, b)
        for i, (a, box) in enumerate(boxes)
        for b, other in boxes[i + 1 :]
        if overlap(box, other) > 0.05
    ]
    assert not clashes


@pytest.mark.parametrize("study", ["tidy_one", "tidy_three"])
def test_every_checkpoint_and_interval_is_inside_the_validation_panels(study, request):
    """The first cut is far above the last: it must be seen, and the last still be told apart (small axes)."""
    tidy = request.getfixturevalue(study)
    frame = ENTRIES["fig09_validation_nll"].data(tidy)
    frame = frame[frame["route"].map(lambda route: tidy.status[route] != "diverged")]
    with plt.rc_context(style.RC):
        figure = ENTRIES["fig09_validation_nll"].draw(tidy)
        limits = [axes.get_ylim() for axes in figure.axes]
        insets = figure.axes[0].child_axes
        plt.close(figure)
    over = "seed_" if study == "tidy_three" else ""  # with several seeds the intervals are over seeds
    wanted = (
        ("nll", "low", "high"),
        ("difference", f"{over}difference_low", f"{over}difference_high"),
    )
    assert ("over seeds" in ENTRIES["fig09_validation_nll"].caption(tidy)) == (study == "tidy_three")
    for (low, high), columns in zip(limits, wanted):
        values = frame[list(columns)].stack()
        assert low <= values.min() and values.max() <= high
    assert len(insets) == 1 and f"step {frame['step'].max():,}" in insets[0].get_title("left")


def test_seed_intervals_are_inside_the_loss_panels(tidy_three):
    curves = ENTRIES["fig07_training_loss"].data(tidy_three)
    ends = analysis.endpoint(tidy_three)
    with plt.rc_context(style.RC):
        figure = ENTRIES["fig07_training_loss"].draw(tidy_three)
        left, middle, right = (axes.get_ylim() for axes in figure.axes)
        plt.close(figure)
    sound = [route for route, state in tidy_three.status.items() if state != "diverged"]
    late = curves[(curves["step"] >= 0.1 * curves["step"].max()) & curves["route"].isin(sound)]
    ends = ends.loc[[route for route in sound if route in ends.index]]
    for (low, high), (below, above) in (
        (left, (late["low"].min(), late["high"].max())),
        (middle, (late["relative_low"].min(), late["relative_high"].max())),
        (right, (-ends["excess_high"].max(), -ends["excess_low"].min())),
    ):
        assert low <= below and above <= high


def test_figure_6_draws_the_budget_that_a_gpu_recorded(tmp_path):
    """fp4core/bench/results/boundary.json are rows of boundary.csv: both schedules, no stage it never had."""
    measured = json.loads((ROOT / "fp4core/bench/results/boundary.json").read_text())
    path = synthetic.write(tmp_path, steps=60, device_kind="cuda")
    columns = list(schema.load_schema("boundary")["properties"])
    pd.DataFrame(measured["rows"])[columns].to_csv(path / "boundary.csv", index=False)
    tidy = Tidy(path)
    with plt.rc_context(style.RC):
        figure = ENTRIES["fig06_fusion_schedule"].draw(tidy)
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        plt.close(figure)
    stages = {row["stage"] for row in measured["rows"]}
    assert len(legend) == len(stages) + 1 and legend[-1] == "fused schedule"
    caption = ENTRIES["fig06_fusion_schedule"].caption(tidy)
    assert measured["environment"]["gpu"] in caption and "emulations" not in caption


def test_a_crowd_of_points_is_labelled_without_overlaps_and_leaders_through_labels():
    """Twelve routes of nearly one rate beside a far control, as on a CPU."""
    points = [{"x": 16.0, "y": 0.0, "text": "BF16", "color": "black"}]
    for i in range(12):
        x, y = 6 + 0.9 * ((i * 7) % 12) / 12, 0.35 + 0.07 * i
        points.append({"x": x, "y": y, "text": f"Route NVFP4 {i}", "color": "black"})
    with plt.rc_context(style.RC):
        figure, grid = style.new(style.PAGE / 2, 3.1, margins=(0.46, 0.1, 0.38, 0.22))
        grid[0, 0].set(xlim=(4, 19), ylim=(-0.1, 1.35))
        placed = labels.beside_points(grid[0, 0], points)
        plt.close(figure)
    boxes = [box for box, _ in placed]
    assert not [1 for i, a in enumerate(boxes) for b in boxes[i + 1 :] if overlap(a, b) > 0.02]
    for index, (_, line) in enumerate(placed):
        if line is not None:
            others = np.array([box.extents for i, box in enumerate(boxes) if i != index])
            assert not labels._crossed(line[None], others).any()


@pytest.mark.parametrize("name", ENTRIES)
def test_captions_and_data_exist_without_drawing(name, tidy_one):
    entry = ENTRIES[name]
    assert len(entry.caption(tidy_one)) > 80
    assert len(entry.data(tidy_one)) > 0
    if name[3:5] >= "07":
        assert "Imaginary CPU" in entry.caption(tidy_one)


def test_same_input_gives_the_same_bytes_in_another_process(one, results, tmp_path):
    only = "fig03,fig04,fig11"
    command = [
        sys.executable,
        "-m",
        "figures",
        "plots",
        "--tidy",
        str(one),
        "--out",
        str(tmp_path),
        "--only",
        only,
    ]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 9
    for path in files:
        again = (results / "figures" / path.name).read_bytes()
        assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(again).digest(), path.name


def test_every_route_has_its_own_colour_and_marker():
    looks = list(style.LOOKS.values())
    assert len({look.color for look in looks}) == len({look.marker for look in looks}) == len(looks) == 13
    assert len({look.short for look in looks}) == 13
    assert style.look("my_route", "My route").short == "My route"
    assert style.look("my_route", "x" * 60).short == "my route"


def test_a_missing_table_is_one_clear_error_and_nothing_is_written(tmp_path, capsys):
    tidy = synthetic.write(tmp_path / "tidy", steps=60)
    (tidy / "dgrad.csv").unlink()
    header = (tidy / "boundary.csv").read_text().splitlines()[0]
    (tidy / "boundary.csv").write_text(header + "\n")
    out = tmp_path / "figures"
    assert main(["plots", "--tidy", str(tidy), "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert (
        "fig12_dgrad_error needs dgrad.csv" in message
        and "fig06_fusion_schedule needs boundary.csv" in message
    )
    assert not out.exists()
    assert main(["plots", "--tidy", str(tidy), "--out", str(out), "--only", "fig06,fig08", "--partial"]) == 0
    assert "skipped fig06_fusion_schedule: needs boundary.csv" in capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == [
        f"fig08_training_loss_zoom.{k}" for k in ("pdf", "png", "svg")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "fig99"], "unknown name 'fig99'"), (["--tidy", "nowhere"], "nowhere is no directory")],
)
def test_bad_arguments_are_one_line(tmp_path, capsys, one, arguments, message):
    assert main(["plots", "--tidy", str(one), "--out", str(tmp_path), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_studies_of_few_routes_draw(tmp_path):
    for name, routes in (("control", ("bf16",)), ("alone", ("mxfp4_sr",))):
        tidy = Tidy(synthetic.write(tmp_path / name, steps=60, routes=routes, diverged=False))
        with plt.rc_context(style.RC):
            for entry in FIGURES[5:11]:
                plt.close(entry.draw(tidy))


def test_figures_import_neither_torch_nor_our_other_packages():
    code = (
        "import sys, figures.__main__, figures.report, figures.plots, figures.tables, figures.summary\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'fp4core', 'eval', 'transformers')]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
