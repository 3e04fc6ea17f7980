"""Errors in the user's code: their tracebacks have the frames that they would have without a policy."""

import io
import pdb
import traceback

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp
import jmp_policy.nnx
from jmp_policy import contrib, numerics

MIXED = "p=f32,c=bf16,o=f32"
X = jnp.ones((2, 4))


def fail(x):
    wrong = x.shape
    raise ZeroDivisionError(wrong)


class Inner(nnx.Module):
    def __call__(self, x):
        return fail(x)


class Outer(nnx.Module):
    def __init__(self):
        self.inner = Inner()

    def __call__(self, x):
        return self.inner(x)


class Unmakable(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        fail(X)


class LinenInner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return fail(nn.Dense(4)(x))


class LinenOuter(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenInner()(x)

    def encode(self, x):
        return fail(x)


def loss_fn(params, x):
    return fail(x * params)


NO_SCALE = jmp.NoOpLossScale()
CALLS = {
    "a function": lambda: jmp.with_policy(fail, MIXED)(X),
    "a function in full precision": lambda: jmp.force_full_precision(fail)(X),
    "an nnx module": lambda: jmp.with_policy(Outer(), MIXED)(X),
    "an nnx module in jit": lambda: nnx.jit(lambda model, x: model(x))(jmp.with_policy(Outer(), MIXED), X),
    "an nnx class": lambda: jmp.with_policy(Unmakable, MIXED)(nnx.Rngs(0)),
    "gradients of nnx": lambda: jmp.nnx.grad(lambda model: model(X), loss_scale=jmp.StaticLossScale(2.0))(
        jmp.with_policy(Outer(), MIXED)
    ),
    "a linen module": lambda: jmp.with_policy(LinenOuter(), MIXED).init(jax.random.key(0), X),
    "a method of a linen module": lambda: jmp.with_policy(LinenOuter(), MIXED).apply({}, X, method="encode"),
    "a linen module with a rule": lambda: jmp.with_policy(
        LinenOuter(), jmp.PolicyMap({"LinenInner_0": "float32"}, MIXED)
    ).init(jax.random.key(0), X),
    "autocast": lambda: jmp.autocast(fail, MIXED)(X),
    "value_and_grad": lambda: jmp.value_and_grad(loss_fn, loss_scale=NO_SCALE)(1.0, X),
    "grad": lambda: jmp.grad(loss_fn, loss_scale=jmp.StaticLossScale(2.0))(1.0, X),
    "minimize": lambda: jmp.optim.minimize(loss_fn, optax.sgd(0.1))(jnp.ones(4), (), X),
    "explain": lambda: jmp.explain(jmp.with_policy(Outer(), MIXED), X),
    "audit": lambda: numerics.audit(fail)(X),
    "collect": lambda: numerics.collect(fail)(X),
    "first_nonfinite": lambda: numerics.first_nonfinite(fail)(X),
    "certify": lambda: contrib.certify(fail, (-1.0, 1.0))(X),
    "diverge": lambda: contrib.diverge(fail, fail)(X),
    "record": lambda: contrib.record(fail)(X),
    "parity": lambda: contrib.parity(lambda params, tokens: fail(params), {})(X, [[0, 1]]),
    "collectives": lambda: numerics.collectives(fail)(X),
    "calibrate": lambda: jmp.quant.calibrate(jmp.with_policy(Outer(), MIXED), [X]),
}


def list_frames(call, error=ZeroDivisionError):
    with pytest.raises(error) as caught:
        call()
    return [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]


def list_own(frames):
    return [frame for frame in frames if frame.f_globals["__name__"].startswith("jmp_policy")]


@pytest.mark.parametrize("name", CALLS)
def test_the_frames_of_the_package_leave_the_traceback_of_an_error_in_the_users_code(name):
    frames = list_frames(CALLS[name])
    assert len(list_own(frames)) == 0
    assert frames[-1].f_code.co_name == "fail"


def test_the_traceback_of_a_model_has_the_frames_that_it_has_without_a_policy():
    names = lambda call: [frame.f_code.co_name for frame in list_frames(call)]
    assert names(lambda: jmp.with_policy(Outer(), MIXED)(X)) == names(lambda: Outer()(X))
    init = lambda model: model.init(jax.random.key(0), X)
    assert names(lambda: init(jmp.with_policy(LinenOuter(), MIXED))) == names(lambda: init(LinenOuter()))


def test_the_frame_of_the_package_that_raised_an_error_stays():
    frames = list_frames(lambda: jmp.with_policy(lambda x: (x for _ in "ab"), MIXED)(X), TypeError)
    assert list_own(frames) == frames[-1:]


def test_all_frames_stay_with_the_traceback_filtering_of_jax_off():
    before = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        assert len(list_own(list_frames(CALLS["an nnx module"]))) > 2
    finally:
        jax.config.update("jax_traceback_filtering", before)


def test_a_debugger_walks_the_frames_of_the_users_code():
    with pytest.raises(ZeroDivisionError) as caught:
        CALLS["an nnx module"]()
    out = io.StringIO()
    debugger = pdb.Pdb(
        stdin=io.StringIO("p wrong\nup\np type(self).__name__\nup\np type(self).__name__\nq\n"), stdout=out
    )
    debugger.reset()
    debugger.interaction(None, caught.value.__traceback__)
    assert [line for line in ("(2, 4)", "'Inner'", "'Outer'") if line not in out.getvalue()] == []


def test_endless_recursion_under_a_policy_is_a_recursion_error():
    def call_itself(x):
        return again(x)

    again = jmp.with_policy(call_itself, MIXED)
    with pytest.raises(RecursionError):
        again(X)
