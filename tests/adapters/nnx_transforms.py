"""The registry of nnx's transforms, each around the call of one block. A law holds for every entry."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import jmp_policy as jmp


class Block(nnx.Module):
    """A layer and a Param of its own, and randomness where a transform allows a call to change something.

    Its dtypes, and the casts of a boundary, can be written by hand.
    """

    def __init__(self, *, changes, rngs, dtype=None, casts=(None, None)):
        self.linear = nnx.Linear(4, 4, dtype=dtype, rngs=rngs)
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (4,), jnp.float32))
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if changes else None
        self.by_hand, self.casts = dtype, casts

    def __call__(self, x):
        x = self.linear(jmp.cast_floating(x, self.casts[0]))
        if self.dropout is not None:
            x = self.dropout(x)
        return jmp.cast_floating(x * jmp.cast_floating(self.scale[...], self.by_hand), self.casts[1])


class Outer(nnx.Module):
    """A model of one block, or a stack of them, called through a transform."""

    def __init__(self, block, use, casts=(None, None)):
        self.block, self.use, self.casts = block, use, casts

    def __call__(self, x):
        return jmp.cast_floating(self.use(self.block, jmp.cast_floating(x, self.casts[0])), self.casts[1])


def call(block, x):
    return block(x)


class Use(NamedTuple):
    call: Any  # (block, x) -> out
    changes: bool = True  # whether the block may change in it
    stack: bool = False  # whether the block is a stack of two
    differentiable: bool = True


def _scan_carry(block, x):
    def step(carry, _):
        block, x = carry
        return (block, block(x).astype(x.dtype)), None

    (_, x), _ = nnx.scan(step, in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0), length=2)((block, x), None)
    return x


def _scan_stack(block, x):
    return nnx.scan(lambda x, block: block(x).astype(x.dtype), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, block)


def _vmap_with_keys(block, x):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), 0))
    def run(block, x):
        return block(x)

    return run(block, x)


def _gradient(block, x):
    return nnx.grad(lambda x, block: _loss(block, x))(x, block)


def _loss(block, x):
    return jnp.sum(block(x).astype(jnp.float32))


@nnx.custom_vjp
def _clipped(block, x):
    return block(x)


def _clipped_forward(block, x):
    return _clipped(block, x), x


def _clipped_backward(x, gradient):
    (block_gradient, _), gradient = gradient
    return block_gradient, jnp.clip(gradient.astype(x.dtype), -1, 1)


_clipped.defvjp(_clipped_forward, _clipped_backward)


def _while_loop(block, x):
    def body(carry):
        count, block, x = carry
        return count + 1, block, block(x).astype(x.dtype)

    return nnx.while_loop(lambda carry: carry[0] < 2, body, (0, block, x))[2]


def _shard_map(block, x):
    mesh = Mesh(jax.devices()[:1], ("x",))
    specs = (PartitionSpec(), PartitionSpec("x"))
    return nnx.shard_map(call, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("x"))(block, x)


def _cond(block, x):
    return nnx.cond(jnp.sum(x) > 0, call, lambda block, x: -block(x), block, x)


USES = {
    "jit": Use(nnx.jit(call)),
    "remat": Use(nnx.remat(call)),
    "vmap": Use(nnx.vmap(call, in_axes=(None, 0)), changes=False),
    "vmap of a stack": Use(nnx.vmap(call, in_axes=(0, None)), stack=True),
    "vmap and split_rngs": Use(_vmap_with_keys),
    "scan of a carried module": Use(_scan_carry, changes=False),
    "scan of a stack": Use(_scan_stack, stack=True),
    "cond": Use(_cond),
    "while_loop": Use(_while_loop, changes=False, differentiable=False),
    "grad": Use(_gradient, changes=False),
    "custom_vjp": Use(_clipped, changes=False),
    "shard_map": Use(_shard_map, changes=False),
    "pmap": Use(lambda block, x: nnx.pmap(call, in_axes=(None, 0))(block, x[None])[0], changes=False),
}
