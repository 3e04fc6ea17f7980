"""Operations as they are written in the dtype of reductions, and in the forms that platforms can run."""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Var
from jax.extend.source_info_util import new_name_stack

from ..._jaxpr import Body, float_dtype, is_float, without_mesh


def write_product(eqn: JaxprEqn, atoms: list[Any], body: Body, dtype: np.dtype) -> Var:
    """Writes a product whose sums and results have a dtype; what is multiplied keeps its own.

    XLA:CPU cannot run all products of half-precision tensors whose result is wider, and cuDNN promises no such
    convolution: where those are called, what is multiplied is cast first. TensorFloat-32 holds it exactly.

    Returns:
      The variable of the result.
    """
    params = {**eqn.params, "preferred_element_type": dtype}
    outvars = [type(var)(_change_dtype(var, dtype)) for var in eqn.outvars]
    direct = eqn.replace(invars=list(atoms), outvars=outvars, params=params)
    if all(float_dtype(atom) == dtype for atom in atoms if is_float(atom)):
        body.equations.append(direct)
        return outvars[0]
    casting = _CASTING.get(eqn.primitive.name, ("cpu",))
    index, choice = [template.replace(source_info=eqn.source_info, ctx=eqn.ctx) for template in _trace_choice(casting)]
    branches = tuple([_make_branch(direct, dtype if names else None) for names in choice.params["branches_platforms"]])
    place = Var(index.outvars[0].aval)
    body.equations.append(index.replace(outvars=[place]))
    params = {**choice.params, "branches": branches}
    body.equations.append(choice.replace(invars=[place, *atoms], outvars=outvars, params=params))
    return outvars[0]


def _make_branch(eqn: JaxprEqn, dtype: np.dtype | None) -> ClosedJaxpr:
    """A program that is one equation, of operands that are cast to a dtype before, if one is given."""
    eqn = eqn.replace(source_info=eqn.source_info.replace(name_stack=new_name_stack()))  # the choice has it
    arguments, results = [Var(atom.aval) for atom in eqn.invars], [Var(var.aval) for var in eqn.outvars]
    body, operands = Body(), list[Any](arguments)
    if dtype is not None:
        operands = [var if float_dtype(var) is None else body.cast_once(var, dtype, eqn) for var in arguments]
    eqns = [*body.equations, eqn.replace(invars=operands, outvars=results)]
    return ClosedJaxpr(Jaxpr((), arguments, results, eqns, debug_info=_NAMELESS), ())


def make_scatter_params(eqn: JaxprEqn, dtype: np.dtype) -> dict[str, Any]:
    """The parameters of a `scatter-add` in a dtype: it holds the program that adds two numbers."""
    return {**eqn.params, **_trace_addition(dtype)}


@functools.cache
def _trace_addition(dtype: np.dtype) -> dict[str, Any]:
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    with without_mesh():
        x = np.zeros((1,), dtype)
        program = jax.make_jaxpr(lambda x: lax.scatter_add(x, np.zeros((1, 1), np.int32), x, numbers))(x)
    params = next(eqn.params for eqn in program.eqns if eqn.primitive.name == "scatter-add")
    return {name: params[name] for name in ("update_jaxpr", "update_consts")}


@functools.cache
def _trace_choice(platforms: tuple[str, ...]) -> tuple[JaxprEqn, JaxprEqn]:
    """The two equations of a choice between some platforms and all others."""
    branches = dict.fromkeys(platforms, lambda x: x + 1)
    with without_mesh():
        program = jax.make_jaxpr(lambda x: lax.platform_dependent(x, **branches, default=lambda x: x))(1.0)
    index, choice = program.eqns
    return index, choice


def _change_dtype(var: Var, dtype: np.dtype) -> Any:
    aval: Any = var.aval
    return aval.update(dtype=dtype, weak_type=False)


_CASTING = {"conv_general_dilated": ("cpu", "cuda", "rocm")}
"""The platforms on which operands are cast first; for other products it is CPUs alone."""

_NAMELESS = DebugInfo("product", "product", None, None)
