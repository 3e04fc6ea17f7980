"""`numerics.predict`: predicts from a run without a policy which scopes would lose values under it."""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .._base import describe, did_you_mean, group_by_key, list_paths_to
from .._jaxpr import MATMULS, make_module_finder
from ..autocast import check_policy, is_mixed, root_policy
from ..loss_scale import LossScale, get_loss_scale
from ..policy import Key, Policy, PolicyMap, PolicySpec, check_policy_x64, get_policy, list_policies, parse_format
from ._predict_flow import NarrowValue, find_noise, list_narrow_values, list_operations, list_quantized_values
from ._predict_losses import (
    Loss,
    ScaleChoice,
    choose_scale,
    find_loss,
    find_masked,
    find_overflow,
    find_scaled_loss,
    find_span,
)
from ._predict_trial import try_policy
from ._prediction import Prediction, Reason, SpanBar, spell_scale
from ._stats import Stats
from ._stats_choice import ObservedProgram, find_program
from ._stats_row import Row

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

    A constant of the program that the format cannot hold is reported too. Not counted: masks, large negative constants
    that are added or selected and that only a softmax, a maximum or a comparison reads; gradients that are only
    rounding error; growth in later steps; the rounding error of each op; values that `collect` did not measure
    (`where="matmuls"`).

    Args:
      stats: the `Stats` of `collect`, in the process that traced it. Stats of a bfloat16 run under a policy predict
        another half-precision format for the same values.
      policy: any spec of `get_policy` with half precision or a quantized format, or with float64 parameters that
        computes in float32. For that, measure `["float32"]` of a float64 program.
      loss_scale: the loss scale to check, a number or a `LossScale`; 1 if `None`.
      by: `"autocast"`, or `"with_policy"` for the Flax modules of the program. Quantized policies need the latter.

    Returns:
      A `Prediction`, with `.reasons`, `.policy_map`, `.loss_scale`, `.ranking` and `.plot()`. Prints as a table.

    Raises:
      TypeError: `stats` is not a `Stats`, or is traced.
      ValueError: the policy has only its full dtype; the stats have no rows, no backward pass for a given loss scale,
        no traced program in this process, or no measurement of a format; `by` is unknown.

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
    scale = 1.0 if loss_scale is None else _check_loss_scale(loss_scale)
    if loss_scale is not None and not any(site.direction == "backward" for site in stats.layout.sites):
        raise ValueError(
            f"A loss scale was given, {loss_scale!r}, but these Stats have no rows of a backward pass. Measure the "
            f"gradient. For example: {_EXAMPLE}."
        )
    return _diagnose(stats, observed, wanted, by, scale, is_given=loss_scale is not None)


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
    for each in list_policies(wanted):
        check_policy_x64(each)
    if by == "autocast":
        check_policy(wanted)
    elif not observed.types:
        raise ValueError(
            "with_policy is for Flax modules, but the program of these Stats calls none. nnx modules must be arguments "
            "of the function. For example: numerics.predict(stats, 'mixed_float16', by='autocast')."
        )
    if not is_mixed(*list_policies(wanted)) and not any(own.quantization for own in list_policies(wanted)):
        raise ValueError(
            f"The policy {str(wanted)!r} has neither a narrower compute dtype nor a quantized format, so there is "
            "nothing to predict. For example: numerics.predict(stats, 'mixed_float16')."
        )
    return wanted


def _check_loss_scale(loss_scale: float | LossScale) -> float:
    is_number = isinstance(loss_scale, int | float | np.number)
    scale = float(loss_scale if is_number else get_loss_scale(loss_scale).loss_scale)
    if isinstance(loss_scale, bool) or not 0 < scale < math.inf:
        raise ValueError(f"loss_scale must be a positive finite number, got {loss_scale!r}. For example: 2.0**15.")
    return scale


MOST_ROUNDS = 16
"""Maximum number of rounds that move scopes to float32. Outputs of such a scope may overflow in the next scope."""


def _diagnose(
    stats: Stats, observed: ObservedProgram, policy: Policy | PolicyMap, by: str, scale: float, *, is_given: bool
) -> Prediction:
    """Predicts the losses under a policy. `scale` is rounded to a power of two; `is_given` if the user set it."""
    trial = _TrialRun(stats, observed, policy, by)
    exponent = round(math.log2(scale))
    values = trial.list_values(policy)
    losses = {value: trial.find_loss(value, exponent) for value in values}
    culprits, choice, later = _find_repair(trial, values, policy, exponent if is_given else None)
    losses |= {value: loss for value, loss in later.items() if value not in losses or not losses[value].what}
    has_scale = any(map(trial.is_scaled, values))
    kept = scale if is_given and choice.exponent == exponent else math.ldexp(1.0, choice.exponent)
    reasons = _list_reasons(losses, trial.rows, culprits, str(root_policy(policy).full_dtype))
    return Prediction(
        reasons=reasons,
        policy_map=keep_full(culprits, policy, trial.paths),
        loss_scale=kept if has_scale else None,
        policy=policy,
        asked_scale=scale,
        by=by,
        risks=_rank_scopes(losses),
        notes=tuple(_list_notes(trial, values, reasons, culprits, choice.exponent if has_scale else None)),
        spans=tuple(_list_spans(losses, trial.rows, exponent, culprits)),
    )


def _find_repair(
    trial: "_TrialRun", values: Sequence[NarrowValue], policy: Policy | PolicyMap, given: int | None
) -> tuple[tuple[str, ...], ScaleChoice, dict[NarrowValue, Loss]]:
    """Returns scopes to keep in float32, each of which changes the casts of others, a loss scale, and their losses."""
    culprits: dict[str, None] = {}
    later: dict[NarrowValue, Loss] = {}
    scale = trial.choose_scale(values, given)
    for _ in range(MOST_ROUNDS):
        lost = [value.path for value in values if not trial.is_scaled(value) and trial.find_loss(value, 0).what]
        new = [path for path in (*lost, *scale.unsaved) if path not in culprits]
        if not new:
            break
        culprits |= dict.fromkeys(new)
        losses = {value: trial.find_loss(value, scale.exponent) for value in values if value.path in new}
        later |= {value: loss for value, loss in losses.items() if loss.what}
        values = trial.list_values(keep_full(culprits, policy, trial.paths))
        scale = trial.choose_scale(values, given)
    return tuple(culprits), scale, later


class _TrialRun:
    """A measured program to try policies on."""

    def __init__(self, stats: Stats, observed: ObservedProgram, policy: Policy | PolicyMap, by: str):
        self.rows = stats.rows()
        self.policy, self._observed, self._by = policy, observed, by
        self._operations = list_operations(observed)
        # The paths for rules of a map. `with_policy` only knows paths of modules.
        types = observed.list_types() if by == "with_policy" else {}
        find_module = make_module_finder(types)
        around = lambda path: reversed(list_paths_to(find_module(path)))
        find_place = lambda path: next((outer for outer in around(path) if outer in types), path)
        self._places = {path: find_place(path) for path in dict.fromkeys(each.path for each in self._operations)}
        self.paths = tuple(dict.fromkeys(self._places.values()))
        self._noise = find_noise(self._operations, self.rows)
        largest = {name: parse_format(name).max for name in ("float16", "bfloat16", "float32")}
        self._masked = {
            name: find_masked(observed, self.rows, largest[name], clamps=by == "autocast") for name in largest
        }
        self.find_span = functools.cache(lambda row, format: find_span(self.rows[row], format))
        self.is_of_modules = by == "autocast" and bool(observed.types)

    def list_values(self, policy: Policy | PolicyMap) -> list[NarrowValue]:
        """Lists values in half precision or quantized formats. Leaves out zeros and rounding noise."""
        written = try_policy(self._observed, policy, self._by)
        found = list_narrow_values(self._operations, written, self.rows)
        if self._by == "with_policy":
            found += list_quantized_values(self._operations, self._observed, self.rows, policy)
        found = [value._replace(path=self._places[value.path]) for value in found]
        is_signal = lambda value: self.rows[value.row].amax and value.row not in self._noise
        return [value for value in dict.fromkeys(found) if value.constant or is_signal(value)]

    def list_broken(self) -> list[Row]:
        """Lists rows with nan. Leaves out constants, such as the nan that the `where` of `jnp.var` does not select."""
        made = (operation.makes for operation in self._operations if operation.is_constant)
        constants = {index for makes in made for indices in makes for index in indices}
        return [row for index, row in enumerate(self.rows) if row.nans and index not in constants]

    def find_loss(self, value: NarrowValue, exponent: int) -> Loss:
        """Predicts the loss of a value with a loss scale of `2**exponent`."""
        row = self.rows[value.row]
        if value.is_scaled:
            return find_scaled_loss(row, value.format)
        if value.constant:
            loss = find_overflow(value.constant, value.format)
        else:
            loss = find_loss(row, value.format, exponent if self.is_scaled(value) else 0)
        if loss.what == "overflow" and value.row in self._masked[value.format]:
            return Loss("", 0.0, loss.amax, loss.limit, 0.0)
        return loss

    def is_scaled(self, value: NarrowValue) -> bool:
        """True if the value is multiplied by the loss scale."""
        return value.direction == "backward" and self.rows[value.row].direction == "backward" and not value.is_scaled

    def choose_scale(self, values: Sequence[NarrowValue], given: int | None) -> ScaleChoice:
        scaled = [value for value in values if self.is_scaled(value)]
        spans = group_by_key((value.path, self.find_span(value.row, value.format)) for value in scaled)
        return choose_scale(spans, given, list({value.format for value in scaled}))


def keep_full(culprits: Iterable[str], policy: Policy | PolicyMap, paths: Sequence[str]) -> PolicyMap:
    """Makes a map with the full dtype for some scopes and all inside. Children of the root then get rules first."""
    named, full = set(culprits), str(root_policy(policy).full_dtype)
    # A rule also covers inner scopes, so a rule for one of those would have no effect.
    wide = [path for path in culprits if named.isdisjoint(list_paths_to(path)[1:-1])]
    rules: list[tuple[Key, Policy | str]] = [(re.escape(path), full) for path in wide if path]
    old = [(rule.key, rule.policy) for rule in policy.rules] if isinstance(policy, PolicyMap) else []
    if "" in wide:
        tops = dict.fromkeys(path.partition("/")[0] for path in paths if path)
        default = root_policy(policy)
        rest = [(re.escape(top), default) for top in tops if top not in wide]
        return PolicyMap([*rules, *old, *rest, ("", full)], default)
    return PolicyMap([*rules, *old], policy.default if isinstance(policy, PolicyMap) else policy)


def _list_reasons(
    losses: Mapping[NarrowValue, Loss], rows: Sequence[Row], culprits: Sequence[str], full: str
) -> tuple[Reason, ...]:
    """Lists the worst value of each scope, pass and kind of fault. Scopes that need the full dtype come first."""
    worst: dict[tuple[str, str, str], tuple[NarrowValue, Loss]] = {}
    for value, loss in losses.items():
        key = value.path, value.direction, loss.what
        if loss.what and (key not in worst or loss.risk > worst[key][1].risk):
            worst[key] = value, loss
    made = [
        Reason(
            path=value.path,
            direction=value.direction,
            format=value.format,
            primitive=value.primitive,
            is_operand=value.is_cast,
            source=rows[value.row].source or rows[value.row].path,
            cure=full if value.path in culprits else "loss_scale",
            **loss._asdict(),
        )
        for value, loss in worst.values()
    ]
    return tuple(sorted(made, key=lambda reason: (reason.cure == "loss_scale", -reason.risk)))


def _rank_scopes(losses: Mapping[NarrowValue, Loss]) -> dict[str, float]:
    risks: dict[str, float] = {}
    for value, loss in losses.items():
        risks[value.path] = max(loss.risk, risks.get(value.path, 0.0))
    return dict(sorted(risks.items(), key=lambda item: -item[1]))


def _list_spans(
    losses: Mapping[NarrowValue, Loss], rows: Sequence[Row], exponent: int, culprits: Sequence[str]
) -> list[SpanBar]:
    """Lists one bar per scope and pass, the worst scopes first."""
    bars: dict[tuple[str, str], SpanBar] = {}
    measured = ((value, loss) for value, loss in losses.items() if not value.constant)
    for value, loss in measured:
        row, shift = rows[value.row], exponent if value.direction == "backward" else 0
        relevant = min(row.amax, max(row.min_nonzero or row.amax, row.rms / 64))  # smaller magnitudes do not matter
        least, most = (math.log2(size) + shift for size in (relevant, row.amax))
        key = value.path, value.direction
        old = bars.get(key, SpanBar(*key, value.format, least, most, False))
        is_lost = old.is_lost or bool(loss.what)
        ends = {"least": min(old.least, least), "most": max(old.most, most)}
        bars[key] = old._replace(**ends, is_lost=is_lost, is_saved=is_lost and value.path not in culprits)
    order = list(_rank_scopes(losses))
    return sorted(bars.values(), key=lambda bar: order.index(bar.path))


def _list_notes(
    trial: _TrialRun,
    values: Sequence[NarrowValue],
    reasons: Sequence[Reason],
    culprits: Sequence[str],
    exponent: int | None,
) -> Iterable[str]:
    if exponent is not None:
        yield _describe_scale(trial, values, reasons, spell_scale(math.ldexp(1.0, exponent)))
    elif not any(row.direction == "backward" and row.times for row in trial.rows):
        yield "No backward pass was measured: use collect(jax.value_and_grad(loss_fn), where='all')."
    if culprits:
        names = ", ".join(path or "(no scope)" for path in culprits)
        yield f"In {root_policy(trial.policy).full_dtype} by .policy_map: {names}."
    if trial.is_of_modules:
        yield "The program calls Flax modules. If with_policy will apply the policy, use by='with_policy'."
    if all(row.primitive in ("", *MATMULS) for row in trial.rows):
        yield "Only matmuls were measured: collect(..., where='all') measures all ops."
    broken = trial.list_broken()
    if broken:
        yield f"{len(broken)} rows have nan without the policy, the first in {broken[0].path or '(no scope)'}."


def _describe_scale(trial: _TrialRun, values: Sequence[NarrowValue], reasons: Sequence[Reason], scale: str) -> str:
    scaled = [value for value in values if trial.is_scaled(value)]
    if scaled and trial.choose_scale(values, None).unsaved:
        first = max(scaled, key=lambda value: trial.find_span(value.row, value.format)[0])
        last = min(scaled, key=lambda value: trial.find_span(value.row, value.format)[1])
        return (
            f"No loss scale saves all gradients: the smallest relevant ones, in {first.path or '(no scope)'}, and the "
            f"largest, in {last.path or '(no scope)'}, do not both fit in {first.format}. Use {scale} with the map."
        )
    is_cure = any(reason.cure == "loss_scale" for reason in reasons)
    return f"A loss scale of {scale} saves the gradients." if is_cure else f"Loss scale: {scale}."
