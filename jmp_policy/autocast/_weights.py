"""Follows weights through a jaxpr, to the matmuls and convolutions that read them."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._jaxpr import (
    CUSTOM,
    Atom,
    Fact,
    Step,
    SubJaxpr,
    find_line,
    having,
    is_float,
    list_functions,
    list_live,
    shape_of,
    sub_jaxprs,
)
from ..policy import BlockFormat, Float8, Int8, Quantization, needs_rng
from ..quant import WHY_TABLES_WIDE, Layout, QuantizedArray, without_state
from ._place import EquationPlace
from ._precision import PRODUCTS
from ._weight_products import (
    LookUp,
    Product,
    StoredProduct,
    StoredRaggedProduct,
    choose_table_format,
    describe_lookup,
    describe_weight_product,
)

Names = frozenset[int]
"""The numbers of the weights that a value consists of; empty for a value that is not a weight."""

NO_WEIGHT: Names = frozenset()
A_WEIGHT: Names = frozenset([0])

WEIGHT_PRODUCTS = PRODUCTS | {"ragged_dot_general"}
"""Primitives that are quantized if one operand is a weight."""

_FOLLOWED = (having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS) | {"convert_element_type"}) - {"tile"}
"""Primitives whose output is a weight if all their floating operands are, except for a `gather` of rows of a table."""


WHY_BACKWARD = "its backward pass was traced inside of autocast: write grad(autocast(f)) instead of autocast(grad(f))"


def follow_weights(eqn: JaxprEqn, names: Sequence[Names]) -> list[Names]:
    """Returns the weights in each output of an equation without sub-jaxprs, given those in its operands."""
    if is_times_one(eqn):
        return [NO_WEIGHT.union(*names)]
    if eqn.primitive.name not in _FOLLOWED or not any(names) or _reads_rows(eqn):
        return [NO_WEIGHT] * len(eqn.outvars)
    if eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars):
        return list(names)
    sizes = {math.prod(shape_of(atom)) for atom in (eqn.invars[0], eqn.outvars[0])}
    repeats = eqn.primitive.name == "broadcast_in_dim" and len(sizes) > 1
    floating = [own for own, atom in zip(names, eqn.invars, strict=True) if is_float(atom)]
    joined = NO_WEIGHT if repeats else _join_weights(floating)
    return [joined if is_float(var) else NO_WEIGHT for var in eqn.outvars]


def is_times_one(eqn: JaxprEqn) -> bool:
    """True for a multiplication by the number 1, as Haliax scales weights by default."""
    if eqn.primitive.name != "mul":
        return False
    return sum(isinstance(atom, Literal) and not shape_of(atom) and bool(atom.val == 1) for atom in eqn.invars) == 1


def _reads_rows(eqn: JaxprEqn) -> bool:
    """True for a `gather`, unless it takes one matrix of a stack, as `jnp.take(stack, i, axis=0)` does."""
    takes_one = len(shape_of(eqn.invars[-1])) == 1 and len(shape_of(eqn.outvars[0])) > 1
    return eqn.primitive.name == "gather" and not takes_one


def _join_weights(names: Sequence[Names]) -> Names:
    """Returns all weights, or none if one of the values is not a weight."""
    return NO_WEIGHT.union(*names) if all(names) else NO_WEIGHT


class WeightUse(NamedTuple):
    """An equation that reads weights and does more than moving them."""

    names: Names
    product: Product | Int8 | str  # its quantized form, the format of the rows that it reads, or the reason to leave it
    is_product: bool  # True for a matmul or convolution
    is_lookup: bool = False  # True if it reads rows of a table
    reads_rows: bool = False  # True if these are whole rows of two axes


Contexts = Callable[[EquationPlace, Jaxpr], Sequence[EquationPlace]]
"""As in `Rule`."""

Enters = Callable[[JaxprEqn, EquationPlace], bool]
"""True for equations whose sub-jaxprs are rewritten."""


class WeightFinder(NamedTuple):
    """Finds the uses of weights in a jaxpr."""

    # Returns the quantized form of a matmul, or the reason to leave it.
    find_product: Callable[[JaxprEqn, Sequence[Names], EquationPlace], Product | str]
    contexts: Contexts
    enters: Enters

    def find(self, program: Jaxpr, names: Sequence[Names], place: EquationPlace) -> tuple[list[WeightUse], list[Names]]:
        """Returns the uses, and the weights in the outputs of a jaxpr, given those in its arguments."""
        known: dict[Atom, Names] = dict(zip(program.invars, names, strict=True))
        uses: list[WeightUse] = []
        live = {id(eqn) for eqn in list_live(program)}
        for eqn, here in zip(program.eqns, self.contexts(place, program), strict=True):
            read = _look_up(known, eqn.invars)
            if not any(read) or id(eqn) not in live:
                continue
            bodies = sub_jaxprs(eqn)
            if bodies and self.enters(eqn, here):
                found = [self._find_inside(body, known, here) for body in bodies]
                uses += [use for inside, _ in found for use in inside]
                outputs = [leaving for body, (_, leaving) in zip(bodies, found, strict=True) if body.outputs]
                known.update(zip(eqn.outvars, map(_join_weights, zip(*outputs, strict=True)), strict=False))
            else:
                known.update(zip(eqn.outvars, follow_weights(eqn, read), strict=True))
                uses += self._find_use(eqn, read, [known[var] for var in eqn.outvars], here)
        return uses, _look_up(known, program.outvars)

    def _find_inside(
        self, body: SubJaxpr, known: dict[Atom, Names], place: EquationPlace
    ) -> tuple[list[WeightUse], list[Names]]:
        """Does the same for a sub-jaxpr."""
        entering = _look_up(known, [outer for outer, _ in body.inputs])
        changed: list[WeightUse] = []
        while True:
            uses, leaving = self.find(body.program, entering, place)
            again = list(entering)
            for i in body.carry if body.outputs else ():
                again[i] = _join_weights([entering[i], leaving[i - body.carry.start]])
            if again == entering:
                return changed + uses, leaving
            lost = [own for own, kept in zip(entering, again, strict=True) if own and not kept]
            changed += [WeightUse(own, "a loop carries it and changes it", False) for own in lost]
            entering = again

    def _find_use(
        self, eqn: JaxprEqn, read: Sequence[Names], made: Sequence[Names], place: EquationPlace
    ) -> list[WeightUse]:
        name, weights = eqn.primitive.name, NO_WEIGHT.union(*read)
        if name in WEIGHT_PRODUCTS:
            return [WeightUse(weights, self.find_product(eqn, read, place), True)]
        if any(made):
            return []
        if name == "gather" and read[0]:
            return [WeightUse(weights, WHY_TABLES_WIDE, False, True, describe_lookup(eqn, Int8()) is not None)]
        line = find_line(eqn)
        reason = f"{name} reads it{line and f' in {line}'}"
        if name in CUSTOM:
            reason += "; custom_rules='inside' quantizes its forward pass"
        return [WeightUse(weights, reason, False)]


def _look_up(known: dict[Atom, Names], atoms: Sequence[Atom]) -> list[Names]:
    return [NO_WEIGHT if isinstance(atom, Literal) else known.get(atom, NO_WEIGHT) for atom in atoms]


class WeightFormat(NamedTuple):
    """The format of a weight under its policy."""

    quantization: Quantization
    accumulate: np.dtype | None = None
    is_table: bool = False  # True if rows of it are looked up, too
    is_of_layer: bool = False  # True if a layer of Flax owns it, and the code around multiplies by it
    layout: Layout | None = None  # in which it is stored, and so rounded, whatever reads it
    shape: tuple[int, ...] | None = None  # in which code reads it, perhaps without the axes of a stack
    is_part: bool = False  # True if its parameter is a tree of arrays, which cannot be stored


class OwnWeight(NamedTuple):
    """A weight that a model multiplies by in its own code; the row of `explain`."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype  # in which it is stored
    nbytes: int
    quantization: str  # its format, or why it is left
    layout: Layout | None = None  # in which `quantize` can store it


class Weights(NamedTuple):
    """The weights among the array leaves of the arguments of a traced function."""

    floating: dict[int, tuple[str, WeightFormat]]  # the paths and formats of floating weights, by number
    # The paths of stored weights, by the number of their values, and each weight or one of its stack.
    stored: dict[int, tuple[str, QuantizedArray]]


def describe_product(eqn: JaxprEqn, read: Sequence[Names], format: WeightFormat, place: EquationPlace) -> Product | str:
    """Returns the quantized form of a matmul, given the weights in its operands, or the reason to leave it."""
    if place.backward:
        return _WHY_OWN_GRADIENT
    if all(read[:2]):
        return "both operands are weights"
    if "_scale_and_translate" in list_functions(Step(eqn.primitive.name, (), (), eqn, "")):
        return "jax.image resizes it"  # as a table of positions: its inputs are those of no layer
    if needs_rng(format.quantization):
        return WHY_NO_KEY
    quantization = without_state(format.quantization)
    if format.is_table:  # as a table of Flax's
        if isinstance(quantization, Float8 | BlockFormat):
            return WHY_TABLES_WIDE
        quantization = quantization.for_tables
    product = describe_weight_product(eqn, 0 if read[0] else 1, quantization, format.accumulate)
    if isinstance(product, str):
        return product
    return product.reason_left([shape_of(atom) for atom in eqn.invars]) or product


_WHY_OWN_GRADIENT = "its gradient is computed inside of the model"
WHY_NO_KEY = "the format draws noise by a key of each layer, and its code is no layer of Flax's"

Uses = dict[int, list[WeightUse]]


def find_uses(
    program: Jaxpr, weights: dict[int, tuple[str, WeightFormat]], contexts: Contexts, enters: Enters
) -> tuple[Uses, dict[int, WeightFormat]]:
    """Returns the uses of each floating weight, and its format: for tables, if rows of it are read."""
    formats = {i: format for i, (_, format) in weights.items()}
    names = [frozenset([i]) if i in formats else NO_WEIGHT for i in range(len(program.invars))]

    def find_product(eqn: JaxprEqn, read: Sequence[Names], place: EquationPlace) -> Product | str:
        first, *others = sorted(NO_WEIGHT.union(*read))
        if any(formats[other] != formats[first] for other in others):
            return "its parts have different formats"
        return describe_product(eqn, read, formats[first], place)

    def find() -> Uses:
        uses, _ = WeightFinder(find_product, contexts, enters).find(program, names, EquationPlace())
        return {i: [describe_use(i, use) for use in uses if i in use.names] for i in formats}

    def describe_use(i: int, use: WeightUse) -> WeightUse:
        if not use.is_lookup or formats[i].is_of_layer:
            return use
        if not use.reads_rows:
            return use._replace(product="gather reads parts of it", is_lookup=False)
        return use._replace(product=choose_table_format(formats[i].quantization, shape_of(program.invars[i])))

    uses = find()
    tables = [i for i, own in uses.items() if any(use.is_lookup for use in own)]
    if not tables:
        return uses, formats
    formats |= {i: formats[i]._replace(is_table=True) for i in tables}
    return find(), formats


def fits_element(layout: Layout, whole: Sequence[int], element: Sequence[int] | None) -> bool:
    """False for a stack along another axis than the first ones, which could not be sliced when it is stored."""
    if element is None:
        return True
    spanned = len(layout.contracted) + layout.channels
    return spanned <= len(element) and tuple(whole[len(whole) - len(element) :]) == tuple(element)


def describe_uses(uses: Sequence[WeightUse]) -> str:
    """Describes how a floating weight is multiplied by, or why it is left."""
    products = [use.product for use in uses if use.is_product or use.is_lookup]
    texts = [f"left: {own}" if isinstance(own, str) else str(own) for own in products or [use.product for use in uses]]
    return "; ".join(dict.fromkeys(texts)) or "left: no matmul reads it"


def describe_stored(
    values: Any, path: str, weight: QuantizedArray, uses: Sequence[StoredProduct | StoredRaggedProduct | LookUp | str]
) -> OwnWeight:
    """Describes a stored weight, given its values, and the weight or one of its stack."""
    numbers = f"{weight.format}, computed with as numbers"
    texts = dict.fromkeys(f"{numbers}: {use}" if isinstance(use, str) else str(use) for use in uses)
    stack = values.shape[: values.ndim - weight.values.ndim]
    size = math.prod(stack) * weight.nbytes
    return OwnWeight(path, (*stack, *weight.shape), values.dtype, size, "; ".join(texts) or numbers)


FOUND: contextvars.ContextVar[dict[str, OwnWeight] | None] = contextvars.ContextVar("FOUND", default=None)


@contextlib.contextmanager
def find_own_weights() -> Iterator[dict[str, OwnWeight]]:
    """Finds the weights of the models that are traced inside, by path."""
    found: dict[str, OwnWeight] = {}
    token = FOUND.set(found)
    try:
        yield found
    finally:
        FOUND.reset(token)
