"""What a policy is taken to have in half precision is what it really has there."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_policy as jmp

# A prediction names a few scopes. That each operation has the dtype it is taken to have would need a run of each.
from jmp_policy._jaxpr import float_dtype, walk
from jmp_policy._jaxpr._source import ModulePaths, Modules
from jmp_policy.numerics import collect
from jmp_policy.numerics._predict_flow import list_operations
from jmp_policy.numerics._predict_trial import try_policy
from jmp_policy.numerics._stats_choice import find_program

X = jnp.ones((4, 8))
HALF = "params=float32,compute=float16,output=float32"


def square(w, x):
    with jax.named_scope("a"):
        h = jnp.tanh(x @ w["a"]) * 3
    with jax.named_scope("b"):
        h = jnp.exp(h @ w["b"]) + h
    return jnp.mean((h - 1) ** 2)


def twice(w, x):
    block = jax.jit(lambda w, h: jax.nn.silu(h @ w) * 2)
    for name in "ab":
        with jax.named_scope(name):
            x = block(w[name], x)
    return jnp.sum(x * jax.lax.cond(x[0, 0] > 0, jnp.sin, lambda x: x * x, x))


def checkpointed(w, x):
    block = jax.checkpoint(lambda w, h: jnp.tanh(h @ w) * h)
    with jax.named_scope("a"):
        x = block(w["a"], x)
    return jnp.sum(block(w["b"], x) ** 2)


W = {"a": jnp.full((8, 8), 0.1), "b": jnp.full((8, 8), 0.2)}
POLICIES = {"half": HALF, "map": jmp.PolicyMap({"a": "float32"}, HALF), "inner": jmp.PolicyMap({"a": "bfloat16"}, HALF)}
IGNORED = ("convert_element_type", "custom_jvp_call")
"""Casts are what a policy adds; a function with a derivative of its own is what is inside of it."""


def observe(fun, *args):
    stats = jax.eval_shape(collect(fun, where="all", formats=["float16"]), *args)[1]
    return find_program(stats.layout)


def count_written(observed, policy):
    """How many operations of each name and scope have results of each dtype, as predicted for `autocast`."""
    written, found = try_policy(observed, policy, "autocast"), collections.Counter()
    for operation in list_operations(observed):
        of_eqn = written.get(operation.chain)
        for dtype in () if of_eqn is None or operation.name in IGNORED else of_eqn.results:
            found[operation.name, operation.path, str(dtype)] += dtype is not None
    return +found


def count_real(fun, *args):
    """The same of the program that a function is."""
    paths, found = ModulePaths(Modules()), collections.Counter()
    for step in walk(jax.make_jaxpr(fun)(*args).jaxpr, live_only=True):
        if step.name not in (*IGNORED, "link", "carry", "constant"):
            for var in step.results:
                if float_dtype(var) is not None:
                    found[step.name, paths.read_stack(step.scope), str(float_dtype(var))] += 1
    return found


def drop_paths(counts):
    found = collections.Counter()
    for (name, _, dtype), count in counts.items():
        found[name, dtype] += count
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "policy"),
    [
        (square, "map"),
        (square, "inner"),
        (twice, "inner"),
        (checkpointed, "half"),
    ],
)
def test_autocast_writes_what_is_predicted(fun, policy):
    grad = jax.value_and_grad(fun)
    real = count_real(jmp.autocast(grad, POLICIES[policy]), W, X)
    predicted = count_written(observe(grad, W, X), jmp.get_policy(POLICIES[policy]))
    assert any("16" in dtype for _, _, dtype in predicted)
    if fun is checkpointed:  # autocast's own scope is in the way of the paths of a remat
        predicted, real = drop_paths(predicted), drop_paths(real)
    assert predicted == real


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.up(x))))


def nnx_loss(policy=None):
    model = NNXNet(nnx.Rngs(0))
    model = model if policy is None else jmp.with_policy(model, policy)
    return nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2)), model, X


@pytest.mark.slow
def test_with_policy_has_in_half_what_is_predicted():
    policy, names = jmp.PolicyMap({"up": "float32"}, HALF), ("dot_general", "rsqrt", "custom_jvp_call", "select_n")
    with jax.numpy_dtype_promotion("standard"):
        observed = observe(*nnx_loss())
        written = try_policy(observed, policy, "with_policy")
        told = {
            (operation.path, operation.name, any(d == np.float16 for d in written[operation.chain].results))
            for operation in list_operations(observed)
            if operation.name in names and operation.chain in written
        }
        grad, model, x = nnx_loss(policy)
        stats = nnx.eval_shape(collect(grad, where="all", formats=["float16"]), model, x)[1]
    sites = [site for site in stats.layout.sites if site.primitive in names]
    assert told == {(site.path, site.primitive, site.dtype == "float16") for site in sites}
    assert len({half for _, _, half in told}) == 2


class Scoped(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x)) * 1e-6


class ScopedOutside(Scoped):
    __call__ = jax.named_scope("model")(Scoped.__call__)


def test_named_scopes_around_modules_do_not_hide_them_from_with_policy():
    def predict(kind):
        model = kind(nnx.Rngs(0))
        model.head.kernel[...] *= 1e6
        loss = lambda model: jnp.sum(model(X))
        _, stats = nnx.jit(collect(nnx.value_and_grad(loss), ["float16"], "all"))(model)
        return jmp.numerics.predict(stats, HALF, by="with_policy")

    assert "head" in predict(Scoped).culprits
    assert predict(ScopedOutside).culprits == predict(Scoped).culprits
