"""The state of every optimizer lies where its parameters do, and nothing as large as one is on every device."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp

HALF = {
    "embed": jax.ShapeDtypeStruct((32, 8), jnp.bfloat16),
    "block": {"w": jax.ShapeDtypeStruct((8, 16), jnp.bfloat16), "b": jax.ShapeDtypeStruct((16,), jnp.bfloat16)},
    "norm": jax.ShapeDtypeStruct((8,), jnp.float32),
}
SPECS = {"embed": P("fsdp", None), "block": {"w": P(None, "fsdp"), "b": P("fsdp")}, "norm": P()}
SHARDED = {(32, 8): P("fsdp", None), (8, 16): P(None, "fsdp"), (16,): P("fsdp")}
SHARDED |= {(2, 8): P("fsdp", None), (1, 8): P(None, "fsdp")}  # scales of blocks of 16

ADAM = optax.adamw(1e-3)
LOSS_SCALED = jmp.optim.loss_scaled(ADAM, jmp.DynamicLossScale())
OPTIMIZERS = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), ADAM, optax.ema(0.9)),
    "MultiSteps": optax.MultiSteps(ADAM, 4).gradient_transformation(),
    "partition": optax.partition(
        {"table": optax.lion(1e-3), "rest": ADAM}, lambda params: dict.fromkeys(params, "rest") | {"embed": "table"}
    ),
    "masked": optax.masked(ADAM, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    "loss_scaled": LOSS_SCALED,
    "split": jmp.optim.loss_scaled(jmp.optim.master_weights(ADAM, mode="split"), jmp.DynamicLossScale()),
    "kahan": jmp.optim.kahan(ADAM),
    "stochastic_rounding": jmp.optim.stochastic_rounding(ADAM, jax.random.key(0)),
    "cast_state": jmp.optim.skip_nonfinite(jmp.optim.cast_state(ADAM, mu_dtype="bfloat16")),
    "quantize_state": jmp.optim.loss_scaled(jmp.optim.quantize_state(ADAM, 8, 16, 100, ".*"), jmp.NoOpLossScale()),
    "all of them": jmp.optim.loss_scaled(
        optax.MultiSteps(jmp.optim.kahan(optax.inject_hyperparams(optax.adamw)(1e-3)), 2).gradient_transformation(),
        jmp.DynamicLossScale(),
    ),
}


def mesh():
    return make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arrays_of_the_state_lie_where_their_parameters_do(name):
    """No two parameters here have one shape, and none that of anything else: the shape alone says what is right."""
    tx = OPTIMIZERS[name]
    state = jax.eval_shape(tx.init, HALF)
    specs = jmp.sharding.state_shardings(tx, HALF, SPECS)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    wrong = [
        (jax.tree_util.keystr(path), spec)
        for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(specs), strict=True)
        if spec != SHARDED.get(leaf.shape, P())
    ]
    assert wrong == []
    assert any(spec != P() for spec in jax.tree.leaves(specs))


@pytest.mark.slow
def test_a_state_is_made_in_place_and_stays_there():
    place = jax.tree.map(lambda spec: NamedSharding(mesh(), spec), SPECS)
    params = jax.tree.map(lambda p, s: jax.device_put(jnp.ones(p.shape, p.dtype), s), HALF, place)
    tx = OPTIMIZERS["split"]
    expected = jmp.sharding.state_shardings(tx, params, place)
    state = jax.jit(tx.init, out_shardings=expected)(params)

    step = jax.jit(lambda grads, state, params: jmp.optim.step(tx, grads, state, params), donate_argnums=(1, 2))
    traced = step.trace(params, state, params)
    after = traced.lower().compile().output_shardings
    differ = lambda array, want, got: not got.is_equivalent_to(want, array.ndim)
    moved = jax.tree.map(differ, (params, state), (place, expected), after)
    assert not any(jax.tree.leaves(moved))


def test_the_longest_end_of_a_path_decides():
    params = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32), "block": {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}}
    specs = {"w": P("data", None), "block": {"w": P(None, "fsdp")}}
    assert jmp.sharding.state_shardings(ADAM, params, specs)[0].mu == specs
    assert jmp.sharding.state_shardings(ADAM, [params, params], [specs, specs])[0].nu == [specs, specs]


def test_factored_moments_are_replicated():
    params = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32), "b": jax.ShapeDtypeStruct((128,), jnp.float32)}
    state = jmp.sharding.state_shardings(optax.adafactor(1e-3, momentum=0.9), params, {"w": P("fsdp"), "b": P("fsdp")})
    shapes = jax.eval_shape(optax.adafactor(1e-3, momentum=0.9).init, params)
    found = {(x.shape, spec) for x, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True)}
    assert found == {((), P()), ((1,), P()), ((256,), P()), ((128,), P()), ((128,), P("fsdp")), ((256, 128), P("fsdp"))}


def test_scales_of_blocks_lie_as_their_parameters_do_where_whole_blocks_fit():
    params = {"w": jax.ShapeDtypeStruct((128, 64), jnp.float32), "u": jax.ShapeDtypeStruct((96, 64), jnp.float32)}
    tx = jmp.optim.loss_scaled(jmp.optim.quantize_state(ADAM), jmp.DynamicLossScale())
    mesh = make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("fsdp", None))
    state = jmp.sharding.state_shardings(tx, params, rows).inner_state
    assert state.inner_state[0].mu == {"w": rows, "u": rows}
    assert state.scales == ({"w": rows, "u": NamedSharding(mesh, P())},) * 2  # 3 blocks do not fit on 4 devices
    assert jmp.sharding.state_shardings(tx, params, P("fsdp")).inner_state.scales[1] == {"w": P("fsdp"), "u": P("fsdp")}
    small = {"scales": jax.ShapeDtypeStruct((8, 4), jnp.float32), **params}  # not in blocks: its scale is a one
    assert jmp.sharding.state_shardings(tx, small, P("fsdp")).inner_state.scales[0]["scales"] == P()


def test_nnx_parameters_and_shardings_of_nnx_fit():
    model = nnx.eval_shape(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    place = jax.tree.map(lambda p: NamedSharding(mesh(), P("fsdp") if p.ndim > 1 else P()), params)
    state = jmp.sharding.state_shardings(LOSS_SCALED, params, place)
    assert state.inner_state[0].mu.kernel.get_value().spec == P("fsdp")
    assert state.loss_scale.loss_scale == NamedSharding(mesh(), P())


def test_float8_state_is_not_in_the_state():
    params = {"w": jnp.ones((8, 4)), "float8": jmp.quant.float8_state("float8")}
    specs = jax.tree.map(lambda p: P("fsdp") if p.ndim > 1 else P(), params)
    state = jmp.sharding.state_shardings(LOSS_SCALED, params, specs)
    assert len(jax.tree.leaves(state.inner_state[0].mu)) == 1


def test_one_spec_stands_for_all_below_its_place():
    params = {"a": {"w": HALF["embed"]}, "b": HALF["embed"]}
    specs = {"a": P("fsdp"), "b": P()}
    assert jmp.sharding.state_shardings(ADAM, params, specs)[0].mu == {"a": {"w": P("fsdp")}, "b": P()}
    assert jmp.sharding.state_shardings(ADAM, params, P("fsdp"))[0].mu["a"] == {"w": P("fsdp")}


def test_shardings_of_another_structure_are_an_error():
    text = r"shardings does not fit the parameters: it has none for \['norm'\], and has \['nrom'\] beside it\. Pass one"
    with pytest.raises(ValueError, match=text):
        jmp.sharding.state_shardings(ADAM, HALF, {**{k: v for k, v in SPECS.items() if k != "norm"}, "nrom": P()})
    text = r"shardings\['norm'\] must be a PartitionSpec or a NamedSharding, got 'fsdp'\. For example: jax\.P\('fsdp'"
    with pytest.raises(TypeError, match=text):
        jmp.sharding.state_shardings(ADAM, HALF, SPECS | {"norm": "fsdp"})
    text = r"tx must be an optax transformation, got 3\. For example: optax\.adamw\(1e-3\)"
    with pytest.raises(TypeError, match=text):
        jmp.sharding.state_shardings(3, HALF, SPECS)
