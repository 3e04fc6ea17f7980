"""What `autocast` and its rules say to input that cannot work."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from jax.experimental import pallas as pl

from jmp_policy import AutocastRules, PolicyMap, autocast
from jmp_policy.numerics import audit

X = jnp.ones((2, 2))


LOW = "mixed_bfloat16"
FIELDS = "params=float32,compute=bfloat16,output=bfloat16"
QUANTIZED = (
    r"^autocast does not quantize weights, as the policy 'int8_from_mixed_bfloat16'{} says, unless you tell it "
    r"which arguments they are\. For example: autocast\(loss_fn, 'int8_from_mixed_bfloat16', weights=0\)\.$"
)
CACHED = (
    rf"^autocast knows no layers, and cannot store their cache as the policy '{FIELDS},cache=int8'%s says\. "
    rf"Use with_policy\(model, '{FIELDS},cache=int8'\) for a Flax module, or 'mixed_bfloat16'\.$"
)
LAYERS = (
    r"^autocast cannot quantize as the policy '{0}_from_mixed_bfloat16' says: each layer needs {1}, and autocast knows "
    r"no layers\. Use with_policy\(model, '{0}_from_mixed_bfloat16'\) for a Flax module, or a policy such as "
    r"'{2}_from_mixed_bfloat16'\."
)
NO_FUNCTION = r"^autocast takes a function, got .*"
NO_WEIGHTS = r"^weights must be an argument number, several, or a function of paths, got {}\. For "
NO_DTYPE = r"^autocast cannot compute in '.*'{}\. "
NO_NAME = r"^{}, in functions of AutocastRules, is not the name of a function\. For example: "
NO_PRIMITIVE = r"^{}, in primitives of AutocastRules, is not a primitive of the tables\. {}"
OF_HEAD, OF_SCOPES = " for the key 'head' of a PolicyMap", " for 'head' in scopes of AutocastRules"
FLOAT8 = "params=float32,compute=float8_e4m3fn,output=float32"
INT8 = "int8_from_mixed_bfloat16"
STOCHASTIC = "nvfp4(stochastic_rounding=true)"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *((lambda fun=fun: autocast(fun, LOW), TypeError, NO_FUNCTION + r" For example: autocast\(loss_fn, 'mixed_")
          for fun in (3, [abs], dict, X)),
        *((lambda fun=fun: autocast(fun, LOW), TypeError, NO_FUNCTION + r": autocast\(model.apply, 'mixed_")
          for fun in (nn.Dense(2), nn.Dense)),
        (lambda: autocast(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), LOW), TypeError,
         r"Linear\)\. Pass a function .*: autocast\(lambda model, x: model\(x\), 'mixed_"),
        *((lambda dtype=dtype: autocast(jnp.sin, dtype), ValueError,
           NO_DTYPE.format(", the compute dtype of the policy '.*'")) for dtype in ("float8_e5m2", FLOAT8)),
        (lambda: autocast(jnp.sin, PolicyMap({"head": FLOAT8}, "float32")), ValueError, NO_DTYPE.format(OF_HEAD)),
        (lambda: AutocastRules(scopes={"head": FLOAT8}), ValueError, NO_DTYPE.format(OF_SCOPES)),
        (lambda: autocast(jnp.sin, "params=float64,compute=float32,output=float64")(X), ValueError,
         r"^The policy 'params=float64,compute=float32,output=float64' needs jax\.config\.update\('jax_enable_x64', "
         r"True\): without it, JAX computes in float32\. For example: 'float32'\."),
        *((lambda rules=rules: autocast(jnp.sin, LOW, rules=rules)(X), ValueError, r"^The policy 'float64' needs jax")
          for rules in (AutocastRules(scopes={"a": "float64"}), AutocastRules(backward="float64"))),
        (lambda: autocast(jnp.sin, PolicyMap({"head": "float64"}, "float32"))(X), ValueError,
         r"^The policy 'float64' needs jax.config.update\('jax_enable_x64', True\)"),
        (lambda: autocast(jnp.sin, "params=float32,compute=int8"), ValueError,
         "^Unknown dtype 'int8' in 'compute=int8'"),
        (lambda: autocast(jnp.sin, INT8), ValueError, QUANTIZED.format("")),
        (lambda: autocast(jnp.sin, PolicyMap({"head": INT8}, "float32")), ValueError, QUANTIZED.format(OF_HEAD)),
        (lambda: AutocastRules(scopes={"head": INT8}), ValueError, QUANTIZED.format(OF_SCOPES)),
        (lambda: autocast(jnp.sin, "c=bf16,cache=int8"), ValueError, CACHED % ""),
        (lambda: autocast(jnp.sin, PolicyMap({"head": "c=bf16,cache=int8"}, "float32")), ValueError, CACHED % OF_HEAD),
        (lambda: autocast(jnp.sin, f"float8_from_{LOW}", weights=0), ValueError,
         LAYERS.format("float8", "a state", r"float8\(recipe=current\)")),
        (lambda: autocast(jnp.sin, f"{STOCHASTIC}_from_{LOW}", weights=0), ValueError,
         LAYERS.format(re.escape(STOCHASTIC), "a PRNG key", "nvfp4")),
        *((lambda weights=weights: autocast(jnp.sin, INT8, weights=weights), TypeError,
           NO_WEIGHTS.format(re.escape(repr(weights)))) for weights in ("params", True, 1.0, [0, "x"])),
        (lambda: autocast(jnp.sin, LOW, custom_rules="insde"), ValueError,
         r"^Unknown custom_rules 'insde'\. Did you mean 'inside'\? For example: custom_rules='inside'\."),
        (lambda: autocast(jnp.sin, LOW, rules={"exp": "low"}), TypeError,
         r"^rules must be AutocastRules, got {'exp': 'low'}\. For example: AutocastRules\(functions="),
        (lambda: autocast(lambda x: "text", LOW)(X), TypeError,
         "<lambda> returned 'text', a str; autocast needs a tree of arrays."),
        (lambda: autocast(lambda x: {"a": [x, abs]}, LOW)(X), TypeError,
         r"returned <built-in function abs>, a builtin_function_or_method, at \['a'\]\[1\]"),
        (lambda: autocast(lambda x: (y for y in x), LOW)(X), TypeError,
         "returned a generator, which would run after its policy ended."),
        (lambda: AutocastRules(primitives={"ex": "low"}), ValueError,
         NO_PRIMITIVE.format("'ex'", "Did you mean 'exp'")),
        *((lambda name=name: AutocastRules(primitives={name: "low"}), ValueError,
           NO_PRIMITIVE.format(repr(name), "None is like it")) for name in ("zzz", 3)),
        (lambda: AutocastRules(primitives={"exp": "ful"}), ValueError,
         r"^Unknown class 'ful' for the primitive 'exp'\. Did you mean 'full'\? For example: "),
        *((lambda name=name: AutocastRules(functions={name: "full"}), ValueError, NO_NAME.format(re.escape(repr(name))))
          for name in (3, "my softmax", "jax..nn", "")),
        (lambda: AutocastRules(functions={"no_such_package.softmax": "full"}), ValueError,
         r"^'no_such_package\.softmax', in functions of AutocastRules, names no function\. "),
        (lambda: AutocastRules(functions={"jax.nn.softmx": "full"}), ValueError,
         r"^'jax\.nn\.softmx', in functions of AutocastRules, names no function\. .*Did you mean 'jax\.nn\.softmax'\?"),
        (lambda: AutocastRules(functions={"softmax": "narow"}), ValueError,
         r"^Unknown treatment 'narow' of the function 'softmax'\. Did you mean 'narrow'\? For example:"),
        (lambda: AutocastRules(scopes={"a": "narow"}), ValueError,
         "It is the value for 'a' in scopes of AutocastRules, which may also be 'full', 'wide', 'narrow'"),
        (lambda: AutocastRules(backward={"a": PolicyMap({"b": "float32"}, "float32")}), ValueError,
         "^PolicyMap.* for 'a' in backward of AutocastRules is not a policy"),
        (lambda: AutocastRules(scopes={"(": "float32"}), ValueError,
         r"^The key '\(', rule 0 of a PolicyMap, is not a valid pattern"),
        (lambda: AutocastRules(residuals="low"), ValueError,
         r"Unknown residuals 'low' of AutocastRules\. .*: residuals='half'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


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
        r"^autocast casts no matmul to bfloat16: each one is inside a jax.custom_vjp or jax.custom_jvp function, which "
        r"runs as written; the first is dot_general of .*test_autocast_errors.py:\d+ \(.*\)\. For example: "
        r"autocast\(fun, policy, custom_rules='inside'\)\.$"
    )
    with pytest.warns(UserWarning, match=text) as found:
        jax.eval_shape(fun, X)
    assert len(found) == 1
    if not is_inside:
        jax.eval_shape(fun, X)  # warns once


product = lambda x: jnp.tanh(x @ x)

NOT_ENTERED = {
    "custom_vmap_call": jax.custom_batching.sequential_vmap(product),
    "composite": jax.lax.composite(product, name="test.product"),
    "linear_call": lambda x: jax.custom_derivatives.linear_call(lambda w, x: x @ w, lambda w, ct: ct @ w.T, x, x),
    "call_hi_primitive": lambda x: jax.checkpoint(product)(x),  # JAX 0.11 reads its flag in the decorator
}


@pytest.fixture
def remat3():
    is_known = "jax_remat3" in jax.config.values
    if is_known:
        jax.config.update("jax_remat3", True)
    yield is_known
    if is_known:
        jax.config.update("jax_remat3", False)


@pytest.mark.parametrize("name", NOT_ENTERED)
def test_matmuls_that_are_all_where_autocast_does_not_enter_are_a_warning(name, remat3):
    if name == "call_hi_primitive" and not remat3:
        pytest.skip("this JAX has no jax_remat3")
    text = (
        rf"each one is inside a {name}, which runs as written; .* For example: autocast\(inner, 'mixed_bfloat16'\) in"
    )
    with pytest.warns(UserWarning, match=text):
        jax.eval_shape(autocast(NOT_ENTERED[name], "mixed_bfloat16"), X)
    matmuls = audit(NOT_ENTERED[name])(X).matmuls
    assert [row.dtype for row in matmuls] == ["float32"]  # reports see them


def multiply_in_kernel(x, dtype=jnp.float32):
    def kernel(given, out):
        out[...] = (given[...].astype(dtype) @ given[...].astype(dtype)).astype(out.dtype)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def test_matmuls_that_are_all_inside_kernels_are_a_warning():
    text = (
        r"each one is inside a pallas_call, which runs in the dtypes that it is given; the first is dot_general of .*"
        r"test_autocast_errors.py:\d+ .* For example: pallas_call\(kernel, ...\)\(x.astype\('bfloat16'\)\)\.$"
    )
    own_derivative = jax.custom_vjp(lambda x: multiply_in_kernel(x))
    own_derivative.defvjp(lambda x: (multiply_in_kernel(x), x), lambda x, g: (g @ x.T,))
    for fun in (multiply_in_kernel, own_derivative):
        with pytest.warns(UserWarning, match=text):
            jax.eval_shape(autocast(fun, "mixed_bfloat16"), X)
    jax.eval_shape(autocast(lambda x: multiply_in_kernel(x) @ x, "mixed_bfloat16"), X)
    jax.eval_shape(autocast(lambda x: multiply_in_kernel(x, jnp.bfloat16), "mixed_bfloat16"), X)


def test_matmuls_that_are_cast_or_meant_to_stay_are_no_warning():
    jax.eval_shape(autocast(lambda x: jax.scipy.sparse.linalg.cg(x, x[0])[0], "mixed_bfloat16"), X)
    jax.eval_shape(autocast(lambda x: hide(x) @ x, "mixed_bfloat16"), X)
    jax.eval_shape(autocast(hide, "mixed_bfloat16", custom_rules="inside"), X)
    jax.eval_shape(autocast(hide, "float32"), X)
    jax.eval_shape(autocast(hide, "mixed_bfloat16"), X.astype(jnp.bfloat16))
    jax.eval_shape(autocast(jnp.tanh, "mixed_bfloat16"), X)


def test_matmuls_that_are_all_float64_are_a_warning():
    text = (
        r"^autocast casts no matmul to bfloat16: each one is in float64, which a policy with float32 parameters leaves"
    )
    with jax.enable_x64(True), pytest.warns(UserWarning, match=text):
        jax.eval_shape(autocast(lambda x: x @ x, "mixed_bfloat16"), jax.ShapeDtypeStruct((2, 2), jnp.float64))


def dense(w, b, x):
    return jnp.tanh(x @ w + b)


@pytest.mark.parametrize("outer", [lambda fun: fun, jax.jit, lambda fun: jax.jit(lambda *args: fun(*args))])
def test_a_bias_of_one_example_is_a_warning(outer):
    cast = autocast(dense, "params=float32,compute=bfloat16,output=none")
    with pytest.warns(UserWarning, match=r"inside jax\.vmap sees one .*\(dense\)\. .* autocast\(jax\.vmap\(fun\)"):
        outer(jax.vmap(cast, (None, None, 0)))(X, X[0], X)


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit])
def test_a_bias_of_one_example_that_is_closed_over_is_a_warning(wrap):
    bias = X[0]
    cast = autocast(lambda x: wrap(lambda x: dense(X, bias, x))(x), "mixed_bfloat16")
    with pytest.warns(UserWarning, match=r"inside jax\.vmap sees one .*\(dense\)\."):
        jax.eval_shape(jax.vmap(cast), X)
    jax.eval_shape(jax.vmap(autocast(lambda x: wrap(lambda x: x * bias)(x), "mixed_bfloat16")), X)


@pytest.mark.parametrize(
    "fun", [lambda w, b, x: jnp.tanh(x @ w) * b, lambda w, b, x: jnp.tanh(x @ w - b), lambda w, b, x: (x @ w).sum() + b]
)
def test_what_is_no_bias_of_one_example_is_no_warning(fun):
    jax.vmap(autocast(fun, "mixed_bfloat16"), (None, None, 0))(X, X[0], X)
    autocast(jax.vmap(dense, (None, None, 0)), "mixed_bfloat16")(X, X[0], X)
    autocast(dense, "mixed_bfloat16")(X, X[0], X[0])  # no `vmap`
