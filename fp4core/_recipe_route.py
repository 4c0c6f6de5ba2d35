"""A route: format, rounding and Hadamard per contraction and operand, for every range of blocks.

Y = X Wᵀ. Fprop Y = Q(X) Q(W)ᵀ · Dgrad dX = Q(dY) Q(W) · Wgrad dW = Q(dY)ᵀ Q(X). A route that is no
list of these choices cannot be written down here, and whatever is here is all that a linear needs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from fp4core._recipe_load import ConfigError, build, entry, fail, read_yaml, to_plain

Rounding = Literal["nearest", "stochastic"]
Hadamard = Literal["none", "plain16", "fixed16", "fixed32"]

_SLUG = "[a-z][a-z0-9]*(_[a-z0-9]+)*"

# bf16 is the absence of a format; the rest are the keys of fp4core.formats, repeated here because every
# Slurm job parses the workflow several times and numpy would be loaded each time (a test keeps them equal)
_ONE_D = (
    "mxfp4",
    "mxfp4_decode",
    "mxfp4_ocp",
    "mxfp4_rceil",
    "mxfp4_even",
    "nvfp4",
    "nvfp4_te",
    "nvfp4_cta",
    "ue5m3",
)
_TWO_D = ("mxfp4_w2d", "nvfp4_w2d", "nvfp4_te_w2d", "nvfp4_cta_w2d", "ue5m3_w2d")
# formats whose tensor amax may be sampled and held, and the block scale that this amax is mapped to
_SAMPLED = ("ue5m3", "ue5m3_w2d")
_TARGET, _LARGEST_TARGET = 448.0, 61440.0
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


def operand_formats() -> tuple[str, ...]:
    """Every name that ``format:`` accepts, ``bf16`` included."""
    return ("bf16", *sorted(_ONE_D + _TWO_D))


@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand of one contraction is quantised."""

    format: str = entry(doc="format name, or bf16 for none", allowed=operand_formats)
    rounding: Rounding = entry("nearest", doc="stochastic is for dY only")
    hadamard: Hadamard = entry("none", doc="along tokens, for both operands of Wgrad or for neither")
    scale_target: float | None = entry(
        None,
        doc="ue5m3 only: block scale of the tensor's largest block, 448 unless given",
        above=0.0,
        max=_LARGEST_TARGET,
    )


@dataclasses.dataclass(frozen=True)
class Fprop:
    """Y = X Wᵀ."""

    x: Operand
    w: Operand


@dataclasses.dataclass(frozen=True)
class Dgrad:
    """dX = dY W."""

    dy: Operand
    w: Operand


@dataclasses.dataclass(frozen=True)
class Wgrad:
    """dW = dYᵀ X."""

    dy: Operand
    x: Operand


@dataclasses.dataclass(frozen=True)
class LinearRecipe:
    """What one linear layer needs: its three contractions."""

    fprop: Fprop
    dgrad: Dgrad
    wgrad: Wgrad


def _linear_names() -> tuple[str, ...]:
    return LINEARS


@dataclasses.dataclass(frozen=True)
class BlockGroup:
    """Consecutive blocks that share one LinearRecipe, save for the linears named in ``linears``."""

    layers: tuple[int, int] = entry(
        doc="first and last block, from 1, both included, of reference_depth", min=1
    )
    fprop: Fprop = entry(doc="Y = X Wᵀ")
    dgrad: Dgrad = entry(doc="dX = dY W")
    wgrad: Wgrad = entry(doc="dW = dYᵀ X")
    linears: dict[str, LinearRecipe] = dataclasses.field(
        default_factory=dict,
        metadata={
            "doc": "linears of these blocks that differ, with all their operands",
            "keys": _linear_names,
        },
    )

    @property
    def linear(self) -> LinearRecipe:
        return LinearRecipe(self.fprop, self.dgrad, self.wgrad)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One route of the experiment; the file name is its ``route``."""

    version: Literal[1] = entry(doc="of this file's schema")
    route: str = entry(doc="slug, equal to the file's name", pattern=_SLUG)
    label: str = entry(doc="name in tables and figures")
    groups: tuple[BlockGroup, ...] = entry(doc="cover blocks 1 to reference_depth without gap or overlap")
    published_key: str | None = entry(None, doc="the route's key in the published ledgers")
    in_report: bool = entry(True, doc="false: shown, but left out of the report's comparisons")
    implementation: Literal["fp4core", "te"] = entry(
        "fp4core", doc="te: Transformer Engine's own, where it runs"
    )
    reference_depth: int = entry(32, doc="number of blocks that layers counts in", min=1)
    amax_interval: int | None = entry(
        None,
        doc="ue5m3 only: steps from one sample of the held tensor amax to the next; null: every step",
        min=1,
    )
    order: int = entry(1000, doc="place in tables; equal places are sorted by slug", min=0)
    note: str = entry("", doc="anything a reader should know")

    def starts(self, depth: int) -> tuple[int, ...]:
        """Zero-based first block of every group in a model of ``depth`` blocks.

        A group that starts ``t`` blocks before the end of ``reference_depth`` starts
        ``round(depth * t / reference_depth)`` before the end here, and every group keeps a block.
        """
        count = len(self.groups)
        if depth < count:
            raise ConfigError(
                f"route {self.route}: got a model of {depth} blocks, needed at least {count}, one per group"
            )
        starts = [0]
        for index, group in enumerate(self.groups[1:], start=1):
            tail = self.reference_depth - group.layers[0] + 1
            scaled = max(count - index, round(depth * tail / self.reference_depth))
            starts.append(max(starts[-1] + 1, depth - scaled))
        return tuple(starts)

    def for_block(self, i0: int, depth: int, linear: str | None = None) -> LinearRecipe:
        """Recipe of block ``i0`` (from 0) in a model of ``depth`` blocks. Raises ValueError out of range.

        Of its linears in general, or of the one called ``linear`` (q, k, v, o, gate, up, down).
        """
        if not 0 <= i0 < depth:
            raise ValueError(f"route {self.route}: got block {i0}, needed 0 to {depth - 1}")
        group = self.groups[max(k for k, start in enumerate(self.starts(depth)) if start <= i0)]
        return group.linears.get(linear, group.linear)

    def canonical(self) -> dict[str, Any]:
        """What can change a number, and nothing else; neighbours with equal content are merged."""
        merged: list[dict[str, Any]] = []
        for group in self.groups:
            plain = _without_absent(to_plain(group))
            layers = plain.pop("layers")
            if merged and merged[-1]["linear"] == plain:
                merged[-1]["layers"][1] = layers[1]
            else:
                merged.append({"layers": layers, "linear": plain})
        sampled = {} if self.amax_interval is None else {"amax_interval": self.amax_interval}
        return {
            "implementation": self.implementation,
            "reference_depth": self.reference_depth,
            "groups": merged,
            **sampled,
        }

    @property
    def hash(self) -> str:
        """First 12 hex digits of the SHA-256 of ``canonical()`` as sorted JSON."""
        return digest(self.canonical())


def _without_absent(plain: Any) -> Any:
    """Plain data without what says nothing: no scale target, no differing linears."""
    if not isinstance(plain, dict):
        return plain
    empty = {"scale_target": None, "linears": {}}
    return {k: _without_absent(v) for k, v in plain.items() if k not in empty or v != empty[k]}


def digest(content: Any) -> str:
    """First 12 hex digits of the SHA-256 of ``content`` as compact JSON with sorted keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_route(path: Path) -> Recipe:
    """The recipe in ``path``. Raises ConfigError with one line per mistake."""
    recipe = recipe_from_dict(read_yaml(path), str(path))
    if recipe.route != path.stem:
        fail(str(path), "route", f"got {recipe.route!r}, needed {path.stem!r}, the name of the file")
    return recipe


def recipe_from_dict(data: Any, where: str = "recipe") -> Recipe:
    """A checked Recipe from parsed YAML or JSON."""
    recipe = build(Recipe, data, where)
    if not recipe.groups:
        fail(where, "groups", "got an empty list, needed at least one group of blocks")
    expected = 1
    for index, group in enumerate(recipe.groups):
        key = f"groups[{index}]"
        first, last = group.layers
        if first > last:
            fail(where, f"{key}.layers", f"got [{first}, {last}], needed first <= last")
        if first != expected:
            what = (
                "overlaps the group before it"
                if first < expected
                else f"leaves block {expected} without a recipe"
            )
            fail(
                where, f"{key}.layers", f"got [{first}, {last}], which {what}; needed to start at {expected}"
            )
        expected = last + 1
        _check_linear(group.linear, where, key)
        for name, linear in group.linears.items():
            _check_linear(linear, where, f"{key}.linears.{name}")
    depth = recipe.reference_depth
    if expected != depth + 1:
        what = (
            f"blocks {expected}-{depth} have no recipe"
            if expected <= depth
            else "that is past reference_depth"
        )
        last = expected - 1
        fail(
            where,
            f"groups[{len(recipe.groups) - 1}].layers",
            f"got last block {last}, needed {depth}: {what}",
        )
    linears = [linear for group in recipe.groups for linear in (group.linear, *group.linears.values())]
    if recipe.amax_interval is not None and not any(
        operand.format in _SAMPLED for linear in linears for _, _, operand in operands(linear)
    ):
        fail(where, "amax_interval", f"got {recipe.amax_interval}, but no operand is {' or '.join(_SAMPLED)}")
    return recipe


def _check_linear(linear: LinearRecipe, where: str, key: str) -> None:
    for contraction, name, operand in operands(linear):
        place = f"{key}.{contraction}.{name}"
        if operand.rounding == "stochastic":
            if name != "dy":
                fail(
                    where, f"{place}.rounding", "got stochastic; allowed: nearest (stochastic is for dy only)"
                )
            if operand.format == "bf16":
                fail(
                    where,
                    f"{place}.rounding",
                    "got stochastic for bf16; allowed: nearest (or choose an FP4 format)",
                )
        if operand.hadamard != "none" and contraction != "wgrad":
            fail(
                where,
                f"{place}.hadamard",
                f"got {operand.hadamard} in {contraction}; allowed: none (only wgrad contracts over tokens)",
            )
        if operand.scale_target is not None and operand.format not in _SAMPLED:
            fail(
                where,
                f"{place}.scale_target",
                f"got {operand.scale_target} for {operand.format}; allowed for {', '.join(_SAMPLED)} only",
            )
        if operand.format in _TWO_D and name != "w":
            one_d = operand.format.removesuffix("_w2d")
            fail(
                where,
                f"{place}.format",
                f"got {operand.format}, a weight format, for {name}; needed e.g. {one_d}",
            )
    dy, x = linear.wgrad.dy.hadamard, linear.wgrad.x.hadamard
    if dy != x:
        fail(
            where,
            f"{key}.wgrad",
            f"got hadamard {dy} for dy and {x} for x, needed the same for both: they cancel in pairs",
        )


def operands(linear: LinearRecipe) -> tuple[tuple[str, str, Operand], ...]:
    """(contraction, operand name, operand) of the six operands of a linear, in a fixed order."""
    return (
        ("fprop", "x", linear.fprop.x),
        ("fprop", "w", linear.fprop.w),
        ("dgrad", "dy", linear.dgrad.dy),
        ("dgrad", "w", linear.dgrad.w),
        ("wgrad", "dy", linear.wgrad.dy),
        ("wgrad", "x", linear.wgrad.x),
    )
