"""What `with_policy` makes of the values of a model: told from the paths of its modules, in a program without a policy.

A module casts its inputs to compute dtype and all inside follows, as JAX promotes. What stands outside of all modules
follows what the model returns, in output dtype. Two things inside are float32 whatever the policy says: Flax computes
the statistics of its norms so, and `jnp.sum` and `jnp.mean` add so; their results are cast where the next operation
uses them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._base import list_paths_to
from ..._jaxpr import Body, Fact, Kind, ModulePaths, Modules, Rule, Value, float_dtype, having, is_backward
from ...autocast._rewrite import FUNCTIONS, Functions
from ...policy import Policy, PolicyMap, match_policy

_FLOAT32 = np.dtype(np.float32)
HALF = frozenset(map(np.dtype, ("float16", "bfloat16")))

_NORMS = {name: way for name, way in FUNCTIONS.items() if name.startswith("flax.") and "Norm" in name}
_SUMS = having(Fact.SUMS) | {"add_any"}


class LayerPlace(NamedTuple):
    """Where an equation stands: its path, whether inside of a norm, and whether in a backward pass."""

    path: str = ""
    norm: bool = False
    backward: bool = False


class _Mark(NamedTuple):
    """What is known of a value: the module that made it, if one did, and whether it is float32 until it is used."""

    module: str | None = None
    wide: bool = False


class LayerRule(Rule):
    """The dtypes of values under `with_policy`.

    Args:
      policy: the policy or map that the model is given.
      modules: what tells paths of modules.
      types: the modules of the model by path.
      traced_half: whether the program was traced under a policy of half precision: then what that one has in half is,
        in scopes that compute in half.
    """

    def __init__(self, policy: Policy | PolicyMap, modules: Modules, types: Mapping[str, type], traced_half: bool):
        self._policy, self._types, self._traced_half = policy, dict(types), traced_half
        self._paths, self._norms = ModulePaths(modules), Functions(_NORMS)

    def contexts(self, outer: LayerPlace, program: Jaxpr) -> list[LayerPlace]:
        return [self._find_place(outer, eqn) for eqn in program.eqns]

    def equation(self, eqn: JaxprEqn, values: list[Value], body: Body, context: LayerPlace) -> list[Value]:
        dtype, mark = self._find_result(eqn, values, context)
        kinds = [
            Kind(dtype if float_dtype(var) in (_FLOAT32, *HALF) else float_dtype(var), mark) for var in eqn.outvars
        ]
        return body.append(eqn, [value.atom for value in values], kinds)

    def argument(self, dtype: np.dtype | None) -> Kind:
        return Kind(dtype, _Mark())

    def literal(self, literal: Literal) -> Kind:
        return Kind(float_dtype(literal), _Mark())

    def join(self, kinds: Sequence[Kind]) -> Kind:
        return next((kind for kind in kinds if kind.dtype in HALF), kinds[0])

    def accumulated(self, kind: Kind) -> Kind:
        return kind

    def opens(self, eqn: JaxprEqn, context: Any) -> bool:
        return True

    def opens_inside(self, eqn: JaxprEqn, context: Any) -> bool:
        return True

    def _find_place(self, outer: LayerPlace, eqn: JaxprEqn) -> LayerPlace:
        backward = outer.backward or is_backward(str(eqn.source_info.name_stack))
        norm = outer.norm or self._norms.find(eqn) is not None
        return LayerPlace(self._paths.find(outer.path, eqn), norm, backward)

    def _find_result(self, eqn: JaxprEqn, values: Sequence[Value], place: LayerPlace) -> tuple[np.dtype, _Mark]:
        if self._traced_half:
            half = any(float_dtype(var) in HALF for var in eqn.outvars)
            compute = self._policy_at(place.path).compute_dtype
            return (compute if half and compute is not None and compute in HALF else _FLOAT32), _Mark(place.path)
        module = self._find_module(place.path)
        if module is None:
            return self._promote(values), _Mark()
        compute = self._policy_at(module).compute_dtype or _FLOAT32
        wide = place.norm or (eqn.primitive.name in _SUMS and not place.backward) or self._continues_sum(eqn, values)
        return (_FLOAT32 if wide else compute), _Mark(module, wide)

    def _continues_sum(self, eqn: JaxprEqn, values: Sequence[Value]) -> bool:
        """Whether an equation makes a mean of a sum."""
        is_mean = eqn.primitive.name == "div" and isinstance(eqn.invars[1], Literal)
        moves = eqn.primitive.name in ("broadcast_in_dim", "reshape")
        return (is_mean or moves) and values[0].kind.mark is not None and values[0].kind.mark.wide

    def _promote(self, values: Sequence[Value]) -> np.dtype:
        """The dtype of what is computed outside of all modules: that of its widest operand."""
        strong = [value for value in values if not getattr(value.atom.aval, "weak_type", False)]
        dtypes = [self._leave(value.kind) for value in strong if value.kind.dtype in (_FLOAT32, *HALF)]
        wide = not dtypes or _FLOAT32 in dtypes
        return _FLOAT32 if wide else next(dtype for dtype in dtypes if dtype is not None)

    def _leave(self, kind: Kind) -> np.dtype | None:
        """The dtype in which a value leaves the modules."""
        mark = kind.mark
        if mark is None or mark.module is None:
            return kind.dtype
        outermost = next(outer for outer in list_paths_to(mark.module) if outer in self._types)
        return self._policy_at(outermost).output_dtype or kind.dtype

    def _find_module(self, path: str) -> str | None:
        """The innermost module that a path is inside of."""
        return next((outer for outer in reversed(list_paths_to(path)) if outer in self._types), None)

    def _policy_at(self, path: str) -> Policy:
        return match_policy(self._policy, path, self._types).policy
