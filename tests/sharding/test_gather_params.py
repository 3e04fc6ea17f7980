"""Gathered parameters: the numbers of one device, and what moves between several."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded_models import BATCH, MODELS, POLICY, list_moved, make_auto_mesh, place, split_last

import jmp_policy as jmp

# Both round in bfloat16 where the backward pass does, by 2**-9 of a number, one device all 48 rows of a bias's gradient
# as it sums them; this is less than a third of what it may lose there, of the largest number of a leaf.
GRADIENT_BOUND = 2.0**-5
LOSS_BOUND = 1e-5
TENSOR_BOUND = 2e-4  # of a loss whose activations are summed along a tensor axis, in bfloat16


@functools.cache
def make(name):
    return MODELS[name]()


@functools.cache
def of_one_device(name):
    params, loss = make(name)
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, BATCH))


def differentiate(loss, mesh, specs, reduce_axes, *, check_vma=True, policy=POLICY, narrows=True):
    """Loss and gradients of a model, whose parameters and batch are split over a mesh."""
    count = int(np.prod([mesh.shape[axis] for axis in reduce_axes]))

    def local(params, tokens):
        def loss_of(shards):
            read = lambda params: loss(params, tokens)
            fun = read if narrows else None
            return read(jmp.sharding.gather_params(shards, policy, specs, reduce_axes=reduce_axes, fun=fun)) / count

        value, grads = jax.value_and_grad(loss_of)(params)
        return lax.psum(value, reduce_axes), grads

    options = {"mesh": mesh, "check_vma": check_vma, "axis_names": set(reduce_axes)}
    return jax.jit(jax.shard_map(local, in_specs=(specs, P(reduce_axes)), out_specs=(P(), specs), **options))


def assert_close(found, expected, bound=LOSS_BOUND):
    (loss, grads), (expected_loss, expected_grads) = jax.device_get((found, expected))
    assert abs(loss - expected_loss) <= bound * expected_loss
    for grad, right in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert grad.dtype == right.dtype
        assert np.abs(grad - right).max() <= GRADIENT_BOUND * np.abs(right).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "check_vma"), [("linen", {"data": 2, "fsdp": 2}, False), ("nnx", {"fsdp": 4}, True)]
)
def test_losses_and_gradients_are_those_of_one_device(name, sizes, check_vma):
    params, loss = make(name)
    mesh, specs = make_auto_mesh(**sizes), split_last(params)
    fun = differentiate(loss, mesh, specs, tuple(sizes), check_vma=check_vma)
    assert_close(fun(place(mesh, params, specs), BATCH), of_one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_axis_is_left_to_xla(name):
    params, loss = make(name)
    mesh, specs = make_auto_mesh(fsdp=2, tensor=2), split_last(params)
    tensor = jax.tree.map(lambda p, spec: P("tensor", *spec[1:]) if p.ndim > 1 else spec, params, specs)
    fun = differentiate(loss, mesh, specs, ("fsdp",))
    assert_close(fun(place(mesh, params, tensor), BATCH), of_one_device(name), TENSOR_BOUND)


WHOLE, SPLIT = 2, 5  # leaves of norms, and of all else


@pytest.mark.parametrize("name", MODELS)
def test_each_leaf_is_gathered_once_in_compute_dtype_and_reduced_once_in_reduce_dtype(name):
    """The table is tied: two uses, one gather, one reduction. All are summed over data, and the loss."""
    params, loss = make(name)
    fun = differentiate(loss, make_auto_mesh(data=2, fsdp=2), split_last(params), ("data", "fsdp"))
    jmp.numerics.collectives(fun, compiled=False)(params, BATCH).assert_reduced_in("float32", of="gradients")
    moved = Counter((kind, dtype) for kind, dtype, _ in list_moved(fun, params, BATCH))
    assert moved == {
        ("all_gather", "bf16"): SPLIT,
        ("reduce_scatter", "f32"): SPLIT,
        ("all_reduce", "f32"): SPLIT + WHOLE + 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("reduce", "shown"), [("bfloat16", "bf16"), ("float16", "f16"), ("none", "f32")])
def test_the_policy_alone_says_what_a_gradient_is_reduced_in(reduce, shown):
    params, loss = make("linen")
    policy = f"params=float32,compute=bfloat16,output=float32,reduce={reduce}"
    fun = differentiate(loss, make_auto_mesh(fsdp=4), split_last(params), ("fsdp",), policy=policy)
    moved = Counter((kind, dtype) for kind, dtype, _ in list_moved(fun, params, BATCH))
    assert moved["reduce_scatter", shown] == SPLIT
    assert moved["all_reduce", shown] == WHOLE + (reduce == "none")


@pytest.mark.slow
def test_norms_are_gathered_as_they_are_and_without_fun_nothing_is():
    params, loss = make("linen")
    mesh, specs = make_auto_mesh(fsdp=4), jax.tree.map(lambda p: P(*[None] * (p.ndim - 1), "fsdp"), make("linen")[0])

    def count(**options):
        moved = list_moved(differentiate(loss, mesh, specs, ("fsdp",), **options), params, BATCH)
        return Counter(dtype for kind, dtype, _ in moved if kind == "all_gather")

    assert count() == {"bf16": SPLIT, "f32": WHOLE}
    assert count(narrows=False) == {"bf16": SPLIT + WHOLE}
    assert count(policy="float32") == {"f32": SPLIT + WHOLE}


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_scan_over_layers_the_body_gathers_one_layer(check_vma):
    layers, x = jax.random.normal(jax.random.key(0), (3, 8, 8)) / 3, jax.random.normal(jax.random.key(1), (8, 8))
    half = jnp.bfloat16

    def run(layers, x, gather):
        body = lambda h, layer: (jnp.tanh(h @ gather(layer).astype(half)), None)
        h, _ = lax.scan(jax.checkpoint(body), x.astype(half), layers)
        return jnp.sum(h.astype(jnp.float32) ** 2)

    gather = functools.partial(jmp.sharding.gather_params, policy=POLICY, specs=P("fsdp", None), reduce_axes="fsdp")
    grad = lambda layers, x: jax.grad(run)(layers, x, gather)
    options = {"mesh": make_auto_mesh(fsdp=4), "check_vma": check_vma}
    fun = jax.jit(jax.shard_map(grad, in_specs=(P(None, "fsdp"), P("fsdp")), out_specs=P(None, "fsdp"), **options))
    expected = jax.grad(run)(layers, x, lambda layer: layer)
    assert np.abs(fun(layers, x) - expected).max() <= GRADIENT_BOUND * np.abs(expected).max()
    moved = list_moved(fun, layers, x)  # the parts of one layer, forward and again for the backward pass
    assert moved == [("all_gather", "bf16", 16), ("all_gather", "bf16", 16), ("reduce_scatter", "f32", 64)]


@pytest.mark.slow
def test_integers_and_keys_are_gathered_and_have_no_gradient():
    tree = {"ids": jnp.arange(4), "keys": jax.random.split(jax.random.key(0), 4), "w": jnp.arange(4.0)}

    def local(tree):
        whole = jmp.sharding.gather_params(tree, POLICY, P("fsdp"), reduce_axes="fsdp")
        return whole["ids"], jax.random.key_data(whole["keys"]), whole["w"]

    fun = jax.shard_map(local, mesh=make_auto_mesh(fsdp=4), in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    ids, keys, w = jax.jit(fun)(tree)
    assert ids.tolist() == [0, 1, 2, 3]
    assert keys.tolist() == jax.random.key_data(tree["keys"]).tolist()
    assert (w.tolist(), w.dtype) == ([0, 1, 2, 3], jnp.float32)


def trace_on(mesh, specs, **options):
    given = {"reduce_axes": "fsdp"} | options
    params = given.pop("params", {"w": jnp.ones((8, 4)), "b": jnp.ones(4)})
    local = lambda tree: jmp.sharding.gather_params(tree, given.pop("policy", POLICY), specs, **given)
    fun = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False, axis_names={"data", "fsdp"})
    return jax.jit(fun).trace(params)


MAP = jmp.PolicyMap({"norm": "float32"}, "mixed_bfloat16")
WRONG = {
    "an axis no mesh has": ({"w": P("fdsp"), "b": P()}, {}, r"'fdsp' in specs\['w'\] is not .* The mesh has 'data', "),
    "an axis left to XLA": ({"w": P("tensor"), "b": P()}, {}, r"'tensor' in specs\['w'\] is not .* 'fsdp' is manual\."),
    "no such reduce axis": (P(), {"reduce_axes": ("data", "fdsp")}, r"'fdsp' in reduce_axes is not a mapped axis "),
    "more dimensions": ({"w": P(), "b": P(None, "fsdp")}, {}, r"specs\['b'\] is P\(None, 'fsdp'\), for an array of 1 "),
    "another structure": ({"w": P(), "c": P()}, {}, r"specs does not fit the parameters: it has none for \['b'\], "),
    "two kinds of axes": ({"w": P(("data", "fsdp")), "b": P()}, {}, r"specs\['w'\] splits dimension 0 over data, fsdp"),
    "a map without fun": (P(), {"policy": MAP}, r"several dtypes for compute: bfloat16 and float32\."),
    "float8 state that is split": (
        P("fsdp"),
        {"params": jmp.quant.float8_state("float8")},
        r"^specs\['input_amax_history'\] splits float8 state",
    ),
    "no spec": ({"w": "fsdp", "b": P()}, {}, r"specs\['w'\] must be a PartitionSpec or a NamedSharding, got 'fsdp'\."),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_clear_error(name):
    specs, options, text = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=text):
        trace_on(make_auto_mesh(data=2, fsdp=2, tensor=1), specs, **dict(options))


FLOAT16 = "params=float32,compute=float16,reduce=float32"


def take_large_gradient(value_and_grad, layers=None):
    """The gradient of a weight of which each of four devices has a quarter of the sum, 144,000."""

    def apply(w, x):
        if layers is not None:
            return layers(lambda w, x: x @ w.astype(jnp.float16))(w, x)
        return x @ w.astype(jnp.float16)

    def loss(w, x):
        fun = lambda w: apply(w, x)
        whole = jmp.sharding.gather_params(w, FLOAT16, P("fsdp"), reduce_axes="fsdp", fun=fun)
        return (fun(whole).astype(jnp.float32) * 24).sum()

    mesh = make_auto_mesh(fsdp=4)
    step = jax.shard_map(value_and_grad(loss), mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=(P(), P("fsdp")),
                         check_vma=False)  # fmt: skip
    return jax.jit(step)(jnp.ones((4, 4)), jnp.full((8000, 4), 3, jnp.float16))[1][0, 0]


LAYERS = {
    "plain": None,
    "remat": jax.checkpoint,
    "jit": jax.jit,
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[None])[0],
    "scan": lambda f: lambda w, x: lax.scan(lambda _, part: (None, f(w, part)), None, x.reshape(2, -1, 4))[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("layers", LAYERS)
def test_products_of_a_gathered_weight_do_not_overflow_before_they_are_reduced(layers):
    value_and_grad = functools.partial(jmp.value_and_grad, loss_scale=jmp.StaticLossScale(1.0))
    assert take_large_gradient(value_and_grad, LAYERS[layers]) == 576_000


def test_where_jax_alone_takes_the_gradients_a_warning_says_so_once():
    message = r"^The matmuls that make gradients of gathered parameters output float16, which overflows at 65504"
    with pytest.warns(UserWarning, match=message) as caught:
        assert jnp.isinf(take_large_gradient(jax.value_and_grad))
    assert len(caught) == 1
    take_large_gradient(jax.value_and_grad)  # warnings are errors here
