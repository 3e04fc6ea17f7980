"""Loads and calls functions of the user by name, and reports their errors in one line."""

import argparse
import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .._base import did_you_mean

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class UserError(ValueError):
    """Error of the user, printed in one line with exit status 2. Any other exception keeps its traceback."""


def print_out(*lines: str) -> None:
    """Prints lines to stdout, at once. Raises `UserError` if it is closed or cannot be written to, as a full disk."""
    if sys.stdout is None:
        raise UserError("stdout is closed. For example: jmp-policy --version > report.txt")
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except OSError as error:
        # Python writes the rest of the buffer when it exits, and would print an error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # of `| head`
            raise UserError("the reader of stdout left before the report ended") from None
        raise UserError(f"cannot write to stdout: {error.strerror}. For example: jmp-policy --version") from None


def load_call(
    arguments: argparse.Namespace, look: Callable[[Callable[..., Any]], Any], *, example: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function of a command, which raises `UserError`s, and its arguments. `look` rejects modules."""
    name, maker = arguments.function, arguments.args
    fun = load_function(name)

    @functools.wraps(fun)
    def call_explained(*args: Any) -> Any:
        with report_user_errors(f"{name} raised"):
            return fun(*args)

    try:
        look(fun)
    except TypeError as error:
        raise UserError(f"{name}: {error}") from None
    args = () if maker is None else make_arguments(maker)
    problem = _find_mismatch(fun, args)
    if problem:
        count = f"--args {maker} returns {len(args)} argument{'' if len(args) == 1 else 's'}, but {name} {problem}"
        problem = f"{name} {problem}, and --args is missing" if maker is None else count
        raise UserError(f"{problem}. {_show_maker(fun, name, example)}")
    return call_explained, args


def load_pair(
    arguments: argparse.Namespace, look: Callable[[Callable[..., Any]], Any], *, example: str
) -> tuple[Callable[..., Any], Callable[..., Any] | str, tuple[Any, ...]]:
    """Returns the function of a command, the other function or the path of a recording, and their arguments."""
    fun, args = load_call(arguments, look, example=example)
    check_numbers(args, arguments.args, example)
    if arguments.other.endswith(".npz"):
        return fun, arguments.other, args
    other = argparse.Namespace(function=arguments.other, args=arguments.args)
    return fun, load_call(other, look, example=example)[0], args


def load_function(name: str) -> Callable[..., Any]:
    """Loads a function by a name like `package.module:function`, from the current folder as `python -m` does."""
    module, separator, attributes = name.partition(":")
    if not (module and separator and attributes):
        raise UserError(
            f"{name!r} is not the name of a function. For example: train:train_step, or package.train:Model.apply."
        )
    found = _load_module(module, name)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            where = getattr(found, "__name__", found)
            names = [each for each in dir(found) if not each.startswith("_") and callable(getattr(found, each))]
            nearest = did_you_mean(attribute, names)
            hint = f". {nearest}" if nearest.startswith("Did") else ""
            raise UserError(f"{where} has no {attribute!r}, of {name!r}{hint}")
        found = getattr(found, attribute)
    if not callable(found):
        raise UserError(f"{name!r} is not a function, but {found!r}")
    return found


def make_arguments(name: str) -> tuple[Any, ...]:
    """Calls a user's function without arguments; returns its tuple, or its result as a tuple."""
    maker = load_function(name)
    problem = _find_mismatch(maker, ())
    if problem:
        raise UserError(f"--args {name} is called without arguments, but {problem}: give them defaults")
    with report_user_errors(f"--args {name} raised"):
        made = maker()
    return made if isinstance(made, tuple) else (made,)


def check_numbers(args: tuple[Any, ...], maker: str | None, example: str) -> None:
    """Rejects `jax.ShapeDtypeStruct`s."""
    import jax

    for leaf in jax.tree.leaves(args):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise UserError(
                f"--args {maker} returns {leaf}: the function runs, and needs arrays with values, such as {example}"
            )


def _find_mismatch(fun: Callable[..., Any], args: Sequence[Any]) -> str:
    """Describes the signature of a function if it does not accept the arguments; else returns an empty string."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # some C functions have none
        return ""
    try:
        signature.bind(*args)
    except TypeError:
        parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        return f"takes {signature.replace(parameters=parameters, return_annotation=signature.empty)}"
    return ""


def _show_maker(fun: Callable[..., Any], name: str, example: str) -> str:
    """Shows a function that makes the arguments, and how to name it."""
    parameters = inspect.signature(fun).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    by_name = [parameter.name for parameter in required if parameter.kind is parameter.KEYWORD_ONLY]
    if by_name:
        return f"Arguments by name cannot be given: write a function that passes {' and '.join(by_name)} itself."
    names = [parameter.name for parameter in required if parameter.kind not in _VARIADIC]
    if not names:
        return "Leave --args out."
    module = name.partition(":")[0]
    return (
        f"For example, write `def make_args(): return {', '.join(names)}` in {module}, where each is an array or, say, "
        f"{example}, and add --args {module}:make_args"
    )


@contextlib.contextmanager
def report_user_errors(what: str) -> Iterator[None]:
    """Reports errors of user code in one line, with their place; `what` starts the line."""
    from .._jaxpr import find_raising_line

    try:
        yield
    except (Exception, SystemExit) as error:
        line = find_raising_line(error)
        place = f", at {line}" if line else ""
        # The first line of an error: JAX's messages have paragraphs.
        said = "".join(f": {text.rstrip('.')}" for text in str(error).strip().splitlines()[:1])
        raise UserError(f"{what} {type(error).__name__}{said}{place}") from error


def _load_module(module: str, name: str) -> Any:
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise UserError(f"{module!r}, of {name!r}, is not a Python module name: package.train, not package/train.py")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with report_user_errors(f"{module} cannot be imported: it raised"):
        try:
            __import__(module)
            return sys.modules[module]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            missing = error.name
    raise UserError(f"the module {missing!r}, of {name!r}, is not here and not installed")
