"""Finds values that a policy would lose, and the scopes and loss scale that save them."""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from ..._base import list_paths_to
from ..._jaxpr import MATMULS
from ...autocast._rewrite import root_policy
from ...policy import Key, Policy, PolicyMap
from .._stats import ObservedProgram, Row, Stats
from ._flow import NarrowValue, find_masked, find_noise, list_narrow_values, list_operations, list_quantized_values
from ._losses import Loss, ScaleChoice, choose_scale, find_loss, find_scaled_loss, find_span, parse_float_format
from ._prediction import Prediction, Reason, SpanBar, spell_scale
from ._trial import try_policy

MOST_ROUNDS = 16
"""Maximum number of rounds that move scopes to float32. Outputs of such a scope may overflow in the next scope."""


def diagnose(
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
    reasons = _list_reasons(losses, trial.rows, culprits)
    return Prediction(
        reasons=reasons,
        policy_map=make_map(culprits, policy, trial.paths),
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
        values = trial.list_values(make_map(culprits, policy, trial.paths))
        scale = trial.choose_scale(values, given)
    return tuple(culprits), scale, later


class _TrialRun:
    """A measured program to try policies on."""

    def __init__(self, stats: Stats, observed: ObservedProgram, policy: Policy | PolicyMap, by: str):
        self.rows = stats.rows()
        self._observed, self._by = observed, by
        self._operations = list_operations(observed)
        paths = dict.fromkeys(operation.path for operation in self._operations)
        self._places = {path: self._find_place(path) for path in paths}
        self.paths = tuple(dict.fromkeys(self._places.values()))
        self._noise = find_noise(self._operations, self.rows)
        largest = {name: parse_float_format(name).max for name in ("float16", "bfloat16")}
        self._masked = {name: find_masked(self._operations, self.rows, largest[name]) for name in largest}
        self._find_span = functools.cache(lambda row, format: find_span(self.rows[row], format))

        self.is_of_modules = by == "autocast" and bool(observed.types)

    def list_values(self, policy: Policy | PolicyMap) -> list[NarrowValue]:
        """Lists values in half precision or quantized formats. Leaves out zeros and rounding noise."""
        written = try_policy(self._observed, policy, self._by)
        found = list_narrow_values(self._operations, written, self.rows)
        if self._by == "with_policy":
            found += list_quantized_values(self._operations, self._observed, self.rows, policy)
        found = [value._replace(path=self._places[value.path]) for value in found]
        return [value for value in dict.fromkeys(found) if self.rows[value.row].amax and value.row not in self._noise]

    def list_broken(self) -> list[Row]:
        """Lists rows with nan. Leaves out constants, such as the nan that the `where` of `jnp.var` does not select."""
        made = (operation.makes for operation in self._operations if operation.is_constant)
        constants = {index for makes in made for indices in makes for index in indices}
        return [row for index, row in enumerate(self.rows) if row.nans and index not in constants]

    def _find_place(self, path: str) -> str:
        """Returns the path for a rule of a map. `with_policy` only knows paths of modules."""
        types = self._observed.list_types() if self._by == "with_policy" else {}
        return next((outer for outer in reversed(list_paths_to(path)) if outer in types), path)

    def find_loss(self, value: NarrowValue, exponent: int) -> Loss:
        """Predicts the loss of a value with a loss scale of `2**exponent`."""
        row = self.rows[value.row]
        if value.is_scaled:
            return find_scaled_loss(row, value.format)
        loss = find_loss(row, value.format, exponent if self.is_scaled(value) else 0)
        if loss.what == "overflow" and value.row in self._masked[value.format]:
            return Loss("", 0.0, loss.amax, loss.limit, 0.0)
        return loss

    def is_scaled(self, value: NarrowValue) -> bool:
        """True if the value is multiplied by the loss scale."""
        return value.direction == "backward" and self.rows[value.row].direction == "backward" and not value.is_scaled

    def choose_scale(self, values: Sequence[NarrowValue], given: int | None) -> ScaleChoice:
        spans: dict[str, list[tuple[float, float]]] = {}
        scaled = [value for value in values if self.is_scaled(value)]
        for value in scaled:
            spans.setdefault(value.path, []).append(self._find_span(value.row, value.format))
        return choose_scale(spans, given, list({value.format for value in scaled}))

    def find_widest(self, values: Iterable[NarrowValue]) -> tuple[NarrowValue, NarrowValue] | None:
        """Returns the gradients that need the largest and the smallest loss scale."""
        scaled = [value for value in values if self.is_scaled(value)]
        if not scaled:
            return None
        least = max(scaled, key=lambda value: self._find_span(value.row, value.format)[0])
        return least, min(scaled, key=lambda value: self._find_span(value.row, value.format)[1])


def make_map(culprits: Iterable[str], policy: Policy | PolicyMap, paths: Sequence[str]) -> PolicyMap:
    """Makes a map with float32 for some scopes and everything inside. Children of the root then get rules first."""
    named = set(culprits)
    # A rule also covers inner scopes, so a rule for one of those would have no effect.
    wide = [path for path in culprits if named.isdisjoint(list_paths_to(path)[1:-1])]
    rules: list[tuple[Key, Policy | str]] = [(re.escape(path), "float32") for path in wide if path]
    old = [(rule.key, rule.policy) for rule in policy.rules] if isinstance(policy, PolicyMap) else []
    if "" in wide:
        tops = dict.fromkeys(path.partition("/")[0] for path in paths if path)
        default = root_policy(policy)
        rest = [(re.escape(top), default) for top in tops if top not in wide]
        return PolicyMap([*rules, *old, *rest, ("", "float32")], default)
    return PolicyMap([*rules, *old], policy.default if isinstance(policy, PolicyMap) else policy)


def _list_reasons(
    losses: Mapping[NarrowValue, Loss], rows: Sequence[Row], culprits: Sequence[str]
) -> tuple[Reason, ...]:
    """Lists the worst value of each scope, pass and kind of fault. Scopes that need float32 come first."""
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
            cure="float32" if value.path in culprits else "loss_scale",
            **loss._asdict(),
        )
        for value, loss in worst.values()
    ]
    return tuple(sorted(made, key=lambda reason: (reason.cure != "float32", -reason.risk)))


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
    for value, loss in losses.items():
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
    else:
        yield "No backward pass was measured: use collect(jax.value_and_grad(loss_fn), where='all')."
    if culprits:
        names = ", ".join(path or "(no scope)" for path in culprits)
        yield f"In float32 by .policy_map: {names}."
    if trial.is_of_modules:
        yield "The program calls Flax modules. If with_policy will apply the policy, use by='with_policy'."
    if all(row.primitive in ("", *MATMULS) for row in trial.rows):
        yield "Only matmuls were measured: collect(..., where='all') measures all ops."
    broken = trial.list_broken()
    if broken:
        yield f"{len(broken)} rows have nan without the policy, the first in {broken[0].path or '(no scope)'}."


def _describe_scale(trial: _TrialRun, values: Sequence[NarrowValue], reasons: Sequence[Reason], scale: str) -> str:
    widest = trial.find_widest(values)
    if widest is not None and trial.choose_scale(values, None).unsaved:
        first, last = widest
        return (
            f"No loss scale saves all gradients: the smallest relevant ones, in {first.path or '(no scope)'}, and the "
            f"largest, in {last.path or '(no scope)'}, do not both fit in {first.format}. Use {scale} with the map."
        )
    is_cure = any(reason.cure == "loss_scale" for reason in reasons)
    return f"A loss scale of {scale} saves the gradients." if is_cure else f"Loss scale: {scale}."
