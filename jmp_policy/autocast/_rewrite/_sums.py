"""Products that hand over their sums in float32: how they are written, and what follows them without rounding.

Under a policy with an accumulate dtype, a product's result is float32 that may be had in the compute dtype. What is
linear keeps it as it is, for it keeps nothing for the backward pass; what runs in float32 reads it; all else, and first
the next product, takes it rounded, as if the product had handed over that. So does the sum of two activations: a
residual stream in float32 is read, and kept, by all norms along it, and doubled the bytes of a GPT's step on a TPU.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._jaxpr import Atom, Body, Kind, Value, body_of
from ...quant._products import Bilinear, Convolution, Dot, label_convolution, label_dot, wide_product
from ._precision import Colour, is_sum
from ._tables import KEEPING_SUMS

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""What has a rule for its sums. A `ragged_dot_general` has none, and hands over its result in the compute dtype."""


def keeps_sums(eqn: JaxprEqn, values: Sequence[Value]) -> bool:
    """Whether an equation that follows its inputs keeps the sums among them as they are."""
    name = eqn.primitive.name
    if name in ("mul", "div"):  # by a number, as of a temperature, it is linear
        factors = values if name == "mul" else values[1:]
        return any(value.kind.dtype is not None and value.kind.mark.numbers for value in factors)
    if name in ("add", "sub", "add_any"):  # of a bias; a residual stream would be kept in float32 for norms
        return sum(value.kind.mark.colour in (Colour.LOW, Colour.SUM) for value in values) == 1
    return name in KEEPING_SUMS


def is_stored(value: Value) -> bool:
    """Whether a product is to round an operand itself, and its gradient is to be float32: a weight, or data."""
    kind = value.kind
    return kind.dtype == np.float32 and kind.mark.colour is Colour.TRACED and not kind.mark.numbers


def round_sum(value: Value, dtype: np.dtype, eqn: JaxprEqn, body: Body) -> Value:
    """A sum in the compute dtype; any other value as it is."""
    if not is_sum(value.kind):
        return value
    return Value(body.cast_once(value.atom, dtype, eqn), as_low(value.kind, dtype))


def as_low(kind: Kind, dtype: np.dtype) -> Kind:
    """The kind of what is rounded to the compute dtype."""
    return Kind(dtype, kind.mark._replace(colour=Colour.LOW)) if is_sum(kind) else kind


def write_product(eqn: JaxprEqn, atoms: Sequence[Atom], kind: Kind, compute_dtype: np.dtype, body: Body) -> list[Value]:
    """Writes a product of operands in the compute dtype, or float32, whose sums and derivative are `wide_product`'s.

    Args:
      eqn: the product as it was traced.
      atoms: its operands; one in float32 is rounded inside, and has a gradient in float32.
      kind: of the result.
      compute_dtype: what both are rounded to.
      body: where it goes.
    """
    types = tuple(atom.aval for atom in atoms)
    product = _trace_product(eqn.primitive.name, tuple(eqn.params.items()), types, kind.dtype, compute_dtype, eqn.ctx)
    here = product.replace(outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx)
    return body.append(here, atoms, [kind])


@functools.lru_cache(maxsize=4096)
def _trace_product(
    name: str,
    params: tuple[tuple[str, Any], ...],
    types: tuple[core.ShapedArray, core.ShapedArray],
    dtype: np.dtype,
    compute_dtype: np.dtype,
    context: Any,
) -> JaxprEqn:
    operation = _describe_product(name, dict(params), types)
    product = lambda left, right: wide_product(operation, left, right, dtype, compute_dtype)
    # The precision is the equation's, whatever the default one is here.
    with jax.default_matmul_precision(None):
        if types[0].manual_axis_type.varying:
            return _trace_in_shard_map(product, types)
        with context.manager:
            [eqn] = jax.make_jaxpr(product)(*types).eqns
            return eqn


def _trace_in_shard_map(product: Callable[..., jax.Array], types: Sequence[core.ShapedArray]) -> JaxprEqn:
    """The equation of a product of values that differ between devices, as only in a `shard_map` JAX writes them."""
    inner = types[0].sharding.mesh
    manual = [name for name, kind in zip(inner.axis_names, inner.axis_types, strict=True) if kind == AxisType.Manual]
    mesh = inner.update_axis_types(dict.fromkeys(manual, AxisType.Auto))
    # Each operand is split along its first axis, over as many devices as it differs on.
    axes = tuple(name for name in manual if name in types[0].manual_axis_type.varying)
    count, split = math.prod(mesh.shape[name] for name in axes), PartitionSpec(axes)
    arguments = [
        type.update(
            shape=(count * type.shape[0], *type.shape[1:]),
            sharding=NamedSharding(mesh, type.sharding.spec),
            manual_axis_type=type.manual_axis_type.update(varying=frozenset()),
        )
        for type in types
    ]
    one = lambda *operands: jnp.expand_dims(product(*operands), 0)
    with jax.sharding.use_abstract_mesh(mesh):
        many = jax.shard_map(one, in_specs=split, out_specs=split, axis_names=set(manual))
        [eqn] = jax.make_jaxpr(many)(*arguments).eqns
    return body_of(eqn.params["jaxpr"]).eqns[0]


def _describe_product(name: str, params: dict[str, Any], types: Sequence[core.ShapedArray]) -> Bilinear:
    params = {key: value for key, value in params.items() if key != "preferred_element_type"}
    if name == "dot_general":
        return label_dot(types[0].ndim, types[1].ndim, Dot(**params))
    given = tuple((key, value) for key, value in params.items() if key != "out_sharding" or value is not None)
    return label_convolution(types[0].ndim, Convolution(given))
