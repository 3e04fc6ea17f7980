"""Calibration: where to clip the inputs of layers, from what integer products saw."""

import contextvars
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .._base import Args, Kwargs, PyTree, warn_user
from ..modules import Method, ModuleCall, find_adapter
from ._numbers import Clip, check_clip, measure_amax, quantize_symmetric

# No context of JAX's, part of the key of every jit cache: each calibration would compile all operations anew.
_CALIBRATION: "contextvars.ContextVar[Calibration | None]" = contextvars.ContextVar("_CALIBRATION", default=None)


class Calibration:
    """What was seen of the inputs of each layer, over all batches.

    Attributes:
      layers: by path, the statistics of the layers whose inputs had numbers.
    """

    def __init__(self) -> None:
        self.layers: dict[str, InputStatistics] = {}
        self._traced: dict[str, None] = {}
        self._path = ""

    def run(self, call: Callable[[], Any]) -> None:
        """Calls a model with a batch, one operation after the other, and looks at what enters its products.

        Without `jit` the body of a scan, too, is called with numbers, once for each turn.
        """
        token = _CALIBRATION.set(self)
        try:
            with jax.disable_jit():
                call()
        finally:
            _CALIBRATION.reset(token)

    def hook(self, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a method of a module, whose own products are told of under its path."""
        outer, self._path = self._path, call.path
        try:
            return next_fun(*args, **kwargs)
        finally:
            self._path = outer

    def add(self, x: jax.Array, axes: tuple[int, ...]) -> None:
        """Takes the input of a product into account."""
        if isinstance(x, Tracer):
            self._traced[self._path] = None
        elif x.size:
            self.layers.setdefault(self._path, InputStatistics(self._path)).add(x, axes)

    @property
    def unseen(self) -> list[str]:
        """The layers whose inputs never had numbers."""
        return [path for path in self._traced if path not in self.layers]


def observe_input(x: jax.Array, axes: tuple[int, ...]) -> None:
    """Tells the calibration that is being made, if there is one, what enters a product.

    Args:
      x: the left operand of an integer product.
      axes: those that are summed over, which share a scale.
    """
    calibration = _CALIBRATION.get()
    if calibration is not None:
        calibration.add(x, axes)


# Magnitudes are counted by the upper half of their float32 bits, sign excepted: by exponent and 7 bits of the mantissa.
# The bins are less than 1 % wide at any magnitude, so that no range has to be known before the first batch, or to be
# stretched after it, as with the 2048 equal bins of TensorRT's calibration.
_BINS = 2**15
_SHIFT = 16

_PER_OCTAVE = 8
_OCTAVES = 6
"""The clips that are tried: powers of two and 7 between each pair of them, down to a 64th of a batch's peak."""


class InputStatistics:
    """The magnitudes of a layer's inputs, and how much clipping them costs and saves.

    Args:
      path: of the layer, for error messages.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._peak = 0.0
        self._counts = np.zeros(_BINS, np.int64)
        self._saved: dict[int, float] = {}  # by power: the square error without a clip, minus that with it
        self._lowest = -(2**31)  # the least power that was tried on every batch

    def add(self, x: jax.Array, axes: tuple[int, ...]) -> None:
        """Takes a batch into account.

        Args:
          x: floating, the input of a product.
          axes: those that share a scale.

        Raises:
          ValueError: a number is not finite.
        """
        with jax.disable_jit(False):
            batch_peak, counts = _measure(x)
            top = float(batch_peak)
            if not np.isfinite(top):
                raise ValueError(
                    f"The inputs of the layer {self._path!r} are not all finite, which no clip can mend. "
                    "Leave such batches out. For example: [x for x in batches if np.isfinite(x).all()]."
                )
            self._counts += np.asarray(counts)
            self._peak = max(self._peak, top)
            if top > 0:
                self._try_clips(x, axes, top)

    def clip(self, clip: Clip) -> float:
        """The magnitude to clip inputs to; 0, if all of them were.

        Args:
          clip: `"absmax"`, `"mse"`, or a percentile.
        """
        match clip:
            case "absmax":
                return self._peak
            case "mse":
                return self._find_best()
            case percentile:
                return self._percentile(percentile)

    def _percentile(self, percentile: float) -> float:
        """The least magnitude that this part of the inputs do not exceed, to the width of a bin."""
        reached = np.cumsum(self._counts) >= np.ceil(self._counts.sum() * percentile / 100)
        edge = np.uint32((np.argmax(reached) + 1) << _SHIFT).view(np.float32)
        return float(min(self._peak, edge)) if not reached[0] else 0.0

    def _find_best(self) -> float:
        tried = {power: saved for power, saved in self._saved.items() if power >= self._lowest}
        power = max(tried, key=lambda power: tried[power], default=None)
        return self._peak if power is None or tried[power] <= 0 else float(_clips(power))

    def _try_clips(self, x: jax.Array, axes: tuple[int, ...], top: float) -> None:
        first = int(np.ceil(np.log2(top) * _PER_OCTAVE))  # from here on nothing of this batch is clipped
        powers = np.arange(first - _PER_OCTAVE * _OCTAVES, first)
        for power, saved in zip(powers, np.asarray(_measure_savings(x, axes, _clips(powers))), strict=True):
            self._saved[int(power)] = self._saved.get(int(power), 0.0) + float(saved)
        self._lowest = max(self._lowest, int(powers[0]))


def _clips(powers: np.ndarray | int) -> np.ndarray:
    return np.exp2(np.asarray(powers) / _PER_OCTAVE).astype(np.float32)


@jax.jit
def _measure(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    magnitudes = jnp.abs(x.astype(jnp.float32)).ravel()
    bins = lax.bitcast_convert_type(magnitudes, jnp.uint32) >> _SHIFT
    return measure_amax(magnitudes), jnp.zeros(_BINS, jnp.int32).at[bins].add(1)


@functools.partial(jax.jit, static_argnums=1)
def _measure_savings(x: jax.Array, axes: tuple[int, ...], clips: jax.Array) -> jax.Array:
    """How much less the square error of rounding to 8 bits is with each clip than without, as products round."""
    amax = measure_amax(x, axes)
    wide = x.astype(jnp.float32)

    def error(clip: jax.Array) -> jax.Array:
        values, scale, _ = quantize_symmetric(wide, jnp.minimum(amax, clip))
        return jnp.sum((values.astype(jnp.float32) * scale - wide) ** 2)

    return error(jnp.float32(np.inf)) - lax.map(error, clips)


def calibrate(
    model: Any,
    batches: Iterable[Any],
    *,
    variables: PyTree = None,
    method: Method = None,
    clip: Clip = "mse",
    **kwargs: Any,
) -> dict[str, float]:
    """Runs a model on some data, and chooses the magnitude to clip the inputs of each layer to.

    It is for integers: in formats of blocks an outlier spoils its own block alone, and nothing is clipped. Under a
    policy such as `"int8_from_mixed_bfloat16"` a layer quantizes each row of its inputs by the largest
    magnitude in it. Where that is an outlier the others lose most of their 8 bits; `quantize` with what is returned
    here clips it. The model runs as it will be served, by the policy it has, and one operation after the other, so
    that the layers of a scan are seen as well: they share a magnitude.

    Args:
      model: a linen module or an nnx model, with a policy that quantizes inputs to integers. It stays as it is.
      batches: what to call it with, one after the other: a tuple of positional arguments, or the only one.
      variables: of a linen module; `None`, if it is bound.
      method: what to call instead of the module itself, as for `explain`.
      clip: how the magnitude is chosen: a percentile in (0, 100] of all magnitudes, to less than 1 % of it; `"mse"`,
        the one of the least mean square error of the inputs as they are rounded, which is next to the largest where
        rows have a few thousand numbers or fewer; `"absmax"`, the largest that was seen.
      **kwargs: other arguments of each call; of `apply`, for linen.

    Returns:
      By module path, the magnitude, for `quantize(..., input_clips=...)`. Left out are layers whose inputs are not
      quantized to integers or were all zero, and layers without a weight of their own, such as a head that is tied to a
      table.

    Raises:
      TypeError: `model` is not a Flax module.
      ValueError: no layer quantizes its inputs to integers; they are not finite; `batches` is empty; or `clip` is not
        valid.

    Warns:
      UserWarning: layers' inputs have no numbers, because they run inside of `vmap` or `remat`.

    Source: Wu et al., Integer Quantization for Deep Learning Inference, 2020, section 3.3 (max, entropy and percentile
    calibration).

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = jmp.with_policy(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "int8_from_float32")
    >>> clips = jmp.quant.calibrate(model, [jnp.linspace(-3, 2, 64)[None]], clip="absmax")
    >>> clips, jmp.quant.quantize(model, "int8_from_float32", input_clips=clips).kernel[...].input_clip
    ({'': 3.0}, Array(3., dtype=float32))
    """
    check_clip(clip)
    adapter = None if isinstance(model, type) else find_adapter(model)
    if adapter is None:
        raise TypeError(
            f"calibrate takes a Flax module, got {model!r}. "
            "For example: calibrate(with_policy(Net(), 'int8_from_float32'), batches, variables=variables)."
        )
    bound, calibration, count = adapter.bind(model, variables), Calibration(), 0
    for batch in batches:
        count += 1
        inputs = batch if isinstance(batch, tuple) else (batch,)
        calibration.run(functools.partial(adapter.run, bound, inputs, method, kwargs, calibration.hook))
    _check(calibration, count)
    weights = adapter.find_weights(bound)
    clips = {path: layer.clip(clip) for path, layer in calibration.layers.items() if path in weights}
    return {path: magnitude for path, magnitude in clips.items() if magnitude > 0}


def _check(calibration: Calibration, count: int) -> None:
    if count == 0:
        raise ValueError("calibrate was given no batches. For example: calibrate(model, [x], variables=variables).")
    if calibration.unseen:
        named = ", ".join(map(repr, calibration.unseen))
        message = f"calibrate saw no numbers enter {named}, inside of vmap or remat: these inputs are not clipped"
        warn_user(message)
    elif not calibration.layers:
        raise ValueError(
            "No layer that was called quantizes its inputs to integers. Give the model a policy under which they do. "
            "For example: with_policy(model, 'int8_from_float32')."
        )
