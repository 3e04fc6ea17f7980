"""One look for each number format, in every plot: a color, a dash and a width."""

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Any

from ..policy import Policy, parse_policy


@dataclasses.dataclass(frozen=True)
class Style:
    """How a curve, or what else has a color, looks.

    Attributes:
      color: as matplotlib reads it.
      dash: the line style, as matplotlib reads it.
      width: the width of the line in points.

    >>> from jmp_policy import report
    >>> report.Style("#0072B2", (0, (4, 2)), 1.8).line
    {'color': '#0072B2', 'linestyle': (0, (4, 2)), 'linewidth': 1.8, 'zorder': 2.82}
    """

    color: str
    dash: str | tuple[int, tuple[float, ...]]
    width: float

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of `Axes.plot`. Narrow lines lie above wide ones, so that curves that coincide all show."""
        zorder = round(3 - self.width / 10, 3)
        return {"color": self.color, "linestyle": self.dash, "linewidth": self.width, "zorder": zorder}


UNSCALED = "float16 without a loss scale"
"""The key of `FORMAT_STYLES` for float16 whose small gradients are lost."""

FORMAT_STYLES = {
    "float32": Style("#B0B0B0", "solid", 5.0),
    "bfloat16": Style("#E69F00", "solid", 3.0),
    "float16": Style("#0072B2", (0, (4, 2)), 1.7),
    UNSCALED: Style("#D55E00", (0, (5, 1.5, 1, 1.5)), 1.5),
    "float8": Style("#AA3377", (0, (2, 1)), 2.2),
    "float8_e5m2": Style("#40004B", (0, (8, 2, 2, 2)), 2.6),
    "int8": Style("#009E73", (0, (6, 3)), 1.9),
    "int4": Style("#56B4E9", (0, (1, 1)), 1.6),
    "mxfp8": Style("#1E0FB4", (0, (7, 1.5)), 2.1),
    "mxfp4": Style("#000000", (0, (3, 3)), 1.4),
    "nvfp4": Style("#780F0F", (0, (3, 1, 1, 1)), 1.8),
}
"""By number format. People with any color vision can tell the colors apart; dash and width tell curves apart that
coincide, and in print. Source of the colors: Okabe and Ito, Color Universal Design, 2008; float8's: Tol, as below;
those of blocks were searched for, far from all others."""

OTHER_STYLES = (
    Style("#332288", "solid", 2.4),
    Style("#44AA99", (0, (4, 3)), 2.0),
    Style("#882255", (0, (1.5, 1.5)), 1.7),
    Style("#999933", (0, (6, 2, 1, 2)), 1.4),
)
"""For curves that no number format tells apart, as of ways to round or to quantize: in this order. Source of the
colors: Tol, Colour Schemes, SRON 2021 (muted)."""

KEPT, BEFORE = "#8C8C8C", "#E4E4E4"
"""The colors of what stayed as it was, and of what was before."""

REFERENCE_LINE: dict[str, Any] = {"color": "#4D4D4D", "linestyle": (0, (1, 2)), "linewidth": 1.3, "zorder": 1.9}
"""Keywords of `Axes.axhline` and `Axes.axvline` for a value to compare with, such as a baseline."""


def list_styles(formats: Iterable[str]) -> dict[str, Style]:
    """How formats look beside each other, by name: float8 is e4m3fn, and what has no style of its own takes another.

    >>> from jmp_policy.report import FORMAT_STYLES, list_styles
    >>> styles = list_styles(["float8_e4m3fn", "int8/64", "float8_e3m4", "float4_e2m1fn"])
    >>> styles["float8_e4m3fn"] == FORMAT_STYLES["float8"], styles["int8/64"] == FORMAT_STYLES["int8"]
    (True, True)
    >>> styles["float8_e3m4"] == styles["float4_e2m1fn"]
    False
    """
    others = itertools.cycle(OTHER_STYLES)
    keys = {name: "float8" if name == "float8_e4m3fn" else _drop_options(name) for name in formats}
    return {name: FORMAT_STYLES[key] if key in FORMAT_STYLES else next(others) for name, key in keys.items()}


def find_style(format: str | Policy, *, is_scaled: bool = True) -> Style:
    """Finds how a number format looks.

    A policy looks as its quantization does, and without one as the dtype it computes in.

    Args:
      format: a key of `FORMAT_STYLES`, a quantized format such as `"int4/64"`, a policy, or the string of a policy.
      is_scaled: whether training in float16 has a loss scale.

    Raises:
      ValueError: the string is neither, or the policy computes in a dtype without a style.

    >>> from jmp_policy.report import FORMAT_STYLES, find_style
    >>> find_style("mixed_bfloat16") == find_style("bfloat16")
    True
    >>> find_style("mixed_float16", is_scaled=False) == FORMAT_STYLES["float16 without a loss scale"]
    True
    >>> find_style("int8_from_mixed_bfloat16").color, find_style("int8(min_size=0)").color
    ('#009E73', '#009E73')
    """
    name = _name_format(format) if isinstance(format, Policy) else _read_format(format)
    if name not in FORMAT_STYLES:
        raise ValueError(f"No style for {name!r}. There is one for {', '.join(map(repr, FORMAT_STYLES))}.")
    return FORMAT_STYLES[UNSCALED if name == "float16" and not is_scaled else name]


def _read_format(text: str) -> str:
    name = _drop_options(text)
    return name if name in FORMAT_STYLES else _name_format(parse_policy(text))


def _name_format(policy: Policy) -> str:
    """What the products of a policy are computed in; where the compute dtype is inferred, that is float32."""
    if policy.quantization is not None:
        return _drop_options(str(policy.quantization))
    return "float32" if policy.compute_dtype is None else str(policy.compute_dtype)


def _drop_options(format: str) -> str:
    return re.split("[/(]", format, maxsplit=1)[0]
