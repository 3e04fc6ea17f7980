"""What stands in the zoo: functions of float32 arrays, each with arguments, and what may be asked of it."""

import contextlib
import inspect
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
    devices: int = 1
    context: Callable[[], Any] = contextlib.nullcontext  # in which it is traced

    def with_gradient(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Results and gradients of `fun`, which is that of this specimen or stands for it."""
        if not self.differentiable:
            return fun
        floating = tuple(i for i, arg in enumerate(self.args) if is_floating(arg))

        def both(*args):
            return fun(*args), jax.grad(lambda *args: total(fun(*args)), argnums=floating)(*args)

        return both


ZOO: dict[str, Specimen] = {}


def specimen(*args: Any, **facts: Any) -> Callable[..., Any]:
    """Puts a function in the zoo; a tuple among the arguments is the shape of one that is drawn."""

    def register(fun: Callable[..., Any]) -> Callable[..., Any]:
        name = inspect.unwrap(fun).__name__
        assert name not in ZOO, name
        draw = np.random.default_rng(len(ZOO))
        drawn = [jnp.asarray(draw.normal(size=a), jnp.float32) if isinstance(a, tuple) else a for a in args]
        ZOO[name] = Specimen(fun, tuple(drawn), **facts)
        return fun

    return register


def is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)


def total(tree: Any) -> jax.Array:
    """A number that depends on each floating result, on its order too."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    return sum(jnp.vdot(leaf, jnp.arange(1.0, 1.0 + leaf.size).reshape(leaf.shape)) for leaf in leaves)
