"""Bilinear operations between a layer's input and its weight, described by labels of their axes; their gradients.

Labels that are not in the output are summed over. The other labels place the scales of both operands.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._base import DTypeLike, vary

Labels = tuple[str, ...]
Side = Literal["left", "right"]
Sharding = NamedSharding | PartitionSpec


@dataclasses.dataclass(frozen=True)
class Bilinear:
    """A bilinear operation of a layer's input (`left`) and weight (`right`), with the labels of all axes."""

    left: Labels
    right: Labels
    out: Labels
    compute: "Dot | Convolution"

    def summed_axes(self, operand: Labels) -> tuple[int, ...]:
        return tuple(i for i, label in enumerate(operand) if label not in self.out)

    def align_scale(self, scale: jax.Array, operand: Labels) -> jax.Array:
        """Reshapes a scale of an operand (length 1 on summed axes) so that it broadcasts to the output."""
        kept = [i for i, label in enumerate(operand) if label in self.out]
        order = sorted(kept, key=lambda i: self.out.index(operand[i]))
        lengths = {operand[i]: scale.shape[i] for i in kept}
        if order != kept:
            scale = lax.transpose(scale, (*order, *self.summed_axes(operand)))
        return scale.reshape([lengths.get(label, 1) for label in self.out])


@dataclasses.dataclass(frozen=True)
class Dot:
    """`lax.dot_general`, or `jnp.einsum` if given an equation, without the operands."""

    dimension_numbers: lax.DotDimensionNumbers | str
    precision: lax.PrecisionLike = None
    preferred_element_type: DTypeLike | None = None
    out_sharding: Sharding | None = None

    def __call__(self, left: jax.Array, right: jax.Array, preferred: DTypeLike | None = None) -> jax.Array:
        options: dict[str, Any] = {} if self.out_sharding is None else {"out_sharding": self.out_sharding}
        dtype = preferred or self.preferred_element_type
        options |= {"precision": self.precision, "preferred_element_type": dtype}
        if isinstance(self.dimension_numbers, str):
            return jnp.einsum(self.dimension_numbers, left, right, **options)
        return lax.dot_general(left, right, self.dimension_numbers, **options)


@dataclasses.dataclass(frozen=True)
class Convolution:
    """`lax.conv_general_dilated` without its operands."""

    options: tuple[tuple[str, Any], ...]
    preferred_element_type: DTypeLike | None = None

    def __call__(self, left: jax.Array, right: jax.Array, preferred: DTypeLike | None = None) -> jax.Array:
        preferred = preferred or self.preferred_element_type
        return lax.conv_general_dilated(left, right, **dict(self.options), preferred_element_type=preferred)


def without_preferred_dtype(operation: Bilinear) -> Bilinear:
    """Returns the operation with outputs in the dtype of its operands."""
    compute = dataclasses.replace(operation.compute, preferred_element_type=None)
    return dataclasses.replace(operation, compute=compute)


def is_matmul(operation: Bilinear, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """True for a matmul, as opposed to a convolution or an einsum that sums one operand alone or broadcasts one."""
    if isinstance(operation.compute, Convolution):
        return False
    lengths, others = dict(zip(operation.left, left, strict=True)), dict(zip(operation.right, right, strict=True))
    alone = (lengths.keys() ^ others.keys()) - set(operation.out)
    return not alone and all(lengths[label] == others[label] for label in lengths.keys() & others.keys())


def label_dot(left_ndim: int, right_ndim: int, compute: Dot) -> Bilinear:
    """Labels `lax.dot_general`: its output has the batch axes, then the other axes of the left, then of the right."""
    numbers = compute.dimension_numbers
    assert not isinstance(numbers, str)
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    left = [f"l{i}" for i in range(left_ndim)]
    right = [f"r{i}" for i in range(right_ndim)]
    for kind, of_left, of_right in (("sum", left_sum, right_sum), ("b", left_batch, right_batch)):
        for n, (i, j) in enumerate(zip(of_left, of_right, strict=True)):
            left[i] = right[j] = f"{kind}{n}"
    batch = [left[i] for i in left_batch]
    free = [label for label in (*left, *right) if label[0] in "lr"]
    return Bilinear(tuple(left), tuple(right), (*batch, *free), compute)


def label_convolution(left_ndim: int, compute: Convolution) -> Bilinear:
    """Labels `lax.conv_general_dilated`. Windows overlap, so all positions of an example share a scale."""
    numbers: lax.ConvDimensionNumbers = dict(compute.options)["dimension_numbers"]
    left, right, out = ([f"{side}{i}" for i in range(left_ndim)] for side in ("left", "right", "out"))
    left[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = "example"
    right[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = "feature"
    return Bilinear(tuple(left), tuple(right), tuple(out), compute)


def label_einsum(left_ndim: int, right_ndim: int, given: str, **options: Any) -> Bilinear:
    """Labels `jnp.einsum` of two operands; raises if the equation has another form or repeated labels."""
    equation = given.replace(" ", "")
    operands, arrow, out = equation.partition("->")
    twice = any(term.count(label) > 1 for term in (*operands.split(","), out) for label in term if label != ".")
    if not arrow or operands.count(",") != 1 or twice:
        raise ValueError(
            f"The equation {given!r} must have two operands and an output, without repeated labels. "
            "For example: 'abc,cd->abd'."
        )
    left, right = operands.split(",")
    dots = max(_count_dots(left, left_ndim), _count_dots(right, right_ndim))
    named = (_labels(left, _count_dots(left, left_ndim), dots), _labels(right, _count_dots(right, right_ndim), dots))
    return Bilinear(*named, _labels(out, dots, dots), Dot(given, **options))


def _count_dots(term: str, ndim: int) -> int:
    return ndim - len(term.replace("...", "")) if "..." in term else 0


def _labels(term: str, count: int, dots: int) -> Labels:
    """Returns the labels of a term; axes under its ellipsis are counted from the last, as in broadcasting."""
    before, _, after = term.partition("...")
    return (*before, *(f".{i}" for i in range(dots - count, dots)), *after)


class Call(NamedTuple):
    operation: Bilinear
    lhs: jax.Array
    rhs: Any


def describe_dot_general(
    lhs: jax.Array, rhs: Any, dimension_numbers: lax.DotDimensionNumbers, *args: Any, **options: Any
) -> Call:
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    numbers = ((_axes(left_sum), _axes(right_sum)), (_axes(left_batch), _axes(right_batch)))
    return Call(label_dot(lhs.ndim, rhs.ndim, Dot(numbers, *args, **options)), lhs, rhs)


def describe_einsum(equation: str, lhs: jax.Array, rhs: Any, **options: Any) -> Call:
    return Call(label_einsum(lhs.ndim, rhs.ndim, equation, **options), lhs, rhs)


def describe_convolution(
    lhs: jax.Array,
    rhs: Any,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    *,
    dimension_numbers: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Sharding | None = None,
    **options: Any,
) -> Call:
    """Takes the arguments of `lax.conv_general_dilated`; dilations are keywords."""
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    pads = padding if isinstance(padding, str) else tuple(map(tuple, padding))
    given = {"window_strides": tuple(window_strides), "padding": pads, "dimension_numbers": numbers, **options}
    given |= {} if out_sharding is None else {"out_sharding": out_sharding}
    hashable = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Call(label_convolution(lhs.ndim, Convolution(tuple(hashable.items()), preferred_element_type)), lhs, rhs)


def _axes(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(axis) for axis in axes)


def differentiate(
    operation: Bilinear,
    side: Side,
    grad: jax.Array,
    other: jax.Array,
    like: core.ShapedArray,
    dtype: np.dtype,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Computes the gradient of one operand, of type `like`, from the gradient of the output and the other operand."""
    if isinstance(operation.compute, Convolution):
        convolve, other = without_preferred_dtype(operation).compute, other.astype(dtype)
        convolve_with = (lambda x: convolve(x, other)) if side == "left" else (lambda x: convolve(other, x))
        return jax.linear_transpose(convolve_with, like.update(dtype=dtype))(grad.astype(dtype))[0]
    # JAX cannot infer the sharding on a mesh with explicit axes.
    sharding = like.sharding if AxisType.Explicit in like.sharding.mesh.axis_types else None
    out = operation.out
    if side == "left":
        return contract(grad, out, other, operation.right, operation.left, dtype, sharding, precision)
    return contract(other, operation.left, grad, out, operation.right, dtype, sharding, precision)


def contract(
    left: jax.Array,
    left_labels: Labels,
    right: jax.Array,
    right_labels: Labels,
    out: Labels,
    dtype: np.dtype,
    sharding: Sharding | None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Multiplies two labeled arrays by one `dot_general`; the output has the axes `out` and the given sharding."""
    # Shared labels are summed over, or are batch axes if the output has them.
    shared = [label for label in left_labels if label in right_labels]
    summed, batch = ([x for x in shared if (x in out) == kept] for kept in (False, True))
    where = lambda labels: (tuple(map(left_labels.index, labels)), tuple(map(right_labels.index, labels)))
    # `dot_general` outputs batch axes first, then the other axes of the left, then of the right.
    made = [*batch, *(x for x in (*left_labels, *right_labels) if x not in shared)]
    options: dict[str, Any] = {} if sharding is None else {"out_sharding": _reorder_sharding(sharding, out, made)}
    options |= {"precision": precision, "preferred_element_type": dtype}
    product = lax.dot_general(left, right, (where(summed), where(batch)), **options)
    order = tuple(map(made.index, out))
    return product if order == tuple(range(len(out))) else lax.transpose(product, order)


def _reorder_sharding(sharding: Sharding, labels: Labels, order: Sequence[str]) -> Sharding:
    """Permutes the entries of a sharding like the axes of its array."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    by_label = dict(zip(labels, spec, strict=False))  # a spec may omit its last axes
    reordered = PartitionSpec(*map(by_label.get, order))
    return NamedSharding(sharding.mesh, reordered) if isinstance(sharding, NamedSharding) else reordered


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Returns the mapped axes along which any of the arrays varies; empty outside of `shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary_together(*arrays: jax.Array) -> list[jax.Array]:
    """Marks arrays as varying over the axes of any of them: in `shard_map`, custom derivatives need that."""
    axes = tuple(varying_axes(*arrays))
    return [vary(x, axes) for x in arrays]  # JAX then sums the gradient of a replicated weight over devices
