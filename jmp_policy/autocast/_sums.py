"""Products that hand over their sums in float32: how they are written, and what follows them without rounding.

Under a policy with an accumulate dtype, a product's result is float32 that may be had in the compute dtype. What is
linear keeps it as it is, for it keeps nothing for the backward pass; what runs in float32 reads it; all else, and first
the next product, takes it rounded, as if the product had handed over that.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import core
from jax.extend.core import JaxprEqn, Literal

from ..interpreter import Body, Kind, Value, body_of, is_float
from ..interpreter._program import Atom, Program, replace_body
from ..quant._bilinear import Bilinear, Convolution, Dot, label_convolution, label_dot
from ..quant._wide_product import wide_product
from ._marks import Colour, is_sum
from ._tables import KEEPING_SUMS

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""What has a rule for its sums. A `ragged_dot_general` has none, and hands over its result in the compute dtype."""


def find_sums_dtype(accumulate_dtype: np.dtype | None, compute_dtype: np.dtype) -> np.dtype | None:
    """The dtype in which products hand over their sums; `None` where that is the compute dtype."""
    return None if accumulate_dtype in (None, compute_dtype) else accumulate_dtype


def keeps_sums(eqn: JaxprEqn, values: Sequence[Value]) -> bool:
    """Whether an equation that follows its inputs keeps the sums among them as they are."""
    name = eqn.primitive.name
    if name in ("mul", "div"):  # by a number, as of a temperature, it is linear
        factors = values if name == "mul" else values[1:]
        return any(value.kind.dtype is not None and value.kind.mark.numbers for value in factors)
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


def write_product(
    eqn: JaxprEqn, atoms: Sequence[Atom], kind: Kind, compute_dtype: np.dtype, body: Body
) -> list[Value]:
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
    with context.manager, jax.default_matmul_precision(None):
        [eqn] = jax.make_jaxpr(product)(*types).eqns
    varying = types[0].manual_axis_type
    if not varying.varying:
        return eqn
    return eqn.replace(params={**eqn.params, "call_jaxpr": _vary_inside(eqn.params["call_jaxpr"], varying)})


def _vary_inside(program: Program, axes: Any) -> Program:
    """A program whose floating values differ between devices, which JAX finds out inside of a `shard_map` only."""
    made: dict[Atom, Atom] = {}

    def read(atom: Atom) -> Atom:
        if isinstance(atom, Literal) or not is_float(atom):
            return atom
        aval: Any = atom.aval
        return made.setdefault(atom, type(atom)(aval.update(manual_axis_type=axes)))

    old = body_of(program)
    eqns = [
        eqn.replace(
            invars=[*map(read, eqn.invars)], outvars=[*map(read, eqn.outvars)], params=_vary_params(eqn.params, axes)
        )
        for eqn in old.eqns
    ]
    return replace_body(program, [*map(read, old.invars)], eqns, [*map(read, old.outvars)])


def _vary_params(params: dict[str, Any], axes: Any) -> dict[str, Any]:
    if "branches" not in params:
        return params
    return {**params, "branches": tuple(_vary_inside(branch, axes) for branch in params["branches"])}


def _describe_product(name: str, params: dict[str, Any], types: Sequence[core.ShapedArray]) -> Bilinear:
    params = {key: value for key, value in params.items() if key != "preferred_element_type"}
    if name == "dot_general":
        return label_dot(types[0].ndim, types[1].ndim, Dot(**params))
    given = tuple((key, value) for key, value in params.items() if key != "out_sharding" or value is not None)
    return label_convolution(types[0].ndim, Convolution(given))
