"""Time that a policy adds to the tracing of a model of 1,000 submodules.

Run from the root of the repository:

    python -m benchmarks.many_modules [--quick]

Time is process time, the least of interleaved repeats with JAX's caches cleared; calls count Python and C
functions at the first tracing, and the same on every run.
"""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn, nnx

import jmp_policy as jmp
from benchmarks._measure import seconds
from benchmarks._results import ResultTable, run_alone

SHAPES = {"flat": (1000,), "nested": (10, 10, 10)}
QUICK_SHAPES = {"flat": (30,), "nested": (3, 3, 3)}
POLICY = jmp.get_policy("params=float32,compute=bfloat16,output=none")
X = jnp.ones((2, 4))


class LinenStack(nn.Module):
    """Layers in stacks of stacks: sizes of `(10, 10)` make a hundred."""

    sizes: tuple[int, ...]
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for i in range(self.sizes[0]):
            if len(self.sizes) > 1:
                x = LinenStack(self.sizes[1:], self.dtype, name=f"stack_{i}")(x)
            else:
                x = nn.Dense(4, dtype=self.dtype, name=f"layer_{i}")(x)
        return x


class NnxStack(nnx.Module):
    """The same in nnx; its kernels are zeros, because drawing them would take most of the time."""

    def __init__(self, sizes: tuple[int, ...], dtype: Any = None, *, rngs: nnx.Rngs):
        layer = functools.partial(nnx.Linear, 4, 4, kernel_init=nnx.initializers.zeros)
        make = functools.partial(NnxStack, sizes[1:]) if len(sizes) > 1 else layer
        self.stack = nnx.List([make(dtype=dtype, rngs=rngs) for _ in range(sizes[0])])

    def __call__(self, x):
        for inner in self.stack:
            x = inner(x)
        return x


class Contestants(NamedTuple):
    """Four ways to trace one thing: without a policy, with the dtypes by hand, with a policy, with a map."""

    plain: Callable[[], Any]
    by_hand: Callable[[], Any]
    policy: Callable[[], Any]
    map: Callable[[], Any]


def contestants(shapes: dict[str, tuple[int, ...]]) -> dict[tuple[str, str, str], Contestants]:
    """Returns the traced functions, by API, shape of the model, and transformation."""
    found = {}
    for shape, sizes in shapes.items():
        init, apply = _linen(sizes)
        found |= {("linen", shape, "init"): init, ("linen", shape, "apply"): apply}
        make, call = _nnx(sizes)
        found |= {("nnx", shape, "constructor, policy and call"): make, ("nnx", shape, "call"): call}
    return found


def _linen(sizes: tuple[int, ...]) -> tuple[Contestants, Contestants]:
    models = _models(functools.partial(LinenStack, sizes), ten_rules(sizes, "", "stack_"))
    variables = jax.eval_shape(LinenStack(sizes).init, jax.random.key(0), X)
    init = [lambda model=model: jax.eval_shape(model().init, jax.random.key(0), X) for model in models]
    apply = [lambda model=model: jax.make_jaxpr(model().apply)(variables, X) for model in models]
    return Contestants(*init), Contestants(*apply)


def _nnx(sizes: tuple[int, ...]) -> tuple[Contestants, Contestants]:
    models = _models(lambda **dtype: NnxStack(sizes, **dtype, rngs=nnx.Rngs(0)), ten_rules(sizes, "stack/", "stack/"))
    make = [lambda model=model: jax.make_jaxpr(model())(X) for model in models]
    made = [model() for model in models]
    call = [lambda model=model: jax.make_jaxpr(lambda x: model(x))(X) for model in made]
    return Contestants(*make), Contestants(*call)


def _models(make: Callable[..., Any], rules: jmp.PolicyMap) -> list[Callable[[], Any]]:
    by_hand = functools.partial(make, dtype=POLICY.compute_dtype)
    return [make, by_hand, lambda: jmp.with_policy(make(), POLICY), lambda: jmp.with_policy(make(), rules)]


def ten_rules(sizes: tuple[int, ...], layer: str, stack: str) -> jmp.PolicyMap:
    """A map that says the same as the policy: nine of its rules name a layer, and one has a pattern for all."""
    inner = f"/{stack}0" * (len(sizes) - 2) + f"/{layer or 'layer_'}0" if len(sizes) > 1 else ""
    outer = stack if inner else layer or "layer_"
    count = min(9, sizes[0] - 1)
    return jmp.PolicyMap({**{f"{outer}{i}{inner}": POLICY for i in range(count)}, f"{outer}{count}.*": POLICY}, POLICY)


def step_traces(leaves: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Returns functions that trace a step of AdamW with a check for non-finite gradients, and without one."""
    shapes = {f"w{i}": jax.ShapeDtypeStruct((4,), jnp.float32) for i in range(leaves)}
    adamw = optax.adamw(1e-3)
    skipping, scaled = jmp.optim.skip_nonfinite(adamw), jmp.optim.loss_scaled(adamw, jmp.DynamicLossScale())

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = adamw.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def minimize(dtype: Any, params: Any, state: Any, grads: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda params: _loss(params, dtype))(params)
        return *update(params, state, grads), loss

    def trace(step: Callable[..., Any], tx: Any) -> None:
        jax.make_jaxpr(lambda *args: step(*args))(shapes, jax.eval_shape(tx.init, shapes), shapes)

    def minimize_scaled(dtype: Any, params: Any, state: Any, grads: Any) -> Any:
        return jmp.optim.minimize(lambda params: _loss(params, dtype), scaled)(params, state)

    step = lambda params, state, grads: jmp.optim.step(skipping, grads, state, params)
    pairs = {"optim.step, skip_nonfinite": (functools.partial(trace, step, skipping), update)}
    for dtype in ("float32", "bfloat16"):
        ours, plain = (functools.partial(fun, dtype) for fun in (minimize_scaled, minimize))
        pairs[f"optim.minimize, loss_scaled, {dtype}"] = functools.partial(trace, ours, scaled), plain
    return {name: (ours, functools.partial(trace, plain, adamw)) for name, (ours, plain) in pairs.items()}


def _loss(params: Any, dtype: Any) -> jax.Array:
    return sum(jnp.sum((leaf.astype(dtype) * 2).astype(jnp.float32)) for leaf in params.values())


def count_calls(trace: Callable[[], Any], *, clear: bool = True) -> int:
    """The number of functions, of Python and of C, that are called; by default with JAX's caches cleared."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    if clear:
        jax.clear_caches()
    gc.collect()
    gc.disable()  # finalizers are functions as well, and nobody knows when they run
    sys.setprofile(count)
    try:
        trace()
    finally:
        sys.setprofile(None)
        gc.enable()
    return sum(counts.values())


def tables(quick: bool) -> Iterator[ResultTable]:
    """Returns the time to trace with a policy and with a map."""
    for traces in contestants(QUICK_SHAPES).values():  # the first tracing imports modules and fills caches
        [trace() for trace in traces]
    rows = []
    for names, traces in contestants({"nested": QUICK_SHAPES["nested"]} if quick else SHAPES).items():
        calls = Contestants(*map(count_calls, traces))
        times = Contestants(*seconds(traces, 1 if quick else 3))
        for name, mine in (("policy", 2), ("map of 10 rules", 3)):
            ratios = [cost[mine] / other for cost in (calls, times) for other in (cost.plain, cost.by_hand)]
            rows.append([*names, name, *(f"{ratio:.2f}" for ratio in ratios), f"{times.plain:.2f}"])
            print(rows[-1], file=sys.stderr, flush=True)
    timed = ["time over plain", "time over by hand", "plain, s"]
    header = ["API", "model", "traced", "with", "calls over plain", "calls over by hand", *timed]
    size = " x ".join(map(str, (QUICK_SHAPES if quick else SHAPES)["nested"]))
    notes = [
        "What is above 1 is ours: a model without a policy, or with its dtypes by hand, asks for no rule at any "
        "module. Tracing is once for a program; the compiled step has not one operation more.",
        f"The nested model has {size} layers.",
    ]
    yield ResultTable.of("tracing", "What a policy adds to the tracing of many modules", header, rows, timed, notes)
    [trace() for traces in step_traces(1).values() for trace in traces]
    sizes = (4, 40) if quick else (40, 400, 4000)
    ratios = [{name: _divide(*map(count_calls, traces)) for name, traces in step_traces(n).items()} for n in sizes]
    rows = [[name, *(ratio[name] for ratio in ratios)] for name in ratios[0]]
    header = ["step", *(f"{size:,} parameters" for size in sizes)]
    yield ResultTable.of("steps", "Calls to trace a step of AdamW, over the step without a check", header, rows)


def _divide(calls: int, plain: int) -> str:
    return f"{calls / plain:.2f}"


if __name__ == "__main__":
    run_alone(__doc__, tables)
