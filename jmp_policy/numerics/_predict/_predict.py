"""`numerics.predict`: which scopes would lose numbers under a policy, told from a run without it."""

import math
from collections.abc import Iterable

import numpy as np

from ..._base import describe, did_you_mean
from ...autocast._rewrite import check_policy, root_policy
from ...loss_scale import LossScale, get_loss_scale
from ...policy import Policy, PolicyMap, PolicySpec, get_policy
from .._stats import ObservedProgram, Stats, find_program
from ._diagnosis import diagnose
from ._prediction import Prediction
from ._trial import HALF

WAYS = ("autocast", "with_policy")
_EXAMPLE = "numerics.collect(jax.value_and_grad(loss_fn), where='all')(params, batch)"


def predict(
    stats: Stats, policy: PolicySpec, loss_scale: float | LossScale | None = None, *, by: str = "autocast"
) -> Prediction:
    """Tells which scopes would lose numbers under a policy, from one run without it, and what would save them.

    Collect a step in float32, with the gradient around the loss and no loss scale, and all operations measured, for the
    one format since that compiles quicker:

        observed = jax.jit(numerics.collect(jax.value_and_grad(loss_fn), ["float16"], where="all"))
        _, stats = observed(params, batch)
        prediction = numerics.predict(stats, "mixed_float16")

    The policy is tried on the program that was measured, by the rules that would write it: only what it would have in
    half precision can lose anything. A value overflows where its largest number is beyond the format, and underflows
    where an eighth of its root mean square would be lost. In a backward pass it is multiplied by the loss scale first.
    Scopes that overflow, or whose gradients no loss scale saves, go into `.policy_map` in float32; the policy is tried
    again with them there, since what leaves them is cast elsewhere then.

    What is not counted: masks, whose large numbers hide others; gradients that are nothing but float32's rounding;
    how numbers grow in later steps; the rounding of each operation, where no number is lost. A value that a collect of
    `"matmuls"` alone left out is not seen.

    Args:
      stats: of `collect`, in this process. In bfloat16 under a policy, they tell which values another half format
        would have as well.
      policy: anything that `get_policy` reads, with half precision or a quantized format anywhere.
      loss_scale: the scale to ask about, a number or a `LossScale`; 1 where there is none.
      by: how the policy would be given: `"autocast"`, or `"with_policy"` to the Flax modules of the program. Quantized
        policies are for the second one only.

    Returns:
      A `Prediction`: `.reasons`, `.policy_map`, `.loss_scale`, `.ranking`; a table when printed, and `.plot()`.

    Raises:
      TypeError: `stats` are no `Stats`, or hold no numbers yet.
      ValueError: the policy has float32 only; the stats have no rows, no backward pass where a loss scale is given, are
        of a program that this process has not traced, or tell nothing of a format; `by` is unknown.

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
    >>> prediction.culprits
    ('up',)
    >>> prediction.policy_map["up"].name, prediction.policy_map["down"].name
    ('float32', 'mixed_float16')
    """
    observed = _find_observed(stats)
    wanted = _read_policy(policy, by, observed)
    scale = 1.0 if loss_scale is None else _read_scale(loss_scale)
    if loss_scale is not None and not any(site.direction == "backward" for site in stats.layout.sites):
        raise ValueError(
            f"A loss scale was given, {loss_scale!r}, but these Stats have no rows of a backward pass. Collect the "
            f"gradient: {_EXAMPLE}."
        )
    return diagnose(stats, observed, wanted, by, scale, is_given=loss_scale is not None)


def _find_observed(stats: Stats) -> ObservedProgram:
    """The program that statistics are of, if they have numbers of it."""
    if not isinstance(stats, Stats):
        raise TypeError(f"predict takes Stats, got {describe(stats)}. For example: _, stats = {_EXAMPLE}.")
    if not any(row.times for row in stats.rows()):
        raise ValueError(
            f"These Stats have {'no rows' if not len(stats) else 'rows, of which none was measured'}, so that nothing "
            f"can be predicted. Measure a step: _, stats = {_EXAMPLE}."
        )
    observed = find_program(stats.layout)
    if observed is None:
        raise ValueError(
            "These Stats have rows, but not the program that they are of: this process has not traced it, as where "
            "they come from a file or a history. Collect where you predict, and add up steps with stats.merge: "
            f"_, stats = {_EXAMPLE}."
        )
    return observed


def _read_policy(policy: PolicySpec, by: str, observed: ObservedProgram) -> Policy | PolicyMap:
    """The policy that is asked about."""
    if by not in WAYS:
        raise ValueError(f"Unknown by={by!r}. {did_you_mean(by, WAYS)} For example: by='with_policy'.")
    wanted = get_policy(policy)
    if by == "autocast":
        check_policy(wanted)
    elif not observed.types:
        raise ValueError(
            "with_policy is for Flax modules, and the program of these Stats calls none; those of nnx must be among "
            "the arguments. For example: numerics.predict(stats, 'mixed_float16', by='autocast')."
        )
    if not any(own.compute_dtype in HALF or own.quantization is not None for own in _list_policies(wanted)):
        raise ValueError(
            f"The policy {str(wanted)!r} has nothing in half precision and nothing quantized, so that there is "
            "nothing to predict. For example: numerics.predict(stats, 'mixed_float16')."
        )
    return wanted


def _list_policies(policy: Policy | PolicyMap) -> Iterable[Policy]:
    rules = policy.rules if isinstance(policy, PolicyMap) else ()
    return [root_policy(policy), *(rule.policy for rule in rules)]


def _read_scale(loss_scale: float | LossScale) -> float:
    """The number of a loss scale."""
    number = loss_scale if isinstance(loss_scale, int | float | np.number) else get_loss_scale(loss_scale).loss_scale
    scale = float(number)
    if isinstance(loss_scale, bool) or not 0 < scale < math.inf:
        raise ValueError(f"loss_scale must be a positive finite number, got {loss_scale!r}. For example: 2.0**15.")
    return scale
