"""Outputs of a command: tables and JSON on the terminal, HTML pages, plots."""

import argparse
import codecs
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._base import escape_controls
from ._user_code import UserError

# ASCII replacements, of one column each, for streams that cannot encode these characters.
_PLAIN = str.maketrans({"─": "-", "↑": "^", "↓": "v", "→": ">", "±": "~", "…": "~"})


@contextlib.contextmanager
def spell_signs_plainly() -> Iterator[None]:
    """Prints ASCII replacements where stdout or stderr cannot encode a character, such as a pipe on Windows."""
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
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(sign if sign.isascii() else "?" for sign in signs), error.end


def add_files(parser: argparse.ArgumentParser, *, page: str, picture: str) -> None:
    """Adds the options `--html` and `--plot`; `page` and `picture` describe their contents in the help."""
    parser.add_argument("--html", type=Path, metavar="FILE", help=f"write a page, too{page}")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw {picture}, too: a .png, .svg or .pdf")


def check_files(arguments: argparse.Namespace) -> None:
    """Checks the options `--html` and `--plot`, if the command has them, before the function runs."""
    if "plot" not in arguments:
        return
    check_folder("--html", arguments.html)
    check_folder("--plot", arguments.plot)
    if arguments.plot is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    if arguments.plot.suffix.removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(
            f"--plot {arguments.plot} is not an image format of matplotlib: name it {arguments.plot.stem}.png"
        )


def check_folder(option: str, file: Path | None) -> None:
    """Checks that the folder of a file exists."""
    if file is not None and not file.parent.is_dir():
        raise UserError(f"{option} {file}: the folder {file.parent} does not exist")


def write_files(report: Any, arguments: argparse.Namespace) -> None:
    """Writes the page and the plot that `--html` and `--plot` ask for."""
    if "plot" not in arguments:
        return
    if arguments.html:
        from ..report import draw_document

        title = f"{arguments.command} of {arguments.function}"
        arguments.html.write_text(draw_document(report, title), encoding="utf-8")
    if arguments.plot:
        report.plot().savefig(arguments.plot, dpi=150)


def print_text(report: Any) -> None:
    """Prints a report as text. Paths and names may have control characters."""
    print(escape_controls(str(report)))


def print_report(report: Any, arguments: argparse.Namespace) -> None:
    """Prints a report as a table, or as a JSON document that starts with the machine and the function."""
    if not arguments.json:
        return print_text(report)
    from .doctor import find_machine

    document = {**find_machine().to_dict(), "function": arguments.function, **report.to_dict()}
    print(json.dumps(document, indent=2))
