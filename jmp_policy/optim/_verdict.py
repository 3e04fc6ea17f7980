"""The verdict on a skipped step, from replays on the host."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._base import PyTree, cast_floating, is_floating, is_half, split_state
from ..loss_scale import DynamicLossScale, NoOpLossScale, find_nodes, stays_finite, strip_variables
from ..modules import force_full_precision
from ..policy import Policy, PolicyMap, get_policy, make_map
from ..report import make_finite, make_plain
from ._find_origin import Given, OriginFinder, count_steps, replace_value, unwrap
from ._gradients import global_norm
from ._input_ranges import Suspects, find_suspects, name_leaves
from ._replay import (
    LARGE_PARAM,
    Replay,
    clip_large_params,
    count_differences,
    find_trained,
    hide_infinite_starts,
    make_state,
    replay,
    take_step,
    update,
)
from ._skip_spikes import SpikeState
from ._skipped_step import NO_STEP_REPAIRS, count_nonfinite, read_counts
from ._skipping import SkippingUpdate, find_inner, find_inner_state
from ._step import MASKED
from ._transformation import LossScaledState

if TYPE_CHECKING:
    from ..numerics import NonfiniteOrigin

Kind = Literal["data", "scale", "format", "model", "state", "spike", "not reproduced"]

_MOST_TRIALS = 24
_MOST_LISTED = 8
_SMALLEST_SCALE = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Reason of a skipped step; `str` of it is a paragraph.

    Attributes:
      kind: `"data"`, `"scale"`, `"format"`, `"model"`, `"state"`, `"spike"` or `"not reproduced"`: see
        `OriginFinder.verdict`.
      step: the number of the step, from 1; `None` if the optimizer does not count its steps.
      text: the paragraph.
      place: the name of the input, parameter or moment, or the path of the operation with its primitive.
      rows: the rows of the input along its first axis; the first eight.
      loss_scale: the largest loss scale, by factors of two below that of the step, at which it is finite.
      value: the largest magnitude of the operation's result in float32, or the gradient norm of a spike.
      limit: the largest number of the operation's dtype.
      source: the user's line of the operation, `"/home/me/train.py:12"`.
      policy_map: the smallest map with which the step is finite, if the search found one. For a function under
        `with_policy`, whose policy has no rules, the keys say which scopes have to be in float32.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> loss_fn = lambda w, x: jnp.sum((w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32))
    >>> find = jmp.optim.find_origin(loss_fn, tx := jmp.optim.skip_nonfinite(optax.sgd(0.1)))
    >>> params = jnp.float32([300.0, 1.0])
    >>> verdict = find.verdict(params, tx.init(params), jnp.float32([400.0, 300.0]))
    >>> verdict.kind, verdict.place, verdict.value, verdict.limit
    ('format', 'mul', 120000.0, 65504.0)
    """

    kind: Kind
    step: int | None
    text: str
    place: str = ""
    rows: tuple[int, ...] = ()
    loss_scale: float | None = None
    value: float | None = None
    limit: float | None = None
    source: str = ""
    policy_map: PolicyMap | None = None

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as dictionaries, lists, strings and finite numbers."""
        return make_finite(make_plain(self))


def judge(finder: OriginFinder, given: Given, old_state: PyTree, times: int) -> Verdict:
    """Replays a step and returns the verdict of the first check that finds a fault."""
    return next(_Case(finder, given, old_state).list_verdicts(times))


class _Case:
    """A step to judge. Each check yields its verdict if it has one."""

    def __init__(self, finder: OriginFinder, given: Given, old_state: PyTree):
        self._finder, self._given, self._old_state = finder, given, old_state
        found = find_nodes(old_state, LossScaledState) or find_nodes(old_state, SpikeState)
        self._state: Any = strip_variables(found[0]) if found else None
        self._step = count_steps(old_state)

    def list_verdicts(self, times: int) -> Iterator[Verdict]:
        yield from self._check_state()
        first = self._replay()
        for _ in range(times - 1):
            yield from self._compare(first, self._replay())
        if first.finite:
            yield from self._check_finite_step(first)
        heals = lambda given: self._replay(given).finite
        yield from self._check_data(heals, lambda suspect: not suspect.is_finite)
        yield from self._check_scale(halvings=1)  # any change of the batch may help a step that just overflows
        yield from self._check_data(heals)
        yield from self._check_large_params(heals)
        yield from self._check_scale()
        yield from self._check_operation()

    def _replay(self, given: Given | None = None) -> Replay:
        return self._finder.compile(replay)(given or self._given)

    def _make(self, kind: Kind, text: str, **fields: Any) -> Verdict:
        return Verdict(kind, self._step, f"The step was skipped because of {text}", **fields)

    def _check_state(self) -> Iterator[Verdict]:
        count = jax.jit(count_nonfinite)
        # An infinity may be meant, as in a mask: `_check_large_params` looks whether it does harm.
        nans = jax.tree.map(_keep_nans, strip_variables(self._given.params))
        bad = {f"params/{name}".rstrip("/"): counts for name, counts in read_counts(count(nans)).items()}
        if self._state is not None and isinstance(self._finder.tx.update, SkippingUpdate):
            state = find_inner_state(self._state)
            new = jax.eval_shape(lambda given: make_state(self._finder, given), self._given)
            if jax.tree.structure(new) == jax.tree.structure(state):
                state = self._finder.compile(hide_infinite_starts)(self._given, state)
            bad |= {f"opt_state/{name}": counts for name, counts in read_counts(count(state)).items()}
        for place, (count, size) in bad.items():
            text = f"the state: {count} of {size} elements of {place} are not finite. {NO_STEP_REPAIRS}"
            yield self._make("state", text, place=place)

    def _check_large_params(self, heals: Callable[[Given], Any]) -> Iterator[Verdict]:
        """Blames a parameter with single elements that are far larger than the others, as of a flipped bit."""
        clipped, counts = self._finder.compile(clip_large_params)(self._given)
        bad = read_counts(counts)
        if bad and heals(self._given._replace(params=clipped)):
            name, (count, size) = next(iter(bad.items()))
            place = f"params/{name}".rstrip("/")
            text = (
                f"the state: {count} of {size} elements of {place} are infinite, or more than {LARGE_PARAM:,.0f} times "
                "as large as the median one. Without them the step is taken. An update may have overflowed, or a bit "
                "flipped: restore a checkpoint."
            )
            yield self._make("state", text, place=place)

    def _compare(self, one: Replay, other: Replay) -> Iterator[Verdict]:
        counts = read_counts(self._finder.compile(count_differences)(one, other))
        if counts:
            listed = ", ".join(f"{name} ({bad} of {size})" for name, (bad, size) in list(counts.items())[:_MOST_LISTED])
            text = (
                f"something that is not reproduced: two runs of one program on the same inputs differ in bits of "
                f"{listed}. Either the device sums in no fixed order, or it is faulty. Repeat the step with XLA's "
                "deterministic operations, and on another machine."
            )
            yield self._make("not reproduced", text, place=next(iter(counts)))

    def _check_finite_step(self, found: Replay) -> Iterator[Verdict]:
        """Judges a step whose loss and gradients are finite."""
        if self._state is not None and isinstance(self._finder.tx.update, SkippingUpdate):
            decide = self._finder.compile(take_step)
            spiked, updates_finite = decide(self._given, self._state)
            if spiked:
                heals = lambda given: not decide(given, self._state)[0]
                yield from self._check_data(heals)
                yield from self._check_large_params(heals)
                norm = float(global_norm(found.grads))
                text = (
                    f"a spike: loss {float(found.loss):.4g}, gradient norm {norm:.4g}. All numbers are finite, and no "
                    "input explains it. Look at the steps before, at the learning rate and at the labels."
                )
                yield self._make("spike", text, value=norm)
            if not updates_finite:
                yield from self._check_update(found)
        outside = "".join(f" Of its inputs, {suspect.describe(name)}." for name, _, suspect in self._list_suspects())
        text = (
            f"The replay of the step is taken: its loss, {float(found.loss):.4g}, and its gradients are finite. If the "
            "step was skipped, its gradients were taken with another scale, of another batch or loss, or on a machine "
            f"that failed. If its loss jumped, skip_spikes skips such steps.{outside}"
        )
        yield Verdict("not reproduced", self._step, text)

    def _check_update(self, found: Replay) -> Iterator[Verdict]:
        from ..numerics import search_nonfinite

        state, params = find_inner_state(self._state), find_trained(self._given.params, found.grads)
        run, grads = lambda *args: update(self._finder, self._given, *args), split_state(found.grads, MASKED)[0]
        _, origin = jax.jit(search_nonfinite(run, None, checks=False))(grads, state, params, found.loss)
        origin = jax.device_get(origin)
        wide = lambda tree: cast_floating(tree, jnp.float32)
        # Hyperparameters were rounded when the state was made.
        keep = lambda old, new: wide(old) if jnp.ndim(old) or not is_floating(old) else new
        fresh = find_inner(self._finder.tx).init(wide(params))
        is_alike = jax.tree.structure(fresh) == jax.tree.structure(state)  # master weights are not
        old = wide(params), jax.tree.map(keep, state, fresh) if is_alike else fresh
        new = jax.jit(run)(wide(grads), old[1], old[0], found.loss)
        half = next((str(x.dtype) for x in jax.tree.leaves((params, state)) if is_half(x)), None)
        fields = {"place": _name_place(origin), "source": origin.source}
        if half is not None and stays_finite(old, new):
            text = (
                f"the format of the optimizer: loss and gradients are finite, but its update in {half} is not. "
                f"{_say_where(origin)} With parameters and moments in float32 it is finite, as with "
                "loss_scaled(optim.master_weights(tx), scale)."
            )
            yield self._make("format", text, limit=_find_limit(half), **fields)
        text = f"the optimizer: loss and gradients are finite, but its update is not. {origin.describe()}"
        yield self._make("model", text, **fields)

    def _list_suspects(self) -> list[tuple[str, Any, Suspects]]:
        """Returns the inputs with suspicious elements: name, array and elements."""
        args, kwargs = unwrap(self._given.arguments)
        named = name_leaves(self._finder.loss_fn, args, kwargs)
        found = [(name, leaf, find_suspects(leaf, self._finder.ranges.get(name))) for name, leaf in named]
        return [(name, leaf, suspect) for name, leaf, suspect in found if suspect is not None]

    def _check_data(
        self, heals: Callable[[Given], Any], is_meant: Callable[[Suspects], bool] = lambda suspect: True
    ) -> Iterator[Verdict]:
        suspects = [each for each in self._list_suspects() if is_meant(each[-1])]
        for chosen in [*([each] for each in suspects), suspects][: len(suspects) + (len(suspects) > 1)]:
            repaired = {id(leaf): suspect.repaired for _, leaf, suspect in chosen}
            arguments = jax.tree.map(lambda x, new=repaired: new.get(id(x), x), self._given.arguments)
            if heals(self._given._replace(arguments=arguments)):
                texts = " and ".join(suspect.describe(name) for name, _, suspect in chosen)
                text = f"the data: {texts}. Without them the step is taken."
                yield self._make("data", text, place=chosen[0][0], rows=chosen[0][2].rows)

    def _check_scale(self, halvings: int | None = None) -> Iterator[Verdict]:
        """Tries smaller scales: that many halvings, or down to the floor and then to the smallest useful scale."""
        scale, value = self._given.scale, float(self._given.scale.loss_scale)
        if isinstance(scale, NoOpLossScale):
            return
        floor = float(np.float32(scale.min_loss_scale)) if isinstance(scale, DynamicLossScale) else 0.0
        is_finite = lambda x: bool(self._replay(self._given._replace(scale=replace_value(scale, x))).finite)
        least = (max(floor, 1.0), _SMALLEST_SCALE) if halvings is None else (max(floor, value / 2.0**halvings),)
        lowest = next((x for x in least if x < value and is_finite(x)), None)
        if lowest is None:
            return
        halved = lambda times: max(value / 2.0**times, lowest)
        good, bad = math.ceil(math.log2(value / lowest)), 0
        while good - bad > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if is_finite(halved(middle)) else (good, middle)
        best = halved(good)
        if best < floor:
            advice = f"The floor is {floor:g}: lower it, with DynamicLossScale(min_loss_scale={best:g})."
        elif isinstance(scale, DynamicLossScale):
            advice = "The scale falls by itself: this is normal at the start, and now and then later."
        else:
            advice = "It does not change: take policy.loss_scale(), or a smaller StaticLossScale."
        text = f"the loss scale: the step is not finite at {value:g}, and finite at {best:g}. {advice}"
        yield self._make("scale", text, loss_scale=best)

    def _check_operation(self) -> Iterator[Verdict]:
        from ..numerics import find_half_scopes, widen

        found = self._finder.find(self._given, self._old_state)
        if found is None:
            yield self._make("not reproduced", "something that another compilation of the step does not reproduce.")
            return
        origin = found.origin
        args, kwargs = unwrap(self._given.arguments)
        differentiated = self._finder.differentiate(self._given.params, self._given.scale)
        scopes = find_half_scopes(differentiated, self._given.params, *args, **kwargs)
        if scopes.keys and self._is_finite_with(lambda fun: widen(force_full_precision(fun)), "wide"):
            yield self._blame_format(origin.cause or origin, self._find_map(scopes.keys, origin), scopes.has_rules)
        elif origin.argument and not origin.argument.startswith("a constant"):
            yield self._make("data", f"the data: {origin.describe()}", place=origin.argument)
        root = origin.cause or origin
        if root.primitive == "convert_element_type" and root.dtype.startswith("float8"):
            fields = {"source": root.source, "limit": _find_limit(root.dtype)}
            yield self._make("format", f"the format: {origin.describe()}", place=_name_place(root), **fields)
        text = f"the model: the step is not finite in float32 either. {origin.describe()}"
        yield self._make("model", text, place=_name_place(origin), source=origin.source)

    def _is_finite_with(self, transform: Callable[..., Any], key: Any) -> bool:
        run = lambda finder, given: replay(finder, given, transform).finite
        return bool(self._finder.compile(run, key)(self._given))

    def _find_map(self, keys: Mapping[str, str], origin: "NonfiniteOrigin") -> PolicyMap | None:
        """Finds the smallest set of scopes that have to be in float32, the suspicious ones first.

        `keys` are the keys of the scopes in a map.
        """
        from ..numerics import find_smallest_set, widen

        suspects = [keys[each.path] for each in (origin.cause, origin) if each is not None and each.path in keys]
        ranked = list(dict.fromkeys([*suspects, *keys.values()]))

        def measure(kept: frozenset[int]) -> float:
            wide = {ranked[i] for i in kept}
            chosen = frozenset(path for path, key in keys.items() if key in wide)
            is_finite = self._is_finite_with(lambda fun: widen(fun, chosen), ("map", chosen))
            return 0.0 if is_finite else math.inf

        if measure(frozenset(range(len(ranked)))):  # an epsilon that half precision rounds to zero
            return None
        found = find_smallest_set(measure, len(ranked), 0.5, budget=_MOST_TRIALS)
        half = next((each.dtype for each in (origin.cause, origin) if each and each.dtype in _HALF), "float16")
        low = get_policy(f"params=float32,compute={half},output=none")
        kept = [ranked[i] for i in sorted(found.kept)]
        return make_map(sorted(ranked), kept, low, low.replace(compute_dtype="float32"))

    def _measure_in_float32(self, origin: "NonfiniteOrigin") -> float | None:
        """Returns the largest magnitude of an operation's result in float32, if the operation is there too."""
        from ..numerics import collect, widen

        options = {"where": (origin.primitive,), "of": (origin.direction,), "sample": None}

        def measure(given: Given) -> Any:
            args, kwargs = unwrap(given.arguments)
            differentiated = widen(force_full_precision(self._finder.differentiate(given.params, given.scale)))
            return collect(differentiated, **options)(given.params, *args, **kwargs)[1]

        try:
            stats = jax.jit(measure)(self._given)
        except ValueError:  # it has another primitive in float32
            return None
        rows = [row for row in stats.rows() if row.times and row.path == origin.path]
        on_line = [row for row in rows if row.source == origin.source]  # of a library's line there are none
        return max((float(row.amax) for row in on_line or rows), default=None)

    def _blame_format(self, origin: "NonfiniteOrigin", policy_map: PolicyMap | None, has_rules: bool) -> Verdict:
        from ..numerics import CARRIED

        value, limit = self._measure_in_float32(origin) if origin.primitive else None, _find_limit(origin.dtype)
        text = f"the format: the step is finite in float32. {_say_where(origin)}"
        if value is not None and limit is not None:
            text += f" In float32 its largest result is {value:.4g}, "
            if value > limit:
                text += f"and {origin.dtype} ends at {limit:g}."
            else:
                text += f"within the range of {origin.dtype}: an operand was rounded too far, as an epsilon to zero."
        if policy_map is not None and policy_map.rules:
            rules = {rule.key: _spell_policy(rule.policy) for rule in policy_map.rules}
            is_wide = policy_map.default is not None and policy_map.default.compute_dtype == "float32"
            default = "'float32'" if is_wide else "policy"
            scopes = " and ".join(map(repr, rules))
            if has_rules:
                text += f" It is finite with PolicyMap({rules}, {default})." + (CARRIED if origin.turns else "")
            elif is_wide:  # under a policy of a function, or with casts that the user wrote
                text += f" It is finite in float32 with only {scopes} in half precision."
            else:
                text += f" It is finite with {scopes} in float32."
        elif policy_map is not None:
            text += " Nothing less than float32 everywhere makes it finite: compute in bfloat16, or scale the inputs."
        fields = {"place": _name_place(origin), "source": origin.source, "policy_map": policy_map}
        return self._make("format", text, value=value, limit=limit, **fields)


_HALF = ("float16", "bfloat16")


def _spell_policy(policy: Policy) -> str:
    """Spells the policy of a scope for parameters in float32."""
    return f"mixed_{policy.compute_dtype}" if policy.compute_dtype in _HALF else str(policy.compute_dtype)


def _keep_nans(x: Any) -> Any:
    """Replaces infinities by zeros."""
    has_infinities = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.where(jnp.isinf(x), jnp.zeros_like(x), x) if has_infinities else x


def _find_limit(dtype: str) -> float | None:
    return float(jnp.finfo(dtype).max) if dtype.startswith(("float", "bfloat")) else None


def _name_place(origin: "NonfiniteOrigin") -> str:
    return "/".join(filter(None, (origin.path, origin.primitive))) or origin.argument or ""


def _say_where(origin: "NonfiniteOrigin") -> str:
    """Returns a sentence about an operation, without advice."""
    from ..numerics import say_what_happened

    return say_what_happened(origin)
