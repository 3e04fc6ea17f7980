"""What stands in the zoo: functions of float32 arrays, each with arguments, and what may be asked of it."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Specimen(NamedTuple):
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    differentiable: bool = True
    error: float = 0.05  # of bfloat16 against float32, over the largest number of each result
    context: Callable[[], Any] = contextlib.nullcontext  # in which it is traced

    def with_gradient(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Results and gradients of `fun`, which is that of this specimen or stands for it."""
        if not self.differentiable:
            return fun
        floating = tuple(i for i, arg in enumerate(self.args) if is_floating(arg))

        def both(*args):
            return fun(*args), jax.grad(lambda *args: total(fun(*args)), argnums=floating)(*args)

        return both


class Zoo(dict[str, Specimen]):
    """Specimens by the name of the function."""

    def specimen(self, *args: Any, **facts: Any) -> Callable[..., Any]:
        """Takes a function in; a tuple among its arguments is the shape of one that is drawn."""

        def take_in(fun: Callable[..., Any]) -> Callable[..., Any]:
            draw = np.random.default_rng(len(self))
            drawn = [jnp.asarray(draw.normal(size=a), jnp.float32) if isinstance(a, tuple) else a for a in args]
            self[fun.__name__] = Specimen(fun, tuple(drawn), **facts)
            return fun

        return take_in


def is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)


def total(tree: Any) -> jax.Array:
    """A number that depends on each floating result, on its order too."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    return sum(jnp.vdot(leaf, jnp.arange(1.0, 1.0 + leaf.size).reshape(leaf.shape)) for leaf in leaves)
