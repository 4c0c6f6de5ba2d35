"""When Python looks for cyclic garbage: between steps, not whenever so many objects have been made.

A process that has imported and compiled everything has half a million objects, and a look at all of them
takes 200 ms and more, in which nothing is launched; with several ranks, the others wait for it as well. Steps
leave no cycles behind that hold tensors, so it is enough to look at what is new now and then.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Steps between two looks at what is new, and between two at all that was made since the first step.
_YOUNG, _ALL = 50, 1000


def collect_engines() -> None:
    """Free what a dropped engine has left, before another one is built beside it.

    Sharded modules are in cycles, which nothing would look for until after the next engine's first step.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Collection:
    """`after` belongs behind every step; `scheduled_collection` makes one."""

    def __init__(self) -> None:
        self._steps = 0

    def after(self) -> None:
        """A step has been made; its update may still be in the device's queue, so this is a good moment."""
        self._steps += 1
        if self._steps == 1:
            # what there is now stays: modules, weights, what the first step has compiled
            gc.collect()
            gc.freeze()
        elif self._steps % _ALL == 0:
            gc.collect()
        elif self._steps % _YOUNG == 0:
            gc.collect(1)


@contextmanager
def scheduled_collection() -> Iterator[Collection]:
    """Within it no collection starts by itself; afterwards they do again, if they did before.

    Nothing is frozen afterwards, whoever froze it: contexts within one another are not meant.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield Collection()
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
