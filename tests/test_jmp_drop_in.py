"""The drop-in claim: code written against DeepMind's jmp 0.0.4 runs with `import jmp_policy as jmp`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy

theirs = pytest.importorskip("jmp")
LIBRARIES = [theirs, jmp_policy]

every_library = pytest.mark.parametrize("jmp", LIBRARIES, ids=lambda m: m.__name__)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # under which jmp's own code runs
        yield


def test_every_public_name_exists():
    assert [name for name in theirs.__all__ if not hasattr(jmp_policy, name)] == []


@every_library
@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("full", ("float32", "float32", "float32")),
        ("half", ("float16", "float16", "float16")),
        ("float32", ("float32", "float32", "float32")),
        ("f32", ("float32", "float32", "float32")),
        ("float16", ("float16", "float16", "float16")),
        ("bf16", ("bfloat16", "bfloat16", "bfloat16")),
        ("f64", ("float64", "float64", "float64")),
        ("c=f16", ("float32", "float16", "float16")),
        ("p=f16,c=f16", ("float16", "float16", "float16")),
        ("p=f16,c=bf16", ("float16", "bfloat16", "bfloat16")),
        ("p=f32,c=f16,o=f32", ("float32", "float16", "float32")),
        ("params=float32,compute=bfloat16,output=float32", ("float32", "bfloat16", "float32")),
        ("params=full,compute=half,output=full", ("float32", "float16", "float32")),
        ("o=f16", ("float32", "float32", "float16")),
    ],
)
def test_policy_strings(jmp, text, dtypes):
    policy = jmp.get_policy(text)
    assert [np.dtype(d).name for d in (policy.param_dtype, policy.compute_dtype, policy.output_dtype)] == list(dtypes)


@every_library
def test_policies_take_positional_and_keyword_dtypes(jmp):
    policy = jmp.Policy(jnp.float32, jnp.float16, jnp.bfloat16)
    same = jmp.Policy(param_dtype=jnp.float32, compute_dtype=jnp.float16, output_dtype=jnp.bfloat16)
    assert policy == same
    assert policy.with_output_dtype(jnp.float32) == jmp.Policy(jnp.float32, jnp.float16, jnp.float32)
    assert policy.compute_dtype == jnp.float16


@every_library
def test_policies_cast_trees(jmp):
    policy = jmp.Policy(jnp.float32, jnp.float16, jnp.bfloat16)
    tree = {"w": jnp.ones(2), "h": np.ones(2, np.float16), "n": jnp.arange(2), "none": None, "text": "a", "one": 1.0}
    for cast, dtype in [
        (policy.cast_to_param, np.float32),
        (policy.cast_to_compute, np.float16),
        (policy.cast_to_output, jnp.bfloat16),
    ]:
        out = cast(tree)
        assert (out["w"].dtype, out["h"].dtype, out["n"].dtype) == (dtype, dtype, jnp.int32)
        assert (out["none"], out["text"], out["one"]) == (None, "a", 1.0)
        assert isinstance(out["h"], np.ndarray)


@every_library
def test_cast_to_half_and_full(jmp):
    assert jmp.half_dtype() == jnp.float16
    assert jmp.cast_to_half({"w": jnp.ones(2)})["w"].dtype == jnp.float16
    assert jmp.cast_to_full({"w": np.ones(2, np.float16)})["w"].dtype == np.float32


@every_library
@pytest.mark.parametrize("pred", [jnp.array([True]), jnp.array(1)], ids=repr)
def test_select_tree_refuses_a_non_scalar(jmp, pred):
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        jmp.select_tree(pred, jnp.ones(2), jnp.zeros(2))


@every_library
@pytest.mark.parametrize("text", ["nope", "c=nope"])
def test_an_unknown_dtype_is_a_value_error(jmp, text):
    with pytest.raises(ValueError, match=r"^Unknown dtype"):
        jmp.get_policy(text)


@every_library
def test_an_unknown_key_is_a_value_error(jmp):
    with pytest.raises(ValueError, match="Unknown key 'x'"):
        jmp.get_policy("x=f16")


@every_library
def test_static_loss_scale(jmp):
    scale = jmp.StaticLossScale(8.0)
    assert jmp.StaticLossScale(loss_scale=8.0) == scale
    assert jax.tree.leaves(scale) == []
    assert scale.scale({"w": jnp.ones(2)})["w"].tolist() == [8, 8]
    assert scale.unscale({"w": jnp.ones(2)})["w"].tolist() == [0.125, 0.125]
    assert scale.adjust(jnp.array(False)) == scale
    assert jax.jit(lambda s, x: s.scale(x))(scale, 2.0) == 16


@every_library
def test_dynamic_loss_scale_takes_positional_arguments(jmp):
    scale = jmp.DynamicLossScale(jnp.float32(16), jnp.int32(1), 2, 4, jnp.float32(2))
    assert (float(scale.loss_scale), int(scale.counter), scale.period, scale.factor) == (16, 1, 2, 4)
    assert float(scale.min_loss_scale) == 2
    defaults = jmp.DynamicLossScale(jnp.float32(2.0**15))
    assert (int(defaults.counter), defaults.period, defaults.factor, float(defaults.min_loss_scale)) == (0, 2000, 2, 1)
    assert len(jax.tree.leaves(defaults)) == 2


@pytest.mark.slow
@every_library
def test_dynamic_loss_scale_moves_alike(jmp):
    scale = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(0), 2, 2, jnp.float32(2))
    seen = []
    for finite in [True, True, True, False, False, False, False, True, True]:
        scale = scale.adjust(jnp.array(finite))
        seen.append((float(scale.loss_scale), int(scale.counter)))
    assert seen == [(8, 1), (16, 0), (16, 1), (8, 0), (4, 0), (2, 0), (2, 0), (2, 1), (4, 0)]


@every_library
@pytest.mark.parametrize(
    ("arguments", "name"),
    [((np.int32(2),), "loss_scale"), ((np.float32(2), 0, 2, 2, np.int32(1)), "min_loss_scale"), ((2,), "loss_scale")],
)
def test_an_integer_scale_warns(jmp, arguments, name):
    with pytest.warns(UserWarning, match=rf"^Expected floating type for {name}"):
        jmp.DynamicLossScale(*arguments)


@pytest.mark.slow
@every_library
def test_the_train_step_of_jmps_readme(jmp):
    policy = jmp.Policy(compute_dtype=jmp.half_dtype(), param_dtype=jnp.float32, output_dtype=jnp.float32)
    initial = {"w": jnp.array([1.0, 2.0])}

    def loss_fn(params, loss_scale):
        params, x = policy.cast_to_compute((params, jnp.ones(2)))
        loss = policy.cast_to_output((params["w"] * x).sum())
        return loss_scale.scale(loss)

    @jax.jit
    def step(params, loss_scale):
        grads = loss_scale.unscale(jax.grad(loss_fn)(params, loss_scale))
        grads = policy.cast_to_param(grads)
        new_params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        grads_finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        return jmp.select_tree(grads_finite, new_params, params), loss_scale

    params, loss_scale = step(initial, jmp.DynamicLossScale(jnp.asarray(2.0**15)))
    assert params["w"].tolist() == [0.5, 1.5]
    assert (float(loss_scale.loss_scale), int(loss_scale.counter)) == (2.0**15, 1)
    params, loss_scale = step(params, jmp.DynamicLossScale(jnp.asarray(2.0**17)))  # overflows in float16
    assert params["w"].tolist() == [0.5, 1.5]
    assert float(loss_scale.loss_scale) == 2.0**16


@pytest.mark.parametrize("jmp", LIBRARIES, ids=lambda m: m.__name__)
def test_haikus_mixed_precision_works_with_the_policy(jmp):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Haiku's own import warns of JAX's deprecations
        try:
            import haiku as hk
        except (ImportError, AttributeError) as error:
            pytest.skip(f"this dm-haiku does not import under this jax: {error}")
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    dtypes = []

    class Probe(hk.Module):
        def __call__(self, x):
            w = hk.get_parameter("w", [2], x.dtype, jnp.ones)
            dtypes.append((str(x.dtype), str(w.dtype)))
            return x * w

    with hk.mixed_precision.push_policy(Probe, policy):
        net = hk.transform(lambda x: Probe()(x))
        params = net.init(jax.random.key(0), jnp.ones(2))
        out = net.apply(params, None, jnp.ones(2))
    assert params["probe"]["w"].dtype == jnp.float32
    assert set(dtypes) == {("float16", "float16")}
    assert out.dtype == jnp.float32


@pytest.mark.slow
@every_library
@pytest.mark.filterwarnings("ignore:(min_)?loss_scale=0 ")  # which is a trap, and taken all the same
def test_zeros_and_whole_floats_are_taken(jmp):
    assert jax.tree.leaves(jmp.StaticLossScale(0)) == []
    scale = jmp.DynamicLossScale(jnp.float32(10), jnp.int32(0), 5.0, 2.0, jnp.asarray(0.0))
    for i in range(1, 100):
        scale = scale.adjust(jnp.array(False))
        assert (float(scale.loss_scale), int(scale.counter), scale.period) == (10 * 2.0**-i, 0, 5)
