"""The Transformer Engine backend against the signatures of released packages; the package itself never runs.

A stand-in whose callables take exactly what the released ones take (tests/golden/te) lets our code run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fp4core
from fp4core.ops import linear as linears
from fp4core.ops import spec as specs
from fp4core.ops import te_support
from fp4core.recipe import load_recipe

SIGNATURES = json.loads((Path(__file__).parents[1] / "golden" / "te" / "signatures.json").read_text())


class Recorder:
    """What the stand-in was asked for."""

    def __init__(self, version: str) -> None:
        self.signatures, self.calls, self.depth = SIGNATURES[version], [], 0

    def bind(self, name: str, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Arguments by name; TypeError, as Python itself would raise, when the released callable has no
        such."""
        parameters = [
            inspect.Parameter(p["name"], getattr(inspect.Parameter, p["kind"].upper()))
            if p["required"]
            else inspect.Parameter(p["name"], getattr(inspect.Parameter, p["kind"].upper()), default=None)
            for p in self.signatures[name]
        ]
        bound = dict(inspect.Signature(parameters).bind(*args, **kwargs).arguments)
        self.calls.append((name.removeprefix("transformer_engine."), bound))
        return bound


def package(recorder: Recorder) -> dict[str, types.ModuleType]:
    """Modules of the stand-in."""
    te, common = (
        types.ModuleType("transformer_engine.pytorch"),
        types.ModuleType("transformer_engine.common.recipe"),
    )
    prefix = "transformer_engine.pytorch."

    class Linear(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            asked = recorder.bind(f"{prefix}Linear", args, kwargs)
            shape = (asked["out_features"], asked["in_features"])
            self.weight = nn.Parameter(
                torch.empty(shape, dtype=asked["params_dtype"], device=asked["device"])
            )

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            inp = recorder.bind(f"{prefix}Linear.forward", args, kwargs)["inp"]
            assert recorder.depth == 1 and inp.dtype == self.weight.dtype == torch.bfloat16
            return nn.functional.linear(inp, self.weight)

    @contextlib.contextmanager
    def region(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        asked = recorder.bind(f"{prefix}{name}", args, kwargs)
        assert asked["enabled"] is True
        recorder.depth += 1
        yield
        recorder.depth -= 1

    te.Linear = Linear
    for name in ("autocast", "fp8_autocast"):
        if prefix + name in recorder.signatures:
            setattr(te, name, lambda *a, name=name, **k: region(name, *a, **k))
    if f"{prefix}is_nvfp4_available" in recorder.signatures:
        te.is_nvfp4_available = lambda **k: (bool(recorder.bind(f"{prefix}is_nvfp4_available", (), k)), "")
    else:
        te.fp8 = types.SimpleNamespace(check_nvfp4_support=lambda: (True, ""))
    fields = [p["name"] for p in recorder.signatures["transformer_engine.common.recipe.NVFP4BlockScaling"]]
    common.NVFP4BlockScaling = dataclasses.make_dataclass(
        "NVFP4BlockScaling", [(n, Any, None) for n in fields]
    )
    return {"transformer_engine.pytorch": te, "transformer_engine.common.recipe": common}


@pytest.fixture(params=list(SIGNATURES))
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Transformer Engine of a released version, a GPU that fits, and our backend loaded."""
    recorder = Recorder(request.param)
    for name, module in package(recorder).items():
        monkeypatch.setitem(sys.modules, name, module)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: request.param if n == te_support.PACKAGE else version(n)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    clear()
    yield recorder
    sys.modules.pop("fp4core.ops.te_backend", None)
    linears._BACKENDS.pop("te", None)
    clear()


def clear() -> None:
    te_support.problem.cache_clear()
    te_support.calls.cache_clear()


def test_calls_fit_the_released_signatures(installed: Recorder) -> None:
    backend = importlib.import_module("fp4core.ops.te_backend")
    recipe = load_recipe("te_nvfp4").for_block(0, 32)
    assert recipe == backend.NUMERICS
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    weights = [nn.Parameter(torch.randn(n, 32)) for n in (16, 48)]
    spec, state = specs.encode(recipe), torch.zeros(3, dtype=torch.int64)
    outputs = backend.linears(x, weights, state, spec, [0, 4])
    assert [y.shape for y in outputs] == [(16, 16), (16, 48)]
    sum(y.float().sum() for y in outputs).backward()
    assert x.grad.dtype == torch.bfloat16 and all(w.grad.dtype == torch.float32 for w in weights)
    names = [name for name, _ in installed.calls]
    assert names.count("pytorch.Linear") == 2 and names.count("pytorch.Linear.forward") == 2
    assert names.count("pytorch.autocast") + names.count("pytorch.fp8_autocast") == 1
    asked = next(a for n, a in installed.calls if n in ("pytorch.autocast", "pytorch.fp8_autocast"))
    used = asked.get("recipe") or asked.get("fp8_recipe")
    # every knob that the release has is set, so that no environment variable decides
    knobs = {k: v for k, v in dataclasses.asdict(used).items() if k in te_support.KNOBS}
    assert knobs == {k: v for k, v in te_support.KNOBS.items() if k in dataclasses.asdict(used)}
    assert {"disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"} <= knobs.keys()
    # modules are kept, and hold no storage
    backend.linears(x, weights, state, spec, [0, 4])
    assert [n for n, _ in installed.calls].count("pytorch.Linear") == 2
    assert backend._layer(0, 16, 32).weight.is_meta


def test_bf16_blocks_stay_outside_the_autocast(installed: Recorder) -> None:
    backend = importlib.import_module("fp4core.ops.te_backend")
    installed.calls.clear()
    recipe = load_recipe("te_nvfp4_bf16x4").for_block(31, 32)
    x, w = torch.ones(4, 8).bfloat16(), torch.ones(3, 8)
    state = torch.zeros(3, dtype=torch.int64)
    (y,) = backend.linears(x, [w], state, specs.encode(recipe), [0])
    assert torch.equal(y, torch.full((4, 3), 8.0).bfloat16()) and not installed.calls
    with pytest.raises(
        ValueError, match=r"Transformer Engine computes .*nvfp4_te.* or BF16; use backend='auto'"
    ):
        backend.linears(x, [w], state, specs.encode(load_recipe("mxfp4_sr").for_block(0, 32)), [0])


def test_te_routes_prefer_it_on_a_gpu_and_only_there(installed: Recorder) -> None:
    assert linears.preferred_backend(load_recipe("te_nvfp4"), "auto") == linears.AUTO_TE
    assert linears.preferred_backend(load_recipe("mxfp4_sr"), "auto") == "auto"
    assert linears.preferred_backend(load_recipe("te_nvfp4"), "reference") == "reference"
    assert linears.resolve_backend(linears.AUTO_TE, "cuda") == "te"
    assert linears.resolve_backend(linears.AUTO_TE, "cpu") == "reference"


def test_generator_is_seeded_by_the_runs_own_numbers(
    installed: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = importlib.import_module("fp4core.ops.te_backend")
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    for numbers in ((1, 2, 3), (1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3)):
        backend.seed_generator(*numbers)
    assert seeds[0] == seeds[1] and len(set(seeds)) == 4 and all(0 <= s < 2**63 for s in seeds)


def test_without_it_its_routes_run_on_our_own_kernels() -> None:
    clear()
    assert linears.resolve_backend(linears.AUTO_TE, "cpu") == "reference"
    layer = fp4core.Linear(32, 16, load_recipe("te_nvfp4").for_block(0, 32), backend=linears.AUTO_TE)
    assert layer(torch.ones(2, 32)).shape == (2, 16)
    with pytest.raises(
        ValueError, match="linear backend 'te' cannot run here: Transformer Engine is not installed"
    ):
        fp4core.Linear(32, 16, load_recipe("te_nvfp4").for_block(0, 32), backend="te")


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (None, "Transformer Engine is not installed"),
        ("2.7.0", "2.7.0 is too old; NVFP4 needs 2.8 or later"),
        ("3.0.0", "3.0.0 is newer than what was checked"),
        ("2.20.2+cu13", "needs a CUDA GPU of sm_100"),
        # as nightly builds, containers and broken installations write it
        ("2.8rc1", "needs a CUDA GPU of sm_100"),
        ("2.9.0.dev0+0123abc", "needs a CUDA GPU of sm_100"),
        ("2.10", "needs a CUDA GPU of sm_100"),
        ("1!2.8.0", "needs a CUDA GPU of sm_100"),
        ("2", "2 is too old"),
        ("2.7.99.post1", "2.7.99.post1 is too old"),
        ("12.0", "12.0 is newer than what was checked"),
        ("unknown", "version 'unknown' cannot be read"),
        ("", "version '' cannot be read"),
    ],
)
def test_one_clear_reason(version: str | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clear()
    assert text in te_support.problem() and "\n" not in te_support.problem()
    clear()


@given(st.text(max_size=20) | st.from_regex(r"\A[vV]?[0-9]{1,3}([.!+a-z0-9-]{0,12})\Z") | st.none())
@settings(max_examples=300, deadline=None)
def test_no_version_is_worse_than_a_reason(version: str | None) -> None:
    """Whatever the metadata says (it may say nothing at all), the answer is one line or "usable"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: version)
        reason = te_support.version_problem()
    assert len(reason.splitlines()) <= 1
    if reason == "":
        assert str(version).lstrip().lstrip("v")[0].isdecimal()


@given(
    st.integers(0, 40), st.integers(0, 400), st.sampled_from(["", ".0", ".3.post1", "rc2", ".dev7", "+cu13"])
)
@settings(max_examples=200, deadline=None)
def test_versions_order_by_their_numbers(major: int, minor: int, rest: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: f"{major}.{minor}{rest}")
        assert (te_support.version_problem() == "") == ((2, 8) <= (major, minor) < (3, 0))


def test_every_knob_of_the_released_recipe_is_set() -> None:
    """A field left alone takes its value from an environment variable."""
    fields = {p["name"] for p in SIGNATURES["2.20.2"]["transformer_engine.common.recipe.NVFP4BlockScaling"]}
    assert fields - te_support.KNOBS.keys() == {"fp4_format", "fp8_format"}  # constants


def test_a_package_that_does_not_load_is_a_reason(
    installed: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear()
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "Linear")
    assert te_support.problem().startswith("Transformer Engine cannot be used (AttributeError: ")
    clear()
    te = sys.modules["transformer_engine.pytorch"]
    monkeypatch.setattr(te, "Linear", nn.Linear, raising=False)
    monkeypatch.setattr(
        te, "is_nvfp4_available", lambda return_reason: (False, "capability 10.0"), raising=False
    )
    assert te_support.problem() == "Transformer Engine says: capability 10.0"
    clear()
    monkeypatch.setattr(te, "is_nvfp4_available", lambda return_reason: (False, ""))
    assert te_support.problem() == "Transformer Engine says: no reason given"
