"""One matrix of a weight, and its rounding for the inputs that it gets."""

import base64
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...policy import Int4, Int8
from ...quant._numbers import pack
from ...quant._weights import QuantizedArray, block_length, stack_shape


class InputStatistics(NamedTuple):
    """Float32 sums over the rows that a matrix multiplies, for each group of a convolution."""

    hessian: jax.Array  # (groups, inputs, inputs): of the products of two inputs
    magnitude: jax.Array  # (groups, inputs): of the magnitudes of the inputs


@jax.jit
def measure_inputs(rows: jax.Array) -> InputStatistics:
    """Computes the statistics of rows `(groups, rows, inputs)`."""
    rows = rows.astype(jnp.float32)
    return InputStatistics(jnp.einsum("gmk,gml->gkl", rows, rows, precision="highest"), jnp.abs(rows).sum(1))


class Rounded(NamedTuple):
    """Arrays of a rounded matrix, named as in `QuantizedArray`."""

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    input_scale: jax.Array | None = None

    @classmethod
    def decode(cls, line: dict[str, Any]) -> "Rounded":
        """Reads the arrays from a JSON object."""
        decode = lambda dtype, shape, text: jnp.asarray(np.frombuffer(base64.b64decode(text), dtype).reshape(shape))
        arrays: dict[str, Any] = {name: line[name] and decode(*line[name]) for name in cls._fields}
        return cls(**arrays)

    def encode(self) -> dict[str, Any]:
        """Returns the arrays as a JSON object."""
        encode = lambda part: [str(part.dtype), part.shape, base64.b64encode(np.asarray(part).tobytes()).decode()]
        return {name: None if part is None else encode(part) for name, part in self._asdict().items()}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A way to round matrices for the inputs that they get.

    Weights and values are `(groups, inputs, inner, channels)`, scales and zero points `(groups, blocks, channels)` in
    stored order, input scales `(inputs,)`. `inner` are outputs that share scales with the inputs, else 1. Only
    convolutions have more than one group.
    """

    name: str  # of the public function
    round_groups: Callable[[jax.Array, InputStatistics, Int4 | Int8, int], Rounded]  # the integer is the block
    settings: dict[str, Any]  # further entries of the header of the file
    scales_inputs: bool = False  # the result has input scales, which `Int4` alone stores


def add_input_scale(weight: QuantizedArray) -> QuantizedArray:
    """Adds an input scale of ones to an int4 weight."""
    channels = weight.layout.channels
    assert isinstance(weight.format, Int4)
    length = block_length(weight.layout, weight.format)
    shape = (*weight.scale.shape[: -1 - channels], length, *[1] * channels)
    return dataclasses.replace(weight, input_scale=jnp.ones(shape, jnp.float32))


@dataclasses.dataclass
class Weight:
    """A weight, perhaps a stack of matrices: floating, and rounded as far as the passes have come."""

    path: str
    array: jax.Array
    stored: QuantizedArray


class Matrix(NamedTuple):
    weight: Weight
    place: int  # in the stack

    def read(self) -> jax.Array:
        """Returns the floating matrix."""
        return _flatten(self.weight.array, self.weight.stored)[self.place].astype(jnp.float32)

    def read_stored(self) -> QuantizedArray:
        return jax.tree.map(lambda leaf: _flatten(leaf, self.weight.stored)[self.place], self.weight.stored)

    def store(self, made: Rounded) -> None:
        """Replaces the stored matrix by one of the same shapes."""
        stored = self.weight.stored
        new = {}
        for name, part in made._asdict().items():
            if part is not None:
                whole = getattr(stored, name)
                flat = _flatten(whole, stored).at[self.place].set(part)
                new[name] = flat.reshape(whole.shape)
        self.weight.stored = dataclasses.replace(stored, **new)


def _flatten(leaf: jax.Array, weight: QuantizedArray) -> jax.Array:
    """Returns an array of a weight with the axes of its stack as one."""
    depth = len(stack_shape(weight.shape, weight.layout))
    return leaf.reshape(-1, *leaf.shape[depth:])


def round_matrix(
    calibration: Calibration, matrix: Matrix, statistics: InputStatistics, inner: int
) -> tuple[Rounded, float]:
    """Returns the stored arrays of a matrix, and its error relative to nearest; nearest if that is not larger."""
    path, nearest = matrix.weight.path, matrix.read_stored()
    layout, format, name = nearest.layout, nearest.format, calibration.name
    assert isinstance(format, Int4 | Int8)
    hessian = statistics.hessian
    if not bool(jnp.isfinite(hessian).all()):
        raise ValueError(
            f"The inputs of the weight {path!r} are not all finite, or their squares overflow float32, so {name} "
            "cannot round it. Leave such batches out. For example: [x for x in batches if np.isfinite(x).all()]."
        )
    groups, inputs, _ = hessian.shape
    split = lambda weight: jnp.moveaxis(weight.reshape(inputs, inner, groups, -1), 2, 0)
    block = layout.length if isinstance(format, Int8) else block_length(layout, format)
    weight = split(matrix.read())
    made = calibration.round_groups(weight, statistics, format, block)
    values = jnp.moveaxis(made.values, 0, 2).reshape(-1, block, *nearest.shape[len(layout.contracted) :])
    is_packed = isinstance(format, Int4)
    values = pack(values.astype(jnp.uint4), -1 - layout.channels) if is_packed else values.reshape(nearest.shape)
    join = lambda part: jnp.moveaxis(part, 0, 1).reshape(nearest.scale.shape)
    new = Rounded(values, join(made.scale), None if made.zero_point is None else join(made.zero_point))
    if nearest.input_scale is not None:
        assert made.input_scale is not None
        new = new._replace(input_scale=jnp.repeat(made.input_scale, inner).reshape(nearest.input_scale.shape))
    rounded = dataclasses.replace(nearest, **new._asdict())
    error, before = (
        float(measure_error(split(one.dequantize(jnp.float32)) - weight, hessian)) for one in (rounded, nearest)
    )
    if math.isnan(error):
        raise ValueError(
            f"The Hessian of the weight {path!r} is singular: its inputs depend on each other, or there are fewer rows "
            f"of them than the {inputs} inputs of the layer. Pass more batches or more damping. "
            f"For example: {name}(..., damping=0.01)."
        )
    if error < before:
        return new, error / before
    return Rounded(*(getattr(nearest, name) for name in Rounded._fields)), 1.0


@jax.jit
def measure_error(change: jax.Array, hessian: jax.Array) -> jax.Array:
    """Returns the square error of the outputs for a change of a weight, `(groups, inputs, ...)`."""
    change = change.reshape(*change.shape[:2], -1)
    return jnp.sum(change * jnp.matmul(hessian, change, precision="highest"))
