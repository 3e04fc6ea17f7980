"""Chooses which cases of a parametrized test run by default; a few others are `slow`, and the rest `exhaustive`.

A test with one parameter runs all of its cases. A test over a product of parameters runs each value of each parameter
at least once. `@pytest.mark.sample(n)` runs `n` cases, spread over the list, and `@pytest.mark.every_case` all of a
product. In a test that is `slow` as a whole, two of the chosen cases are slow and the others exhaustive.
"""

import itertools
from collections.abc import Mapping, Sequence

import pytest

MORE = 2
"""How many further cases of a test are slow."""

OF_SLOW = 2
"""How many cases are slow of a test that is slow as a whole, unless a marker says how many."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases that the default run can spare."""
    parametrized = [item for item in items if hasattr(item, "callspec")]
    for _, group in itertools.groupby(parametrized, lambda item: item.nodeid.partition("[")[0]):
        cases = [case for case in group if not has_marker(case, "exhaustive")]
        plain = [case for case in cases if not has_marker(case, "slow")]
        kept = choose(plain) if plain else choose_slow(cases)
        spared = [case for number, case in enumerate(plain or cases) if number not in kept]
        few = spread(MORE, len(spared)) if plain else set()
        for number, case in enumerate(spared):
            case.add_marker(pytest.mark.slow if number in few else pytest.mark.exhaustive)


def has_marker(case: pytest.Item, name: str) -> bool:
    """Returns whether a case has a marker of that name, of its own or of its test or module."""
    return case.get_closest_marker(name) is not None


def choose(cases: Sequence[pytest.Item]) -> set[int]:
    """Returns the positions of the cases of one test that run by default."""
    if not cases or has_marker(cases[0], "every_case"):
        return set(range(len(cases)))
    if sample := cases[0].get_closest_marker("sample"):
        return spread(sample.args[0], len(cases))
    return cover([read_parameters(case) for case in cases])


def choose_slow(cases: Sequence[pytest.Item]) -> set[int]:
    """Returns the positions of the slow cases of one test that is slow as a whole."""
    kept = sorted(choose(cases))
    if any(has_marker(case, name) for case in cases[:1] for name in ("sample", "every_case")):
        return set(kept)
    return {kept[number] for number in spread(OF_SLOW, len(kept))}


def read_parameters(case: pytest.Item) -> dict[str, tuple[int, ...]]:
    """Returns the identities of the values of each `parametrize` and of each fixture with parameters, by name."""
    left = dict(case.callspec.params)  # pyright: ignore[reportAttributeAccessIssue]
    together = [mark.args[0] for mark in case.iter_markers("parametrize")]
    groups = [names.split(",") if isinstance(names, str) else names for names in together]
    marked = {", ".join(group): tuple(id(left.pop(name.strip(), None)) for name in group) for group in groups}
    return marked | {name: (id(value),) for name, value in left.items()}


def spread(count: int, among: int) -> set[int]:
    """Returns `count` positions, the first among them, at even distances.

    >>> sorted(spread(3, 10))
    [0, 3, 6]
    """
    return {number * among // count for number in range(min(count, among))} if count < among else set(range(among))


def cover(cases: Sequence[Mapping[str, object]]) -> set[int]:
    """Returns the positions of few cases that have each value of each parameter between them.

    The diagonal of the product comes first, so that a product of 3 and 4 values is covered by 4 cases.

    >>> sorted(cover([{"x": i, "y": j} for i in range(3) for j in range(4)]))
    [0, 3, 5, 10]
    """
    known: dict[str, dict[object, int]] = {}
    for name, value in itertools.chain.from_iterable(case.items() for case in cases):
        values = known.setdefault(name, {})
        values.setdefault(value, len(values))
    numbers = [[known[name][value] for name, value in case.items()] for case in cases]
    turns = range(max(map(len, known.values()), default=0))
    diagonal = [[turn % len(values) for values in known.values()] for turn in turns]
    seen: set[tuple[str, object]] = set()
    kept = set()
    for number in sorted(range(len(cases)), key=lambda number: numbers[number] not in diagonal):
        if not seen.issuperset(cases[number].items()):
            seen.update(cases[number].items())
            kept.add(number)
    return kept
