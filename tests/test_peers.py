"""What is wrong with the others, as tests of ours: each is named after the library and its bug."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp

adjust = jax.jit(lambda scale, finite: scale.adjust(finite))


@pytest.mark.slow
def test_jmp_loses_the_floor_in_any_jit_or_tree_map():
    scale = jmp.DynamicLossScale(8.0, min_loss_scale=4.0)
    for through in (jax.jit(lambda s: s), lambda s: jax.tree.map(lambda x: x, s)):
        assert through(scale).min_loss_scale == 4.0
    assert float(adjust(adjust(adjust(scale, False), False), False).loss_scale) == 4.0


def test_jmp_scales_a_float16_loss_to_infinity():
    assert float(jmp.DynamicLossScale(2.0**15).scale(jnp.float16(100))) == 2.0**15 * 100
    assert float(jmp.StaticLossScale(2.0**15).scale(jnp.float16(100))) == 2.0**15 * 100


def test_jmp_raises_in_adjust_of_a_half_precision_scale():
    scale = jmp.DynamicLossScale(jmp.half_dtype()(2**15), period=1)
    assert float(scale.adjust(jnp.array(True)).loss_scale) == 2.0**16
    assert scale.loss_scale.dtype == jnp.float32


def test_jmp_turns_integer_leaves_into_floats():
    tree = {"w": jnp.ones(2), "step": jnp.arange(2)}
    for scale in (jmp.StaticLossScale(8.0), jmp.DynamicLossScale()):
        assert scale.unscale(tree)["step"] is tree["step"]


def test_jmp_hashes_equal_policies_differently():
    a = jmp.Policy(jnp.float32, jnp.bfloat16, np.dtype("float32"))
    b = jmp.Policy(np.float32, np.dtype("bfloat16"), "float32")
    assert a == b
    assert hash(a) == hash(b)


def test_jmp_cannot_print_a_policy_of_numpy_dtypes():
    policy = jmp.Policy(np.dtype("float32"), np.dtype("float16"), np.dtype("float32"))
    assert jmp.get_policy(str(policy)) is policy


def test_jmp_climbs_without_a_maximum():
    scale = jmp.DynamicLossScale(2.0**15, period=1)
    for _ in range(50):
        scale = adjust(scale, True)
    assert float(scale.loss_scale) == 2.0**24


@pytest.mark.parametrize("text", ["bflaot16", "f", "hlaf", "flot32", "mixd_float16", "fl32", "brain16"])
def test_jmp_recommends_a_name_that_it_rejects(text):
    with pytest.raises(ValueError, match="For example") as error:
        jmp.get_policy(text)
    quoted = str(error.value).split("'")[3::2]  # after the bad text itself
    assert quoted
    for name in quoted:
        assert isinstance(jmp.get_policy(name), jmp.Policy)


@pytest.mark.slow
def test_jmp_breaks_under_lower():
    step = jax.jit(lambda scale, x: scale.adjust(jmp.all_finite(scale.unscale(x))))
    scale = jmp.DynamicLossScale()
    assert float(step.lower(scale, jnp.ones(2)).compile()(scale, jnp.ones(2)).loss_scale) == 2.0**15
    jax.export.export(step)(jax.eval_shape(lambda: scale), jax.ShapeDtypeStruct((2,), jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("initial", [2.0**15, 2.0**16])
def test_flax_overflows_on_a_float16_loss_of_one(initial):
    loss_fn = lambda w: w.astype(jnp.float16)
    with pytest.warns(UserWarning, match=r"^The loss is float16"):
        loss, _ = jmp.value_and_grad(loss_fn, loss_scale=jmp.DynamicLossScale(initial))(jnp.float32(1))
    assert float(loss) == 1.0
    assert float(jmp.DynamicLossScale(initial).scale(loss)) == initial


def test_flax_grows_one_step_late():
    scale = jmp.DynamicLossScale(8.0, period=2)
    seen = [float((scale := adjust(scale, True)).loss_scale) for _ in range(4)]
    assert seen == [8, 16, 16, 32]


@pytest.mark.slow
def test_flax_scale_moves_as_ours_does_with_the_settings_that_are_documented():
    """Those of `DynamicLossScale`'s docstring, with a shorter interval."""
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    interval = 2
    theirs = dynamic_scale.DynamicScale(growth_interval=interval)
    ours = jmp.DynamicLossScale(2.0**16, period=interval + 1, min_loss_scale=2.0**-126, max_loss_scale=math.inf)

    @jax.jit
    def step(theirs, ours, number):
        theirs, finite, *_ = theirs.value_and_grad(lambda w: w * number)(1.0)
        return theirs, ours.adjust(finite)

    for number in np.random.default_rng(0).choice([1.0, 1.0, 1.0, np.inf], 40).astype(np.float32):
        theirs, ours = step(theirs, ours, number)
        assert (float(theirs.scale), int(theirs.fin_steps)) == (float(ours.loss_scale), int(ours.counter))


@pytest.mark.slow
def test_flax_drops_the_imaginary_part_of_complex_gradients():
    grads = jmp.grad(lambda z: jnp.sum((z * z).real), loss_scale=jmp.DynamicLossScale())(
        jnp.array([1 + 2j], jnp.complex64)
    )
    np.testing.assert_array_equal(grads, jax.grad(lambda z: jnp.sum((z * z).real))(jnp.array([1 + 2j], jnp.complex64)))
    assert grads[0].imag != 0


def test_flax_does_not_forward_keyword_arguments():
    grads = jmp.grad(lambda w, *, x: (w * x).sum(), loss_scale=jmp.DynamicLossScale())(jnp.ones(2), x=3.0)
    assert grads.tolist() == [3, 3]


@pytest.mark.slow
def test_mpx_unscales_with_the_scale_of_the_next_step():
    @jax.jit
    def step(w, scale):
        grads = jmp.grad(lambda w: jnp.sum(w**2), loss_scale=scale)(w)
        return grads, scale.adjust(jmp.all_finite(grads))

    scale = jmp.DynamicLossScale(8.0, period=2)
    for _ in range(5):  # growth on the second and fourth
        grads, scale = step(jnp.array([3.0]), scale)
        assert grads.tolist() == [6.0]


def test_mpx_ignores_a_dtype_given_as_a_string():
    assert jmp.cast_floating({"w": jnp.ones(2)}, "float16")["w"].dtype == jnp.float16
    with pytest.raises(ValueError, match=r"^Unknown dtype 'flaot16'"):
        jmp.cast_floating({"w": jnp.ones(2)}, "flaot16")


def test_mpx_clips_the_scale_to_float16():
    scale = jmp.DynamicLossScale(2.0**15, period=1)
    for _ in range(3):
        scale = adjust(scale, True)
    assert float(scale.loss_scale) == 2.0**18


def test_keras_reaches_a_scale_of_zero():
    scale = jmp.DynamicLossScale()
    for _ in range(142):
        scale = adjust(scale, False)
    assert float(scale.loss_scale) == 1.0
    assert float(scale.unscale(jnp.float32(0))) == 0.0


def test_keras_keys_scaling_off_the_name_of_the_policy():
    for spec in ("float16", "mixed_float16", "p=f32,c=f16,o=f32", jmp.Policy("float32", "float16", None)):
        assert isinstance(jmp.get_policy(spec).loss_scale(), jmp.DynamicLossScale)
    rules = jmp.PolicyMap({"head": "float32"}, "float16")
    assert isinstance(rules.loss_scale(), jmp.DynamicLossScale)


def test_keras_policies_cannot_be_hashed_and_its_maps_change_what_they_store():
    policy = jmp.get_policy("mixed_float16")
    rules = jmp.PolicyMap({"head": policy})
    rules.get_config()["rules"].clear()
    assert {policy: 1, rules: 2}[rules] == 2
    assert rules["head"] is policy
    assert policy.name == "mixed_float16"


def test_keras_does_not_hand_a_composites_policy_to_its_children():
    assert jmp.PolicyMap({"block": "bfloat16"}, "float32")["block/dense"].name == "bfloat16"


@pytest.mark.slow
def test_transformer_engine_reads_a_global_while_tracing():
    f = jax.jit(lambda x: jmp.get_policy(None).cast_to_compute(x))
    dtypes = []
    for name in ("bfloat16", "float16", "bfloat16"):
        with jmp.use_policy(name):
            dtypes.append(str(f(jnp.ones(2)).dtype))
    assert dtypes == ["bfloat16", "float16", "bfloat16"]
