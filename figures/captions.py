"""Sentences that captions share: device, scale, seeds, and what the published numbers were measured on."""

from __future__ import annotations

from figures import published
from figures.data import Tidy
from figures.numbers import count


def setting(tidy: Tidy) -> str:
    """'Measured: <scale>, on <device> (<backend> backend), study smoke', or what meta's `setting` says."""
    meta = tidy.meta
    if meta.get("setting"):
        return meta["setting"]
    parts = [meta.get("scale") or meta.get("description") or "scale not recorded"]
    device = meta.get("device") or "device not recorded"
    if meta.get("backend"):
        device += f" ({meta['backend']} backend)"
    parts.append(f"on {device}")
    return join(f"Measured in study {meta.get('study', '?')}: {', '.join(parts)}.", transformer_engine(tidy))


def transformer_engine(tidy: Tidy) -> str:
    """Whether Transformer Engine's routes ran in it or on our own kernels; '' where none was trained."""
    if not (tidy.has("routes") and tidy.has("runs")):
        return ""
    routes = [route.slug for route in tidy.routes if route.implementation == "te"]
    if not routes:
        return ""
    runs = tidy.table("runs")
    used = sorted(set(runs["backend"][runs["route"].isin(routes)]))
    if not used:
        return ""
    if used == ["te"]:
        return "TE routes: Transformer Engine itself."
    where = f"its numerics on this project's {', '.join(b for b in used if b != 'te')} backend"
    part = ", in part Transformer Engine itself" if "te" in used else ""
    return f"TE routes: {where}{part}."


def seeds(tidy: Tidy, unit: str = "route") -> str:
    """How many seeds, and what that means for the reader."""
    n = len(tidy.seeds)
    if n <= 1:
        return f"One seed per {unit}: run-to-run variation was not estimated."
    return f"{count(n, 'seed')} per {unit}: means over seeds with 95% t intervals."


def first_seed(tidy: Tidy) -> str:
    """For what is measured once per study: that the other seeds had no part in it; '' with one seed."""
    n = len(tidy.seeds)
    return f"Measured on the first of {n} seeds alone." if n > 1 else ""


def published_setting(table: str) -> str:
    """What the report's values of ``table`` were measured on."""
    return f"Published (arXiv 2610.00053): {published.SETTING[table]}."


def diverged(tidy: Tidy) -> str:
    """Names the routes that diverged or did not finish; '' when there is none."""
    states = {
        slug: tidy.status[slug] for slug in tidy.ordered(tidy.status) if tidy.status[slug] != "complete"
    }
    if not states:
        return ""
    return (
        "Not complete: " + ", ".join(f"{tidy.label(slug)} ({state})" for slug, state in states.items()) + "."
    )


def join(*sentences: str) -> str:
    """The non-empty sentences, separated by spaces."""
    return " ".join(sentence for sentence in sentences if sentence)
