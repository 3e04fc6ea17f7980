"""What a command says of a function of the user's: a table or JSON on the terminal, a page, a picture."""

import argparse
import codecs
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._command import UserError, make_console

if TYPE_CHECKING:
    from ..report import Report

_PLAIN = str.maketrans({"─": "-", "↑": "^", "↓": "v", "→": ">", "±": "~", "…": "~"})
"""Signs of reports, and what stands for them where a terminal or a pipe has no such sign: one column each."""


@contextlib.contextmanager
def spell_signs_plainly() -> Iterator[None]:
    """Prints plain signs in place of those that stdout or stderr has no code for, such as a pipe on Windows."""
    codecs.register_error("jmp_policy.plain", _spell_plainly)
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="jmp_policy.plain")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            stream.reconfigure(errors=errors)


def _spell_plainly(error: UnicodeError) -> tuple[str, int]:
    """What stands for the signs that a stream has no code for."""
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(sign if sign.isascii() else "?" for sign in signs), error.end


def add_files(parser: argparse.ArgumentParser, *, page: str, picture: str) -> None:
    """Adds the options `--html` and `--plot` to a command.

    Args:
      parser: of the command.
      page: what the page has, for the help, such as `", with all rows"`.
      picture: what the picture shows, for the help.
    """
    parser.add_argument("--html", type=Path, metavar="FILE", help=f"write a page, too{page}")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw {picture}, too: a .png, .svg or .pdf")


def check_files(arguments: argparse.Namespace) -> None:
    """Checks that the page and the picture can be written, before the function runs.

    Raises:
      UserError: a folder is not there, or the picture is of an unknown kind.
    """
    check_folder("--html", arguments.html)
    check_folder("--plot", arguments.plot)
    if arguments.plot is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    if arguments.plot.suffix.removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(
            f"--plot {arguments.plot} is no picture that matplotlib writes: name it {arguments.plot.stem}.png"
        )


def check_folder(option: str, file: Path | None) -> None:
    """Checks that the folder of a file exists.

    Args:
      option: what the user wrote the file after.
      file: the file; `None` if none is wanted.

    Raises:
      UserError: it does not.
    """
    if file is not None and not file.parent.is_dir():
        raise UserError(f"{option} {file}: there is no folder {file.parent}")


def write_files(report: "Report", arguments: argparse.Namespace, title: str) -> None:
    """Writes the page and the picture that are wanted."""
    if arguments.html:
        from ..report import draw_document

        arguments.html.write_text(draw_document(report, title), encoding="utf-8")
    if arguments.plot:
        plotted: Any = report
        plotted.plot().savefig(arguments.plot, dpi=150)


def print_report(report: Any, arguments: argparse.Namespace) -> None:
    """Prints a report as a table, or as one JSON document that begins with the machine and the function."""
    if not arguments.json:
        return make_console().print(str(report))
    from .doctor import find_machine

    document = {**find_machine().to_dict(), "function": arguments.function, **report.to_dict()}
    print(json.dumps(document, indent=2))
