"""`quantize` stores the weights of a model in 8 or 4 bits; `calibrate` chooses clips for the inputs of its layers."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .._base import Args, Kwargs, PyTree, hide_frames, warn_user
from ..modules import Method, ModuleCall, check_batches, require_adapter
from ..policy import PolicySpec, get_policy
from ._bilinear import Bilinear
from ._numbers import Clip, check_clip, measure_amax, quantize_symmetric, to_numbers
from ._observe import at_path, observe_products
from ._product import is_integer_product
from ._quantizer import Quantizer, apply_quantizer


class ClipCalibration:
    """Statistics of the inputs of each layer, by path, over all batches."""

    def __init__(self) -> None:
        self.layers: dict[str, ClipStatistics] = {}
        self._traced: dict[str, None] = {}

    def hook(self, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a method of a module; its matmuls are recorded under its path."""
        with at_path(call.path):
            return next_fun(*args, **kwargs)

    def observe(self, path: str, operation: Bilinear, left: jax.Array, weight: Any) -> Any:
        """Records the input of an integer matmul, and returns its weight."""
        if is_integer_product(operation, left, weight):
            self.add(path, left, operation.summed_axes(operation.left))
        return weight

    def add(self, path: str, x: jax.Array, axes: tuple[int, ...]) -> None:
        if isinstance(x, Tracer):
            self._traced[path] = None
        elif x.size:
            self.layers.setdefault(path, ClipStatistics(path)).add(x, axes)

    def check(self, count: int) -> None:
        """Raises or warns if the inputs of layers were not seen in `count` batches."""
        if count == 0:
            raise ValueError("calibrate was given no batches. For example: calibrate(model, [x], variables=variables).")
        unseen = ", ".join(repr(path) for path in self._traced if path not in self.layers)
        if unseen:
            warn_user(
                f"calibrate cannot read the inputs of {unseen}, inside of vmap, remat or a gradient: these inputs are "
                "not clipped"
            )
        elif not self.layers:
            raise ValueError(
                "No layer that was called quantizes its inputs to integers. Give the model a policy under which they "
                "do. For example: with_policy(model, 'int8_from_float32')."
            )


# Magnitudes are counted by the exponent and 7 mantissa bits of float32. These bins are less than 1 % wide at any
# magnitude, so no range has to be known in advance, unlike the 2048 equal bins of TensorRT.
_BINS = 2**15
_SHIFT = 16

_PER_OCTAVE, _OCTAVES = 8, 6  # clips to try: 8 per power of two, down to a 64th of a batch's peak


class ClipStatistics:
    """Magnitudes of a layer's inputs, and the square errors with and without clips."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._peak = 0.0
        self._counts = np.zeros(_BINS, np.int64)
        self._saved: dict[int, float] = {}  # by power: square error without the clip, minus with it
        self._lowest = -(2**31)  # the least power tried on every batch

    def add(self, x: jax.Array, axes: tuple[int, ...]) -> None:
        """Adds a batch; `axes` are those that share a scale."""
        with jax.disable_jit(False):
            batch_peak, counts = _count_magnitudes(x)
            top = float(batch_peak)
            if not np.isfinite(top):
                raise ValueError(
                    f"The inputs of the layer {self._path!r} are not all finite, and no clip can fix that. "
                    "Leave such batches out. For example: [x for x in batches if np.isfinite(x).all()]."
                )
            self._counts += np.asarray(counts)
            self._peak = max(self._peak, top)
            if top == 0:
                return
            first = int(np.ceil(np.log2(top) * _PER_OCTAVE))  # larger powers clip nothing in this batch
            powers = np.arange(first - _PER_OCTAVE * _OCTAVES, first)
            for power, saved in zip(powers, np.asarray(_measure_savings(x, axes, _clips(powers))), strict=True):
                self._saved[int(power)] = self._saved.get(int(power), 0.0) + float(saved)
            self._lowest = max(self._lowest, int(powers[0]))

    def clip(self, clip: Clip) -> float:
        """Returns the magnitude to clip inputs to; 0 if all inputs were zero."""
        if clip == "absmax":
            return self._peak
        if clip == "mse":
            tried = {power: saved for power, saved in self._saved.items() if power >= self._lowest}
            power = max(tried, key=lambda power: tried[power], default=None)
            return self._peak if power is None or tried[power] <= 0 else float(_clips(power))
        # The least magnitude that this percentage of the inputs does not exceed, to the width of a bin.
        reached = np.cumsum(self._counts) >= np.ceil(self._counts.sum() * clip / 100)
        edge = np.uint32((np.argmax(reached) + 1) << _SHIFT).view(np.float32)
        return float(min(self._peak, edge)) if not reached[0] else 0.0


def _clips(powers: np.ndarray | int) -> np.ndarray:
    return np.exp2(np.asarray(powers) / _PER_OCTAVE).astype(np.float32)


@jax.jit
def _count_magnitudes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    magnitudes = jnp.abs(x.astype(jnp.float32)).ravel()
    bins = lax.bitcast_convert_type(magnitudes, jnp.uint32) >> _SHIFT
    return measure_amax(magnitudes), jnp.zeros(_BINS, jnp.int32).at[bins].add(1)


@functools.partial(jax.jit, static_argnums=1)
def _measure_savings(x: jax.Array, axes: tuple[int, ...], clips: jax.Array) -> jax.Array:
    """Returns the square error of rounding to int8 without a clip, minus that with each clip."""
    amax = measure_amax(x, axes)
    wide = x.astype(jnp.float32)

    def error(clip: jax.Array) -> jax.Array:
        return jnp.sum((to_numbers(quantize_symmetric(wide, jnp.minimum(amax, clip))) - wide) ** 2)

    return error(jnp.float32(np.inf)) - lax.map(error, clips)


@hide_frames
def calibrate(
    model: Any,
    batches: Iterable[Any],
    *,
    variables: PyTree = None,
    method: Method = None,
    clip: Clip = "mse",
    **kwargs: Any,
) -> dict[str, float]:
    """Runs a model on data, and chooses the magnitude to clip the inputs of each layer to.

    A layer in int8 quantizes each row of its inputs by the largest magnitude in it. If that is an outlier, the other
    elements lose most of their 8 bits; `quantize` with these clips prevents that. The model runs by its own policy, one
    op at a time, so that the layers of a scan are seen too. The layers of one scan share one magnitude.

    Args:
      model: a linen module or an nnx model, with a policy that quantizes inputs to integers. It is not changed.
      batches: inputs of the calls: a tuple of positional arguments, or a single argument.
      variables: of a linen module; `None` if it is bound.
      method: the method to call, as for `explain`.
      clip: a percentile in (0, 100] of all magnitudes, within 1 %; `"mse"`, the magnitude with the least mean square
        error of the rounded inputs, usually close to the largest if rows have at most a few thousand elements; or
        `"absmax"`, the largest magnitude.
      **kwargs: further arguments of each call; for linen, of `apply`.

    Returns:
      Magnitudes by module path, for `quantize(..., input_clips=...)`. Layers without quantized or nonzero inputs are
      left out, and so are layers without a weight of their own, such as a head tied to a table.

    Raises:
      TypeError: `model` is not a Flax module, or `batches` is an array.
      ValueError: no layer quantizes its inputs to integers; inputs are not finite; `batches` is empty; or `clip` is not
        valid.

    Warns:
      UserWarning: some layers could not be measured, because they run inside `vmap`, `remat` or a gradient.

    Source: Wu et al., Integer Quantization for Deep Learning Inference, 2020, section 3.3.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = jmp.with_policy(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "int8_from_float32")
    >>> clips = jmp.quant.calibrate(model, [jnp.linspace(-3, 2, 64)[None]], clip="absmax")
    >>> clips, jmp.quant.quantize(model, "int8_from_float32", input_clips=clips).kernel[...].input_clip
    ({'': 3.0}, Array(3., dtype=float32))
    """
    check_clip(clip)
    example = "calibrate(with_policy(Net(), 'int8_from_float32'), batches, variables=variables)"
    adapter = require_adapter(model, f"calibrate takes a Flax module, got {model!r}. For example: {example}.")
    check_batches("calibrate", batches)
    bound, calibration, count = adapter.bind(model, variables), ClipCalibration(), 0
    for batch in batches:
        count += 1
        inputs = batch if isinstance(batch, tuple) else (batch,)
        with observe_products(calibration.observe):
            adapter.run(bound, inputs, method, kwargs, calibration.hook)
    calibration.check(count)
    # The paths of modules with a weight.
    owners = {path.rpartition("/")[0] for path, leaf in adapter.list_parameters(bound).items() if len(leaf.shape) > 1}
    clips = {path: layer.clip(clip) for path, layer in calibration.layers.items() if path in owners}
    return {path: magnitude for path, magnitude in clips.items() if magnitude > 0}


T = TypeVar("T")


class _QuantizeOptions(TypedDict, total=False):
    clip: Clip
    input_clips: Mapping[str, Any] | None
    stacked: Collection[str]
    explanation: Any


@overload
def quantize(target: dict[str, Any], policy: PolicySpec, **options: Unpack[_QuantizeOptions]) -> dict[str, Any]: ...
@overload
def quantize(target: T, policy: PolicySpec, **options: Unpack[_QuantizeOptions]) -> T: ...
def quantize(
    target: Any,
    policy: PolicySpec,
    *,
    clip: Clip = "absmax",
    input_clips: Mapping[str, Any] | None = None,
    stacked: Collection[str] = (),
    explanation: Any = None,
) -> Any:
    """Quantizes the weights of a trained model, and returns the same kind of object.

    The result computes exactly the outputs of the floating model under the policy. `quantize` works under `jax.jit`
    too, and is abstract for the abstract arrays of `jax.eval_shape`.

    Args:
      target: linen variables or their `params`; or an nnx model, with or without a policy.
      policy: a policy or map with a quantization, in any spelling. Under a map, each module's weights get its own
        format; those whose policy has none stay unchanged. For linen variables, rules must be paths, because variables
        have no module types.
      clip: how the range of each weight is chosen, as for `quantize_array`.
      input_clips: magnitudes by module path to clip a layer's inputs to, from `calibrate`. They are ignored where
        inputs are not quantized, and required for `Int8(act_scale="static")` unless `target` is abstract.
      stacked: for variables: patterns of paths of modules whose weights have a leading axis of layers, as from
        `nn.scan` and `nn.vmap`. Each covers submodules too, and stands for one leading axis. Modules with a bias need
        no pattern.
      explanation: of the model with the policy and some inputs, from `explain`: then the weights that the model
        multiplies by in its own code are stored too. A weight whose row has no `layout` stays floating, such as one
        that is sliced, or joined with others, before it multiplies. Without an explanation, a linen `kernel` is stored
        like the kernel of a layer of Flax.

    Returns:
      Variables whose `kernel` and `embedding` leaves of two or more axes are `QuantizedArray`s, for
      `with_policy(model, policy).apply`; or a model with the policy. Weights with fewer elements than the `min_size` of
      their format stay unchanged.

    Raises:
      ValueError: the policy has no quantization; there is nothing to quantize; a weight is quantized already; its
        blocks cannot be split along explicit axes of a mesh; a rule for variables has a type as its key; a layer with
        `act_scale="static"` is missing in `input_clips`; `explanation` is of another model or policy; or `clip`,
        `input_clips` or `stacked` is not valid, or matches nothing.
      TypeError: `target` is neither, or `explanation` is not the result of `explain`.

    Warns:
      UserWarning: no module (for variables: none with parameters) gets its policy from a rule of the map; or the blocks
        of a sharded weight cannot be split over its devices, so that each has all of them.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> params = {"dense": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}}
    >>> jmp.quant.quantize(params, "int8_from_float32")["dense"]["kernel"]
    QuantizedArray(int8, shape=(64, 64), dtype=float32)
    """
    return apply_quantizer(target, Quantizer(get_policy(policy), clip, input_clips or {}, explanation), stacked)
