"""What to conclude: statements computed from the tidy tables, each with its uncertainty and its limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from figures import analysis, published, stats
from figures.data import REFERENCE, Tidy
from figures.numbers import count, fixed, p_equals


@dataclass(frozen=True)
class Statement:
    """One conclusion: a short heading, the sentences, and the id of the table or figure that shows it."""

    heading: str
    text: str
    see: str


def statements(tidy: Tidy) -> list[Statement]:
    """All statements that the tables at hand allow, in reading order."""
    found = [runs(tidy), learning(tidy), endpoint(tidy), validation(tidy), ranking(tidy), downstream(tidy)]
    return [s for s in [*found, speed(tidy), dgrad(tidy)] if s is not None]


def _names(tidy: Tidy, slugs) -> str:
    names = [tidy.label(slug) for slug in slugs]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def runs(tidy: Tidy) -> Statement | None:
    """What trained, what did not finish."""
    if not tidy.has("runs"):
        return None
    states = tidy.status
    done = [r for r in tidy.ordered(states) if states[r] == "complete"]
    seeds = count(max(1, len(tidy.seeds)), "seed")
    text = f"{len(done)} of {count(len(states), 'route')} completed, with {seeds} each."
    others = [r for r in tidy.ordered(states) if states[r] != "complete"]
    if others:
        text += " Not complete: " + ", ".join(f"{tidy.label(r)} ({states[r]})" for r in others) + "."
    if len(tidy.seeds) <= 1:
        text += (
            " With one seed, run-to-run variation was not estimated: a difference below may be the seed's."
        )
    return Statement("Runs", text, "fig07_training_loss")


def learning(tidy: Tidy) -> Statement | None:
    """Does the control learn: late against early checkpoint."""
    if not tidy.has("validation"):
        return None
    frame = analysis.validation(tidy)
    mine = frame[(frame["route"] == REFERENCE) & frame["nll"].notna()].sort_values("step")
    if len(mine) < 2:
        return None
    early, late = mine.iloc[0], mine.iloc[-1]
    drop, error = early["nll"] - late["nll"], float(np.hypot(early["se"], late["se"]))
    text = (
        f"BF16 goes from {early['nll']:.4f} nats/token at step {int(early['step']):,} to {late['nll']:.4f} "
        f"at step {int(late['step']):,}: {drop:.3f} lower"
    )
    if np.isfinite(error) and error > 0:
        enough = "more" if drop > 5 * error else "less"
        text += f", {drop / error:.1f} sequence-level standard errors "
        text += f"({enough} than the five that a comparison needs)"
    return Statement(
        "The control learns" if drop > 0 else "The control does not learn", text + ".", "fig09_validation_nll"
    )


def endpoint(tidy: Tidy) -> Statement | None:
    """Order of the endpoint losses, and which excesses are distinguishable when seeds allow a test."""
    if not tidy.has("endpoint"):
        return None
    frame = analysis.endpoint(tidy)
    known = frame[(frame.index != REFERENCE) & frame["excess"].notna()].sort_values("excess")
    if known.empty:
        return None
    best, worst = known.iloc[0], known.iloc[-1]
    text = (
        f"At step {int(frame['step'].max()):,} the smallest excess over BF16 is "
        f"{fixed(float(best['excess']), 2, signed=True)}% ({tidy.label(known.index[0])}), the largest "
        f"{fixed(float(worst['excess']), 2, signed=True)}% ({tidy.label(known.index[-1])})."
    )
    if int(frame["seeds"].max()) > 1:
        clear = [r for r in known.index if known.loc[r, "p_holm"] < stats.ALPHA]
        text += (
            f" Over {count(int(frame['seeds'].max()), 'seed')}, {len(clear)} of {len(known)} excesses differ "
        )
        text += "from zero (paired t, Holm, 5%)"
        text += f": {_names(tidy, clear)}." if clear else "."
    else:
        text += " These are raw losses of one batch from one run per route; no test is possible."
    return Statement("Training loss", text, "table07_endpoint_loss")


def verdicts(tidy: Tidy) -> pd.DataFrame:
    """Validation at the last shared step, with the p value that counts: over seeds when there are several."""
    step = analysis.last_shared_step(tidy)
    frame = analysis.validation(tidy)
    frame = frame[(frame["step"] == step) & (frame["route"] != REFERENCE)].set_index("route").copy()
    several = len(tidy.seeds) > 1 and frame["seed_p"].notna().any()
    frame["verdict_p"] = stats.holm(frame["seed_p"]) if several else frame["p_holm"]
    frame["by_seeds"] = several
    frame["verdict_low"] = frame["seed_difference_low" if several else "difference_low"]
    frame["verdict_high"] = frame["seed_difference_high" if several else "difference_high"]
    return frame


def validation(tidy: Tidy) -> Statement | None:
    """Which routes differ from bf16 on the validation stream, by how much, with what uncertainty."""
    if not tidy.has("validation"):
        return None
    frame = verdicts(tidy)
    tested = frame[frame["verdict_p"].notna()]
    if tested.empty:
        return None
    step, several = int(frame["step"].iloc[0]), bool(frame["by_seeds"].iloc[0])
    unit_of_test = "routes" if several else "runs"
    worse = tested[(tested["verdict_p"] < stats.ALPHA) & (tested["difference"] > 0)].sort_values("difference")
    better = tested[(tested["verdict_p"] < stats.ALPHA) & (tested["difference"] < 0)].sort_values(
        "difference"
    )
    alike = tested[~(tested["verdict_p"] < stats.ALPHA)]
    unit = "over seeds" if several else f"on the same {int(frame['paired'].max()):,} sequences"
    text = f"At step {step:,}, paired {unit} (95% intervals, Holm, 5%): "
    parts = []
    for rows, word in ((worse, "worse"), (better, "better")):
        if len(rows):
            parts.append(
                f"{len(rows)} of {len(tested)} {unit_of_test} are distinguishably {word} than BF16, from "
                f"{_effect(tidy, rows.index[0], rows.iloc[0])} to "
                f"{_effect(tidy, rows.index[-1], rows.iloc[-1])}"
                if len(rows) > 1
                else f"one of {len(tested)} {unit_of_test} is distinguishably {word} than BF16, "
                + _effect(tidy, rows.index[0], rows.iloc[0])
            )
    if len(alike):
        parts.append(f"not distinguishable from BF16: {_names(tidy, tidy.ordered(alike.index))}")
    text += "; ".join(parts) + "."
    if not several:
        text += " These are single runs: whether a route is better or worse than BF16 takes several seeds."
    return Statement("Validation loss", text, "fig09_validation_nll")


def _effect(tidy: Tidy, route: str, row: pd.Series) -> str:
    bounds = [fixed(float(row[k]), 4, signed=True) for k in ("verdict_low", "verdict_high")]
    difference = fixed(float(row["difference"]), 4, signed=True)
    return f"{tidy.label(route)} {difference} [{bounds[0]}, {bounds[1]}] nats/token"


def ranking(tidy: Tidy) -> Statement | None:
    """Does the order of the endpoint excesses agree with the report's."""
    if not tidy.has("endpoint"):
        return None
    from scipy.stats import kendalltau

    frame = analysis.endpoint(tidy)
    pairs = [
        (float(frame.loc[r, "excess"]), analysis.published_excess(r))
        for r in frame.index
        if r != REFERENCE and np.isfinite(frame.loc[r, "excess"]) and analysis.published_excess(r) is not None
    ]
    drawn_from_its_files = all(abs(measured - given) < 1e-9 for measured, given in pairs)
    if len(pairs) < 4 or drawn_from_its_files:
        return None
    tau, p = kendalltau(*zip(*pairs))
    if not np.isfinite(tau):
        return None
    agrees = p < stats.ALPHA
    text = (
        f"Over the {len(pairs)} FP4 routes that the report also trained, the order of endpoint excesses has "
        f"Kendall's τ = {tau:.2f} with the report's ({p_equals(float(p))}): "
        + (
            "the orders agree more than chance would."
            if agrees and tau > 0
            else "the orders are opposed more than chance would."
            if agrees
            else "this study neither reproduces nor contradicts the report's order."
        )
    )
    return Statement("Agreement with the report", text, "table07_endpoint_loss")


def downstream(tidy: Tidy) -> Statement | None:
    """How many scores carry information, and which differ from bf16."""
    if not tidy.has("downstream"):
        return None
    frame = analysis.downstream(tidy)
    frame = frame[frame["primary"]]
    guessing = int(frame["at_chance"].sum())
    tested = frame[frame["p_holm"].notna()]
    clear = tested[tested["p_holm"] < stats.ALPHA]
    text = f"{guessing} of {len(frame)} scores are indistinguishable from guessing. "
    if len(tested):
        text += f"{len(clear) or 'None'} of {len(tested)} comparisons with BF16 "
        text += "differs" if len(clear) == 1 else "differ"
        several = len(tidy.seeds) > 1
        text += f" after Holm's correction of {'t tests over seeds' if several else 'exact McNemar tests'}"
        if len(clear):
            text += ": " + ", ".join(
                f"{tidy.label(r.route)} on {analysis.TASKS.get(r.task, (r.task,))[0]} "
                f"{fixed(float(r.difference), 2, signed=True)} points"
                for r in clear.itertuples()
            )  # fmt: skip
        text += "."
    return Statement("Downstream scores", text, "table08_downstream")


def speed(tidy: Tidy) -> Statement | None:
    """Fastest route, or the reason why rates say nothing here."""
    if not tidy.has("throughput"):
        return None
    frame = analysis.throughput(tidy)
    frame = frame[
        (frame["geometry"] == frame["geometry"].iloc[0])
        & (frame["route"] != REFERENCE)
        & frame["ratio"].notna()
    ]
    if frame.empty:
        return None
    top = frame.loc[frame["ratio"].idxmax()]
    given = published.number("table06_throughput", top["route"], "tokens_per_s")
    reference = published.number("table06_throughput", REFERENCE, "tokens_per_s")
    if tidy.on_cpu:
        low, high = frame["ratio"].min(), frame["ratio"].max()
        text = (
            f"On a CPU the FP4 routes are emulated; they run at {low:.2f} to {high:.2f} times the rate of "
            "BF16. That is the cost of the emulation and says nothing about FP4 hardware. MFU is left "
            "blank."
        )
    else:
        text = f"The fastest FP4 route is {tidy.label(top['route'])}, {top['ratio']:.2f} times BF16, "
        text += f"on {top['device']}."
        if given and reference:
            text += f" The report has {given / reference:.2f} times for it on GB200."
    return Statement("Speed", text, "table06_throughput")


def dgrad(tidy: Tidy) -> Statement | None:
    """CTA-local against MXFP4 in the data gradient."""
    if not tidy.has("dgrad"):
        return None
    frame = tidy.table("dgrad")
    ratio, lower = stats.geometric_mean(frame["ratio"]), int((frame["ratio"] > 1).sum())
    text = (
        f"CTA-local NVFP4 has the lower data-gradient error in {lower:,} of {len(frame):,} comparisons, "
        f"geometric-mean ratio {ratio:.3f}. The report has 288 of 288 and "
        f"{published.text('table12_dgrad_error', '', 'geometric_mean_ratio')}."
    )
    return Statement("Data-gradient error", text, "fig12_dgrad_error")
