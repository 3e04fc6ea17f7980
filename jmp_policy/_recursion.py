"""Which functions with a policy are running: a call of one of them by itself is not its outermost."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import jax

# The numbers of the functions that run in this thread. What a jitted function inside makes of a call depends on them,
# so they are a context of JAX's, part of the key of every jit cache. JAX never lets go of such a key: it refers to
# nothing, and there are few, for a new one compiles everything inside anew.
_RUNNING = jax.make_user_context(frozenset())

_LOCK = threading.Lock()
_TAKEN: set[int] = set()
"""The numbers that functions have now, and those that some keep for good."""


class Recursion:
    """Tells the outermost call of a function from those that it makes of itself.

    A function has a number while it runs: the smallest that is free. One that is made anew in a loop has the number of
    the one before, and finds what that compiled. No program is ever taken for another for all that. What a jitted
    function makes of a call of this one, it makes under a set of numbers; under the same set it must be the same again:

    - a call that is the outermost is remembered with the set, and this function never takes a number out of it;
    - at a call that is not, this function keeps its number for good, and no other will ever have it.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._keeps_number = False
        self._calls = 0  # that are running, in all threads
        self._avoided: frozenset[int] = frozenset()

    def is_running(self) -> bool:
        """Whether this thread is inside of a call."""
        if self._number not in _RUNNING.value:
            return False
        self._keeps_number = True
        return True

    @contextlib.contextmanager
    def outermost_call(self) -> Iterator[None]:
        """The context of the outermost call of this thread."""
        around = _RUNNING.value
        number = self._take_number(around)
        try:
            with _RUNNING(around | {number}):
                yield
        finally:
            self._free_number(number)

    def _take_number(self, around: frozenset[int]) -> int:
        with _LOCK:
            self._avoided |= around
            if self._number is None:
                self._number = next(n for n in itertools.count() if n not in _TAKEN and n not in self._avoided)
                _TAKEN.add(self._number)
            self._calls += 1
            return self._number

    def _free_number(self, number: int) -> None:
        with _LOCK:
            self._calls -= 1
            if self._calls == 0 and not self._keeps_number:
                _TAKEN.remove(number)
                self._number = None
