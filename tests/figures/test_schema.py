"""Tidy tables are held to their row schemas, with errors that say what is wrong."""

from __future__ import annotations

import json
import math

import jsonschema
import pandas as pd
import pytest

from figures import schema
from figures.data import Tidy
from tests.figures import synthetic

NAMES = (
    "boundary", "dgrad", "downstream", "downstream_items", "endpoint",
    "execution_routes", "formats", "losses", "meta", "operands",
    "output_head", "production", "routes", "runs", "scale_rounding",
    "scaling_domains", "throughput", "training", "validation", "validation_sequences",
    "weight_2d",
)  # fmt: skip


def test_every_tidy_table_has_a_schema():
    assert list(schema.names()) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_valid_and_closed(name):
    loaded = schema.load_schema(name)
    jsonschema.Draft202012Validator.check_schema(loaded)
    assert loaded["additionalProperties"] is False
    assert set(loaded["x-key"]) <= set(loaded["required"]) <= set(loaded["properties"])
    assert all("description" in rule for rule in loaded["properties"].values())


@pytest.mark.parametrize("name", NAMES)
def test_column_check_agrees_with_json_schema_row_by_row(name, three):
    frame = schema.read_table(three, name)
    validator = jsonschema.Draft202012Validator(schema.load_schema(name))
    for row in frame.head(40).to_dict("records"):
        plain = {
            k: None if isinstance(v, float) and math.isnan(v) else v.item() if hasattr(v, "item") else v
            for k, v in row.items()
        }
        validator.validate(plain)


BROKEN = [
    ("endpoint", "route,seed,step,loss\nbf16,1,5,abc\n", "column loss, row 1: got 'abc', needed number"),
    ("endpoint", "route,seed,step,loss\nbf16,1,5.5,1\n", "column step, row 1: got '5.5', needed integer"),
    ("endpoint", "route,seed,step,loss\n,1,5,1\n", "column route, row 1: empty"),
    ("endpoint", "route,seed,step\nbf16,1,5\n", "no column 'loss'"),
    ("endpoint", "route,seed,step,loss,extra\nbf16,1,5,1,2\n", "unknown column 'extra'"),
    (
        "endpoint",
        "route,seed,step,loss\nbf16,1,5,1\nbf16,1,5,1\n",
        "route=bf16, seed=1 occurs more than once",
    ),
    ("endpoint", "", "has no header"),
    ("endpoint", "route,seed,step,loss\nbf16,-1,5,1\n", "got '-1', needed integer >= 0"),
    ("output_head", None, "got 'fp8', needed one of bf16, lowp, lowp_mxfp8_wgrad"),
    ("weight_2d", "layout,row,col,code,scale,value\nmxfp4,0,0,1,1,1\n", "needed string matching"),
]


@pytest.mark.parametrize(("name", "text", "message"), BROKEN, ids=[f"{n}-{m[:24]}" for n, _, m in BROKEN])
def test_a_broken_table_is_one_clear_error(tmp_path, name, text, message):
    if text is None:
        columns = list(schema.load_schema(name)["properties"])
        text = ",".join(columns) + "\nfp8,a,b,c,1,1,1,1\n"
    (tmp_path / schema.file_of(name)).write_text(text)
    with pytest.raises(schema.TidyError) as caught:
        schema.read_table(tmp_path, name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_values_and_diverged_losses_are_not_errors(tmp_path):
    (tmp_path / "endpoint.csv").write_text("route,seed,step,loss\na,1,5,\nb,1,5,nan\nc,1,5,2.5\n")
    losses = schema.read_table(tmp_path, "endpoint")["loss"]
    assert losses.isna().tolist() == [True, True, False]


def test_status_of_a_route_is_its_worst_run(tmp_path):
    tidy = Tidy(synthetic.write(tmp_path, seeds=(1, 2), steps=60))
    assert tidy.status["bf16"] == "complete"
    assert tidy.status["depth_hybrid_global_27_5"] == "diverged"


def test_schema_files_are_plain_json_with_a_trailing_newline():
    for path in schema.SCHEMA_DIR.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"


def test_parquet_and_csv_of_the_same_rows_read_alike(tmp_path):
    rows = pd.DataFrame([("a", 1, 5, 2.5)], columns=["route", "seed", "step", "loss"])
    rows.to_csv(tmp_path / "endpoint.csv", index=False)
    assert schema.check_frame(rows, "endpoint", "memory").equals(schema.read_table(tmp_path, "endpoint"))
