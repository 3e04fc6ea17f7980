"""Post-training quantization: of linen's variables here, of nnx models by their adapter."""

from collections.abc import Collection, Mapping
from typing import Any

import jax

from .._adapter import find_adapter
from .._flax_objects import is_flax_object
from .._get_policy import PolicySpec, get_policy
from ._clip import Clip
from ._quantize_variables import quantize_variables
from ._quantizer import Quantizer


def quantize(
    target: Any,
    policy: PolicySpec,
    *,
    clip: Clip = "absmax",
    input_clips: Mapping[str, Any] | None = None,
    stacked: Collection[str] = (),
) -> Any:
    """Quantizes the weights of a trained model, and returns the same kind of thing.

    What is returned computes the very numbers that the model under the policy computes from its floating weights. It
    runs inside of `jax.jit` as well, and on abstract arrays, as `jax.eval_shape` makes them, it is abstract.

    Args:
      target: linen variables, or their `params` alone; or an nnx model, with a policy or without.
      policy: a policy or map with a quantization, in any spelling; of a map, each module's weights get its own, and
        those whose policy has none stay as they are. Variables know the paths of their modules and not the types.
      clip: how the range of each weight is chosen, as of `quantize_array`.
      input_clips: from `calibrate`: by module path, the magnitude to clip a layer's inputs to. Layers whose inputs are
        not quantized have no use for theirs.
      stacked: for variables: patterns of the paths of modules whose weights have a leading axis of layers, as
        `nn.scan` and `nn.vmap` make them; each covers the modules inside as well, and adds one axis. Those with biases
        are known by these.

    Returns:
      Variables, whose leaves `kernel` and `embedding` of two or more axes are `QuantizedArray`s, for
      `with_policy(model, policy).apply`; or a model with the policy, which runs as it is. A weight that has fewer
      elements than the `min_size` of its format stays as it is.

    Raises:
      ValueError: the policy has no quantization; nothing is there to quantize; something is quantized already;
        blocks do not divide a weight; a rule for a type is to decide for variables; or `clip`, `input_clips` or
        `stacked` is not of its kind, or names nothing.
      TypeError: `target` is neither.

    Warns:
      A rule of the map decides for no module; of variables, for none that has parameters.

    >>> params = {"dense": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}}
    >>> quantize(params, "int8_from_float32")["dense"]["kernel"]
    QuantizedArray(int8, shape=(64, 64), dtype=float32)
    """
    quantizer = Quantizer(get_policy(policy), clip, input_clips or {})
    adapter = None if isinstance(target, type) else find_adapter(target)
    if adapter is not None and hasattr(adapter, "quantize"):
        if stacked:
            raise ValueError("stacked is for linen's variables: the layers of an nnx model tell which axes are theirs.")
        return adapter.quantize(target, quantizer)
    if isinstance(target, Mapping) and not _has_flax_objects(target):
        return quantize_variables(target, quantizer, stacked)
    raise TypeError(
        f"quantize takes linen variables or an nnx model, got {_kind(target)}. "
        "For example: quantize(model.init(key, x), 'int8_from_mixed_bfloat16')."
    )


def _has_flax_objects(tree: Any) -> bool:
    """Whether a mapping is the state of an nnx model, or has such a model in it."""
    return any(is_flax_object(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_flax_object))


def _kind(target: Any) -> str:
    return f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
