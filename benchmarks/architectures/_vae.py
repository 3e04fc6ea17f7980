"""A convolutional variational autoencoder in nnx."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Encoder(nnx.Module):
    """`(batch, 16, 16, 1)` images to the mean and the log-variance of their latent variables."""

    def __init__(self, channels: int, latents: int, *, dtype: Any = None, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, channels, (3, 3), strides=2, dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(channels, 2 * channels, (3, 3), strides=2, dtype=dtype, rngs=rngs)
        self.mean = nnx.Linear(4 * 4 * 2 * channels, latents, dtype=dtype, rngs=rngs)
        self.logvar = nnx.Linear(4 * 4 * 2 * channels, latents, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        x = x.reshape(x.shape[0], -1)
        return self.mean(x), self.logvar(x)


class Decoder(nnx.Module):
    """Latent variables to the logits of the pixels."""

    def __init__(self, channels: int, latents: int, *, dtype: Any = None, rngs: nnx.Rngs):
        self.linear = nnx.Linear(latents, 4 * 4 * 2 * channels, dtype=dtype, rngs=rngs)
        self.conv1 = nnx.ConvTranspose(2 * channels, channels, (3, 3), strides=2, dtype=dtype, rngs=rngs)
        self.conv2 = nnx.ConvTranspose(channels, 1, (3, 3), strides=2, dtype=dtype, rngs=rngs)

    def __call__(self, z: jax.Array) -> jax.Array:
        x = nnx.relu(self.linear(z)).reshape(z.shape[0], 4, 4, -1)
        return self.conv2(nnx.relu(self.conv1(x)))


class VAE(nnx.Module):
    """An encoder, a sample of its latent variables, and a decoder."""

    def __init__(self, channels: int, latents: int, *, dtype: Any = None, rngs: nnx.Rngs):
        self.encoder = Encoder(channels, latents, dtype=dtype, rngs=rngs)
        self.decoder = Decoder(channels, latents, dtype=dtype, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mean, logvar = self.encoder(x)
        noise = jax.random.normal(self.rngs.noise(), mean.shape)
        z = mean + jnp.exp(0.5 * logvar) * noise
        return self.decoder(z), mean, logvar


def loss_fn(model: VAE, batch: Any) -> jax.Array:
    """The negative evidence lower bound of a batch of images, in float32."""
    images = batch["image"]
    logits, mean, logvar = (x.astype(jnp.float32) for x in model(images))
    reconstruction = optax.sigmoid_binary_cross_entropy(logits, images).sum((1, 2, 3))
    divergence = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), axis=-1)
    return jnp.mean(reconstruction + divergence)
