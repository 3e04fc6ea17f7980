"""`autocast` as a decorator of functions: policies, arguments, results, and what is traced when."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import products, trace

import jmp_policy as jmp
from jmp_policy import autocast

LOW = "params=float32,compute=bfloat16,output=none"
W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
X = jnp.linspace(0.0, 1.0, 6).reshape(2, 3)


def layer(w, x):
    return jnp.tanh(x @ w)


def product_dtypes(fun, *args):
    return [dtype for _, dtype in products(trace(fun)(*args))]


class Layers:
    """Every kind of thing that counts as a function, each taking `w` and `x`."""

    @autocast(LOW)
    @staticmethod
    def outer_static(w, x):
        return layer(w, x)

    @autocast(LOW)
    @classmethod
    def class_method(cls, w, x):
        return layer(w, x)

    @autocast(LOW)
    def method(self, w, x):
        return layer(w, x)

    def plain(self, w, x):
        return layer(w, x)

    def __call__(self, w, x):
        return layer(w, x)


FUNCTIONS = {
    "function": autocast(layer, LOW),
    "decorator": autocast(LOW)(layer),
    "jitted inside": autocast(jax.jit(layer), LOW),
    "jitted outside": jax.jit(autocast(layer, LOW)),
    "partial": functools.partial(autocast(functools.partial(layer, x=X), LOW)),
    "lambda": autocast(lambda w, x: layer(w, x), LOW),
    "static method": Layers.outer_static,
    "class method": Layers.class_method,
    "method": Layers().method,
    "bound method": autocast(Layers().plain, LOW),
    "callable object": autocast(Layers(), LOW),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_that_counts_as_a_function_runs_low(name):
    fun = FUNCTIONS[name]
    args = (W,) if name == "partial" else (W, X)
    assert product_dtypes(fun, *args) == ["bfloat16"]
    assert fun(*args).dtype == jnp.float32
    np.testing.assert_allclose(fun(*args), layer(W, X), atol=2e-2)


def test_a_decorated_function_is_named_like_the_original():
    assert FUNCTIONS["decorator"].__name__ == "layer"
    assert FUNCTIONS["decorator"].__wrapped__ is layer


@pytest.mark.parametrize("output", ["bfloat16", "float16", "float32", "none"])
def test_results_have_the_output_dtype_or_that_of_the_function(output):
    fun = autocast(lambda w, x: {"y": layer(w, x), "n": 3, "half": x.astype(jnp.float16)}, f"p=f32,c=bf16,o={output}")
    out = jax.eval_shape(fun, W, X)
    assert out["y"].dtype == ("float32" if output == "none" else output)
    assert out["half"].dtype == ("float16" if output == "none" else output)
    assert out["n"].dtype == jnp.int32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_open_compute_dtype_is_that_of_the_first_floating_input(dtype):
    half = X.astype(dtype)
    fun = autocast(lambda x, w: layer(w.astype(jnp.float32), x.astype(jnp.float32)), "infer")
    assert product_dtypes(fun, half, W) == [dtype]


def test_the_precision_of_the_policy_is_that_of_products():
    fun = autocast(layer, "params=float32,compute=bfloat16,output=none,precision=highest")
    assert "HIGHEST" in str(trace(fun)(W, X))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast casts no matmul to bfloat16")
def test_wide_and_narrow_values_stay_as_traced():
    with jax.enable_x64(True):
        wide = jnp.ones((2, 2), jnp.float64)
        assert product_dtypes(autocast(lambda x: x @ x, LOW), wide) == ["float64"]
    narrow = jnp.ones((2, 2), jnp.float8_e4m3fn)
    program = trace(autocast(lambda x: x.reshape(4), LOW))(narrow)
    assert str(program.out_avals[0].dtype) == "float8_e4m3fn"


def test_gradients_have_the_dtype_of_the_parameters():
    step = jax.grad(lambda w: autocast(layer, "mixed_bfloat16")(w, X).astype(jnp.float32).sum())
    assert jax.eval_shape(step, W).dtype == jnp.float32


def test_the_default_policy_is_that_of_the_decoration():
    with jmp.use_policy("mixed_bfloat16"):
        low = autocast(layer)
    with pytest.warns(UserWarning, match="autocast was given no policy, and computes in float32"):
        full = autocast(layer)
    with jmp.use_policy("mixed_float16"):
        assert product_dtypes(low, W, X) == ["bfloat16"]
        assert product_dtypes(full, W, X) == ["float32"]


def test_a_second_call_of_a_jitted_function_does_not_trace_again():
    traces = []

    @jax.jit
    @autocast(LOW)
    def counted(w, x):
        traces.append(None)
        return layer(w, x)

    for _ in range(3):
        counted(W, X)
    assert len(traces) == 1


def test_equal_policies_share_rewritten_bodies():
    inner = jax.jit(layer)

    def body(policy):
        program = trace(autocast(lambda w, x: inner(w, x), policy))(W, X)
        return program.eqns[0].params["jaxpr"]

    assert body(LOW) is body(jmp.Policy("float32", jnp.bfloat16, None))
    assert body(LOW) is not body("params=float32,compute=float16,output=none")


# Numbers of Python stay weak, as through `jax.jit`: they promote nothing that they meet later.

ONES, WEAK = jnp.ones((2, 2)), jnp.full((2, 2), 2.0)
NUMBERS = {
    "numbers": lambda w, x: (x, 2.0, 3, True, 1j),
    "weak matmul": lambda w, x: (w @ w, jnp.exp(w @ w), w @ x),
    "weak carry": lambda w, x: lax.scan(lambda c, r: (c * 0.5 + 1.0, (r @ x) * c), 1.0, x),
    "weak carry of a matmul": lambda w, x: lax.scan(lambda c, r: (c @ w, None), w, x)[0],
    "branches": lambda w, x: lax.cond(x[0, 0] > 0, lambda: 2.0, lambda: 3.0),
}


def weak_types_of(fun):
    return [(leaf.dtype.name, leaf.weak_type) for leaf in jax.tree.leaves(fun(WEAK, ONES))]


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_results_are_as_weak_as_under_jit(name):
    fun = NUMBERS[name]
    cast = autocast(fun, LOW)
    assert weak_types_of(cast) == weak_types_of(jax.jit(cast)) == weak_types_of(jax.jit(fun))


def test_a_number_of_python_is_a_factor_of_a_carry_in_half():
    fun = autocast(lambda x: (x, 2.0), LOW)
    turn = lambda carry, x: (carry * fun(x)[1], None)
    assert lax.scan(turn, jnp.ones((), jnp.bfloat16), ONES.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16
