"""Which carrier holds each operand of a contraction, and with which reference exponent.

A carrier is the decoded operand E2M1 x 2^(k - ref) in the narrowest type that holds it exactly; the GEMM
multiplies by 2^ref. ``ref`` is one exponent for a whole tensor. It never changes a result: it only decides
whether every block's k - ref lies in the type's range.

    type   k - ref held exactly     GEMM partner
    e5m2   -15 .. 13  (29 steps)    e4m3, or e5m2 by a Triton product
    e4m3    -8 ..  6  (15 steps)    e5m2 or e4m3
    bf16   all that occur           bf16, at half the rate

cuBLAS has no E5M2 x E5M2 product, so one operand of every contraction is E4M3: W in Fprop and Dgrad, X in
Wgrad, unless the observed spans ask for the swap, or for E5M2 on both sides (a Triton product, 10 to 40%
slower). A block outside the range is counted by its producer ("misfit"), never rounded into range silently:
the tensor, or in deferred mode the whole step, is made again under the plans that ``Plan.adapt`` makes
(``carrier_groups``).

Formats whose block scale is no power of two (NVFP4, UE5M3) always use BF16 carriers, which hold every
E2M1 x E4M3 and E2M1 x UE5M3 product; their outer scales go to the GEMM's epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fp4core import formats
from fp4core.recipe import LinearRecipe, Operand

# Views of one group of linears; the first four numbers are also the last two bits of a producer id.
DY_ROW, DY_COL, X_ROW, X_COL, W_ROW, W_COL = range(6)
VIEWS = 6
# Binades that a scaled row may span in an E5M2 carrier of 29 beside others: their largest blocks take two
# steps, and a rotation may make a block smaller than it was when the row was looked at (``row_scale``).
WIDEST = 24
VIEW_NAMES = ("dy_row", "dy_col", "x_row", "x_col", "w_row", "w_col")

# type -> smallest and largest k - ref whose block it holds exactly, smallest and largest ref the producers
# take
RANGE = {"e5m2": (-15, 13, -100, 22), "e4m3": (-8, 6, -100, 14)}
# contraction -> (left view, right view, preferred types of the two)
CONTRACTIONS = {
    "fprop": (X_ROW, W_ROW, ("e5m2", "e4m3")),
    "dgrad": (DY_ROW, W_COL, ("e5m2", "e4m3")),
    "wgrad": (DY_COL, X_COL, ("e5m2", "e4m3")),
}
_EMPTY = (0, -1)  # span of a tensor without a nonzero block


def is_mx(operand: Operand) -> bool:
    """Whether the operand's block scales are powers of two."""
    return operand.format != "bf16" and formats.get(operand.format).block_scale == "e8m0"


def constant_of(operand: Operand) -> float:
    """Constant outer scale of the operand's format; 1 where the outer scale is on the device or absent."""
    if operand.format == "bf16":
        return 1.0
    fmt = formats.get(operand.format)
    return fmt.outer_constant if fmt.outer == "constant" else 1.0


def operands(recipe: LinearRecipe) -> dict[int, Operand]:
    """View -> operand."""
    f, d, w = recipe.fprop, recipe.dgrad, recipe.wgrad
    return {X_ROW: f.x, W_ROW: f.w, DY_ROW: d.dy, W_COL: d.w, DY_COL: w.dy, X_COL: w.x}


def width(span: tuple[int, int]) -> int:
    """Number of scale steps from the smallest to the largest block exponent."""
    return max(0, span[1] - span[0] + 1)


def fits(kind: str, span: tuple[int, int], room: int = 0) -> bool:
    """Whether some reference lets ``kind`` hold every block of the span, and ``room`` steps more."""
    if kind == "bf16" or width(span) == 0:
        return True
    low, high, first, last = RANGE[kind]
    return width(span) + room <= high - low + 1 and first <= reference(kind, span) <= last


def reference(kind: str, span: tuple[int, int]) -> int:
    """Reference exponent that centres the span in E4M3's range; in E5M2's a third of the room is above.

    E5M2 has room to spare for rows of activations, and holds gradients, whose largest block hardly moves from
    step to step, but the smallest by many binades (NOTES.md).
    """
    if kind == "bf16" or width(span) == 0:
        return 0
    low, high, _, _ = RANGE[kind]
    slack = (high - low + 1) - width(span)
    return span[1] + slack // (3 if kind == "e5m2" else 2) - high


def union(a: tuple[int, int] | None, b: tuple[int, int]) -> tuple[int, int]:
    """Smallest span that holds both."""
    return b if a is None else (min(a[0], b[0]), max(a[1], b[1]))


def choose_types(
    left: tuple[int, int],
    right: tuple[int, int],
    preferred: tuple[str, str],
    rooms: tuple[int, int] = (0, 0),
) -> tuple[str, str]:
    """Carrier types of a contraction's operands: the first of ``_choices`` that leaves them their rooms."""
    for kinds in _choices(preferred):
        if fits(kinds[0], left, rooms[0]) and fits(kinds[1], right, rooms[1]):
            return kinds
    raise AssertionError("BF16 holds every span")


def _choices(preferred: tuple[str, str]) -> list[tuple[str, str]]:
    """As preferred, swapped, both E5M2, or BF16 for both: ever slower."""
    return [preferred, (preferred[1], preferred[0]), ("e5m2", "e5m2"), ("bf16", "bf16")]


@dataclass
class Plan:
    """Carrier type and reference exponent of the six views of one group of linears.

    Attributes:
        kinds: view -> "e5m2", "e4m3" or "bf16".
        refs: view -> reference exponent, 0 for BF16.
        spans: view -> (smallest, largest) block exponent that the plan was last adapted to; None before.
        mx: contractions whose two operands are MX, the only ones that may use FP8.
        fallbacks: how often a contraction left its preferred types, by contraction.
        can_set_apart: whether the producer of dY's row view can set rows apart that are too wide
            (``row_scale``).
        set_apart: whether it does; then those rows are in no span.
    """

    kinds: list[str]
    refs: list[int]
    mx: frozenset[str]
    spans: list[tuple[int, int] | None] = field(default_factory=lambda: [None] * VIEWS)
    fallbacks: dict[str, int] = field(default_factory=dict)
    can_set_apart: bool = False
    set_apart: bool = False

    @classmethod
    def of(cls, recipe: LinearRecipe, *, fp8: bool) -> Plan:
        """The preferred plan of a recipe; ``fp8`` says whether the device multiplies FP8."""
        ops = operands(recipe)
        mx = frozenset(
            name for name, (a, b, _) in CONTRACTIONS.items() if fp8 and is_mx(ops[a]) and is_mx(ops[b])
        )
        kinds = ["bf16"] * VIEWS
        for name in mx:
            a, b, preferred = CONTRACTIONS[name]
            kinds[a], kinds[b] = preferred
        return cls(kinds=kinds, refs=[0] * VIEWS, mx=mx)

    def contraction_kinds(self) -> dict[str, tuple[str, str]]:
        """Present carrier types of the contractions that may use FP8."""
        return {name: (self.kinds[a], self.kinds[b]) for name in self.mx for a, b, _ in (CONTRACTIONS[name],)}

    def adapt(self, seen: dict[int, tuple[int, int]], room: int = 0) -> list[str]:
        """Take spans over: new references, and new types where a span and ``room`` are too wide.

        A contraction that fell back to BF16 stays there until ``recover``: what was too wide once comes back.
        Returns one line per contraction whose types changed.
        """
        for view, span in seen.items():
            self.spans[view] = span
        changed = self._set_apart(seen, room)
        for name in sorted(self.mx):
            a, b, preferred = CONTRACTIONS[name]
            before = (self.kinds[a], self.kinds[b])
            moved = {a, b} & seen.keys()
            spans = tuple(_EMPTY if self.spans[v] is None else self.spans[v] for v in (a, b))
            spare = [room if v in seen else 0 for v in (a, b)]
            held = all(map(fits, before, spans, spare))
            if before != ("bf16", "bf16") and not held:
                after = choose_types(spans[0], spans[1], preferred, (room, room))
                self.kinds[a], self.kinds[b] = after
                self.fallbacks[name] = self.fallbacks.get(name, 0) + 1
                moved = {a, b}
                changed.append(
                    f"{name}: {VIEW_NAMES[a]} spans {width(spans[0])} and {VIEW_NAMES[b]} {width(spans[1])} "
                    f"scale steps, {before[0]} x {before[1]} -> {after[0]} x {after[1]}"
                )
            for view in moved:
                if self.spans[view] is not None:
                    self.refs[view] = reference(self.kinds[view], self.spans[view])
        return changed

    def _set_apart(self, seen: dict[int, tuple[int, int]], room: int) -> list[str]:
        """Begin to set rows of dY apart where they are what does not fit; the span is then of the others."""
        span, kind = seen.get(DY_ROW), self.kinds[DY_ROW]
        if span is None or kind != "e5m2" or self.set_apart or not self.can_set_apart:
            return []
        if fits(kind, span, room):
            return []
        self.set_apart = True
        self.spans[DY_ROW] = _without_outliers(span)
        return [f"dgrad: dy_row spans {width(span)} scale steps, rows too wide for {kind} are set apart"]

    def recover(self, seen: dict[int, tuple[int, int]], rooms: tuple[int, int]) -> bool:
        """Go back to faster types where these spans leave the operands their rooms; whether any changed.

        Rows of dY that can be set apart keep nothing in BF16, and need no room: they are not in the carrier.
        """
        changed = False
        for name in sorted(self.mx):
            a, b, preferred = CONTRACTIONS[name]
            if a not in seen or b not in seen:
                continue
            choices, present = _choices(preferred), (self.kinds[a], self.kinds[b])
            spans, left = (seen[a], seen[b]), rooms[0]
            apart = a == DY_ROW and self.can_set_apart and not fits("e5m2", seen[a], left)
            if apart:
                spans, left = (_without_outliers(seen[a]), seen[b]), 0
            kinds = choose_types(*spans, preferred, (left, rooms[1]))
            if choices.index(kinds) < choices.index(present):
                changed = True
                self.set_apart |= apart
                for view, kind, span in zip((a, b), kinds, spans):
                    self.kinds[view], self.spans[view] = kind, span
                    self.refs[view] = reference(kind, span)
        return changed


def _without_outliers(span: tuple[int, int]) -> tuple[int, int]:
    """Of a span of scaled rows what is left without those that are set apart."""
    return max(span[0], span[1] - WIDEST - 1), span[1]
