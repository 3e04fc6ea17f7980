"""ResNet-50 in linen, as Flax's imagenet example writes it; only the filters are fewer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks._loss import cross_entropy


class BottleneckBlock(nn.Module):
    """Three convolutions around a residual stream, which is projected where its shape changes."""

    filters: int
    conv: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        residual = x
        y = nn.relu(self.norm()(self.conv(self.filters, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(y)))
        y = self.conv(self.filters * 4, (1, 1))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if residual.shape != y.shape:
            residual = self.conv(self.filters * 4, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return nn.relu(residual + y)


class ResNet(nn.Module):
    """A stem, stages of bottleneck blocks, and a classifier on the mean."""

    stage_sizes: Sequence[int]
    num_classes: int
    num_filters: int = 64
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype
        )
        x = conv(self.num_filters, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, block_count in enumerate(self.stage_sizes):
            for block in range(block_count):
                strides = (2, 2) if stage > 0 and block == 0 else (1, 1)
                x = BottleneckBlock(self.num_filters * 2**stage, conv, norm, strides)(x)
        x = jnp.mean(x, axis=(1, 2))
        x = nn.Dense(self.num_classes, dtype=self.dtype)(x)
        return jnp.asarray(x, self.dtype)


ResNet50 = functools.partial(ResNet, stage_sizes=(3, 4, 6, 3))


def loss_fn(apply_fn: Callable[..., Any], variables: Any, batch: Any) -> tuple[jax.Array, Any]:
    """The cross-entropy of a batch, and the new batch statistics."""
    logits, updates = apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
    return cross_entropy(logits, batch["label"]), updates
