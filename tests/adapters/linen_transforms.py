"""The registry of linen's lifted transforms, each around one block. A law holds for every entry."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jmp_policy as jmp

LIFTED: dict[str, Any] = {
    "variable_axes": {"params": 0, "counters": 0, "intermediates": 0},
    "split_rngs": {"params": True, "dropout": True},
}


class Block(nn.Module):
    """A layer, randomness, and every kind of variable; with the casts that a boundary makes written by hand."""

    dtype: Any = None
    enter: Any = None
    leave: Any = None

    @nn.compact
    def __call__(self, x, _=None):
        x = jmp.cast_floating(x, self.enter)
        calls = self.variable("counters", "calls", lambda: jnp.zeros(()))
        if self.is_mutable_collection("counters"):
            calls.value += 1
        x = nn.Dropout(0.5, deterministic=False)(nn.Dense(4, dtype=self.dtype)(x))
        scale = self.param("scale", nn.initializers.ones, (4,))
        self.sow("intermediates", "hidden", x)
        return jmp.cast_floating(x * scale.astype(x.dtype), self.leave), None


class Outer(nn.Module):
    """A model of one lifted block, called through a lifted function once it is initialized."""

    lift: Any = lambda kind: kind
    use: Any = None
    kind: Any = Block
    dtype: Any = None
    # The dtypes of inputs and outputs by hand, at the lifted block, and in the body that is lifted.
    casts: Any = (None, None)
    casts_inside: Any = (None, None)

    @nn.compact
    def __call__(self, x):
        block = self.lift(self.kind)(self.dtype, *self.casts_inside, name="block")
        use = call if self.use is None or self.is_initializing() else self.use
        return jmp.cast_floating(use(block, jmp.cast_floating(x, self.casts[0])), self.casts[1])


def call(block, x):
    return block(x, None)[0]


def _scale(factor):
    return lambda variables: jax.tree.map(lambda x: x * factor, variables)


CLASSES = {
    "jit": nn.jit,
    "remat": nn.remat,
    "scan": lambda kind: nn.scan(kind, **LIFTED, length=2),
    "vmap": lambda kind: nn.vmap(kind, **LIFTED, in_axes=(0, None), axis_size=2),
    "map_variables": lambda kind: nn.map_variables(kind, "params", _scale(1 / 2), _scale(2), mutable=True),
    "jit of remat": lambda kind: nn.jit(nn.remat(kind)),
    "scan of remat": lambda kind: nn.scan(nn.remat(kind, prevent_cse=False), **LIFTED, length=2),
}
"""Transforms of a module class: what they make of it, `lift(kind) -> kind`."""


def _custom_vjp(block, x):
    def forward(block, x):
        return nn.vjp(call, block, x)

    def backward(vjp, cotangent):
        params, inputs = vjp(cotangent)
        return jax.tree.map(jnp.sign, params), inputs

    return nn.custom_vjp(call, forward, backward)(block, x)


def _gradient(block, x):
    return nn.grad(_loss, block, x)[0]


def _loss(block, x):
    return jnp.sum(call(block, x).astype(jnp.float32))


def _vjp(block, x):
    out, vjp = nn.vjp(call, block, x)
    return vjp(out)[1]


def _jvp(block, x):
    out, tangent = nn.jvp(call, block, (x,), (x,), variable_tangents={})
    return out + tangent


def _scan(block, x):
    def body(block, x, _):
        return call(block, x).astype(x.dtype), None

    scanned = nn.scan(body, variable_carry="counters", variable_broadcast="params", length=2, **_EACH_ITS_MASK)
    return scanned(block, x, None)[0]


def _while_loop(block, x):
    def body(block, carry):
        count, x = carry
        return count + 1, call(block, x).astype(x.dtype)

    return nn.while_loop(
        lambda _, carry: carry[0] < 2, body, block, (0, x), carry_variables="counters", **_EACH_ITS_MASK
    )[1]


_EACH_ITS_MASK: dict[str, Any] = {"split_rngs": {"params": False, "dropout": True}}


FUNCTIONS = {
    "jit": nn.jit(call),
    "remat": nn.remat(call),
    "vmap": nn.vmap(call, variable_axes={"params": None, "counters": None}, in_axes=0, **_EACH_ITS_MASK),
    "scan": _scan,
    "while_loop": _while_loop,
    "cond": lambda block, x: nn.cond(jnp.sum(x) > 0, call, lambda block, x: -call(block, x), block, x),
    "custom_vjp": _custom_vjp,
    "grad": _gradient,
    "vjp": _vjp,
    "jvp": _jvp,
}
"""Transforms of a function of a bound module: calls of the block through them, `use(block, x) -> out`."""
