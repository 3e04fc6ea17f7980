"""Post-training quantization, weight by weight: of linen variables here, of nnx models through their adapter."""

from collections.abc import Collection, Mapping
from typing import Any, TypedDict, TypeVar, Unpack, overload

from ..policy import PolicySpec, get_policy
from ._numbers import Clip
from ._weights import Quantizer, apply_quantizer

T = TypeVar("T")


class _QuantizeOptions(TypedDict, total=False):
    clip: Clip
    input_clips: Mapping[str, Any] | None
    stacked: Collection[str]


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

    Returns:
      Variables whose `kernel` and `embedding` leaves of two or more axes are `QuantizedArray`s, for
      `with_policy(model, policy).apply`; or a model with the policy. Weights with fewer elements than the `min_size` of
      their format stay unchanged.

    Raises:
      ValueError: the policy has no quantization; there is nothing to quantize; a weight is quantized already; blocks do
        not divide it, or cannot be split along explicit axes of a mesh; a rule for variables has a type as its key; a
        layer with `act_scale="static"` is missing in `input_clips`; or `clip`, `input_clips` or `stacked` is not valid,
        or matches nothing.
      TypeError: `target` is neither.

    Warns:
      UserWarning: no module (for variables: none with parameters) gets its policy from a rule of the map; or the blocks
        of a sharded weight cannot be split over its devices, so that each has all of them.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> params = {"dense": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}}
    >>> jmp.quant.quantize(params, "int8_from_float32")["dense"]["kernel"]
    QuantizedArray(int8, shape=(64, 64), dtype=float32)
    """
    return apply_quantizer(target, Quantizer(get_policy(policy), clip, input_clips or {}), stacked)
