"""Which fields of an optimizer's state are moments, and moments of what."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._base import PyTree

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


def find_role(names: Sequence[str]) -> str | None:
    """The role of a leaf by the names on its path, where what held it has lost its class; `None` if no name tells.

    >>> find_role(("opt_state", "0", "mu", "dense", "kernel"))
    'mu'
    """
    return next((_ROLES[name] for name in reversed(names) if name in _ROLES), None)


def map_moments(fun: Callable[[str, PyTree], Any], state: PyTree, otherwise: Callable[[Any], Any] = lambda x: x) -> Any:
    """A state with `fun(role, field)` in place of each field of moments, and `otherwise` of each other leaf."""

    def visit(node: Any) -> Any:
        if not has_moments(node):
            return otherwise(node)
        roles = roles_of(node)
        fields = {name: getattr(node, name) for name in node._fields}
        visited = {
            name: fun(roles[name], field) if name in roles else map_moments(fun, field, otherwise)
            for name, field in fields.items()
        }
        return node._replace(**visited)

    return jax.tree.map(visit, state, is_leaf=has_moments)


def list_moments(state: PyTree) -> list[tuple[str, PyTree]]:
    """The fields of moments of a state with their roles, in the order of its leaves.

    >>> import optax
    >>> [role for role, _ in list_moments(optax.adam(1e-3).init({}))]
    ['mu', 'nu']
    """
    found: list[tuple[str, PyTree]] = []
    map_moments(lambda role, field: found.append((role, field)), state)
    return found


def list_roles(state: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[str | None]:
    """For each leaf of a state its role; `None` where it is no moment."""
    plain = jax.tree.map(lambda _: 0, state, is_leaf=is_leaf)
    marked = map_moments(lambda role, field: jax.tree.map(lambda _: role, field), plain, lambda _: "")
    return [role or None for role in jax.tree.leaves(marked)]
