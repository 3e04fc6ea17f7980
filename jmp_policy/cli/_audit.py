"""`jmp-policy audit`."""

import argparse
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._command import UserError, make_console

if TYPE_CHECKING:
    from ._command import Commands


def add_audit(commands: "Commands") -> None:
    """Adds `jmp-policy audit` to the subparsers of argparse."""
    parser = commands.add_parser(
        "audit",
        help="which operations of a function run in which dtype, and where that loses numbers",
        description="Trace a function, without running it, and print which of its operations run in which dtype, and "
        "what is likely to lose numbers or time, each with its line.",
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="such as train:train_step, in this folder")
    parser.add_argument(
        "--args",
        metavar="MODULE:FUNCTION",
        help="a function that returns the arguments to trace it for: a tuple of them, or a single one; "
        "jax.ShapeDtypeStructs suffice (default: no arguments)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if anything is found")
    parser.set_defaults(run=_audit)


def _audit(arguments: argparse.Namespace) -> int:
    """Audits, and prints the report."""
    from ..numerics import audit

    fun = _load_function(arguments.function)
    args = _load_function(arguments.args)() if arguments.args else ()
    report = audit(fun)(*(args if isinstance(args, tuple) else (args,)))
    make_console().print(str(report))
    return 1 if arguments.strict and report.findings else 0


def _load_function(name: str) -> Callable[..., Any]:
    """The function of a name like `package.module:function`, found from the current folder as Python's `-m` does."""
    module, separator, attributes = name.partition(":")
    if not (module and separator and attributes):
        raise UserError(f"{name!r} names no function. For example: train:train_step, or package.train:Model.apply.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = pkgutil.resolve_name(f"{module}:")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"there is no module {error.name!r}, of {name!r}, here or among the installed ones") from None
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise UserError(f"{getattr(found, '__name__', found)} has no {attribute!r}, of {name!r}")
        found = getattr(found, attribute)
    if not callable(found):
        raise UserError(f"{name!r} is no function, but {found!r}")
    return found
