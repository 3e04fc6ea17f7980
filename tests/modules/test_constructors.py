"""What makes Flax modules: classes in partials and with subscripts, and functions that return modules."""

import functools
import re
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp

KEY = jax.random.key(0)
X = jnp.ones((2, 3))
POLICY = "params=float32,compute=bfloat16,output=bfloat16"
T = TypeVar("T")


class ResNet(nn.Module):
    """Flax's idiom: `ResNet18 = functools.partial(ResNet, stages=...)`."""

    stages: int = 1
    width: int = 4

    @nn.compact
    def __call__(self, x):
        for _ in range(self.stages):
            x = nn.Dense(self.width)(x)
        return x


class GenericNet(ResNet, Generic[T]):
    """A generic class."""


class Linear(nnx.Module):
    """The same in nnx."""

    def __init__(self, width: int = 4, *, rngs: nnx.Rngs):
        self.layer = nnx.Linear(3, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


class GenericLinear(Linear, Generic[T]):
    """A generic class."""


def linen_dtype(make):
    return jax.eval_shape(lambda: make().init_with_output(KEY, X)[0]).dtype


def nnx_dtype(make):
    return make(rngs=nnx.Rngs(0))(X).dtype


CONSTRUCTORS: dict[str, tuple[Any, Any]] = {
    "a partial": (functools.partial(ResNet, stages=2), linen_dtype),
    "a partial of a partial": (functools.partial(functools.partial(ResNet, 2), width=5), linen_dtype),
    "a transformed class": (nn.remat(functools.partial(ResNet, stages=2)), linen_dtype),
    "a class with subscripts": (GenericNet[int], linen_dtype),
    "a partial of a class with subscripts": (functools.partial(GenericNet[int], 2), linen_dtype),
    "a partial in nnx": (functools.partial(Linear, 5), nnx_dtype),
    "a class with subscripts in nnx": (GenericLinear[int], nnx_dtype),
    "a partial of a class with subscripts in nnx": (functools.partial(GenericLinear[int], 5), nnx_dtype),
}


@pytest.mark.parametrize(("make", "dtype"), CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_class_inside_gets_the_policy(make, dtype):
    policied = jmp.with_policy(make, POLICY)
    assert type(policied) is type(make)
    assert jmp.policy_of(policied) == jmp.get_policy(POLICY)
    assert jmp.policy_of(make) is None
    assert dtype(policied) == jnp.bfloat16
    assert dtype(jmp.with_policy(POLICY)(make)) == jnp.bfloat16


@pytest.mark.parametrize(("generic", "dtype"), [(GenericNet, linen_dtype), (GenericLinear, nnx_dtype)])
def test_generic_class_with_a_policy_takes_subscripts(generic, dtype):
    policied = jmp.with_policy(generic, POLICY)
    assert dtype(policied[int]) == jnp.bfloat16
    assert dtype(jmp.with_policy(generic[int], POLICY)) == jnp.bfloat16

    class Sub(policied[int]):
        pass

    assert dtype(Sub) == jnp.bfloat16


def test_arguments_that_a_partial_holds_are_those_of_the_class():
    model = jmp.with_policy(functools.partial(ResNet, stages=2), POLICY)(width=5)
    assert (model.stages, model.width) == (2, 5)


def test_rules_and_kept_arguments_reach_the_class_in_a_partial():
    class Positions(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x, position):
            return nn.Dense(self.width)(x), position

    rules = jmp.PolicyMap({"Dense_0": "float32"}, POLICY)
    model = jmp.with_policy(functools.partial(Positions, 4), rules, no_cast=["position"])()
    assert jmp.explain(model, X, X)["Dense_0"].rule == "Dense_0"
    with pytest.raises(ValueError, match=r"^no_cast names 'positions', but "):
        jmp.with_policy(functools.partial(Positions, 4), rules, no_cast=["positions"])


def test_module_in_a_partial_gets_the_policy():
    model = Linear(rngs=nnx.Rngs(0))
    call = jmp.with_policy(functools.partial(model, X), POLICY)
    assert call().dtype == jnp.bfloat16
    assert call.func.layer.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        (lambda: ResNet(2), "ResNet"),
        (functools.partial(lambda width: ResNet(2, width), 3), "ResNet"),
        (lambda: {"model": Linear(rngs=nnx.Rngs(0)), "width": 4}, "Linear"),
    ],
)
def test_function_that_returns_a_module_says_what_to_write(factory, kind):
    def make_net():
        return factory()

    message = (
        f"test_function_that_returns_a_module_says_what_to_write.<locals>.make_net returned a module of {kind}, which "
        "would run after the policy of the function ended. Give the policy to the module, or to its class. "
        "For example: with_policy(test_function_that_returns_a_module_says_what_to_write.<locals>.make_net(...), "
        "'mixed_bfloat16')."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        jmp.with_policy(make_net, POLICY)()


def test_function_may_return_a_module_that_has_a_policy_or_that_it_was_given():
    model = Linear(rngs=nnx.Rngs(0))
    assert jmp.with_policy(lambda model: model, POLICY)(model) is model
    returned = jmp.with_policy(lambda: jmp.with_policy(model, POLICY), "float32")()
    assert jmp.policy_of(returned) == jmp.get_policy(POLICY)


@pytest.mark.parametrize("base", [nn.Module, nnx.Module])
def test_a_class_made_of_the_attributes_of_another_is_not_taken_for_it(base):
    class Net(base):
        def tell(self):
            return "first"

    jmp.with_policy(Net, POLICY)
    attributes = {name: value for name, value in vars(Net).items() if name not in ("__dict__", "__weakref__")}
    other = type("Other", (base,), attributes | {"tell": lambda self: "other"})
    assert jmp.with_policy(other, POLICY)().tell() == "other"
