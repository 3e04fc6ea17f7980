"""The loss scale under which most scopes keep their gradients."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._stats import FloatFormat, parse_format

_LEAST, _MOST = -14, 24
"""The exponents of the scales that are tried: from what brings a gradient of 2**30 into float16, to where
`DynamicLossScale` ends."""

Span = tuple[float, float]
"""The exponents of the scales with which a value fits."""


class Choice(NamedTuple):
    """A loss scale, and the scopes that it does not save.

    Attributes:
      exponent: the scale is two to this power.
      unsaved: the scopes with a value that does not fit.
    """

    exponent: int
    unsaved: tuple[str, ...]


def choose_scale(spans: Mapping[str, Sequence[Span]], given: int | None, formats: Sequence[str]) -> Choice:
    """Chooses the scale that saves most scopes, and of these the one that leaves most room on both sides.

    Args:
      spans: by scope, the spans of its values.
      given: the exponent of the user's scale, which wins where it saves as many.
      formats: what the values are in. Where each has the range of float32, there is nothing to scale.
    """
    tries = range(_LEAST, _MOST + 1) if any(map(is_short, formats)) else range(1)
    if given is not None and given not in tries:
        tries = [*tries, given]
    unsaved = {exponent: _list_unsaved(spans, exponent) for exponent in tries}
    fewest = min(map(len, unsaved.values()))
    if given is not None and len(unsaved[given]) == fewest:
        return Choice(given, unsaved[given])
    saving = [exponent for exponent in tries if len(unsaved[exponent]) == fewest]
    best = [exponent for exponent in saving if exponent >= 0] or saving  # a scale below 1 only where none else does
    chosen = max(best, key=lambda exponent: (_find_room(spans, unsaved[exponent], exponent), -abs(exponent)))
    return Choice(chosen, unsaved[chosen])


def is_short(format: str) -> bool:
    """Whether a format has a shorter range than float32."""
    known = parse_format(format)
    return isinstance(known, FloatFormat) and known.max_exponent < 100


def _list_unsaved(spans: Mapping[str, Sequence[Span]], exponent: int) -> tuple[str, ...]:
    return tuple(path for path, own in spans.items() if any(not least <= exponent <= most for least, most in own))


def _find_room(spans: Mapping[str, Sequence[Span]], unsaved: Sequence[str], exponent: int) -> float:
    """How many binades the gradients may grow or shrink before the scale is not good any more."""
    saved = (span for path, own in spans.items() if path not in unsaved for span in own)
    return min((min(exponent - least, most - exponent) for least, most in saved), default=math.inf)
