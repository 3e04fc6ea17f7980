"""What makes Flax modules: classes in partials and with subscripts, and functions that return modules."""

import functools
import re
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from flax_apis import LINEN, NNX, X

import jmp_policy as jmp

POLICY = "params=float32,compute=bfloat16,output=bfloat16"
T = TypeVar("T")


class LinenNet(nn.Module):
    """Flax's idiom: `ResNet18 = functools.partial(ResNet, stages=...)`."""

    stages: int = 1
    width: int = 4

    @nn.compact
    def __call__(self, x):
        for _ in range(self.stages):
            x = nn.Dense(self.width)(x)
        return x


class NnxNet(nnx.Module):
    """The same in nnx."""

    def __init__(self, stages: int = 1, width: int = 4):
        self.layers = nnx.List([nnx.Linear(4, width, rngs=nnx.Rngs(0)) for _ in range(stages)])

    def __call__(self, x):
        return self.layers[0](x)


class GenericLinenNet(LinenNet, Generic[T]):
    """A generic class."""


class GenericNnxNet(NnxNet, Generic[T]):
    """A generic class."""


NETS: dict[Any, Any] = {LINEN: (LinenNet, GenericLinenNet), NNX: (NnxNet, GenericNnxNet)}
CONSTRUCTORS: dict[str, Any] = {
    "a partial": lambda net, generic: functools.partial(net, stages=2),
    "a partial of a partial": lambda net, generic: functools.partial(functools.partial(net, 2), width=5),
    "a class with subscripts": lambda net, generic: generic[int],
    "a partial of a class with subscripts": lambda net, generic: functools.partial(generic[int], 2),
}


def find_dtype(api, make):
    return api.run(api.make(make), X).dtype


def assert_class_inside_has_the_policy(api, make):
    policied = jmp.with_policy(make, POLICY)
    assert type(policied) is type(make)
    assert jmp.policy_of(policied) == jmp.get_policy(POLICY)
    assert jmp.policy_of(make) is None
    assert find_dtype(api, policied) == find_dtype(api, jmp.with_policy(POLICY)(make)) == jnp.bfloat16


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_class_inside_gets_the_policy(api, name):
    assert_class_inside_has_the_policy(api, CONSTRUCTORS[name](*NETS[api]))


def test_transformed_class_of_linen_in_a_partial_gets_the_policy():
    assert_class_inside_has_the_policy(LINEN, nn.remat(functools.partial(LinenNet, stages=2)))


def test_generic_class_with_a_policy_takes_subscripts(api):
    policied = jmp.with_policy(NETS[api][1], POLICY)

    class Sub(policied[int]):
        pass

    assert find_dtype(api, policied[int]) == find_dtype(api, Sub) == jnp.bfloat16


def test_arguments_that_a_partial_holds_are_those_of_the_class():
    model = jmp.with_policy(functools.partial(LinenNet, stages=2), POLICY)(width=5)
    assert (model.stages, model.width) == (2, 5)


def test_rules_and_kept_arguments_reach_the_class_in_a_partial(api):
    def make(width):
        @api.module(dense=lambda: api.dense(width))
        class Positions:
            def __call__(self, x, position):
                return self.dense(x), position

        return Positions

    rules = jmp.PolicyMap({"dense": "float32"}, POLICY)
    model = api.make(jmp.with_policy(functools.partial(make(4)), rules, no_cast=["position"]))
    assert jmp.explain(model, X, X)["dense"].rule == "dense"
    with pytest.raises(ValueError, match=r"^no_cast names 'positions', but "):
        jmp.with_policy(functools.partial(make(4)), rules, no_cast=["positions"])


def test_module_in_a_partial_gets_the_policy():
    call = jmp.with_policy(functools.partial(NNX.dense(), X), POLICY)
    assert (call().dtype, call.func.dtype) == (jnp.bfloat16, jnp.bfloat16)


@pytest.mark.parametrize(
    ("factory", "kind"),
    [(lambda: LinenNet(2), "LinenNet"), (lambda: {"model": NnxNet(), "width": 4}, "NnxNet")],
)
def test_function_that_returns_a_module_says_what_to_write(factory, kind):
    def make_net():
        return factory()

    name = "test_function_that_returns_a_module_says_what_to_write.<locals>.make_net"
    message = (
        f"{name} returned a module of {kind}, which would run after the policy of the function ended. Give the policy "
        f"to the module, or to its class. For example: with_policy({name}(...), 'mixed_bfloat16')."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        jmp.with_policy(make_net, POLICY)()


def test_function_may_return_a_module_that_has_a_policy_or_that_it_was_given():
    model = NnxNet()
    assert jmp.with_policy(lambda model: model, POLICY)(model) is model
    returned = jmp.with_policy(lambda: jmp.with_policy(model, POLICY), "float32")()
    assert jmp.policy_of(returned) == jmp.get_policy(POLICY)


def test_a_class_made_of_the_attributes_of_another_is_not_taken_for_it(api):
    class Net(api.base):
        def tell(self):
            return "first"

    jmp.with_policy(Net, POLICY)
    attributes = {name: value for name, value in vars(Net).items() if name not in ("__dict__", "__weakref__")}
    other = type("Other", (api.base,), attributes | {"tell": lambda self: "other"})
    assert jmp.with_policy(other, POLICY)().tell() == "other"
