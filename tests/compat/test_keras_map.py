"""Keras's map: its lookup, its errors, and what it is once frozen."""

import jax
import jax.numpy as jnp
import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras


@pytest.fixture(autouse=True)
def restored_default():
    before = jmp.default_policy()
    yield
    jmp.set_default_policy(before)


def test_lookup_is_exact_then_the_one_pattern_then_the_default():
    policies = keras.DTypePolicyMap("float32")
    policies["layer/dense_0"] = "bfloat16"
    policies["layer/dense_.*"] = keras.DTypePolicy("mixed_float16")
    assert policies["layer/dense_0"].name == "bfloat16"
    assert policies["layer/dense_1"].name == "mixed_float16"
    assert policies["layer"].name == "float32"
    assert policies["my/layer/dense_1"].name == "float32"  # fullmatch
    assert policies["layer/dense_0/kernel"].name == "mixed_float16"
    assert policies["layer/conv"].name == "float32"


def test_lookup_does_not_inherit_but_the_frozen_map_does():
    policies = keras.DTypePolicyMap("float32", {"block": "bfloat16"})
    assert policies["block/dense"].name == "float32"
    assert jmp.get_policy(policies)["block/dense"].name == "bfloat16"


def test_two_patterns_are_an_error_and_an_exact_key_settles_it():
    policies = keras.DTypePolicyMap("float32", {"a.*": "bfloat16", ".*b": "float16"})
    with pytest.raises(
        ValueError, match=r"^Path 'a_b' matches multiple dtype policy specification keys: \['a\.\*', '\.\*b'\]"
    ):
        policies["a_b"]
    policies["a_b"] = "float64"
    assert policies["a_b"].name == "float64"


def test_a_key_is_set_once_until_it_is_deleted():
    policies = keras.DTypePolicyMap("float32", {"a": "bfloat16"})
    with pytest.raises(
        ValueError, match=r'^a already exist in the DTypePolicyMap with value <DTypePolicy "bfloat16">\. '
    ):
        policies["a"] = "float16"
    del policies["a"]
    policies["a"] = "float16"
    assert (policies["a"].name, len(policies), list(policies), "a" in policies, "b" in policies) == (
        "float16", 1, ["a"], True, False,
    )  # fmt: skip
    with pytest.raises(KeyError):
        del policies["b"]


@pytest.mark.parametrize(
    "value",
    [
        "mixed_bfloat16",
        keras.DTypePolicy("mixed_bfloat16"),
        jmp.get_policy("mixed_bfloat16"),
        {"class_name": "DTypePolicy", "config": {"name": "mixed_bfloat16"}},
    ],
)
def test_values_in_any_spelling(value):
    policies = keras.DTypePolicyMap("float32")
    policies["a"] = value
    assert policies["a"] == keras.DTypePolicy("mixed_bfloat16")


def test_a_dtype_and_none_are_values_too():
    policies = keras.DTypePolicyMap("float32", {"a": jnp.float16, "b": None})
    assert [policies[key].name for key in "ab"] == ["float16", "float32"]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: keras.DTypePolicyMap(policy_map=[("a", "float32")]), TypeError,
         r"^If specified, `policy_map` must be a dict\. Received: policy_map=\[\('a', 'float32'\)\] of type <class 'l"),
        (lambda: keras.DTypePolicyMap("float32", {3: "float32"}), TypeError,
         r"^A key of a DTypePolicyMap is a path or a pattern, got 3\. For example: 'head'\.$"),
        (lambda: keras.DTypePolicyMap("float32", {"(": "float32"}), ValueError, r"^The key '\(', .*is not a valid p"),
        (lambda: keras.DTypePolicyMap("float32", {"a": "flaot16"}), ValueError, r"^Cannot convert 'flaot16' to a mixe"),
        (lambda: keras.DTypePolicyMap("float32", {"a": 3}), ValueError,
         r"^Cannot interpret the assigned value as a dtype policy\. Received: 3 of type <class 'int'>\. For example: "),
        (lambda: keras.DTypePolicyMap("float32", {"a": keras.DTypePolicyMap()}), ValueError, r"^Cannot interpret the "),
        (lambda: keras.DTypePolicyMap(3), ValueError, r"^Cannot interpret the assigned value as a dtype policy\."),
    ],
)  # fmt: skip
def test_bad_maps_are_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_map_never_changes_what_it_stores_or_was_made_from():
    given, policy = {"a": "float16"}, keras.DTypePolicy("mixed_bfloat16")
    policies = keras.DTypePolicyMap(None, given)
    policies["b"] = policy
    config = policies.get_config()
    assert policies["b"] is policy
    assert policy.name == "mixed_bfloat16"
    assert given == {"a": "float16"}
    config["policy_map"].clear()
    assert list(policies) == ["a", "b"]


def test_an_open_default_follows_the_global_policy_and_maps_do_not_nest():
    policies = keras.DTypePolicyMap()
    keras.set_dtype_policy("mixed_bfloat16")
    assert policies["anything"].name == "mixed_bfloat16"
    assert (policies.name, policies.compute_dtype, policies.variable_dtype) == (
        "map_mixed_bfloat16",
        "bfloat16",
        "float32",
    )
    assert keras.DTypePolicyMap(keras.DTypePolicyMap("float16")).default_policy.name == "float16"
    assert repr(keras.DTypePolicyMap("float16", {"a": "float32"})) == (
        "<DTypePolicyMap default_policy=float16, mapping=[('a', 'float32')]>"
    )


def test_the_frozen_map_says_what_keras_says_of_every_key():
    policies = keras.DTypePolicyMap("float32")
    for key, name in [("a", "bfloat16"), ("a/.*", "float16"), ("a/b", "float64"), ("a/b/c", "mixed_float16")]:
        policies[key] = name
    frozen = jmp.get_policy(policies)
    assert isinstance(frozen, jmp.PolicyMap)
    for path in ("a", "a/b", "a/b/c", "a/x", "z"):
        assert frozen[path] is jmp.get_policy(policies[path])
    policies["z"] = "float16"
    assert frozen["z"].name == "float32"


def test_a_map_cannot_be_hashed_because_it_changes():
    with pytest.raises(TypeError):
        hash(keras.DTypePolicyMap())


@pytest.mark.exhaustive
def test_a_flax_module_takes_keras_policies_and_maps():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(nn.Dense(3, name="body")(x))

    policies = keras.DTypePolicyMap("mixed_bfloat16", {"head": "float16"})
    model = jmp.with_policy(Net(), policies)
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    assert params["body"]["kernel"].dtype == jnp.float32
    assert params["head"]["kernel"].dtype == jnp.float16
    assert model.apply({"params": params}, jnp.ones((1, 4))).dtype == jnp.bfloat16
    assert jmp.policy_of(model) == jmp.get_policy(policies)
    half = jmp.with_policy(nn.Dense(2), keras.DTypePolicy("mixed_float16"))
    assert half.apply(half.init(jax.random.key(0), jnp.ones((1, 4))), jnp.ones((1, 4))).dtype == jnp.float16
