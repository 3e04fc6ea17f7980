"""One way to trace a call of a user's function, and the names of its arguments and results."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from .._base import TRACING, Args, KeyPath, Kwargs, PyTree, Results, describe, drop_value_key, is_array
from ..modules import find_adapter, find_lifting_adapter, is_flax_object
from ._evaluate import explain_tracing, open_partials, refuse_casting, run_lifted, trace
from ._source import Modules, Register

T = TypeVar("T")


def check_function(fun: Any, caller: str, rest: str = "") -> None:
    """Raises a `TypeError` for anything but a function. `rest` has the other arguments of an example."""
    adapter = find_adapter(fun)
    if adapter is None and callable(fun) and not isinstance(fun, type):
        return
    audited = "audit(train_step)(state, batch)" if adapter is None else adapter.audit_example
    example = audited.replace("audit", caller).replace(")(", f"{rest})(", 1)
    raise TypeError(f"{caller} takes a function, got {describe(fun)}. For example: {example}.")


class ObservedCall(NamedTuple):
    """A traced call of a user's function. Its outputs can be computed elsewhere and put back."""

    program: ClosedJaxpr
    leaves: list[Any]  # the arrays that the jaxpr takes
    results: Results  # the outputs of the function
    modules: Modules  # the modules that it called
    # Of `observe`, for the names of arguments and results.
    signature: inspect.Signature | None = None
    given: tuple[Args, Kwargs] = ((), {})  # the arguments of the user
    taken: tuple[Args, Kwargs] = ((), {})  # the arguments of the traced function
    is_lifted: bool = False  # true if nnx objects among the arguments were lifted


def trace_call(
    caller: str, register: Register, fun: Callable[..., Any], args: Args, kwargs: Kwargs, results: Results | None = None
) -> ObservedCall:
    """Traces a function that the register watches. Some errors get a note that `caller` traces the function."""
    results = results or Results()
    with TRACING(register.take_token()), explain_tracing(caller, ""):
        traced = trace(results.take_arrays(fun), args, kwargs)
    register.release_token(traced.program.jaxpr)
    return ObservedCall(traced.program, traced.leaves, results, register.list_modules())


def observe(
    caller: str,
    register: Register,
    run: Callable[[ObservedCall], tuple[Sequence[Any], T]],
    fun: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    results: Results | None = None,
) -> tuple[Any, T]:
    """Traces a call of a user's function, which may write to nnx objects, and returns its output and a report.

    `run` returns the output arrays and the report.
    """
    refuse_casting(caller)
    opened, args, kwargs = open_partials(fun, args, kwargs)
    given, watched, reports = (args, kwargs), register.watch(opened), list[T]()

    def trace_and_run(pure: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        call = trace_call(caller, register, pure, args, kwargs, results)
        names = {"signature": find_signature(opened), "given": given, "taken": (args, kwargs)}
        arrays, report = run(call._replace(**names, is_lifted=pure is not watched))
        reports.append(report)
        return call.results.put_back(arrays)

    out = run_lifted(trace_and_run, watched, args, kwargs)
    return out, reports[0]


def find_signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a function, or of the one inside an nnx transform; None for some functions in C."""
    inner = inspect.unwrap(fun)
    if (getattr(inner, "__module__", None) or "").startswith("flax.nnx.") and inspect.isfunction(inner):
        fun = inspect.getclosurevars(inner).nonlocals.get("f", fun)
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):
        return None


def keep_changes(fun: Callable[..., Any], paths: list[KeyPath] | None = None) -> Callable[..., Any]:
    """Wraps a function so that it also returns what it changes in its arguments, such as an nnx model.

    The list `paths` gets the paths of the changes in `(args, kwargs)`.
    """

    @functools.wraps(fun)
    def call_and_keep(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        given = jax.tree.leaves((args, kwargs))
        ids, out = set(map(id, given)), fun(*args, **kwargs)
        leaves = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
        changes = [(path, leaf) for path, leaf in leaves if id(leaf) not in ids]
        if paths is not None:
            paths[:] = [path for path, _ in changes]
        return out, [leaf for _, leaf in changes]

    return call_and_keep


def take_apart(args: Args) -> tuple[Any, Callable[[Any], Args]]:
    """Splits arguments into arrays and a function that puts them back. Writes to nnx objects go to copies."""
    adapter = find_lifting_adapter(args)
    if adapter is not None and adapter.take_apart is not None:
        return adapter.take_apart(args)
    arrays = jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, args)
    choose = lambda new, old: old if new is None else new
    return arrays, lambda new: jax.tree.map(choose, new, args, is_leaf=lambda leaf: leaf is None)


def find_real_shape(aval: Any) -> tuple[int, ...]:
    """Returns the shape of the real numbers of an array: complex ones have a last axis for their two parts."""
    return (*aval.shape, 2) if jnp.issubdtype(aval.dtype, jnp.complexfloating) else aval.shape


def split_parts(array: jax.Array) -> jax.Array:
    """Returns the real numbers of an array, in the shape of `find_real_shape`."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return jnp.stack([array.real, array.imag], -1) if is_complex else array


def name_arguments(signature: inspect.Signature | None, arguments: PyTree, *, is_lifted: bool) -> list[str]:
    """Returns the paths of array arguments, which begin with parameter names.

    >>> def loss(params, *batches, scale): ...
    >>> name_arguments(inspect.signature(loss), (({"w": 1}, 2.0, [3]), {"scale": 4}), is_lifted=False)
    []
    >>> arrays = jax.tree.map(jax.numpy.asarray, (({"w": 1}, 2.0, [3]), {"scale": 4}))
    >>> name_arguments(inspect.signature(loss), arrays, is_lifted=False)
    ['params/w', 'batches/0', 'batches/1/0', 'scale']
    """
    return [name_argument(signature, path) for path in _list_array_paths(arguments, is_lifted=is_lifted)]


def name_argument(signature: inspect.Signature | None, path: KeyPath) -> str:
    """Returns the path of an argument by its path in `(args, kwargs)`."""
    return _join_path(*_find_parameter(signature, path))


def spell_arguments(
    signature: inspect.Signature | None, arguments: PyTree, given: tuple[Args, Kwargs], *, is_lifted: bool
) -> list[str]:
    """Spells array arguments as Python code, such as `batch['x']` or `model.head.kernel`.

    >>> def loss(params, *batches, scale): ...
    >>> arrays = jax.tree.map(jax.numpy.asarray, (({"w": 1}, 2.0, [3]), {"scale": 4}))
    >>> spell_arguments(inspect.signature(loss), arrays, arrays, is_lifted=False)
    ["params['w']", 'batches[0]', 'batches[1][0]', 'scale']
    """
    spelled = []
    for path in _list_array_paths(arguments, is_lifted=is_lifted):
        name, rest = _find_parameter(signature, path)
        number, inside = rest[: len(rest) - len(path[2:])], drop_value_key(path[2:])
        owner = functools.reduce(_step_into, path[:2], given)
        spelled.append(name + jax.tree_util.keystr(number) + _spell_path(owner, inside))
    return spelled


def name_results(paths: Sequence[KeyPath], *, is_lifted: bool) -> list[str | None]:
    """Returns the paths of outputs, which begin with `"result"`; None for updates of arguments."""
    own = map(_find_own, paths) if is_lifted else paths
    return [None if path is None else _join_path("result", path) for path in own]


def _list_array_paths(arguments: PyTree, *, is_lifted: bool) -> list[KeyPath]:
    leaves = jax.tree_util.tree_flatten_with_path(arguments)[0]
    return [path[2:] if is_lifted else path for path, leaf in leaves if is_array(leaf)]


def _find_parameter(signature: inspect.Signature | None, path: KeyPath) -> tuple[str, KeyPath]:
    """Returns the parameter name of an argument, and the rest of the path."""
    (kind, first), rest = map(_read_key, path[:2]), path[2:]
    if kind == "1":  # of the arguments by name
        return first, rest
    position = int(first)
    parameters = [] if signature is None else list(signature.parameters.values())
    for i, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return parameter.name, (jax.tree_util.SequenceKey(position - i), *rest)
        if i == position:
            return parameter.name, rest
    return "argument", (jax.tree_util.SequenceKey(position), *rest)


def _spell_path(owner: Any, path: KeyPath) -> str:
    """Spells a path inside `owner` as Python code, to append to its name."""
    if not path:
        return ""
    key, value = path[0], _take_key(path[0])
    is_attribute = is_flax_object(owner) and isinstance(value, str)
    here = f".{value}" if is_attribute else jax.tree_util.keystr((key,))
    return here + _spell_path(_step_into(owner, key), path[1:])


def _step_into(owner: Any, key: Any) -> Any:
    """Returns the child at a key, or None if unknown."""
    value = _take_key(key)
    if is_flax_object(owner) and isinstance(value, str):
        return getattr(owner, value, None)
    try:
        return owner[value]
    except Exception:  # nodes of other libraries may raise anything
        return None


def _take_key(key: Any) -> Any:
    return next((getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), None)


def _find_own(path: KeyPath) -> KeyPath | None:
    """Returns the path inside the outputs of a function of nnx objects, as `lift` arranges them, else None."""
    kind = _read_key(path[0])
    if kind == "out":
        return path[1:]
    is_returned = kind == "graph" and len(path) > 2 and _read_key(path[2]) == "2"
    return path[3:] if is_returned else None


def _join_path(name: str, path: KeyPath) -> str:
    return "/".join([name, *map(_read_key, drop_value_key(path))])


def _read_key(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
