"""Every table in every format: digits, alignment, marks, blanks, captions that say how it was measured."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess

import pandas as pd
import pytest

from figures.data import Tidy
from figures.tables import TABLES
from figures.tables.latex import latex_escape, to_latex
from figures.tables.model import Column, Table, cell
from figures.tables.render import FORMATS, render, to_csv, to_html, to_markdown
from tests.figures import synthetic

ENTRIES = {entry.name: entry for entry in TABLES}
MEASURED = [n for n in ENTRIES if n[5:7] in ("03", "06", "07", "08", "09", "10", "12")]


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("study", ["tidy_one", "tidy_three"])
def test_table_renders_in_every_format(name, study, request):
    table = ENTRIES[name].build(request.getfixturevalue(study))
    assert table.name == name and table.rows
    for kind in FORMATS:
        text = render(table, kind)
        assert "nan" not in re.sub(r"[a-z]*nan[a-z]+", "", text.lower()), kind
        assert "None" not in text
    assert len(rows(to_csv(table))) == len(table.rows)


@pytest.mark.parametrize("name", ENTRIES)
def test_latex_is_ascii_balanced_and_has_the_booktabs_rules(name, tidy_three):
    text = to_latex(ENTRIES[name].build(tidy_three))
    text.encode("ascii")
    assert all(text.count(rule) >= 1 for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    opened = re.findall(r"\\begin\{(\w+)\}", text)
    assert sorted(opened) == sorted(re.findall(r"\\end\{(\w+)\}", text))
    columns = len(ENTRIES[name].build(tidy_three).shown)
    body = text.split(r"\midrule", 1)[1]
    for line in body.splitlines():
        if line.endswith(r" \\") and r"\multicolumn" not in line and "textbf{Geometric" not in line:
            assert len(re.findall(r"(?<!\\)&", line)) == columns - 1


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("name", ["table06_throughput", "table12_dgrad_error"])
def test_latex_compiles_standalone(name, tidy_three, tmp_path):
    (tmp_path / "t.tex").write_text(to_latex(ENTRIES[name].build(tidy_three)))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_latex_escapes_what_tex_would_read():
    assert latex_escape("50% of x_1 & −2") == r"50\% of x\_1 \& $-$2"


@pytest.mark.parametrize("name", MEASURED)
def test_captions_state_device_scale_and_seeds(name, tidy_one, tidy_three):
    caption = ENTRIES[name].build(tidy_one).caption
    assert "Imaginary CPU" in caption and "0.4M parameters" in caption
    if name not in ("table10_output_head", "table12_dgrad_error"):
        assert "One seed per route: run-to-run variation was not estimated." in caption
        assert "3 seeds per route" in ENTRIES[name].build(tidy_three).caption
    else:
        assert "Measured on the first of 3 seeds alone." in ENTRIES[name].build(tidy_three).caption


def test_published_digits_pass_through_the_csv_unchanged(tidy_one):
    speed = {r["route"]: r for r in rows(to_csv(ENTRIES["table06_throughput"].build(tidy_one)))[:12]}
    assert speed["nvfp4_cta"]["published_tokens_per_s"] == "33243.757890411216"
    assert speed["te_nvfp4"]["published_mfu"] == "63.988517427610"
    assert speed["depth_hybrid_global_27_5"]["published_tokens_per_s"] == ""
    loss = {r["route"]: r for r in rows(to_csv(ENTRIES["table07_endpoint_loss"].build(tidy_one)))}
    assert loss["nvfp4_global"]["published_loss"] == "2.4282"
    shown = to_markdown(ENTRIES["table07_endpoint_loss"].build(tidy_one))
    assert "2.428200" not in shown and "2.385181" in shown


def test_difference_is_measured_minus_published(tidy_one):
    for row in rows(to_csv(ENTRIES["table07_endpoint_loss"].build(tidy_one))):
        if row["loss"] and row["published_loss"]:
            expected = float(row["loss"]) - float(row["published_loss"])
            assert float(row["difference_loss"]) == pytest.approx(expected, abs=1e-12)


def test_mfu_is_blank_on_a_cpu_and_the_note_says_why(tidy_one, tidy_three):
    table = ENTRIES["table06_throughput"].build(tidy_one)
    assert all(row["mfu"] == "" for row in rows(to_csv(table)))
    assert any("MFU is blank" in note for note in table.notes)
    assert all(float(row["mfu"]) > 0 for row in rows(to_csv(ENTRIES["table06_throughput"].build(tidy_three))))


def test_seeds_bring_intervals_and_paired_tests(tidy_one, tidy_three):
    one = rows(to_csv(ENTRIES["table07_endpoint_loss"].build(tidy_one)))
    three = rows(to_csv(ENTRIES["table07_endpoint_loss"].build(tidy_three)))
    assert "p" not in one[0] and "interval_low" not in one[0]
    tested = [row for row in three if row["p_holm"]]
    assert len(tested) == 10
    assert all(float(row["p"]) <= float(row["p_holm"]) for row in tested)
    assert all(
        float(r["interval_low"]) < float(r["loss"]) < float(r["interval_high"]) for r in three if r["loss"]
    )


def test_scores_of_several_seeds_are_paired_by_seed(tidy_one, tidy_three):
    """A question asked of three runs is not three questions: the test is over seeds, McNemar only without."""
    from scipy.stats import ttest_rel

    frame = tidy_three.table("downstream")
    mine = frame[(frame["task"] == "hellaswag") & (frame["metric"] == "acc_norm")]
    wide = mine.pivot(index="seed", columns="route", values="value")
    expected = ttest_rel(wide["mxfp4_sr"], wide["bf16"])
    table = ENTRIES["table08_downstream"].build(tidy_three)
    found = {(r["task_name"], r["route"]): r for r in rows(to_csv(table))}["hellaswag", "mxfp4_sr"]
    assert float(found["p"]) == pytest.approx(expected.pvalue)
    interval = [100 * end for end in expected.confidence_interval()]
    ends = [float(found[f"difference_interval_{end}"]) for end in ("low", "high")]
    assert ends == pytest.approx(interval)
    assert any("paired t test over seeds" in note for note in table.notes)
    one = ENTRIES["table08_downstream"].build(tidy_one)
    tested = [r for r in rows(to_csv(one)) if r["p"]]
    assert tested and all(r["p"] == r["p_mcnemar"] for r in tested)
    assert any("exact McNemar" in note for note in one.notes)


def test_a_diverged_route_is_blank_and_named(tidy_one):
    table = ENTRIES["table07_endpoint_loss"].build(tidy_one)
    row = rows(to_csv(table))[-1]
    assert row["route"] == "depth_hybrid_global_27_5" and row["loss"] == "" and row["excess"] == ""
    assert any("diverged" in note for note in table.notes)


def test_best_is_marked_once_per_section_in_every_format(tidy_one):
    table = ENTRIES["table07_endpoint_loss"].build(tidy_one)
    assert {key for _, key in table.best} == {"loss", "excess", "published_loss", "published_excess"}
    assert to_markdown(table).count("**") == 2 * len(table.best)
    assert to_latex(table).count(r"\textbf") == len(table.best)
    assert to_html(table).count("<strong>") == len(table.best)


def test_best_is_what_reads_best():
    """Two values that display alike are marked alike; a digit nobody sees decides nothing."""
    column = Column("a", "A", decimals=2, best="min")
    rows = [{"a": value} for value in (0.4812, 0.4771, 0.5, 0.51)]
    assert Table("t", "t", "c", [column], rows).best == {(0, "a"), (1, "a")}
    assert Table("t", "t", "c", [column], rows[:3]).best == set()  # most have it


def test_p_values_align_and_small_ones_are_bounded():
    column = Column("p", "p", decimals=3, p=True)
    assert [cell(column, p) for p in (0.00004, 0.0123, 1.0, float("nan"))] == ["<0.001", "0.012", "1.000", ""]


def test_columns_without_any_fused_time_are_not_shown(tidy_three, tmp_path):
    path = synthetic.write(tmp_path, steps=60)
    boundary = pd.read_csv(path / "boundary.csv")
    boundary[boundary["schedule"] == "serial"].to_csv(path / "boundary.csv", index=False)
    both, serial = (ENTRIES["table11_boundary_budget"].build(t) for t in (tidy_three, Tidy(path)))
    assert "Saved %" in to_markdown(both) and "| Fused:" in to_markdown(both)
    assert "Saved %" not in to_markdown(serial) and "| Fused:" not in to_markdown(serial)
    assert any("No fused schedule was measured" in note for note in serial.notes)


def test_an_operand_that_differs_in_one_linear_is_starred_and_explained(tmp_path):
    path = synthetic.write(tmp_path, steps=60)
    frame = pd.read_csv(path / "operands.csv")
    mine = (frame["route"] == "mxfp4_sr") & (frame["contraction"] == "wgrad") & (frame["operand"] == "dy")
    frame["exception"] = pd.Series("down: scale target 2048", index=frame.index).where(mine)
    frame.to_csv(path / "operands.csv", index=False)
    text = to_markdown(ENTRIES["table04_recipe_ledger"].build(Tidy(path)))
    assert text.count("mxfp4*") == 1 and "Wgrad's dY: down: scale target 2048." in text


def test_truncated_prompts_are_told_in_words(tidy_one):
    text = to_markdown(ENTRIES["table08_downstream"].build(tidy_one))
    assert re.search(r"(no prompt|\d+ prompts?) truncated, chance", text)


def test_scores_at_chance_are_marked(tidy_one):
    table = ENTRIES["table08_downstream"].build(tidy_one)
    marked = [row for row in rows(to_csv(table)) if row["published_at_chance"] == "true"]
    assert {row["task_name"] for row in marked} == {"mmlu"}
    assert "te_nvfp4" in {row["route"] for row in marked}
    assert "bf16" not in {row["route"] for row in marked}
    assert "<sup>†</sup>" in to_html(table)


def test_decimals_align_within_a_markdown_column(tidy_one):
    lines = [
        line
        for line in to_markdown(ENTRIES["table10_output_head"].build(tidy_one)).splitlines()
        if line[:1] == "|"
    ]
    assert len({len(line) for line in lines}) == 1
    points = {line.split("|")[8].replace("*", "").find(".") for line in lines[2:]}
    assert len(points) <= 2  # bold takes two columns of the source, none when rendered


def test_dgrad_summary_stands_beside_the_published_ratio(tidy_three):
    last = rows(to_csv(ENTRIES["table12_dgrad_error"].build(tidy_three)))[-1]
    assert last["published_ratio"] == "1.292" and last["published_lower"] == "288/288"
    assert float(last["difference_ratio"]) == pytest.approx(float(last["ratio"]) - 1.292)


def test_an_unknown_route_and_a_study_without_bf16_still_make_tables(tmp_path):
    path = synthetic.write(tmp_path, steps=60, routes=("mxfp4_sr", "nvfp4_cta"))
    text = (path / "routes.csv").read_text().replace("mxfp4_sr,", "my_route,", 1)
    (path / "routes.csv").write_text(text)
    tidy = Tidy(path)
    for entry in TABLES:
        assert render(entry.build(tidy), "md")
    assert all(r["excess"] == "" for r in rows(to_csv(ENTRIES["table07_endpoint_loss"].build(tidy))))
