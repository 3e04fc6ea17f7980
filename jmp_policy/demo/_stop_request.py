"""Stopping between two steps when the user presses Ctrl-C."""

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) inside a `with` block into a flag to look at; a second one interrupts.

    Outside the main thread, where Python allows no signal handlers, the flag stays down.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.requested = False
        self._previous = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._request) for number in self._SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
