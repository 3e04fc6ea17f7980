"""Child processes that are watched: signals go on to them, one that fails ends them all, and its error is one line."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

_GRACE = 15.0
"""Seconds that the others have to end by themselves, once one has ended with an error."""

_ERROR = re.compile(r"jmp-policy.*: error: ")
_JAX_ENDS = re.compile(r"[EF]\d{4} .*(coordination_service|JAX distributed service detected fatal errors)")
_GONE = re.compile(r"unhealthy[^\n]*:\n\D*(\d+)")


class Children:
    """Processes that run together.

    What they write goes where this process writes, but for errors: only the first is printed, at the end. Where JAX
    has ended one from C++, a line stands for its stack trace.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]):
        self._passed_on: set[int] = set()
        # A session of its own for each: what the terminal sends comes here alone, and is passed on once.
        self._children = [
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,  # its end tells the child that this process has ended
                stdout=None if index == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            for index, command in enumerate(commands)
        ]
        self._outputs = [_Output(child.stderr) for child in self._children if child.stderr is not None]

    @property
    def are_running(self) -> bool:
        """Whether any of them still runs."""
        return any(child.poll() is None for child in self._children)

    def strike(self, index: int, number: signal.Signals) -> None:
        """Sends a signal to one of them, if it still runs."""
        self._children[index].send_signal(number)

    def wait(self) -> int:
        """Waits for all; returns 0 if all returned that, and otherwise the exit status of one that did not."""
        previous = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            statuses = self._wait_for_all()
        finally:
            self._send(signal.SIGKILL)
            for number, handler in previous.items():
                signal.signal(number, handler)
        for child, output in zip(self._children, self._outputs, strict=True):
            child.wait()
            output.thread.join()
            for pipe in (child.stdin, child.stderr):
                assert pipe is not None
                pipe.close()
        return self._report(statuses)

    def _wait_for_all(self) -> dict[int, int]:
        """Waits until all have ended, or one has failed and the others had their time; returns how they ended."""
        deadline = None
        while self.are_running:
            failed = [status for child in self._children if (status := child.poll())]
            if failed and deadline is None:
                deadline = time.monotonic() + _GRACE
            if any(map(self._is_killed, failed)) or (deadline is not None and time.monotonic() > deadline):
                break
            time.sleep(0.05)
        polled = {index: child.poll() for index, child in enumerate(self._children)}
        return {index: status for index, status in polled.items() if status is not None}

    def _is_killed(self, status: int) -> bool:
        """Whether a process was ended by a signal, which this one has not passed on."""
        return status < 0 and -status not in self._passed_on

    def _report(self, statuses: Mapping[int, int]) -> int:
        """Prints the first error, and returns the exit status."""
        for output in self._outputs:
            sys.stderr.write("".join(output.held))
        errors = [error for output in self._outputs for error in output.errors]
        for index, status in statuses.items():
            if self._is_killed(status) and not (errors and -status == signal.SIGABRT):  # JAX's own end has its line
                name = signal.Signals(-status).name
                said = f"process {index} was ended by {name}, and the others with it. {_ADVICE}"
                errors.insert(0, f"jmp-policy: error: {said}\n")
                break
        sys.stderr.write("".join(errors[:1]))
        sys.stderr.flush()
        returned = [status for status in statuses.values() if status > 0]
        if returned or errors:
            return returned[0] if returned else 1
        # Ended by a signal that was passed on before there was anything to save.
        return 130 if signal.SIGINT in self._passed_on else 0

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        is_second = number == signal.SIGINT and number in self._passed_on
        self._passed_on.add(number)
        self._send(signal.SIGKILL if is_second else signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)


class _Output:
    """What a child writes to stderr, passed on as it comes.

    Attributes:
      errors: its errors, which are kept back.
      held: what came after JAX had begun to end it, where in the end it did not.
    """

    def __init__(self, stream: IO[bytes]):
        self.errors: list[str] = []
        self.held: list[str] = []
        self._stream = stream
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for line in self._stream:
            text = line.decode(errors="replace")
            if self.held or _JAX_ENDS.match(text):
                self.held.append(text)
            elif _ERROR.match(text):
                self.errors.append(text)
            else:
                sys.stderr.write(text)
                sys.stderr.flush()
        said = "".join(self.held)
        if "JAX distributed service detected fatal errors" in said:
            self.errors.append(f"jmp-policy: error: {describe_loss(said)}\n")
            self.held.clear()


_ADVICE = "What was saved is whole: start all again with --resume."


def describe_loss(said: str) -> str:
    """Makes a line of what JAX says where processes of a run do not answer.

    >>> describe_loss("The following tasks are unhealthy (stopped sending heartbeats):\\n1\\nThe tasks have crashed.")
    'process 1 of the run does not answer any more. What was saved is whole: start all again with --resume.'
    """
    if "RegisterTask" in said:
        return (
            "not all processes of the run came in time: start each with its own --process, from 0, and with the "
            "address of process 0, or wait longer with --timeout"
        )
    gone = _GONE.search(said)
    if gone is None and "leader task" not in said:
        reason = (said.strip().splitlines() or ["no reason given"])[0]
        return f"another process of the run does not answer any more ({reason}). {_ADVICE}"
    return f"process {gone[1] if gone else 0} of the run does not answer any more. {_ADVICE}"
