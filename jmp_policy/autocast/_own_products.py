"""Quantizes the matmuls that a Flax model writes in its own code, by its own weights. All else runs as traced."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal  # pyright: ignore[reportPrivateImportUsage]

from .._base import Args, Results, warn_once
from .._jaxpr import (
    AUTOCAST,
    CUSTOM,
    WRITERS,
    AbstractValue,
    Atom,
    JaxprBuilder,
    Rewriter,
    Rule,
    Traced,
    Value,
    evaluate,
    explain_tracing,
    float_dtype,
    is_backward,
    list_live,
    name_stack,
    refuse_lost_arrays,
    shape_of,
    trace,
)
from ..modules import find_bridge
from ..quant import (
    Deferred,
    FakeQuantized,
    Layout,
    at_path,
    collect_deferred,
    fake_quantize,
    find_structure,
    is_observing,
    prepare_weight,
)
from ._observed import evaluate_observed
from ._place import EquationPlace
from ._precision import trace_product, write_product, write_program
from ._stored_reads import move_reads_inside
from ._weight_products import (
    ANNOTATED,
    TAKING,
    WHY_NAMED,
    AttentionProduct,
    LookUp,
    Order,
    Product,
    StoredProduct,
    StoredRaggedProduct,
    choose_table_format,
    describe_element,
    describe_lookup,
    describe_stored_lookup,
    describe_stored_product,
    find_layout,
    move_axes,
)
from ._weights import (
    A_WEIGHT,
    FOUND,
    NO_WEIGHT,
    WEIGHT_PRODUCTS,
    WHY_NO_KEY,
    OwnWeight,
    Uses,
    WeightFormat,
    Weights,
    WeightUse,
    describe_product,
    describe_stored,
    describe_uses,
    find_uses,
    fits_element,
    follow_weights,
    is_times_one,
)


class _State(NamedTuple):
    """Marks a value that consists of elements of a floating weight. It keeps the dtype of the weight."""

    format: WeightFormat
    casts: tuple[np.dtype, ...]  # that it was traced with; a quantized matmul reads it as stored, all else as cast
    number: int  # of the weight
    order: Order = None  # of its axes
    is_taken: bool = False  # True for one element of a stack

    @property
    def dtype(self) -> np.dtype:
        """The dtype that it was traced in."""
        return self.casts[-1]


class _Leaf(NamedTuple):
    """Marks an array of a stored weight."""

    number: int


class _Stored(NamedTuple):
    """A value that was read from a stored weight."""

    structure: Any
    atoms: Sequence[Atom]  # the arrays of the weight
    order: Order
    leaf: _Leaf | None


@dataclasses.dataclass(eq=False)
class ProductRule(Rule):
    """Quantizes the matmuls of marked weights, from the dtype that these are stored in, and of stored weights.

    It notes the layouts of floating weights, and the uses of stored ones, by number. While products are observed, those
    of the outermost jaxpr are not written: they stand in `products`, by the variable of their output.
    """

    modules: dict[int, str | None] = dataclasses.field(default_factory=dict)
    """The path of the module that owns each weight, by number; None for an array in a tree, which is not observed."""

    layouts: dict[int, set[Layout | None]] = dataclasses.field(default_factory=dict)
    products: dict[Any, Deferred] = dataclasses.field(default_factory=dict)
    entered: set[Any] = dataclasses.field(default_factory=set)
    """The names of functions that take weights."""

    uses: dict[int, list[StoredProduct | StoredRaggedProduct | LookUp | str]] = dataclasses.field(default_factory=dict)

    fusing = frozenset(("jit",))

    def __post_init__(self) -> None:
        self.rewritten: Any = weakref.WeakKeyDictionary()

    def contexts(self, outer: EquationPlace, program: Jaxpr) -> list[EquationPlace]:
        path = _OUTERMOST if outer.path == _AROUND else ""
        backward = [outer.backward or is_backward(name_stack(eqn)) for eqn in program.eqns]
        return [outer._replace(path=path, backward=own) for own in backward]

    def enters(self, eqn: JaxprEqn, context: EquationPlace) -> bool:
        """True if the sub-jaxprs of an equation are rewritten."""
        return eqn.primitive.name in WRITERS and eqn.primitive.name not in CUSTOM

    def cast_operands(
        self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: EquationPlace
    ) -> list[Value]:
        """Notes weights that enter a sub-jaxpr after a move: if stored, they would be read before it."""
        for value in values:
            state = value.kind.state
            if isinstance(state, _State):
                self.entered.add(eqn.params.get("name"))
                axes = tuple(range(-len(shape_of(value.atom)), 0))  # of the value, which may be one layer of a stack
                is_in_order = state.order is not None and state.order[-len(axes) :] == axes
                if not is_in_order or state.is_taken or len(state.casts) > 2:
                    self.layouts.setdefault(state.number, set()).add(None)
        return values

    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        first = kinds[0]
        if all(kind == first for kind in kinds):
            return first
        return AbstractValue(first.state.dtype if isinstance(first.state, _State) else first.dtype)

    def carried(self, kind: AbstractValue, dtype: np.dtype | None) -> AbstractValue:
        if isinstance(kind.state, _State):  # a stored weight is read before the loop
            self.layouts.setdefault(kind.state.number, set()).add(None)
        return kind

    def fuse(
        self,
        program: Jaxpr,
        start: int,
        read: Callable[[Atom], Value],
        body: JaxprBuilder,
        contexts: Sequence[EquationPlace],
    ) -> tuple[int, list[Value]] | None:
        """Writes the function that reads a stored weight as its equations, and notes which value they make."""
        eqn = program.eqns[start]
        structure = find_structure(eqn.params["name"])
        if structure is None or not eqn.outvars:
            return None
        if len(eqn.invars) != structure.num_leaves:  # a part of the read, which JAX 0.10 splits in a scan of linen
            return None
        values = [read(atom) for atom in eqn.invars]
        (out,) = write_program(eqn.params["jaxpr"].jaxpr, eqn, [value.atom for value in values], body)
        weight: Any = jax.tree.unflatten(structure, [value.atom.aval for value in values])
        if weight.shape == shape_of(out.atom):  # not under `vmap`, which may add an axis anywhere
            leaf = next((value.kind.state for value in values if value.kind.state is not None), None)
            order = tuple(range(-weight.ndim, 0))
            body.sources[out.atom] = _Stored(structure, [value.atom for value in values], order, leaf)
        return 1, [out]

    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: EquationPlace) -> list[Value]:
        stored = [None if isinstance(value.atom, Literal) else body.sources.get(value.atom) for value in values]
        if any(stored):
            return self._use_stored(eqn, _settle(eqn, values, body), stored, body, context)
        states = [value.kind.state if isinstance(value.kind.state, _State) else None for value in values]
        marked = [state for state in states if state is not None]
        if marked and eqn.primitive.name in WEIGHT_PRODUCTS:
            read = [NO_WEIGHT if state is None else A_WEIGHT for state in states]
            product = describe_product(eqn, read, marked[0].format, context)
            if not isinstance(product, str):
                assert not isinstance(product, AttentionProduct)
                layout = find_layout(eqn, product.position, marked[0].order, product.quantization)
                self.layouts.setdefault(marked[0].number, set()).add(layout)
                atoms = [value.atom for value in values]
                return self._write_product(product, eqn, atoms, marked[0].number, body, context)
        elif marked:
            table = states[0] if eqn.primitive.name == "gather" else None
            lookup = None if table is None else self._find_lookup(eqn, table)
            if lookup is not None:
                atoms = [values[1].atom, values[0].atom]
                return self._write_product(lookup, eqn, atoms, marked[0].number, body, context)
            moved = self._move(eqn, values, body)
            if moved is not None:
                return moved
        atoms = [value.atom for value in _settle(eqn, values, body)]
        return body.append(eqn, atoms, [AbstractValue(float_dtype(var)) for var in eqn.outvars])

    def _find_lookup(self, eqn: JaxprEqn, state: _State) -> LookUp | None:
        """Finds a lookup of rows of a table that no layer of Flax owns, and notes its layout."""
        shape = shape_of(eqn.invars[0])
        table = "" if state.format.is_of_layer else choose_table_format(state.format.quantization, shape)
        lookup = None if isinstance(table, str) else describe_lookup(eqn, table)
        is_whole = lookup is not None and state.order == (-2, -1)
        self.layouts.setdefault(state.number, set()).add(Layout(shape[1:], 0) if is_whole else None)
        return lookup

    def _move(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value] | None:
        """Writes an equation that moves or casts weights, which keep their dtype; returns None for any other."""
        kinds = [value.kind for value in values]
        made = follow_weights(eqn, [A_WEIGHT if isinstance(kind.state, _State) else NO_WEIGHT for kind in kinds])
        if any(made) and is_times_one(eqn):
            (weight,) = (value for value in values if isinstance(value.kind.state, _State))
            self.layouts.setdefault(weight.kind.state.number, set()).add(None)  # stored, it would be multiplied
            return [weight]
        floating = [kind for kind in kinds if kind.dtype is not None]
        first = floating[0]
        alike = {(kind.dtype, kind.state.format, kind.state.casts) for kind in floating if kind.state is not None}
        if not any(made) or len(alike) > 1:
            return None
        if eqn.primitive.name != "convert_element_type":
            for kind in floating if len(floating) > 1 else ():  # joined: each alone cannot be stored
                self.layouts.setdefault(kind.state.number, set()).add(None)
            is_taken = first.state.is_taken or eqn.primitive.name in TAKING
            state = first.state._replace(order=move_axes(eqn, first.state.order), is_taken=is_taken)
            moved = first._replace(state=state)
            kinds = [
                moved if own else AbstractValue(float_dtype(var)) for own, var in zip(made, eqn.outvars, strict=True)
            ]
            return body.append(eqn, [value.atom for value in values], kinds)
        # The cast waits for an operation that needs it.
        casts = (*first.state.casts, float_dtype(eqn.outvars[0]))
        return [Value(values[0].atom, first._replace(state=first.state._replace(casts=casts)))]

    def _use_stored(
        self,
        eqn: JaxprEqn,
        values: list[Value],
        stored: Sequence[_Stored | None],
        body: JaxprBuilder,
        context: EquationPlace,
    ) -> list[Value]:
        """Writes an equation that reads a stored weight: its matmul, a move or cast, or any other unchanged."""
        position = next(i for i, source in enumerate(stored) if source is not None)
        source: Any = stored[position]
        product: StoredProduct | StoredRaggedProduct | LookUp | str = ""
        if eqn.primitive.name == "gather" and position == 0:
            product = describe_stored_lookup(eqn, source.structure, source.order)
        if eqn.primitive.name in WEIGHT_PRODUCTS:
            product = describe_stored_product(eqn, position, source.structure, source.order)
            if sum(own is not None for own in stored[:2]) > 1:
                product = "both operands are weights"
        element = describe_element(eqn, source.order, len(source.atoms))
        if source.leaf is not None and eqn.primitive.name not in _MOVING and element is None:
            self.uses.setdefault(source.leaf.number, []).append(product or f"{eqn.primitive.name} reads it")
        others = [value.atom for i, value in enumerate(values) if i != position]
        if not isinstance(product, str):
            number = None if source.leaf is None else source.leaf.number
            return self._write_product(product, eqn, [*others, *source.atoms], number, body, context)
        results = body.append(eqn, [v.atom for v in values], [AbstractValue(float_dtype(var)) for var in eqn.outvars])
        if element is not None:
            operands = [*source.atoms, *others]
            program = trace_product(element, tuple(atom.aval for atom in operands), eqn.ctx)
            source = source._replace(atoms=[made.atom for made in write_program(program, eqn, operands, body)])
        if eqn.primitive.name in _MOVING or element is not None:
            body.sources[results[0].atom] = source._replace(order=move_axes(eqn, source.order))
        return results

    def _write_product(
        self,
        product: Product | StoredProduct | StoredRaggedProduct | LookUp,
        eqn: JaxprEqn,
        atoms: Sequence[Atom],
        number: Any,  # of the weight, or None
        body: JaxprBuilder,
        context: EquationPlace,
    ) -> list[Value]:
        kind = AbstractValue(float_dtype(eqn.outvars[0]))
        if not isinstance(product, LookUp):
            product = dataclasses.replace(product, options=(*product.options, ("preferred_element_type", kind.dtype)))
        path = self.modules.get(number, "")
        if is_observing() and path is not None:
            if context.path == _OUTERMOST:
                results = body.append(eqn, atoms, [kind])
                call = lambda *operands: [product(*operands).astype(kind.dtype)]
                self.products[results[0].atom] = Deferred(call, path)
                return results
            with at_path(path):  # reports operands without values
                jax.eval_shape(lambda *operands: product(*operands), *(atom.aval for atom in atoms))
        (out,) = write_product(_NamedProduct(product), eqn, atoms, kind, body)
        return [Value(body.cast(out.atom, kind.dtype, eqn), kind)]


def _settle(eqn: JaxprEqn, values: Sequence[Value], body: JaxprBuilder) -> list[Value]:
    """Casts each weight like its trace."""

    def settle(value: Value) -> Value:
        state, atom = value.kind.state, value.atom
        if not isinstance(state, _State):
            return value
        for dtype in state.casts:
            atom = body.cast(atom, dtype, eqn)
        return Value(atom, AbstractValue(state.dtype))

    return list(map(settle, values))


@dataclasses.dataclass(frozen=True)
class _NamedProduct:
    """A matmul in a scope by which `audit` and another rewriter know that its casts are meant."""

    product: Product | StoredProduct | StoredRaggedProduct | LookUp

    @jax.named_scope(AUTOCAST)
    def __call__(self, *operands: jax.Array) -> jax.Array:
        return self.product(*operands)


_AROUND, _OUTERMOST = "around", "outermost"
"""The paths of the place around the outermost jaxpr, and of those in it."""

_MOVING = ("convert_element_type", "transpose", *ANNOTATED)
"""Primitives through which a stored weight is followed."""


def quantize_products(fun: Callable[..., Any], args: Args, given: Any, find_weights: Callable[[], Weights]) -> Any:
    """Calls a function of arrays, with the matmuls by its weights quantized under the `given` policy or map.

    `find_weights` is called after the function was traced.
    """
    results = Results()
    with explain_tracing("a quantized policy", ""), collect_deferred() as deferred:
        traced = trace(results.take_arrays(fun), args, {})
    refuse_lost_arrays(results.list_others().values())
    weights = find_weights()
    uses, formats = find_uses(traced.program.jaxpr, weights.floating, _RULE.contexts, _RULE.enters)
    marked = {i for i, own in uses.items() if any(not isinstance(use.product, str) for use in own)}
    program, rule = _rewrite(traced.program, {i: formats[i] for i in marked}, weights, deferred)
    # A weight that is stored by its name, and not as one layout for all its matmuls, is rounded as it is stored.
    rounded = {
        i: own for i, own in formats.items() if own.layout is not None and _find_shared_layout(uses[i], rule, i) is None
    }
    if marked & rounded.keys():
        program, rule = _rewrite(traced.program, {i: formats[i] for i in marked - rounded.keys()}, weights, deferred)
    leaves = [_round(leaf, rounded[i]) if i in rounded else leaf for i, leaf in enumerate(traced.leaves)]
    found = FOUND.get()
    if found is not None:
        own = _list_floating(traced, weights.floating, uses, rule, rounded)
        own += [
            describe_stored(traced.leaves[i], *stored, rule.uses.get(i, ())) for i, stored in weights.stored.items()
        ]
        bridge = find_bridge()
        if bridge is not None:  # stored weights do not cross it
            own = [one._replace(path=f"{bridge}/{one.path}".lstrip("/"), layout=None) for one in own]
        found.update((one.path, one) for one in own)
    elif wide := [i for i, own in uses.items() if any(use.product == WHY_NO_KEY for use in own)]:
        path, format = weights.floating[wide[0]]
        more = f" and {len(wide) - 1} more" if wide[1:] else ""
        warn_once(
            given,
            f"{str(format.quantization)!r} draws noise by a key of each layer of Flax, and the code of modules "
            f"multiplies by {path!r}{more} without a layer: these matmuls stay in the compute dtype; without noise, "
            "they would be quantized too. For example: 'nvfp4(stochastic_rounding=false)'.",
        )
    for i, stored_uses in rule.uses.items():
        if any(isinstance(use, StoredProduct) and use.why_as_numbers == WHY_NAMED for use in stored_uses):
            path, _ = weights.stored[i]
            warn_once(
                given,
                f"The weight {path!r} is dequantized, and has other numbers than the floating weight in this matmul: "
                f"{WHY_NAMED}. An explanation tells quantize how it is multiplied by. For example: "
                "quantize(variables, policy, explanation=explain(with_policy(model, policy), x)).",
            )
    # Equation by equation, as the model would run without this.
    if is_observing():
        calls = {name: call for name, call in deferred.items() if name not in rule.entered}
        out = evaluate_observed(program, leaves, traced.program, calls, rule.products)
    else:
        out = evaluate(program, *leaves)
    return results.put_back(jax.tree.unflatten(traced.out_tree, out))


def multiplies_by_weights(fun: Callable[..., Any], args: Args, find_weights: Callable[[], Weights]) -> bool:
    """True if a function of arrays has matmuls by its floating weights that `quantize_products` would quantize."""
    traced = trace(Results().take_arrays(fun), args, {})
    uses, _ = find_uses(traced.program.jaxpr, find_weights().floating, _RULE.contexts, _RULE.enters)
    return any(use.is_product and not isinstance(use.product, str) for own in uses.values() for use in own)


def _rewrite(
    program: Any, formats: dict[int, WeightFormat], weights: Weights, kept: Collection[str]
) -> tuple[Any, ProductRule]:
    """Rewrites a jaxpr by weights in some formats, and by stored ones; returns the rule with its notes.

    Calls of functions whose names are `kept` stay, also if nothing reads their results.
    """
    stored, rule = weights.stored, ProductRule()
    for i, (path, weight) in (weights.floating | stored).items():
        rule.modules[i] = None if i not in stored and weight.is_part else path.rpartition("/")[0]
    if not formats and not stored:
        return program, rule
    kinds = []
    for i, var in enumerate(program.jaxpr.invars):
        dtype, order = float_dtype(var), tuple(range(-len(shape_of(var)), 0))
        state = _State(formats[i], (dtype,), i, order) if dtype is not None and i in formats else None
        kinds.append(AbstractValue(dtype, _Leaf(i) if i in stored else state))
    wanted = [float_dtype(var) for var in program.jaxpr.outvars]
    moved = _drop_unused(move_reads_inside(program) if stored else program, kept)
    new = Rewriter(rule).rewrite(moved, kinds, EquationPlace(path=_AROUND), wanted).program
    # Run eagerly, a weight that is only multiplied by would be dequantized for nothing.
    return _drop_unused(new, kept), rule


def _drop_unused(program: Any, kept: Collection[str]) -> Any:
    """Drops the equations whose results nothing reads, but for calls of functions whose names are `kept`."""
    body = program.jaxpr
    live = body.replace(eqns=list_live(body, kept), debug_info=body.debug_info)
    return live if program is body else program.replace(jaxpr=live)


def _round(array: Any, format: WeightFormat) -> Any:
    weight = prepare_weight(array, format.quantization, format.layout)  # type: ignore[arg-type]
    return fake_quantize(weight) if isinstance(weight, FakeQuantized) else array


def _list_floating(
    traced: Traced,
    weights: dict[int, tuple[str, WeightFormat]],
    uses: Uses,
    rule: ProductRule,
    rounded: Collection[int],
) -> list[OwnWeight]:
    """Describes the floating weights that no layer of Flax owns; those `rounded` are computed with as numbers."""
    found = []
    for i, own in uses.items():
        (path, format), leaf_shape = weights[i], traced.leaves[i].shape
        layout = _find_shared_layout(own, rule, i)
        if layout is not None and (format.is_part or not fits_element(layout, leaf_shape, format.shape)):
            layout = None
        if not format.is_of_layer:
            text = f"{format.quantization}, computed with as numbers" if i in rounded else describe_uses(own)
            leaf = traced.leaves[i]
            found.append(OwnWeight(path, leaf.shape, leaf.dtype, leaf.size * leaf.dtype.itemsize, text, layout))
    return found


def _find_shared_layout(uses: Sequence[WeightUse], rule: ProductRule, number: int) -> Layout | None:
    """Returns the layout that all uses of a weight share, or None."""
    layouts = rule.layouts.get(number, {None})
    is_whole = len(layouts) == 1 and not any(isinstance(use.product, str) for use in uses)
    return next(iter(layouts)) if is_whole else None


_RULE = ProductRule()
