"""A mixture of experts, trained with its grouped matmuls in bfloat16, int8 and MXFP8: `python -m examples.moe`."""

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jmp_policy as jmp


class MixtureOfExperts(nn.Module):
    """Sends each token to the experts with the largest router logits, and adds their outputs by these weights.

    Attributes:
      experts: number of experts.
      hidden: number of hidden features of an expert.
      chosen: number of experts per token.
      quantization: format of the grouped matmuls, such as `"int8"`; `None` for the compute dtype.
    """

    experts: int
    hidden: int
    chosen: int = 2
    quantization: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of `x`, `(..., features)`."""
        tokens = x.reshape(-1, x.shape[-1])
        logits = nn.Dense(self.experts, name="router")(tokens).astype(jnp.float32)
        weights, experts = jax.lax.top_k(jax.nn.softmax(logits), self.chosen)

        # Sort the copies of the tokens by expert: `ragged_dot` takes the rows of the first expert, then of the second.
        order = jnp.argsort(experts.reshape(-1))
        group_sizes = jnp.bincount(experts.reshape(-1), length=self.experts)
        rows = tokens[order // self.chosen]
        features, init = tokens.shape[-1], nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, features, self.hidden))
        down = self.param("down", init, (self.experts, self.hidden, features))
        rows = nn.gelu(self.multiply(rows, up, group_sizes))
        rows = self.multiply(rows, down, group_sizes)

        outputs = jnp.zeros_like(rows).at[order].set(rows).reshape(*experts.shape, features)
        return jnp.sum(outputs * weights[..., None].astype(rows.dtype), axis=1).reshape(x.shape)

    def multiply(self, rows: jax.Array, matrices: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Multiplies each row by the matrix of its expert."""
        return jmp.quant.ragged_dot(rows, matrices, group_sizes, quantization=self.quantization)


def draw_batches(steps: int, rows: int = 128, features: int = 32) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Draws inputs of eight clusters, each of which has its own linear map to the targets."""
    keys = jax.random.split(jax.random.key(0), 3)
    centers = 2 * jax.random.normal(keys[0], (8, features))
    maps = jax.random.normal(keys[1], (8, features, features)) / features**0.5
    for key in jax.random.split(keys[2], steps):
        of_cluster, of_noise = jax.random.split(key)
        cluster = jax.random.randint(of_cluster, (rows,), 0, 8)
        x = centers[cluster] + jax.random.normal(of_noise, (rows, features))
        yield x, jnp.einsum("bi,bij->bj", x, maps[cluster])


def train(quantization: str | None, steps: int = 200, hidden: int = 64, seed: int = 1) -> list[float]:
    """Trains one layer in bfloat16 and returns the loss of each step; `quantization` is for its experts."""
    model = jmp.with_policy(
        MixtureOfExperts(experts=8, hidden=hidden, quantization=quantization),
        "params=float32,compute=bfloat16,output=float32",
    )
    batches = list(draw_batches(steps))
    params = model.init(jax.random.key(seed), batches[0][0])
    tx = optax.adam(1e-2)
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params, opt_state, x, y):
        loss_fn = lambda params: jnp.mean((model.apply(params, x) - y) ** 2)
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for x, y in batches:
        params, opt_state, loss = train_step(params, opt_state, x, y)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    for quantization in (None, "int8", "mxfp8", "float8(recipe=current,min_size=0)"):
        losses = train(quantization, parser.parse_args().steps)
        print(f"{quantization or 'bfloat16':36} first loss {losses[0]:.3f}, last {losses[-1]:.3f}")
