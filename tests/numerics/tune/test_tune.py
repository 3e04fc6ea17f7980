"""`tune` on functions and modules that run in half for real."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp

# No result has the program of a trial, the number of measured operations, or rules that a map could do without.
from jmp_policy.numerics import _tune_search
from jmp_policy.numerics._tune import _make_subject
from jmp_policy.policy import make_map

HALF = "params=float32,compute=float16,output=none"
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)


def make_weights(names="abcd", size=4):
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=(size, size)) / size**0.5, jnp.float32) for name in names}


def make_loss(gains):
    """A chain of layers; those with a gain overflow in float16 between a product and the factor that takes it back."""

    def loss_fn(weights, x):
        for name, weight in weights.items():
            with jax.named_scope(name):
                gain = gains.get(name, 1.0)
                x = jnp.tanh((x @ (weight * gain)) / gain)
        return jnp.mean(jnp.square(x))

    return loss_fn


PLANTED = make_loss({"c": 1e6})


@pytest.fixture(scope="module")
def tuning():
    return jmp.tune(PLANTED, (make_weights(), BATCH), "mixed_float16", tolerance=0.02)


@pytest.mark.slow
def test_the_planted_scope_is_found_and_no_other(tuning):
    assert tuning.scopes == ("c",)
    assert tuning.policy_map == jmp.PolicyMap({"c": HALF.replace("float16", "float32")}, HALF)
    assert tuning.is_met
    assert tuning.is_minimal
    assert math.isinf(tuning.low_error)
    assert len(tuning.trials) <= 2 * math.log2(len(tuning.candidates)) + 2
    assert set(tuning.candidates) == {"", *"abcd"}
    assert tuning.candidates[0] == "c"
    assert tuning.error <= 0.02
    assert eval(tuning.to_code()) == tuning.policy_map


@pytest.mark.slow
def test_a_trial_compiles_the_program_that_a_user_of_its_map_compiles(tuning):
    subject = _make_subject(PLANTED, (make_weights(), BATCH), jmp.get_policy(HALF), None, False, 0)
    trial, arrays = subject.make_run(tuning.policy_map, jmp.StaticLossScale(tuning.loss_scale))
    scale = jmp.StaticLossScale(tuning.loss_scale)
    differentiate = jmp.value_and_grad(jmp.autocast(PLANTED, tuning.policy_map), loss_scale=scale)
    run = jax.jit(lambda *args: differentiate(*args)[::-1])  # a trial returns the gradients first
    lowered = jax.jit(trial).lower(arrays), run.lower(make_weights(), BATCH)
    ours, theirs = (re.sub(r'module @\w+|jax.result_info = "[^"]*"', "", each.as_text()) for each in lowered)
    assert len(ours.splitlines()) > 100
    assert ours == theirs


def test_the_text_says_what_was_found(tuning):
    shown = str(tuning)
    header, _, row, *_ = shown.splitlines()
    assert re.split(r"\s\s+", header) == ["float32", "suspicion", "error without"]
    assert re.split(r"\s\s+", row) == ["c", "1 of 5", "not finite"]
    assert f"1 of 5 scopes of {PLANTED.__qualname__} stay in float32" in shown
    assert "within the tolerance of 2 %" in shown
    assert "    default='params=float32,compute=float16,output=none',\n)" in shown
    assert "As code, from to_code(), for autocast:\njmp.PolicyMap(" in shown
    assert repr(tuning).startswith("<Tuning: 1 of 5 scopes in float32, error 0.")
    page = tuning._repr_html_()
    assert "<td" in page
    assert "<pre>jmp.PolicyMap(\n    {\n" in page


def test_the_plot_has_each_trial_and_the_tolerance(tuning):
    (axes,) = tuning.plot().axes
    finite = [trial for trial in tuning.trials if 0 < trial.error < math.inf]
    offsets = axes.collections[0].get_offsets()
    assert sorted(offsets[:, 0]) == sorted(len(trial.kept) for trial in finite)
    assert axes.lines[0].get_ydata()[0] == 0.02
    assert axes.get_xlabel() == "scopes that are in float32, of 5"


def test_plain_data_is_json(tuning):
    plain = json.loads(json.dumps(tuning.to_dict(), allow_nan=False))
    assert jmp.PolicyMap.from_config(plain["policy_map"]) == tuning.policy_map
    assert plain["trials"][0] == {"kept": [], "error": None}
    assert plain["scopes"] == ["c"]


@pytest.mark.slow
def test_scopes_without_a_measured_operation_are_candidates(monkeypatch):
    """Only so many kinds of operations are measured, and the search goes on without."""
    monkeypatch.setattr(_tune_search, "MOST_ROWS", 0)

    def net(x, weights):
        with jax.named_scope("first"):
            y = x @ weights
        with jax.named_scope("doubles"):
            y = y + y
        with jax.named_scope("rounds"):  # float16 has 1024 and 1025, and nothing between
            return (y + jnp.full_like(y, 1500)) @ weights - jnp.full_like(y, 1500) @ weights

    tuning = jmp.tune(net, (BATCH, make_weights()["a"]), HALF, tolerance=0.01)
    assert set(tuning.candidates) == {"", "first", "doubles", "rounds"}
    assert tuning.scopes == ("rounds",)


class Net(nn.Module):
    """Linear layers, of which one has weights that overflow in float16."""

    @nn.compact
    def __call__(self, x):
        for name in ("first", "big", "last"):
            x = nn.Dense(4, name=name)(x)
        return x


def make_big(params):
    """The second layer multiplies by 1e6, and the third divides by that."""
    scaled = {"first": 1.0, "big": 1e6, "last": 1e-6}
    return jax.tree.map_with_path(lambda path, leaf: leaf * scaled[path[1].key], params)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_modules_are_tuned_as_with_policy_runs_them(api):
    if api == "linen":
        model = Net()
        args = (make_big(model.init(jax.random.key(0), BATCH)), BATCH)
        run = lambda model: model.apply(*args)
    else:
        model = nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(3)))
        for index, factor in ((1, 1e6), (2, 1e-6)):
            model.layers[index].kernel[...] *= factor
        args, run = (BATCH,), lambda model: model(*args)
    wanted = run(model)
    tuning = jmp.tune(model, args, HALF, tolerance=0.02)
    assert "As code, from to_code(), for with_policy:" in str(tuning)
    assert 1 <= len(tuning.scopes) <= 2
    assert any("big" in scope or scope == "layers/1" for scope in tuning.scopes)
    assert jnp.linalg.norm(run(jmp.with_policy(model, tuning.policy_map)) - wanted) <= 0.02 * jnp.linalg.norm(wanted)
    assert not jnp.isfinite(run(jmp.with_policy(model, HALF))).all()


def test_an_nnx_model_is_as_it_was_after_a_metric_that_trains_it():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    before = model.kernel[...].copy()

    def metric(model, x):
        model.kernel[...] -= 0.1
        return jnp.mean(model(x))

    tuning = jmp.tune(model, (BATCH,), HALF, tolerance=0.05, metric=metric)
    assert tuning.is_met
    assert (model.kernel[...] == before).all()


@pytest.mark.slow
def test_layers_that_must_stay_unquantized_are_found():
    """A weight with one huge number: int8 has nothing left for the others of its column."""
    model = Net()
    params = model.init(jax.random.key(0), BATCH)["params"]
    params["big"]["kernel"] = params["big"]["kernel"].at[0].set(300.0)
    params["first"]["kernel"] = params["first"]["kernel"].at[:, 0].set(0.0)
    args = {"params": params}, BATCH
    policy = "int8(min_size=0)_from_float32"
    tuning = jmp.tune(model, args, policy, tolerance=0.1)
    assert tuning.scopes == ("big",)
    assert tuning.kept == "unquantized"
    assert tuning.low_error > 0.1
    assert tuning.policy_map["big"].quantization is None
    assert tuning.policy_map["first"].quantization is not None
    assert "stay unquantized" in str(tuning)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "low", "bound"), [("mxfp8", "mxfp8", 0.06), ("mxfp4/16", "mxfp4/16", 0.3)])
def test_formats_of_blocks_are_tried_with_gradients_where_they_train(format, low, bound):
    model, x = nnx.Linear(32, 32, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (16, 32))
    policy = jmp.get_policy(f"{format}(min_size=0)_from_float32")
    tuning = jmp.tune(model, (x,), policy, tolerance=bound)
    assert (tuning.scopes, tuning.low, tuning.kept) == ((), low, "unquantized")
    assert bound / 10 < tuning.error < bound
    assert _make_subject(model, (x,), policy, None, False, 0).differentiates == (format == "mxfp8")


@pytest.mark.parametrize("api", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_float8_is_tried_without_a_history_and_given_with_one(api):
    x = jnp.ones((16, 16))
    if api == "linen":
        model = nn.Dense(16)
        args = model.init(jax.random.key(0), x), x
    else:
        model, args = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), (x,)
    tuning = jmp.tune(model, args, "float8(min_size=0)_from_float32", tolerance=0.2, gradients=False)
    assert tuning.policy_map == jmp.PolicyMap({}, "float8(min_size=0)_from_float32")
    assert 1e-3 < tuning.error < 0.1
    assert tuning.low == "float8_e4m3fn"


def test_a_map_has_no_more_rules_than_it_needs():
    half, full = jmp.get_policy(HALF), jmp.get_policy("float32")
    scopes = ["", "a", "a/x", "a/y", "b/x", "b/y", "c.d/[e]"]
    rng = np.random.default_rng(0)
    for _ in range(50):
        kept = [scope for scope in scopes if rng.random() < 0.5]
        policy_map = make_map(scopes, kept, half, full)
        assert [scope for scope in scopes if policy_map[scope].compute_dtype == np.float32] == kept
        rules = [(rule.key, rule.policy) for rule in policy_map.rules]
        for rule in rules:
            shorter = jmp.PolicyMap([other for other in rules if other != rule], policy_map.default)
            assert any(shorter[scope].compute_dtype != policy_map[scope].compute_dtype for scope in scopes)
