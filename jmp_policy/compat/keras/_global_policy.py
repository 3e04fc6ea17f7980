"""Keras's global policy, which is our default policy."""

from ..._base import quote
from ...policy import Policy as JmpPolicy, default_origin, default_policy, set_default_policy
from ._dtype_policy import DTypePolicy
from ._dtype_policy_map import DTypePolicyMap
from ._find_dtype_policy import convert_policy, parse_dtype_policy
from ._loss_scale import Policy


def dtype_policy() -> DTypePolicy:
    """Returns the global policy: `jmp_policy.default_policy()` as a dtype policy or map.

    It is the object that was set, here or by `jmp_policy.use_policy`, with its name, class and loss scale. A map that
    was changed since then is returned with its contents at that time.

    Raises:
      ValueError: the default policy is a `PolicyMap` with type keys, or quantizes to int8 with float16 compute, which
        Keras cannot express.

    >>> from jmp_policy.compat import keras
    >>> keras.dtype_policy()
    <DTypePolicy "float32">
    """
    current, origin = default_policy(), default_origin()
    if isinstance(origin, DTypePolicy):
        return origin
    if isinstance(current, JmpPolicy):
        return convert_policy(current)
    policies = DTypePolicyMap(current.default)
    for rule in current.rules:
        if not isinstance(rule.key, str):
            raise ValueError(
                f"The default policy has the module type {rule.key.__qualname__} as a key: {quote(current)}."
            )
        policies[rule.key] = rule.policy
    return policies


def set_dtype_policy(policy: DTypePolicy | str) -> None:
    """Sets the global policy, which is the default policy of `jmp_policy.set_default_policy`.

    It affects later calls of `with_policy` only.

    Args:
      policy: a dtype policy, a `DTypePolicyMap` (its current contents) or the name of a policy.

    Raises:
      ValueError: `policy` is none of these.

    >>> from jmp_policy.compat import keras
    >>> keras.set_dtype_policy("mixed_bfloat16")
    >>> keras.dtype_policy()
    <DTypePolicy "mixed_bfloat16">
    >>> keras.set_dtype_policy("float32")
    """
    if isinstance(policy, str):
        policy = parse_dtype_policy(policy)
    if not isinstance(policy, DTypePolicy):
        raise ValueError(
            "Invalid `policy` argument. Expected the string name of a policy (such as 'mixed_float16') or a "
            f"`DTypePolicy` instance. Received: policy={quote(policy)} (of type {type(policy)})"
        )
    set_default_policy(policy)


def set_policy(policy: DTypePolicy | str | None) -> None:
    """Like `set_dtype_policy`, but a name sets the legacy `Policy` with its loss scale, and `None` sets float32.

    >>> from jmp_policy.compat import keras
    >>> keras.set_policy("mixed_float16")
    >>> type(keras.global_policy().loss_scale).__name__
    'DynamicLossScale'
    >>> keras.set_policy(None)
    """
    if policy is None:
        set_dtype_policy("float32")
    else:
        set_dtype_policy(Policy(policy) if isinstance(policy, str) else policy)


global_policy = dtype_policy
set_global_policy = set_dtype_policy
