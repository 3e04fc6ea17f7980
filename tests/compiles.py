"""How often XLA compiles, and what stays alive."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

_COUNTERS: list[list[int]] = []


def _count(event: str, duration_secs: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        for counter in _COUNTERS:
            counter[0] += 1


jax.monitoring.register_event_duration_secs_listener(_count)


@contextlib.contextmanager
def compiles() -> Iterator[list[int]]:
    """Counts in a list of one number what is compiled inside, programs of single operations too."""
    counter = [0]
    _COUNTERS.append(counter)
    try:
        yield counter
    finally:
        _COUNTERS.remove(counter)


def alive_of(times: int, make_and_use: Callable[[int], Any]) -> int:
    """How many of the objects that a function returns, called so often, outlive it."""
    gc.freeze()  # so that the collector looks at new objects alone
    made = [weakref.ref(make_and_use(number)) for number in range(times)]
    for _ in range(3):  # what a weak dictionary holds is garbage only once its key is gone
        gc.collect()
    return sum(ref() is not None for ref in made)
