"""What `autocast` and its rules say to input that cannot work."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

from jmp_policy import AutocastRules, PolicyMap, autocast

X = jnp.ones((2, 2))


def raises(kind, text):
    return pytest.raises(kind, match=f"^{re.escape(text)}")


@pytest.mark.parametrize("target", [3, [abs], dict, X], ids=["int", "list", "class", "array"])
def test_a_non_function_is_refused(target):
    with pytest.raises(TypeError, match=r"^autocast takes a function, got .* For example: autocast\(loss_fn, 'mixed_"):
        autocast(target, "mixed_bfloat16")


@pytest.mark.parametrize("target", [nn.Dense(2), nn.Dense])
def test_a_linen_module_is_told_of_apply(target):
    with pytest.raises(TypeError, match=r"^autocast takes a function, got .*: autocast\(model.apply, 'mixed_"):
        autocast(target, "mixed_bfloat16")


@pytest.mark.slow
def test_an_nnx_module_is_told_of_functions_that_take_it():
    with pytest.raises(
        TypeError, match=r"Linear\)\. Pass a function .*: autocast\(lambda model, x: model\(x\), 'mixed_"
    ):
        autocast(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "mixed_bfloat16")


@pytest.mark.parametrize("policy", ["float64", "params=float32,compute=float8_e4m3fn,output=float32"])
def test_an_impossible_compute_dtype_is_refused(policy):
    with pytest.raises(ValueError, match=r"^autocast cannot compute in '.*', the compute dtype of the policy '.*'\. "):
        autocast(jnp.sin, policy)
    with pytest.raises(ValueError, match=r"^autocast cannot compute in '.*' for the key 'head' of a PolicyMap\. "):
        autocast(jnp.sin, PolicyMap({"head": policy}, "float32"))
    with pytest.raises(ValueError, match=r"^autocast cannot compute in '.*' for 'head' in scopes of AutocastRules\. "):
        AutocastRules(scopes={"head": policy})


def test_a_quantized_policy_without_weights_is_refused():
    message = (
        r"^autocast does not quantize weights, as the policy 'int8_from_mixed_bfloat16'{} says, unless you tell it "
        r"which arguments they are\. For example: autocast\(loss_fn, 'int8_from_mixed_bfloat16', weights=0\)\.$"
    )
    with pytest.raises(ValueError, match=message.format("")):
        autocast(jnp.sin, "int8_from_mixed_bfloat16")
    with pytest.raises(ValueError, match=message.format(" for the key 'head' of a PolicyMap")):
        autocast(jnp.sin, PolicyMap({"head": "int8_from_mixed_bfloat16"}, "float32"))
    with pytest.raises(ValueError, match=message.format(" for 'head' in scopes of AutocastRules")):
        AutocastRules(scopes={"head": "int8_from_mixed_bfloat16"})


def test_a_policy_with_a_cache_is_refused():
    message = (
        r"^autocast knows no layers, and cannot store their cache as the policy '{0},cache=int8'{1} says\. "
        r"Use with_policy\(model, '{0},cache=int8'\) for a Flax module, or 'mixed_bfloat16'\.$"
    )
    fields = "params=float32,compute=bfloat16,output=bfloat16"
    with pytest.raises(ValueError, match=message.format(fields, "")):
        autocast(jnp.sin, "c=bf16,cache=int8")
    with pytest.raises(ValueError, match=message.format(fields, " for the key 'head' of a PolicyMap")):
        autocast(jnp.sin, PolicyMap({"head": "c=bf16,cache=int8"}, "float32"))


@pytest.mark.parametrize(
    ("format", "needed", "other"),
    [
        ("float8", "a state", "float8(recipe=current)"),
        ("nvfp4(stochastic_rounding=true)", "a PRNG key", "nvfp4"),
    ],
)
def test_a_format_that_needs_layers_is_refused(format, needed, other):
    policy = f"{format}_from_mixed_bfloat16"
    message = (
        f"autocast cannot quantize as the policy {policy!r} says: each layer needs {needed}, and autocast knows no "
        f"layers. Use with_policy(model, {policy!r}) for a Flax module, or a policy such as "
        f"'{other}_from_mixed_bfloat16'."
    )
    with raises(ValueError, message):
        autocast(jnp.sin, policy, weights=0)


@pytest.mark.parametrize("weights", ["params", True, 1.0, [0, "x"]], ids=str)
def test_weights_of_another_type_are_refused(weights):
    with raises(
        TypeError, f"weights must be an argument number, several, or a function of paths, got {weights!r}. For "
    ):
        autocast(jnp.sin, "int8_from_mixed_bfloat16", weights=weights)


def test_an_integer_compute_dtype_is_refused():
    with raises(ValueError, "Unknown dtype 'int8' in 'compute=int8'"):
        autocast(jnp.sin, "params=float32,compute=int8")


def test_unknown_custom_rules_are_refused():
    with raises(ValueError, "Unknown custom_rules 'insde'. Did you mean 'inside'? For example: custom_rules='inside'."):
        autocast(jnp.sin, "mixed_bfloat16", custom_rules="insde")


def test_rules_of_another_type_are_refused():
    with raises(TypeError, "rules must be AutocastRules, got {'exp': 'low'}. For example: AutocastRules(functions="):
        autocast(jnp.sin, "mixed_bfloat16", rules={"exp": "low"})


@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (lambda x: "text", "<lambda> returned 'text', a str; autocast needs a tree of arrays."),
        (lambda x: {"a": [x, abs]}, "returned <built-in function abs>, a builtin_function_or_method, at ['a'][1]"),
        (lambda x: (y for y in x), "returned a generator, which would run after its policy ended."),
    ],
    ids=["string", "function", "generator"],
)
def test_a_result_that_is_no_array_is_named(fun, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        autocast(fun, "mixed_bfloat16")(X)


@pytest.mark.parametrize(
    ("name", "nearest"), [("ex", "Did you mean 'exp'?"), ("zzz", "None is like it."), (3, "None is like it.")]
)
def test_an_unknown_primitive_is_named_with_the_nearest(name, nearest):
    text = f"{name!r}, in primitives of AutocastRules, is not a primitive of the tables. {nearest}"
    with raises(ValueError, text):
        AutocastRules(primitives={name: "low"})


def test_an_unknown_class_of_a_primitive_is_refused():
    with raises(ValueError, "Unknown class 'ful' for the primitive 'exp'. Did you mean 'full'? For example: "):
        AutocastRules(primitives={"exp": "ful"})


@pytest.mark.parametrize("name", [3, "my softmax", "jax..nn", ""])
def test_what_cannot_be_the_name_of_a_function_is_refused(name):
    with raises(ValueError, f"{name!r}, in functions of AutocastRules, is not the name of a function. For example: "):
        AutocastRules(functions={name: "full"})


@pytest.mark.parametrize("name", ["jax.nn.softmx", "no_such_package.softmax"])
def test_a_dotted_name_of_nothing_is_refused(name):
    with raises(ValueError, f"{name!r}, in functions of AutocastRules, names no function. "):
        AutocastRules(functions={name: "full"})


def test_the_nearest_function_is_offered():
    with pytest.raises(ValueError, match=r"Did you mean 'jax\.nn\.softmax'\?"):
        AutocastRules(functions={"jax.nn.softmx": "full"})


def test_an_unknown_treatment_is_refused():
    with raises(ValueError, "Unknown treatment 'narow' of the function 'softmax'. Did you mean 'narrow'? For example:"):
        AutocastRules(functions={"softmax": "narow"})


def test_what_holds_for_a_scope_is_a_policy_or_a_treatment():
    with pytest.raises(
        ValueError,
        match=r"It is the value for 'a' in scopes of AutocastRules, which may also be 'full', 'wide', 'narrow'",
    ):
        AutocastRules(scopes={"a": "narow"})
    with pytest.raises(ValueError, match=r"^PolicyMap.* for 'a' in backward of AutocastRules is not a policy"):
        AutocastRules(backward={"a": PolicyMap({"b": "float32"}, "float32")})


def test_a_bad_pattern_of_a_scope_is_refused():
    with raises(ValueError, "The key '(', rule 0 of a PolicyMap, is not a valid pattern"):
        AutocastRules(scopes={"(": "float32"})


@jax.custom_vjp
def hide(x):
    return jnp.tanh(x @ x)


hide.defvjp(lambda x: (hide(x), x), lambda x, g: (g @ x.T,))

HIDING = {
    "call": hide,
    "jit": jax.jit(hide),
    "scan": lambda x: jax.lax.scan(lambda c, _: (hide(c), None), x, None, length=2)[0],
    "vmap": lambda x: jax.vmap(hide)(x[None]),
    "gradient": jax.grad(lambda x: autocast(lambda x: jnp.sum(hide(x)), "mixed_bfloat16")(x).astype(jnp.float32)),
}


@pytest.mark.parametrize("name", HIDING)
def test_matmuls_that_are_all_inside_custom_derivatives_are_a_warning(name):
    is_inside = name == "gradient"  # autocast is inside of the gradient
    fun = HIDING[name] if is_inside else autocast(HIDING[name], "mixed_bfloat16")
    text = (
        r"^autocast runs no matmul in bfloat16: each one is inside a jax.custom_vjp or jax.custom_jvp function, which "
        r"runs as written; the first is dot_general of .*test_autocast_errors.py:\d+ \(.*\)\. For example: "
        r"autocast\(fun, 'mixed_bfloat16', custom_rules='inside'\)\.$"
    )
    with pytest.warns(UserWarning, match=text) as found:
        jax.eval_shape(fun, X)
    assert len(found) == 1
    if not is_inside:
        jax.eval_shape(fun, X)  # warns once


def test_matmuls_that_are_cast_or_meant_to_stay_are_no_warning():
    jax.eval_shape(autocast(lambda x: hide(x) @ x, "mixed_bfloat16"), X)
    jax.eval_shape(autocast(hide, "mixed_bfloat16", custom_rules="inside"), X)
    jax.eval_shape(autocast(hide, "float32"), X)
    jax.eval_shape(autocast(hide, "mixed_bfloat16"), X.astype(jnp.bfloat16))
    jax.eval_shape(autocast(jnp.tanh, "mixed_bfloat16"), X)


def test_float64_parameters_are_refused():
    text = (
        "autocast leaves float64 as it is, and would do nothing with the parameters of the policy 'params=float64,"
        "compute=float32,output=float64'. For example, with parameters in float32: 'params=float32,compute=float32,"
    )
    with raises(ValueError, text):
        autocast(jnp.tanh, "params=float64,compute=float32,output=float64")


def test_matmuls_that_are_all_float64_are_a_warning():
    text = r"^autocast runs no matmul in bfloat16: each one is in float64, which autocast leaves; the first is "
    with jax.enable_x64(True), pytest.warns(UserWarning, match=text):
        jax.eval_shape(autocast(lambda x: x @ x, "mixed_bfloat16"), jax.ShapeDtypeStruct((2, 2), jnp.float64))


def dense(w, b, x):
    return jnp.tanh(x @ w + b)


@pytest.mark.parametrize("outer", [lambda fun: fun, jax.jit, lambda fun: jax.jit(lambda *args: fun(*args))])
def test_a_bias_of_one_example_is_a_warning(outer):
    cast = autocast(dense, "params=float32,compute=bfloat16,output=none")
    with pytest.warns(UserWarning, match=r"inside jax\.vmap sees one .*\(dense\)\. .* autocast\(jax\.vmap\(fun\)"):
        outer(jax.vmap(cast, (None, None, 0)))(X, X[0], X)


@pytest.mark.parametrize(
    "fun", [lambda w, b, x: jnp.tanh(x @ w) * b, lambda w, b, x: jnp.tanh(x @ w - b), lambda w, b, x: (x @ w).sum() + b]
)
def test_what_is_no_bias_of_one_example_is_no_warning(fun):
    jax.vmap(autocast(fun, "mixed_bfloat16"), (None, None, 0))(X, X[0], X)
    autocast(jax.vmap(dense, (None, None, 0)), "mixed_bfloat16")(X, X[0], X)
    autocast(dense, "mixed_bfloat16")(X, X[0], X[0])  # no `vmap`
