"""`find_origin(...).verdict` names what made a step skip: planted faults, ten or more of each kind."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from meshes import make_mesh
from optax import contrib

import jmp_policy as jmp
from jmp_policy import optim

POLICY = jmp.get_policy("params=float32,compute=float16,output=float32")
TX = optim.loss_scaled(optax.adam(1e-3), jmp.DynamicLossScale(2.0**4))
WIDTH, ROWS = 8, 8


def _draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _batch(seed: int = 0) -> dict[str, np.ndarray]:
    x, y = _draw(seed, ROWS, WIDTH), _draw(seed + 100, ROWS, WIDTH)
    return {"x": x, "y": y, "gain": np.float32(1), "t": np.float32(1)}


def _loss(out: Any, batch: Any) -> Any:
    with jax.named_scope("guard"):
        guard = jnp.log(batch["t"])
    return jnp.mean(jnp.square((out.astype(jnp.float32) - batch["y"]) * batch["gain"])) + guard


def _layer(w: Any, h: Any) -> Any:
    return h.astype(jnp.float16) @ w.astype(jnp.float16)


def _plain(params: Any, x: Any) -> Any:
    with jax.named_scope("first"):
        h = jnp.tanh(_layer(params["first"]["kernel"], x))
    with jax.named_scope("second"):
        return _layer(params["second"]["kernel"], h)


def _scanned(params: Any, x: Any) -> Any:
    def run(h, w):
        with jax.named_scope("first"):
            return jnp.tanh(_layer(w, h)).astype(jnp.float32), None

    h, _ = jax.lax.scan(run, x, jnp.stack([params["first"]["kernel"]] * 2))
    with jax.named_scope("second"):
        return _layer(params["second"]["kernel"], h)


def _sharded_loss(params: Any, batch: Any) -> Any:
    mesh, split = make_mesh((2,), ("data",)), PartitionSpec("data")
    specs = {"x": split, "y": split, "gain": PartitionSpec(), "t": PartitionSpec()}
    put = lambda name: NamedSharding(mesh, specs[name])
    batch = {name: jax.device_put(leaf, put(name)) for name, leaf in batch.items()}
    run = lambda params, batch: jax.lax.pmean(_loss(_plain(params, batch["x"]), batch), "data")
    return jax.shard_map(run, mesh=mesh, in_specs=(PartitionSpec(), specs), out_specs=PartitionSpec())(params, batch)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(nn.Dense(WIDTH, use_bias=False, name="first")(x))
        return nn.Dense(WIDTH, use_bias=False, name="second")(h)


class Nnx(nnx.Module):
    def __init__(self):
        linear = functools.partial(nnx.Linear, WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
        self.first, self.second = linear(), linear()

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@dataclasses.dataclass
class Family:
    """A loss in one API, with its parameters and the path of the second layer's weights."""

    loss_fn: Callable[..., Any]
    make: Callable[[], Any]
    with_map: Callable[[Any], Callable[..., Any]] | None = None
    find: Any = None


def _arrays() -> Any:
    return {name: {"kernel": jnp.asarray(_draw(i, WIDTH, WIDTH)) / 3} for i, name in enumerate(("first", "second"))}


def _linen_loss(policy: Any) -> Callable[..., Any]:
    return lambda params, batch: _loss(jmp.with_policy(Linen(), policy).apply({"params": params}, batch["x"]), batch)


def _nnx_loss(model: Any, batch: Any) -> Any:
    return _loss(model(batch["x"]), batch)


FAMILIES = {
    "plain": Family(lambda params, batch: _loss(_plain(params, batch["x"]), batch), _arrays),
    "scan": Family(lambda params, batch: _loss(_scanned(params, batch["x"]), batch), _arrays),
    "remat": Family(jax.checkpoint(lambda params, batch: _loss(_plain(params, batch["x"]), batch)), _arrays),
    "shard_map": Family(_sharded_loss, _arrays),
    "linen": Family(_linen_loss(POLICY), _arrays, _linen_loss),
    "nnx": Family(_nnx_loss, lambda: jmp.with_policy(Nnx(), POLICY)),
}


def _change_second(params: Any, change: Callable[[jax.Array], jax.Array]) -> Any:
    """Changes the weights of the second layer."""
    if isinstance(params, nnx.Module):
        params.second.kernel[...] = change(params.second.kernel[...])
        return params
    return params | {"second": {"kernel": change(params["second"]["kernel"])}}


def _trained(params: Any) -> Any:
    return nnx.state(params, nnx.Param) if isinstance(params, nnx.Module) else params


def _judge(family: Family, params: Any, state: Any, batch: Any, **options: Any) -> Any:
    family.find = family.find or optim.find_origin(family.loss_fn, TX)
    found = family.find.verdict(params, state, batch, **options)
    assert found.to_dict() | {"kind": found.kind, "text": str(found)} == found.to_dict()
    return found


def _with_scale(state: Any, scale: float) -> Any:
    return state._replace(loss_scale=jmp.DynamicLossScale(scale))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_planted_fault_of_each_kind_is_found(name):
    """Forty-eight of the faults: data and state twice, and each other kind, in six APIs."""
    family = FAMILIES[name]
    make = lambda: (params := family.make(), TX.init(_trained(params)))
    for bad, row in ((np.nan, 3), (-np.inf, 5)):
        batch = _batch()
        batch["x"][row, 1] = bad
        found = _judge(family, *make(), batch)
        assert (found.kind, found.place, found.rows) == ("data", "batch['x']", (row,)), str(found)
    params, state = make()
    found = _judge(family, params, _with_scale(state, 2.0**24), _batch())
    assert (found.kind, found.place) == ("scale", "")
    finite = lambda scale: _judge(family, params, _with_scale(state, scale), _batch()).kind
    assert (finite(found.loss_scale), finite(2 * found.loss_scale)) == ("not reproduced", "scale")
    found = _judge(family, *make(), _batch() | {"t": np.float32(0)})
    assert (found.kind, found.place) == ("model", "guard/log"), str(found)
    assert "test_verdict.py" in found.source
    params, state = make()
    params = _change_second(params, lambda w: w.at[1, 2].set(jnp.nan))
    found = _judge(family, params, state, _batch())
    assert (found.kind, found.place) == ("state", "params/second/kernel"), str(found)
    assert "1 of 64 elements of params/second/kernel are not finite" in str(found)
    params, state = make()
    flip = lambda x: jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) ^ (1 << 30), jnp.float32)
    found = _judge(family, _change_second(params, lambda w: w.at[3, 4].set(flip(w[3, 4]))), state, _batch())
    assert (found.kind, found.place) == ("state", "params/second/kernel"), str(found)
    assert "1 of 64 elements of params/second/kernel are infinite, or more than 10,000 times as large" in str(found)
    found = _judge(family, *make(), _batch(), times=4)
    assert found.kind == "not reproduced"
    assert "The replay of the step is taken: its loss," in str(found)
    _assert_format_is_found(family, *make())


def _assert_format_is_found(family: Family, params: Any, state: Any) -> None:
    params = _change_second(params, lambda w: jnp.full_like(w, 6e4))
    batch = _batch() | {"gain": np.float32(1e-4)}
    found = _judge(family, params, state, batch)
    assert (found.kind, found.place, found.limit) == ("format", "second/dot_general", 65504.0), str(found)
    assert 65504 < found.value < 1e7, str(found)
    assert [rule.key for rule in found.policy_map.rules] == ["second"], str(found)
    has_rules = isinstance(params, nnx.Module) or family.with_map is not None
    text = "PolicyMap({'second': 'float32'}, policy)" if has_rules else "It is finite with 'second' in float32."
    assert text in str(found)
    # the map is right: the model under it is finite
    rules = jmp.PolicyMap({"second": "p=f32,c=f32,o=f32"}, POLICY)
    if isinstance(params, nnx.Module):
        healed = jmp.with_policy(Nnx(), rules)
        nnx.update(healed, nnx.state(params, nnx.Param))
        assert jmp.all_finite(jmp.nnx.value_and_grad(_nnx_loss, loss_scale=state)(healed, batch))
    elif family.with_map is not None:
        assert jmp.all_finite(jmp.value_and_grad(family.with_map(rules), loss_scale=state)(params, batch))


PLAIN = FAMILIES["plain"]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e3, -30.0])
def test_inputs_out_of_the_range_of_watched_batches_are_data(factor):
    find = optim.find_origin(PLAIN.loss_fn, TX)
    for seed in range(3):
        find.watch(_batch(seed) | {"x": jnp.asarray(_batch(seed)["x"])})
    params, batch = _arrays(), _batch()
    batch["x"] *= np.float32(factor)  # all rows, so that no row is out of the range of the others
    batch["y"][4] = 1e38
    found = find.verdict(params, TX.init(params), batch)
    assert (found.kind, found.place, found.rows) == ("data", "batch['y']", (4,)), str(found)
    assert "1e+38" in str(found)


@pytest.mark.slow
def test_token_ids_out_of_the_watched_range_are_data():
    def loss_fn(params, ids):
        return jnp.sum(params.at[ids].get(mode="fill"))

    find = optim.find_origin(loss_fn, TX)
    find.watch(np.array([[0, 9], [3, 4]]))
    params = jnp.ones((10, 4))
    found = find.verdict(params, TX.init(params), np.array([[0, 1], [2, 77]]))
    assert (found.kind, found.place, found.rows) == ("data", "ids", (1,)), str(found)
    assert "outside of 0 to 9, such as 77, in ids (row 1)" in str(found)


@pytest.mark.slow
def test_moments_of_any_optimizer_are_state():
    names = {"adam": "0/mu/second/kernel", "chain": "1/0/nu/second/kernel", "trace": "0/trace/second/kernel"}
    makers = {
        "adam": optax.adam(1e-3),
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        "trace": optax.sgd(1e-3, momentum=0.9),
    }
    for name, inner in makers.items():
        tx, params = optim.loss_scaled(inner, jmp.DynamicLossScale(4.0)), _arrays()
        state = tx.init(params)
        plant = lambda path, leaf, name=name: (
            leaf.at[0, 0].set(jnp.inf)
            if jax.tree_util.keystr(path, simple=True, separator="/") == names[name]
            else leaf
        )
        planted = jax.tree_util.tree_map_with_path(plant, state.inner_state)
        found = optim.find_origin(PLAIN.loss_fn, tx).verdict(params, state._replace(inner_state=planted), _batch())
        assert (found.kind, found.place) == ("state", f"opt_state/{names[name]}"), str(found)
    model = jmp.with_policy(Nnx(), POLICY)
    optimizer = jmp.nnx.Optimizer(model, TX, wrt=nnx.Param)
    mu = optimizer.opt_state.inner_state[0].mu["first"]["kernel"]
    mu[...] = mu[...].at[0, 0].set(jnp.nan)
    found = optim.find_origin(_nnx_loss, TX).verdict(model, optimizer, _batch())
    assert (found.kind, found.place) == ("state", "opt_state/0/mu/first/kernel"), str(found)
    # the best value so far begins infinite, and is no fault
    tx = optim.skip_nonfinite(optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau()))
    found = optim.find_origin(PLAIN.loss_fn, tx).verdict(_arrays(), tx.init(_arrays()), _batch())
    assert found.kind == "not reproduced", str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "expected", "text"),
    [
        (jmp.StaticLossScale(2.0**22), 2.0**17, "It does not change: take policy.loss_scale(), or a smaller Static"),
        (jmp.DynamicLossScale(2.0**22, min_loss_scale=2.0**20), 2.0**17, "The floor is 1.04858e+06: lower it, with"),
        (jmp.DynamicLossScale(2.0**22, hysteresis=2), 2.0**17, "The scale falls by itself"),
        (jmp.DynamicLossScale(3.0 * 2.0**19), 3.0 * 2.0**15, "not finite at 1.57286e+06, and finite at 98304"),
    ],
)
def test_any_loss_scale_is_blamed(scale, expected, text):
    tx = optim.loss_scaled(optax.sgd(1e-3), scale)
    loss_fn = lambda w: jnp.sum(w.astype(jnp.float16).astype(jnp.float32)) / 2.1  # a cotangent of 0.476 times the scale
    found = optim.find_origin(loss_fn, tx).verdict(jnp.ones(3), tx.init(jnp.ones(3)))
    assert (found.kind, found.loss_scale) == ("scale", expected), str(found)
    assert found.loss_scale / 2.1 < 65504 <= 2 * found.loss_scale / 2.1
    assert text in str(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The parameter")
@pytest.mark.parametrize(
    ("inner", "params", "coefficient", "place"),
    [
        (optax.adam(1e-3), jnp.ones(3, jnp.float16), 0.0, "div"),  # eps=1e-8 is zero
        (optax.inject_hyperparams(optax.adam)(1e-3), jnp.ones(3, jnp.bfloat16), 1.0, "div"),  # b2=0.999 is one
        (optax.sgd(1e4), jnp.full(3, 6e4, jnp.float16), -1.0, "add"),  # 60000 + 10000
    ],
)
def test_updates_that_half_precision_loses_are_of_the_format(inner, params, coefficient, place):
    tx = optim.skip_nonfinite(inner, check="updates")
    loss_fn = lambda w: coefficient * jnp.sum(w.astype(jnp.float32))
    state = tx.init(params)
    assert not jax.jit(optim.minimize(loss_fn, tx))(params, state)[1].updates_finite
    found = optim.find_origin(loss_fn, tx).verdict(params, state)
    assert (found.kind, found.place) == ("format", place), str(found)
    assert f"the format of the optimizer: loss and gradients are finite, but its update in {params.dtype}" in str(found)


class _Scanned(nn.Module):
    """A residual stream through two layers of one `nn.scan`."""

    @nn.compact
    def __call__(self, x):
        block = nn.scan(_Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.LayerNorm(name="norm")(block(name="block")(x)[0])


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH, name="down")(x), None


class _Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return _Scanned(name="encoder")(x)


@pytest.mark.slow
def test_of_a_module_in_a_scan_the_text_says_that_a_carry_keeps_its_dtype():
    x = _draw(0, ROWS, WIDTH)
    params = jax.tree.map(lambda w: w * 1e5, _Outer().init(jax.random.key(0), x))

    def loss_fn(params, x, policy=POLICY):
        return jnp.mean(jnp.square(jmp.with_policy(_Outer(), policy).apply(params, x))) * 1e-6

    find, state = optim.find_origin(loss_fn, TX), TX.init(params)
    found = find.verdict(params, state, x)
    advice = " If a scan carries the result, as `nn.scan` does, name the module around the scan"
    text = " ".join(str(found).split())
    assert "'encoder/block/down': 'float32'" in text
    assert advice in text
    assert advice in find(params, state, x).describe()
    with pytest.raises(TypeError, match="carry"):
        loss_fn(params, x, found.policy_map)
    assert np.isfinite(loss_fn(params, x, jmp.PolicyMap({"encoder": "float32"}, POLICY)))


@pytest.mark.filterwarnings("ignore:A policy computes in float16")
@pytest.mark.parametrize(
    ("attach", "text"),
    [
        (jmp.autocast, "It is finite with PolicyMap({'head': 'mixed_float16'}, 'float32')."),
        (jmp.with_policy, "It is finite in float32 with only 'head' in half precision."),  # a function has no rules
    ],
)
def test_the_text_names_the_default_of_a_map_where_only_some_scopes_may_be_in_half_precision(attach, text):
    def model(w, x):
        h = (x @ jnp.ones((3, 3))) * 1e-6  # the input is infinite where it enters, in no scope
        with jax.named_scope("head"):
            return jnp.tanh(h @ w) @ w.T

    model = attach(model, POLICY)
    find = optim.find_origin(lambda w, x: jnp.sum(model(w, x)), tx := optim.skip_nonfinite(optax.sgd(0.1)))
    w, x = jnp.ones((3, 2)), jnp.full((4, 3), 1e6)
    found = find.verdict(w, tx.init(w), x)
    assert found.policy_map.default.compute_dtype == "float32"
    assert text in " ".join(str(found).split())


class ScopedLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        with jax.named_scope("around"):
            x = jax.nn.softmax(nn.Dense(WIDTH, name="first")(x))
        return nn.Dense(WIDTH, name="second")(x)


@pytest.mark.filterwarnings("ignore:A policy computes in float16")
def test_the_keys_of_a_map_for_modules_leave_out_the_named_scopes_around_them():
    params = ScopedLinen().init(jax.random.key(0), x := jnp.ones((2, WIDTH)))
    params["params"]["first"]["kernel"] = jnp.full((WIDTH, WIDTH), 1e5)

    def judge(policy):
        model = jmp.with_policy(ScopedLinen(), policy)
        loss_fn = lambda params, x: jnp.mean(model.apply(params, x))
        find = optim.find_origin(loss_fn, tx := optim.skip_nonfinite(optax.sgd(0.1)))
        return find.verdict(params, tx.init(params), x)

    found = judge(POLICY)
    assert "It is finite with PolicyMap({'first': 'float32'}, policy)." in " ".join(str(found).split())
    rules = {rule.key: rule.policy for rule in found.policy_map.rules}
    assert judge(jmp.PolicyMap(rules, POLICY)).kind == "not reproduced"


@pytest.mark.filterwarnings("ignore:A policy computes in float16")
@pytest.mark.slow
def test_an_epsilon_that_half_precision_loses_is_of_the_format():
    model = jmp.with_policy(lambda w, x: x / (jnp.abs(w * 0) + jnp.asarray(1e-9, w.dtype)), POLICY)
    loss_fn = lambda w, x: jnp.sum(model(w, x)) * 1e-12
    params, x = jnp.ones(3), jnp.ones(3)
    find = optim.find_origin(loss_fn, tx := optim.skip_nonfinite(optax.sgd(0.1)))
    found = find.verdict(params, tx.init(params), x)
    assert (found.kind, found.place, found.policy_map) == ("format", "div", None), str(found)


@pytest.mark.filterwarnings("ignore:A policy computes in float16")
@pytest.mark.slow
def test_a_mask_that_half_precision_makes_infinite_is_measured_in_float32():
    model = jmp.with_policy(lambda w, x: w * x + (1 - x) * (jnp.asarray(-6e4, x.dtype) * 4), POLICY)  # 0 * -inf
    find = optim.find_origin(
        lambda w, x: jnp.sum(jax.nn.sigmoid(model(w, x))), tx := optim.skip_nonfinite(optax.sgd(1))
    )
    found = find.verdict(params := jnp.ones(2), tx.init(params), jnp.float32([1.0, 0.0]))
    assert (found.kind, found.place, found.value) == ("format", "mul", 2.4e5), str(found)


@pytest.mark.slow
def test_a_probability_that_half_precision_rounds_to_zero_is_no_overflow():
    def loss_fn(w, x):
        with jax.named_scope("head"):
            h = x.astype(jnp.float16) * w.astype(jnp.float16)
        return -jnp.sum(jnp.log(jax.nn.softmax(h)).astype(jnp.float32))  # a probability is rounded to zero

    find = optim.find_origin(loss_fn, tx := optim.skip_nonfinite(optax.sgd(0.1)))
    found = find.verdict(params := jnp.ones(2), tx.init(params), jnp.float32([20.0, 0.0]))
    assert "result is 20, within the range of float16: an operand was rounded too far" in str(found)
    assert str(found).endswith("It is finite in float32 with only 'head' in half precision.")


@pytest.mark.slow
def test_a_cast_to_float8_is_of_the_format():
    loss_fn = lambda w, x: jnp.sum((w * x).astype(jnp.float8_e4m3fn).astype(jnp.float32))
    find = optim.find_origin(loss_fn, tx := optim.skip_nonfinite(optax.sgd(0.1)))
    found = find.verdict(params := jnp.ones(2), tx.init(params), jnp.float32([700.0, 1.0]))
    assert (found.kind, found.place, found.limit) == ("format", "convert_element_type", 448.0)
    assert str(found).endswith("float8_e4m3fn ends at 448: scale the values first, or clip them with `jnp.clip`.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "inner", "place"),
    [
        (lambda w, x: jnp.sum(jnp.sqrt(jnp.sum(w * 0))), optax.sgd(0.1), "div"),
        (lambda w, x: jnp.sum(jnp.exp(w * 1e3)), optax.sgd(0.1), "exp"),
        (lambda w, x: jnp.linalg.norm(w - w), optax.sgd(0.1), "div"),
        (lambda w, x: jnp.sum(w * x), optax.sgd(lambda count: jnp.sqrt(count - 1.0)), "sqrt"),
    ],
    ids=["sqrt", "exp", "norm", "schedule"],
)
def test_faults_that_float32_has_too_are_of_the_model(loss_fn, inner, place):
    tx, params = optim.loss_scaled(inner, jmp.DynamicLossScale(2.0), check="updates"), jnp.ones(3)
    found = optim.find_origin(loss_fn, tx).verdict(params, tx.init(params), jnp.ones(3))
    assert found.kind == "model", str(found)
    assert place in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "gradient", "gradient of a model", "a skipped step"])
def test_runs_that_differ_are_not_reproduced(where):
    """A callback stands for a machine that computes something else each time."""
    numbers = itertools.count(1)
    flip = lambda: jax.pure_callback(lambda: np.float32(next(numbers)), jax.ShapeDtypeStruct((), np.float32))

    def loss_fn(params, batch):
        noise = jax.lax.stop_gradient(flip())
        if where == "loss":
            return PLAIN.loss_fn(params, batch) + noise
        h = params["first"]["kernel"] * noise
        bad = jnp.log(batch["t"]) if where == "a skipped step" else 0.0
        return PLAIN.loss_fn(params | {"first": {"kernel": h}}, batch) + jnp.sum(h) + bad

    params = _arrays()
    batch = _batch() | {"t": np.float32(0 if where == "a skipped step" else 1)}
    found = optim.find_origin(loss_fn, TX).verdict(params, TX.init(params), batch)
    assert found.kind == "not reproduced", str(found)
    expected = {"loss": "loss", "a skipped step": "gradients/first/kernel"}.get(where, "gradients/first/kernel")
    assert found.place == expected
    assert "two runs of one program on the same inputs differ in bits of" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "linen", "nnx", "shard_map"])
def test_twenty_clean_replays_agree(name):
    family = FAMILIES[name]
    params = family.make()
    found = _judge(family, params, TX.init(_trained(params)), _batch(1), times=20)
    assert found.kind == "not reproduced"
    assert "differ" not in str(found)


@pytest.mark.slow
def test_a_spike_is_of_the_data_if_they_explain_it():
    tx = optim.loss_scaled(optim.skip_spikes(optax.sgd(1e-3), window=8, warmup=3), jmp.DynamicLossScale(4.0))
    loss_fn = lambda w, x: jnp.mean(jnp.square(x @ w))
    find, step = optim.find_origin(loss_fn, tx), jax.jit(optim.minimize(loss_fn, tx))
    params = jnp.ones(WIDTH)
    state = tx.init(params)
    for seed in range(6):
        find.watch(_draw(seed, ROWS, WIDTH))
        params, state, _ = step(params, state, _draw(seed, ROWS, WIDTH))
    x = _draw(7, ROWS, WIDTH)
    x[2] *= 1e3
    assert not step(params, state, x)[1].step_taken
    found = find.verdict(params, state, x)
    assert (found.kind, found.place, found.rows) == ("data", "x", (2,)), str(found)
    found = find.verdict(100 * params, state, _draw(7, ROWS, WIDTH))
    assert found.kind == "spike"
    assert "gradient norm" in str(found)
    alone = optim.skip_spikes(optax.sgd(1e-3), window=8, warmup=3)
    found = optim.find_origin(loss_fn, alone).verdict(100 * params, state.inner_state, _draw(7, ROWS, WIDTH))
    assert found.kind == "spike"


FLOAT8 = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"input_scale": jnp.ones(1)}}
PLATEAU = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau())


def _float8_loss(params, x):
    return jnp.sum(params["params"]["w"] * x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The parameter")
@pytest.mark.parametrize(
    ("tx", "params", "kind"),
    [
        (optim.skip_nonfinite(optim.skip_spikes(PLATEAU)), FLOAT8, "not reproduced"),
        (optim.skip_nonfinite(optax.sgd(0.1, momentum=0.9)), FLOAT8, "not reproduced"),
        (optim.skip_nonfinite(optim.master_weights(PLATEAU)), {"w": jnp.ones(2, jnp.float16)}, "not reproduced"),
        (optim.skip_nonfinite(optim.kahan(optax.sgd(1e6)), check="updates"), {"w": jnp.ones(2, jnp.float16)}, "format"),
        (optim.skip_nonfinite(optax.sgd(0.1), axis_name="data", check="updates"), {"w": jnp.ones(2)}, "not reproduced"),
        (optax.inject_hyperparams(lambda rate: optim.skip_nonfinite(optim.skip_spikes(optax.sgd(rate))))(rate=0.1),
         {"w": jnp.ones(2)}, "not reproduced"),
        (optim.skip_nonfinite(optax.sgd(0.1)), {"w": jnp.ones(2), "count": jnp.arange(2)}, "not reproduced"),
    ],
    ids=["float8", "float8 momentum", "masters", "kahan", "axis", "injected", "integers"],
)  # fmt: skip
def test_finite_steps_of_any_optimizer_are_judged(tx, params, kind):
    loss_fn = _float8_loss if params is FLOAT8 else lambda params, x: jnp.sum(params["w"].astype(jnp.float32) * x)
    found = optim.find_origin(loss_fn, tx).verdict(params, tx.init(params), jnp.float32([1.0, 2.0]))
    assert found.kind == kind, str(found)


def test_a_step_that_was_taken_is_not_called_skipped():
    find = optim.find_origin(lambda w, x: jnp.mean(w * x), tx := optim.skip_nonfinite(optax.sgd(0.1)))
    find.watch(jnp.float32([1.0, -1.0, 0.5]))
    found = find.verdict(jnp.float32(1.0), tx.init(jnp.float32(1.0)), jnp.float32([1.0, 50.0, 0.5]))
    assert str(found).startswith("The replay of the step is taken: its loss, 17.17,")
    assert "Of its inputs, 1 of 3 elements are outside of -1 to 1, such as 50, in x (row 1)." in str(found)


def test_a_scalar_may_be_the_input_that_is_blamed():
    find = optim.find_origin(lambda w, x: w * x, tx := optim.skip_nonfinite(optax.sgd(0.1)))
    find.watch(jnp.float32(1.0))
    found = find.verdict(jnp.float32(1.0), tx.init(jnp.float32(1.0)), jnp.float32(jnp.inf))
    assert (found.kind, found.place) == ("data", "x"), str(found)


@pytest.mark.slow
def test_a_step_that_just_overflows_is_of_the_scale_though_another_batch_would_not():
    loss_fn = lambda w, x: jnp.sum((w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32))
    tx = optim.loss_scaled(optax.sgd(0.1), jmp.DynamicLossScale(2.0**15))
    find = optim.find_origin(loss_fn, tx)
    find.watch(jnp.float32([1.9, 0.3, 0.25, jnp.nan]))
    find.watch(jnp.full(4, jnp.nan))
    params = jnp.ones(4)
    found = find.verdict(params, tx.init(params), jnp.float32([0.4, 0.3, 0.3, 2.1]))
    assert (found.kind, found.loss_scale) == ("scale", 2.0**14), str(found)
    assert find.ranges["x"] == (0.25, np.float32(1.9))


@pytest.mark.slow
def test_an_infinity_that_is_meant_is_not_the_state():
    def loss_fn(params, x):
        mask = jax.lax.stop_gradient(params["mask"])
        return jnp.sum(jax.nn.softmax(params["w"] * x + mask) * x)

    params = {"w": jnp.ones(3), "mask": jnp.float32([0, 0, -jnp.inf])}
    find = optim.find_origin(loss_fn, tx := optim.skip_nonfinite(optax.sgd(0.1)))
    found = find.verdict(params, tx.init(params), jnp.float32([1, jnp.nan, 2]))
    assert (found.kind, found.place) == ("data", "x"), str(found)
    lost = {"w": jnp.float32([1, jnp.inf, 1]), "mask": jnp.zeros(3)}
    found = find.verdict(lost, tx.init(lost), jnp.ones(3))
    assert (found.kind, found.place) == ("state", "params/w"), str(found)


@pytest.mark.slow
def test_static_arguments_that_are_equal_but_not_the_same_are_told_apart():
    loss_fn = lambda w, flag: jnp.sum(jnp.log(w - 1) if flag is True else w)
    find = optim.find_origin(loss_fn, tx := optim.skip_nonfinite(optax.sgd(0.1)))
    params = jnp.ones(2)
    kinds = [find.verdict(params, tx.init(params), flag).kind for flag in (True, 1)]
    assert kinds == ["model", "not reproduced"]


@pytest.mark.parametrize(
    ("error", "text", "add"),
    [
        (
            TypeError,
            r"takes a Verdict, got None\. For example: log\.add\(find\.verdict",
            lambda log, verdict: log.add(None),
        ),
        (ValueError, "stores 'checksum' itself", lambda log, verdict: log.add(verdict, checksum=1)),
        (ValueError, "stores 'kind' itself", lambda log, verdict: log.add(verdict, kind="data")),
        (TypeError, "stores JSON, got ", lambda log, verdict: log.add(verdict, batch=np.ones(3))),
    ],
)
def test_a_log_stores_json(tmp_path, error, text, add):
    log, verdict = optim.SkipLog(tmp_path / "skips.jsonl"), optim.Verdict("model", 1, "the model")
    with pytest.raises(error, match=text):
        add(log, verdict)
    log.add(verdict, batch=np.int64(3), loss=jnp.float32(jnp.nan), rate=jnp.float32(0.5))
    (entry,) = log.read()
    assert (entry["batch"], entry["loss"], entry["rate"]) == (3, None, 0.5)


def test_a_verdict_needs_a_run():
    find = optim.find_origin(PLAIN.loss_fn, TX)
    with pytest.raises(ValueError, match=r"times must be an integer of at least 1, got 0\. For example: find\.verdict"):
        find.verdict({}, TX.init({}), {}, times=0)


@pytest.mark.slow
def test_the_error_of_a_run_that_is_stuck_ends_with_the_verdict():
    loss_fn, tx, params = lambda w: jnp.sum(jnp.log(w)), optim.skip_nonfinite(optax.sgd(0.1)), jnp.zeros(2)
    find, state, asked = optim.find_origin(loss_fn, tx), tx.init(params), []

    def verdict():
        asked.append(True)
        return find.verdict(params, state)

    optim.raise_if_stuck(state, verdict=verdict)
    assert asked == []
    stuck = state._replace(consecutive_skips=jnp.int32(12))
    with pytest.raises(FloatingPointError, match=r"^Training is stuck: the last 12.* skipped because of the model: "):
        optim.raise_if_stuck(stuck, verdict=verdict)


def test_a_run_that_is_restored_drops_the_entries_of_later_steps(tmp_path):
    log = optim.SkipLog(tmp_path / "skips.jsonl")
    for step in (3, 7, None, 9):
        log.add(optim.Verdict("model", step, "the model"), batch=step)
    log.add(optim.Verdict("model", None, "the model"), batch="own", step=8)
    log.truncate(7)
    assert [entry["batch"] for entry in optim.SkipLog(tmp_path / "skips.jsonl").read()] == [3, 7, None]
    assert [path.name for path in tmp_path.iterdir()] == ["skips.jsonl"]


@pytest.mark.parametrize("cut", [1, 20])
def test_a_log_survives_a_crash_in_the_middle_of_a_line(tmp_path, cut):
    path = tmp_path / "skips.jsonl"
    log = optim.SkipLog(path)
    verdict = optim.Verdict("data", 3, "the data", place="x", rows=(1, 2), value=float("inf"))
    for batch in (7, "shard-3/12", {"epoch": 1}):
        log.add(verdict, batch=batch, loss=0.5)
    path.write_bytes(path.read_bytes()[:-cut])
    again = optim.SkipLog(str(path))
    again.add(verdict, batch="later")
    entries = optim.SkipLog(path).read()
    assert [entry["batch"] for entry in entries] == [7, "shard-3/12", "later"]
    assert {"kind": "data", "step": 3, "rows": [1, 2], "value": None, "loss": 0.5}.items() <= entries[0].items()


def test_a_log_does_not_overwrite_other_files(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(ValueError, match=r"is not a file of skipped steps, or is damaged.*SkipLog\('skips\.jsonl'\)"):
        optim.SkipLog(path)
    assert path.read_text() == "mine\n"


NEEDY = {
    "lbfgs": optax.lbfgs(6e4, memory_size=2),
    "lookahead": optax.lookahead(optax.sgd(6e4), 2, 0.5),
    "sam": contrib.sam(optax.sgd(6e4), optax.sgd(0.1)),
    "sam_opaque": contrib.sam(optax.sgd(6e4), optax.sgd(0.1), opaque_mode=True),
    "sophia": contrib.sophia(6e4),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The parameter")
@pytest.mark.parametrize("name", NEEDY)
def test_an_update_is_replayed_with_the_functions_that_it_needs(name):
    """The verdict was an error of optax: they are arguments of the step, and not of the loss function."""
    tx, params = optim.skip_nonfinite(NEEDY[name], check="updates"), {"w": jnp.ones((4, 8), jnp.float16)}
    params = optax.LookaheadParams.init_synced(params) if name == "lookahead" else params
    loss_fn = lambda params, x: jnp.sum(jax.tree.leaves(params)[0].astype(jnp.float32) * x) ** 2
    with jax.numpy_dtype_promotion("standard"):
        found = optim.find_origin(loss_fn, tx).verdict(params, tx.init(params), jnp.full((4, 8), 2.0))
    bounded = ("lbfgs", "sophia")  # their updates are finite
    expected = "not reproduced" if name in bounded else "format"
    assert found.kind == expected, str(found)
