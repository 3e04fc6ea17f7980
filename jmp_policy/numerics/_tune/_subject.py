"""The tuned function or module, and its runs under a policy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..._base import Args, PyTree, is_floating
from ..._jaxpr import take_apart
from ...autocast import autocast
from ...gradients import value_and_grad
from ...loss_scale import LossScale
from ...modules import find_adapter, find_lifting_adapter, with_policy
from ...policy import Policy, PolicyMap


def write_code(policy_map: PolicyMap) -> str:
    default = None if policy_map.default is None else str(policy_map.default)
    rules = [f"        {rule.key!r}: {str(rule.policy)!r}," for rule in policy_map.rules]
    body = ["    {", *rules, "    },"] if rules else ["    {},"]
    return "\n".join(["jmp.PolicyMap(", *body, f"    default={default!r},", ")"])


Observed = dict[str, PyTree]
"""Compared results by name: the outputs, and the gradients if any."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function or Flax module with its arguments. `seed` draws the projection of a module's outputs to a loss."""

    target: Any
    args: Args
    differentiates: bool
    has_aux: bool
    seed: int

    @property
    def is_module(self) -> bool:
        return find_adapter(self.target) is not None

    @property
    def holds_variables(self) -> bool:
        """True for an nnx module. A linen module gets its variables as the first argument."""
        return find_lifting_adapter(self.target) is not None

    @property
    def name(self) -> str:
        target = type(self.target) if self.is_module else self.target
        return getattr(target, "__qualname__", None) or type(target).__qualname__

    def attach(self, policy: Policy | PolicyMap | None) -> Any:
        if policy is None:
            return self.target
        return with_policy(self.target, policy) if self.is_module else autocast(self.target, policy)

    def make_run(
        self, policy: Policy | PolicyMap | None, scale: LossScale, look: Callable[..., Any] = lambda fun: fun
    ) -> tuple[Callable[..., Any], PyTree]:
        """Returns a function of one tree of arrays, seen through `look`, and that tree. Writes to objects are lost."""
        observe, args = self._make_observed(policy, scale)
        arrays, rebuild = take_apart(args)
        observed = look(observe)
        return lambda arrays: observed(*rebuild(arrays)), arrays

    def make_candidate(self, policy: Policy | PolicyMap | None) -> Args:
        """Returns the arguments of a metric. nnx objects are cloned because a metric may train them."""
        arguments = (self.attach(policy), *self.args)
        if find_lifting_adapter(arguments) is None:
            return arguments
        from flax import nnx

        is_object = lambda leaf: find_lifting_adapter((leaf,)) is not None
        return tuple(nnx.clone(value) if is_object(value) else value for value in arguments)

    def _make_observed(
        self, policy: Policy | PolicyMap | None, scale: LossScale
    ) -> tuple[Callable[..., Observed], Args]:
        attached, args = self.attach(policy), self.args
        if not self.is_module:
            fun = attached
        elif self.holds_variables:
            fun, args = lambda model, *inputs: model(*inputs), (attached, *self.args)
        else:
            fun = attached.apply
        adapter = find_lifting_adapter(args[:1])
        differentiate: Callable[..., Any] = functools.partial(value_and_grad, allow_int=True)
        if adapter is not None and adapter.value_and_grad is not None:
            differentiate = adapter.value_and_grad

        def run(*args: Any) -> PyTree:
            return fun(*args)[0] if self.has_aux else fun(*args)

        def loss_fn(*args: Any) -> tuple[jax.Array, PyTree]:
            out = run(*args)
            return out if is_loss(out) else project(out, self.seed), out

        def observe(*args: Any) -> Observed:
            if not self.differentiates:
                return {"outputs": run(*args)}
            (_, out), grads = differentiate(loss_fn, has_aux=True, loss_scale=scale)(*args)
            return {"outputs": out, "gradients": [leaf for leaf in jax.tree.leaves(grads) if is_floating(leaf)]}

        return observe, args


def is_loss(out: PyTree) -> bool:
    """True for a scalar of a real floating dtype."""
    return is_floating(out) and jnp.ndim(out) == 0


def project(out: PyTree, seed: int) -> jax.Array:
    """Returns a float32 loss of any outputs: their sum with random weights drawn from `seed`."""
    total = jnp.zeros((), jnp.float32)
    for index, leaf in enumerate(leaf for leaf in jax.tree.leaves(out) if is_floating(leaf)):
        weights = jax.random.normal(jax.random.fold_in(jax.random.key(seed), index), leaf.shape, jnp.float32)
        total += jnp.sum(leaf.astype(jnp.float32) * weights) / max(1, leaf.size) ** 0.5
    return total
