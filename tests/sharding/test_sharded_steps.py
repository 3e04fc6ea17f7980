"""Whole training steps in `jax.shard_map`: every state in parts and donated, one decision for all."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded_models import list_moved, make_auto_mesh, place

import jmp_policy as jmp

POLICY = "params=float32,compute=bfloat16,output=float32,reduce=float32"
SPECS = {"w": P(None, "fsdp"), "v": P("fsdp", None), "scale": P()}
SHAPES = {"w": (8, 64), "v": (64, 8), "scale": (8,)}
ADAM = optax.adamw(1e-2)
INNER = {
    "float32": (jnp.float32, ADAM),
    "split": (jnp.bfloat16, jmp.optim.master_weights(ADAM, mode="split")),
    "kahan": (jnp.bfloat16, jmp.optim.kahan(ADAM)),
    "stochastic_rounding": (jnp.bfloat16, jmp.optim.stochastic_rounding(ADAM, jax.random.key(0))),
}
MESHES = {
    "data x fsdp": ({"data": 2, "fsdp": 2}, ("data", "fsdp")),
    "fsdp x tensor": ({"fsdp": 2, "tensor": 2}, ("fsdp",)),
}


def loss_fn(params, batch):
    x, y = (array.astype(jnp.bfloat16) for array in batch)
    h = jax.nn.relu(x @ params["w"].astype(jnp.bfloat16)) @ params["v"].astype(jnp.bfloat16)
    return jnp.mean((h.astype(jnp.float32) * params["scale"].astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


def make_problem(name, axis_name=None):
    """An optimizer, parameters, and a batch that keeps every sum away from zero."""
    dtype, inner = INNER[name]
    keys = jax.random.split(jax.random.key(1), 5)
    params = {
        leaf: jax.random.uniform(key, shape, minval=0.1).astype(dtype)
        for key, (leaf, shape) in zip(keys, SHAPES.items(), strict=False)
    }
    batch = tuple(jax.random.uniform(key, (8, 8)) for key in keys[3:])
    return jmp.optim.loss_scaled(inner, jmp.DynamicLossScale(2.0**10), axis_name=axis_name), params, batch


def make_step(name, mesh, axes, *, check_vma=True):
    """A step on a mesh, and what it begins with, in its place."""
    tx, params, batch = make_problem(name, axes)
    state_specs = jmp.sharding.state_shardings(tx, params, SPECS)
    count = int(np.prod([mesh.shape[axis] for axis in axes]))

    def local(params, state, batch):
        def loss_of(shards):
            read = lambda params: loss_fn(params, batch)
            return read(jmp.sharding.gather_params(shards, POLICY, SPECS, reduce_axes=axes, fun=read)) / count

        loss, grads = jmp.value_and_grad(loss_of, loss_scale=state)(params)
        params, state = jmp.optim.step(tx, grads, state, params)
        return params, state, lax.psum(loss, axes)

    options = {"mesh": mesh, "check_vma": check_vma, "axis_names": set(axes)}
    specs = (SPECS, state_specs)
    step = jax.shard_map(local, in_specs=(*specs, P(axes)), out_specs=(*specs, P()), **options)
    args = place(mesh, (params, tx.init(params), batch), (SPECS, state_specs, (P(axes), P(axes))))
    return jax.jit(step, donate_argnums=(0, 1)), args


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def count_versions(tree):
    """In how many versions there is a part of an array, of all parts of all arrays the most."""
    versions = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for shard in leaf.addressable_shards:
            versions.setdefault((path, str(shard.index)), set()).add(np.asarray(shard.data).tobytes())
    return max(map(len, versions.values()))


@functools.cache
def compile_step(name, mesh_name):
    sizes, axes = MESHES[mesh_name]
    step, args = make_step(name, make_auto_mesh(**sizes), axes, check_vma=name != "kahan")
    return step.lower(*args).compile(), args


CASES = [*((name, "data x fsdp") for name in INNER), ("float32", "fsdp x tensor"), ("split", "fsdp x tensor")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh_name"), CASES)
def test_one_device_that_overflows_has_all_skip_and_losses_are_those_of_one_device(name, mesh_name):
    """Three steps, of which the second must be skipped: one row of the batch, so one device, has an infinity."""
    step, (params, state, batch) = compile_step(name, mesh_name)
    bad = (jax.device_put(batch[0].at[-1, 0].set(jnp.inf), batch[0].sharding), batch[1])
    kept, losses = [], []
    for given in (batch, bad, batch):
        params, state, loss = step(params, state, given)
        assert count_versions((params, state)) == 1
        kept.append(jax.device_get((params, state)))
        losses.append(float(loss))
    first, second, third = kept
    assert bits((second[0], second[1].inner_state)) == bits((first[0], first[1].inner_state))
    assert bits(third[0]) != bits(second[0])
    decisions = [
        (bool(state.grads_finite), float(state.loss_scale.loss_scale), int(state.skipped_steps)) for _, state in kept
    ]
    assert decisions == [(True, 2.0**10, 0), (False, 2.0**9, 1), (True, 2.0**9, 1)]

    tx, params, batch = make_problem(name)
    state, expected = tx.init(params), []
    for _ in range(2):
        loss, grads = jax.jit(jmp.value_and_grad(loss_fn, loss_scale=state))(params, batch)
        params, state = jax.jit(functools.partial(jmp.optim.step, tx))(grads, state, params)
        expected.append(float(loss))
    # Rounded to bfloat16 in another order, stochastically by other noise: 2**-9 of a number at a time.
    np.testing.assert_allclose(losses[::2], expected, rtol=2.0**-8)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_decision_is_one_scalar_and_gradients_move_in_the_dtypes_of_the_policy(check_vma):
    step, args = make_step("float32", make_auto_mesh(data=2, fsdp=2), ("data", "fsdp"), check_vma=check_vma)
    moved = list_moved(step, *args)
    part, whole = 8 * 64 // 2, 8
    assert collections.Counter(moved) == {
        ("all_gather", "bf16", part): 2,
        ("reduce_scatter", "f32", 8 * 64): 2,
        ("all_reduce", "f32", part): 2,
        ("all_reduce", "f32", whole): 1,  # the scale, which is read in float32
        ("all_reduce", "f32", 1): 1,  # the loss
        ("all_reduce", "i32", 1): 1,  # the decision
    }


@pytest.mark.slow
def test_float8_state_is_the_same_as_on_one_device():
    """The largest magnitudes of all rows, bit for bit; weights are quantized from float32, and gathered in it."""
    quantization, names = "float8(min_size=0)", ("data", "fsdp")
    state = jmp.quant.float8_state(quantization)
    params = {"w": jax.random.normal(jax.random.key(0), (16, 16)), "_overwrite_with_gradient": state}
    specs = jax.tree.map(lambda p: P("fsdp", None) if p.shape == (16, 16) else P(), params)
    x, weight = (jax.random.normal(jax.random.key(seed), (64, 16)) for seed in (1, 2))  # 16 rows for each device
    tx = jmp.optim.loss_scaled(optax.sgd(0.1), jmp.DynamicLossScale(), axis_name=names)

    def loss_of(params, x, weight):
        dims = (((1,), (0,)), ((), ()))
        state = params["_overwrite_with_gradient"]
        out = jmp.quant.dot_general(x, params["w"], dims, quantization=quantization, state=state)
        return jnp.sum(out * weight)  # linear: the gradients of the outputs do not depend on the product

    def step(params, state, x, weight, gather=lambda params, fun: params, axis_name=names):
        read = lambda params: loss_of(params, x, weight)
        grads = jmp.grad(lambda p: read(gather(p, read)), loss_scale=state)(params)
        chosen = tx if axis_name else jmp.optim.loss_scaled(optax.sgd(0.1), jmp.DynamicLossScale())
        return jmp.optim.step(chosen, grads, state, params)

    gather = lambda params, fun: jmp.sharding.gather_params(params, POLICY, specs, reduce_axes=names, fun=fun)
    state_specs = jmp.sharding.state_shardings(tx, params, specs)
    for check_vma in (True, False):
        options = {"mesh": make_auto_mesh(data=2, fsdp=2), "check_vma": check_vma}
        own, rows = (specs, state_specs), P(names)
        on_mesh = jax.shard_map(
            functools.partial(step, gather=gather), in_specs=(*own, rows, rows), out_specs=own, **options
        )
        found, expected = (params, tx.init(params)), (params, tx.init(params))
        for _ in range(2):
            found = jax.jit(on_mesh)(*found, x, weight)
            expected = jax.jit(functools.partial(step, axis_name=None))(*expected, x, weight)
            kept, right = (tree[0]["_overwrite_with_gradient"] for tree in (found, expected))
            assert all(np.any(np.asarray(history)) for name, history in right.items() if "history" in name)
            own_bits, right_bits = (
                bits({name: leaf for name, leaf in tree.items() if "kernel" not in name}) for tree in (kept, right)
            )
            assert own_bits == right_bits
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), kept, right)
