"""`numerics.predict`: predicts from a run without a policy which scopes would lose values under it."""

import math

import numpy as np

from ..._base import describe, did_you_mean
from ...autocast._rewrite import check_policy
from ...loss_scale import LossScale, get_loss_scale
from ...policy import Policy, PolicyMap, PolicySpec, get_policy, list_policies
from .._stats import ObservedProgram, Stats, find_program
from ._diagnosis import diagnose
from ._prediction import Prediction
from ._trial import HALF

WAYS = ("autocast", "with_policy")
_EXAMPLE = "numerics.collect(jax.value_and_grad(loss_fn), where='all')(params, batch)"


def predict(
    stats: Stats, policy: PolicySpec, loss_scale: float | LossScale | None = None, *, by: str = "autocast"
) -> Prediction:
    """Predicts which scopes would overflow or underflow under a policy, from one measured run without it.

    Measure a float32 step with the gradient of the unscaled loss and all ops, as in the example; `["float16"]` as the
    formats of `collect` compiles faster.

    Applies the policy's casting rules to the measured program and checks the values that would be in half precision. A
    value overflows if its largest magnitude exceeds the format's, and underflows if its relative error exceeds 1/8.
    Values of the backward pass are first multiplied by the loss scale. `.policy_map` keeps scopes in float32 if they
    overflow or if no loss scale saves their gradients. The check is repeated with that map, because it moves casts to
    other scopes.

    Not counted: masks, whose large constants hide other values; gradients that are only float32 rounding error; growth
    in later steps; the rounding error of each op; values that `collect` did not measure (`where="matmuls"`).

    Args:
      stats: the `Stats` of `collect`, in the process that traced it. Stats of a bfloat16 run under a policy predict
        another half-precision format for the same values.
      policy: any spec of `get_policy` with half precision or a quantized format.
      loss_scale: the loss scale to check, a number or a `LossScale`; 1 if `None`.
      by: `"autocast"`, or `"with_policy"` for the Flax modules of the program. Quantized policies need the latter.

    Returns:
      A `Prediction`, with `.reasons`, `.policy_map`, `.loss_scale`, `.ranking` and `.plot()`. Prints as a table.

    Raises:
      TypeError: `stats` is not a `Stats`, or is traced.
      ValueError: the policy has only float32; the stats have no rows, no backward pass for a given loss scale, no
        traced program in this process, or no measurement of a format; `by` is unknown.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2, chose scales from such histograms.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def loss(w, x):
    ...     with jax.named_scope("up"):
    ...         x = (x @ w) * 3e4
    ...     with jax.named_scope("down"):
    ...         return jnp.mean((x / 3e4) @ w)
    >>> observed = jax.jit(jmp.numerics.collect(jax.value_and_grad(loss), where="all"))
    >>> _, stats = observed(jnp.ones((4, 4)), jnp.ones((2, 4)))
    >>> prediction = jmp.numerics.predict(stats, "mixed_float16")
    >>> prediction.culprits, prediction.policy_map["down"].name
    (('up',), 'mixed_float16')
    """
    observed = _find_observed(stats)
    wanted = _read_policy(policy, by, observed)
    scale = 1.0 if loss_scale is None else _read_scale(loss_scale)
    if loss_scale is not None and not any(site.direction == "backward" for site in stats.layout.sites):
        raise ValueError(
            f"A loss scale was given, {loss_scale!r}, but these Stats have no rows of a backward pass. Measure the "
            f"gradient. For example: {_EXAMPLE}."
        )
    return diagnose(stats, observed, wanted, by, scale, is_given=loss_scale is not None)


def _find_observed(stats: Stats) -> ObservedProgram:
    if not isinstance(stats, Stats):
        raise TypeError(f"predict takes Stats, got {describe(stats)}. For example: _, stats = {_EXAMPLE}.")
    if not any(row.times for row in stats.rows()):
        raise ValueError(
            f"These Stats have {'rows without measurements' if len(stats) else 'no rows'}. Measure a step. "
            f"For example: _, stats = {_EXAMPLE}."
        )
    observed = find_program(stats.layout)
    if observed is None:
        raise ValueError(
            "The program of these Stats was not traced in this process, as for Stats from a file or a history. Run "
            "collect and predict in one process, and combine steps with stats.merge. For example: "
            f"_, stats = {_EXAMPLE}."
        )
    return observed


def _read_policy(policy: PolicySpec, by: str, observed: ObservedProgram) -> Policy | PolicyMap:
    if by not in WAYS:
        raise ValueError(f"Unknown by={by!r}. {did_you_mean(by, WAYS)} For example: by='with_policy'.")
    wanted = get_policy(policy)
    if by == "autocast":
        check_policy(wanted)
    elif not observed.types:
        raise ValueError(
            "with_policy is for Flax modules, but the program of these Stats calls none. nnx modules must be arguments "
            "of the function. For example: numerics.predict(stats, 'mixed_float16', by='autocast')."
        )
    if not any(own.compute_dtype in HALF or own.quantization is not None for own in list_policies(wanted)):
        raise ValueError(
            f"The policy {str(wanted)!r} has neither half precision nor a quantized format, so there is nothing to "
            "predict. For example: numerics.predict(stats, 'mixed_float16')."
        )
    return wanted


def _read_scale(loss_scale: float | LossScale) -> float:
    is_number = isinstance(loss_scale, int | float | np.number)
    scale = float(loss_scale if is_number else get_loss_scale(loss_scale).loss_scale)
    if isinstance(loss_scale, bool) or not 0 < scale < math.inf:
        raise ValueError(f"loss_scale must be a positive finite number, got {loss_scale!r}. For example: 2.0**15.")
    return scale
