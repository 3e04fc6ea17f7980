"""What float16 rounds to zero of a gradient: how much of all of it, in which layers, and at the logits.

The gradient of a mean loss by a logit is `(p - y) / tokens`: the probability that the softmax gives to a token, less
one for the token that came, over the number of tokens that the loss is the mean of. float16 has no number between zero
and 6e-8, and rounds what is up to half of that to zero. In a mean over 32768 tokens (many a real step has more) this is
all that would make a byte of `p < 0.001` less likely. What is zero at the logits stays zero in the layers below, and
Adam, which makes small gradients large, makes nothing of zeros. Times a loss scale of 2**15 the same gradients are
ordinary numbers of float16.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2: a detector, most of whose gradients are
too small for float16, diverges without loss scaling and is as accurate as in float32 with it.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jmp_policy as jmp
from jmp_policy._base import PyTree

from ._gpt import cross_entropy, split_windows

LARGEST_FLUSHED = float(np.finfo(np.float16).smallest_subnormal) / 2
"""The largest number that float16 rounds to zero, 3e-8: half of its smallest one, a tie that goes to even."""


def measure_zeroed(grads: PyTree, expected: PyTree) -> tuple[float, dict[str, float]]:
    """Counts the elements that are zero although they are not expected to be.

    Args:
      grads: a gradient, a pytree of arrays.
      expected: the same gradient in float32.

    Returns:
      Their share of all elements, and their share of each layer's, by the path of the layer.

    >>> expected = {"embed": {"table": jnp.array([1.0, 1e-9])}, "norm": {"bias": jnp.ones(2), "scale": jnp.ones(2)}}
    >>> grads = jax.tree.map(lambda x: x.astype(jnp.float16), expected)
    >>> measure_zeroed(grads, expected)
    (0.16666666666666666, {'embed': 0.5, 'norm': 0.0})
    """
    zeroed, sizes = {}, {}
    references = jax.tree.leaves(expected)
    for (path, grad), reference in zip(jax.tree_util.tree_leaves_with_path(grads), references, strict=True):
        layer = _name_layer(path)
        zeroed[layer] = zeroed.get(layer, 0) + int(jnp.sum((grad == 0) & (reference != 0)))
        sizes[layer] = sizes.get(layer, 0) + reference.size
    by_layer = {layer: zeroed[layer] / sizes[layer] for layer in sizes}
    return sum(zeroed.values()) / sum(sizes.values()), by_layer


def measure_zeroed_at_logits(logits: jax.Array, windows: np.ndarray, loss_scale: jmp.LossScale) -> float:
    """The share of the gradient by the logits that their dtype has no number for.

    Args:
      logits: `(batch, context, vocabulary)`, in the dtype in which the model returns them.
      windows: uint8 `(batch, context + 1)`, of which they are.
      loss_scale: what the loss is multiplied by before the backward pass.

    >>> logits, windows = jnp.zeros((64, 32, 256)), np.zeros((64, 33), np.uint8)  # p / N is 1 / 256 / 2048 = 2e-6
    >>> measure_zeroed_at_logits(logits.astype(jnp.float16), windows, jmp.NoOpLossScale())
    0.0
    >>> rare = logits.at[..., 1:129].set(-10.0).astype(jnp.float16)
    >>> measure_zeroed_at_logits(rare, windows, jmp.NoOpLossScale())
    0.5
    >>> measure_zeroed_at_logits(rare, windows, jmp.StaticLossScale(2.0**15))
    0.0
    """
    _, targets = split_windows(windows)

    def scaled_loss(logits: jax.Array) -> jax.Array:
        return jnp.asarray(loss_scale.scale(cross_entropy(logits, targets)))

    grads = jax.grad(scaled_loss)(logits)
    expected = jax.grad(scaled_loss)(logits.astype(jnp.float32))
    return float(jnp.mean((grads == 0) & (expected != 0)))


def _name_layer(path: jax.tree_util.KeyPath) -> str:
    """The path of a parameter without its own name: `blocks.0.mlp_norm` of `blocks.0.mlp_norm.bias`."""
    names = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value").split(".")
    return ".".join(names[:-1]) or names[0]
