"""The GPTs of the example on meshes: gradients are reduced in the dtype of the policy, activations in compute dtype."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh
from partitioned import list_reductions

import jmp_policy as jmp
from examples.gpt import gpt_linen, gpt_nnx
from examples.gpt.model import GPTConfig, cross_entropy, split_windows

pytestmark = pytest.mark.optimized

SIZES = GPTConfig(width=32, depth=1, heads=4, context=16)
WIDE = jmp.get_policy("p=f32,c=bf16,o=bf16,reduce=float32")
HALF = jmp.get_policy("p=f32,c=bf16,o=bf16")
BATCH = 8


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Flax's own code asks for it
        yield


def make_linen(policy):
    model = jmp.with_policy(gpt_linen.GPT(SIZES), policy)
    params = model.init(jax.random.key(0), jnp.zeros((1, SIZES.context), jnp.int32))["params"]

    def compute_loss(params, windows):
        inputs, targets = split_windows(windows)
        return cross_entropy(model.apply({"params": params}, inputs), targets)

    return params, jmp.value_and_grad(compute_loss, loss_scale=policy.loss_scale())


def make_nnx(policy):
    graphdef, params = nnx.split(jmp.with_policy(gpt_nnx.GPT(SIZES, rngs=nnx.Rngs(0)), policy))

    def compute_loss(model, windows):
        inputs, targets = split_windows(windows)
        return cross_entropy(model(inputs), targets)

    grad_fn = jmp.nnx.value_and_grad(compute_loss, loss_scale=policy.loss_scale())
    return params, lambda params, windows: grad_fn(nnx.merge(graphdef, params), windows)


def choose_sharding(mesh, leaf):
    """The largest dimensions of a parameter are split over the axes that are not for data alone."""
    spec = [None] * leaf.ndim
    sizes = sorted(range(leaf.ndim), key=lambda i: -leaf.shape[i])
    for axis, dimension in zip([name for name in mesh.axis_names if name != "data"], sizes, strict=False):
        spec[dimension] = axis
    return NamedSharding(mesh, P(*spec))


def list_half_reductions(make, axes, policy):
    """The reductions in half: those that are of gradients, and all."""
    params, grad_fn = make(policy)
    mesh = make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    shardings = jax.tree.map(functools.partial(choose_sharding, mesh), params)
    split = NamedSharding(mesh, P([name for name in axes if name != "tensor"] or None))
    found = list_reductions(
        grad_fn, params, jnp.zeros((BATCH, SIZES.context + 1), jnp.uint8),
        in_shardings=(shardings, split), out_shardings=(NamedSharding(mesh, P()), shardings),
    )  # fmt: skip
    half = [r for r in found if r.dtype in ("bf16", "f16")]
    assert len(half) < len(found)
    # Activations are `(batch, length, width)`, parts of which may be on each device.
    is_activation = lambda shape: len(shape) >= 3 and BATCH % shape[0] == 0 and shape[1] == SIZES.context
    return [r for r in half if r.is_backward and not is_activation(r.shape)], half


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "axes"),
    [(make_linen, {"data": 4}), (make_nnx, {"data": 2, "fsdp": 2, "tensor": 2})],
    ids=["linen", "nnx"],
)
def test_no_gradient_is_reduced_in_half(make, axes):
    of_gradients, half = list_half_reductions(make, axes, WIDE)
    assert of_gradients == []
    assert bool(half) == (set(axes) != {"data"})  # activations, wherever an axis cuts through them


@pytest.mark.slow
def test_without_it_most_gradients_are():
    of_gradients, _ = list_half_reductions(make_linen, {"data": 2, "fsdp": 2}, HALF)
    assert len(of_gradients) > 5
