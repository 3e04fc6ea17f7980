"""The rule that writes a gradient program again, with its sums in another dtype."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ..._jaxpr import Body, Kind, Rule, Value, float_dtype
from ._marks import Place, find_marks, is_narrower
from ._operations import make_scatter_params, write_product
from ._tables import PRODUCTS, SCATTERED_SUM, is_pairwise


@dataclasses.dataclass(frozen=True)
class Widening(Rule):
    """Writes what is marked in the dtype of reductions, and all else as it was traced.

    Attributes:
      dtype: the dtype of reductions.
    """

    dtype: np.dtype

    def contexts(self, outer: Place | None, program: Jaxpr) -> Sequence[Place | None]:
        if outer is None or len(outer.needs) != len(program.outvars):  # the latter is the test of a `while`
            return [None] * len(program.eqns)
        return find_marks(program, outer.needs, outer.origins, self.dtype).places

    def equation(self, eqn: JaxprEqn, values: list[Value], body: Body, context: Place | None) -> list[Value]:
        traced = [Kind(float_dtype(var)) for var in eqn.outvars]
        if context is None:
            return body.append(eqn, self._restore(eqn, values, body), traced)
        kinds = [
            Kind(self.dtype) if need and is_narrower(kind.dtype, self.dtype) else kind
            for kind, need in zip(traced, context.needs, strict=True)
        ]
        name = eqn.primitive.name
        if name in PRODUCTS:
            atoms = self._restore(eqn, values, body)
            if kinds == traced:
                return body.append(eqn, atoms, kinds)
            return [Value(write_product(eqn, atoms, body, self.dtype), kinds[0])]
        if name == "convert_element_type" and values[0].kind.dtype is not None:
            return self._convert(eqn, values[0], body, kinds[0])
        if is_pairwise(eqn):
            atoms = body.cast_values(values, kinds, eqn)
        elif kinds == traced:
            atoms = self._restore(eqn, values, body)
        else:
            atoms = [self._cast_up(value, body, eqn) for value in values]
        is_sum = name == SCATTERED_SUM and kinds != traced
        return body.append(eqn, atoms, kinds, make_scatter_params(eqn, self.dtype) if is_sum else None)

    def entering(self, eqn: JaxprEqn, values: list[Value], body: Body, context: Place | None) -> list[Value]:
        if context is None:
            return self._restore_values(eqn, values, body, [False] * len(values))
        return self._restore_values(eqn, values, body, context.enters)

    def argument(self, dtype: np.dtype | None) -> Kind:
        return Kind(dtype)

    def literal(self, literal: Literal) -> Kind:
        return Kind(float_dtype(literal))

    def join(self, kinds: Sequence[Kind]) -> Kind:
        return functools.reduce(lambda a, b: b if is_narrower(a.dtype, b.dtype) else a, kinds)

    def accumulated(self, kind: Kind) -> Kind:
        return kind

    def opens(self, eqn: JaxprEqn, context: Place | None) -> bool:
        return False

    def opens_inside(self, eqn: JaxprEqn, context: Place | None) -> bool:
        return False

    def _convert(self, eqn: JaxprEqn, value: Value, body: Body, kind: Kind) -> list[Value]:
        """A cast is left out where the value has the dtype, so that nothing rounds it on the way."""
        if value.kind.dtype == kind.dtype:
            return [Value(value.atom, kind)]
        if kind.dtype == float_dtype(eqn.outvars[0]):
            return body.append(eqn, [value.atom], [kind])
        return [Value(body.cast(value.atom, self.dtype, eqn), kind)]

    def _cast_up(self, value: Value, body: Body, eqn: JaxprEqn) -> Var | Literal:
        return body.cast_once(value.atom, self.dtype, eqn) if is_narrower(value.kind.dtype, self.dtype) else value.atom

    def _restore(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Var | Literal]:
        """The operands in the dtypes that the equation was traced with."""
        return [value.atom for value in self._restore_values(eqn, values, body, [False] * len(values))]

    def _restore_values(self, eqn: JaxprEqn, values: list[Value], body: Body, stays: Sequence[bool]) -> list[Value]:
        restored = []
        for atom, value, is_left in zip(eqn.invars, values, stays, strict=True):
            dtype = float_dtype(atom)
            if not is_left and dtype is not None and value.kind.dtype != dtype:
                value = Value(body.cast_once(value.atom, dtype, eqn), Kind(dtype))
            restored.append(value)
        return restored
