"""Running a program: results are arrays, names and lines stay, eager calls compile once and free memory."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from meshes import find_devices
from test_rewriter import Copying
from test_transparency import BFLOAT16, assert_near
from zoo import ZOO

# The package `_jaxpr` has no public names: what it computes is seen outside only through slower programs.
from jmp_policy._jaxpr import AbstractValue, Rewriter, _evaluate, float_dtype, run, trace
from jmp_policy.autocast import autocast
from jmp_policy.numerics import first_nonfinite

X, W = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4), jnp.linspace(0.0, 1.0, 16).reshape(4, 4)


def layer(x, w):
    return jax.nn.silu(jax.nn.relu(x @ w) - x.mean()), None


def network(x, w):
    with jax.named_scope("outer"):
        x = jnp.tanh(x @ w)
        with jax.named_scope("inner"):
            x, _ = layer(x, w)
    return jax.checkpoint(lambda x: jnp.exp(x @ w))(lax.scan(layer, x, w[None])[0])


def test_results_that_are_numbers_in_the_program_are_arrays():
    results = autocast(lambda x: (1.0, 3, True, np.float32(2), x), BFLOAT16)(X)
    assert [(r.dtype.name, r.shape) for r in results[:4]] == [
        ("float32", ()), ("int32", ()), ("bool", ()), ("float32", ()),
    ]  # fmt: skip
    assert [r.item() for r in results[:4]] == [1.0, 3, True, 2.0]
    assert results[4] is X


@pytest.mark.slow
def test_names_and_lines_stay():
    plain, copy, cast = (locations(fun) for fun in (network, copied(network), autocast(network, BFLOAT16)))
    assert len(plain) > 20
    assert plain <= copy
    assert len(in_this_file(plain)) >= 5
    assert in_this_file(plain) <= in_this_file(cast)


def copied(fun):
    """The function, run equation by equation."""

    def run_copy(*args):
        traced = trace(fun, args, {})
        kinds = [AbstractValue(float_dtype(var)) for var in traced.program.jaxpr.invars]
        return run(traced, Rewriter(Copying()).rewrite(traced.program, kinds, None).program)

    return run_copy


def locations(fun):
    """The name stacks of the operations of a program and its derivative, and the lines that they come of."""
    text = jax.jit(jax.grad(lambda x: fun(x, W).sum())).lower(X).as_text(debug_info=True)
    found = re.findall(r'"([^"]*[/\\][^"]*"(?::\d+:\d+)?)', text)
    return {location.replace("\\\\", "\\") for location in found}  # as MLIR writes the paths of Windows


def in_this_file(locations):
    return {location for location in locations if location.startswith(__file__)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["psum_unchecked", "reference_inside", "shard_map_on_an_explicit_mesh", "typed_key_as_a_carry"],
)
def test_eager_calls_give_what_jitted_ones_do(name):
    animal = ZOO[name]
    with animal.context():
        cast = autocast(animal.fun, BFLOAT16)
        assert_near(cast(*animal.args), jax.jit(cast)(*animal.args), error=0.01)


def without_a_loop(x, w):  # the eager gradient of a loop compiles each time, in JAX itself
    return layer(jax.jit(layer)(x, w)[0], w)[0].sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fun", [autocast(network, BFLOAT16), jax.grad(autocast(without_a_loop, BFLOAT16))], ids=["value", "gradient"]
)
def test_a_second_eager_call_compiles_nothing(fun, caplog):
    fun(X, W)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        fun(X, W)
    assert [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling")] == []


def test_equations_inside_jit_are_bound_as_outside(monkeypatch):
    program = jax.make_jaxpr(network)(X, W)
    run = lambda *args: _evaluate.evaluate(program, *args)
    bound = jax.make_jaxpr(lambda *args: run(*args))(X, W)
    monkeypatch.setattr(_evaluate, "_STAGED", None)
    shared = jax.make_jaxpr(lambda *args: run(*args))(X, W)
    assert str(bound) == str(shared)
    assert list(map(name_and_line, bound.eqns)) == list(map(name_and_line, shared.eqns))


def name_and_line(eqn):
    frames = eqn.source_info.traceback.raw_frames()
    return str(eqn.source_info.name_stack), [code.co_name for code in frames[0] if code.co_filename == __file__]


def test_the_gradient_of_a_function_shares_the_derivatives_of_equal_equations():
    def deep(x):
        for _ in range(10):
            x = jnp.tanh(x @ W) + x
        return x.sum()

    _evaluate._CALLS.clear()
    jax.make_jaxpr(jax.grad(autocast(deep, BFLOAT16)))(X)
    assert 0 < len(_evaluate._CALLS) < 10


def test_eager_calls_free_what_is_done_with():
    alive = []
    count = lambda: alive.append(sum(array.shape == (1, 7, 1001) for array in jax.live_arrays()))

    def chain(x):
        for _ in range(6):
            x = x * 2
            jax.debug.callback(count)
        return x

    autocast(chain, BFLOAT16)(jnp.ones((1, 7, 1001)))
    jax.effects_barrier()
    assert len(alive) == 6
    assert max(alive) <= 3  # the argument, what the last equation read, what it made


@pytest.mark.slow
def test_equal_equations_are_told_from_those_that_differ_in_little():
    results = autocast(lambda x, y: (x * 0.0, x * -0.0, x * x, x * y), BFLOAT16)(jnp.float32(2), jnp.float32(3))
    assert [str(result) for result in results] == ["0.0", "-0.0", "4.0", "6.0"]


def test_arrays_are_moved_to_the_device_of_the_author():
    device = find_devices(2)[1]
    assert autocast(lambda x: jax.device_put(x, device) * 2, BFLOAT16)(X).devices() == {device}


@pytest.mark.parametrize("wrap", [first_nonfinite, lambda f: jax.jit(first_nonfinite(f)), autocast(BFLOAT16)])
def test_what_makes_a_nan_is_named_under_jax_debug_nans_in_a_public_error(wrap):
    fun = wrap(jax.jit(lambda x: jnp.log(x - 2)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan.*log"):
        fun(X)


@pytest.mark.slow
def test_references_of_the_caller_are_written():
    def write(ref, x):
        ref[...] = jnp.tanh(x @ W)

    for transform in lambda f: f, jax.jit:
        ref = jax.new_ref(X)
        transform(autocast(write, BFLOAT16))(ref, X)
        np.testing.assert_allclose(ref[...], jnp.tanh(X @ W), atol=0.02)
