"""A step is skipped by a branch or by a select, as the platform has it: both keep every bit, and take equal steps."""

import contextlib
import functools
import re
import types as python_types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from optimizer_registry import METHODS, OPTIMIZERS, bits, by_step, grads_of, start_all, step_all, types

import jmp_policy as jmp

# No public name chooses the form of another platform.
from jmp_policy.optim import _loss_scaled

FORMS = ("branch", "select")
SGD = functools.partial(optax.sgd, 0.1, momentum=0.9)
ADAMW = functools.partial(optax.adamw, 1e-2)


@contextlib.contextmanager
def forced(form):
    """Gives every step that is traced inside this form, whatever the platform. Optimizers must be made inside, too."""

    def platform_dependent(*operands, cpu, default, **others):
        return {"branch": cpu, "select": default}[form](*operands)

    ours = python_types.SimpleNamespace(**vars(lax) | {"platform_dependent": platform_dependent})
    with mock.patch.object(_loss_scaled, "lax", ours):
        yield


@pytest.fixture(params=FORMS)
def form(request):
    with forced(request.param):
        yield request.param


def _all_bits():
    """Every number of half precision, and random ones of float32: subnormals, infinities and nans with payloads."""
    halves, words = np.arange(2**16, dtype=np.uint16), np.random.default_rng(0).integers(2**32, size=2**16)
    words = np.concatenate([words, [0x80000000, 1, 0x7F800001, 0xFFC12345, 0x7F800000]]).astype(np.uint32)
    words.resize(2**16 + 8)
    return {"f32": words.view(np.float32), "bf16": halves.view(jnp.bfloat16), "f16": halves.view(np.float16)}


def _bad(params, number=np.nan):
    """Gradients like the parameters, all zero but for one number."""
    grads = jax.tree.map(np.zeros_like, params)
    grads["f32"].reshape(-1)[5] = number
    return jax.tree.map(jnp.asarray, grads)


def _state_of_any_bits(tx, params):
    """A state whose arrays hold any bits, too."""
    state = tx.init(jax.tree.map(jnp.asarray, params))
    fill = lambda x: jnp.asarray(np.resize(params["f32"], x.shape)) if x.dtype == jnp.float32 and x.ndim else x
    return state._replace(inner_state=jax.tree.map(fill, state.inner_state))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "wrap"),
    [
        (SGD, lambda step: step),
        (SGD, jax.jit),
        (lambda: optax.MultiSteps(SGD(), 2), functools.partial(jax.jit, donate_argnums=(1, 2))),
    ],
    ids=["eagerly", "jit", "donated"],
)
def test_a_skipped_step_keeps_every_bit_of_parameters_and_state(form, inner, wrap):
    params, tx = _all_bits(), jmp.optim.skip_nonfinite(inner())
    state = _state_of_any_bits(tx, params)
    before = bits((params, state.inner_state))
    new_params, new_state = wrap(functools.partial(by_step, tx))(_bad(params), state, jax.tree.map(jnp.array, params))
    assert bits((new_params, new_state.inner_state)) == before


@pytest.mark.slow
def test_under_vmap_each_example_decides_for_itself(form):
    params, tx = _all_bits(), jmp.optim.skip_nonfinite(SGD())
    if form == "branch":
        # JAX makes it a select of bfloat16, which XLA:CPU makes one of float32: a nan loses its payload.
        words = params["bf16"].view(np.uint16)
        params["bf16"] = np.where((words & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), words).view(jnp.bfloat16)
    twice = lambda tree: jax.tree.map(lambda x: np.stack([x, x]), tree)  # numpy's, which keeps every bit
    state = _state_of_any_bits(tx, params)
    grads = jax.tree.map(lambda bad, good: jnp.stack([bad, good]), _bad(params), _bad(params, 1.0))
    new_params, new_state = jax.jit(jax.vmap(functools.partial(by_step, tx)))(grads, twice(state), twice(params))
    one = lambda i: jax.tree.map(lambda x: np.asarray(x)[i], (new_params, new_state.inner_state))
    assert bits(one(0)) == bits((params, state.inner_state))
    assert bits(one(1)) != bits((params, state.inner_state))
    assert new_state.skipped_steps.tolist() == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "form"), [("step", "branch"), ("step", "select"), ("update", "branch")])
def test_no_optimizer_changes_anything_but_scale_and_counters_on_a_bad_step(way, form):
    """Law 14, in one program for all of them."""
    with forced(form):
        txs = {name: jmp.optim.loss_scaled(make(), jmp.DynamicLossScale()) for name, make in OPTIMIZERS.items()}
        carries, step = start_all(txs), jax.jit(functools.partial(step_all, txs, way))
        for seed, bad in enumerate([np.inf, None, np.nan, None, -np.inf]):
            after = step(carries, grads_of(seed, bad))
            for name in txs:
                (params, state), (new_params, new_state) = carries[name], after[name]
                kept = bits((new_params, new_state.inner_state)) == bits((params, state.inner_state))
                assert kept == (bad is not None), name
                assert types(after[name]) == types(carries[name]), name
            carries = after
    for name, (_, state) in carries.items():
        assert (int(state.skipped_steps), int(state.consecutive_skips)) == (3, 1), name
        assert float(state.loss_scale.loss_scale) == 2.0 ** (15 - 3), name


PARAMS = {"w": jnp.ones((8, 8))}


def _export(step, *args, platforms):
    return jax.export.export(jax.jit(step), platforms=platforms)(*args)


def _branches(text):
    """The cases that depend on a predicate: what lowering itself makes are cases of an integer constant."""
    predicates = re.findall(r"(%\w+) = stablehlo\.convert %\w+ : \(tensor<i1>\) -> tensor<i32>", text)
    return [name for name in re.findall(r'"stablehlo\.case"\((%\w+)\)', text) if name in predicates]


def _minimizing(tx):
    return jmp.optim.minimize(lambda params, x: jnp.sum((x @ params["w"].astype(x.dtype)).astype("float32") ** 2), tx)


@pytest.mark.parametrize(
    ("make_step", "inner", "dtype", "on_tpu"),
    [
        (lambda tx: tx.update, ADAMW, "float32", False),
        pytest.param(lambda tx: functools.partial(by_step, tx), ADAMW, "float32", False, marks=pytest.mark.slow),
        pytest.param(_minimizing, ADAMW, "float32", True, marks=pytest.mark.slow),
        *(
            pytest.param(lambda tx: functools.partial(by_step, tx), inner, "bfloat16", True, marks=pytest.mark.slow)
            for inner in (lambda: METHODS["split"](ADAMW()), lambda: METHODS["kahan"](ADAMW()))
        ),
    ],
    ids=["update", "step", "minimize", "split", "kahan"],
)
def test_each_platform_gets_its_form(make_step, inner, dtype, on_tpu):
    tx, params = jmp.optim.skip_nonfinite(inner()), jmp.cast_floating(PARAMS, dtype)
    args = (params, tx.init(params), params)
    if make_step is _minimizing:
        args = (params, tx.init(params), jnp.ones((2, 8), jnp.float16))
    for platform, branches in {"cpu": True, "cuda": False, "rocm": False, "tpu": on_tpu}.items():
        exported = _export(make_step(tx), *args, platforms=[platform])
        assert bool(_branches(exported.mlir_module())) == branches, platform


@pytest.mark.slow
def test_an_export_for_all_platforms_has_both_forms():
    tx = jmp.optim.skip_nonfinite(SGD())
    step, args = functools.partial(by_step, tx), (PARAMS, tx.init(PARAMS), PARAMS)
    exported = _export(step, *args, platforms=["cpu", "cuda", "tpu"])
    text = exported.mlir_module()
    assert len(_branches(text)) == 1
    assert len(re.findall(r"stablehlo\.select .*tensor<i1>, tensor<8x8xf32>", text)) == 2  # of w and of its trace
    assert bits(exported.call(*args)) == bits(jax.jit(step)(*args))


@pytest.mark.slow
def test_a_step_that_may_be_skipped_has_derivatives():
    """All forms are traced, whatever the platform."""
    tx, params = jmp.optim.skip_nonfinite(SGD()), {"w": jnp.ones((2, 3))}

    def loss(rate):
        scaled = {"w": rate * jnp.full((2, 3), 2.0)}
        return jnp.sum(jmp.optim.step(tx, scaled, tx.init(params), params)[0]["w"])

    np.testing.assert_allclose(jax.grad(loss)(0.5), -0.1 * 2.0 * 6, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(loss, (0.5,), (1.0,))[1], -0.1 * 2.0 * 6, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(jnp.ones(2)), [-1.2, -1.2], rtol=1e-6)
