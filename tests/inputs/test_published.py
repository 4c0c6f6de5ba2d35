"""The author's public files: recognised, read with every digit, drawn as far as they go, the rest listed.

The ledgers themselves are not in the repository. Files with their columns are written here from the values
that `figures/published.csv` keeps, so every digit that they print can be compared.
"""

from __future__ import annotations

import csv
import hashlib
import io
from pathlib import Path

import pytest

from figures import plots, published, tables
from fp4core import _recipe_published as plan
from fp4core import recipe
from tests.workflow.pipeline import snakemake

KEYS = {r: recipe.load_recipe(r).published_key for r in recipe.list_routes()}
KEYS = {route: key for route, key in KEYS.items() if key}
PERFORMANCE = {
    "bf16": "BF16",
    "te_nvfp4": "TE-native NVFP4 full body",
    "te_nvfp4_bf16x4": "TE NVFP4 F0L4",
    "mxfp4_sr": "MXFP4-v4 + row-SR",
    "nvfp4_cta": "localCTA-v4 + row-SR",
    "nvfp4_cta_h16": "localCTA-v4 + row-SR + fixed H16",
    "depth_hybrid_27_5": "localCTA/MXFP4 hybrid",
    "nvfp4_global": "Pure v5",
    "operand_hybrid_h16": "Operand hybrid + plain H16",
    "operand_hybrid_h32": "Operand hybrid + fixed H32",
    "mxfp4_sr_h32": "MXFP4-v4 + row-SR + fixed H32",
}
TASKS = ("mmlu/acc", "hellaswag/acc_norm", "winogrande/acc", "arc_challenge/acc_norm")
HISTORY = (
    "lineage,display_name,step,loss,global_max_loss,grad_norm,tps_per_gpu,mfu,n_tokens_seen,lr,"
    "max_active_gib,max_reserved_gib,num_alloc_retries,num_ooms,value_precision,is_interpolated"
)
SNAPSHOT = (
    "lineage,display_name,step,loss,global_max_loss,grad_norm,tps_per_gpu,mfu,n_tokens_seen,lr,"
    "value_precision,is_interpolated,ema31,segment"
)


def text(table: str, route: str, metric: str, step: int | None = None) -> str:
    return published.text(table, route, metric, step) or ""


def write(path: Path, header: str, rows: list[list[str]]) -> None:
    sink = io.StringIO()
    csv.writer(sink, lineterminator="\n").writerows([header.split(","), *rows])
    path.write_text(sink.getvalue())


def validation(folder: Path) -> None:
    header = "semantic_route_key,route_label,exact_step,status,nll,sequence_level_standard_error,"
    rows = [
        [key, "label", str(s), "complete", repr(nll), repr(se), "768", "6291456", str(s * 4194304)]
        for route, key in KEYS.items()
        for s, nll, se in published.series("fig09_validation_nll", route, "nll")
    ]
    write(
        folder / "VALIDATION_LEDGER.csv",
        header + "scored_sequences,target_tokens,global_training_tokens",
        rows,
    )


def downstream(folder: Path) -> None:
    header = "semantic_route_key,route_label,exact_step,status,mmlu_acc,hellaswag_acc_norm,winogrande_acc,"
    rows = [
        [key, "label", "38000", "complete", *(text("table08_downstream", route, t) for t in TASKS)]
        for route, key in KEYS.items()
    ]
    write(folder / "DOWNSTREAM_EVAL_LEDGER.csv", header + "arc_challenge_acc_norm", rows)


def throughput(folder: Path) -> None:
    header = (
        "route,world_size,local_batch,gradient_accumulation,global_batch,probe_seed,activation_checkpoint,"
        "window,tokens_per_second_per_gpu,bf16_mfu_percent_2500_tflops_peak,median_memory_gib,status"
    )
    metrics = ("tokens_per_s", "mfu", "memory_gib")
    rows = []
    for route, label in PERFORMANCE.items():
        given = {m: text("table06_throughput", route, m) for m in (*metrics, "world_size", "local_batch")}
        more = [text("table06_throughput", route, m) for m in ("accumulation", "activation_checkpoint")]
        rows.append(
            [label, given["world_size"], given["local_batch"], more[0], "512", "42", more[1],
             "cross-node median steps 40-100; more words", *(given[m] for m in metrics), "complete"]
        )  # fmt: skip
    write(folder / "llama8b_gb200_all_route_performance_20260830.csv", header, rows)


def production(folder: Path) -> None:
    header = (
        "route,world_size,local_batch,gradient_accumulation,window,tokens_per_second_per_gpu,mfu_percent,"
        "terminal_logged_memory_range_gib,status"
    )
    labels = {
        "mxfp4_sr": "MXFP4-v4 + row-SR",
        "nvfp4_cta": "localCTA-v4 repaired",
        "depth_hybrid_27_5": "localCTA/MXFP4 hybrid",
    }
    names = ("world_size", "local_batch", "accumulation", "window", "tokens_per_s", "mfu", "memory_gib_range")
    rows = [
        [label, *(text("table09_production", route, m) for m in names), "complete"]
        for route, label in labels.items()
    ]
    write(folder / "llama8b_b300_performance_20260827.csv", header, rows)


LEDGERS = {"06": throughput, "08": downstream, "09": production, "fig09": validation}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The four ledgers' values, and a file that is none of the author's."""
    made = tmp_path_factory.mktemp("published")
    for make in LEDGERS.values():
        make(made)
    (made / "notes.csv").write_text("a,b\n")
    return made


def draw(folder: Path, results: Path, *targets: str, **config: str):
    more = [f"{k}={v}" for k, v in config.items()]
    return snakemake(
        *("--profile", "local", "--cores", "1", "--config", "study=published", f"published={folder}"),
        *(f"results={results}", *more, "--", *(targets or ("all_tables", "all_figures"))),
    )


@pytest.fixture(scope="module")
def drawn(folder, tmp_path_factory) -> tuple[Path, str]:
    results = tmp_path_factory.mktemp("results")
    done = draw(folder, results)
    assert done.returncode == 0, done.stdout
    return results / "published", done.stdout


def table(drawn, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((drawn[0] / "tables" / f"{name}.csv").open(encoding="utf-8")))


@pytest.mark.slow
class TestFourLedgers:
    def test_draws_what_they_allow(self, drawn):
        have = {path.stem for path in drawn[0].glob("*/*.*")}
        assert {"table06_throughput", "table08_downstream", "table09_production"} <= have
        assert {"fig09_validation_nll", "fig10_downstream_delta", "fig04_operand_map"} <= have
        assert not {"table07_endpoint_loss", "fig07_training_loss", "fig11_speed_quality"} & have

    def test_lists_what_is_missing_and_which_file_would_do(self, drawn):
        said = drawn[1]
        assert (
            "not drawn: table07_endpoint_loss needs endpoint: bind llama8b_160b_loss_snapshot_*.csv" in said
        )
        assert "not drawn: fig12_dgrad_error needs dgrad: no file of the author's holds it" in said
        assert "notes.csv: not used" in said

    def test_table06_has_every_printed_digit(self, drawn):
        rows = {row["route"]: row for row in table(drawn, "table06_throughput")}
        assert set(rows) == set(PERFORMANCE)
        for route, row in rows.items():
            for metric in ("tokens_per_s", "mfu", "memory_gib"):
                given = text("table06_throughput", route, metric)
                assert float(row[metric]) == float(given)
                assert row[f"published_{metric}"] == given
                assert float(row[f"difference_{metric}"]) == 0

    def test_table08_has_every_printed_digit(self, drawn):
        rows = table(drawn, "table08_downstream")
        assert len(rows) == 44
        for row in rows:
            given = text("table08_downstream", row["route"], f"{row['task_name']}/{row['metric']}")
            assert float(row["value"]) == pytest.approx(100 * float(given), abs=1e-12)
            assert row["truncated"] == "" and float(row["published_gap"]) == pytest.approx(0, abs=1e-12)

    def test_table09_has_every_printed_digit(self, drawn):
        rows = {row["route"]: row for row in table(drawn, "table09_production")}
        assert len(rows) == 3
        for route, row in rows.items():
            assert float(row["tokens_per_s"]) == float(text("table09_production", route, "tokens_per_s"))
            assert float(row["mfu"]) == float(text("table09_production", route, "mfu"))
        assert rows["mxfp4_sr"]["window"] == "37150-38140"
        assert rows["depth_hybrid_27_5"]["window"] == "16300-16300"

    def test_figures_show_the_published_values(self, drawn):
        svg = (drawn[0] / "figures" / "fig09_validation_nll.svg").read_text(encoding="utf-8")
        for route, label in (("mxfp4_sr_h32", "2.422804"), ("bf16", "2.430206"), ("mxfp4_sr", "2.593146")):
            nll = float(text("fig09_validation_nll", route, "nll", 38000))
            assert f"{nll:.6f}" == label
            assert label in svg
        svg = (drawn[0] / "figures" / "fig10_downstream_delta.svg").read_text(encoding="utf-8")
        for value in ("−3.17", "+1.32", "+1.50", "+2.47"):  # MXFP4 H32 against BF16, by task
            assert svg.count(value) >= 2

    def test_unknown_sums_are_flagged_in_every_caption(self, drawn):
        """These files have the author's values and names but not his bytes."""
        for name in ("table06_throughput", "table08_downstream", "table09_production"):
            caption = (drawn[0] / "tables" / f"{name}.md").read_text(encoding="utf-8")
            assert "the author's own logs" in caption
            assert "SHA-256 NOT among those the project knows: DOWNSTREAM_EVAL_LEDGER.csv" in caption

    def test_second_time_has_nothing_to_do(self, drawn, folder):
        assert "Nothing to be done" in draw(folder, drawn[0].parent).stdout


def test_known_sums_are_recognised(folder, tmp_path, monkeypatch):
    from eval import published as reader

    known = hashlib.sha256((folder / "VALIDATION_LEDGER.csv").read_bytes()).hexdigest()
    monkeypatch.setitem(plan.KNOWN_SUMS, known, "VALIDATION_LEDGER.csv")
    reader.main(["--published", str(folder), "--out", str(tmp_path / "tidy")])
    meta = dict(csv.reader((tmp_path / "tidy" / "meta.csv").open()))
    assert "SHA-256 known: VALIDATION_LEDGER.csv;" in meta["setting"]
    assert "VALIDATION_LEDGER.csv" not in meta["note_unknown"]
    assert meta["sha256 VALIDATION_LEDGER.csv"] == known


def test_known_sums_are_six_files_of_known_roles():
    assert len(plan.KNOWN_SUMS) == 6
    assert all(plan.role_of(name) for name in plan.KNOWN_SUMS.values())


@pytest.mark.parametrize("only", LEDGERS)
def test_any_subset_is_enough(only, tmp_path):
    LEDGERS[only](tmp_path)
    made = recipe.make_plan({"study": "published", "published": str(tmp_path)})[1]
    have = {Path(name).stem for name in (*made.table_files(), *made.figure_files())}
    gives = {
        "06": {"table06_throughput"},
        "08": {"table08_downstream", "fig10_downstream_delta"},
        "09": {"table09_production"},
        "fig09": {"fig09_validation_nll"},
    }
    assert have & set().union(*gives.values()) == gives[only]
    own = {"table01_prior_work", "table02_format_contracts", "table03_base_recipe", "table04_recipe_ledger"}
    assert have - gives[only] == own | {"table05_rounding_policy", "fig04_operand_map"}


def test_needs_are_those_of_the_drawing_code():
    """The plan must know, without importing them, what tables and figures cannot do without."""
    for entry in (*tables.TABLES, *plots.FIGURES):
        assert set(entry.needs) - {"meta", "routes"} == set(plan.NEEDS[entry.name]) - {"meta", "routes"}, (
            entry.name
        )


class TestHistories:
    """Loss histories: columns as in the author's files, a dense lineage, a sparse one, one unknown."""

    def rows(self, lineage: str, label: str, steps: list[int], extra: int, start: float) -> list[list[str]]:
        return [
            [lineage, label, str(s), repr(start + 9 / (s + 9)), "12", "1.5", "30000.5", "80",
             f"{s * 4194304}.0", "0.0003", *["x"] * (extra - 6), "exported_float_payload", "False",
             *(["2.5", "observed_series"] if extra == 6 else [])]
            for s in steps
        ]  # fmt: skip

    @pytest.fixture
    def histories(self, tmp_path) -> Path:
        folder = tmp_path / "public"
        folder.mkdir()
        dense = [1, *range(10, 38141, 10)]
        assert len(dense) == 3815
        snapshot = [
            *self.rows("bf16", "BF16 historical control", dense, 6, 2.3),
            *self.rows("pure_v5", "pure v5", list(range(500, 38141, 515))[:74], 6, 2.4),
            *self.rows("mystery", "something new", [10, 20], 6, 2.5),
        ]
        invented = self.rows("bf16", "BF16 historical control", [38145], 6, 9.0)
        snapshot.append([*invented[0][:11], "True", *invented[0][12:]])
        write(folder / "llama8b_160b_loss_snapshot_20260827.csv", SNAPSHOT, snapshot)
        history = self.rows("mxfp4_rht", "MXFP4 + fixed-sign column RHT", dense, 10, 2.35)
        write(folder / "llama8b_mxfp4_rht_history_20260831.csv", HISTORY, history)
        return folder

    def read(self, folder: Path, out: Path) -> Path:
        from eval import published as reader

        reader.main(["--published", str(folder), "--out", str(out)])
        return out

    def test_histories_become_losses_and_endpoints(self, histories, tmp_path):
        import pandas as pd

        out = self.read(histories, tmp_path / "tidy")
        frame = pd.read_parquet(out / "losses.parquet")
        counts = frame.groupby("route").size().to_dict()
        assert counts == {"bf16": 3815, "nvfp4_global": 74, "mxfp4_sr_h32": 3815}
        assert frame["step"].max() == 38140  # the interpolated row is no observation
        row = frame[(frame["route"] == "bf16") & (frame["step"] == 20)].iloc[0]
        assert (row["loss"], row["tokens"], row["tokens_per_s"]) == (2.3 + 9 / 29, 83886080, 30000.5)
        ends = list(csv.DictReader((out / "endpoint.csv").open()))
        assert {e["route"]: float(e["loss"]) for e in ends} == {
            "bf16": 2.3 + 9 / 38149,
            "mxfp4_sr_h32": 2.35 + 9 / 38149,
        }
        meta = dict(csv.reader((out / "meta.csv").open()))
        assert meta["note_left_out"] == (
            "Rows that were left out: interpolated rows (1), mystery / something new (2)."
        )

    def test_losses_are_drawn_and_sparse_ones_as_points(self, histories, tmp_path):
        from figures.__main__ import main
        from figures.data import Tidy
        from figures.plots import FIGURES, loss

        out = self.read(histories, tmp_path / "tidy")
        tidy = Tidy(out)
        assert main(["plots", "--tidy", str(out), "--out", str(tmp_path / "f"), "--only", "fig07,fig08"]) == 0
        caption = next(e for e in FIGURES if e.name == "fig07_training_loss").caption(tidy)
        assert "(74 points)" in caption and "no number uses" in caption
        data = loss.data_loss(tidy)
        sparse = data[data["sparse"]]
        assert set(sparse["route"]) == {"nvfp4_global"} and len(sparse) == 74
        raw = 2.4 + 9 / (sparse["step"] + 9)
        assert (abs(sparse["ema"] - raw) < 1e-12).all()  # raw values: smoothing is for the dense ones
        ends = loss.analysis.endpoint(tidy)
        assert ends.loc["mxfp4_sr_h32", "excess"] == pytest.approx(100 * 0.05 / (2.3 + 9 / 38149))

    def test_history_that_turns_sparse_is_smoothed_up_to_there_only(self, histories, tmp_path):
        from figures import stats
        from figures.data import Tidy
        from figures.plots import loss

        early, late = list(range(10, 19001, 10)), list(range(33000, 38141, 514))
        path = histories / "llama8b_160b_loss_snapshot_20260827.csv"
        kept = [line for line in path.read_text().splitlines() if not line.startswith("pure_v5")]
        write(path, SNAPSHOT, [*csv.reader(kept[1:]), *self.rows("pure_v5", "v5", early + late, 6, 2.4)])
        curve = loss._curves(Tidy(self.read(histories, tmp_path / "tidy")))["nvfp4_global"]
        assert curve.loc[curve["sparse"], "step"].tolist() == late
        raw = 2.4 + 9 / (curve["step"] + 9)
        assert (curve["ema"] == raw)[curve["sparse"]].all()
        assert curve.loc[~curve["sparse"], "ema"].to_numpy() == pytest.approx(stats.ema(raw[: len(early)]))
        # compared raw against raw: no number is taken from an average that spans the gap
        reference = 2.3 + 9 / (pytest.importorskip("numpy").array(late) + 9)
        below = 100 * (reference - raw[curve["sparse"]]) / reference
        measured = curve.loc[curve["sparse"] & curve["step"].isin(range(0, 38141, 10)), "relative"]
        assert measured.to_numpy() == pytest.approx(below[measured.index].to_numpy())

    def test_without_the_endpoint_only_the_zoom_is_planned(self, histories):
        name = "llama8b_160b_loss_snapshot_20260827.csv"
        path = histories / name
        kept = [line for line in path.read_text().splitlines() if ",38140," not in line]
        path.write_text("\n".join(kept) + "\n")
        assert plan.tables_from(histories, [name]) == {*plan.OWN, "losses"}
        assert "fig08_training_loss_zoom" not in plan.lacking({*plan.OWN, "losses"})
        assert "fig07_training_loss" in plan.lacking({*plan.OWN, "losses"})

    def test_one_step_with_two_losses_is_refused(self, histories, tmp_path):
        path = histories / "llama8b_mxfp4_rht_history_20260831.csv"
        path.write_text(path.read_text() + path.read_text().splitlines()[5].replace("2.", "3.", 1) + "\n")
        with pytest.raises(ValueError, match=r"row 3816: mxfp4_sr_h32 step 40 has loss .* row 5 says"):
            self.read(histories, tmp_path / "tidy")
        assert not (tmp_path / "tidy").exists()


def _cut_column(folder):
    path = folder / "VALIDATION_LEDGER.csv"
    path.write_text(path.read_text().replace("target_tokens", "tokens"))
    return r"VALIDATION_LEDGER\.csv: no column 'target_tokens'; got semantic_route_key"


def _no_number(folder):
    path = folder / "VALIDATION_LEDGER.csv"
    path.write_text(path.read_text().replace("6291456", "many", 1))
    return r"VALIDATION_LEDGER\.csv, row 1: target_tokens is 'many', needed a number"


def _short_row(folder):
    path = folder / "VALIDATION_LEDGER.csv"
    path.write_text(path.read_text() + "bf16,BF16\n")
    return r"VALIDATION_LEDGER\.csv, row 50: got another number of fields"


def _impossible_score(folder):
    path = folder / "DOWNSTREAM_EVAL_LEDGER.csv"
    path.write_text(path.read_text().replace("0.28635522005412334", "0.28636"))
    return "row 1: mmlu_acc is 0.28636, no count of right answers out of 14042"


def _other_window(folder):
    path = folder / "llama8b_gb200_all_route_performance_20260830.csv"
    path.write_text(path.read_text().replace("steps 40-100", "at the end", 1))
    return "row 1: window is 'cross-node median at the end"


def _binary(folder):
    (folder / "VALIDATION_LEDGER.csv").write_bytes(b"\xff\xfe\x00")
    return r"VALIDATION_LEDGER\.csv: no UTF-8 text"


@pytest.mark.parametrize(
    "case", [_cut_column, _no_number, _short_row, _impossible_score, _other_window, _binary]
)
def test_broken_file_is_named_and_nothing_is_written(folder, tmp_path, case):
    import shutil

    from eval import published as reader

    mine = tmp_path / "mine"
    shutil.copytree(folder, mine)
    said = case(mine)
    with pytest.raises(ValueError, match=said):
        reader.main(["--published", str(mine), "--out", str(tmp_path / "tidy")])
    assert not (tmp_path / "tidy").exists()


def test_bound_files_are_verified_when_they_are_read(folder, tmp_path):
    import shutil

    from eval import published as reader
    from fp4core.train.bind import bind

    mine, inputs = tmp_path / "mine", tmp_path / "inputs.yaml"
    shutil.copytree(folder, mine)
    bind("published", mine, inputs=inputs, note=lambda line: None)
    settings = {"study": "published", "inputs": str(inputs)}
    planned_ = recipe.make_plan(settings)[1]
    assert planned_.source(None, None) == f"--inputs {inputs}"
    reader.main(["--inputs", str(inputs), "--out", str(tmp_path / "tidy")])
    path = mine / "VALIDATION_LEDGER.csv"
    path.write_text(path.read_text().replace("2.4302059501379722", "2.3302059501379722"))
    with pytest.raises(ValueError, match=r"VALIDATION_LEDGER\.csv: sha256 expected .*, found"):
        reader.main(["--inputs", str(inputs), "--out", str(tmp_path / "again")])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"study": "published"}, "study published: no files: --config published=DIR, or fp4core bind"),
        ({"study": "published", "published": "."}, r"\.: none of the author's public files is here"),
        ({"study": "smoke", "published": "."}, "published: belongs to study=published, got study=smoke"),
        ({"study": "published", "published": ".", "from_logs": "x"}, "from_logs: study published draws the"),
    ],
    ids=["nothing bound", "nothing there", "other study", "logs too"],
)  # fmt: skip
def test_wrong_configuration(tmp_path, config, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(recipe.ConfigError, match=said):
        recipe.make_plan(config)
