"""Two tiny language models that read a tied table, norms, biases and matrices; where parts lie, and what is moved."""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp

POLICY = "params=float32,compute=bfloat16,output=float32,reduce=float32"
TOKENS, WIDTH = 32, 16
BATCH = jnp.asarray(np.random.default_rng(0).integers(0, TOKENS, (8, 6)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(TOKENS, WIDTH)
        x = table(tokens)
        return table.attend(nn.remat(Block)()(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        x = x + self.down(nnx.relu(self.up(self.norm(x))))
        return self.table.attend(x)


def loss_of(logits, tokens):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32)), tokens[:, 1:, None], -1)
    return -chosen.mean()


def make_linen(policy=POLICY):
    """A model under a policy: its parameters, and its loss as a function of them and a batch."""
    model = jmp.with_policy(Linen(), policy)
    params = model.init(jax.random.key(0), BATCH)["params"]
    return params, lambda params, tokens: loss_of(model.apply({"params": params}, tokens), tokens)


def make_nnx(policy=POLICY):
    model = jmp.with_policy(Nnx(nnx.Rngs(0)), policy)
    graph, params = nnx.split(model)
    return params, lambda params, tokens: loss_of(nnx.merge(graph, params)(tokens), tokens)


MODELS = {"linen": make_linen, "nnx": make_nnx}
_COLLECTIVE = re.compile(
    r'"stablehlo\.(all_reduce|all_gather|reduce_scatter)"\((?:.|\n)*?: \(tensor<((?:\d+x)*)(\w+)>\) ->'
)


def make_auto_mesh(**sizes):
    return make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def split_last(params, axis="fsdp"):
    """Specs that split the last dimension of every matrix, and the biases; norms are whole."""
    return jax.tree_util.tree_map_with_path(
        lambda path, p: P() if "norm" in jax.tree_util.keystr(path).lower() else P(*[None] * (p.ndim - 1), axis), params
    )


def place(mesh, tree, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def list_moved(fun, *args):
    """The collectives of a `shard_map` program in order, the same for TPUs and GPUs: kind, dtype, size of operand."""
    found = []
    for platform in ("tpu", "cuda"):  # one at a time: for both at once, JAX writes a gather twice
        text = jax.export.export(fun, platforms=[platform])(*args).mlir_module()
        matches = _COLLECTIVE.findall(text)
        found.append([(kind, dtype, math.prod(map(int, shape.split("x")[:-1]))) for kind, shape, dtype in matches])
    assert found[0] == found[1]
    return found[0]
