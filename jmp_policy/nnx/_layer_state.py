"""State that policies add to float8 layers of nnx: scales and amax histories."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.typing import ArrayLike

from .._base import OVERWRITE, PyTree, name_state, prepare_leaf


@functools.partial(nnx.register_variable_name, OVERWRITE, overwrite=True)
class Float8State(nnx.Variable):
    """A Variable of a float8 layer with delayed scaling: a scale or an amax history of one operand.

    The layer has a dictionary of them in its attribute `_overwrite_with_gradient`. They are not `nnx.Param`s.
    `jmp_policy.nnx.value_and_grad` differentiates with respect to them too: their gradients are their next values,
    which `jmp_policy.nnx.Optimizer` writes into the model. `flax.nnx.value_and_grad` is an error for a model that has
    them, and so is a `flax.nnx.Optimizer` as the `loss_scale`: the scales would stay at one, and gradients vanish.

    A policy that is attached again keeps them. A policy with another length of histories makes new ones, and one
    without state removes them. In the bridges to linen they are the collection of the same name.

    >>> import jmp_policy as jmp
    >>> from flax import nnx
    >>> model = jmp.with_policy(nnx.Linear(128, 128, rngs=nnx.Rngs(0)), "float8/16_from_mixed_bfloat16")
    >>> state = nnx.state(model, jmp.nnx.Float8State)["_overwrite_with_gradient"]
    >>> sorted(state)[:2], state["input_amax_history"].shape
    (['input_amax_history', 'input_scale'], (16,))
    """

    __slots__ = ("is_new",)  # set until nnx copies it; metadata would be part of the graph definition


def prepare_states(fun: Callable[..., Any], positions: Iterable[int], loss_scale: ArrayLike) -> Callable[..., Any]:
    """Marks float8 state so that autodiff combines it by max and returns the state of true gradients."""

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
    """Returns the float8 state in any tree of models, by path."""
    return {path: node for path, node in nnx.iter_graph(model, graph=True) if isinstance(node, Float8State)}


def find_state(tree: PyTree) -> str | None:
    """Describes the first Variable in modules that is neither an `nnx.Param` nor float8 state; see `Adapter`."""
    is_module = lambda node: isinstance(node, nnx.Module)
    for model in filter(is_module, jax.tree.leaves(tree, is_leaf=is_module)):
        for path, node in nnx.iter_graph(model, graph=True):
            if isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param | Float8State):
                return f"the {type(node).__name__} {'/'.join(map(str, path))!r}"
    return None


def check_state_types(model: PyTree, wrt: nnx.filterlib.Filter) -> None:
    """Raises a `ValueError` if float8 state among the Variables that `wrt` selects is not a `Float8State`."""
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
