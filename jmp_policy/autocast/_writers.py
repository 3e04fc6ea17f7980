"""Writes an operation in a precision, with the casts of its operands."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn  # pyright: ignore[reportPrivateImportUsage]

from .._base import is_wider
from .._jaxpr import (
    AbstractValue,
    Atom,
    Fact,
    JaxprBuilder,
    Rewriter,
    Rule,
    Value,
    body_of,
    float_dtype,
    having,
    shape_of,
)
from ._place import FLOAT32, EquationPlace, Function
from ._precision import cast_value, clamp_masks, find_numbers, is_exact, make_wide_product, note_rounding, write_product
from ._promotion import (
    FULL_LEVEL,
    STATES,
    SUM_LEVEL,
    TRACED_LEVEL,
    count_bias_axes,
    count_row_axes,
    follow_promotion,
    is_given,
)
from ._tables import CLEAR, Precision

TRACED, LOW, SUM, FULL = STATES
_COMPUTED = TRACED._replace(computed=True)
_NOT_FLOAT = AbstractValue(None)
_SOLVER = "custom_linear_solve"
_IN_SOLVER = EquationPlace(function=Function(_SOLVER, "full"))
_COMBINING = having(Fact.COMBINES) | {_SOLVER}
_MOVING = having(Fact.MOVES, Fact.ANNOTATES)
_KEEPING_WIDTH = frozenset(CLEAR) | {"add_any"}


class EquationWriter(Rule):
    """Writes operations in a compute or full dtype; with `sums`, matmuls return the sums of an accumulate dtype."""

    compute_dtype: np.dtype
    full_dtype: np.dtype
    wide: frozenset[np.dtype]  # the full dtype and all that are wider than the compute dtype
    sums: np.dtype | None
    rounds_given: bool  # whether given values of full size are rounded to the compute dtype of other operands

    def _write_low(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        product = None if self.sums is None else make_wide_product(eqn, self.sums, self.compute_dtype)
        if self.wide.isdisjoint(map(float_dtype, eqn.invars)):  # as its author wrote it
            dtypes = {float_dtype(atom) for atom in (*eqn.invars, *eqn.outvars)} - {None}
            is_as_here = dtypes == {self.compute_dtype}
            if product is None or not is_as_here:
                return self._write_traced(eqn, values, body)
        if product is None or self.sums is None:
            kind = AbstractValue(self.compute_dtype, LOW._replace(bias_axes=count_bias_axes(eqn, values, self.wide)))
            return self._write_in(kind, eqn, values, body)
        kind = AbstractValue(self.sums, SUM._replace(bias_axes=count_bias_axes(eqn, values, self.wide)))
        keeps = lambda value: is_given(value.kind, self.wide)
        operands = [v.atom if keeps(v) else self._cast(v, self.compute_dtype, body, eqn) for v in values]
        return write_product(product, eqn, operands, kind, body)

    def _write_full(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        return self._write_in(AbstractValue(self._choose_full(eqn, values), FULL), eqn, values, body)

    def _write_wide(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        kind = self._follow(eqn, values)
        results = self._write_in(AbstractValue(self.full_dtype, kind.state), eqn, values, body)
        return [
            Value(body.cast(result.atom, kind.dtype, eqn), kind) if result.kind.dtype is not None else result
            for result in results
        ]

    def _write_following(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        kind = self._follow(eqn, values)
        if kind.dtype != self.full_dtype and self.rounds_given:
            whole = shape_of(eqn.outvars[0])
            values = [
                cast_value(value, kind, note_rounding(eqn), body)
                if is_given(value.kind, self.wide) and shape_of(value.atom) == whole
                else value
                for value in values
            ]
        return self._write_in(kind, eqn, values, body)

    def _write_comparison(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        floats = [value.kind for value in values if value.kind.dtype is not None]
        dtypes = {kind.dtype for kind in floats if not is_exact(kind.state.numbers, self.compute_dtype)}
        dtype = dtypes.pop() if len(dtypes) == 1 else self.full_dtype
        return self._write_in(AbstractValue(dtype, TRACED), eqn, values, body)

    def _write_traced(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        pairs = zip(values, eqn.invars, strict=True)
        atoms = [self._cast(value, float_dtype(atom), body, eqn) for value, atom in pairs]
        floats = [value.kind for value in values if value.kind.dtype is not None]
        # An output in the author's dtype has the level of that dtype, if an operand has a level.
        has_level = any(kind.state.level is not TRACED_LEVEL for kind in floats)
        low = LOW if self.compute_dtype != self.full_dtype else FULL
        dtypes = [float_dtype(var) for var in eqn.outvars]
        states = [TRACED if not has_level else low if dtype == self.compute_dtype else FULL for dtype in dtypes]
        return body.append(eqn, atoms, [*map(AbstractValue, dtypes, states)])

    def _write_conversion(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        """Keeps a cast of the author, unless it only makes a weak type strong."""
        [value], target = values, eqn.params["new_dtype"]
        source, dtype = float_dtype(eqn.invars[0]), float_dtype(eqn.outvars[0])
        if source is None or dtype is None:
            aval: Any = eqn.invars[0].aval
            known = value.kind.state.numbers if source is None and value.kind.state is not None else ()
            numbers = (0.0, 1.0) if aval.dtype == bool else known
            return body.append(eqn, [value.atom], [AbstractValue(dtype, TRACED._replace(numbers=numbers))])
        if target == source:
            return body.append(eqn, [value.atom], [value.kind]) if value.kind.dtype == target else [value]
        state = FULL if target == self.full_dtype else LOW if target == self.compute_dtype else TRACED
        return body.append(eqn, [value.atom], [AbstractValue(target, state)])

    def _write_in(self, kind: AbstractValue, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        """Writes an equation in the dtype of `kind`, which its floating outputs have."""
        dtype, params = kind.dtype, None
        atoms = [v.atom if v.kind.dtype is dtype else self._cast(v, dtype, body, eqn) for v in values]
        kinds = [_NOT_FLOAT if float_dtype(var) is None else kind for var in eqn.outvars]
        if eqn.primitive.name in _COMBINING:
            place = _IN_SOLVER if eqn.primitive.name == _SOLVER else EquationPlace()
            params = self._rewrite_operators(eqn.params, kind, place)
        elif "preferred_element_type" in eqn.params:
            preferred = eqn.params["preferred_element_type"]
            params = None if preferred is None else {**eqn.params, "preferred_element_type": dtype}
        return body.append(eqn, atoms, kinds, params)

    def _rewrite_operators(
        self, params: dict[str, Any], kind: AbstractValue, place: EquationPlace
    ) -> dict[str, Any] | None:
        """Rewrites the jaxprs with which reductions, windows and scatters combine two elements, and of a solver."""
        is_program = lambda leaf: isinstance(leaf, (Jaxpr, ClosedJaxpr))
        arguments = [var for each in filter(is_program, jax.tree.leaves(params)) for var in body_of(each).invars]
        if not any(float_dtype(var) is not None and float_dtype(var) != kind.dtype for var in arguments):
            return None

        def rewrite(program: Any) -> Any:
            body = body_of(program)
            kinds = [_NOT_FLOAT if float_dtype(var) is None else kind for var in body.invars]
            wanted = [None if float_dtype(atom) is None else kind.dtype for atom in body.outvars]
            return Rewriter(self).rewrite(program, kinds, place, wanted).program

        return jax.tree.map(lambda leaf: rewrite(leaf) if is_program(leaf) else leaf, params)

    def _cast(self, value: Value, dtype: np.dtype, body: JaxprBuilder, eqn: JaxprEqn) -> Atom:
        atom, source = value.atom, value.kind.dtype
        if source is None or source == dtype:
            return atom
        if value.kind.state.numbers and dtype == self.compute_dtype:
            atom = clamp_masks(atom, value.kind.state.numbers, float(jnp.finfo(dtype).max), eqn, body)
        if is_wider(source, dtype):  # cast down at each use, so that gradients of a weight sum in its dtype
            return body.cast(atom, dtype, eqn)
        return body.cast_once(atom, dtype, eqn)

    def _follow(self, eqn: JaxprEqn, values: Sequence[Value]) -> AbstractValue:
        """Returns the kind of the outputs of an operation that follows its operands."""
        kinds = [kind for _, kind in values if kind.dtype is not None]
        state = follow_promotion(eqn, kinds, self.wide, rounds_given=self.rounds_given)
        if state.level:
            full = state.level is FULL_LEVEL
            return AbstractValue(self._choose_full(eqn, values) if full else self._dtype_of(state.level), state)
        numbers = find_numbers(eqn, [kind.state.numbers for kind in kinds])
        traced = (float_dtype(atom) for atom in (*eqn.outvars, *eqn.invars))
        dtype = next((dtype for dtype in traced if dtype is not None), None)
        if numbers:
            return AbstractValue(dtype, TRACED._replace(numbers=numbers))
        if eqn.primitive.name not in _MOVING or any(kind.state.computed for kind in kinds):
            return AbstractValue(dtype, _COMPUTED)
        row_axes = count_row_axes(eqn, kinds[0].state) if kinds else 0
        return AbstractValue(dtype, TRACED._replace(row_axes=row_axes) if row_axes else TRACED)

    def _choose_full(self, eqn: JaxprEqn, values: Sequence[Value]) -> np.dtype:
        """Returns the full dtype, or a wider one of the operands of a move or a sum of gradients."""
        is_kept = eqn.primitive.name in _KEEPING_WIDTH
        return self._widest([value.kind for value in values]) if is_kept else self.full_dtype

    def _widest(self, kinds: Sequence[AbstractValue]) -> np.dtype:
        wide = (kind.dtype for kind in kinds if kind.dtype in self.wide)
        return max([self.full_dtype, *wide], key=lambda dtype: dtype.itemsize)

    def _dtype_of(self, level: int) -> np.dtype:
        return self.compute_dtype if level < SUM_LEVEL else FLOAT32 if level is SUM_LEVEL else self.full_dtype


PRECISION_WRITERS: dict[Precision, Callable[[EquationWriter, JaxprEqn, list[Value], JaxprBuilder], list[Value]]] = {
    Precision.LOW: EquationWriter._write_low,
    Precision.FULL: EquationWriter._write_full,
    Precision.WIDE: EquationWriter._write_wide,
    Precision.INFER: EquationWriter._write_following,
    Precision.CLEAR: EquationWriter._write_following,
    Precision.COMPARE: EquationWriter._write_comparison,
    Precision.TRACED: EquationWriter._write_traced,
}
