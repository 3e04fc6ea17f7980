"""The operations of each module in a traced program, and the explanation built of them."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr

from .._base import (
    IN_FULL_PRECISION,
    ROUNDING_SCOPE,
    Args,
    Kwargs,
    PyTree,
    group_by_key,
    hide_frames,
    is_array,
    is_floating_dtype,
    list_paths_to,
    quote,
)
from .._jaxpr import (
    HALF,
    LIST_WEIGHTS,
    Atom,
    Fact,
    Step,
    find_half_sum,
    find_origin,
    float_dtype,
    having,
    is_called_by_library,
    list_functions,
    walk,
)
from ..autocast import OwnWeight, find_own_weights
from ..modules import (
    FULL_PRECISION,
    WRITTEN,
    Method,
    ModelInfo,
    ModuleInfo,
    Observation,
    find_adapter,
    read_path,
    widen_policy,
)
from ..policy import ODD_ROWS, Float8, Policy, PolicyMap
from ._audit import find_in_program
from ._explanation import Explanation, ModuleRow

STRUCTURAL = (having(Fact.MOVES, Fact.ANNOTATES) - {"gather"}) | {
    "convert_element_type", "reduce_precision", "link", "carry",
}  # fmt: skip
"""Primitives that move or convert elements. A lookup of rows counts as computing: it is all that an Embed does.

A `link` joins a value in a body to one around it, a `carry` a value around a loop to one in it.
"""

_LONG_SUM = 32
"""Smallest number of elements of a half-precision sum that is reported: 2 x 2 pooling rounds no more than other ops."""

LocatedStep = tuple[str | None, Step]
"""The module path of a step (None if it has none), and the step."""


def computes(step: Step) -> bool:
    """True if a step does arithmetic other than rounding into a quantized format."""
    return step.name not in STRUCTURAL and ROUNDING_SCOPE not in step.scope


def collect_by_path(steps: Iterable[LocatedStep], describe: Callable[[Step], list[Any]]) -> dict[str, tuple[str, ...]]:
    """Returns, by path, the distinct descriptions of the steps in a module's own code."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for path, step in steps:
        if path is not None:
            found[path].update(dict.fromkeys(str(described) for described in describe(step) if described is not None))
    return {path: tuple(descriptions) for path, descriptions in found.items()}


def list_read_dtypes(step: Step) -> list[Any]:
    """Lists the floating dtypes that a step computes with; conversions do not count."""
    # A `scaled_dot` multiplies its first two operands. The others are the scales of their blocks.
    read = step.operands[:2] if step.name == "scaled_dot" else step.operands
    return list(map(float_dtype, read)) if computes(step) else []


def _list_long_sums(step: Step) -> list[Any]:
    half_sum = find_half_sum(step)
    return [half_sum] if half_sum is not None and half_sum.numbers >= _LONG_SUM else []


def _list_half_softmaxes(step: Step) -> list[Any]:
    """Lists the dtype of the exponential of a softmax in half precision, unless a library calls it."""
    dtype = float_dtype(step.operands[0]) if step.name == "exp" else None
    is_found = dtype in HALF and not list_functions(step).isdisjoint(("softmax", "_softmax"))
    return [dtype] if is_found and not is_called_by_library(find_origin(step)) else []


def _find_precision_faults(program: Jaxpr, steps: Iterable[LocatedStep]) -> dict[str, tuple[str, ...]]:
    """Finds, by path, softmaxes in half precision; and promotions, samples and rounded integers, as `audit` does."""
    softmaxes = collect_by_path(steps, _list_half_softmaxes)
    found = group_by_key((path, _SOFTMAX.format(dtype)) for path, dtypes in softmaxes.items() for dtype in dtypes)
    for finding in find_in_program(program, lambda scope: read_path(scope) or ""):
        if finding.id in ("accidental-promotion", "half-sampling", "rounded-integer"):
            found.setdefault(finding.path, []).append(finding.message)
    return {path: tuple(dict.fromkeys(messages)) for path, messages in found.items()}


_SOFTMAX = "a softmax in {}, whose probabilities may not add up to 1; cast its input to float32 first"


def describe_weight(module: ModuleInfo, computed: Collection[str], made: Collection[str]) -> str:
    """Returns `ModuleRow.quantization` of a module, given the dtypes that its operations read and made."""
    format = None if module.policy is None else module.policy.quantization
    # A table may have another format than the policy: `int4` stores it in int8.
    is_left = module.quantization.startswith("left: ") or "as numbers" in module.quantization
    if module.is_layer and module.quantization and not is_left and not (computed or made):
        return _UNCALLED
    is_open = isinstance(format, Float8) and module.quantization == str(format) and made
    if not is_open or _has_float8(computed):
        return module.quantization
    if _has_float8(made):
        return f"{format}, computed with as numbers: it is a convolution"
    return f"left: {ODD_ROWS}" if module.is_layer else f"left: {ODD_ROWS}, or its code is no layer of Flax's"


_UNCALLED = "left: the layer is not called, and other code gets its weight as it is"


def _has_float8(dtypes: Collection[str]) -> bool:
    return any(dtype.startswith("float8") for dtype in dtypes)


Marks = dict[int, frozenset[str]]
"""By id of a value: the named modules whose wide outputs it is made of."""


def find_leaks(
    jaxpr: Jaxpr, steps: Iterable[LocatedStep], modules: Mapping[str, ModuleInfo]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Returns the modules into whose code each named module leaks, and the dtype to which the root casts its output.

    A rule such as `"norm": "float32"` makes a module return float32. A Flax layer casts it down, but in the user's
    code, such as a residual sum, promotion makes all later values float32. So the output of a named module gets a mark.
    The mark passes through steps that keep the dtype; an explicit conversion removes it. Arithmetic with a marked
    operand is a leak if it is in the code of a module with a narrower compute dtype.
    """
    marks: Marks = {}
    leaks: dict[str, dict[str, None]] = defaultdict(dict)
    casts: dict[str, str] = {}
    outputs = set(map(id, jaxpr.outvars))
    for path, step in steps:
        if computes(step) and path is not None:
            for atom in step.operands:
                for source in _find_leaking_modules(marks.get(id(atom), frozenset()), path, atom, modules[path]):
                    leaks[source][path] = None
        # Results keep the marks of operands of their dtype, and get the marks of the named modules around them.
        named = [outer for outer in list_paths_to(path or "")[1:] if outer in modules and modules[outer].is_named]
        dtypes = {id(atom): float_dtype(atom) for atom in step.operands}
        for var in step.results:
            made = float_dtype(var)
            same = [atom for atom, dtype in dtypes.items() if made is not None and dtype is not None and dtype == made]
            # A module that computes in this dtype by itself would return it for operands of any dtype.
            inherits = not named or modules[named[-1]].compute_dtype != made
            marks[id(var)] = frozenset(named).union(*(marks.get(atom, ()) for atom in same if inherits))
        if step.name == "convert_element_type" and path == "" and id(step.results[0]) in outputs:
            read, made = float_dtype(step.operands[0]), float_dtype(step.results[0])
            if read is not None and made is not None and read.itemsize > made.itemsize:
                casts.update((source, str(made)) for source in marks.get(id(step.operands[0]), ()))
    return {source: tuple(paths) for source, paths in leaks.items()}, casts


def _find_leaking_modules(marks: frozenset[str], path: str, atom: Atom, module: ModuleInfo) -> Iterable[str]:
    """Returns the marks of an operand that are wider than the compute dtype at a path, except those around it."""
    dtype = float_dtype(atom)
    if module.is_layer or module.compute_dtype is None or dtype is None:
        return ()
    if np.dtype(module.compute_dtype).itemsize >= dtype.itemsize:
        return ()
    return sorted(source for source in marks if source not in list_paths_to(path))


def _explain_weights(policy: Policy, weights: Iterable[tuple[str, Any, str]]) -> Explanation:
    """Returns the explanation of a function of `autocast`: a row per array of its weights."""
    described = (OwnWeight(path, x.shape, x.dtype, x.size * x.dtype.itemsize, said) for path, x, said in weights)
    return Explanation(tuple(_explain_weight(weight, policy, "weights") for weight in described))


def _explain_weight(weight: OwnWeight, policy: Policy | None, rule: str) -> ModuleRow:
    """Returns the row of one weight, which the code of a module multiplies by, without a layer of Flax."""
    return ModuleRow(
        path=weight.path,
        type=f"weight {list(weight.shape)}",
        policy=policy,
        rule=rule,
        param_dtypes=(str(weight.dtype),),
        input_dtypes=(),
        compute_dtypes=(),
        output_dtypes=(),
        param_bytes=weight.nbytes,
        float32_bytes=4 * math.prod(weight.shape),
        leaks_into=(),
        quantization=weight.quantization,
        is_weight=True,
        layout=weight.layout,
    )


def build_explanation(model: ModelInfo, observation: Observation, weights: Sequence[OwnWeight] = ()) -> Explanation:
    """Returns the explanation of a model, from its adapter and from the traced call."""
    assert observation.program is not None
    steps = [(read_path(step.scope), step) for step in walk(observation.program) if step.name != "constant"]
    computed = collect_by_path(steps, list_read_dtypes)
    made = collect_by_path(steps, lambda step: [*map(float_dtype, step.results)])
    summed = collect_by_path(steps, _list_long_sums)
    faults = _find_precision_faults(observation.program, steps)
    modules = {**model.modules}
    modules.update((path, _apply_full_precision(modules[path])) for path in observation.widened if path in modules)
    leaking, cast = find_leaks(observation.program, steps, modules)
    owners = [next(path for path in reversed(list_paths_to(weight.path)) if path in modules) for weight in weights]
    weights_of = group_by_key(zip(owners, weights, strict=True))
    rows = []
    for path in _order_paths(modules, observation):
        module = modules[path]
        own, apart = model.params.get(path, ()), weights_of.get(path, ())
        rows.append(ModuleRow(
            path=path,
            type=module.type.__name__,
            policy=module.policy,
            rule=module.rule,
            param_dtypes=tuple(dict.fromkeys(str(array.dtype) for array in jax.tree.leaves(own))),
            input_dtypes=observation.inputs.get(path, ()),
            compute_dtypes=computed.get(path, ()),
            output_dtypes=observation.outputs.get(path, ()),
            param_bytes=_sum_bytes(jax.tree.leaves(own), _size_of) - sum(weight.nbytes for weight in apart),
            float32_bytes=_sum_bytes(own, _size_in_float32) - sum(4 * math.prod(weight.shape) for weight in apart),
            leaks_into=leaking.get(path, ()),
            quantization=describe_weight(module, computed.get(path, ()), made.get(path, ())) if not apart else "",
            output_cast=cast.get(path, ""),
            half_sums=summed.get(path, ()),
            precision_faults=faults.get(path, ()),
            accumulate_dtype=module.accumulate_dtype if module.accumulate_dtype in made.get(path, ()) else "",
        ))  # fmt: skip
        rows += [_explain_weight(weight, module.policy, module.rule) for weight in apart]
    return Explanation(tuple(rows), tuple(model.unused), tuple(model.unknown))


def _apply_full_precision(module: ModuleInfo) -> ModuleInfo:
    """Applies `force_full_precision` to a module."""
    if module.policy is None or module.rule == WRITTEN:
        return module
    with IN_FULL_PRECISION(True):
        policy = widen_policy(module.policy)
    return dataclasses.replace(module, policy=policy, rule=FULL_PRECISION, compute_dtype=policy.compute_dtype)


def _order_paths(modules: Mapping[str, ModuleInfo], observation: Observation) -> list[str]:
    """Returns the paths in the order of their first calls, each followed by the modules inside."""
    position = {path: index for index, path in enumerate(dict.fromkeys([*observation.inputs, *modules]))}
    return sorted(modules, key=lambda path: [position[outer] for outer in list_paths_to(path) if outer in modules])


def _size_of(dtype: np.dtype) -> int:
    return dtype.itemsize


def _size_in_float32(dtype: np.dtype) -> int:
    return 4 if is_floating_dtype(dtype) else dtype.itemsize


def _sum_bytes(leaves: Sequence[Any], itemsize: Callable[[np.dtype], int]) -> int:
    return sum(math.prod(leaf.shape) * itemsize(np.dtype(leaf.dtype)) for leaf in leaves)


@hide_frames
def explain(model: Any, *inputs: Any, method: Method = None, rngs: PyTree = None, **kwargs: Any) -> Explanation:
    """Returns the policy, the rule, and the dtypes of a traced call, for each module of a Flax model.

    The model is traced and not run, with abstract parameters and inputs, so that nothing is allocated. A linen module
    is initialized abstractly; an nnx module is copied, and `nnx.eval_shape` makes one without arrays. Rules of a
    `PolicyMap` that decide for no module are listed. So are sums of many elements and your own softmaxes in half
    precision, samples and integers made from it, and constants and parameters that promote to float32: a policy reaches
    layers, but not functions such as `nn.avg_pool`. A model without a policy is explained as well.

    Under a quantized policy, each parameter of two or more axes in a module of your own has a row, with the format in
    which the code multiplies by it, or the reason why it stays (`row.is_weight`).

    Of a function of `autocast`, the rows are the arrays that its argument `weights` names, by their paths.
    `row.quantization` is the format of such an array, or why it is left.

    Args:
      model: a linen or nnx module, with a policy or without; or a function of `autocast`.
      *inputs: positional arguments of its method: arrays, or `jax.ShapeDtypeStruct`s. Others are passed on unchanged.
      method: the name of a method, a method, or a function of the module, instead of the module itself.
      rngs: for linen, a key or keys by name, as `Module.init` takes them, one that is made up if there are none; for
        nnx, the argument `rngs` of the method.
      **kwargs: keyword arguments of the method.

    Returns:
      An `Explanation`: a table when printed or shown in a notebook, `.rows` and `.to_dict()` for programs.

    Raises:
      TypeError: `model` is not a Flax module, or the input is the shape of one. Errors of the model itself propagate.

    >>> import jax, jmp_policy as jmp
    >>> from flax import linen as nn
    >>> rules = jmp.PolicyMap({"layers_1": "float32", "layer_0": "float32"}, "mixed_bfloat16")
    >>> model = jmp.with_policy(nn.Sequential([nn.Dense(4), nn.LayerNorm()]), rules)
    >>> explanation = jmp.explain(model, jax.ShapeDtypeStruct((8, 3), "float32"))
    >>> [(row.path, row.rule, row.compute_dtypes) for row in explanation.rows]
    [('', 'default', ()), ('layers_0', 'default', ('bfloat16',)), ('layers_1', 'layers_1', ('float32',))]
    >>> explanation.unused
    ("policy rule 'layer_0' matches no module; the closest path is 'layers_0'",)
    """
    list_weights = getattr(model, LIST_WEIGHTS, None)
    if list_weights is not None:
        return _explain_weights(*list_weights(inputs, kwargs))
    adapter = None if isinstance(model, type) else find_adapter(model)
    if adapter is None:
        raise TypeError(
            f"explain takes a Flax module, got {model!r}. For example: "
            "explain(Net(), jax.ShapeDtypeStruct((8, 28, 28), 'float32')); of a function, "
            "jmp_policy.numerics.audit(fun)(params, x) has the dtype of each operation."
        )
    _refuse_shape(inputs, kwargs)
    observation = Observation()
    try:
        with find_own_weights() as weights:
            examined = adapter.examine(model, inputs, method, rngs, kwargs, observation.trace, observation.hook)
    except TypeError as error:
        given = kwargs.get("variables", inputs[0] if inputs else None)
        if isinstance(given, Mapping) and "params" in given:
            place = "the argument `variables`" if "variables" in kwargs else "the first input"
            raise TypeError(
                f"explain takes the inputs of a model and no variables, but {place} is a dictionary with 'params', "
                f"and the call failed: {error}. For example: explain(model, x)."
            ) from error
        if inputs and isinstance(inputs[0], Policy | PolicyMap):
            raise TypeError(
                "explain takes the inputs of a model, but the first input is a policy, and the call failed: "
                f"{error}. For example: explain(with_policy(model, policy), x)."
            ) from error
        raise
    return build_explanation(examined, observation, [*weights.values()])


def _refuse_shape(inputs: Args, kwargs: Kwargs) -> None:
    """Raises a `TypeError` for `explain(model, (16, 32))`: a layer would take the tuple as an array of two integers."""
    given = inputs[0] if inputs else None
    is_shape = isinstance(given, tuple) and len(given) > 0 and all(type(size) is int for size in given)
    if is_shape and not any(map(is_array, jax.tree.leaves((inputs, kwargs)))):
        raise TypeError(
            f"explain takes inputs, not their shapes, got {quote(given)}. "
            f"For example: explain(model, jax.ShapeDtypeStruct({given}, 'float32'))."
        )
