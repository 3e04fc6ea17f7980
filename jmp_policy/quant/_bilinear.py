"""Bilinear operations between a layer's input and its weight, described by labels of their axes; their gradients.

Labels that are not in the output are summed over. The other labels place the scales of both operands.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._base import PRODUCT_SCOPE, DTypeLike, vary
from ._numbers import measure_amax, measure_row_amax

Labels = tuple[str, ...]
Side = Literal["left", "right"]
Sharding = NamedSharding | PartitionSpec


@functools.partial(jax.tree_util.register_dataclass, data_fields=["compute"], meta_fields=["left", "right", "out"])
@dataclasses.dataclass(frozen=True)
class Bilinear:
    """A bilinear operation of a layer's input (`left`) and weight (`right`), with the labels of all axes."""

    left: Labels
    right: Labels
    out: Labels
    compute: "Dot | Convolution | RaggedDot"

    def transpose(self, side: Side) -> "Bilinear":
        """Returns the operation that computes the gradient of one operand; that of the output is in its place."""
        new: dict[str, Labels] = {side: self.out, "out": self.left if side == "left" else self.right}
        return dataclasses.replace(self, **new)  # type: ignore[arg-type]

    def summed_axes(self, operand: Labels) -> tuple[int, ...]:
        return tuple(i for i, label in enumerate(operand) if label not in (*self.out, _GROUP))

    def measure_amax(self, x: jax.Array, operand: Labels, *, by_row: bool) -> jax.Array:
        """Returns the largest magnitude of an operand, or of each slice along the summed axes."""
        summed, compute = self.summed_axes(operand), self.compute
        if not isinstance(compute, RaggedDot):
            return measure_amax(x, summed if by_row else None)
        if _ROW not in operand:
            return measure_amax(x, summed if by_row else (1, 2))
        if by_row and _ROW in self.out:
            return measure_row_amax(x, summed)
        magnitudes = measure_amax(x, ()) if by_row else measure_row_amax(x, (1,))
        amax = jax.ops.segment_max(magnitudes, compute.groups, len(compute.sizes), indices_are_sorted=True)
        return jnp.maximum(amax, 0)  # -inf for an empty group

    def spread_scale(self, scale: jax.Array, operand: Labels, *, by_row: bool) -> jax.Array:
        """Reshapes the scale of a magnitude of `measure_amax` so that it broadcasts to the operand."""
        is_of_groups = _ROW in operand and not (by_row and _ROW in self.out)
        return self.compute.take(scale) if isinstance(self.compute, RaggedDot) and is_of_groups else scale

    def align_scale(self, scale: jax.Array, operand: Labels, *, by_row: bool = True) -> jax.Array:
        """Reshapes a scale of an operand (length 1 on summed axes) so that it broadcasts to the output."""
        if not scale.ndim:
            return scale
        if isinstance(self.compute, RaggedDot):
            if _ROW not in self.out:
                return scale[:, :, None] if operand == self.left else scale[:, None]
            return scale if by_row and _ROW in operand else self.compute.take(scale.reshape(len(scale), -1))
        kept = [i for i, label in enumerate(operand) if label in self.out]
        order = sorted(kept, key=lambda i: self.out.index(operand[i]))
        lengths = {operand[i]: scale.shape[i] for i in kept}
        if order != kept:
            scale = lax.transpose(scale, (*order, *self.summed_axes(operand)))
        return scale.reshape([lengths.get(label, 1) for label in self.out])


@jax.tree_util.register_static
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Convolution:
    """`lax.conv_general_dilated` without its operands."""

    options: tuple[tuple[str, Any], ...]
    preferred_element_type: DTypeLike | None = None

    def __call__(self, left: jax.Array, right: jax.Array, preferred: DTypeLike | None = None) -> jax.Array:
        preferred = preferred or self.preferred_element_type
        return lax.conv_general_dilated(left, right, **dict(self.options), preferred_element_type=preferred)


_ROW, _GROUP = "row", "group"  # labels of a `RaggedDot`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RaggedDot:
    """`lax.ragged_dot` without the rows and the matrices: each group of rows is multiplied by its own matrix."""

    sizes: jax.Array  # number of rows in each group
    groups: Any  # group of each row, the number of groups for rows after the last one; `None` if nothing reads it
    precision: lax.PrecisionLike = dataclasses.field(default=None, metadata={"static": True})
    preferred_element_type: DTypeLike | None = dataclasses.field(default=None, metadata={"static": True})
    out_sharding = None

    def __call__(self, left: jax.Array, right: jax.Array, preferred: DTypeLike | None = None) -> jax.Array:
        dtype = preferred or self.preferred_element_type
        return self.contract(left, right, (1, 1), precision=self.precision, preferred_element_type=dtype)

    def contract(self, left: jax.Array, right: jax.Array, axes: tuple[int, int], **options: Any) -> jax.Array:
        """Sums over an axis of rows and of the matrices of their groups, or over the rows of each group."""
        contracted = (axes[0] % left.ndim,), (axes[1] % right.ndim,)
        numbers = lax.RaggedDotDimensionNumbers((contracted, ((), ())), [0], [0] if right.ndim == 3 else [])
        return lax.ragged_dot_general(left, right, self.sizes, numbers, **options)

    def take(self, of_groups: jax.Array) -> jax.Array:
        """Returns the entry of the group of each row, and one for the rows after the last group."""
        return jnp.take(of_groups, self.groups, axis=0, mode="fill", fill_value=1)

    def pad(self, block: int) -> "tuple[jax.Array, RaggedDot]":
        """Returns the row for each place of groups that begin at multiples of `block`, and the padded groups.

        Places between two groups have the row `len(self.groups)`, which does not exist.
        """
        sizes, rows = self.sizes, len(self.groups)
        padded = make_ragged_dot(-(-sizes // block) * block, (rows // block + len(sizes)) * block)
        begin = lambda lengths: padded.take(jnp.cumsum(lengths, dtype=np.int32) - lengths)
        offset = lax.iota(np.int32, len(padded.groups)) - begin(padded.sizes)
        is_row = (padded.groups < len(sizes)) & (offset < padded.take(sizes))
        return jnp.where(is_row, begin(sizes) + offset, rows), padded


def make_ragged_dot(sizes: jax.Array, rows: int, **options: Any) -> RaggedDot:
    ends = jnp.cumsum(sizes, dtype=np.int32)
    groups = jnp.sum(ends <= lax.broadcasted_iota(np.int32, (rows, 1), 0), axis=1, dtype=np.int32)
    return RaggedDot(sizes, groups, **options)


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


def label_ragged_dot(compute: RaggedDot) -> Bilinear:
    return Bilinear((_ROW, "input"), (_GROUP, "input", "output"), (_ROW, "output"), compute)


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
    operands = (grad, other) if side == "left" else (other, grad)
    return contract(operation.transpose(side), *operands, dtype, sharding, precision)


def contract(
    operation: Bilinear,
    left: jax.Array,
    right: jax.Array,
    dtype: np.dtype,
    sharding: Sharding | None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Multiplies two labeled arrays by one `dot_general`; the output has the given sharding."""
    left_labels, right_labels, out = operation.left, operation.right, operation.out
    # Shared labels are summed over, or are batch axes if the output has them.
    shared = [label for label in left_labels if label in right_labels]
    summed, batch = ([x for x in shared if (x in out) == kept] for kept in (False, True))
    where = lambda labels: (tuple(map(left_labels.index, labels)), tuple(map(right_labels.index, labels)))
    options: dict[str, Any] = {"precision": precision, "preferred_element_type": dtype}
    if isinstance(operation.compute, RaggedDot):
        (left_axis,), (right_axis,) = where(summed)
        return operation.compute.contract(left, right, (left_axis, right_axis), **options)
    # `dot_general` outputs batch axes first, then the other axes of the left, then of the right.
    made = [*batch, *(x for x in (*left_labels, *right_labels) if x not in shared)]
    options |= {} if sharding is None else {"out_sharding": _reorder_sharding(sharding, out, made)}
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


def widen_on_cpu(compute: Callable[..., jax.Array], dtype: np.dtype, *operands: jax.Array) -> jax.Array:
    """Computes a matmul of half-precision operands with sums in `dtype`; on CPUs casts the operands to it first."""
    # XLA on CPUs has no kernel for some wide outputs ("Unsupported element type for DotThunk::Execute: BF16 x BF16 =
    # F32" in 6 of 54 matmuls under `vmap`, jax 0.10.2 and 0.12), even behind barriers. For others it casts as well.
    widen = lambda *operands: compute(*(operand.astype(dtype) for operand in operands))
    with jax.named_scope(PRODUCT_SCOPE):
        return lax.platform_dependent(*operands, cpu=widen, default=compute)
