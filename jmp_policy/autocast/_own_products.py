"""Quantizes the matmuls that a Flax model writes in its own code, by its own weights. All else runs as traced."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from .._base import Args, Kwargs, Results
from .._jaxpr import (
    AUTOCAST,
    CUSTOM,
    WRITERS,
    AbstractValue,
    JaxprBuilder,
    Rewriter,
    Rule,
    Traced,
    Value,
    evaluate,
    explain_tracing,
    float_dtype,
    is_backward,
    name_stack,
    shape_of,
    trace,
)
from ..policy import BlockFormat, Float8, Quantization, needs_rng
from ..quant import WHY_TABLES_WIDE, needs_state
from ._place import EquationPlace
from ._precision import write_product
from ._weight_products import Product, describe_weight_product
from ._weights import A_WEIGHT, NO_WEIGHT, WEIGHT_PRODUCTS, Names, WeightFinder, WeightUse, follow_weights


class WeightFormat(NamedTuple):
    """What a policy says of a weight."""

    quantization: Quantization
    accumulate: np.dtype | None = None
    is_table: bool = False  # True if rows of it are looked up, too
    is_of_layer: bool = False  # True if a layer of Flax owns it, and the code around multiplies by it


class OwnWeight(NamedTuple):
    """A weight that a model multiplies by in its own code; the row of `explain`."""

    path: str
    array: Any
    quantization: str  # its format, or why it is left


class _State(NamedTuple):
    """Marks a value that consists of elements of a weight. It keeps the dtype of the weight."""

    format: WeightFormat
    dtype: np.dtype  # the one it was traced in, to which anything but a quantized matmul casts it


@dataclasses.dataclass(frozen=True)
class ProductRule(Rule):
    """Quantizes the matmuls of marked weights, from the dtype that these are stored in."""

    def contexts(self, outer: EquationPlace, program: Jaxpr) -> list[EquationPlace]:
        return [outer._replace(backward=outer.backward or is_backward(name_stack(eqn))) for eqn in program.eqns]

    def enters(self, eqn: JaxprEqn, context: EquationPlace) -> bool:
        """True if the sub-jaxprs of an equation are rewritten."""
        return eqn.primitive.name in WRITERS and eqn.primitive.name not in CUSTOM

    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        first = kinds[0]
        if all(kind == first for kind in kinds):
            return first
        return AbstractValue(first.dtype if first.state is None else first.state.dtype)

    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: EquationPlace) -> list[Value]:
        states = [value.kind.state for value in values]
        marked = [state for state in states if state is not None]
        if marked and eqn.primitive.name in WEIGHT_PRODUCTS:
            read = [NO_WEIGHT if state is None else A_WEIGHT for state in states]
            product = describe_product(eqn, read, marked[0].format, context)
            if not isinstance(product, str):
                return self._write_product(product, eqn, values, body)
        elif marked:
            moved = self._move(eqn, values, body)
            if moved is not None:
                return moved
        atoms = [
            value.atom if (state := value.kind.state) is None else body.cast(value.atom, state.dtype, eqn)
            for value in values
        ]
        return body.append(eqn, atoms, [AbstractValue(float_dtype(var)) for var in eqn.outvars])

    def _move(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value] | None:
        """Writes an equation that moves or casts weights, which keep their dtype; returns None for any other."""
        kinds = [value.kind for value in values]
        made = follow_weights(eqn, [NO_WEIGHT if kind.state is None else A_WEIGHT for kind in kinds])
        floating = {kind for kind in kinds if kind.dtype is not None}
        if not any(made) or len(floating) > 1:
            return None
        (kind,) = floating
        if eqn.primitive.name != "convert_element_type":
            return body.append(
                eqn,
                [value.atom for value in values],
                [kind if own else AbstractValue(float_dtype(var)) for own, var in zip(made, eqn.outvars, strict=True)],
            )
        # The cast waits for an operation that needs it. One before it does not: it may round.
        dtype: Any = kind.state.dtype if kind.dtype != kind.state.dtype else kind.dtype
        atom = body.cast(values[0].atom, dtype, eqn)
        return [Value(atom, AbstractValue(dtype, kind.state._replace(dtype=float_dtype(eqn.outvars[0]))))]

    def _write_product(self, product: Product, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        made: Any = float_dtype(eqn.outvars[0])
        product = dataclasses.replace(product, options=(*product.options, ("preferred_element_type", made)))
        (out,) = write_product(_NamedProduct(product), eqn, [value.atom for value in values], AbstractValue(made), body)
        return [Value(body.cast(out.atom, made, eqn), AbstractValue(made))]


@dataclasses.dataclass(frozen=True)
class _NamedProduct:
    """A matmul in a scope by which `audit` and another rewriter know that its casts are meant."""

    product: Product

    @jax.named_scope(AUTOCAST)
    def __call__(self, *operands: jax.Array) -> jax.Array:
        return self.product(*operands)


def describe_product(eqn: JaxprEqn, read: Sequence[Names], format: WeightFormat, place: EquationPlace) -> Product | str:
    """Returns the quantized form of a matmul, given the weights in its operands, or the reason to leave it."""
    if place.backward:
        return _WHY_BACKWARD
    if all(read[:2]):
        return "both operands are weights"
    if needs_state(format.quantization) or needs_rng(format.quantization):
        return _WHY_NO_STATE
    quantization = format.quantization
    if format.is_table:  # as a table of Flax's
        if isinstance(quantization, Float8 | BlockFormat):
            return WHY_TABLES_WIDE
        quantization = quantization.for_tables
    product = describe_weight_product(eqn, 0 if read[0] else 1, quantization, format.accumulate)
    if isinstance(product, str):
        return product
    return product.reason_left([shape_of(atom) for atom in eqn.invars]) or product


_WHY_BACKWARD = "its gradient is computed inside of the model"
_WHY_NO_STATE = "the format keeps a state or a key for each layer, and its code is no layer of Flax's"

_WHY_LOOKED_UP = "its rows are looked up, by code that is no layer of Flax's"

_FOUND: contextvars.ContextVar[list[OwnWeight] | None] = contextvars.ContextVar("_FOUND", default=None)


@contextlib.contextmanager
def list_own_weights() -> Iterator[list[OwnWeight]]:
    """Lists the weights of the models that are traced inside."""
    found: list[OwnWeight] = []
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)


FindFormats = Callable[[], Sequence[tuple[str, WeightFormat] | None]]


def quantize_products(fun: Callable[..., Any], args: Args, kwargs: Kwargs, find_formats: FindFormats) -> Any:
    """Calls a function of arrays, with the matmuls by its weights quantized.

    After the function was traced, `find_formats` returns the path and format of each array leaf of its arguments, or
    None for one that is no weight.
    """
    results = Results()
    with explain_tracing("a quantized policy", ""):
        traced = trace(results.take_arrays(fun), args, kwargs)
    program, marked = traced.program, _find_marked(traced, find_formats())
    if marked:
        dtypes = [float_dtype(var) for var in program.jaxpr.invars]
        kinds = [
            AbstractValue(dtype, _State(marked[i], dtype) if dtype is not None and i in marked else None)
            for i, dtype in enumerate(dtypes)
        ]
        wanted = [float_dtype(var) for var in program.jaxpr.outvars]
        program = Rewriter(_RULE).rewrite(program, kinds, EquationPlace(), wanted).program
    # Equation by equation, as the model would run without this.
    return results.put_back(jax.tree.unflatten(traced.out_tree, evaluate(program, *traced.leaves)))


def _find_marked(traced: Traced, weights: Sequence[tuple[str, WeightFormat] | None]) -> dict[int, WeightFormat]:
    """Returns the formats of the weights that a quantized matmul reads, by number. Lists all of them for `explain`."""
    program = traced.program.jaxpr
    paths = {i: weight[0] for i, weight in enumerate(weights) if weight is not None}
    formats = {i: weight[1] for i, weight in enumerate(weights) if weight is not None}
    names = [frozenset([i]) if i in formats else NO_WEIGHT for i in range(len(weights))]

    def find_product(eqn: JaxprEqn, read: Sequence[Names], place: EquationPlace) -> Product | str:
        first, *others = sorted(NO_WEIGHT.union(*read))
        if any(formats[other] != formats[first] for other in others):
            return "its parts have different formats"
        return describe_product(eqn, read, formats[first], place)

    def find_uses() -> dict[int, list[WeightUse]]:
        uses, _ = WeightFinder(find_product, _RULE.contexts, _RULE.enters).find(program, names, EquationPlace())
        return {i: [use for use in uses if i in use.names] for i in formats}

    uses = find_uses()
    tables = {i for i, own in uses.items() if any(use.is_lookup for use in own)}
    if tables:
        formats |= {i: formats[i]._replace(is_table=True) for i in tables}
        uses = find_uses()
    marked = {i: formats[i] for i, own in uses.items() if any(not isinstance(use.product, str) for use in own)}
    found = _FOUND.get()
    if found is not None:
        listed = [i for i in uses if not formats[i].is_of_layer]
        found += [OwnWeight(paths[i], traced.leaves[i], _describe(uses[i])) for i in listed]
    return marked


def _describe(uses: Sequence[WeightUse]) -> str:
    """Describes how a weight is multiplied by, or why it is left."""
    products = [use.product for use in uses if use.is_product]
    others = [_WHY_LOOKED_UP if use.is_lookup else use.product for use in uses if not use.is_product]
    texts = [f"left: {own}" if isinstance(own, str) else str(own) for own in products or others]
    return "; ".join(dict.fromkeys(texts)) or "left: nothing reads it"


_RULE = ProductRule()
