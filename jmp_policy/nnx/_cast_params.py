"""Parameters in the dtype that a policy stores them in."""

from typing import TypeVar

from flax import nnx

from .._get_policy import PolicySpec, get_policy
from ._adopt import adopt
from ._attachment import Attachment
from ._mismatch import cast_in_place

M = TypeVar("M", bound=nnx.Module)


def cast_params(model: M, policy: PolicySpec) -> M:
    """Copies a model, with its Params in the param dtype of a policy.

    `with_policy` shares the Variables of an instance, and so refuses one whose Params have another dtype; it takes
    this copy. Batch statistics, caches, RNG states and other Variables keep their dtypes. The model itself stays as
    it is, and shares nothing with the copy.

    Args:
      model: an nnx module.
      policy: anything that `get_policy` reads; of a map, each Param gets the dtype of the policy that covers it.

    Returns:
      A model of the same structure. It has no policy yet.

    >>> from flax import nnx
    >>> model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    >>> half = jmp.nnx.cast_params(model, "bfloat16")
    >>> half.scale.dtype, half.mean.dtype, model.scale.dtype
    (dtype(bfloat16), dtype('float32'), dtype('float32'))
    """
    copy = nnx.clone(model)
    # Attaching the policy tells which one covers a Param; what it was attached to shares the Params with the copy.
    Attachment(get_policy(policy), cast_in_place, adopt).attach(copy)
    return copy
