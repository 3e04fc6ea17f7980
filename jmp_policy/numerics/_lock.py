"""`numerics.lock`: the precision of a program as a text, and a test that it stays the same."""

import contextlib
import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from .._base import Args, Check, KeyPath, Kwargs, Note, group_by_key, hide_frames, is_array, warn_user
from .._jaxpr import (
    ModulePaths,
    ObservedCall,
    Register,
    check_function,
    find_direction,
    find_signature,
    keep_changes,
    name_argument,
    name_results,
    open_partials,
    trace_call,
)
from ..modules import find_adapter, is_flax_object, policy_of
from ..policy import spell_rules
from ._audit_report import parse_platform
from ._lock_compiled import compile_rows, find_platform
from ._lock_facts import has_precision, list_argument_rows, read_rows, spell_shape
from ._lock_file import VERSIONS, Lock, load_lock
from ._lock_rows import ROOT, LockRow

UPDATE = "JMP_UPDATE_LOCKS"
"""The environment variable that makes `assert_locked` write files anew."""


def lock(fun: Callable[..., Any], *, platform: str | None = None, compiled: bool = False) -> Callable[..., Lock]:
    """Describes the precision of a function in lines that a test or a reviewer compares.

    The function is traced and not run, as by `audit`: `jax.ShapeDtypeStruct`s suffice. Each line has one fact of one
    module or `jax.named_scope`:

    - matmuls and convolutions: dtypes of operands and result, precision, count;
    - casts to and from floating dtypes, with the number of elements, but of bool, or of wide integers to float32;
    - operations that depend on their dtype, such as exponentials: those that `autocast` keeps in float32, and more;
    - sums with the largest number of elements that they add; the largest array of other arithmetic;
    - collectives of `shard_map`, with bytes; operations inside of Pallas kernels;
    - kernels, callbacks and operations of other libraries, with the dtypes of their arguments and results;
    - arguments and results: dtypes, shapes, quantized formats, settings of loss scales.

    Names of functions, the order of operations, jitted functions inside and source lines are not facts. Operations
    in a loop count as often as they run. A `while` counts as one iteration.

    Args:
      fun: any function of trees of arrays.
      platform: the platform whose matmuls and branches of `lax.platform_dependent` count, `"tpu"`, `"cuda"` or `"cpu"`;
        by default the platform of the arguments' described devices, or else of this process.
      compiled: whether the facts are of the program that XLA compiled: what it fused, elided, widened and sent between
        devices. A TPU need not be there, if `libtpu` is installed.

    Returns:
      A function of the same arguments that returns a `Lock`.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: the platform is unknown, or it has no compiler here.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def loss(w, x):
    ...     with jax.named_scope("head"):
    ...         return jnp.sum(x @ w)
    >>> w, x = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> rows = jmp.numerics.lock(loss, platform="cuda")(w, x).rows
    >>> print(next(row for row in rows if row.fact == "forward matmul"))
    head | forward matmul | float32 x float32 -> float32, multiplied in TF32 | 1 time
    """
    check_function(fun, "lock")
    wanted = None if platform is None else parse_platform(platform)

    @hide_frames
    @functools.wraps(fun)
    def run_lock(*args: Any, **kwargs: Any) -> Lock:
        opened, args, kwargs = open_partials(fun, args, kwargs)
        changed, register = list[KeyPath](), Register()
        call = trace_call("lock", register, register.watch(keep_changes(opened, changed)), args, kwargs)
        chosen = wanted or find_platform(call.leaves)
        paths = ModulePaths(call.modules)
        find_place = functools.cache(lambda stack: (paths.read_stack(stack), find_direction(stack)))
        if compiled:
            found, device = compile_rows(call, find_place, chosen)
        else:
            found, device = read_rows(call.program.jaxpr, find_place, chosen), ""
        notes = [note for note in register.notes if note.kind == "loss scale"]
        scales = dict.fromkeys(LockRow(find_place(note.scope)[0], note.kind, note.name, note.text) for note in notes)
        rows = [*_list_ends(opened, args, kwargs, call, changed), *scales, *found]
        policies = tuple(_list_policies(args, kwargs, call, register.notes, paths).items())
        name = name_locked_function(fun)
        if all(row.fact.startswith("argument") for row in rows):
            warn_user(f"lock found no floating-point operation or result in {name}. Return what it computes.")
        return Lock(tuple(rows), name, chosen, device, _list_versions(compiled), policies)

    return run_lock


def name_locked_function(fun: Callable[..., Any]) -> str:
    """Returns the name of a function in its lock; for a partial, the name of the function that it calls."""
    opened = open_partials(fun, (), {})[0]
    return getattr(opened, "__name__", type(opened).__name__)


def _list_ends(
    fun: Callable[..., Any], args: Args, kwargs: Kwargs, call: ObservedCall, changed: Sequence[KeyPath]
) -> Iterator[LockRow]:
    """Yields rows for the arguments, for those whose dtype the function changes, and for the results."""
    name_path = functools.partial(name_argument, find_signature(fun))
    yield from list_argument_rows((args, kwargs), name_path)
    given = {path: leaf for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0] if is_array(leaf)}
    avals: Any = call.program.out_avals
    for (end, *path), aval in zip(call.results.list_paths(), avals, strict=True):
        if not has_precision(aval.dtype):
            continue
        if end.idx == 0:
            [name] = name_results([tuple(path)], is_lifted=False)
            yield LockRow(str(name), "result", str(aval.dtype), spell_shape(aval))
        elif (written := changed[int(path[0].idx)]) in given and given[written].dtype != aval.dtype:
            dtypes = f"{given[written].dtype} becomes {aval.dtype}"
            yield LockRow(name_path(written), "update", dtypes, spell_shape(aval))


def _list_policies(
    args: Args, kwargs: Kwargs, call: ObservedCall, notes: Iterable[Note], paths: ModulePaths
) -> dict[str, str]:
    """Lists the policies and rules of functions, of linen modules, and of nnx modules among the arguments."""
    found = [(paths.read_stack(note.scope), note.name, note.text) for note in notes if note.kind == "policy"]
    modules = [(path, kind) for path, kind in call.modules.types if find_adapter(kind) is not None]
    objects = jax.tree.leaves((args, kwargs), is_leaf=is_flax_object)
    modules += [("", leaf) for leaf in objects if find_adapter(leaf) is not None]
    for path, module in modules:
        policy = policy_of(module)
        found += [] if policy is None else [(path, *pair) for pair in spell_rules(policy)]
    places = group_by_key((f"{path or ROOT} rule {key}" if key else path or ROOT, text) for path, key, text in found)
    return {place: "; ".join(dict.fromkeys(texts)) for place, texts in places.items()}


@functools.cache  # reading them takes as long as the facts of a small program
def _list_versions(compiled: bool) -> tuple[tuple[str, str], ...]:
    found = {}
    for name in VERSIONS:
        if compiled or name not in ("jaxlib", "libtpu"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
    return tuple(found.items())


def assert_locked(
    path: str | os.PathLike[str],
    fun: Callable[..., Any],
    *,
    platform: str | None = None,
    compiled: bool | None = None,
    update: bool | None = None,
) -> Callable[..., None]:
    """Asserts that a function has the precision of a file that `lock` made: a test for pytest, or any other runner.

    Args:
      path: the file, which belongs in version control.
      fun: the function, as for `lock`.
      platform, compiled: as for `lock`; by default as in the file.
      update: whether to write the file anew; by default if the environment variable `JMP_UPDATE_LOCKS` is 1.

    Returns:
      A function of the arguments of `fun`. It warns if it is never called: then nothing was compared.

    Raises:
      AssertionError: a fact differs, or the file is missing. The message has the difference, with causes and fixes.
      ValueError: the file is not a lock, or is to be written and has no operation or result.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp, tempfile
    >>> x, path = jax.ShapeDtypeStruct((4, 4), jnp.float32), f"{tempfile.mkdtemp()}/numerics.lock"
    >>> jmp.numerics.assert_locked(path, lambda x: x @ x, update=True)(x)
    >>> jmp.numerics.assert_locked(path, lambda x: x @ x)(x)
    >>> try:
    ...     jmp.numerics.assert_locked(path, lambda x: jnp.dot(x, x, precision="highest"))(x)
    ... except AssertionError as difference:
    ...     print(*str(difference).splitlines()[-5:-1], sep="\\n")
      - float32 x float32 -> float32: 1 time
      + float32 x float32 -> float32, precision HIGHEST: 1 time
      cause: its precision changed
      fix: set precision= of the policy or of the call, or jax_default_matmul_precision
    """
    try:
        check_function(fun, "assert_locked")
    except TypeError as error:
        raise TypeError(str(error).replace("assert_locked(", 'assert_locked("numerics.lock", ')) from None
    file = Path(path)

    def run_assert(*args: Any, **kwargs: Any) -> None:
        writes = os.environ.get(UPDATE, "").lower() in ("1", "true", "yes") if update is None else update
        locked = load_lock(file, is_damaged_ok=writes, platform=platform)
        if locked is None and not writes:
            raise AssertionError(f"{file.absolute()} is missing or empty. Create it: {UPDATE}=1 pytest")
        now = lock_like(locked, fun, platform, compiled)(*args, **kwargs)
        if writes:
            file.parent.mkdir(parents=True, exist_ok=True)
            now.save(file)
        elif locked is not None and (difference := locked.diff(now)):
            raise AssertionError(f"{file} differs.\n{difference}\nIf you meant to change it: {UPDATE}=1 pytest")

    return Check(run_assert, f"assert_locked({str(path)!r}, {getattr(fun, '__name__', 'fun')})")


def lock_like(
    locked: Lock | None, fun: Callable[..., Any], platform: str | None = None, compiled: bool | None = None
) -> Callable[..., Lock]:
    """Returns `lock(fun)` with the platform of another lock, compiled like it, unless the arguments say otherwise."""
    if locked is not None:
        platform = platform or locked.platform or None
        compiled = bool(locked.compiled) if compiled is None else compiled
    return lock(fun, platform=platform, compiled=bool(compiled))
