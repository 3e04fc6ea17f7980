"""`numerics.predict` names what was planted and nothing else, and running the format shows that it is so."""

import gc
import json
import os
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_policy as jmp
from jmp_policy.numerics import StatsHistory, collect, predict

HALF = "params=float32,compute=float16,output=float32"


def make_loss(gain=1.0, out=1.0):
    def loss(w, x):
        with jax.named_scope("up"):
            x = jnp.tanh((x @ w["up"]) * gain / gain)
        with jax.named_scope("down"):
            return jnp.sum((x @ w["down"]) ** 2) * out

    return loss


W = {
    name: jnp.asarray(np.random.default_rng(i).normal(size=(4, 4)), jnp.float32)
    for i, name in enumerate(["up", "down"])
}
X = jnp.asarray(np.random.default_rng(2).normal(size=(8, 4)), jnp.float32)


def observe(fun, *args, **options):
    options = {"formats": ["float16"], "where": "all"} | options
    return jax.jit(collect(fun, **options))(*args)[1]


@pytest.fixture(scope="module")
def stats():
    return observe(jax.value_and_grad(make_loss(3e4, 2.0**-28)), W, X)


@pytest.fixture(scope="module")
def fine():
    return observe(jax.value_and_grad(make_loss()), W, X)


@pytest.mark.slow
def test_a_reason_is_a_sentence_with_the_line_the_number_and_the_cure(stats):
    forward, *others = predict(stats, HALF).reasons
    assert (forward.path, forward.direction, forward.what, forward.cure) == ("up", "forward", "overflow", "float32")
    assert (forward.format, forward.limit, forward.primitive) == ("float16", 65504.0, "mul")
    line = os.path.basename(forward.source)
    assert line.startswith("test_predict.py:")
    assert str(forward) == (
        f"`up` overflows in the forward pass: `mul` ({line}) reaches {forward.amax:.3g}, and the largest "
        "float16 number is 65504. It needs float32."
    )
    small = [reason for reason in others if reason.path == "down"]
    assert {(reason.direction, reason.what, reason.cure) for reason in small} == {
        ("backward", "underflow", "loss_scale")
    }
    assert str(small[0]).endswith("would be lost. The loss scale saves it.")
    assert "float16 starts at 6e-08" in str(small[0])


def test_a_prediction_is_a_table_a_page_a_picture_and_json(stats, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    prediction = predict(stats, HALF)
    text = str(prediction)
    assert max(map(len, text.splitlines())) <= 80
    assert "↑ overflow" in text
    assert "In float32 by .policy_map: up." in text
    assert "<table>" in prediction._repr_html_()
    assert repr(prediction).endswith("print it for the table>")
    plain = json.loads(json.dumps(prediction.to_dict(), allow_nan=False))
    assert plain["reasons"][0]["path"] == "up"
    assert jmp.PolicyMap.from_config(plain["policy_map"]) == prediction.policy_map
    figure = prediction.plot()
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(panels) == ["forward", f"backward, loss scale {prediction.loss_scale:g}"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(prediction.ranking)


@pytest.mark.slow
def test_a_policy_that_loses_nothing_is_said_to(fine):
    prediction = predict(fine, HALF)
    assert (prediction.reasons, prediction.culprits) == ((), ())
    assert prediction.policy_map == jmp.PolicyMap({}, HALF)
    assert "no scope would lose numbers" in str(prediction)
    assert prediction.loss_scale >= 1
    bfloat = predict(fine, "params=float32,compute=bfloat16,output=float32")
    assert (bfloat.reasons, bfloat.loss_scale) == ((), 1.0)


@pytest.mark.slow
def test_the_users_loss_scale_is_kept_where_it_is_good(fine):
    assert predict(fine, HALF, 4.0).loss_scale == 4.0
    assert predict(fine, HALF, jmp.StaticLossScale(4.0)).loss_scale == 4.0
    large = predict(fine, HALF, 2.0**24)
    assert {reason.direction for reason in large.reasons} == {"backward"}
    assert {reason.cure for reason in large.reasons} == {"loss_scale"}
    assert 1 <= large.loss_scale < 2.0**24
    assert "at a loss scale of 2**24" in " ".join(str(large).split())


def test_no_loss_scale_is_told_without_a_backward_pass():
    stats = observe(make_loss(3e4), W, X)
    prediction = predict(stats, HALF)
    assert (prediction.culprits, prediction.loss_scale) == (("up",), None)
    assert "No backward pass was measured" in str(prediction)
    with pytest.raises(ValueError, match=r"A loss scale was given, 8.0, but these Stats have no rows of a backward"):
        predict(stats, HALF, 8.0)


@pytest.mark.slow
def test_scopes_that_no_scale_saves_together_are_told_with_both_ends():
    def loss(w, x):
        with jax.named_scope("tiny"):
            small = jnp.sum((x @ w["up"]) ** 2) * 2.0**-42
        with jax.named_scope("huge"):
            return small + jnp.sum((x @ w["down"]) ** 2) * 2.0**13

    prediction = predict(observe(jax.value_and_grad(loss), W, X), HALF)
    assert len(prediction.culprits) == 1
    said = " ".join(str(prediction).split())
    assert "No loss scale saves all gradients: the smallest relevant ones, in tiny, and the largest, in huge" in said


@pytest.mark.slow
def test_what_leaves_a_scope_in_float32_is_followed_to_where_it_is_cast():
    def loss(w, x):
        with jax.named_scope("large"):
            h = (x @ w["up"]) * 3e4
        with jax.named_scope("reads"):
            return jnp.mean(jnp.tanh(h @ (w["down"] / 2.0**15)))

    prediction = predict(observe(jax.value_and_grad(loss), W, X), HALF)
    assert set(prediction.culprits) == {"large", "reads"}
    grad = lambda policy: jax.jit(jax.grad(jmp.autocast(loss, policy)))(W, X)
    repaired, expected = grad(prediction.policy_map), jax.grad(loss)(W, X)
    for name in W:
        np.testing.assert_allclose(repaired[name], expected[name], rtol=1e-2, atol=1e-4)
    assert not np.isfinite(grad(HALF)["up"]).all()


@pytest.mark.slow
def test_what_is_in_no_scope_is_repaired_with_the_others_kept():
    def loss(w, x):
        h = (x @ w["up"]) * 3e4 / 3e4
        with jax.named_scope("inside"):
            return jnp.mean((h @ w["down"]) ** 2)

    prediction = predict(observe(jax.value_and_grad(loss), W, X), HALF)
    assert prediction.culprits == ("",)
    assert [prediction.policy_map[path].compute_dtype.name for path in ("", "inside")] == ["float32", "float16"]
    assert np.isfinite(jax.grad(jmp.autocast(loss, prediction.policy_map))(W, X)["up"]).all()


@pytest.mark.slow
def test_a_gradient_that_is_nothing_but_rounding_is_not_blamed():
    def loss(w, x):
        scores = (x @ w["up"]) @ x.T
        with jax.named_scope("shift"):  # of all scores of a row alike: a softmax does not see it
            scores = scores + (x @ w["down"])[:, :1]
        return jnp.sum((jax.nn.softmax(scores) @ x) ** 2) * 2.0**-8

    stats = observe(jax.value_and_grad(loss), W, X)
    [shift] = [row for row in stats if row.path == "result/1/down"]
    assert 0 < shift.amax < 1e-6
    assert "shift" not in {reason.path for reason in predict(stats, HALF).reasons}


def test_the_policy_of_a_map_is_kept_below_what_is_repaired(stats):
    policy = jmp.PolicyMap({"down": "float32"}, HALF)
    prediction = predict(stats, policy)
    assert {reason.path for reason in prediction.reasons} == {"up"}
    assert [rule.key for rule in prediction.policy_map.rules] == ["up", "down"]
    assert predict(stats, jmp.PolicyMap({"up": "float32", "down": "float32"}, HALF)).reasons == ()


class Net(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.width, name="up")(x) * 3e4 / 3e4)
        return nn.Dense(1, name="head")(x)


@pytest.mark.slow
def test_with_policy_is_predicted_as_it_runs():
    with jax.numpy_dtype_promotion("standard"):
        params = Net().init(jax.random.key(0), X)
        loss = lambda model: lambda params, x: jnp.mean(model.apply(params, x) ** 2)
        stats = observe(jax.value_and_grad(loss(Net())), params, X)
        prediction = predict(stats, HALF, by="with_policy")
        assert prediction.culprits == ("",)  # the product by 3e4 stands in the model itself
        assert "by='with_policy'" in str(predict(stats, HALF))
        assert "by='with_policy'" not in str(prediction)
        grad = lambda policy: jax.grad(loss(jmp.with_policy(Net(), policy)))(params, X)
        assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grad(HALF)))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grad(prediction.policy_map)))


@pytest.mark.slow
def test_quantized_policies_are_predicted_for_layers():
    with jax.numpy_dtype_promotion("standard"):
        model = nn.Sequential([nn.Dense(64), nn.Dense(64)])
        x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
        params = model.init(jax.random.key(0), x)
        # A scale for the outlier of each row leaves nothing of the others in four bits.
        params["params"]["layers_1"]["kernel"] = jnp.ones((64, 64)).at[:, 0].set(15.0)
        fun = jax.value_and_grad(lambda params, x: jnp.mean(jnp.tanh(model.apply(params, x)) ** 2))
        # Nor does a scale that is a power of two for 12.2 times as much, where it is half of the steps of integers.
        params["params"]["layers_0"]["kernel"] = jnp.ones((64, 64)).at[:, ::32].set(12.2) * 2.0**-6
        formats = ["int4", "float8_e4m3fn", "float8_e5m2", "mxfp4", "mxfp8", "mxfp8_e5m2"]
        stats = observe(fun, params, x, formats=formats)
        for policy, format in (
            ("int4(min_size=0)_from_mixed_bfloat16", "int4"),
            ("mxfp4(min_size=0)_from_mixed_bfloat16", "mxfp4"),
            ("float8(min_size=0)_from_mixed_bfloat16", ""),
            ("mxfp8(min_size=0)_from_mixed_bfloat16", ""),
            ("mxfp8(gradients=e5m2,min_size=0)_from_mixed_bfloat16", ""),
        ):
            prediction = predict(stats, policy, by="with_policy")
            found = {(reason.path, reason.what, reason.format) for reason in prediction.reasons}
            layer = {"int4": "layers_1", "mxfp4": "layers_0"}.get(format)
            assert found == ({(layer, "precision", format)} if format else set())


def test_bad_input_is_refused_with_what_works(stats, fine):
    history = StatsHistory()
    history.append(0, fine)
    for error, message, *arguments in [
        (TypeError, r"predict takes Stats, got .*collect\(jax.value_and_grad\(loss_fn\), where='all'\)", None),
        (TypeError, "The rows of Stats are numbers", jax.eval_shape(lambda: stats)),
        (ValueError, "These Stats have rows without measurements", stats.empty()),
        (ValueError, "These Stats have no rows", stats.select(lambda site: False)),
        (ValueError, "was not traced in this process", history.merge()),
        (
            ValueError,
            "'params=float32,compute=float32,output=float32' has neither a narrower compute dtype",
            stats,
            "float32",
        ),
        (ValueError, "Unknown dtype or policy 'flaot16'", stats, "flaot16"),
        (ValueError, "autocast does not quantize weights", stats, "int4_from_mixed_bfloat16"),
        *[
            (ValueError, "loss_scale must be a positive finite number, got", stats, HALF, bad)
            for bad in (0.0, -1.0, float("nan"), float("inf"), True)
        ],
    ]:
        with pytest.raises(error, match=message):
            predict(*arguments, *[HALF] * (len(arguments) == 1))
    for by, message in [
        ("withpolicy", r"Unknown by='withpolicy'\. Did you mean 'with_policy'\?"),
        ("with_policy", "with_policy is for Flax modules, but the program of these Stats calls none"),
    ]:
        with pytest.raises(ValueError, match=message):
            predict(stats, HALF, by=by)


@pytest.mark.slow
def test_nan_without_the_policy_is_said():
    stats = observe(lambda x: jnp.log(x @ x), -jnp.eye(4) * 2)
    assert "rows have nan without the policy" not in str(predict(stats, HALF))
    broken = observe(lambda x: jnp.log(-(x @ x)), jnp.ones((2, 2)))
    assert "2 rows have nan without the policy, the first in (no scope)." in str(predict(broken, HALF))
    # The `where` of `jnp.var` has a constant nan, for an axis of no elements.
    stats = observe(lambda x: jnp.var(x @ x, axis=0), jnp.eye(4) * 2)
    assert any(row.nans for row in stats)
    assert "rows have nan without the policy" not in str(predict(stats, HALF))


def test_nan_of_a_closed_over_array_and_of_a_branch_is_said():
    weights = jnp.array([[jnp.nan, 1.0], [2.0, 3.0]])
    stats = observe(jax.jit(lambda x: x @ weights), jnp.eye(2))
    assert "have nan without the policy" in str(predict(stats, HALF))

    def choose(x):
        with jax.named_scope("a"):
            y = jnp.log(jax.lax.cond(x.sum() > 0, lambda: jnp.float32(-1.0), lambda: jnp.float32(1.0)))
        return (x @ x) * y

    assert "nan without the policy, the first in a." in str(predict(observe(choose, jnp.eye(2)), HALF))


@pytest.mark.slow
def test_the_program_that_is_remembered_keeps_no_array_and_no_class():
    def measure():
        class Small(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(2)(x)

        mask = jnp.ones((4, 2))
        params = Small().init(jax.random.key(0), X)
        stats = collect(lambda params, x: Small().apply(params, x)[:4] * mask, where="all", formats=[])(params, X)[1]
        return stats, weakref.ref(mask), weakref.ref(Small)

    stats, *references = measure()
    gc.collect()
    assert stats.rows()
    assert [reference() for reference in references] == [None, None]


def test_a_map_has_no_rule_inside_of_a_scope_that_is_float32():
    def overflow(w, x):
        with jax.named_scope("a"):
            with jax.named_scope("b"):
                x = x * 1e5 @ w
            x = x * 2 @ w
        with jax.named_scope("c"):
            x = x * 1e-9
            with jax.named_scope("d"):
                return x * 1e12 @ w

    prediction = predict(observe(overflow, W["up"], X), HALF)
    assert set(prediction.culprits) >= {"a", "a/b", "c/d"}
    assert [rule.key for rule in prediction.policy_map.rules] == ["a", "c/d"]


@jax.custom_jvp
def clip_below(x):
    return jnp.maximum(x, 0)


@clip_below.defjvp
def _(primals, tangents):
    return clip_below(*primals), tangents[0] * (primals[0] > 0).astype(jnp.float32)


@jax.custom_vjp
def clip_inside(x):
    return jnp.maximum(x, 0)


clip_inside.defvjp(lambda x: (jnp.maximum(x, 0), x), lambda x, g: (g * (x > 0).astype(jnp.float32),))


def shard_relu(x):
    mesh = jax.make_mesh((1,), ("d",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    return jax.shard_map(jax.nn.relu, mesh=mesh, in_specs=spec, out_specs=spec)(x)


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "custom_jvp": clip_below,
    "custom_vjp": clip_inside,
    "vmapped": jax.vmap(jax.nn.relu),
    "checkpointed": jax.checkpoint(jax.nn.relu),
    "scanned": lambda x: jax.lax.scan(lambda _, row: (None, jax.nn.relu(row)), None, x)[1],
    "sharded": shard_relu,
}


def make_activated_loss(activation):
    def loss(w, x):
        with jax.named_scope("up"):
            h = x @ w["up"]
        with jax.named_scope("act"):
            h = activation(h)
        with jax.named_scope("down"):
            return jnp.mean(((h @ w["down"]) * 1e-6) ** 2)

    return loss


def find_largest_error(found, true):
    errors = jax.tree.map(lambda a, b: float(abs(a - b).max() / abs(b).max()), found, true)
    return max(jax.tree.leaves(errors))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "relu")) for name in ACTIVATIONS]
)
def test_an_overflow_behind_a_custom_derivative_is_in_the_map_and_training_under_it_is_finite(name):
    loss = make_activated_loss(ACTIVATIONS[name])
    w, x = {"up": W["up"] * 300, "down": W["down"]}, X * 300
    prediction = predict(observe(jax.value_and_grad(loss), w, x), HALF)
    assert {"up", "down"} <= set(prediction.culprits)
    scale = jmp.StaticLossScale(prediction.loss_scale)
    found = jmp.value_and_grad(jmp.autocast(loss, prediction.policy_map), loss_scale=scale)(w, x)
    # float16 rounds to 2**-11, and four roundings in a row are within 2**-9.
    assert find_largest_error(found, jax.value_and_grad(loss)(w, x)) < 2**-9


def test_the_backward_pass_of_a_custom_jvp_has_the_path_of_its_forward_pass():
    observed = collect(jax.grad(make_activated_loss(clip_below)), where="all", formats=["float16"])
    stats = jax.eval_shape(observed, W, X)[1]
    paths = {site.path for site in stats.layout.sites if site.primitive in ("mul", "custom_jvp_call")}
    assert paths == {"act", "down"}


def test_a_small_difference_of_float64_values_is_not_rounding_error():
    def fun(w, x):
        with jax.named_scope("cancel"):
            difference = (x + 1e-9) - x
        with jax.named_scope("big"):
            return jnp.sum(jnp.tanh((difference @ w) * 1e25 * 1e25))

    with jax.enable_x64(True):
        stats = observe(fun, np.float64(W["up"]), np.float64(X), formats=["float32"])
        prediction = predict(stats, "params=float64,compute=float32,output=float64")
    assert [(reason.path, reason.what, reason.cure) for reason in prediction.reasons] == [
        ("big", "overflow", "float64")
    ]


def test_a_backward_pass_of_rounding_error_alone_does_not_count_as_not_measured():
    def loss(w, x):  # the gradient is a multiple of exp(rounding error)
        return jnp.sum(jnp.exp((x + 1e-7) @ w - x @ w))

    prediction = predict(observe(jax.value_and_grad(loss), W["up"], X), HALF)
    assert prediction.loss_scale is None
    assert "No backward pass" not in str(prediction)
