"""Rewrites a gradient jaxpr with its sums in another dtype, in forms that run on every platform."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.source_info_util import new_name_stack

from .._jaxpr import MATMULS, AbstractValue, JaxprBuilder, Rule, Value, float_dtype, is_float, without_mesh
from ._reduce_marks import SCATTERED_SUM, Upcasts, find_marks, is_narrower_dtype, is_pairwise


def _write_wide_product(eqn: JaxprEqn, atoms: list[Any], body: JaxprBuilder, dtype: np.dtype) -> Var:
    """Writes a matmul with an output dtype, and returns its output. The operands keep their dtypes if possible."""
    params = {**eqn.params, "preferred_element_type": dtype}
    [result], aval = eqn.outvars, cast(Any, eqn.outvars[0].aval)
    made = type(result)(aval.update(dtype=dtype, weak_type=False))
    direct = eqn.replace(invars=list(atoms), outvars=[made], params=params)
    if all(float_dtype(atom) == dtype for atom in atoms if is_float(atom)):
        body.equations.append(direct)
        return made
    # XLA:CPU cannot run all half-precision matmuls with a wider output, and cuDNN does not promise such a convolution.
    # There the operands are cast first. TensorFloat-32 represents them exactly.
    casting = _CASTING.get(eqn.primitive.name, ("cpu",))
    index, choice = [template.replace(source_info=eqn.source_info, ctx=eqn.ctx) for template in _trace_choice(casting)]
    branches = tuple([_make_branch(direct, dtype if names else None) for names in choice.params["branches_platforms"]])
    place = Var(index.outvars[0].aval)
    body.equations.append(index.replace(outvars=[place]))
    params = {**choice.params, "branches": branches}
    body.equations.append(choice.replace(invars=[place, *atoms], outvars=[made], params=params))
    return made


def _make_branch(eqn: JaxprEqn, dtype: np.dtype | None) -> ClosedJaxpr:
    """Returns a jaxpr of one equation, with operands that are cast to `dtype` if it is given."""
    eqn = eqn.replace(source_info=eqn.source_info.replace(name_stack=new_name_stack()))  # the outer equation has it
    arguments, results = [Var(atom.aval) for atom in eqn.invars], [Var(var.aval) for var in eqn.outvars]
    body, operands = JaxprBuilder(), list[Any](arguments)
    if dtype is not None:
        operands = [var if float_dtype(var) is None else body.cast_once(var, dtype, eqn) for var in arguments]
    eqns = [*body.equations, eqn.replace(invars=operands, outvars=results)]
    return ClosedJaxpr(Jaxpr((), arguments, results, eqns, debug_info=_NAMELESS), ())


@functools.cache
def _trace_addition(dtype: np.dtype) -> dict[str, Any]:
    """Returns the parameters of a `scatter-add` that contain the jaxpr of an addition."""
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    with without_mesh():
        x = np.zeros((1,), dtype)
        program = jax.make_jaxpr(lambda x: lax.scatter_add(x, np.zeros((1, 1), np.int32), x, numbers))(x)
    params = next(eqn.params for eqn in program.eqns if eqn.primitive.name == "scatter-add")
    return {name: params[name] for name in ("update_jaxpr", "update_consts")}


@functools.cache
def _trace_choice(platforms: tuple[str, ...]) -> tuple[JaxprEqn, JaxprEqn]:
    """Returns the two equations of a choice between some platforms and all others."""
    branches = dict.fromkeys(platforms, lambda x: x + 1)
    with without_mesh():
        program = jax.make_jaxpr(lambda x: lax.platform_dependent(x, **branches, default=lambda x: x))(1.0)
    index, choice = program.eqns
    return index, choice


_CASTING = {"conv_general_dilated": ("cpu", "cuda", "rocm")}  # platforms that need cast operands; for others: CPUs

_NAMELESS = DebugInfo("product", "product", None, None)


@dataclasses.dataclass(frozen=True)
class Widening(Rule):
    """Writes marked equations in the reduce dtype, and all others as traced."""

    dtype: np.dtype

    def contexts(self, outer: Upcasts | None, program: Jaxpr) -> Sequence[Upcasts | None]:
        if outer is None or len(outer.needs) != len(program.outvars):  # the latter is the condition of a `while`
            return [None] * len(program.eqns)
        return find_marks(program, outer.needs, outer.origins, self.dtype).places

    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Upcasts | None) -> list[Value]:
        traced = [AbstractValue(float_dtype(var)) for var in eqn.outvars]
        if context is None:
            return body.append(eqn, self._restore(eqn, values, body), traced)
        kinds = [
            AbstractValue(self.dtype) if need and is_narrower_dtype(kind.dtype, self.dtype) else kind
            for kind, need in zip(traced, context.needs, strict=True)
        ]
        name = eqn.primitive.name
        if name in MATMULS:
            atoms = self._restore(eqn, values, body)
            if kinds == traced:
                return body.append(eqn, atoms, kinds)
            return [Value(_write_wide_product(eqn, atoms, body, self.dtype), kinds[0])]
        if name == "convert_element_type" and values[0].kind.dtype is not None:
            return self._convert(eqn, values[0], body, kinds[0])
        if is_pairwise(eqn):
            atoms = body.cast_values(values, kinds, eqn)
        elif kinds == traced:
            atoms = self._restore(eqn, values, body)
        else:
            cast_up = lambda value: body.cast_once(value.atom, self.dtype, eqn)
            atoms = [cast_up(v) if is_narrower_dtype(v.kind.dtype, self.dtype) else v.atom for v in values]
        is_sum = name == SCATTERED_SUM and kinds != traced
        return body.append(eqn, atoms, kinds, eqn.params | _trace_addition(self.dtype) if is_sum else None)

    def cast_operands(
        self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Upcasts | None
    ) -> list[Value]:
        stays = [False] * len(values) if context is None else context.enters
        return self._restore_values(eqn, values, body, stays)

    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        return functools.reduce(lambda a, b: b if is_narrower_dtype(a.dtype, b.dtype) else a, kinds)

    def _convert(self, eqn: JaxprEqn, value: Value, body: JaxprBuilder, kind: AbstractValue) -> list[Value]:
        """Writes a cast, or omits it if the value already has the dtype, so that nothing rounds it in between."""
        if value.kind.dtype == kind.dtype:
            return [Value(value.atom, kind)]
        if kind.dtype == float_dtype(eqn.outvars[0]):
            return body.append(eqn, [value.atom], [kind])
        return [Value(body.cast(value.atom, self.dtype, eqn), kind)]

    def _restore(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Var | Literal]:
        """Returns the operands in the dtypes with which the equation was traced."""
        return [value.atom for value in self._restore_values(eqn, values, body, [False] * len(values))]

    def _restore_values(
        self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, stays: Sequence[bool]
    ) -> list[Value]:
        restored = []
        for atom, value, is_left in zip(eqn.invars, values, stays, strict=True):
            dtype = float_dtype(atom)
            if not is_left and dtype is not None and value.kind.dtype != dtype:
                value = Value(body.cast_once(value.atom, dtype, eqn), AbstractValue(dtype))
            restored.append(value)
        return restored
