"""The user's functions, by name: imported and called, and what goes wrong in them said in one line."""

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .._base import did_you_mean
from ._command import UserError

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def load_call(
    name: str, maker: str | None, look: Callable[[Callable[..., Any]], Any], *, verb: str, example: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of the user's, and the arguments that it is called with.

    Args:
      name: the function.
      maker: the function that returns its arguments; `None` if it takes none.
      look: what is made of the function, and refuses a class or a module of Flax.
      verb: what the command does to the function, for errors.
      example: how an argument is made, for errors.

    Returns:
      The function, whose errors are errors of the user; and a tuple of arguments.

    Raises:
      UserError: there is no such function, it takes other arguments, or the user's code raises.
    """
    fun = load_function(name)

    @functools.wraps(fun)
    def call_explained(*args: Any) -> Any:
        with explain_errors(f"{name} raised"):
            return fun(*args)

    try:
        look(fun)
    except TypeError as error:
        raise UserError(f"{name}: {error}") from None
    args = () if maker is None else make_arguments(maker)
    check_arguments(fun, args, name, maker, _Words(verb, example))
    return call_explained, args


@dataclasses.dataclass(frozen=True)
class _Words:
    """What errors say: what the command does to a function, and how an argument of it is made."""

    verb: str
    example: str


def load_function(name: str) -> Callable[..., Any]:
    """The function of a name like `package.module:function`, found from the current folder as Python's `-m` does.

    Raises:
      UserError: there is no such function, or its module cannot be imported.
    """
    module, separator, attributes = name.partition(":")
    if not (module and separator and attributes):
        raise UserError(f"{name!r} names no function. For example: train:train_step, or package.train:Model.apply.")
    found = _load_module(module, name)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            where = getattr(found, "__name__", found)
            raise UserError(f"{where} has no {attribute!r}, of {name!r}{_suggest(found, attribute)}")
        found = getattr(found, attribute)
    if not callable(found):
        raise UserError(f"{name!r} is no function, but {found!r}")
    return found


def make_arguments(name: str) -> tuple[Any, ...]:
    """The arguments that a function of the user's returns: a tuple of them, or a single one.

    Raises:
      UserError: there is no such function, it needs arguments itself, or it raises.
    """
    maker = load_function(name)
    problem = _find_mismatch(maker, ())
    if problem:
        raise UserError(f"--args {name} is called without arguments, but {problem}: give them defaults")
    with explain_errors(f"--args {name} raised"):
        made = maker()
    return made if isinstance(made, tuple) else (made,)


def check_arguments(fun: Callable[..., Any], args: Sequence[Any], name: str, maker: str | None, words: _Words) -> None:
    """Checks that a function takes the arguments.

    Args:
      fun: the function.
      args: its arguments.
      name: of the function, as the user wrote it.
      maker: the function that made the arguments, as the user wrote it; `None` if none did.
      words: for errors.

    Raises:
      UserError: it takes others.
    """
    problem = _find_mismatch(fun, args)
    if problem and maker is None:
        raise UserError(f"{name} {problem}, and there is no --args. {_show_maker(fun, name, words)}")
    if problem:
        count = f"{len(args)} argument{'' if len(args) == 1 else 's'}"
        raise UserError(f"--args {maker} returns {count}, but {name} {problem}. {_show_maker(fun, name, words)}")


def check_numbers(args: tuple[Any, ...], maker: str | None, example: str) -> None:
    """Checks that arguments have numbers.

    Args:
      args: the arguments.
      maker: the function that made them, as the user wrote it.
      example: how an argument is made.

    Raises:
      UserError: one is only the shape of an array.
    """
    import jax

    for leaf in jax.tree.leaves(args):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise UserError(f"--args {maker} returns {leaf}: the function runs, and needs numbers, such as {example}")


def _find_mismatch(fun: Callable[..., Any], args: Sequence[Any]) -> str:
    """Says which arguments a function takes, if it is not these, or else nothing."""
    signature = _find_signature(fun)
    if signature is None:
        return ""
    try:
        signature.bind(*args)
    except TypeError:
        return f"takes {_leave_types_out(signature)}"
    return ""


def _show_maker(fun: Callable[..., Any], name: str, words: _Words) -> str:
    """Shows a function that returns what another one takes, and how to name it."""
    signature = _find_signature(fun)
    parameters = signature.parameters.values() if signature else ()
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    by_name = [parameter.name for parameter in required if parameter.kind is parameter.KEYWORD_ONLY]
    if by_name:
        return f"Arguments by name cannot be given: {words.verb} a function that passes {' and '.join(by_name)} itself."
    names = [parameter.name for parameter in required if parameter.kind not in _VARIADIC]
    if not names:
        return "Leave --args out."
    module = name.partition(":")[0]
    return (
        f"For example, write `def make_args(): return {', '.join(names)}` in {module}, where each is an array or, say, "
        f"{words.example}, and add --args {module}:make_args"
    )


def _leave_types_out(signature: inspect.Signature) -> inspect.Signature:
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def _find_signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):  # some functions written in C have none
        return None


@contextlib.contextmanager
def explain_errors(what: str) -> Iterator[None]:
    """Turns what the user's code raises into one line, with the place in that code.

    Args:
      what: the beginning of the line, such as `"train:step raised"`.

    Raises:
      UserError: the user's code raised, or what it called.
    """
    from .._jaxpr import find_raising_line

    try:
        yield
    except (Exception, SystemExit) as error:
        line = find_raising_line(error)
        place = f", at {line}" if line else ""
        raise UserError(f"{what} {_describe_error(error)}{place}") from error


def _describe_error(error: BaseException) -> str:
    """The type of an error, and the first line of what it says: JAX's errors go on for paragraphs."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _load_module(module: str, name: str) -> Any:
    """A module, imported from the current folder or wherever else Python finds it."""
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise UserError(
            f"{module!r}, of {name!r}, is not how Python names a module: package.train, not package/train.py"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with explain_errors(f"{module} cannot be imported: it raised"):
        try:
            __import__(module)
            return sys.modules[module]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            missing = error.name
    raise UserError(f"there is no module {missing!r}, of {name!r}, here or among the installed ones")


def _suggest(found: Any, attribute: str) -> str:
    """Offers the function whose name is nearest, if one is near."""
    names = [name for name in dir(found) if not name.startswith("_") and callable(getattr(found, name))]
    sentence = did_you_mean(attribute, names)
    return f". {sentence}" if sentence.startswith("Did") else ""
