"""Making the rows out of what an adapter knows and what was seen."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._base import IN_FULL_PRECISION, is_floating_dtype, list_paths_to
from ...modules import FULL_PRECISION, WRITTEN, ModelInfo, ModuleInfo, widen_policy
from ...modules.common import Observation
from ._explanation import Explanation, Row
from ._operations import (
    collect_compute_dtypes,
    collect_half_sums,
    collect_made_dtypes,
    describe_weight,
    find_leaks,
    find_output_casts,
    walk_operations,
)


def build_explanation(model: ModelInfo, observation: Observation) -> Explanation:
    """Makes the explanation of a model.

    Args:
      model: what its adapter knows of it.
      observation: what was seen while it was traced.
    """
    assert observation.program is not None
    program = list(walk_operations(observation.program))
    computed, made, summed = collect_compute_dtypes(program), collect_made_dtypes(program), collect_half_sums(program)
    modules = {**model.modules}
    modules.update((path, _widen(modules[path])) for path in observation.widened if path in modules)
    leaking = find_leaks(program, modules)
    cast = find_output_casts(observation.program, program, modules)
    rows = []
    for path in _order_paths(modules, observation):
        module = modules[path]
        own = model.params.get(path, ())
        rows.append(Row(
            path=path,
            type=module.type.__name__,
            policy=module.policy,
            rule=module.rule,
            param_dtypes=tuple(dict.fromkeys(str(array.dtype) for array in jax.tree.leaves(own))),
            input_dtypes=observation.inputs.get(path, ()),
            compute_dtypes=computed.get(path, ()),
            output_dtypes=observation.outputs.get(path, ()),
            param_bytes=_sum_bytes(jax.tree.leaves(own), lambda dtype: dtype.itemsize),
            float32_bytes=_sum_bytes(own, lambda dtype: 4 if is_floating_dtype(dtype) else dtype.itemsize),
            leaks_into=leaking.get(path, ()),
            quantization=describe_weight(module, computed.get(path, ()), made.get(path, ())),
            output_cast=cast.get(path, ""),
            half_sums=summed.get(path, ()),
            accumulate_dtype=module.accumulate_dtype if module.accumulate_dtype in made.get(path, ()) else "",
        ))  # fmt: skip
    return Explanation(tuple(rows), tuple(model.unused), tuple(model.unknown))


def _widen(module: ModuleInfo) -> ModuleInfo:
    """What holds at a module that runs inside of `force_full_precision`, whatever its policy says."""
    if module.policy is None or module.rule == WRITTEN:
        return module
    with IN_FULL_PRECISION(True):
        policy = widen_policy(module.policy)
    return dataclasses.replace(module, policy=policy, rule=FULL_PRECISION, compute_dtype=policy.compute_dtype)


def _order_paths(modules: Mapping[str, ModuleInfo], observation: Observation) -> list[str]:
    """The paths in the order of their first calls, and what is inside a module right after it."""
    position = {path: index for index, path in enumerate(dict.fromkeys([*observation.inputs, *modules]))}

    def key(path: str) -> list[int]:
        return [position[outer] for outer in list_paths_to(path) if outer in modules]

    return sorted(modules, key=key)


def _sum_bytes(leaves: Sequence[Any], itemsize: Callable[[np.dtype], int]) -> int:
    return sum(math.prod(leaf.shape) * itemsize(np.dtype(leaf.dtype)) for leaf in leaves)
