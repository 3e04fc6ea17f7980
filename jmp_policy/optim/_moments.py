"""Which fields of an optimizer's state are moments, and moments of what."""

from typing import Any

MU, NU = "mu", "nu"
"""Averages of gradients, and averages of their squares."""

# The names of fields that mean the same in every state of optax that has them ...
_ROLES = {
    "mu": MU, "trace": MU, "ema": MU, "exp_avg": MU,
    "nu": NU, "nu_max": NU, "exp_avg_sq": NU, "sum_of_squares": NU, "v_row": NU, "v_col": NU,
}  # fmt: skip
# ... and the states whose names mean something of their own.
_ROLES_OF = {
    "FactoredState": {"v_row": NU, "v_col": NU, "v": NU},
    "ScaleByAdaDeltaState": {"e_g": NU, "e_x": NU},
    "ScaleByAdanState": {"m": MU, "v": MU, "n": NU},
    "ScaleByAdemamixState": {"m1": MU, "m2": MU, "nu": NU},
    "ScaleBySM3State": {"mu": NU, "nu": MU},
    "ScaleBySimplifiedAdEMAMixState": {"m": MU, "n": NU},
}


def has_moments(node: object) -> bool:
    """Whether a node of a state has fields that are moments."""
    return isinstance(node, tuple) and bool(roles_of(node))


def roles_of(node: object) -> dict[str, str]:
    """The roles of the fields of a node that are moments.

    >>> import optax
    >>> roles_of(optax.TraceState(trace=None))
    {'trace': 'mu'}
    """
    fields = getattr(node, "_fields", ())
    named: Any = _ROLES_OF.get(type(node).__name__)
    return named or {name: _ROLES[name] for name in fields if name in _ROLES}
