"""What `convert_state` does to each part of a state, one part at a time, and what it says where it cannot."""

import dataclasses
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from saved_states import SAVERS, assert_same, save_with_msgpack, save_with_orbax

import jmp_policy as jmp
from jmp_policy.optim import loss_scaled, master_weights

W = jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64)


def test_dynamic_scale_stays_within_the_bounds_of_the_target_and_moves_as_the_target_says():
    target = jmp.DynamicLossScale(2.0, period=7, max_loss_scale=8.0)
    new = jmp.convert_state({"scale": jmp.DynamicLossScale(1024.0, counter=3)}, {"scale": target})["scale"]
    assert (float(new.loss_scale), int(new.counter), new.period) == (8.0, 3, 7)
    low = jmp.convert_state(jmp.DynamicLossScale(2.0), jmp.DynamicLossScale(16.0, min_loss_scale=4.0))
    assert float(low.loss_scale) == 4.0
    begun = jmp.convert_state(jmp.DynamicLossScale(64.0), jmp.DynamicLossScale(8.0, hysteresis=3))
    assert (float(begun.loss_scale), int(begun.credits)) == (64.0, 2)  # credits as the target's where none were saved


@pytest.mark.parametrize(
    ("scale", "saver"), [(np.nan, "structure"), (0.0, "msgpack"), (-8.0, "structure"), (np.inf, "msgpack")]
)
def test_a_saved_loss_scale_that_cannot_be_one_is_refused(scale, saver):
    target = {"opt": loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0)).init({"w": W})}
    bad = jax.tree.map(lambda x: jnp.full_like(x, scale) if x.dtype == jnp.float32 else x, target["opt"])
    message = rf"\n  opt/loss_scale/loss_scale was saved as {scale}, but a scale is a positive finite number"
    with pytest.raises(ValueError, match=message):
        jmp.convert_state(SAVERS[saver]({"opt": bad}), target)
    kept = jmp.convert_state(SAVERS[saver]({"opt": bad}), target, ignore="opt/loss_scale")
    assert float(kept["opt"].loss_scale.loss_scale) == 4.0


def test_abstract_target_gives_arrays_and_a_scale_that_was_not_saved_begins_at_its_usual_value():
    params = {"w": W[:2]}
    make = lambda: loss_scaled(optax.adam(1.0), jmp.DynamicLossScale(4.0, hysteresis=3)).init(params)
    new = jmp.convert_state(optax.adam(1.0).init(params), jax.eval_shape(make))
    assert (float(new.loss_scale.loss_scale), int(new.loss_scale.credits)) == (2.0**15, 2)
    assert bool(new.grads_finite)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(new))


def test_masters_go_with_their_parameters_where_the_optimizer_begins_anew():
    wide, tx = {"w": W}, master_weights(optax.adam(1.0))
    params = jmp.cast_floating(wide, "bfloat16")
    saved = {"params": wide, "opt_state": optax.sgd(1.0, momentum=0.5).init(wide)}
    target = {"params": jax.tree.map(jnp.zeros_like, params), "opt_state": tx.init(params)}
    new = jmp.convert_state(saved, target, ignore="opt_state")
    assert_same(new["opt_state"].master, wide)
    assert_same(new["params"], params)


def test_average_of_half_parameters_is_told_from_them_by_the_name_params():
    wide, tx = {"w": W}, master_weights(optax.sgd(1.0))
    params = jmp.cast_floating(wide, "bfloat16")
    opt_state = jmp.optim.with_master_params(tx.init(params), params, wide)[1]
    average = jax.tree.map(jnp.zeros_like, params)
    saved = {"average": average, "params": params, "opt_state": opt_state}
    new = jmp.convert_state(saved, {"average": wide, "params": wide, "opt_state": optax.sgd(1.0).init(wide)})
    assert_same(new["params"], wide)
    assert not jnp.any(new["average"]["w"])
    with pytest.raises(ValueError, match=r"^The memory at '2/master' may belong to the parameters at '0', '1'\. Name "):
        jmp.convert_state((average, params, opt_state), (average, params, opt_state))


def make_half_state(wide):
    params, tx = jmp.cast_floating(wide, "bfloat16"), master_weights(optax.sgd(1.0))
    return {"params": params, "opt_state": jmp.optim.with_master_params(tx.init(params), params, wide)[1]}


def test_params_beside_the_optimizer_are_its_own_where_others_have_that_name_too():
    wide = {"params": {"w": W}}  # the variables of a linen module
    with_average = {"average": wide, "params": wide, "opt_state": optax.sgd(1.0).init(wide)}
    saved = make_half_state(wide) | {"average": jmp.cast_floating(wide, "bfloat16")}
    assert_same(jmp.convert_state(saved, with_average)["params"], wide)
    pair = {"generator": {"w": W}, "critic": {"w": W + 1}}
    new = jmp.convert_state(
        {name: {"params": params} for name, params in pair.items()},
        {name: make_half_state({"w": jnp.zeros_like(W)}) for name in pair},
    )
    assert_same({name: state["opt_state"].master for name, state in new.items()}, pair)


@pytest.mark.parametrize("name", ["master", "remainder", "compensation"])
def test_module_that_is_called_like_a_memory_has_to_be_in_both(name):
    model = {"params": {name: {"w": W}}}
    with pytest.raises(ValueError, match=rf"\n  params/{name}/w is not in the checkpoint\n"):
        jmp.convert_state({}, model)
    with pytest.raises(ValueError, match=rf"\n  params/{name}/w is in the checkpoint, but not in the target\n"):
        jmp.convert_state(model, {})


@pytest.mark.parametrize(
    ("kind", "dtype"), [("int8", "bfloat16"), pytest.param("mxfp8", "float32", marks=pytest.mark.slow)]
)
def test_quantized_target_has_the_numbers_of_quantize(kind, dtype):
    variables, policy = {"params": {"dense": {"kernel": W, "bias": W[0]}}}, f"{kind}_from_{dtype}"
    expected = jmp.quant.quantize(jmp.cast_floating(variables, dtype), policy)
    target = jmp.quant.quantize(jax.tree.map(lambda x: jnp.ones_like(x, dtype), variables), policy)
    assert_same(jmp.convert_state(variables, target), expected)
    assert_same(jmp.convert_state(variables, jax.eval_shape(lambda: target)), expected)


@pytest.mark.parametrize(
    ("kind", "saver"),
    [
        ("int8", "structure"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mxfp4/2", "msgpack"), ("nvfp4", "structure"))),
    ],
)
def test_a_saved_weight_whose_scale_is_not_finite_is_refused(kind, saver):
    weight = jmp.quant.quantize({"dense": {"kernel": W}}, f"{kind}_from_float32")
    kernel = weight["dense"]["kernel"]
    bad = {"dense": {"kernel": dataclasses.replace(kernel, scale=jnp.full_like(kernel.scale, jnp.nan))}}
    for target in (weight, {"dense": {"kernel": W}}):
        with pytest.raises(ValueError, match=r"\n  dense/kernel was saved with a scale of nan, which a weight"):
            jmp.convert_state(SAVERS[saver](bad), target)


@pytest.mark.parametrize(
    ("kind", "saver", "shape"),
    [
        ("int4/2", "orbax", (64, 64)),
        pytest.param("int8", "msgpack", (64, 4, 16), marks=pytest.mark.slow),
        pytest.param("int4/-1", "msgpack", (64, 64), marks=pytest.mark.slow),
        *(pytest.param(kind, "orbax", (64, 4, 16), marks=pytest.mark.slow) for kind in ("mxfp8", "mxfp4/2", "nvfp4/2")),
        ("e4m3/16", "orbax", (64, 4, 16)),
        ("nf4/8", "msgpack", (64, 4, 16)),
        ("nf4/24", "msgpack", (64, 4, 16)),
        ("int4/23", "msgpack", (64, 64)),
        ("mxfp4/48", "msgpack", (64, 64)),
        *(pytest.param(f"e4m3/{n}", "msgpack", (64, 64), marks=pytest.mark.slow) for n in (-1, 64)),
    ],
)
def test_saved_numbers_stay_or_become_the_floats_that_they_stand_for(kind, saver, shape):
    """Those of several channels are read in their layout."""
    make = lambda w: {"q": {"kernel": w.reshape(shape), "bias": jnp.ones(shape[1:])}}
    weight = jmp.quant.quantize(make(W), f"{kind}_from_float32")
    raw, ones = SAVERS[saver](weight), make(jnp.ones_like(W))
    assert_same(jmp.convert_state(raw, jmp.quant.quantize(ones, f"{kind}_from_float32")), weight)
    assert_same(jmp.convert_state(raw, ones)["q"]["kernel"], weight["q"]["kernel"].dequantize())


def float8_variables(length):
    state = jmp.quant.float8_state(f"float8(amax_history_length={length})")
    number = iter(range(1, 100))
    return {"w": W, "state": jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype) + next(number), state)}


def test_float8_state_begins_anew_or_is_dropped():
    variables = float8_variables(4)
    fresh = {"w": W + 1, "state": jmp.quant.float8_state("float8(amax_history_length=4)")}
    assert_same(jmp.convert_state({"w": W}, fresh), fresh | {"w": W})
    assert_same(jmp.convert_state({"w": W}, jax.eval_shape(lambda: fresh)), fresh | {"w": W})
    assert_same(jmp.convert_state(variables, {"w": W + 1}), {"w": W})


def test_a_saved_float8_scale_of_zero_is_refused():
    saved = float8_variables(4)
    bad = saved | {"state": saved["state"] | {"input_scale": jnp.zeros_like(saved["state"]["input_scale"])}}
    with pytest.raises(ValueError, match=r"\n  state/input_scale was saved as 0.0, but a scale is a positive finite"):
        jmp.convert_state(bad, saved)


@pytest.mark.slow
def test_float8_history_keeps_the_newest():
    saved, short, long = (float8_variables(n) for n in (4, 2, 6))
    history = saved["state"]["input_amax_history"]  # newest, oldest, ..., second newest
    kept = jmp.convert_state(saved, short)["state"]["input_amax_history"]
    assert kept.tolist() == [history[0], history[3]]
    kept = jmp.convert_state(saved, long)["state"]["input_amax_history"]
    assert kept.tolist() == [history[0], 0, 0, *history[1:].tolist()]
    assert_same(jmp.convert_state(saved, float8_variables(4)), saved)


def test_arrays_take_dtype_type_and_place_of_the_target():
    mesh = jax.make_mesh((1,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    target = {
        "half": jax.ShapeDtypeStruct((64,), "bfloat16", sharding=sharding),
        "numpy": np.zeros(64, np.float16),
        "count": 0,
        "rate": 0.0,
        "flag": True,
    }
    saved = {"half": W[0], "numpy": W[0], "count": jnp.int32(7), "rate": np.float32(0.5), "flag": np.array(False)}
    new = jmp.convert_state(saved, target)
    assert new["half"].sharding == sharding
    assert_same(new["half"], W[0].astype("bfloat16"))
    assert isinstance(new["numpy"], np.ndarray)
    assert (new["count"], new["rate"], new["flag"]) == (7, 0.5, False)
    assert (type(new["count"]), type(new["rate"]), type(new["flag"])) == (int, float, bool)


def test_random_keys_come_back_as_keys_and_as_their_data():
    key, data = jax.random.key(3), jax.random.key_data(jax.random.key(3))
    for saved in (key, data, np.asarray(data)):
        assert_same(jax.random.key_data(jmp.convert_state({"k": saved}, {"k": jax.random.key(0)})["k"]), data)
        assert_same(jmp.convert_state({"k": saved}, {"k": jnp.zeros_like(data)})["k"], data)
    abstract = jax.eval_shape(lambda: jax.random.key(0))
    assert jmp.convert_state(data, abstract).dtype == key.dtype


def test_shapes_of_arrays_on_an_explicit_mesh_leave_the_place_open_and_what_needs_no_change_is_not_copied():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    placed = jax.device_put({"w": W}, NamedSharding(mesh, PartitionSpec("x")))
    assert_same(jmp.convert_state({"w": np.asarray(W)}, jax.eval_shape(lambda: placed)), {"w": W})
    assert jmp.convert_state({"w": W}, {"w": jnp.ones_like(W)})["w"] is W


def test_all_that_does_not_fit_is_listed_with_what_to_write():
    saved = {"params": {"head": W, "body": W, "old": W}, "opt_state": optax.adam(1.0).init({"w": W[0]})}
    target = {"params": {"heads": W, "body": W[:3]}, "opt_state": optax.sgd(1.0, momentum=0.9).init({"w": W[0]})}
    with pytest.raises(ValueError, match=r"^The checkpoint does not fit the target:\n") as error:
        jmp.convert_state(saved, target)
    assert str(error.value).splitlines()[1:] == [
        "  opt_state/0/count is in the checkpoint, but not in the target",
        "  opt_state/0/mu/w is in the checkpoint, but not in the target",
        "  opt_state/0/nu/w is in the checkpoint, but not in the target",
        "  opt_state/0/trace/w is not in the checkpoint; the nearest there is opt_state/0/nu/w",
        "  params/body was saved as float32[64, 64], the target has float32[3, 64]",
        "  params/head is in the checkpoint, but not in the target",
        "  params/heads is not in the checkpoint; the nearest there is params/head",
        "  params/old is in the checkpoint, but not in the target",
        "Make the target like the state of the saved run, except for the policy. Or keep the target's values for these "
        "paths: convert_state(saved, target, ignore=['opt_state', 'params']).",
    ]


class Pair(NamedTuple):
    one: object
    other: object


def test_ignored_paths_keep_what_the_target_has():
    saved, target = Pair(W, {"a": W, "b": W}), Pair(W + 1, {"a": W + 1, "c": W + 1})
    new = jmp.convert_state(saved, target, ignore=["other/[bc]"])
    assert new.one is W
    assert new.other["a"] is W
    assert new.other["c"] is target.other["c"]
    assert jmp.convert_state(save_with_orbax(saved), target, ignore="other").other["a"] is target.other["a"]


INT8, INT4, MXFP4 = jax.jit(
    lambda: [jmp.quant.quantize({"kernel": W}, f"{kind}_from_float32") for kind in ("int8", "int4/32", "mxfp4")]
)()
RAW = save_with_msgpack
BEGIN_ANEW = {"head": {"w": W, "b": W[0]}, "body": W}


@pytest.mark.parametrize(
    ("saved", "target", "message"),
    [
        ({"x": jnp.int32(1)}, {"x": jnp.float32(1)}, r"\n  x was saved as int32\[\], the target has float32\[\]\n"),
        ({"x": "text"}, {"x": 1}, r"\n  x was saved as 'text', the target has 1\n"),
        ({"x": W}, {"x": 1}, r"\n  x was saved as float32\[64, 64\], the target has 1\n"),
        ({"x": W}, {"x": jax.random.key(0)}, r"\n  x was saved as float32\[64, 64\], the target has key<fry>\[\]\n"),
        (INT8, {"kernel": 1}, r"\n  kernel was saved as float32\[64, 64\], the target has 1\n"),
        (RAW(INT8), {"kernel": 1}, r"\n  kernel was saved as a quantized weight, the target has 1\n"),
        (
            RAW(INT8),
            {"kernel": W[:3]},
            r"\n  kernel was saved as QuantizedArray\(int8.*, the target has float32\[3, 64\]",
        ),
        (
            RAW(INT4),
            {"kernel": W[:3]},
            r"\n  kernel was saved in 2 blocks of 32, which do not fit the target's \(3, 64\)\n",
        ),
        (
            RAW(MXFP4),
            {"kernel": W[:6]},
            r"\n  kernel was saved in 2 blocks of 32, which do not fit the target's \(6, 64\)",
        ),
        ({"kernel": W[:3]}, INT8, r"\n  kernel was saved as float32\[3, 64\], the target has QuantizedArray\(int8, "),
        *(
            (saved, target, r"\n  kernel was saved as .*(Quan|scale).*, the target has .*(int|fp)")
            for saved, target in ((INT8, INT4), (RAW(MXFP4), INT8), (RAW(INT4), MXFP4))
        ),
        # only what does not fit is to begin anew, and an optimizer that differs in much as a whole
        (
            BEGIN_ANEW,
            BEGIN_ANEW | {"head": {"w": W[:, :3], "b": W[0, :3]}},
            r"convert_state\(saved, target, ignore=\['head'\]\)\.$",
        ),
        (
            *({"opt_state": {"count": W} | {f"{name}{i}": W for i in range(7)}} for name in ("mu", "nu")),
            r"ignore=\['opt_state'\]\)\.$",
        ),
    ],
)
def test_value_of_another_kind_does_not_fit(saved, target, message):
    with pytest.raises(ValueError, match=message):
        jmp.convert_state(saved, target)


@pytest.mark.parametrize("saver", ["structure", pytest.param("msgpack", marks=pytest.mark.slow)])
def test_a_saved_range_goes_with_its_weight_and_the_target_has_one_otherwise(saver):
    plain = jmp.quant.quantize({"kernel": W}, "int8_from_float32")
    calibrated = {"kernel": dataclasses.replace(plain["kernel"], input_clip=jnp.full((), 3.0))}
    other = {"kernel": dataclasses.replace(plain["kernel"], input_clip=jnp.full((), 5.0))}
    for saved, target, clip in ((calibrated, plain, 3.0), (calibrated, other, 3.0), (plain, other, 5.0)):
        new = jmp.convert_state(SAVERS[saver](saved), target)["kernel"]
        assert new.input_clip == clip
        assert (new.values == plain["kernel"].values).all()
    assert jmp.convert_state(SAVERS[saver](plain), plain)["kernel"].input_clip is None
    static = jmp.quant.quantize({"kernel": W}, "int8(act_scale=static)_from_float32", input_clips={"": 5.0})
    for saved in ({"kernel": W}, SAVERS[saver](plain)):
        assert jmp.convert_state(saved, static)["kernel"].input_clip == 5.0


def test_abstract_target_has_no_value_for_what_begins_anew():
    target = {"x": jax.ShapeDtypeStruct((), "float32")}
    with pytest.raises(ValueError, match=r"\n  x is ignored, and an abstract target has no value for it\n"):
        jmp.convert_state({"x": W[0, 0]}, target, ignore="x")
    weight = dataclasses.replace(
        jmp.quant.quantize({"kernel": W}, "int8_from_float32")["kernel"], input_clip=jnp.ones(1)
    )
    with pytest.raises(ValueError, match=r"\n  kernel was saved without the range of its inputs, and an abstract targ"):
        jmp.convert_state({"kernel": W}, jax.eval_shape(lambda: {"kernel": weight}))
    tx = jmp.optim.stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    abstract = jax.eval_shape(lambda: tx.init({"w": W}))
    with pytest.raises(
        ValueError, match=r"\n  key is not in the checkpoint, and an abstract target has no value for it"
    ):
        jmp.convert_state({}, abstract)


CONVERT = r"For example: convert_state\("


@pytest.mark.parametrize(
    ("saved", "ignore", "error", "message"),
    [
        (None, (), TypeError, r"^convert_state takes a restored state, got None\. " + CONVERT + "check"),
        ("run/3", (), TypeError, rf"got 'run/3'\. {CONVERT}checkpointer\.restore\(path\), target\)\.$"),
        (pathlib.PurePosixPath("run/3"), (), TypeError, r"got PurePosixPath\('run/3'\)\. "),
        (b"msgpack", (), TypeError, rf"{CONVERT}flax\.serialization\.msgpack_restore\(data\), target\)\.$"),
        ({"w": W}, "ww", ValueError, r"^'ww' of ignore matches no path\. Did you mean 'w'\?$"),
        ({"w": W}, ["("], ValueError, r"^'\(' of ignore is not a valid pattern: .*example: ignore='opt_state'\.$"),
    ],
)
def test_what_is_no_state_or_pattern_is_refused(saved, ignore, error, message):
    with pytest.raises(error, match=message):
        jmp.convert_state(saved, {"w": W}, ignore=ignore)
