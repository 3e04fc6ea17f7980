"""Those who compute dense layers in floating point of 8 and 4 bits: jmp_policy, Flax and qwix, and plain bfloat16."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.linen import fp8_ops

import jmp_policy as jmp
from benchmarks._programs import Program
from examples.gpt.model import causal_attention

STATE = fp8_ops.OVERWRITE_WITH_GRADIENT

LAYERS = r"(dense|qkv|project|expand|contract)"
"""The paths of the dense layers."""

HEADS = 4


class Layer(linen.Module):
    """One dense layer."""

    dtype: Any = None
    dot_general_cls: Any = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(x.shape[-1], dtype=self.dtype, dot_general_cls=self.dot_general_cls, name="dense")(x)


class MLP(linen.Module):
    """Two dense layers, four times as wide between them."""

    dtype: Any = None
    dot_general_cls: Any = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return _perceptron(x, dtype=self.dtype, dot_general_cls=self.dot_general_cls)


class Block(linen.Module):
    """Causal attention and a perceptron, each on a normalized copy of the residual stream."""

    dtype: Any = None
    dot_general_cls: Any = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = {"dtype": self.dtype, "dot_general_cls": self.dot_general_cls}
        x = x if self.dtype is None else x.astype(self.dtype)
        batch, length, width = x.shape
        normed = linen.LayerNorm(dtype=self.dtype, name="attention_norm")(x)
        qkv = linen.Dense(3 * width, name="qkv", **options)(normed).reshape(batch, length, 3, HEADS, width // HEADS)
        attended = causal_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).reshape(x.shape)
        x = x + linen.Dense(width, name="project", **options)(attended)
        return x + _perceptron(linen.LayerNorm(dtype=self.dtype, name="mlp_norm")(x), **options)


MODELS: dict[str, type[linen.Module]] = {"dense layer": Layer, "MLP": MLP, "transformer block": Block}


def _perceptron(x: jax.Array, **options: Any) -> jax.Array:
    expanded = linen.Dense(4 * x.shape[-1], name="expand", **options)(x)
    return linen.Dense(x.shape[-1], name="contract", **options)(linen.gelu(expanded))


Made = Callable[[type[linen.Module]], linen.Module]
"""A module of a class of `MODELS`, as a contestant makes it."""


def by_hand(made: type[linen.Module]) -> linen.Module:
    """In bfloat16."""
    return made(dtype=jnp.bfloat16)


def with_flax(operation: Any, made: type[linen.Module]) -> linen.Module:
    """With one of Flax's float8 operations, by delayed scaling."""
    return made(dtype=jnp.bfloat16, dot_general_cls=operation)


def with_qwix(by_channel: bool, made: type[linen.Module]) -> linen.Module:
    """With qwix, by current scales: one of each array, or one of each slice along the axes that are summed over."""
    import qwix

    formats = {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn", "bwd_qtype": "float8_e5m2"}
    return _apply_rule(qwix.QtRule(module_path=LAYERS, disable_channelwise_axes=not by_channel, **formats), made)


def with_qwix_blocks(format: str, block_size: int, made: type[linen.Module]) -> linen.Module:
    """With qwix, in blocks: all three products, as ours. Its rule has no blocks for the gradient of the input."""
    import qwix

    formats = dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), format)
    residuals = dict.fromkeys(("dlhs_residual_qtype", "drhs_residual_qtype"), format)
    tiles = dict.fromkeys(("dlhs_tile_size", "drhs_tile_size"), block_size)
    return _apply_rule(
        qwix.QtRule(module_path=LAYERS, tile_size=block_size, additional_qt_config=tiles | residuals, **formats), made
    )


def ours(format: str, made: type[linen.Module]) -> linen.Module:
    """With jmp_policy."""
    return jmp.with_policy(made(), f"{format}_from_mixed_bfloat16")


BFLOAT16 = "bfloat16"
OURS = {
    "current": "float8(recipe=current,min_size=0)",
    "current/row": "float8(recipe=current/row,min_size=0)",
    "delayed": "float8(recipe=delayed,min_size=0)",
    "mxfp8": "mxfp8(min_size=0)",
    "nvfp4": "nvfp4(min_size=0)",
}
"""Our formats, by what the tables call them: small layers are in them as well, as they are in the others."""

PEERS = {
    "delayed": ("flax Fp8DirectDotGeneralOp", "flax Fp8DotGeneralOp"),
    "current": ("qwix",),
    "current/row": ("qwix by channel",),
    "mxfp8": ("qwix mxfp8",),
    "nvfp4": ("qwix nvfp4",),
}
"""The contestants that do the same as ours, by our name."""

CONTESTANTS: dict[str, Made] = {
    BFLOAT16: by_hand,
    **{name: functools.partial(ours, format) for name, format in OURS.items()},
    "flax Fp8DirectDotGeneralOp": functools.partial(with_flax, fp8_ops.Fp8DirectDotGeneralOp),
    "flax Fp8DotGeneralOp": functools.partial(with_flax, fp8_ops.Fp8DotGeneralOp),
    "qwix": functools.partial(with_qwix, False),
    "qwix by channel": functools.partial(with_qwix, True),
    "qwix mxfp8": functools.partial(with_qwix_blocks, "mxfp8", 32),
    "qwix nvfp4": functools.partial(with_qwix_blocks, "nvfp4", 16),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A contestant's model, and random data that is the same for all contestants.

    Attributes:
      model: the module.
      variables: parameters, and the state of the layers if they keep some.
      x: float32, the input.
      target: float32 of the shape of the output; the loss makes it the output's gradient.
    """

    model: linen.Module
    variables: Any
    x: jax.Array
    target: jax.Array

    def forward(self) -> Program:
        """The jitted forward pass."""
        return Program(jax.jit(self.model.apply), (self.variables, self.x))

    def training(self) -> Program:
        """The jitted loss, gradients of parameters and input, and next state, which is the state's gradient."""
        step = jax.jit(jax.value_and_grad(functools.partial(_loss, self.model), (0, 1)))
        return Program(step, (self.variables, self.x, self.target))

    def gradients(self, steps: int = 1) -> Any:
        """The gradients of parameters and input, after some steps on the same data for scales to settle."""
        step, (variables, *data) = self.training().step, self.training().args
        grads = None
        for _ in range(steps):
            _, grads = step(variables, *data)
            variables = variables | {name: grads[0][name] for name in variables if name == STATE}
        assert grads is not None
        return grads[0]["params"], grads[1]


def case(name: str, made: type[linen.Module], shape: tuple[int, ...]) -> Case:
    """A model of a class, as a contestant makes it, on an input of a shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # one of Flax's operations is going
        model = CONTESTANTS[name](made)
        keys = jax.random.split(jax.random.key(0), 3)
        x, target = (jax.random.normal(key, shape) for key in keys[:2])
        return Case(model, dict(jax.jit(model.init)(keys[2], x)), x, target)


def reference_gradients(made: type[linen.Module], shape: tuple[int, ...]) -> Any:
    """Returns `Case.gradients` in float64."""
    in_half = case(BFLOAT16, made, shape)
    with jax.enable_x64(True):
        return in_float64(in_half, made).gradients()


def in_float64(half: Case, made: type[linen.Module]) -> Case:
    """The same model and data in float64, where JAX has that enabled."""
    wide = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)
    return Case(made(dtype=jnp.float64), wide(half.variables), wide(half.x), wide(half.target))


def relative_error(got: Any, expected: Any) -> float:
    """Returns the norm of the difference of two trees over the norm of the expected tree, in float64."""
    flat = lambda tree: np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])
    return float(np.linalg.norm(flat(got) - flat(expected)) / np.linalg.norm(flat(expected)))


def _apply_rule(rule: Any, made: type[linen.Module]) -> linen.Module:
    import qwix

    return qwix.quantize_model(by_hand(made), qwix.QtProvider([rule]))


def _loss(model: linen.Module, variables: Any, x: jax.Array, target: jax.Array) -> jax.Array:
    out = model.apply(variables, x)
    assert isinstance(out, jax.Array)
    return jnp.mean(out.astype(target.dtype) * target)
