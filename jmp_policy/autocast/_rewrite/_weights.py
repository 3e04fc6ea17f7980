"""Matmuls and convolutions by a weight: follows weights through a jaxpr, and describes their quantized form."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._jaxpr import Atom, Fact, SubJaxpr, find_line, having, is_float, sub_jaxprs
from ...policy import MULTIPLE, ODD_ROWS, Float8, Int4, Int8, Quantization
from ...quant import ragged_dot
from ...quant._layers import LayerProduct, Multiply, WeightedLayer, multiplies_8_bits, spell_format
from ...quant._products import describe_convolution, describe_dot_general, reason_not_float8, why_sizes_wide
from ...quant._weights import (
    WHY_TABLES_WIDE,
    Layout,
    block_length,
    fake_quantize,
    prepare_weight,
    reason_unquantized,
)
from ._place import EquationPlace
from ._precision import PRODUCTS

Names = frozenset[int]
"""The numbers of the weights that a value consists of; empty for a value that is not a weight."""

NO_WEIGHT: Names = frozenset()
A_WEIGHT: Names = frozenset([0])

WEIGHT_PRODUCTS = PRODUCTS | {"ragged_dot_general"}
"""Primitives that are quantized if one operand is a weight."""

_FOLLOWED = (having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS) | {"convert_element_type"}) - {"gather", "tile"}
"""Primitives whose output is a weight if all their floating operands are. A `gather` reads rows of a table."""


WHY_BACKWARD = "its backward pass was traced inside of autocast: write grad(autocast(f)) instead of autocast(grad(f))"


def follow_weights(eqn: JaxprEqn, names: Sequence[Names]) -> list[Names]:
    """Returns the weights in each output of an equation without sub-jaxprs, given those in its operands."""
    if eqn.primitive.name not in _FOLLOWED or not any(names):
        return [NO_WEIGHT] * len(eqn.outvars)
    if eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars):
        return list(names)
    repeats = eqn.primitive.name == "broadcast_in_dim" and _size(eqn.outvars[0]) != _size(eqn.invars[0])
    floating = [own for own, atom in zip(names, eqn.invars, strict=True) if is_float(atom)]
    joined = NO_WEIGHT if repeats else _join(floating)
    return [joined if is_float(var) else NO_WEIGHT for var in eqn.outvars]


def _join(names: Sequence[Names]) -> Names:
    """Returns all weights, or none if one of the values is not a weight."""
    return NO_WEIGHT.union(*names) if all(names) else NO_WEIGHT


def _size(atom: Atom) -> int:
    aval: Any = atom.aval
    return math.prod(aval.shape)


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """A matmul or convolution by a weight, as a function of both operands.

    The axes of the weight are brought into the order batch, summed, outputs: the one of a Flax kernel.
    """

    operation: str  # the name of the primitive
    position: int  # of the weight among the operands
    order: tuple[int, ...]  # the axes of the weight in the new order
    summed: int  # number of summed axes
    channels: int  # number of axes of outputs
    options: tuple[tuple[str, Any], ...]  # of the operation on the input and the reordered weight
    out_order: tuple[int, ...]  # the axes of the output in the order of the equation
    quantization: Quantization
    accumulate: np.dtype | None = None

    def __call__(self, *operands: jax.Array) -> jax.Array:
        weight, inputs = _reorder(operands[self.position], self.order), operands[1 - self.position]
        stored: Any = weight
        if not isinstance(self.quantization, Float8):
            stored = prepare_weight(weight, self.quantization, self._find_layout(weight.shape))
        product = LayerProduct(self.operation, self.quantization, self.accumulate, lambda *x: x, as_tuple=False)
        return _reorder(Multiply(product)(inputs, stored, **dict(self.options)), self.out_order)

    def reason_left(self, shapes: Sequence[tuple[int, ...]], where: str) -> str | None:
        """Returns the reason why the weight is not quantized, or None. Raises if its blocks do not divide it."""
        shape, inputs = tuple(shapes[self.position][axis] for axis in self.order), shapes[1 - self.position]
        layout = self._find_layout(shape)
        if not self.channels or not self.summed:
            return "it is multiplied as a vector"
        if not isinstance(self.quantization, Float8):
            return _reason_not_stored(shape, layout, self.quantization, where)
        operands = [jax.ShapeDtypeStruct(own, np.float32) for own in (inputs, shape)]
        describe: Any = describe_dot_general if self.operation == "dot_general" else describe_convolution
        operation = describe(*operands, **dict(self.options)).operation
        lengths = zip(operation.left, inputs, strict=True)
        rows = math.prod(length for label, length in lengths if label not in operation.right)
        is_odd = self.operation == "dot_general" and rows % MULTIPLE
        return reason_not_float8(operation, inputs, shape, self.quantization) or (ODD_ROWS if is_odd else None)

    def __str__(self) -> str:
        if isinstance(self.quantization, Float8):
            return str(self.quantization)
        return spell_format(self.quantization, WeightedLayer("kernel", self.operation), None)

    def _find_layout(self, shape: tuple[int, ...]) -> Layout:
        end = len(shape) - self.channels
        return Layout(shape[end - self.summed : end], self.channels)


def _reason_not_stored(shape: tuple[int, ...], layout: Layout, format: Any, where: str) -> str | None:
    reason = reason_unquantized(shape, layout, format)
    if reason is None and isinstance(format, Int4):
        block_length(layout, format, where)  # raises here, where the path of the weight is known
    return reason


@dataclasses.dataclass(frozen=True)
class RaggedProduct:
    """A grouped matmul by a weight for each group, as `quant.ragged_dot`.

    That has no 4-bit operands, nor float inputs: other formats round the weight, and multiply in the compute dtype.
    """

    is_transposed: bool  # True if the matrices are (outputs, inputs)
    options: tuple[tuple[str, Any], ...]
    quantization: Quantization
    accumulate: np.dtype | None = None
    position = 1  # of the weight among the operands

    def __call__(self, rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        matrices = matrices.swapaxes(1, 2) if self.is_transposed else matrices
        options = {"preferred_element_type": self.accumulate, **dict(self.options)}
        format: Any = self.quantization
        if not multiplies_8_bits(format):
            weight = prepare_weight(matrices, format, Layout(matrices.shape[1:2], 1))
            return ragged_dot(rows, fake_quantize(weight, rows.dtype), sizes, **options)
        if isinstance(format, Int8):  # autocast has no calibrated scales
            format = dataclasses.replace(format, act_scale="dynamic")
        return ragged_dot(rows, matrices, sizes, **options, quantization=format)

    def reason_left(self, shapes: Sequence[tuple[int, ...]], where: str) -> str | None:
        """Returns the reason why the weight is not quantized, or None. Raises if its blocks do not divide it."""
        (rows, inputs), (groups, *others) = shapes[:2]
        outputs = others[0 if self.is_transposed else 1]
        if isinstance(self.quantization, Float8):
            reason = why_sizes_wide(inputs * outputs, self.quantization, inputs, outputs)
            return reason or (ODD_ROWS if rows % MULTIPLE else None)
        return _reason_not_stored((groups, inputs, outputs), Layout((inputs,), 1), self.quantization, where)

    def __str__(self) -> str:
        if isinstance(self.quantization, Float8):
            return str(self.quantization)
        is_8_bit = multiplies_8_bits(self.quantization)
        return spell_format(self.quantization, None, None if is_8_bit else "it is a grouped matmul")


def _describe_ragged_product(
    eqn: JaxprEqn, position: int, quantization: Quantization, accumulate: np.dtype | None
) -> RaggedProduct | str:
    numbers, params = eqn.params["ragged_dot_dimension_numbers"], eqn.params
    if position == 0 or (*numbers.lhs_ragged_dimensions,) != (0,) or (*numbers.rhs_group_dimensions,) != (0,):
        return "it is not a matrix for each group of rows"
    contracted, (_, batch) = numbers.dot_dimension_numbers
    if batch or len(contracted[1]) != 1 or params["group_offset"] is not None or params["out_sharding"] is not None:
        return "ragged_dot has a batch, several summed axes, a group offset or an output sharding"
    return RaggedProduct((*contracted[1],) == (2,), (("precision", params["precision"]),), quantization, accumulate)


def describe_weight_product(
    eqn: JaxprEqn, position: int, quantization: Quantization, accumulate: np.dtype | None
) -> WeightProduct | RaggedProduct | str:
    """Describes a matmul or convolution whose operand at `position` is a weight, or returns why it is left."""
    if eqn.primitive.name == "ragged_dot_general":
        return _describe_ragged_product(eqn, position, quantization, accumulate)
    name, params = eqn.primitive.name, {k: v for k, v in eqn.params.items() if k != "preferred_element_type"}
    ndim = len(_shape(eqn.invars[position]))
    if name == "conv_general_dilated":
        if position == 0:
            return "it is the input of a convolution"
        numbers = params["dimension_numbers"]
        outputs, inputs, *window = numbers.rhs_spec
        params["dimension_numbers"] = numbers._replace(rhs_spec=(ndim - 1, ndim - 2, *range(ndim - 2)))
        order, summed, channels = (*window, inputs, outputs), ndim - 1, 1
        given = {key: value for key, value in params.items() if key != "out_sharding" or value is not None}
        return WeightProduct(name, 1, order, summed, channels, tuple(given.items()), (), quantization, accumulate)
    contracted, batch = params["dimension_numbers"]
    own, other = (tuple(map(int, axes[position])) for axes in (contracted, batch)), 1 - position
    summed_axes, batch_axes = own
    free = tuple(axis for axis in range(ndim) if axis not in (*summed_axes, *batch_axes))
    n = len(batch_axes)
    weight_axes = tuple(range(n, n + len(summed_axes))), tuple(range(n))
    params["dimension_numbers"] = ((contracted[other], weight_axes[0]), (batch[other], weight_axes[1]))
    out_order: tuple[int, ...] = ()
    if position == 0:
        if params.get("out_sharding") is not None:
            return "it is the left operand, and the output has a sharding"
        rows = len(_shape(eqn.invars[1])) - n - len(summed_axes)
        out_order = (*range(n), *range(n + rows, n + rows + len(free)), *range(n, n + rows))
    order = (*batch_axes, *summed_axes, *free)
    options = tuple(params.items())
    return WeightProduct(
        name, position, order, len(summed_axes), len(free), options, out_order, quantization, accumulate
    )


def _shape(atom: Atom) -> tuple[int, ...]:
    aval: Any = atom.aval
    return aval.shape


def _reorder(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return x if order == tuple(sorted(order)) else lax.transpose(x, order)


class WeightUse(NamedTuple):
    """An equation that reads weights and does more than moving them."""

    names: Names
    product: WeightProduct | RaggedProduct | str  # its quantized form, or the reason to leave it
    is_product: bool  # True for a matmul or convolution
    is_lookup: bool = False  # True if it reads rows of a table


class WeightFinder:
    """Finds the uses of weights in a jaxpr.

    `find_product` returns the quantized form of a matmul, or the reason to leave it. `contexts` is as in `Rule`.
    `enters` is true for equations whose sub-jaxprs are rewritten.
    """

    def __init__(
        self,
        find_product: Callable[[JaxprEqn, Sequence[Names], EquationPlace], WeightProduct | RaggedProduct | str],
        contexts: Callable[[EquationPlace, Jaxpr], Sequence[EquationPlace]],
        enters: Callable[[JaxprEqn, EquationPlace], bool],
    ):
        self._find_product, self._contexts, self._enters = find_product, contexts, enters

    def find(
        self, program: Jaxpr, names: Sequence[Names], place: EquationPlace
    ) -> tuple[list[WeightUse], dict[Atom, Names]]:
        """Returns the uses, and the weights in each value of a jaxpr, given those in its arguments."""
        known: dict[Atom, Names] = dict(zip(program.invars, names, strict=True))
        uses: list[WeightUse] = []
        for eqn, here in zip(program.eqns, self._contexts(place, program), strict=True):
            read = _look_up(known, eqn.invars)
            if not any(read):
                continue
            bodies = sub_jaxprs(eqn)
            if bodies and self._enters(eqn, here):
                found = [self._find_inside(body, known, here) for body in bodies]
                uses += [use for inside, _ in found for use in inside]
                outputs = [leaving for body, (_, leaving) in zip(bodies, found, strict=True) if body.outputs]
                known.update({var: _join([leaving.get(var, NO_WEIGHT) for leaving in outputs]) for var in eqn.outvars})
            else:
                known.update(zip(eqn.outvars, follow_weights(eqn, read), strict=True))
                uses += self._find_use(eqn, read, [known[var] for var in eqn.outvars], here)
        return uses, known

    def _find_inside(
        self, body: SubJaxpr, known: dict[Atom, Names], place: EquationPlace
    ) -> tuple[list[WeightUse], dict[Atom, Names]]:
        """Does the same for a sub-jaxpr; returns the weights in the outputs of its equation."""
        entering = _look_up(known, [outer for outer, _ in body.inputs])
        changed: list[WeightUse] = []
        while True:
            uses, inside = self.find(body.program, entering, place)
            leaving = _look_up(inside, [inner for inner, _ in body.outputs])
            again = list(entering)
            for i in body.carry if body.outputs else ():
                again[i] = _join([entering[i], leaving[i - body.carry.start]])
            if again == entering:
                return changed + uses, {outer: own for (_, outer), own in zip(body.outputs, leaving, strict=True)}
            lost = [own for own, kept in zip(entering, again, strict=True) if own and not kept]
            changed += [WeightUse(own, "a loop carries it and changes it", False) for own in lost]
            entering = again

    def _find_use(
        self, eqn: JaxprEqn, read: Sequence[Names], made: Sequence[Names], place: EquationPlace
    ) -> list[WeightUse]:
        name, weights = eqn.primitive.name, NO_WEIGHT.union(*read)
        if name in WEIGHT_PRODUCTS:
            return [WeightUse(weights, self._find_product(eqn, read, place), True)]
        if any(made):
            return []
        if name == "gather" and read[0]:
            return [WeightUse(weights, WHY_TABLES_WIDE, False, True)]
        line = find_line(eqn)
        reason = f"{name} reads it{line and f' in {line}'}"
        if name in ("custom_jvp_call", "custom_vjp_call"):
            reason += "; custom_rules='inside' quantizes its forward pass"
        return [WeightUse(weights, reason, False)]


def _look_up(known: dict[Atom, Names], atoms: Sequence[Atom]) -> list[Names]:
    return [NO_WEIGHT if isinstance(atom, Literal) else known.get(atom, NO_WEIGHT) for atom in atoms]
