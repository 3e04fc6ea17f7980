"""AWQ: scales the inputs of a weight so that rounding spares those with large activations."""

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._base import PyTree, hide_frames
from ...modules import Method
from ...policy import Int4, Int8
from ...quant._numbers import Clip, choose_best, choose_bounds, quantize_asymmetric, to_numbers
from ._matrix import Calibration, InputStatistics, Rounded, measure_error
from ._passes import quantize_layer_by_layer

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
      stacked: as for `quantize`.
      file: as for `gptq`.
      progress: as for `gptq`.
      **kwargs: further arguments of each call; for linen, of `apply`.

    Returns:
      What `quantize` returns: variables, or an nnx model.

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
    options = {"clip": clip, "input_clips": input_clips, "stacked": stacked}
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
