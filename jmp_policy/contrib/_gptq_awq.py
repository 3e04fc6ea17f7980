"""GPTQ and AWQ: round a weight so that the outputs of its layer change least for the inputs that data gives it."""

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import PyTree, hide_frames
from ..modules import Method
from ..policy import Int4, Int8
from ..quant import (
    Clip,
    Quantized,
    choose_best,
    choose_bounds,
    choose_peak,
    quantize_asymmetric,
    quantize_symmetric,
    to_numbers,
)
from ._layer_by_layer import Calibration, InputStatistics, Rounded, measure_error, quantize_layer_by_layer


@hide_frames
def gptq(
    model: Any,
    batches: Iterable[Any],
    *,
    variables: PyTree = None,
    method: Method = None,
    damping: float = 0.01,
    block_size: int = 128,
    act_order: bool = False,
    clip: Clip = "absmax",
    input_clips: Mapping[str, Any] | None = None,
    stacked: Collection[str] = (),
    explanation: Any = None,
    file: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Quantizes the weights of a trained model like `quantize`, rounded for the inputs that some data gives to them.

    `quantize` rounds each element to the nearest number. GPTQ rounds a weight input by input, and makes up for the
    error of each in the inputs that follow, so that the outputs of the layer change least. The result is stored in the
    same format and computes as fast.

    The model runs once on each batch, one op at a time, so that the layers of a scan are seen too. All runs wait at a
    matrix, each in a thread, until it is rounded. So the time is linear in the depth, and memory holds what the rest of
    the model needs of each batch, such as the inputs of a block; and one Hessian at a time, a float32 matrix of the
    layer's inputs. Matrices with the same inputs, such as a query and a key, share it. A weight with several uses gets
    the sum of their Hessians, and takes runs of its own; a convolution has the Hessian of its patches.

    Rounded to nearest are embedding tables, also where they compute logits, and any matrix for which that has the
    smaller error. Elements that are exactly zero, such as pruned or masked ones, stay zero.

    Args:
      model: a linen module or an nnx model, with a policy in `int4` or `int8`. It is not changed.
      batches: inputs of the calls: a tuple of positional arguments, or a single argument. 128 sequences are usual.
      variables: of a linen module; `None` if it is bound.
      method: the method to call, as for `explain`.
      damping: fraction of the mean of the Hessian's diagonal that is added to the diagonal.
      block_size: number of inputs whose errors are passed on together; changes the time, not the result.
      act_order: rounds inputs with large activations first, with the scales of the unchanged weight.
      clip: as for `quantize`.
      input_clips: as for `quantize`.
      stacked, explanation: as for `quantize`.
      file: a file with one matrix per line. Matrices in it are not rounded again, so an interrupted call can resume.
      progress: whether to print a line for each matrix on standard error. If `None`, only if that is a terminal.
      **kwargs: further arguments of each call; for linen, of `apply`.

    Returns:
      The result of `quantize`: variables, or an nnx model.

    Raises:
      TypeError: `model` is not a Flax module, or `batches` is an array.
      ValueError: the model has no policy that stores integers; `batches` is empty; inputs are not finite; a damped
        Hessian is singular; no input of a weight could be read; the file belongs to another call; or an argument is
        not valid, as for `quantize`.

    Warns:
      UserWarning: some weights are rounded to nearest, because their inputs could not be read: they run inside `vmap`
        or `remat`, or compute in a way that no policy can replace.

    Source: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, ICLR
    2023.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(1), (256, 4)) @ jax.random.normal(jax.random.key(2), (4, 64))
    >>> error = lambda quantized: float(jnp.linalg.norm(quantized(x) - model(x)))
    >>> policy = "int4/64_from_float32"
    >>> calibrated = jmp.contrib.gptq(jmp.with_policy(model, policy), [x])
    >>> calibrated.kernel[...], error(calibrated) < 0.5 * error(jmp.quant.quantize(model, policy))
    (QuantizedArray(int4/64, shape=(64, 64), dtype=float32), True)
    """
    if not damping >= 0:
        raise ValueError(f"damping is a number from 0, got {damping!r}. For example: damping=0.01.")
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size is a number of inputs, got {block_size!r}. For example: block_size=128.")

    def round_groups(weights: jax.Array, statistics: InputStatistics, format: Int4 | Int8, block: int) -> Rounded:
        rounding = Rounding(format, block, clip, block_size, act_order)
        return Rounded(*round_by_hessian(weights, statistics.hessian, damping, rounding))

    settings = {"damping": damping, "act_order": act_order, "clip": clip}
    options = {"clip": clip, "input_clips": input_clips, "stacked": stacked, "explanation": explanation}
    calibration = Calibration("gptq", round_groups, settings)
    return quantize_layer_by_layer(calibration, model, batches, variables, method, kwargs, options, file, progress)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Settings of `round_by_hessian`; `block_size` and `act_order`: see `gptq`."""

    format: Int4 | Int8
    block: int  # elements of an output channel that share a scale, in stored order
    clip: Clip = "absmax"
    block_size: int = 128
    act_order: bool = False

    def choose_range(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the range of each block in `(..., block, channels)`, with length 1 for the axis of the block."""
        if isinstance(self.format, Int4):
            return choose_bounds(blocks, (-2,), self.clip)
        peak = choose_peak(blocks, (-2,), self.clip)
        return -peak, peak

    def round(self, x: jax.Array, low: jax.Array, high: jax.Array) -> Quantized:
        """Rounds to the nearest number in a range that the format stores."""
        return quantize_asymmetric(x, low, high) if isinstance(self.format, Int4) else quantize_symmetric(x, high)

    def choose_step(self, inputs: int, group: int) -> int:
        """Returns the number of inputs between updates of the whole weight. A range is chosen only after an update."""
        if group >= inputs or self.act_order:
            return min(self.block_size, inputs)
        if group <= self.block_size:
            return self.block_size // group * group
        return max(n for n in range(1, self.block_size + 1) if group % n == 0)


@functools.partial(jax.jit, static_argnums=3)
def round_by_hessian(
    weights: jax.Array, hessians: jax.Array, damping: jax.Array | float, rounding: Rounding
) -> Quantized:
    """Rounds weights input by input, and makes up for each error in the inputs that follow; shapes as in `Calibration`.

    If the damped Hessian is singular, the scales are nan.

    Source: Frantar et al., GPTQ, ICLR 2023, algorithm 1; its section 4 for scales of groups.
    """
    # One after another: `vmap` would choose a range at each input.
    return lax.map(lambda pair: _round_group(pair[0], pair[1], damping, rounding), (weights, hessians))


def _round_group(weight: jax.Array, hessian: jax.Array, damping: jax.Array | float, rounding: Rounding) -> Quantized:
    inputs, inner, channels = weight.shape
    group = max(rounding.block // inner, 1)  # the fewest inputs with whole blocks
    low, high = rounding.choose_range(weight.reshape(inputs // group, -1, rounding.block, channels))
    spread = inner // low.shape[1]  # the elements of a row that share a scale

    step = rounding.choose_step(inputs, group)
    padding = -inputs % step
    order = jnp.argsort(-jnp.diagonal(hessian)) if rounding.act_order else jnp.arange(inputs)
    upper = (
        jnp.eye(inputs + padding, dtype=jnp.float32)
        .at[:inputs, :inputs]
        .set(factor_inverse(hessian[order][:, order], damping))
    )
    rows = jnp.pad(weight.reshape(inputs, -1)[order], ((0, padding), (0, 0)))
    groups = jnp.pad(order // group, (0, padding))
    begins = jnp.pad((order % group == 0) & (not rounding.act_order), (0, padding))
    is_zero = rows == 0

    def round_row(i: Any, state: Any, start: Any) -> Any:
        rows, errors, values, low, high = state
        at = start + i

        def choose_range(_: Any) -> Any:
            current = lax.dynamic_slice_in_dim(rows, at, group).reshape(-1, rounding.block, channels)
            new = rounding.choose_range(current)
            return low.at[groups[at]].set(new[0]), high.at[groups[at]].set(new[1])

        low, high = lax.cond(begins[at], choose_range, lambda _: (low, high), None)
        bounds = [jnp.repeat(bound[groups[at], :, 0], spread, axis=0).reshape(-1) for bound in (low, high)]
        made = rounding.round(jnp.where(is_zero[at], 0, rows[at]), bounds[0], bounds[1])
        error = (rows[at] - to_numbers(made)) / upper[at, at]
        block = lax.dynamic_slice_in_dim(rows, start, step)
        block -= lax.dynamic_slice_in_dim(upper[at], start, step)[:, None] * error
        rows = lax.dynamic_update_slice_in_dim(rows, block, start, 0)
        return rows, errors.at[i].set(error), values.at[at].set(made.values), low, high

    def round_block(n: Any, state: Any) -> Any:
        start, errors = n * step, jnp.zeros((step, rows.shape[1]), jnp.float32)
        round_next = functools.partial(round_row, start=start)
        current, errors, *others = lax.fori_loop(0, step, round_next, (state[0], errors, *state[1:]))
        is_after = jnp.arange(len(current)) >= start + step
        factors = jnp.where(is_after, lax.dynamic_slice_in_dim(upper, start, step), 0)
        return current - jnp.matmul(factors.T, errors, precision="highest"), *others

    values = jnp.zeros(rows.shape, jnp.uint8 if isinstance(rounding.format, Int4) else jnp.int8)
    _, values, low, high = lax.fori_loop(0, len(rows) // step, round_block, (rows, values, low, high))
    _, scale, zero_point = rounding.round(jnp.zeros_like(low), low, high)
    scale = jnp.where(jnp.isfinite(upper).all(), scale, jnp.nan)
    values = jnp.zeros_like(values[:inputs]).at[order].set(values[:inputs]).reshape(weight.shape)
    zero_point = None if zero_point is None else zero_point.reshape(-1, channels)
    return Quantized(values, scale.reshape(-1, channels), zero_point)


def factor_inverse(hessian: jax.Array, damping: jax.Array | float) -> jax.Array:
    """Returns the upper triangular `u` with `u.T @ u` the inverse of the damped Hessian; nan if that is singular."""
    diagonal = jnp.diagonal(hessian)
    # An input that is always zero changes no output: it is rounded to nearest.
    added = jnp.where(diagonal == 0, 1, damping * diagonal.mean())
    # The factor of the reversed matrix is the inverse of `u`, reversed: no inverse has to be factored.
    lower = jnp.linalg.cholesky((hessian + jnp.diag(added))[::-1, ::-1])
    return jax.scipy.linalg.solve_triangular(lower[::-1, ::-1], jnp.eye(len(hessian), dtype=jnp.float32))


_LEAST_FRACTION, _FRACTIONS = 0.65, 20  # of a range: the smallest to try, and how many
_SMALLEST = np.float32(1e-4)  # of the magnitude of an input, as a share of the largest


@hide_frames
def awq(
    model: Any,
    batches: Iterable[Any],
    *,
    variables: PyTree = None,
    method: Method = None,
    grid_size: int = 20,
    search_clip: bool = True,
    clip: Clip = "absmax",
    input_clips: Mapping[str, Any] | None = None,
    stacked: Collection[str] = (),
    explanation: Any = None,
    file: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Quantizes the weights of a trained model like `quantize`, scaled for the inputs that some data gives to them.

    A matrix is multiplied by a scale per input, rounded to nearest, and divided by the scale again. Inputs with larger
    scales get smaller errors. The scale of an input `x` is `mean(abs(x)) ** power`. AWQ tries powers from 0, which is
    `quantize`, to 1, and chooses the one for which the outputs of the matrix change least.

    The reciprocals of the scales are stored with the weight, as its `input_scale`. They take 4 bytes per input and one
    more multiplication where the weight is dequantized. Norms and other layers stay as they are, and matrices with the
    same inputs, such as a query and a key, have scales of their own.

    The model runs as for `gptq`. `int8` weights and embedding tables are rounded to nearest.

    Args:
      model: a linen module or an nnx model, with a policy in `int4`. It is not changed.
      batches: inputs of the calls: a tuple of positional arguments, or a single argument. 128 sequences are usual.
      variables: of a linen module; `None` if it is bound.
      method: the method to call, as for `explain`.
      grid_size: number of powers to try, from 0 to 1.
      search_clip: whether to try smaller ranges for each block, and to keep those that change the outputs less.
      clip: as for `quantize`.
      input_clips: as for `quantize`.
      stacked, explanation: as for `quantize`.
      file: as for `gptq`.
      progress: as for `gptq`.
      **kwargs: further arguments of each call; for linen, of `apply`.

    Returns:
      The result of `quantize`: variables, or an nnx model.

    Raises:
      TypeError: `model` is not a Flax module, or `batches` is an array.
      ValueError: the model has no policy that stores integers; `batches` is empty; inputs are not finite; no input of a
        weight could be read; the file belongs to another call; or an argument is not valid, as for `quantize`.

    Warns:
      UserWarning: some weights are rounded to nearest, as for `gptq`.

    Source: Lin et al., AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration, MLSys
    2024, section 3.2.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(1), (256, 64)).at[:, :4].multiply(50)
    >>> error = lambda quantized: float(jnp.linalg.norm(quantized(x) - model(x)))
    >>> policy = "int4/64_from_float32"
    >>> calibrated = jmp.contrib.awq(jmp.with_policy(model, policy), [x])
    >>> calibrated.kernel[...], error(calibrated) < 0.7 * error(jmp.quant.quantize(model, policy))
    (QuantizedArray(int4/64, shape=(64, 64), dtype=float32), True)
    """
    if not isinstance(grid_size, int) or grid_size < 2:
        raise ValueError(f"grid_size is a number of powers from 2, got {grid_size!r}. For example: grid_size=20.")

    def round_groups(weights: jax.Array, statistics: InputStatistics, format: Int4 | Int8, block: int) -> Rounded:
        return round_with_input_scales(weights, statistics, block, grid_size, clip, search_clip)

    settings = {"grid_size": grid_size, "search_clip": search_clip, "clip": clip}
    calibration = Calibration("awq", round_groups, settings, scales_inputs=True)
    options = {"clip": clip, "input_clips": input_clips, "stacked": stacked, "explanation": explanation}
    return quantize_layer_by_layer(calibration, model, batches, variables, method, kwargs, options, file, progress)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def round_with_input_scales(
    weights: jax.Array, statistics: InputStatistics, block: int, grid_size: int, clip: Clip, search_clip: bool
) -> Rounded:
    """Rounds weights to int4 with the scales of inputs that change the outputs least; shapes as in `Calibration`."""
    magnitude = statistics.magnitude.sum(0)  # groups of a convolution share the scales
    largest = magnitude.max()
    shares = jnp.maximum(magnitude / jnp.where(largest > 0, largest, 1), _SMALLEST)

    def scale_blocks(power: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        scales = shares**power
        scales /= jnp.sqrt(scales.max() * scales.min())  # the smallest and the largest are reciprocals of each other
        blocks = (weights * scales[:, None, None]).reshape(len(weights), -1, block, weights.shape[-1])
        return scales, blocks, *choose_bounds(blocks, (2,), clip)

    def measure(power: jax.Array) -> jax.Array:
        scales, *scaled = scale_blocks(power)
        numbers = to_numbers(quantize_asymmetric(*scaled)).reshape(weights.shape)
        return measure_error(numbers * (1 / scales)[:, None, None] - weights, statistics.hessian)

    power = choose_best(jnp.linspace(0, 1, grid_size, dtype=jnp.float32), measure)
    scales, blocks, low, high = scale_blocks(power)
    if search_clip:
        inner = weights.shape[2]
        hessians = take_blocks(statistics.hessian / scales[:, None] / scales, inner, block)
        low, high = search_bounds(blocks, low, high, hessians)
    made = quantize_asymmetric(blocks, low, high)
    assert made.zero_point is not None
    return Rounded(made.values.reshape(weights.shape), made.scale[:, :, 0], made.zero_point[:, :, 0], 1 / scales)


def take_blocks(hessian: jax.Array, inner: int, block: int) -> jax.Array:
    """Returns the Hessians of the blocks in stored order, `(groups, blocks, block, block)`."""
    inputs = max(block // inner, 1)
    count = hessian.shape[1] // inputs
    own = hessian.reshape(len(hessian), count, inputs, count, inputs)[:, jnp.arange(count), :, jnp.arange(count)]
    own = jnp.moveaxis(own, 0, 1)
    same = jnp.eye(min(inner, block), dtype=jnp.float32)  # the outputs of an input do not share errors
    own = jnp.repeat(own, max(inner // block, 1), axis=1)
    return jnp.einsum("gbij,mn->gbimjn", own, same).reshape(len(hessian), -1, block, block)


def search_bounds(
    blocks: jax.Array, low: jax.Array, high: jax.Array, hessians: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Shrinks the ranges of blocks `(groups, blocks, block, channels)` where that changes the outputs less."""

    def choose(bounds: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
        def measure(fraction: jax.Array) -> jax.Array:
            change = to_numbers(quantize_asymmetric(blocks, *bounds(fraction))) - blocks
            products = jnp.matmul(hessians, change, precision="highest")
            return jnp.sum(change * products, axis=2, keepdims=True)

        return bounds(choose_best(jnp.linspace(1, _LEAST_FRACTION, _FRACTIONS, dtype=jnp.float32), measure))

    low, high = choose(lambda fraction: (low * fraction, high * fraction))
    low, high = choose(lambda fraction: (low * fraction, high))
    return choose(lambda fraction: (low, high * fraction))
