"""Measures what the package costs on the host, in calls of functions, over the same code without it.

Run from the root of the repository:

    python -m benchmarks.host [--quick]
"""

import contextlib
import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx

import jmp_policy as jmp
from benchmarks import _peer_problems, _peer_steps
from benchmarks._measure import count_calls
from benchmarks._quant_contestants import GPT, LAYERS, SCHEMES, gpt_params, ours, with_qwix
from benchmarks._results import ResultTable, run_alone
from benchmarks.autocast import unrolled
from examples.gpt.model import GPTConfig

ADAMW = optax.adamw(1e-3)
POLICY = jmp.get_policy("params=float32,compute=bfloat16,output=none")
X = jnp.ones((2, 4))
RULES = {
    "a map of 10 rules": {f"layers/{i}": POLICY for i in range(10)},
    "a map of 64 rules": {f"layers/{i}": POLICY for i in range(64)},
    "a map of 200 rules that match nothing": {f"none/{i}": POLICY for i in range(200)},
}
OBSERVERS = {
    "numerics.audit": lambda fun: jmp.numerics.audit(fun)(X),
    "numerics.collect": lambda fun: jax.eval_shape(jmp.numerics.collect(fun), X),
    "numerics.first_nonfinite": lambda fun: jax.eval_shape(jmp.numerics.first_nonfinite(fun), X),
}


def over(ours: Callable[[], Any], theirs: Callable[[], Any], **options: Any) -> str:
    """Returns the calls of functions of ours over theirs, after a first run of both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rules that match nothing
        ours(), theirs()
        return f"{count_calls(ours, **options) / count_calls(theirs, **options):.2f}"


class LinenChain(nn.Module):
    """So many layers one after the other."""

    layers: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = nn.Dense(4, dtype=self.dtype, name=f"layers/{i}")(x)
        return x


class NnxChain(nnx.Module):
    """The same in nnx; its kernels are zeros, because drawing them would take most of the time."""

    def __init__(self, layers: int, dtype: Any = None):
        make = functools.partial(nnx.Linear, 4, 4, kernel_init=nnx.initializers.zeros, dtype=dtype, rngs=nnx.Rngs(0))
        self.layers = nnx.List([make() for _ in range(layers)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def trace_linen(rules: dict[str, Any], layers: int) -> str:
    """Traces a chain of linen layers under a map, over the same with `dtype=` in each layer."""
    by_hand = LinenChain(layers, POLICY.compute_dtype)
    mapped = jmp.with_policy(LinenChain(layers), jmp.PolicyMap(rules, POLICY))
    variables = jax.eval_shape(by_hand.init, jax.random.key(0), X)
    return over(*(lambda model=model: jax.make_jaxpr(model.apply)(variables, X) for model in (mapped, by_hand)))


def trace_nnx(rules: dict[str, Any], layers: int) -> str:
    """Traces a chain of nnx layers, from its constructor on, as `trace_linen` does."""
    make = lambda: jmp.with_policy(NnxChain(layers), jmp.PolicyMap(rules, POLICY))
    makers = make, lambda: NnxChain(layers, POLICY.compute_dtype)
    return over(*(lambda make=make: jax.make_jaxpr(lambda x: make()(x))(X) for make in makers))


CHAINS = {"linen": trace_linen, "nnx": trace_nnx}


def trace_autocast(layers: int, transform: Callable[..., Any] = lambda fun: fun) -> str:
    """Traces plain JAX under `autocast`, over the same without."""
    loss, args = unrolled(layers)
    cast = jmp.autocast(loss, "mixed_bfloat16")
    ours, theirs = (lambda fun=fun: jax.make_jaxpr(lambda *args: transform(fun)(*args))(*args) for fun in (cast, loss))
    return over(ours, theirs)


def lower_minimize(layers: int) -> str:
    """Lowers a float16 step of the example's GPT, over a scaled step with a `lax.cond` by hand."""
    problem, policy = _peer_problems.gpt(GPTConfig(depth=layers), 1), jmp.get_policy("mixed_float16")
    scaled = jmp.optim.loss_scaled(ADAMW, jmp.DynamicLossScale(_peer_steps.SCALE))
    mine = _peer_steps.minimized(problem, policy, scaled)
    return over(mine.lower, _peer_steps.scaled_by_hand(problem, policy.compute_dtype).lower)


def lower_small_state(leaves: int) -> str:
    """Lowers an update of AdamW with moments in 8 bits, over float32 ones."""
    shapes = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(leaves)}

    def lower(tx: optax.GradientTransformation) -> Callable[[], Any]:
        state = jax.eval_shape(tx.init, shapes)
        return lambda: jax.jit(lambda *args: tx.update(*args)).lower(shapes, state, shapes)

    return over(lower(jmp.optim.quantize_state(ADAMW)), lower(ADAMW))


def dispatch(tx: optax.GradientTransformation) -> str:
    """Calls a compiled function that takes and returns the state of an optimizer."""
    state, step = tx.init({"w": jnp.ones(4)}), jax.jit(lambda state: state)
    step(state)
    return str(count_calls(lambda: step(state), clear=False) - 1)


def run_nnx(transform: Callable[..., Any]) -> str:
    """Calls an nnx model of four layers under a policy, over the same with `dtype=` in each layer and a cast input."""
    by_hand = NnxChain(4, POLICY.compute_dtype)
    call = transform(lambda model, x: model(x))
    mapped = jmp.with_policy(NnxChain(4), POLICY)
    return over(lambda: call(mapped, X), lambda: call(by_hand, X.astype(jnp.bfloat16)), clear=False)


def run_linen() -> str:
    """Calls a linen model of four layers outside of `jit`, as `run_nnx` does."""
    by_hand, mapped = LinenChain(4, POLICY.compute_dtype), jmp.with_policy(LinenChain(4), POLICY)
    variables = by_hand.init(jax.random.key(0), X)
    cast_and_call = lambda: by_hand.apply(variables, X.astype(jnp.bfloat16))
    return over(lambda: mapped.apply(variables, X), cast_and_call, clear=False)


def quantize() -> str:
    """Quantizes the weights of the example's GPT to int8, over qwix."""
    config, scheme = GPTConfig(), SCHEMES[0]
    params = gpt_params(config)
    mine, theirs = ours(config, scheme.map).quantize, with_qwix(config, scheme.rule).quantize
    return over(lambda: mine(params), lambda: theirs(params), clear=False)


def count_held(observe: Callable[..., Any]) -> str:
    """Counts the Python objects that each further trace of a new function leaves behind."""
    counts = []
    for _ in range(8):
        observe(lambda x: jnp.tanh(jnp.linalg.norm(x)))
        gc.collect()
        counts.append(len(gc.get_objects()))
    return str(max(0, round((counts[-1] - counts[2]) / 5)))


def calibrate(depth: int) -> str:
    """Returns the process time of `gptq` for each matrix, in milliseconds."""
    config = GPTConfig(width=32, depth=depth, heads=2, context=16)
    model = jmp.with_policy(GPT(config), jmp.PolicyMap({LAYERS: "int4/32(min_size=0)_from_float32"}, "float32"))
    batches = [np.random.default_rng(i).integers(0, 256, (2, 16)) for i in range(4)]
    times, params = [], gpt_params(config)
    for _ in range(2):
        start = time.process_time()
        jmp.contrib.gptq(model, batches, variables={"params": params}, progress=False)
        times.append(time.process_time() - start)
    return f"{1000 * min(times) / (4 * depth):.0f}"


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the tables of growth, and of single calls."""
    layers = (4, 16) if quick else (4, 16, 64, 256)
    rows = [
        [f"{name}, {api}", *(trace(rules, n) for n in layers)]
        for api, trace in CHAINS.items()
        for name, rules in RULES.items()
    ]
    rows += [["autocast, plain JAX", *map(trace_autocast, layers)]]
    rows += [["autocast, its gradient", *(trace_autocast(n, jax.value_and_grad) for n in layers)]]
    header = ["traced", *(f"{n} layers" for n in layers)]
    yield ResultTable.of("layers", "Calls to trace, over the same code without the package", header, rows)
    leaves = (3, 10) if quick else (10, 100, 1000, 3000)
    header, rows = [f"{n:,} parameters" for n in leaves], [["quantize_state", *map(lower_small_state, leaves)]]
    title = "Calls to trace and lower an update of AdamW in 8 bits, over float32"
    yield ResultTable.of("parameters", title, ["update", *header], rows)
    depths = (1,) if quick else (2, 4, 8)
    rows = [["optim.minimize, calls to lower, over by hand", *map(lower_minimize, depths)]]
    rows += [["contrib.gptq, ms per matrix (time)", *map(calibrate, depths)]]
    header = [f"depth {depth}" for depth in depths]
    yield ResultTable.of("depth", "The example's GPT", ["", *header], rows, header)
    states = {"AdamW": ADAMW, "loss_scaled(AdamW)": jmp.optim.loss_scaled(ADAMW, jmp.DynamicLossScale())}
    states["skip_nonfinite(AdamW)"] = jmp.optim.skip_nonfinite(ADAMW)
    rows = [[f"calls to dispatch a jitted step, state of {name}", dispatch(tx)] for name, tx in states.items()]
    rows += [["linen model outside of jit, over by hand", run_linen()]]
    rows += [["nnx model outside of jit, over by hand", run_nnx(lambda fun: fun)]]
    rows += [["nnx model in nnx.jit, dispatch, over by hand", run_nnx(nnx.jit)]]
    rows += [[f"objects that a trace of {name} leaves behind", count_held(fun)] for name, fun in OBSERVERS.items()]
    with contextlib.suppress(ImportError):
        rows += [["quant.quantize, calls, over qwix", quantize()]]
    yield ResultTable.of("calls", "Single calls", ["", "value"], rows)


if __name__ == "__main__":
    run_alone(__doc__, tables)
