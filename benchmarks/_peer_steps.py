"""The train step of a `Problem` by hand, with jmp_policy and with each peer on JAX, as its documentation writes it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jmp as deepmind_jmp
import optax

import jmp_policy as jmp
from benchmarks import _peers
from benchmarks._by_hand import init_by_hand, step_by_hand
from benchmarks._loss import cross_entropy, cross_entropy_of
from benchmarks._ours import init_linen, step_linen
from benchmarks._peer_problems import Problem
from benchmarks._programs import Program

TX = optax.adamw(1e-3)
SCALE = 2.0**15

BY_HAND, OURS, KERAS, TORCH = "by hand", "jmp_policy", "Keras 3 on JAX", "PyTorch AMP"

UNSCALED = "by hand, no scale, no check"
KERAS_UNSCALED = f"{KERAS}, no scale, no check"
COPIES = "by hand, gradients of copies"
MINIMIZE, SKIPPING = f"{OURS}, `optim.minimize`", f"{OURS}, `skip_nonfinite`"
MPX, IF_FINITE = "mixed-precision-for-jax", "optax.apply_if_finite, no scale"

Make = Callable[[Problem], Program]


def steps(dtype: str) -> dict[str, Make]:
    """The contestants that compile a step on JAX, by name; the first is what others are compared with.

    Args:
      dtype: "float16", which is trained with a loss scale, "bfloat16" or "float32".
    """
    return {"float16": _float16, "bfloat16": _bfloat16, "float32": _float32}[dtype]()


def _float16() -> dict[str, Make]:
    half = jnp.float16
    return {
        BY_HAND: lambda problem: scaled_by_hand(problem, half),
        COPIES: lambda problem: scaled_by_hand(problem, half, half),
        UNSCALED: lambda problem: unscaled(problem, half),
        MINIMIZE: lambda problem: minimized(problem, "mixed_float16", _scaled()),
        f"{OURS}, `TrainState`": lambda problem: trained(problem, "mixed_float16"),
        "jmp": lambda problem: with_jmp(problem, half),
        "flax DynamicScale": lambda problem: with_dynamic_scale(problem, half),
        MPX: lambda problem: with_mpx(problem, half),
        IF_FINITE: lambda problem: unscaled(problem, half, _if_finite()),
        KERAS: lambda problem: with_keras(problem, "mixed_float16"),
        KERAS_UNSCALED: lambda problem: with_keras(problem, "mixed_float16", scaled=False),
    }


def _bfloat16() -> dict[str, Make]:
    half = jnp.bfloat16
    skipping = jmp.optim.skip_nonfinite(TX)
    return {
        BY_HAND: lambda problem: unscaled(problem, half),
        "by hand, `lax.cond`": lambda problem: scaled_by_hand(problem, half, scaled=False),
        MINIMIZE: lambda problem: minimized(problem, "mixed_bfloat16", TX),
        SKIPPING: lambda problem: minimized(problem, "mixed_bfloat16", skipping),
        "jmp": lambda problem: with_jmp(problem, half),
        MPX: lambda problem: with_mpx(problem, half),
        "optax.apply_if_finite": lambda problem: unscaled(problem, half, _if_finite()),
        KERAS: lambda problem: with_keras(problem, "mixed_bfloat16"),
    }


def _float32() -> dict[str, Make]:
    return {
        BY_HAND: lambda problem: unscaled(problem, jnp.float32),
        KERAS: lambda problem: with_keras(problem, "float32"),
    }


def scaled_by_hand(problem: Problem, dtype: Any, copies: Any = None, scaled: bool = True) -> Program:
    """By hand, with a `lax.cond`; the loss scaled or not; the gradients of the parameters, or of half copies."""
    step = step_by_hand(cross_entropy_of(problem.apply(dtype)), TX, scaled, copies)
    return make_program(problem, step, lambda params: init_by_hand(params, {}, TX))


def unscaled(problem: Problem, dtype: Any, tx: optax.GradientTransformation = TX) -> Program:
    """By hand, without a loss scale; the optimizer decides about skipped steps."""
    create = lambda params: _peers.init_plain(params, {}, tx)
    return make_program(problem, _peers.step_unscaled(problem.apply(dtype)), create)


def minimized(problem: Problem, policy: str | jmp.Policy, tx: optax.GradientTransformation) -> Program:
    """With `with_policy` and `optim.minimize`."""
    model = jmp.with_policy(problem.module(None), policy)
    loss_fn = lambda params, batch: cross_entropy(model.apply({"params": params}, batch[0]), batch[1])
    minimizing_step = jmp.optim.minimize(loss_fn, tx)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state, loss = minimizing_step(*state, batch)
        return (params, opt_state), loss

    return make_program(problem, step, lambda params: (params, tx.init(params)))


def trained(problem: Problem, policy: str) -> Program:
    """With `with_policy` and a train state, whose gradients are true ones."""
    model = jmp.with_policy(problem.module(None), policy)

    def create(params: Any) -> Any:
        state = init_linen(model, params, {}, TX, jmp.DynamicLossScale(SCALE))
        return state.replace(step=jnp.zeros((), jnp.int32))

    return make_program(problem, step_linen, create)


def with_jmp(problem: Problem, dtype: Any) -> Program:
    """With DeepMind's jmp, which casts and selects whatever the dtype."""
    policy = deepmind_jmp.Policy(jnp.float32, dtype, dtype)
    create = lambda params: _peers.init_jmp(params, {}, TX, scaled=dtype == jnp.float16, scale=SCALE)
    return make_program(problem, _peers.step_with_jmp(problem.apply(None), TX, policy), create)


def with_dynamic_scale(problem: Problem, dtype: Any) -> Program:
    """With Flax's DynamicScale."""
    create = lambda params: _peers.init_dynamic_scale(params, {}, TX, SCALE)
    return make_program(problem, _peers.step_with_dynamic_scale(problem.apply(dtype)), create)


def with_mpx(problem: Problem, dtype: Any) -> Program:
    """With mixed-precision-for-JAX, which scales the loss whatever the dtype. Raises ImportError without it."""
    plain_step = _peers.step_with_mpx(problem.apply(dtype), TX)

    def step(state: Any, batch: Any) -> Any:
        with _mpx_computes_in(dtype):  # while it is traced
            return plain_step(state, batch)

    return make_program(problem, step, lambda params: _peers.init_mpx(params, {}, TX, SCALE))


def with_keras(problem: Problem, policy: str, scaled: bool = True) -> Program:
    """With Keras 3 on JAX, which scales the loss of a policy named mixed_float16. Raises ImportError without it."""
    from benchmarks import _peer_keras

    model = _peer_keras.GPT_OR_MLP[problem.name](problem.sizes, policy)
    trainer = _peer_keras.trainer(model, scale=SCALE if scaled and policy == "mixed_float16" else None)
    return make_program(problem, trainer.step, trainer.init)


def _scaled() -> optax.GradientTransformation:
    return jmp.optim.loss_scaled(TX, jmp.DynamicLossScale(SCALE))


def _if_finite() -> optax.GradientTransformation:
    return optax.apply_if_finite(TX, max_consecutive_errors=5)


@contextlib.contextmanager
def _mpx_computes_in(dtype: Any) -> Iterator[None]:
    import mpx

    before = mpx.half_precision_datatype()
    mpx.set_half_precision_datatype(dtype)
    try:
        yield
    finally:
        mpx.set_half_precision_datatype(before)


def make_program(problem: Problem, step: Callable[..., Any], create: Callable[[Any], Any]) -> Program:
    """The jitted step with its state, or the shape of its state; `create` makes it of the parameters."""
    is_shape = isinstance(jax.tree.leaves(problem.params)[0], jax.ShapeDtypeStruct)
    if is_shape:
        state = jax.eval_shape(create, problem.params)
    else:
        state = create(jax.tree.map(jnp.copy, problem.params))  # a step is given its state to overwrite
    return Program(jax.jit(step, donate_argnums=0), (state, problem.batches[0]))
