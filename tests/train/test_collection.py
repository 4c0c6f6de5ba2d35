"""Cyclic garbage is looked for between steps only, and everything is as before afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from fp4core.train import collection
from fp4core.train.collection import scheduled_collection


class Node:
    itself: Node


def cycle() -> weakref.ref:
    one = Node()
    one.itself = one
    return weakref.ref(one)


@pytest.fixture
def looks():
    """(generation) of every collection."""
    seen: list[int] = []

    def note(phase: str, info: dict) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_nothing_is_collected_within_steps(looks):
    assert gc.isenabled()
    with scheduled_collection() as scheduled:
        begun = [[] for _ in range(100_000)]
        assert looks == []
        scheduled.after()
        assert looks == [2] and gc.get_freeze_count() > len(begun)
        begun += [[] for _ in range(100_000)]
        for _ in range(collection._YOUNG - 2):
            scheduled.after()
        assert looks == [2]
        garbage = cycle()
        scheduled.after()
        assert looks == [2, 1] and garbage() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_old_garbage_goes_too(looks, monkeypatch):
    monkeypatch.setattr(collection, "_YOUNG", 2)
    monkeypatch.setattr(collection, "_ALL", 6)
    with scheduled_collection() as scheduled:
        for _ in range(6):
            scheduled.after()
        assert looks == [2, 1, 1, 2]


def test_an_error_leaves_it_on():
    with pytest.raises(KeyError), scheduled_collection():
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_who_had_it_off_keeps_it_off():
    gc.disable()
    try:
        with scheduled_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
