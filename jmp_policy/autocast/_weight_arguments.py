"""The arguments that hold weights: which ones the user names, what uses them, and errors about them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr

from .._base import Args, Kwargs, describe, is_array, is_floating, warn_user
from .._jaxpr import is_backward, walk
from ._rewrite import NO_WEIGHT, WHY_BACKWARD, CastingRule, EquationPlace, WeightFinder, WeightUse

Weights = int | Sequence[int] | Callable[[str], bool]


def check_weights(weights: Any) -> None:
    """Raises a `TypeError` unless `weights` is None, an argument number, several, or a function of paths."""
    numbers = weights if isinstance(weights, list | tuple) else [weights]
    if weights is not None and not callable(weights) and not all(type(number) is int for number in numbers):
        raise TypeError(
            f"weights must be an argument number, several, or a function of paths, got {describe(weights)}. For "
            "example: weights=0, weights=(0, 2), or weights=lambda path: path.endswith('kernel')."
        )


class WeightArray(NamedTuple):
    """An array that the user named as a weight."""

    path: str
    array: Any
    quantization: str  # its format, or why it is left


class WeightArguments:
    """The named weights among the array leaves of a call.

    Leaves come from `(args, kwargs)`, or from one argument that holds both if nnx objects were lifted. The first
    `opened` arguments come from a partial, and have no number.
    """

    def __init__(self, weights: Weights | None, args: Args, kwargs: Kwargs, *, opened: int, lifted: bool):
        leaves = [(keys, leaf) for keys, leaf in jax.tree.leaves_with_path((args, kwargs)) if is_array(leaf)]
        self._arrays = [leaf for _, leaf in leaves]
        # 0 or 1 for `args` or `kwargs`, then the number or name of the argument, then the path inside.
        spell = lambda key: jax.tree_util.keystr((key,), simple=True)
        parts = [[*map(spell, keys[2 if lifted else 0 :])] for keys, _ in leaves]
        owners = [int(names[0]) - opened if which == "0" else names[0] for which, *names in parts]
        paths = ["/".join([str(own), *names[2:]]) for own, names in zip(owners, parts, strict=True)]
        self._paths = [path.removesuffix("/value") if lifted else path for path in paths]
        if callable(weights):
            self._groups = {"weights": self._select(lambda i: bool(weights(self._paths[i])))}
            return
        numbers = [weights] if isinstance(weights, int) else weights or ()
        self._groups = {f"weights={n}": self._select(lambda i, n=n: owners[i] == n) for n in numbers}

    def _select(self, is_named: Callable[[int], bool]) -> list[int]:
        return [i for i, leaf in enumerate(self._arrays) if is_floating(leaf) and is_named(i)]

    def find(self, rule: CastingRule, program: Jaxpr) -> tuple[list[bool], list[WeightArray]]:
        """Returns which arguments of the jaxpr are quantized weights, and a description of each named weight."""
        named = {i for group in self._groups.values() for i in group}
        names = [frozenset([i]) if i in named else NO_WEIGHT for i in range(len(self._arrays))]
        quote = lambda found: "".join(f" {self._paths[i]!r}" for i in sorted(found)[:1])
        find_product = lambda eqn, read, place: rule.find_weight_product(
            eqn, read, place, quote(NO_WEIGHT.union(*read))
        )
        uses, _ = WeightFinder(find_product, rule.contexts, rule.enters).find(program, names, EquationPlace())
        by_name = {i: [use for use in uses if i in use.names] for i in sorted(named)}
        for label, group in self._groups.items():
            self._check_reached(label, group, by_name)
        if any(is_backward(step.scope) for step in walk(program)):
            warn_user(f"autocast quantizes the forward pass alone, because {WHY_BACKWARD}.")
        tables = {i for i, own in by_name.items() if any(use.is_lookup for use in own)}
        rows = [
            WeightArray(self._paths[i], self._arrays[i], _describe_uses(own))
            for i, own in by_name.items()
            if self._arrays[i].ndim > 1
        ]
        return [i in named - tables for i in range(len(self._arrays))], rows

    def _check_reached(self, label: str, group: list[int], uses: dict[int, list[WeightUse]]) -> None:
        if any(use.is_product for i in group for use in uses[i]):
            return
        reasons = [f"{self._paths[i]!r} ({_describe_uses(uses[i]).removeprefix('left: ')})" for i in group[:3]]
        others = ", ".join(map(repr, self._paths[:3]))
        found = ", ".join(reasons) if reasons else f"it names no floating array; the first paths are {others}"
        raise ValueError(
            f"{label} reaches no matmul or convolution as a weight: {found}. For example: "
            "autocast(lambda params, x: x @ params['kernel'], 'int8_from_mixed_bfloat16', weights=0)."
        )


def _describe_uses(uses: list[WeightUse]) -> str:
    """Describes the format of a weight, or why it is left."""
    lookups = [use for use in uses if use.is_lookup]
    products = lookups or [use for use in uses if use.is_product] or uses
    texts = {f"left: {own}" if isinstance(own, str) else str(own): None for own in (use.product for use in products)}
    return "; ".join(texts) or "left: nothing reads it"
