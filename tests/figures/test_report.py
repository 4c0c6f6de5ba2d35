"""report.html: one self-contained file that states what was run and what to conclude."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import pytest

from figures import headline, summary
from figures.__main__ import main
from figures.data import Tidy
from figures.plots import FIGURES
from figures.tables import TABLES
from tests.figures import browser, synthetic


class Reader(HTMLParser):
    """Collects ids, links and sources; checks that tags nest."""

    VOID = frozenset(("meta", "link", "br", "img", "hr", "input"))

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(value)
            if key in ("href", "src", "srcset", "action", "poster"):
                self.targets.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def html(results) -> str:
    return (results / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert not reader.open
    return reader


def test_nothing_is_fetched(html, page):
    assert all(target.startswith(("#", "data:")) for target in page.targets)
    assert not re.search(r"https?://", html)
    assert not re.search(r"url\(|@import", html)
    assert "script" not in page.tags


def test_every_table_and_figure_is_there_and_linked(page):
    names = [entry.name for entry in (*TABLES, *FIGURES)]
    assert set(names) <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert {f"#{name}" for name in names} <= set(page.targets)
    assert all(target[1:] in page.ids for target in page.targets if target.startswith("#"))


def test_downloads_are_the_tables_themselves(results, html):
    found = re.search(
        r'download="table07_endpoint_loss.csv" href="data:text/csv;charset=utf-8;base64,([^"]+)"', html
    )
    assert base64.b64decode(found.group(1)) == (results / "tables" / "table07_endpoint_loss.csv").read_bytes()
    assert html.count("--only fig07") == 1


def test_first_page_says_what_where_when_and_what_to_conclude(html):
    first = html.split('<h2 id="tables">')[0]
    for text in (
        "synthetic",
        "Imaginary CPU",
        "2026-01-02T03:04:05Z",
        "0.4M parameters",
        "1 seed (1)",
        "What to conclude",
    ):
        assert text in first
    assert "run-to-run variation was not estimated" in first
    assert "Samples of the benchmarks" in first


def test_provenance_lists_manifests_and_hashes(html, results, one):
    import hashlib

    assert "runs/mxfp4_sr/s1/manifest.json" in html
    assert hashlib.sha256((one / "endpoint.csv").read_bytes()).hexdigest() in html
    manifest = results / "runs" / "bf16" / "s1" / "manifest.json"
    assert hashlib.sha256(manifest.read_bytes()).hexdigest() in html


def test_every_figure_names_the_commands_behind_it(html):
    """From the record of the stage to the drawing; the manifest's own command is in the list of records."""
    for entry in FIGURES:
        shown = html.split(f'<figure id="{entry.name}">')[1].split("</figure>")[0]
        assert f"--only {entry.name.split('_')[0]}</code>" in shown
        assert "python -m eval collect --study synthetic" in shown
    loss = html.split('<figure id="fig07_training_loss">')[1].split("</figure>")[0]
    assert "python -m fp4core train --route bf16" in loss
    assert loss.index("fp4core train") < loss.index("eval collect") < loss.index("figures plots")
    assert "one of 2 records of its kind" in loss


def test_a_record_that_is_no_json_is_one_error(tmp_path):
    from figures import provenance, schema

    (tmp_path / "dgrad").mkdir()
    (tmp_path / "dgrad" / "s0.json").write_text("{")
    with pytest.raises(schema.TidyError, match=r"s0\.json is not valid JSON"):
        provenance.records(tmp_path)


def test_report_is_the_same_twice(results, one, tmp_path, html):
    again = tmp_path / "report.html"
    assert main(["report", "--tidy", str(one), "--results", str(results), "--out", str(again)]) == 0
    assert again.read_text(encoding="utf-8") == html


def test_conclusions_follow_the_data(tidy_one, tidy_three):
    one = {s.heading: s.text for s in summary.statements(tidy_one)}
    assert "11 of 12 routes completed" in one["Runs"] and "(diverged)" in one["Runs"]
    assert "no test is possible" in one["Training loss"]
    assert "takes several seeds" in one["Validation loss"]
    assert "says nothing about FP4 hardware" in one["Speed"]
    three = {s.heading: s.text for s in summary.statements(tidy_three)}
    assert "paired over seeds" in three["Validation loss"]
    assert "paired t, Holm" in three["Training loss"]
    assert "MXFP4 + row SR, 2.02 times BF16" in three["Speed"]
    verdicts = {row["route"]: row["verdict"] for row in headline.headline(tidy_one).rows}
    assert verdicts["bf16"] == "reference" and verdicts["depth_hybrid_global_27_5"] == "diverged"
    assert verdicts["mxfp4_sr"] == "worse, this run"


def test_equal_routes_are_called_indistinguishable(tmp_path):
    path = synthetic.write(tmp_path, steps=60, routes=("bf16", "mxfp4_sr"), diverged=False)
    import pandas as pd

    frame = pd.read_parquet(path / "validation_sequences.parquet")
    control = frame[frame["route"] == "bf16"].set_index(["step", "sequence"])["nll"]
    other = frame["route"] == "mxfp4_sr"
    signs = [1e-4 * (-1) ** i for i in range(other.sum())]
    keys = frame.loc[other, ["step", "sequence"]].itertuples(index=False)
    frame.loc[other, "nll"] = [control[tuple(key)] + sign for key, sign in zip(keys, signs)]
    frame.to_parquet(path / "validation_sequences.parquet")
    text = {s.heading: s.text for s in summary.statements(Tidy(path))}["Validation loss"]
    assert "not distinguishable from BF16: MXFP4 + row SR" in text


def test_the_report_is_not_said_to_agree_with_itself(tmp_path):
    """Its own files drawn as a study: the order of the excesses is the same by construction."""
    from figures import published

    path = synthetic.write(tmp_path, steps=60, diverged=False)
    assert "Agreement with the report" in {s.heading for s in summary.statements(Tidy(path))}
    losses = {slug: published.number("table07_endpoint_loss", slug, "loss") for slug in Tidy(path).slugs}
    lines = [f"{slug},1,38140,{loss}\n" for slug, loss in losses.items() if loss is not None]
    (path / "endpoint.csv").write_text("route,seed,step,loss\n" + "".join(lines))
    assert "Agreement with the report" not in {s.heading for s in summary.statements(Tidy(path))}


def test_missing_figures_are_an_error_and_partial_lists_them(one, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", "--tidy", str(one), "--results", str(tmp_path), "--out", str(out)]) == 2
    assert "python -m figures plots" in capsys.readouterr().err
    assert not out.exists()
    arguments = ["report", "--tidy", str(one), "--results", str(tmp_path), "--out", str(out), "--partial"]
    assert main(arguments) == 0
    assert "fig07_training_loss was not drawn" in out.read_text(encoding="utf-8")


@pytest.mark.skipif(browser.find() is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (390, True)], ids=["desktop", "phone-dark"])
def test_a_browser_shows_it_without_complaint(results, width, dark):
    with browser.Browser(width, 900, dark) as page:
        page.open(results / "report.html")
        assert page.complaints() == []
        assert page.value("[...document.images].filter(i => !i.naturalWidth).length") == 0
        assert page.value("document.images.length") == len(FIGURES)
        assert page.value("document.documentElement.scrollWidth") <= width
