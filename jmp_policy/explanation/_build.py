"""Making the rows out of what an adapter knows and what was seen."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._dtypes import is_floating_dtype
from ._explanation import Explanation, Row
from ._module import ModuleInfo
from ._observation import Observation
from ._operations import Operation, compute_dtypes, half_sums, leaks, made_dtypes, what_was_multiplied


def explanation(
    modules: Mapping[str, ModuleInfo],
    params: Mapping[str, Sequence[Any]],
    observation: Observation,
    program: list[Operation],
    unused: Sequence[str],
    unknown: Sequence[str] = (),
) -> Explanation:
    """The explanation of a model.

    Args:
      modules: what holds at each path.
      params: the parameters of each module itself, by path: anything with a shape and a dtype; quantized ones, of
        which these are those of the weight, are trees of the arrays that are stored.
      observation: what was seen while the model was traced.
      program: the operations that were traced.
      unused: what to say of rules that decided for no module.
      unknown: what to say of modules of which it is not known where they stand.
    """
    computed, made, summed = compute_dtypes(program), made_dtypes(program), half_sums(program)
    leaking = leaks(program, modules)
    rows = []
    for path in _ordered(modules, observation):
        module = modules[path]
        own = params.get(path, ())
        rows.append(Row(
            path=path,
            type=module.type.__name__,
            policy=module.policy,
            rule=module.rule,
            param_dtypes=tuple(dict.fromkeys(str(array.dtype) for array in jax.tree.leaves(own))),
            input_dtypes=observation.inputs.get(path, ()),
            compute_dtypes=computed.get(path, ()),
            output_dtypes=observation.outputs.get(path, ()),
            param_bytes=_bytes(jax.tree.leaves(own), lambda dtype: dtype.itemsize),
            float32_bytes=_bytes(own, lambda dtype: 4 if is_floating_dtype(dtype) else dtype.itemsize),
            leaks_into=leaking.get(path, ()),
            quantization=what_was_multiplied(module, computed.get(path, ()), made.get(path, ())),
            half_sums=summed.get(path, ()),
        ))  # fmt: skip
    return Explanation(tuple(rows), tuple(unused), tuple(unknown))


def _ordered(modules: Mapping[str, ModuleInfo], observation: Observation) -> list[str]:
    """The paths in the order of their first calls, and what is inside a module right after it."""
    position = {path: index for index, path in enumerate(dict.fromkeys([*observation.inputs, *modules]))}

    def key(path: str) -> list[int]:
        names = path.split("/") if path else []
        around = ("/".join(names[:n]) for n in range(len(names) + 1))
        return [position[outer] for outer in around if outer in modules]

    return sorted(modules, key=key)


def _bytes(leaves: Sequence[Any], itemsize: Callable[[np.dtype], int]) -> int:
    return sum(math.prod(leaf.shape) * itemsize(np.dtype(leaf.dtype)) for leaf in leaves)
