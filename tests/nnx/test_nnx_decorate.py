"""Decorated nnx classes: instances get the policy when their outermost constructor ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_models import BF16_INSIDE, Net, Scale, X, rngs

import jmp_policy as jmp


@jmp.with_policy(BF16_INSIDE)
class Decorated(nnx.Module):
    """A decorated class."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        self.saw = str(x.dtype)
        return self.linear(x)


class Child(Decorated):
    """Its constructor goes on after that of its decorated base."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.more = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        out = super().__call__(x)
        self.between = str(out.dtype)
        return self.more(out)


def test_decorated_class_keeps_its_name_and_document():
    names = Decorated.__name__, Decorated.__doc__, Decorated.__module__
    assert names == ("Decorated", "A decorated class.", __name__)
    assert jmp.policy_of(Decorated) is jmp.get_policy(BF16_INSIDE)


def test_subclasses_get_the_policy_after_their_own_constructor():
    model = Child(rngs=rngs())
    assert model.more.dtype == jnp.bfloat16
    assert model(X).dtype == jnp.float32
    assert (model.saw, model.between) == ("bfloat16", "bfloat16")  # super().__call__ is no second boundary


def test_parameters_are_drawn_in_the_authors_dtype_and_stored_in_param_dtype():
    class Both(nnx.Module):
        def __init__(self, *, rngs):
            self.net = Net(rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)

    plain, model = Both(rngs=rngs()), jmp.with_policy(Both, "bfloat16")(rngs=rngs())
    expected = jmp.cast_floating(nnx.to_pure_dict(nnx.state(plain, nnx.Param)), "bfloat16")
    got = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), got, expected)
    assert model.norm.mean.dtype == jnp.float32


def test_unbound_methods_have_the_policy():
    model = Decorated(rngs=rngs())
    assert Decorated.__call__(model, X).dtype == jnp.float32
    assert nnx.jit(Decorated.__call__)(model, X).dtype == jnp.float32
    assert model.saw == "bfloat16"


def test_modules_passed_to_the_constructor_are_copied_and_share_their_variables():
    class Head(nnx.Module):
        def __init__(self, body):
            self.body = body

        def __call__(self, x):
            return self.body(x)

    body = Scale(rngs=rngs())
    model = jmp.with_policy(Head, BF16_INSIDE)(body)
    model(X)
    assert (model.body.read, hasattr(body, "read")) == ("bfloat16", False)
    assert model.body.scale is body.scale
    with pytest.raises(ValueError, match=r"The parameter 'body/scale' is stored in float32, but the policy 'bfloat16'"):
        jmp.with_policy(Head, "bfloat16")(body)


def test_constructors_take_arguments_of_any_kind():
    class Options(nnx.Module):
        def __init__(self, *options, **more):
            self.linear = nnx.Linear(4, 4, rngs=rngs())

    options = ({1: 2, "a": [None, len]}, np.ones(2), jnp.float32, object())
    assert jmp.with_policy(Options, BF16_INSIDE)(*options, more=options).linear.dtype == jnp.bfloat16


def test_class_that_is_decorated_twice_attaches_once():
    once = jmp.with_policy(Net, "float32")
    twice = jmp.with_policy(once, jmp.PolicyMap({"haed": "float32"}, "mixed_bfloat16"))
    with pytest.warns(UserWarning, match="policy rule 'haed'") as record:
        twice(rngs=rngs())
    assert len(record) == 1


def test_subclass_of_the_class_of_a_policied_instance_has_no_policy():
    class Sub(type(jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE))):
        def __call__(self, x):
            return super().__call__(x)

    model = Sub(rngs=rngs())
    model(X)
    assert (jmp.policy_of(model), model.entered) == (None, "float32")


@pytest.mark.slow
def test_abstract_and_stacked_instances_have_the_policy():
    abstract = nnx.eval_shape(lambda: jmp.with_policy(Net, "bfloat16")(rngs=rngs()))
    assert abstract.embed.kernel.dtype == jnp.bfloat16
    stacked = nnx.vmap(lambda rngs: Decorated(rngs=rngs))(rngs().split(3))
    assert (stacked.linear.kernel.shape, stacked.linear.dtype) == ((3, 4, 4), jnp.bfloat16)
