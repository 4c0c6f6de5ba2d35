"""What the carrier backend remembers about a group of linears between calls.

A group is what shares one input: q, k, v; o; gate, up; down. It is found by its producer ids, its recipe and
its device, because that is what a custom op is given; nothing here ever changes a result:

    plan      carrier type and reference exponent per view (``carrier_plan``), known on the host
    state     int32 [6, 4] on the device: per view (reference, largest, 0x8000 - smallest nonzero BF16 bits of
    a
              block maximum, misfits), written by the producers
    weights   the encoded weights, both layouts, valid for one version of the parameters

Modes. ``check`` reads the state after every producer and repeats it with a better plan when a block did not
fit: exact at once, one host synchronisation per producer. ``deferred`` never waits: ``misfits`` reads all
states of a model in one copy, between backward and the optimizer, and when it reports anything the step is
repeated in the mode ``check``, with the same random bits. A view's first call is always checked, so that
training starts with references that fit.

A repeated step costs as much as one contraction in BF16 for 400 (gate and up) to 2000 steps (q, k, v), and so
a deferred plan follows not the last tensor but all that were seen in the present and the last window of
steps (``turn``): tensors that fit one by one, but under no common reference, would otherwise repeat every
step. A tensor whose largest block has moved as well has changed its scale, not its spread, and takes its
reference along alone, once in a window.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp4core import formats
from fp4core.ops import spec as specs
from fp4core.ops.carrier_gemm import Weights
from fp4core.ops.carrier_plan import (
    CONTRACTIONS,
    DY_ROW,
    RANGE,
    VIEW_NAMES,
    VIEWS,
    W_COL,
    W_ROW,
    Plan,
    fits,
    is_mx,
    operands,
    union,
)
from fp4core.ops.host_copy import HostCopy, to_device
from fp4core.recipe import LinearRecipe, Operand

_STATES = 4096  # views per device table; 682 groups

# ADD and shift of ``fp4core.kernels.mx``: bits of a block maximum -> block exponent k
_RULES = {
    "mx_ceil": (127, 127),
    "mx_finer": (33, 127),
    "mx_floor": (0, 127),
    "ocp_floor": (0, 129),
    "ocp_rceil": (63, 129),
    "ocp_even": (32, 129),
}


# Steps of room beside the observed blocks within which a reference stays where it is, and that a deferred
# plan wants beyond all that was seen.
_ROOM = 2
# Steps by which a tensor's largest block moves with its spread; beyond, its scale has changed.
_SHIFT = 3
# Steps of room that an operand must have for its contraction to return from BF16: a window there costs up to
# one repeated step (gate and up), mostly a quarter or less of one (NOTES.md).
_RETURN = 4
_NON_FINITE = 0x7F80  # BF16 bits from which on a magnitude is infinite or NaN


def _rule(format_name: str) -> tuple[int, int]:
    fmt = formats.get(format_name)
    return _RULES["mx_finer" if fmt.finer_below is not None else fmt.algorithm]


def block_exponent(bits: int, format_name: str) -> int:
    """k of a block whose largest magnitude has these BF16 bits."""
    add, bias = _rule(format_name)
    return ((min(bits, 0x7F7F) + add) >> 7) - bias


def block_limits(low: int, high: int, format_name: str) -> tuple[int, int]:
    """(largest bits, 0x8000 - smallest bits) of block maxima with exponents in low .. high; see ``spans``."""
    add, bias = _rule(format_name)
    return ((high + bias + 1) << 7) - 1 - add, 0x8000 - max(1, ((low + bias) << 7) - add)


class _Table:
    """States of all groups of a device in one tensor, so that one copy reads them.

    ``limits``: largest (largest bits, 0x8000 - smallest bits) of a row for which its reference may stay.
    ``now``, ``before``: the same of all exact tensors in this window of steps and in the last; 0 for none.
    ``alone``: whether a reference has left the past behind in this window.
    """

    def __init__(self, device: torch.device) -> None:
        self.data = torch.zeros(_STATES, 4, dtype=torch.int32, device=device)
        self.limits = torch.zeros(_STATES, 2, dtype=torch.int32)
        self.now = torch.zeros(_STATES, 2, dtype=torch.int32)
        self.before = torch.zeros(_STATES, 2, dtype=torch.int32)
        self.alone = torch.zeros(_STATES, dtype=torch.bool)
        self.used = 0

    def rows(self, count: int) -> tuple[int, Tensor]:
        """(first row, slice) of ``count`` unused rows."""
        if self.used + count > _STATES:
            raise ValueError(f"carrier: got more than {_STATES // VIEWS} groups of linears on one device")
        first = self.used
        self.used += count
        return first, self.data[first : first + count]


class Group:
    """State of one group; see the module's text."""

    def __init__(self, producers: tuple[int, ...], spec: str, device: torch.device, fp8: bool) -> None:
        self.producers, self.spec, self.device = producers, spec, device
        self.recipe: LinearRecipe = specs.decode(spec)
        self.operands: dict[int, Operand] = operands(self.recipe)
        w_row, w_col = self.operands[W_ROW], self.operands[W_COL]
        # both weight views are then one encoding with the row view's state, while their types are equal
        self.one_weight = is_mx(w_row) and w_row == w_col and formats.get(w_row.format).two_d
        self.plan = Plan.of(self.recipe, fp8=fp8)
        self.first, self.state = _table(device).rows(VIEWS)
        self.deferred = bool(_DEFERRED.intersection((device, spec, p) for p in producers))
        self.calibrated = [not is_mx(self.operands[v]) for v in range(VIEWS)]
        self.weights = Weights()
        self._watched: list[weakref.ref[Tensor]] = []
        self.misfits = [0] * VIEWS  # tensors of each view found not to fit, when checked
        self.replays = 0  # steps repeated, counted where the first misfit was seen
        self.recheck = False  # the step is a repetition: check every view at once

    def spans(
        self, rows: list[list[int]], views: Iterable[int]
    ) -> tuple[dict[int, tuple[int, int]], list[int]]:
        """(view -> span seen, views with misfits) from the host copy of ``state``."""
        seen, bad = {}, []
        for view in views:
            if not is_mx(self.operands[view]):
                continue
            _, top, low, misfit = rows[view]
            name = self.operands[view].format
            if top:
                seen[view] = (block_exponent(0x8000 - low, name), block_exponent(top, name))
            if misfit:
                bad.append(view)
        return seen, bad

    def recent(self) -> dict[int, tuple[int, int]]:
        """View -> span of all exact tensors in this window of steps and the last."""
        table, mine = _table(self.device), slice(self.first, self.first + VIEWS)
        bits = torch.maximum(table.now[mine], table.before[mine]).tolist()
        found = self.spans([[0, top, low, 0] for top, low in bits], range(VIEWS))[0]
        if self.one_weight and W_ROW in found:
            found.setdefault(W_COL, found[W_ROW])
        return found

    def _remembered(
        self, rows: list[list[int]], seen: dict[int, tuple[int, int]], bad: list[int]
    ) -> dict[int, tuple[int, int]]:
        """Enter exact tensors into the window; view -> span that the plan should hold from here on."""
        table, past = _table(self.device), self.recent()
        wanted = {}
        for view, span in seen.items():
            row, old = self.first + view, past.get(view)
            if rows[view][1] >= _NON_FINITE:
                wanted[view] = span
                continue
            wanted[view] = union(old, span)
            moved = old is not None and view in bad and abs(span[1] - old[1]) > _SHIFT
            apart = fits("e5m2", span, _ROOM) and not fits("e5m2", wanted[view], _ROOM)
            if moved and apart and not table.alone[row]:
                wanted[view] = span
                table.alone[row] = True
                table.now[row] = table.before[row] = 0
            extremes = torch.tensor(rows[view][1:3], dtype=torch.int32)
            table.now[row] = torch.maximum(table.now[row], extremes)
        return wanted

    def settle(self, views: Iterable[int]) -> bool:
        """Read the views' states (synchronises); True when all blocks fitted, else the plan is adapted.

        On the first call of a view its reference is put where it holds what was seen, for the steps to come.
        Views that run ahead are left to ``read``, with their counts.
        """
        ahead = self.deferred and not self.recheck
        views = [v for v in views if not (ahead and self.calibrated[v])]
        rows = self.state.tolist()
        seen, bad = self.spans(rows, views)
        # an infinity or NaN is itself in BF16, as its format has it: nothing wider would hold it better
        bad = [v for v in bad if self.plan.kinds[v] != "bf16" or rows[v][1] < _NON_FINITE]
        for view in bad:
            self.misfits[view] += 1
        moving = {*bad, *(v for v in views if not self.calibrated[v])}
        if self.one_weight and W_ROW in seen and W_COL in views and W_COL not in seen:
            seen[W_COL] = seen[W_ROW]
            moving |= {W_COL} if W_ROW in moving else set()
        before = list(self.plan.refs)
        if self.deferred:
            seen = self._remembered(rows, seen, bad)
        if moving:
            self._adapt({v: s for v, s in seen.items() if v in moving})
        for v in range(VIEWS):
            if v in views:
                self.calibrated[v] = True
                # extremes start anew, so that the next call is judged by its own tensor alone
                self.state[v].copy_(torch.tensor([self.plan.refs[v], 0, 0, 0], dtype=torch.int32))
            elif self.plan.refs[v] != before[v]:
                self.state[v, 0].fill_(self.plan.refs[v])
        return not bad

    def _adapt(self, spans: dict[int, tuple[int, int]]) -> None:
        together = not self.plan.set_apart
        if not self.deferred:
            self.plan.adapt(spans)
        else:
            known = self.recent()
            for a, b, _ in CONTRACTIONS.values():  # a partner may have widened within its own room
                for view, partner in ((a, b), (b, a)):
                    if view in spans and partner not in spans and partner in known:
                        self.plan.spans[partner] = known[partner]
            self.plan.adapt(spans, room=_ROOM)
        if self.plan.set_apart and together:
            self._forget_outliers()
        self.note_limits()

    def _forget_outliers(self) -> None:
        """What was seen so far had the rows in it that are set apart from here on."""
        table, row = _table(self.device), self.first + DY_ROW
        table.now[row] = table.before[row] = 0

    def limits(self) -> list[tuple[int, int]]:
        """Per view, the extremes up to which ``read`` leaves the plan alone: ``_ROOM`` inside its range."""
        out = []
        for view in range(VIEWS):
            kind, ref = self.plan.kinds[view], self.plan.refs[view]
            if not is_mx(self.operands[view]) or kind == "bf16":
                out.append((0x8000, 0x8000))
                continue
            low, high, _, _ = RANGE[kind]
            out.append(block_limits(ref + low + _ROOM, ref + high - _ROOM, self.operands[view].format))
        return out

    def note_limits(self) -> None:
        """Tell the table what the present plan has room for; needed whenever the plan has changed."""
        limits = _table(self.device).limits
        limits[self.first : self.first + VIEWS] = torch.tensor(self.limits(), dtype=torch.int32)

    def resume(self) -> None:
        """Begin under a plan that was put in place: its references, no counts, no encodings."""
        self.state.copy_(torch.tensor([[ref, 0, 0, 0] for ref in self.plan.refs], dtype=torch.int32))
        self.note_limits()
        self.drop_weights()

    def window(self) -> list[list[int]]:
        """The group's rows of the windows, as numbers: now's two, before's two and ``alone`` per view."""
        table, mine = _table(self.device), slice(self.first, self.first + VIEWS)
        return torch.cat((table.now[mine], table.before[mine], table.alone[mine, None].int()), 1).tolist()

    def set_window(self, rows: list[list[int]]) -> None:
        """Put back what ``window`` gave."""
        table, mine = _table(self.device), slice(self.first, self.first + VIEWS)
        given = torch.tensor(rows, dtype=torch.int32)
        table.now[mine], table.before[mine], table.alone[mine] = given[:, :2], given[:, 2:4], given[:, 4] > 0

    def drop_weights(self) -> None:
        """Forget the encoded weights."""
        self.weights = Weights()

    def watch(self, weights: Iterable[Tensor]) -> None:
        """Forget the encodings when one of these, their parameters, is gone: they would hold memory for ever.

        One finaliser per parameter, however often it is encoded, and none that holds encodings itself.
        """
        self.weights.sources = [weakref.ref(w) for w in weights]
        self._watched = [seen for seen in self._watched if seen() is not None]
        for w in weights:
            if not any(seen() is w for seen in self._watched):
                self._watched.append(weakref.ref(w))
                weakref.finalize(w, self._drop_weights_of_the_dead)

    def _drop_weights_of_the_dead(self) -> None:
        # another model's parameter may have died, whose layers share this group
        if any(source() is None for source in self.weights.sources):
            self.drop_weights()

    def must_check(self, views: Iterable[int]) -> bool:
        """Whether a producer of these views has to be settled at once."""
        ahead = self.deferred and not self.recheck
        return any(is_mx(self.operands[v]) and not (ahead and self.calibrated[v]) for v in views)


_DEFERRED: set[tuple[torch.device, str, int]] = set()  # (device, spec, producer) of linears that run ahead
_TABLES: dict[torch.device, _Table] = {}
_GROUPS: dict[tuple, Group] = {}
_OF_LAYER: dict[tuple[torch.device, str, int], list[Group]] = {}  # by (device, spec, producer)


def _table(device: torch.device) -> _Table:
    if device not in _TABLES:
        _TABLES[device] = _Table(device)
    return _TABLES[device]


def fp8_capable(device: torch.device) -> bool:
    """Whether the device multiplies FP8 (sm_89 and up); the CPU emulates it."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def group(producers: Iterable[int], spec: str, device: torch.device) -> Group:
    """The group of these linears on this device, made on first use."""
    key = (tuple(producers), spec, device)
    if key not in _GROUPS:
        _GROUPS[key] = Group(key[0], spec, device, fp8_capable(device))
        for producer in key[0]:
            _OF_LAYER.setdefault((device, spec, producer), []).append(_GROUPS[key])
    return _GROUPS[key]


def linears(model: nn.Module) -> list[nn.Module]:
    """The model's quantised linears."""
    # a lookup in the instance's own attributes: a module's missing attribute costs an exception
    return [m for m in model.modules() if "producer" in m.__dict__]


def _layer(m: nn.Module) -> tuple[torch.device, str, int]:
    return m.weight.device, m.spec, m.producer


def _linears(model: nn.Module) -> set[tuple[torch.device, str, int]]:
    return {_layer(m) for m in linears(model)}


def groups(model: nn.Module) -> list[Group]:
    """Groups that the model's linears have used so far."""
    known = _linears(model)
    return [g for g in _GROUPS.values() if known.intersection((g.device, g.spec, p) for p in g.producers)]


def groups_of(layers: Iterable[nn.Module]) -> list[Group]:
    """Groups that these linears have used so far, without a look at any other."""
    return list(dict.fromkeys(g for m in layers for g in _OF_LAYER.get(_layer(m), ())))


def set_deferred(model: nn.Module, deferred: bool) -> None:
    """Mode of the model's groups, those to come included."""
    if deferred:
        _DEFERRED.update(_linears(model))
    else:
        _DEFERRED.difference_update(_linears(model))
    for g in groups(model):
        g.deferred = deferred


def forget() -> None:
    """Drop every group, with its encodings and plan."""
    _GROUPS.clear()
    _OF_LAYER.clear()
    _TABLES.clear()
    _DEFERRED.clear()


@dataclass(frozen=True)
class Misfit:
    """One view whose blocks did not fit its carrier in a step, or that was computed from one which did not.

    Attributes:
        producers: the group's producer ids.
        view: which operand.
    """

    producers: tuple[int, ...]
    view: str


class Reading:
    """The groups' states of this moment, one copy per device on its way to the host.

    Nothing is waited for until ``misfits``, and that waits for the copies alone.

    Attributes:
        flag: 0-dim bool on the (first) device, True when some block did not fit its carrier.
    """

    def __init__(self, found: list[Group]) -> None:
        """ValueError without groups."""
        if not found:
            raise ValueError("carrier: got no groups to read")
        self._parts: list[tuple[torch.device, list[Group], Tensor, HostCopy]] = []
        flags = []
        for device in dict.fromkeys(g.device for g in found):
            table = _table(device)
            mine = sorted((g for g in found if g.device == device), key=lambda g: g.first)
            places = torch.tensor([g.first + v for g in mine for v in range(VIEWS)])
            rows = table.data[: table.used]
            # a group of another model may have counts that nobody has read
            asked = rows if len(places) == table.used else rows[to_device(places, device)]
            flags.append((asked[:, 3] > 0).any())
            self._parts.append((device, mine, places, HostCopy(asked)))
        self.flag = flags[0]
        for other in flags[1:]:
            self.flag = self.flag | other.to(self.flag.device)

    def misfits(self) -> list[Misfit]:
        """What did not fit; call it once, after which the counts begin anew: see ``read``."""
        return [m for device, mine, places, copy in self._parts for m in _take(device, mine, places, copy)]


def read(found: list[Group]) -> list[Misfit]:
    """Read the groups' states in one copy per device, move references with little room, start new counts.

    A block that did not fit was written as whatever its bits gave, and all that was computed from it is as
    worthless, extremes included. So a misfit moves no plan here: the groups check every tensor of the
    repeated step at once, where each is judged by exact data, and one repetition suffices.

    The device may have no work meanwhile, so the usual case is short: when every block fitted with room to
    spare, the window takes the extremes, counts are cleared and nothing else happens. What is written to the
    device is queued there, not waited for.
    """
    return Reading(found).misfits() if found else []


def _take(device: torch.device, mine: list[Group], places: Tensor, copy: HostCopy) -> list[Misfit]:
    """The host's part of ``read`` for one device: ``copy`` is of ``mine``'s rows, which are ``places``."""
    report: list[Misfit] = []
    table, rows = _table(device), copy.wait()[0]
    misfit = bool((rows[:, 3] > 0).any())
    crowded = []
    for g in mine:
        g.recheck = misfit
    if misfit:
        bad = [(mine[i // VIEWS], i % VIEWS) for i in rows[:, 3].nonzero().flatten().tolist()]
        for g in {g for g, v in bad if v in (W_ROW, W_COL)}:
            g.drop_weights()  # its encodings are what did not fit
        bad[0][0].replays += 1
        report += [Misfit(g.producers, VIEW_NAMES[v]) for g, v in bad]
    else:
        table.now[places] = torch.maximum(table.now[places], rows[:, 1:3])
        tight = (rows[:, 1:3] > table.limits[places]).any(1).view(-1, VIEWS).any(1)
        crowded = tight.nonzero().flatten().tolist()
    for i in crowded:
        g = mine[i]
        seen = g.spans(rows[i * VIEWS : (i + 1) * VIEWS].tolist(), range(VIEWS))[0]
        recent = g.recent()
        # nothing has failed to fit, so the past alone widens no type
        g.plan.adapt({v: recent[v] if fits(g.plan.kinds[v], recent[v]) else s for v, s in seen.items()})
        g.note_limits()
    refs = torch.tensor([r for g in mine for r in g.plan.refs], dtype=torch.int32)
    if len(places) == table.used and torch.equal(refs, rows[:, 0]):
        table.data[: table.used, 1:].zero_()
    else:
        fresh = torch.nn.functional.pad(refs[:, None], (0, 3))
        table.data.index_copy_(0, to_device(places, device), to_device(fresh, device))
    return report


def turn(found: list[Group]) -> None:
    """Begin a new window of steps: what was seen before the last one is forgotten.

    Contractions return to the types that leave the spans of the last window room; otherwise a single wide
    step would keep them on BF16 for ever. Counts of misfits stay for ``read``.
    """
    for g in found:
        table, mine = _table(g.device), slice(g.first, g.first + VIEWS)
        # a view of which nothing was seen keeps what it had: weights that were not encoded again
        seen = (table.now[mine] > 0).any(1, keepdim=True)
        table.before[mine] = torch.where(seen, table.now[mine], table.before[mine])
        table.now[mine], table.alone[mine] = 0, False
        together = not g.plan.set_apart
        if g.plan.recover(g.recent(), (_RETURN, _ROOM)):
            if g.plan.set_apart and together:
                g._forget_outliers()
            g.state[:, 0].copy_(torch.tensor(g.plan.refs, dtype=torch.int32))
            g.note_limits()
