"""Keras's dtype policy of a name, or of a policy of ours: of whichever class it has in Keras."""

from ..._formats import Float8
from ..._policy import FROM, Policy as JmpPolicy
from ._dtype_policy import DTypePolicy, default_jmp_policy
from ._quantized_dtype_policy import FLOAT8, QuantizedDTypePolicy
from ._quantized_float8_dtype_policy import QuantizedFloat8DTypePolicy


def dtype_policy_named(name: str | None) -> DTypePolicy:
    """Keras's policy of a name, quantized if the name is; `None` stands for the global policy's.

    Raises:
      TypeError: `name` is no string.
      ValueError: `name` is the name of no policy.

    >>> dtype_policy_named("int4/64_from_bfloat16"), dtype_policy_named("float8_from_bfloat16")
    (<QuantizedDTypePolicy "int4/64_from_bfloat16">, <QuantizedFloat8DTypePolicy "float8_from_bfloat16">)
    """
    if name is None:
        return dtype_policy_like(default_jmp_policy())
    if not isinstance(name, str) or FROM not in name.lower():
        return DTypePolicy(name)
    at = name.lower().index(FROM)
    mode, source_name = name[:at], name[at + len(FROM) :]
    if mode.strip().lower() == FLOAT8:
        return QuantizedFloat8DTypePolicy(FLOAT8, source_name)
    return QuantizedDTypePolicy(mode, source_name)


def dtype_policy_like(policy: JmpPolicy) -> DTypePolicy:
    """Keras's policy that stands for a policy of ours, and for no other.

    Raises:
      ValueError: it quantizes to int8 what computes in float16, which Keras cannot express.

    >>> dtype_policy_like(jmp.get_policy("float8_from_bfloat16"))
    <QuantizedDTypePolicy "float8(recipe=delayed)_from_bfloat16">
    """
    format, source_name = policy.quantization, policy.replace(quantization=None).name
    if format is None:
        return DTypePolicy(source_name)
    if isinstance(format, Float8):
        like_keras = QuantizedFloat8DTypePolicy(FLOAT8, source_name, format.amax_history_length)
        if like_keras.__jmp_policy__() is policy:
            return like_keras
    # The bare name is Keras's, whose scales act a step later than ours.
    mode = str(format) if str(format) != FLOAT8 else f"{FLOAT8}(recipe=delayed)"
    return QuantizedDTypePolicy(mode, source_name)
