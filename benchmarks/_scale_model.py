"""A training step of a GPT on a mesh of any size, written in JAX alone: layers in a scan, parameters in parts."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

import jmp_policy as jmp

AXES = ("data", "fsdp")
"""The axes of the mesh: the batch is split over both, parameters over the second."""


@dataclasses.dataclass(frozen=True)
class GPT:
    """The sizes of a model: `depth` blocks of four matrices, and a table that is the head as well."""

    depth: int
    width: int
    context: int = 2048
    vocabulary: int = 50_304
    head_width: int = 128

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of a block by name."""
        width = self.width
        return {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}

    @property
    def matrix_parameters(self) -> int:
        """Returns the number of elements of the matrices of a block."""
        return sum(map(math.prod, self.matrices.values()))

    @property
    def parameters(self) -> int:
        """Returns the number of parameters of the model."""
        norms = (2 * self.depth + 1) * self.width
        return self.depth * self.matrix_parameters + self.vocabulary * self.width + norms


@dataclasses.dataclass(frozen=True)
class Format:
    """In which dtypes a step computes.

    Attributes:
      policy: the string of its policy.
      quantization: the format of the matmuls, if they are in fewer bits.
    """

    policy: str
    quantization: str | None = None


def make_step(gpt: GPT, format: Format, mesh: Mesh | AbstractMesh) -> tuple[Any, tuple[Any, Any, Any]]:
    """Makes the step of a model on a mesh.

    Returns:
      The jitted step, `(params, opt_state, tokens) -> (params, opt_state, loss)`, and its arguments as
      `jax.ShapeDtypeStruct`s that say where they lie. Each device has one row of the batch.
    """
    policy = jmp.get_policy(format.policy)
    params, specs = _describe_params(gpt, format, policy)
    tx = jmp.optim.loss_scaled(optax.adamw(1e-4), policy.loss_scale(), axis_name=AXES)
    state_specs = jmp.sharding.state_shardings(tx, params, specs)

    def step_on_device(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss_of = lambda params: _compute_loss(params, tokens, gpt, format, policy, specs) / mesh.size
        loss, grads = jmp.value_and_grad(loss_of, loss_scale=state)(params)
        params, state = jmp.optim.step(tx, grads, state, params)
        return params, state, lax.psum(loss, AXES)

    step = jax.shard_map(
        step_on_device, mesh=mesh, in_specs=(specs, state_specs, P(AXES)), out_specs=(specs, state_specs, P())
    )
    args = params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((mesh.size, gpt.context + 1), jnp.int32)
    placed = jax.tree.map(
        lambda x, spec: x.update(sharding=NamedSharding(mesh, spec)), args, (specs, state_specs, P(AXES))
    )
    return jax.jit(step, donate_argnums=(0, 1)), placed


def _describe_params(gpt: GPT, format: Format, policy: jmp.Policy) -> tuple[Any, Any]:
    """Returns the shapes of the parameters and their specs; parameters of layers have the axis of layers first."""
    norms = dict.fromkeys(("attention_norm", "mlp_norm"), (gpt.width,))
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, policy.param_dtype)
    layers: dict[str, Any] = {name: shape(gpt.depth, *sizes) for name, sizes in (norms | gpt.matrices).items()}
    specs: dict[str, Any] = dict.fromkeys(norms, P()) | dict.fromkeys(gpt.matrices, P(None, "fsdp", None))
    if format.quantization is not None:
        state = jax.eval_shape(functools.partial(jmp.quant.float8_state, format.quantization))
        stacked = jax.tree.map(lambda x: x.update(shape=(gpt.depth, *x.shape)), state)
        layers["float8"] = dict.fromkeys(gpt.matrices, stacked)
        specs["float8"] = jax.tree.map(lambda _: P(), layers["float8"])
    params = {"table": shape(gpt.vocabulary, gpt.width), "norm": shape(gpt.width), "layers": layers}
    return params, {"table": P(None, "fsdp"), "norm": P(), "layers": specs}


def _compute_loss(
    shards: Any, tokens: jax.Array, gpt: GPT, format: Format, policy: jmp.Policy, specs: Any
) -> jax.Array:
    dtype = policy.compute_dtype
    layer_specs = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])

    @jax.checkpoint
    def run_layer(x: jax.Array, shards: Any) -> tuple[jax.Array, None]:
        read = lambda layer: _run_block(x, layer, gpt, format)
        return read(jmp.sharding.gather_params(shards, policy, layer_specs, reduce_axes=AXES, fun=read)), None

    def read_rest(rest: Any) -> jax.Array:
        x, _ = lax.scan(run_layer, rest["table"][tokens[:, :-1]].astype(dtype), shards["layers"])
        logits = _normalize(x, rest["norm"]) @ rest["table"].T.astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    names = ("table", "norm")
    rest, rest_specs = ({name: tree[name] for name in names} for tree in (shards, specs))
    return read_rest(jmp.sharding.gather_params(rest, policy, rest_specs, reduce_axes=AXES, fun=read_rest))


def _run_block(x: jax.Array, layer: Mapping[str, Any], gpt: GPT, format: Format) -> jax.Array:
    multiply = functools.partial(_multiply, layer=layer, format=format)
    qkv = multiply(_normalize(x, layer["attention_norm"]), "qkv")
    heads = (part.reshape(*part.shape[:-1], -1, gpt.head_width) for part in jnp.split(qkv, 3, axis=-1))
    attended = jax.nn.dot_product_attention(*heads, is_causal=True)
    x = x + multiply(attended.reshape(x.shape), "out")
    hidden = jax.nn.gelu(multiply(_normalize(x, layer["mlp_norm"]), "up"))
    return x + multiply(hidden, "down")


def _multiply(x: jax.Array, name: str, *, layer: Mapping[str, Any], format: Format) -> jax.Array:
    weight = layer[name].astype(x.dtype)
    if format.quantization is None:
        return x @ weight
    sums = (((x.ndim - 1,), (0,)), ((), ()))
    state = layer["float8"][name]
    return jmp.quant.dot_general(x, weight, sums, quantization=format.quantization, state=state)


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * size * scale.astype(jnp.float32)).astype(x.dtype)
