"""What training is in a terminal: a bar that shows it, and Ctrl-C that stops it."""

import signal
import threading
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class TrainDisplay:
    """A progress bar with the loss, the step rate, the loss scale and the skipped steps.

    Without a terminal only the lines of `note` appear.
    """

    def __init__(self, console: Console, *, steps: int, done: int):
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            _StepRateColumn(),
            TextColumn("scale {task.fields[loss_scale]}"),
            TextColumn("skipped {task.fields[skipped_steps]}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=done, loss="-", loss_scale="-", skipped_steps=0)

    def update(self, step: int, *, loss: float, loss_scale: float, skipped_steps: int) -> None:
        """Shows the state after a step; the loss in bits per byte."""
        figures = {"loss": f"{loss:.3f}", "loss_scale": f"{loss_scale:g}", "skipped_steps": skipped_steps}
        self._progress.update(self._task, completed=step, **figures)

    def note(self, line: str) -> None:
        """Prints a line above the bar."""
        self._progress.console.print(line)

    def __enter__(self) -> "TrainDisplay":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) inside a `with` block into a flag to look at; a second one interrupts.

    Outside the main thread, where Python allows no signal handlers, the flag stays down.

    Attributes:
      requested: the flag.
      interrupted: whether it was Ctrl-C that raised it.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.requested = self.interrupted = False
        self._previous = {}

    def is_due(self, step: int) -> bool:
        """Whether to stop after this step."""
        del step
        return self.requested

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._request) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.requested = True
        self.interrupted = number == signal.SIGINT
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class _StepRateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("compiling" if speed is None else f"{speed:.1f} steps/s")
