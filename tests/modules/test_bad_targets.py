"""What is no function and no module, functions of every kind, and results that are no trees of arrays."""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import flax.struct
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from flax_apis import LINEN, NNX

import jmp_policy as jmp

X = jnp.linspace(-1.0, 1.0, 4)
BF16 = jnp.dtype("bfloat16")

NO_TARGETS = {
    "an array": jnp.ones(2),
    "a numpy array": np.ones(2),
    "a string": "bert",
    "an integer": 3,
    "nothing": None,
    "a class": dict,
    "a property": property(lambda self: 0),
    "a Variable": nnx.Param(jnp.ones(2)),
    "parameters": {"w": jnp.ones(2)},
    "a list of modules": [nn.Dense(2), nn.Dense(3)],
    "a transformed pair of haiku": hk.transform(lambda x: x),
    "an optimizer": optax.sgd(0.1),
    "a train state": TrainState.create(apply_fn=None, params={"w": jnp.ones((50, 50))}, tx=optax.sgd(0.1)),
}


@pytest.mark.parametrize("target", NO_TARGETS.values(), ids=NO_TARGETS)
def test_what_takes_no_policy_is_quoted_on_one_line(target):
    with pytest.raises(TypeError, match=r"^with_policy takes a function or a Flax module, got ") as error:
        jmp.with_policy(target, "bfloat16")
    message = str(error.value)
    assert " ".join(repr(target).split())[:100] in message
    assert message.endswith("For example: with_policy(loss_fn, 'mixed_bfloat16').")
    assert len(message) < 300
    assert ("Give each of its items its own." in message) is isinstance(target, list | tuple | dict)


def test_string_alone_is_read_as_a_policy():
    with pytest.raises(ValueError, match=r"^Unknown dtype or policy 'bert'\."):
        jmp.with_policy("bert")


class Double:
    """A callable object, and methods of every kind."""

    def __call__(self, x):
        return 2 * x

    def method(self, x):
        return 2 * x

    @jmp.with_policy("bfloat16")
    @staticmethod
    def static(x):
        return 2 * x

    @jmp.with_policy("bfloat16")
    @classmethod
    def of_class(cls, x):
        assert cls is Double
        return 2 * x


def double(x):
    return 2 * x


FUNCTIONS = {
    "a function": double,
    "a lambda": lambda x: 2 * x,
    "a jitted function": jax.jit(double),
    "a partial": functools.partial(lambda factor, x: factor * x, 2),
    "a callable object": Double(),
    "a bound method": Double().method,
    "a function of jax.numpy": jnp.negative,
    "a builtin function": abs,
    "a function with a policy": jmp.with_policy(double, "float16"),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_whatever_is_called_like_a_function_takes_a_policy(function):
    policied = jmp.with_policy(function, "bfloat16")
    assert policied(X).dtype == BF16
    assert jmp.policy_of(policied) is jmp.get_policy("bfloat16")


def test_static_and_class_methods_stay_what_they_are():
    for owner in (Double, Double()):
        assert owner.static(X).dtype == owner.of_class(X).dtype == BF16


def test_keep_needs_the_names_of_arguments():
    message = (
        "no_cast names ['x'], but max has no signature that Python can read. Give the policy to a function that calls "
        "it. For example: lambda x, position: f(x, position)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        jmp.with_policy(max, "bfloat16", no_cast=["x"])


def rows(x):
    yield from x


async def later(x):
    return x


async def later_rows(x):
    yield x


def make_module(api, value):
    @api.module()
    class Returns:
        def __call__(self, x):
            return value(x)

    return jmp.with_policy(Returns(), "bfloat16")


TARGETS = {
    "function": lambda value: jmp.with_policy(lambda x: value(x), "bfloat16"),
    "linen": lambda value: functools.partial(make_module(LINEN, value).apply, {}),
    "nnx": lambda value: make_module(NNX, value),
}
in_every_target = pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)


@in_every_target
@pytest.mark.parametrize("value", [rows, later, later_rows])
def test_result_whose_body_has_yet_to_run_is_an_error(make, value):
    kind = {rows: "generator", later: "coroutine", later_rows: "async_generator"}[value]
    with pytest.raises(TypeError, match=rf"^{value.__name__} returned a {kind}, which would run after its policy "):
        make(value)(X)


class Pair(NamedTuple):
    mean: Any
    name: str


@flax.struct.dataclass
class Moments:
    mean: Any
    count: Any


@dataclasses.dataclass
class Normal:
    """A distribution as a plain object: no tree."""

    mean: Any


WHOLE = {"a string": "text", "nothing": None, "a plain object": Normal(jnp.ones(2))}


@in_every_target
@pytest.mark.parametrize("value", WHOLE.values(), ids=WHOLE)
def test_result_that_is_no_tree_is_returned_as_it_is_with_the_arrays_inside_it(make, value):
    assert make(lambda x: value)(X) is value
    assert not isinstance(value, Normal) or value.mean.dtype == jnp.float32


@in_every_target
def test_trees_of_every_kind_come_out_with_their_floating_arrays_cast(make):
    wide, count = X.astype(jnp.float32), jnp.arange(3)
    pair, moments = make(lambda x: (Pair(wide, "p"), Moments(wide, count)))(X)
    assert (pair.mean.dtype, pair.name) == (BF16, "p")
    assert (moments.mean.dtype, moments.count.dtype) == (BF16, count.dtype)
