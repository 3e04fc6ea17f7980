"""Runs of a function that stop in the middle and go on later, each in a thread of its own."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator

import jax

from .._base import IN_FULL_PRECISION


class SuspendedRun:
    """A run of a function that pauses wherever the function calls `pause`. One thread runs at a time."""

    def __init__(self, fun: Callable[[], object]) -> None:
        self._fun, self._inherit = fun, _capture_settings()
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._run,), daemon=True)
        self._go_on, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_abandoned = self._is_over = False

    def advance(self) -> None:
        """Runs the function to its next pause or its end. Raises its error."""
        if self._is_over:
            return
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go_on.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Called by the function."""
        self._stopped.release()
        self._go_on.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """Ends a run that is paused."""
        self._is_abandoned = True
        if self._thread.ident is not None:
            self._go_on.release()
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._inherit(), contextlib.suppress(_Abandoned):
                self._fun()
        except BaseException as error:  # of the function, for the thread that waits
            self._error = error
        self._is_over = True
        self._stopped.release()


class _Abandoned(BaseException):
    """Unwinds a run whose rest does not matter."""


def _capture_settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context with the settings of JAX that hold here: a new thread has the global ones."""
    # The values that are set by `with jax.default_matmul_precision(...)` and the like.
    states = [state for state in vars(jax).values() if isinstance(state, type(jax.debug_nans))]
    values = [(state, state.value) for state in (*states, IN_FULL_PRECISION)]
    mesh = jax.sharding.get_mesh()

    @contextlib.contextmanager
    def inherit() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for state, value in values:
                if state.value != value:
                    stack.enter_context(state(value))
            if not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            yield

    return inherit
