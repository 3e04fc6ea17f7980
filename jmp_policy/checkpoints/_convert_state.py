"""`convert_state`: what a checkpoint gave, as the state of a run under any policy."""

import os
import re
from collections.abc import Collection
from typing import Any, TypeVar

import jax

from .._base import describe, did_you_mean, escape_controls, list_paths_to
from ._conversion import Conversion
from ._entries import is_whole, list_entries

T = TypeVar("T")

_READ = "checkpointer.restore(path)"


def convert_state(saved: Any, target: T, *, ignore: str | Collection[str] = ()) -> T:
    """Makes of a saved state, whatever policy it was saved under, the state of a run under another.

    Arrays are found by their paths, and have the dtypes and shardings of the target. What a policy adds to a state or
    takes from it is converted:

    ==================  ================================================================================================
    loss scale          A dynamic one goes on at its value and count, within the bounds of the target's. Where none was
                        saved it begins as the target's. Skip counters are kept. `loss_scaled` may be in one state only.
    half parameters     Masters, remainders and compensations of the target are made of the exact saved values, and so
                        are parameters of those that were saved. Parameters are rounded to nearest.
    moments in 8 bits   Those of `optim.quantize_state` are made of saved floats, and saved ones become the floats that
                        they stand for; in blocks of the same sizes they stay bit for bit.
    quantized weights   Made as `quant.quantize` makes them of floating ones. Saved numbers and scales become the floats
                        that they stand for, or stay if the target has the same format. The range of a layer's inputs
                        is the saved one, or else the target's.
    float8 state        Begins anew where none was saved. A history of another length keeps the newest.
    ==================  ================================================================================================

    Everything else has to be in both: counters, random keys, moments, running statistics. A value that float16 cannot
    hold becomes infinite. Arrays that need no change are not copied: the result shares them with `saved` and `target`.

    Args:
      saved: what a checkpoint gave. Orbax without a target, `flax.serialization.msgpack_restore`, or a state itself.
      target: a new state under the new policy, or its `jax.eval_shape`; of nnx `nnx.state((model, optimizer))`. Give
        parameters and the state of the optimizer together, as half-precision parameters are in both.
      ignore: patterns of paths that begin anew: the target keeps its own values, and saved ones are left. Each covers
        what is inside, too. `"opt_state"` begins the optimizer of a train state anew.

    Returns:
      A tree of the types, dtypes and shardings of `target`; of a model that was calibrated, with the saved ranges. Of
      an abstract target, arrays; a dynamic loss scale that was not saved then begins at 2**15.

    Raises:
      TypeError: `saved` is no state, but a path, bytes or `None`.
      ValueError: an array is missing, or left over, or of another shape, or a saved scale is nan, infinite, negative,
        or zero where that divides by zero: the error lists all of them. Or a pattern of
        `ignore` matches nothing; or it is not clear which parameters a saved master belongs to.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> import optax
    >>> params = {"w": jnp.float32([0.1, 0.2])}
    >>> saved = {"params": params, "opt_state": optax.sgd(0.1, momentum=0.9).init(params)}
    >>> params = jmp.cast_floating(params, "bfloat16")
    >>> tx = jmp.optim.loss_scaled(jmp.optim.master_weights(optax.sgd(0.1, momentum=0.9)), jmp.NoOpLossScale())
    >>> state = jmp.convert_state(saved, {"params": params, "opt_state": tx.init(params)})
    >>> state["params"]["w"].dtype, state["opt_state"].inner_state.master["w"].tolist() == saved["params"]["w"].tolist()
    (dtype(bfloat16), True)

    With Orbax, and with an nnx model and its optimizer (a train state is itself the target):

    ```
    saved = checkpointer.restore(path)  # or manager.restore(step, args=ocp.args.StandardRestore())
    nnx.update((model, optimizer), jmp.convert_state(saved, nnx.state((model, optimizer))))
    ```

    Orbax puts what it reads on the devices that it was saved from. If there are others now, it has to be told:

    ```
    shapes = checkpointer.metadata(path).item_metadata.tree
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # or a sharding for each array
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), shapes)
    saved = checkpointer.restore(path, abstract)
    ```
    """
    _check_saved(saved)
    saved_entries, entries = list_entries(saved, target)
    names = {entry.name for entry in (*saved_entries, *entries)}
    is_ignored = _list_ignored(ignore, names).__contains__
    conversion = Conversion(saved_entries, entries, is_ignored, target)
    new = {entry.index: conversion.convert(entry) for entry in entries}
    if problems := conversion.list_problems():
        raise ValueError(_write_problems(problems, names))
    structure = jax.tree.structure(target, is_leaf=is_whole)
    return structure.unflatten([new[index] for index in range(len(new))])


def _check_saved(saved: Any) -> None:
    if saved is None or isinstance(saved, str | bytes | os.PathLike):
        read = "flax.serialization.msgpack_restore(data)" if isinstance(saved, bytes) else _READ
        raise TypeError(
            f"convert_state takes the state that a checkpoint gave, got {describe(saved)}. For example: "
            f"convert_state({read}, target)."
        )


def _list_ignored(ignore: str | Collection[str], names: Collection[str]) -> set[str]:
    """Lists the names that one of the patterns covers.

    Raises:
      ValueError: a pattern is not valid, or covers none.
    """
    ignored = set()
    for pattern in [ignore] if isinstance(ignore, str) else ignore:
        try:
            covered = {name for name in names if _covers(pattern, name)}
        except re.error as error:
            raise ValueError(
                f"{pattern!r} of ignore is no valid pattern: {error}. For example: ignore='opt_state'."
            ) from None
        if not covered:
            known = dict.fromkeys(path for name in sorted(names) for path in list_paths_to(name)[1:])
            raise ValueError(f"{pattern!r} of ignore matches no path. {did_you_mean(pattern, known)}")
        ignored |= covered
    return ignored


def _covers(pattern: str, name: str) -> bool:
    return any(re.fullmatch(pattern, path) for path in list_paths_to(name)[1:])


def _write_problems(problems: dict[str, str], names: Collection[str]) -> str:
    lines = "".join(f"\n  {escape_controls(name, keep='') or 'it'} {what}" for name, what in sorted(problems.items()))
    return (
        f"The checkpoint does not fit the target:{lines}\n"
        "Make the target as the saved run made its state, but for the policy. Or let what differs begin anew, as the "
        f"target has it: convert_state(saved, target, ignore={_find_common_paths(problems, names)!r})."
    )


def _find_common_paths(problems: Collection[str], names: Collection[str]) -> list[str]:
    """The paths that hold the problems and nothing that fits; the first names of paths, where those are many.

    >>> names = {"params/body/w", "params/head/w", "params/head/b", "step"}
    >>> _find_common_paths({"params/head/w", "params/head/b", "step"}, names)
    ['params/head', 'step']
    """
    fitting = [f"{name}/" for name in names if name not in problems]
    found = []
    for name in sorted(problems):
        inside_out = reversed(list_paths_to(name)[1:])
        bad = [path for path in inside_out if not any(other.startswith(f"{path}/") for other in fitting)]
        found.append(bad[-1] if bad else name)
    paths = list(dict.fromkeys(found))
    return paths if len(paths) <= _MOST_PATHS else list(dict.fromkeys(path.partition("/")[0] for path in paths))


_MOST_PATHS = 6
"""A sentence lists so many paths. An optimizer that differs in more of its state begins anew as a whole."""
