"""Arrays that a callable holds: cast as arguments are, or named in a warning where no cast can reach them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from programs import walk

import jmp_policy as jmp

MIXED = "params=float32,compute=bfloat16,output=float32"
BF16 = jnp.dtype("bfloat16")
MESH = make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
X = jnp.linspace(-1, 1, 12).reshape(4, 3)
W = jnp.linspace(-2, 2, 6).reshape(3, 2)


@jax.tree_util.register_pytree_node_class
class Layer:
    """A module as Equinox writes them: a pytree that is called."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x @ self.weight

    def encode(self, x):
        return x @ self.weight

    def tree_flatten(self):
        return (self.weight,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


class Holder:
    """What JAX takes for a leaf, with an array inside."""

    def __init__(self, weight):
        self.layer = [Layer(weight)]

    def __call__(self, x):
        return self.layer[0](x)


def multiply(weight, x):
    return x @ weight


HOLD = {
    "a pytree": Layer,
    "a method of a pytree": lambda w: Layer(w).encode,
    "a partial": lambda w: functools.partial(multiply, w),
    "a partial by keyword": lambda w: functools.partial(lambda x, *, weight: x @ weight, weight=w),
    "a partial of a pytree": lambda w: functools.partial(Layer(w)),
    "a partial of a tree": lambda w: functools.partial(lambda tree, x: x @ tree["w"], {"w": w}),
    "a Partial of JAX": lambda w: jax.tree_util.Partial(multiply, w),
    "apply of linen": lambda w: functools.partial(nn.Dense(2, use_bias=False).apply, {"params": {"kernel": w}}),
}

TRANSFORMATIONS = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda carry, row: (carry, f(row)), 0, x)[1],
    "shard_map": lambda f: jax.shard_map(f, mesh=MESH, in_specs=P("d"), out_specs=P("d")),
}


@pytest.mark.parametrize(("hold", "transform"), list(zip(HOLD, itertools.cycle(TRANSFORMATIONS), strict=False)))
def test_what_a_callable_holds_is_cast_as_an_argument_in_value_and_gradient(hold, transform):
    def run(call):
        return jax.make_jaxpr(jax.value_and_grad(lambda w, x: TRANSFORMATIONS[transform](call(w))(x).sum()))(W, X)

    def by_hand(w):
        return lambda x: HOLD[hold](w.astype(BF16))(x.astype(BF16)).astype(jnp.float32)

    ours = run(lambda w: jmp.with_policy(HOLD[hold](w), MIXED))
    assert [x.dtype for x in ours.out_avals] == [np.float32, np.float32]
    assert sorted(matmuls(ours.jaxpr)) == sorted(matmuls(run(by_hand).jaxpr)) != []
    assert set(matmuls(ours.jaxpr)) == {"bfloat16"}


def matmuls(jaxpr):
    """The dtypes that each matmul of a program reads, in its loops too."""
    dots = [step for step in walk(jaxpr) if step.name == "dot_general"]
    return [str(operand.aval.dtype) for dot in dots for operand in dot.operands]


def test_an_object_with_nothing_to_cast_may_be_written_to():
    class Counter(Layer):
        count = 0

        def __call__(self, x):
            self.count += 1
            return x

    jax.tree_util.register_pytree_node_class(Counter)
    counter = Counter(jnp.arange(2))
    jmp.with_policy(counter, MIXED)(X)
    assert counter.count == 1


def test_keep_names_arguments_that_a_partial_holds():
    partial = functools.partial(lambda held, x: (str(held.dtype), str(x.dtype)), W)
    assert jmp.with_policy(partial, MIXED)(X) == ("bfloat16", "bfloat16")
    assert jmp.with_policy(partial, MIXED, no_cast=["held"])(X) == ("float32", "bfloat16")


def test_inputs_decide_an_open_compute_dtype_before_what_is_held():
    dtypes = jmp.with_policy(functools.partial(lambda held, x: (held.dtype, x.dtype), W), "infer")
    assert dtypes(X.astype(BF16)) == (BF16, BF16)
    alone = jmp.with_policy(functools.partial(lambda held, n: held.dtype, W.astype(BF16)), "infer")
    assert alone(3) == BF16


def test_recursion_finds_what_is_held_cast():
    dtypes = []

    def recurse(weight, x, depth):
        dtypes.append(str(weight.dtype))
        return policied(x, depth - 1) if depth else x

    policied = jmp.with_policy(functools.partial(recurse, W), MIXED)
    policied(X, 1)
    assert dtypes == ["bfloat16", "bfloat16"]


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def encode(self, x):
        return self.linear(x)


UNREACHED = {
    "an object": (lambda: Holder(W), "Holder"),
    "a method of an object": (lambda: Holder(W).__call__, "Holder"),
    "a vmapped pytree": (lambda: jax.vmap(Layer(W)), "Layer"),
    "a jitted partial": (lambda: jax.jit(functools.partial(multiply, W)), "functools.partial"),
    "a method of an nnx module": (lambda: Net().encode, "Net"),
    "a method of a bound linen module": (lambda: nn.Dense(2).bind({"params": {"kernel": W}}).__call__, "Dense"),
}


@pytest.mark.parametrize("name", UNREACHED)
def test_what_no_cast_can_reach_is_a_warning_that_says_autocast(name):
    make, holder = UNREACHED[name]
    message = (
        rf"not the arrays that .*{holder}.* holds: matmuls with them stay .*jmp\.autocast\(model, 'mixed_bfloat16'\)"
    )
    with pytest.warns(UserWarning, match=message):
        jmp.with_policy(make(), MIXED)


@pytest.mark.parametrize(
    "fun",
    [
        jmp.autocast(Layer(W), MIXED),
        jmp.force_full_precision(Layer(W)),
        jmp.with_policy(Layer(W), MIXED),
        jax.jit(functools.partial(multiply, x=2)),
        nn.Dense(2).apply,
        jmp.with_policy(Net(), "mixed_bfloat16").encode,
        jax.custom_jvp(multiply),
        jnp.add,
    ],
)
def test_what_holds_no_array_or_sees_to_its_own_gives_no_warning(fun):
    jmp.with_policy(fun, MIXED)
