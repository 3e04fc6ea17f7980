"""Laws 1, 2, 4, 5 and 6, for every policy of the registry."""

import copy
import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy import Policy

CASTS = {"cast_to_param": "param_dtype", "cast_to_compute": "compute_dtype", "cast_to_output": "output_dtype"}


def test_every_spelling_gives_one_object_and_one_trace():
    traces = []

    @jax.jit
    def f(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(x)

    spellings = ["bf16", "BFloat16 ", jnp.bfloat16, np.dtype("bfloat16"), ml_dtypes.bfloat16]
    policies = [Policy("float32", spelling, np.float32) for spelling in spellings]
    for policy in policies:
        f(policy, jnp.ones(2))
    assert all(policy is policies[0] for policy in policies)
    assert len(traces) == 1


def test_equal_policies_are_equal_and_hash_alike_and_others_are_not():
    a, b = Policy("float32", "bfloat16", "float32"), Policy("float32", "bfloat16", "bfloat16")
    assert a == b.with_output_dtype("float32")
    assert hash(a) == hash(Policy(jnp.float32, jnp.bfloat16, jnp.float32))
    assert a != b
    assert a != "float32"
    assert a != a.replace(precision="highest")


ROUND_TRIPS = [
    lambda p: jmp.get_policy(str(p)),
    lambda p: jmp.get_policy(f"  {str(p).upper().replace(',', ' , ')} "),
    lambda p: eval(repr(p), {"Policy": Policy}),
    lambda p: Policy.from_config(json.loads(json.dumps(p.get_config()))),
    lambda p: pickle.loads(pickle.dumps(p)),
    copy.copy,
    copy.deepcopy,
    lambda p: dataclasses.replace(p.replace(output_dtype="float64"), output_dtype=p.output_dtype),
    lambda p: jax.tree.unflatten(jax.tree.structure(p), []),
    jax.jit(lambda p: p),
    lambda p: jax.eval_shape(lambda p: p, p),
]


def test_every_round_trip_gives_the_policy_itself(any_policy):
    for round_trip in ROUND_TRIPS:
        assert round_trip(any_policy) is any_policy


def test_every_dot_algorithm_survives_str_and_is_one_that_jax_takes():
    for preset in jax.lax.DotAlgorithmPreset:
        policy = Policy("float32", "float32", "float32", precision=preset)
        assert jmp.get_policy(str(policy)) is policy is policy.replace(precision=f" {preset.name.lower()}")
        with jax.default_matmul_precision(policy.precision):
            assert Policy(None, None, None, precision=jax.lax.Precision.HIGHEST).precision == "highest"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "float32"),
        ({"compute_dtype": "bfloat16"}, "mixed_bfloat16"),
        ({"param_dtype": "bfloat16"}, "bfloat16"),
        ({"param_dtype": "float16", "output_dtype": "float32"}, "p=float16,o=float32"),
        ({"compute_dtype": None}, "compute=none"),
    ],
)
def test_a_dtype_that_is_left_out_has_the_default_of_the_strings(fields, text):
    assert Policy(**fields) is jmp.get_policy(text)


def test_policies_have_no_leaves_and_live_in_any_tree():
    any_policy = jmp.get_policy("int8_from_mixed_bfloat16")
    assert jax.tree.leaves(any_policy) == []
    carried, _ = jax.lax.scan(lambda c, _: (c, None), {"policy": any_policy, "x": jnp.zeros(())}, length=2)
    assert carried["policy"] is any_policy
    assert jax.vmap(lambda p, x: (p, x))(any_policy, jnp.ones(2))[0] is any_policy
    grads = jax.grad(lambda tree: tree["x"] ** 2)({"policy": any_policy, "x": 1.0})
    assert grads["policy"] is any_policy


def test_casts_are_those_of_their_field(any_policy):
    tree = {"w": np.ones(2, np.float32), "n": np.arange(2), "s": 1.0}
    for method, field in CASTS.items():
        dtype, cast = getattr(any_policy, field), getattr(any_policy, method)(tree)
        assert cast["w"].dtype == (np.float32 if dtype is None else dtype)
        assert cast["n"] is tree["n"]
        assert cast["s"] is tree["s"]


@pytest.mark.parametrize(
    ("inputs", "dtype"),
    [
        ((jnp.ones(2, jnp.float16), jnp.ones(2)), "float16"),
        ((3, np.arange(2), {"x": jnp.bfloat16(1)}), "bfloat16"),
        ((jnp.arange(2), 1.0, None), "float32"),
        ((np.ones(2),), "float32"),  # as JAX holds numpy's float64
        ((jmp.DynamicLossScale(), jnp.float16(1)), "float16"),
        ((), "float32"),
    ],
)
def test_resolve_takes_the_compute_dtype_of_the_first_floating_input(inputs, dtype):
    assert Policy("float32", None, None).resolve(*inputs) == Policy("float32", dtype, None)
    given = Policy(None, "float64", None)
    assert given.resolve(*inputs) is given


def test_loss_scale_keys_off_the_compute_dtype(any_policy):
    dynamic = any_policy.compute_dtype == np.float16
    assert type(any_policy.loss_scale()) is (jmp.DynamicLossScale if dynamic else jmp.NoOpLossScale)
    assert float(any_policy.loss_scale().loss_scale) == (2.0**15 if dynamic else 1)


def test_names_are_the_shortest_spelling():
    assert Policy("float32", "float32", "float32").name == "float32"
    assert Policy("float32", "bf16", "bf16").name == "mixed_bfloat16"
    assert Policy(None, None, None).name == "infer"
    assert Policy("float32", "bf16", "float32").name == "params=float32,compute=bfloat16,output=float32"
    assert Policy("float32", "float64", "float64").name == "params=float32,compute=float64,output=float64"


@pytest.mark.parametrize(("option", "dtype"), [("reduce_dtype", "float64"), ("accumulate_dtype", None)])
def test_a_name_says_a_float64_option_which_numpy_has_equal_none(option, dtype):
    policy = Policy(dtype, dtype, dtype, **{option: "float64"})
    assert f"{option.removesuffix('_dtype')}=float64" in policy.name
    assert jmp.get_policy(policy.name) is policy


def test_policies_are_immutable():
    policy = jmp.get_policy("bfloat16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute_dtype = np.float32
    with pytest.raises(dataclasses.FrozenInstanceError):
        del policy.compute_dtype


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Policy("f33", None, None), r"^Unknown dtype 'f33' for param_dtype\. Did you mean 'f32'\? .*param_dty"),
        (lambda: Policy(None, "int8", None), r"^Unknown dtype 'int8' for compute_dtype\."),
        (lambda: Policy(None, None, float), r"^Unknown dtype <class 'float'> for output_dtype\."),
        (lambda: Policy(None, None, None, reduce_dtype="f33"), r"^Unknown dtype 'f33' for reduce_dtype\. Did you mean"),
        (lambda: Policy(None, None, None, accumulate_dtype="f33"), r"^Unknown dtype 'f33' for accumulate_dtype\. Did"),
        (lambda: Policy(None, None, None, cache="int7"), r"^Unknown cache 'int7'\. Did you mean 'int8'\? For"),
        (lambda: Policy(None, None, None, cache="bf16"), r"^Unknown cache 'bf16'\. Known are 'int8', 'float8_e4m3fn'"),
        (lambda: Policy(None, None, None, cache=object), r"^Unknown cache <class 'object'>\. .*: cache='int8'\.$"),
        (lambda: Policy(None, None, None, precision="hihg"), r"^Unknown precision 'hihg'\. Did you mean 'high'\? For "),
        (lambda: Policy(None, None, None).replace(compute="f16"),
         r"^Unknown field 'compute' of a Policy\. Did you mean 'compute_dtype'\? For example: policy\.replace\("),
        (lambda: Policy.from_config({"param_dtype": "float32"}),
         r"^A policy's config has the keys \['compute_dtype', 'output_dtype', 'param_dtype'\], .*For example: \{"),
        (lambda: Policy.from_config(Policy(None, None, None).get_config() | {"name": "x"}),
         r"got \['compute_dtype', 'name', 'output_dtype', 'param_dtype'\]"),
        (lambda: Policy(None, None, None, quantization="int7"),
         r"^Unknown quantization 'int7' for quantization\. Did you mean 'int8'\? For example: 'int8'\.$"),
        (lambda: Policy.from_config("float32"), r"^A policy's config has the keys .*, got 'float32'\. For example: \{"),
    ],
)  # fmt: skip
def test_errors_quote_what_is_wrong_and_show_what_works(make, text):
    with pytest.raises(ValueError, match=text):
        make()


OPTIONS = {"precision": "highest", "quantization": "int8", "reduce_dtype": "float32", "accumulate_dtype": "float32",
           "cache": "int8"}  # fmt: skip


@pytest.mark.parametrize("field", OPTIONS)
def test_a_config_has_the_options_that_are_set(field):
    policy = jmp.get_policy("mixed_bfloat16")
    assert list(policy.get_config()) == ["param_dtype", "compute_dtype", "output_dtype"]
    given = policy.replace(**{field: OPTIONS[field]})
    assert given.get_config() == policy.get_config() | {field: OPTIONS[field]}
    assert given is not policy
    assert given.replace(**{field: None}) is policy
    policies = jmp.PolicyMap({"head": given}, policy)
    for again in (jmp.PolicyMap.from_config(policies.get_config()), eval(repr(policies), {"PolicyMap": jmp.PolicyMap})):
        assert again == policies
        assert (again["head"], again["body"]) == (given, policy)
    from_keras = jmp.compat.keras.dtype_policies.get(given.name)
    assert jmp.get_policy(type(from_keras).from_config(from_keras.get_config())) is given


NARROWER = [("float32", "bfloat16"), ("float64", "float32"), ("bfloat16", "float16"), ("float16", "bfloat16"),
            ("bfloat16", "float8_e4m3fn")]  # fmt: skip


@pytest.mark.parametrize(("compute", "accumulate"), NARROWER)
def test_an_accumulate_dtype_that_cannot_hold_the_numbers_of_products_is_refused(compute, accumulate):
    text = rf"^Products of '{compute}' cannot be accumulated in '{accumulate}', which cannot represent all .*: "
    wide = "float64" if compute == "float64" else "float32"
    with pytest.raises(ValueError, match=f"{text}accumulate_dtype='{wide}'"):
        Policy("float32", compute, "float32", accumulate_dtype=accumulate)
    with pytest.raises(ValueError, match=rf"^In policy 'c={compute},a={accumulate}': Products of '{compute}' cannot"):
        jmp.get_policy(f"c={compute},a={accumulate}")
    inferring = Policy("float32", None, None, accumulate_dtype=accumulate)  # which numbers it meets is not known yet
    with jax.enable_x64(True), pytest.raises(ValueError, match=text):
        inferring.resolve(jnp.ones(2, compute))


@pytest.mark.parametrize(("compute", "accumulate"), [(a, c) for c, a in NARROWER if a != "float16" and c != "float16"])
def test_an_accumulate_dtype_that_holds_the_numbers_of_products_is_taken(compute, accumulate):
    assert Policy(None, compute, None, accumulate_dtype=accumulate).accumulate_dtype == np.dtype(accumulate)
    assert Policy(None, compute, None, accumulate_dtype=compute).accumulate_dtype == np.dtype(compute)
