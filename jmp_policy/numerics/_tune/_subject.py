"""What is tuned: a function or a module with its arguments, run under one map after another."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..._base import Args, PyTree, is_array, is_floating_dtype
from ...autocast import autocast
from ...gradients import value_and_grad
from ...loss_scale import LossScale
from ...modules import find_adapter, find_lifting_adapter, with_policy
from ...policy import Policy, PolicyMap

Observed = dict[str, PyTree]
"""What a run returned, by name: the outputs, and the gradients where there are any."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function or module of Flax, and what it is called with.

    Attributes:
      target: the function or module.
      args: its arguments; for a linen module the variables come first.
      differentiates: whether gradients with respect to the first argument, or the parameters, count too.
      has_aux: whether the function returns a loss and auxiliary data, as in `jax.grad`.
      seed: of the projection that makes a loss of a module's outputs.
    """

    target: Any
    args: Args
    differentiates: bool
    has_aux: bool
    seed: int

    @property
    def is_module(self) -> bool:
        """Whether it is a module of Flax's, not a function."""
        return find_adapter(self.target) is not None

    @property
    def holds_variables(self) -> bool:
        """Whether it is a module of nnx, which has its own; those of linen are the first argument."""
        return find_lifting_adapter(self.target) is not None

    @property
    def name(self) -> str:
        """What files and errors call it."""
        target = type(self.target) if self.is_module else self.target
        return getattr(target, "__qualname__", None) or type(target).__qualname__

    def attach(self, policy: Policy | PolicyMap | None) -> Any:
        """The function or module under a policy; as it is if `None`."""
        if policy is None:
            return self.target
        return with_policy(self.target, policy) if self.is_module else autocast(self.target, policy)

    def make_run(
        self, policy: Policy | PolicyMap | None, scale: LossScale, look: Callable[..., Any] = lambda fun: fun
    ) -> tuple[Callable[..., Any], PyTree]:
        """A function of one tree of arrays that runs under a policy, and that tree; what it writes is lost.

        Args:
          policy: the policy; `None` for none.
          scale: the loss scale.
          look: what is made of the function of the arguments, such as `collect`.
        """
        observe, args = self._make_observed(policy, scale)
        has_objects = find_lifting_adapter(args) is not None
        arrays, rebuild = (_take_nnx_apart if has_objects else _take_apart)(args)
        observed = look(observe)
        return lambda arrays: observed(*rebuild(arrays)), arrays

    def make_candidate(self, policy: Policy | PolicyMap | None) -> Args:
        """What a metric is called with: the function or module under a policy, and the arguments.

        Objects of nnx are copies that share their arrays, since a metric may train them.
        """
        arguments = (self.attach(policy), *self.args)
        if find_lifting_adapter(arguments) is None:
            return arguments
        from flax import nnx

        is_object = lambda leaf: find_lifting_adapter((leaf,)) is not None
        return tuple(nnx.clone(value) if is_object(value) else value for value in arguments)

    def _make_observed(
        self, policy: Policy | PolicyMap | None, scale: LossScale
    ) -> tuple[Callable[..., Observed], Args]:
        """The function of the arguments that returns what is compared, and those arguments."""
        attached, args = self.attach(policy), self.args
        if not self.is_module:
            fun = attached
        elif find_lifting_adapter(attached) is not None:
            fun, args = _call_model, (attached, *self.args)
        else:
            fun = attached.apply
        differentiate = _choose_gradient(args[:1])
        loss_fn = functools.partial(_call_loss, fun, self.has_aux, self.seed)

        def observe(*args: Any) -> Observed:
            if not self.differentiates:
                return {"outputs": fun(*args)[0] if self.has_aux else fun(*args)}
            (_, out), grads = differentiate(loss_fn, has_aux=True, loss_scale=scale)(*args)
            return {"outputs": out, "gradients": [leaf for leaf in jax.tree.leaves(grads) if _is_floating(leaf)]}

        return observe, args


def _call_model(model: Any, *inputs: Any) -> Any:
    return model(*inputs)


def _choose_gradient(first: Args) -> Callable[..., Any]:
    adapter = find_lifting_adapter(first)
    own = None if adapter is None else adapter.value_and_grad
    return own or functools.partial(value_and_grad, allow_int=True)


def _call_loss(fun: Callable[..., Any], has_aux: bool, seed: int, *args: Any) -> tuple[jax.Array, PyTree]:
    """The loss, which is differentiated, and what is compared: the outputs without auxiliary data."""
    out = fun(*args)[0] if has_aux else fun(*args)
    if is_loss(out):
        return out, out
    return project(out, seed), out


def is_loss(out: PyTree) -> bool:
    """Whether a result is one real number."""
    return _is_floating(out) and jnp.ndim(out) == 0


def project(out: PyTree, seed: int) -> jax.Array:
    """A loss of any outputs, float32: their sum with random weights, which are the same for the same seed."""
    total = jnp.zeros((), jnp.float32)
    for index, leaf in enumerate(leaf for leaf in jax.tree.leaves(out) if _is_floating(leaf)):
        weights = jax.random.normal(jax.random.fold_in(jax.random.key(seed), index), leaf.shape, jnp.float32)
        total += jnp.sum(leaf.astype(jnp.float32) * weights) / max(1, leaf.size) ** 0.5
    return total


def _is_floating(leaf: Any) -> bool:
    return is_array(leaf) and is_floating_dtype(leaf.dtype)


def _take_apart(args: Args) -> tuple[list[Any], Callable[[list[Any]], Args]]:
    """The arrays of some arguments, and what puts them back; all else is as it is, Python numbers too."""
    leaves, structure = jax.tree.flatten(args)
    where = [index for index, leaf in enumerate(leaves) if is_array(leaf)]

    def rebuild(arrays: list[Any]) -> Args:
        new = list(leaves)
        for index, array in zip(where, arrays, strict=True):
            new[index] = array
        return jax.tree.unflatten(structure, new)

    return [leaves[index] for index in where], rebuild


def _take_nnx_apart(args: Args) -> tuple[Any, Callable[[Any], Args]]:
    """The same of arguments with objects of nnx: what a run writes to them is written to copies."""
    from flax import nnx

    graph, state = nnx.split(args)
    return state, lambda state: nnx.merge(graph, state)
