"""The operations of each module in a traced program, and the explanation built of them."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr

from ..._base import IN_FULL_PRECISION, PyTree, is_floating_dtype, list_paths_to
from ..._jaxpr import ROUNDING_SCOPE, Fact, HalfSum, find_half_sum, having, walk
from ...modules import FULL_PRECISION, WRITTEN, Method, ModelInfo, ModuleInfo, find_adapter, widen_policy
from ...modules.common import Observation, read_path
from ...policy import ODD_ROWS, Float8
from ._explanation import Explanation, Row

STRUCTURAL = (having(Fact.MOVES, Fact.ANNOTATES) - {"gather"}) | {
    "convert_element_type", "reduce_precision", "link", "carry",
}  # fmt: skip
"""Primitives that move or convert elements. A lookup of rows counts as computing: it is all that an Embed does.

A `link` joins a value in a body to one around it, a `carry` a value around a loop to one in it.
"""

LONG_SUM = 32
"""Smallest number of elements of a half-precision sum that is reported: 2 x 2 pooling rounds no more than other ops."""


class OperandInfo(NamedTuple):
    """An operand or result: a key that identifies the value (None for a literal), and its dtype if floating."""

    key: int | None
    dtype: np.dtype | None


@dataclasses.dataclass(frozen=True)
class Operation:
    """One primitive operation.

    Attributes:
      name: the name of the primitive.
      scope: the `jax.named_scope`s around it, outermost first, joined by `/`.
      operands: its inputs.
      results: its outputs.
      half_sum: the sum or product of many elements that it takes in half precision, if it is one.
    """

    name: str
    scope: str
    operands: tuple[OperandInfo, ...]
    results: tuple[OperandInfo, ...]
    half_sum: HalfSum | None = None

    @property
    def computes(self) -> bool:
        """True if it does arithmetic other than rounding into a quantized format."""
        return self.name not in STRUCTURAL and ROUNDING_SCOPE not in self.scope


def walk_operations(jaxpr: Jaxpr, scope: str = "") -> Iterator[Operation]:
    """Yields the operations of a jaxpr in order, also in sub-jaxprs of jit, scan, cond, remat and custom rules.

    `link`s join the values of a sub-jaxpr to those around it. Values that a loop carries are not followed to the next
    iteration. Values are identified by id, so the jaxpr must stay alive.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) * 2))(1.0)
    >>> [operation.name for operation in walk_operations(program.jaxpr) if operation.computes]
    ['sin', 'mul']
    """
    for step in walk(jaxpr, scope):
        if step.name != "constant":
            operands, results = _describe_operands(step.operands), _describe_operands(step.results)
            yield Operation(step.name, step.scope, operands, results, find_half_sum(step))


def _describe_operands(variables: Sequence[Any]) -> tuple[OperandInfo, ...]:
    return tuple(OperandInfo(_identify(variable), _floating_dtype(variable.aval)) for variable in variables)


def _identify(variable: Any) -> int | None:
    return None if hasattr(variable, "val") else id(variable)


def _floating_dtype(aval: Any) -> np.dtype | None:
    dtype = getattr(aval, "dtype", None)
    return np.dtype(dtype) if dtype is not None and is_floating_dtype(dtype) else None


def collect_compute_dtypes(program: Iterable[Operation]) -> dict[str, tuple[str, ...]]:
    """Returns, by path, the dtypes that the operations in a module's own code read; conversions do not count."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for operation in program:
        path = read_path(operation.scope)
        if path is not None and operation.computes:
            # Behind the two that a `scaled_dot` multiplies are the scales of their blocks.
            read = operation.operands[:2] if operation.name == "scaled_dot" else operation.operands
            found[path].update(dict.fromkeys(str(v.dtype) for v in read if v.dtype is not None))
    return {path: tuple(dtypes) for path, dtypes in found.items()}


def collect_made_dtypes(program: Iterable[Operation]) -> dict[str, set[str]]:
    """Returns, by path, the dtypes that the operations in a module's own code make; conversions count."""
    found: dict[str, set[str]] = defaultdict(set)
    for operation in program:
        path = read_path(operation.scope)
        if path is not None:
            found[path].update(str(value.dtype) for value in operation.results if value.dtype is not None)
    return found


def collect_half_sums(program: Iterable[Operation]) -> dict[str, tuple[str, ...]]:
    """Returns, by path, the long sums and products that a module's own code takes in half precision."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for operation in program:
        path = read_path(operation.scope)
        if path is not None and operation.half_sum is not None and operation.half_sum.numbers >= LONG_SUM:
            found[path][str(operation.half_sum)] = None
    return {path: tuple(sums) for path, sums in found.items()}


def describe_weight(module: ModuleInfo, computed: Collection[str], made: Collection[str]) -> str:
    """Returns `Row.quantization` of a module, from the dtypes that its operations read and made.

    A layer with an 8-bit weight need not multiply in 8 bits: that depends on its inputs, and on the code of a subclass.
    Only its operations show it.
    """
    format = None if module.policy is None else module.policy.quantization
    is_open = isinstance(format, Float8) and module.quantization == str(format) and made
    if not is_open or _has_float8(computed):
        return module.quantization
    if _has_float8(made):
        return f"{format}, computed with as numbers: it is a convolution"
    return f"left: {ODD_ROWS}" if module.is_layer else f"left: {ODD_ROWS}, or its code is no layer of Flax's"


def _has_float8(dtypes: Collection[str]) -> bool:
    return any(dtype.startswith("float8") for dtype in dtypes)


Marks = dict[int | None, frozenset[str]]
"""By value: the named modules whose wide outputs it is made of."""


def find_leaks(program: Iterable[Operation], modules: Mapping[str, ModuleInfo]) -> dict[str, tuple[str, ...]]:
    """Returns, for each module that leaks a wide dtype, the paths of the modules into whose code it leaks.

    A rule such as `"norm": "float32"` makes a module return float32. A Flax layer casts it down, but in the user's
    code, such as a residual sum, promotion makes all later values float32. So the output of a named module gets a mark.
    The mark passes through operations that keep the dtype; an explicit conversion removes it. Arithmetic with a marked
    operand is a leak if it is in the code of a module with a narrower compute dtype.
    """
    marks: Marks = {}
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for operation in program:
        path = read_path(operation.scope)
        # Does it compute with what another module marked?
        if operation.computes and path is not None:
            for value in operation.operands:
                for source in _find_leaking_modules(marks.get(value.key, frozenset()), path, value, modules[path]):
                    found[source][path] = None
        # Its results keep the marks of its operands, and get the marks of the named modules around it.
        sources = _find_named_around(path, modules)
        for value in operation.results:
            marks[value.key] = _pass_on(operation, value, marks) | sources
    return {source: tuple(paths) for source, paths in found.items()}


def find_output_casts(jaxpr: Jaxpr, program: Iterable[Operation], modules: Mapping[str, ModuleInfo]) -> dict[str, str]:
    """Returns the output dtype of the root, by path of the named modules whose wide output it casts down."""
    outputs = {id(variable) for variable in jaxpr.outvars}
    marks: Marks = {}
    found: dict[str, str] = {}
    for operation in program:
        path = read_path(operation.scope)
        for value in operation.results:
            marks[value.key] = _pass_on(operation, value, marks) | _find_named_around(path, modules)
        if operation.name != "convert_element_type" or path != "":
            continue
        (read, *_), (made, *_) = operation.operands, operation.results
        if made.key in outputs and read.dtype and made.dtype and read.dtype.itemsize > made.dtype.itemsize:
            found.update((source, str(made.dtype)) for source in marks.get(read.key, ()))
    return found


def _find_leaking_modules(marks: frozenset[str], path: str, value: OperandInfo, module: ModuleInfo) -> Iterable[str]:
    """Returns the marks of an operand that are wider than the compute dtype at a path, except those around it."""
    if module.is_layer or module.compute_dtype is None or value.dtype is None:
        return ()
    if np.dtype(module.compute_dtype).itemsize >= value.dtype.itemsize:
        return ()
    return sorted(source for source in marks if source not in list_paths_to(path))


def _pass_on(operation: Operation, result: OperandInfo, marks: Marks) -> frozenset[str]:
    if result.dtype is None:
        return frozenset()
    same_dtype = [v for v in operation.operands if v.dtype is not None and v.dtype == result.dtype]
    return frozenset().union(*(marks.get(v.key, frozenset()) for v in same_dtype))


def _find_named_around(path: str | None, modules: Mapping[str, ModuleInfo]) -> frozenset[str]:
    """Returns the modules around an operation that a rule, a policy or an author's dtype names, but not the root."""
    around = list_paths_to(path or "")[1:]
    return frozenset(outer for outer in around if outer in modules and modules[outer].is_named)


def build_explanation(model: ModelInfo, observation: Observation) -> Explanation:
    """Returns the explanation of a model, from its adapter and from the traced call."""
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
    """Applies `force_full_precision` to a module."""
    if module.policy is None or module.rule == WRITTEN:
        return module
    with IN_FULL_PRECISION(True):
        policy = widen_policy(module.policy)
    return dataclasses.replace(module, policy=policy, rule=FULL_PRECISION, compute_dtype=policy.compute_dtype)


def _order_paths(modules: Mapping[str, ModuleInfo], observation: Observation) -> list[str]:
    """Returns the paths in the order of their first calls, each followed by the modules inside."""
    position = {path: index for index, path in enumerate(dict.fromkeys([*observation.inputs, *modules]))}

    def key(path: str) -> list[int]:
        return [position[outer] for outer in list_paths_to(path) if outer in modules]

    return sorted(modules, key=key)


def _sum_bytes(leaves: Sequence[Any], itemsize: Callable[[np.dtype], int]) -> int:
    return sum(math.prod(leaf.shape) * itemsize(np.dtype(leaf.dtype)) for leaf in leaves)


def explain(model: Any, *inputs: Any, method: Method = None, rngs: PyTree = None, **kwargs: Any) -> Explanation:
    """Returns the policy, the rule, and the dtypes of a traced call, for each module of a Flax model.

    The model is traced and not run: parameters and inputs are abstract, so that a model of any size is explained
    without allocating it. A linen module is initialised abstractly; an nnx module is copied, and `nnx.eval_shape`
    makes one without arrays. Rules of a `PolicyMap` that decide for no module are in the explanation, not warned of.
    Sums of many numbers in half precision are there, too: a policy reaches layers, and not functions such as
    `nn.avg_pool`. A model without a policy is explained as well.

    Args:
      model: a linen or nnx module, with a policy or without.
      *inputs: positional arguments of its method: arrays, or `jax.ShapeDtypeStruct`s in their place. Anything else,
        such as a Python bool, is passed on unchanged.
      method: what to call instead of the module itself: the name of a method, a method, or a function of the module.
      rngs: for linen, a key or keys by name, as `Module.init` takes them, one that is made up if there are none; for
        nnx, the argument `rngs` of the method.
      **kwargs: keyword arguments of the method.

    Returns:
      An `Explanation`: a table when printed or shown in a notebook, `.rows` and `.to_dict()` for programs.

    Raises:
      TypeError: `model` is not a Flax module. Errors of the model itself propagate.

    >>> import jax, jmp_policy as jmp
    >>> from flax import linen as nn
    >>> rules = jmp.PolicyMap({"layers_1": "float32", "layer_0": "float32"}, "mixed_bfloat16")
    >>> model = jmp.with_policy(nn.Sequential([nn.Dense(4), nn.LayerNorm()]), rules)
    >>> explanation = jmp.explain(model, jax.ShapeDtypeStruct((8, 3), "float32"))
    >>> [(row.path, row.rule, row.compute_dtypes) for row in explanation.rows]
    [('', 'default', ()), ('layers_0', 'default', ('bfloat16',)), ('layers_1', 'layers_1', ('float32',))]
    >>> explanation.total_bytes, explanation.unused
    (96, ("policy rule 'layer_0' matches no module; the closest path is 'layers_0'",))
    """
    adapter = None if isinstance(model, type) else find_adapter(model)
    if adapter is None:
        raise TypeError(
            f"explain takes a Flax module, got {model!r}. "
            "For example: explain(Net(), jax.ShapeDtypeStruct((8, 28, 28), 'float32'))."
        )
    observation = Observation()
    try:
        examined = adapter.examine(model, inputs, method, rngs, kwargs, observation.trace, observation.hook)
    except TypeError as error:
        if inputs and isinstance(inputs[0], Mapping) and "params" in inputs[0]:
            raise TypeError(
                "explain takes the inputs of a model and no variables, but the first input is a dictionary with "
                f"'params', and the call failed: {error}. For example: explain(model, x)."
            ) from error
        raise
    return build_explanation(examined, observation)
