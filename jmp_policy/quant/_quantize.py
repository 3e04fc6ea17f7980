"""Post-training quantization: of linen's variables here, of nnx models by their adapter."""

from collections.abc import Collection, Mapping
from typing import Any

from .._boundary import adapter_of
from .._get_policy import PolicySpec, get_policy
from ._clip import Clip, checked
from ._quantize_variables import quantize_variables


def quantize(
    target: Any,
    policy: PolicySpec,
    *,
    clip: Clip = "absmax",
    input_clips: Mapping[str, Any] | None = None,
    stacked: Collection[str] = (),
) -> Any:
    """Quantizes the weights of a trained model, and returns the same kind of thing.

    Args:
      target: linen variables, or their `params` alone; or an nnx model.
      policy: a policy or map with a quantization, in any spelling; of a map, each module's weights get its own, and
        those whose policy has none stay as they are.
      clip: how the range of each weight is chosen, as of `quantize_array`.
      input_clips: from `calibrate`: by module path, the magnitude to clip a layer's inputs to.
      stacked: for variables: patterns of the paths of modules whose weights have a leading axis of layers, as
        `nn.scan` and `nn.vmap` make them. Those with biases are known by these.

    Returns:
      Variables, whose leaves `kernel` and `embedding` of two or more axes are `QuantizedArray`s, for
      `with_policy(model, policy).apply`; or a model with the policy, which runs as it is.

    Raises:
      ValueError: the policy has no quantization; nothing is there to quantize; something is quantized already; or
        blocks do not divide a weight.
      TypeError: `target` is neither.

    >>> params = {"dense": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}}
    >>> quantize(params, "int8_from_float32")["dense"]["kernel"]
    QuantizedArray(int8, shape=(64, 64), dtype=float32)
    """
    given = get_policy(policy)
    checked(clip)
    adapter = adapter_of(target)
    if adapter is not None and hasattr(adapter, "quantize"):
        return adapter.quantize(target, given, clip, input_clips or {})
    if isinstance(target, Mapping):
        return quantize_variables(target, given, clip, input_clips or {}, stacked)
    raise TypeError(
        f"quantize takes linen variables or an nnx model, got a {type(target).__name__}. "
        "For example: quantize(model.init(key, x), 'int8_from_mixed_bfloat16')."
    )
