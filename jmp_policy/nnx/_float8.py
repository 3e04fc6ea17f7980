"""What a float8 policy does in nnx's layers."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.typing import ArrayLike

from .._base import OVERWRITE, PyTree, name_state, prepare_leaf, remember_on_class
from ..modules.common import make_subclass
from ..policy import Float8
from ..quant._layers import Float8Multiply, MultiplyWide, why_layer_wide
from ..quant._products import State, needs_state, new_state
from ..quant._weights import Layout, stack_shape
from ._layer_table import find_layer, find_open_field
from ._shadow import Attributes


@functools.partial(nnx.register_variable_name, OVERWRITE, overwrite=True)
class Float8State(nnx.Variable):
    """The Variables of a layer that scales by what it saw before: of each operand a scale, and a history.

    A dictionary of them is an attribute of the layer, `_overwrite_with_gradient`. They are not `nnx.Param`s.
    `jmp_policy.nnx.value_and_grad` differentiates with respect to them beside the parameters: their gradients are their
    next values, which `jmp_policy.nnx.Optimizer` writes into the model. `flax.nnx.value_and_grad` and
    `flax.nnx.Optimizer` leave them as they are, and then the layer never learns how large its numbers are; they take
    them for parameters where a `wrt` names them.

    A policy that is attached again finds them there. A policy whose histories have another length makes new ones, and
    one that keeps no state takes them away. In the bridges to linen they are the collection of the same name.

    >>> import jmp_policy as jmp
    >>> from flax import nnx
    >>> model = jmp.with_policy(nnx.Linear(128, 128, rngs=nnx.Rngs(0)), "float8/16_from_mixed_bfloat16")
    >>> state = nnx.state(model, jmp.nnx.Float8State)["_overwrite_with_gradient"]
    >>> sorted(state)[:2], state["input_amax_history"].shape
    (['input_amax_history', 'input_scale'], (16,))
    """


def why_wide(base: type, attributes: Attributes, shape: tuple[int, ...], layout: Layout, format: Float8) -> str | None:
    """Why a layer with a weight computes in the compute dtype, whatever its inputs; `None` if it does not."""
    layer = find_layer(base)
    if layer is None or find_open_field(base, attributes) is None:
        return "it multiplies by a function of its own, or by none that could be another"
    is_convolution, groups = layer.operation == "conv_general_dilated", attributes.get("feature_group_count", 1)
    return why_layer_wide(shape, layout, format, is_convolution=is_convolution, groups=groups)


def make_state(attributes: Attributes, shape: tuple[int, ...], layout: Layout, format: Float8) -> Attributes:
    """The attribute that holds the state of a layer, if it has one: what it was, or a new one."""
    if not needs_state(format):
        return {}
    known, new = attributes.get(OVERWRITE), new_state(format, stack_shape(shape, layout))
    if known is not None and all(known[name].get_raw_value().shape == value.shape for name, value in new.items()):
        return {OVERWRITE: known}
    return {OVERWRITE: {name: Float8State(value) for name, value in new.items()}}


@remember_on_class
def make_float8_layer(base: type[nnx.Module], format: Float8) -> type[nnx.Module]:
    """A subclass of a layer that multiplies in 8 bits; one for equal classes.

    The function is a property of the class, which comes before the attribute, because it has to find the state of the
    layer that is called.
    """
    layer = find_layer(base)
    assert layer is not None
    assert layer.field is not None
    name = layer.field

    def multiply(self: nnx.Module) -> Float8Multiply | MultiplyWide:
        own, kept = layer.make_float8_multiply(format, lambda: _read_state(self)), vars(self).get(name)
        return dataclasses.replace(kept, own=own) if isinstance(kept, MultiplyWide) else own

    def keep(self: nnx.Module, function: Callable[..., Any]) -> None:  # when nnx makes the layer again out of its parts
        vars(self)[name] = function

    return make_subclass(base, {name: property(multiply, keep)}, (make_float8_layer, (base, format)))


def _read_state(layer: nnx.Module) -> State:
    return {name: variable.get_value() for name, variable in vars(layer)[OVERWRITE].items()}


def prepare_states(fun: Callable[..., Any], positions: Iterable[int], loss_scale: ArrayLike) -> Callable[..., Any]:
    """The same function, for which autodiff combines float8 state by max, and returns the state of true gradients."""

    @functools.wraps(fun)
    def call_prepared(*args: Any, **kwargs: Any) -> Any:
        states = find_states([args[position] for position in positions])
        before = {path: variable.get_value() for path, variable in states.items()}
        for path, value in before.items():
            states[path].set_value(prepare_leaf(path[-1], value, loss_scale))
        try:
            return fun(*args, **kwargs)
        finally:
            for path, value in before.items():
                states[path].set_value(value)

    return call_prepared


def find_states(model: PyTree) -> dict[Any, Float8State]:
    """The float8 state of the layers in a model, or in any tree of models, by path."""
    return {path: node for path, node in nnx.iter_graph(model, graph=True) if isinstance(node, Float8State)}


def check_state_types(model: PyTree, wrt: nnx.filterlib.Filter) -> None:
    """Checks that the float8 state among what is differentiated of a model, or of a tree of models, is `Float8State`.

    Args:
      model: an argument that is differentiated.
      wrt: the filter that says with respect to which of its Variables.

    Raises:
      ValueError: Variables of other types, or arrays without one, are float8 state by their names.
    """
    is_differentiated = nnx.filterlib.to_predicate(wrt)
    others = {}
    for path, node in nnx.iter_graph(model, graph=True):
        place = "/".join(map(str, path))
        if isinstance(node, jax.Array):
            others[place] = node
        elif isinstance(node, nnx.Variable) and not isinstance(node, Float8State) and is_differentiated(path, node):
            others[place] = node.get_raw_value()
    for name, (path, _) in zip(name_state(others), jax.tree_util.tree_leaves_with_path(others), strict=True):
        if name:
            raise ValueError(
                f"{jax.tree_util.keystr(path, simple=True, separator='/')!r} is float8 state by its name, and would be "
                "differentiated as a parameter: in nnx, each array of state has a Float8State. For example: self.state "
                "= nnx.data({name: jmp_policy.nnx.Float8State(x) for name, x in float8_state('float8').items()})."
            )
