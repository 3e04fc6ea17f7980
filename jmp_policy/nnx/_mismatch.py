"""What happens to a Param that is not stored in the param dtype of its policy."""

from flax import nnx

from .._policy import Policy
from .._trees import cast_floating


def reject(path: str, param: nnx.Param, policy: Policy) -> None:
    """Refuses it: a policied module shares its Variables with the original, which no cast may change.

    Raises:
      ValueError: always.
    """
    raise ValueError(
        f"The parameter {path!r} is stored in {param.get_value().dtype}, but the policy '{policy.name}' stores "
        f"parameters in {policy.param_dtype}. Cast a copy first: "
        "with_policy(jmp_policy.nnx.cast_params(model, policy), policy)."
    )


def cast_in_place(path: str, param: nnx.Param, policy: Policy) -> None:
    """Rounds it, where it was just drawn in the dtype that the author of the module chose."""
    param.set_value(cast_floating(param.get_value(), policy.param_dtype))
