"""One computation per study: facts are kept in the study's cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from figures.data import Tidy

T = TypeVar("T")


def cached(function: Callable[[Tidy], T]) -> Callable[[Tidy], T]:
    """Compute ``function`` once per study."""

    @wraps(function)
    def wrapper(tidy: Tidy) -> T:
        if function.__name__ not in tidy.cache:
            tidy.cache[function.__name__] = function(tidy)
        return tidy.cache[function.__name__]  # type: ignore[return-value]

    return wrapper
