"""What nnx shows of a policied model, and every way into one that is no transform."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax_apis import BF16_INSIDE, X, is_rounded_to_bfloat16
from nnx_models import Net, rngs
from nnx_transforms import Block

import jmp_policy as jmp


def made():
    return jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)


def merged(model):
    return nnx.merge(*nnx.split(model))


def restored(model):
    """A model that was made abstractly, and given the state of another."""
    abstract = nnx.eval_shape(lambda: jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE))
    nnx.update(abstract, nnx.state(model))
    return abstract


def trained(model):
    """A model after a step of an optimizer."""
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda model: model(X).sum())(model))
    return model


WAYS: dict[str, Any] = {
    "clone": nnx.clone,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "split and merge": merged,
    "eval_shape and update": restored,
    "view": lambda model: nnx.view(model, raise_if_not_found=False, deterministic=True),
    "recursive_map": lambda model: nnx.recursive_map(lambda path, node: node, model),
    "train mode": lambda model: (model.train(), model)[1],
    "optimizer's step": trained,
    "item of a list": lambda model: nnx.List([model])[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_model_that_went_through_nnx_has_its_policy(name):
    model = WAYS[name](made())
    assert is_rounded_to_bfloat16(model(X))
    assert jmp.policy_of(model) is jmp.get_policy(BF16_INSIDE)
    assert {param.dtype for param in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}


VIEWS: dict[str, Any] = {
    "state": lambda model: nnx.to_pure_dict(nnx.state(model)),
    "graph": lambda model: [path for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)],
    "modules": lambda model: [(path, type(inner).__name__) for path, inner in nnx.iter_modules(model)],
    "children": lambda model: [(name, type(child).__name__) for name, child in nnx.iter_children(model)],
    "shapes": lambda model: jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: model)))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_nnx_shows_the_same_with_and_without_a_policy(name):
    ours, plain = VIEWS[name](made()), VIEWS[name](Net(rngs=rngs()))
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    assert all(jax.tree.leaves(jax.tree.map(_equal, ours, plain)))


def _equal(a, b):
    return bool((a == b).all()) if isinstance(a, jax.Array) else a == b


def test_display_shows_the_dtypes_of_the_policy(capsys):
    nnx.display(made())
    assert "bfloat16" in capsys.readouterr().out


class TestPast:
    """A policy holds while a method of its module runs: what is called past that has the policy of the caller."""

    def test_method_of_the_class_without_a_policy_casts_nothing_where_layers_inside_have_theirs(self):
        model = made()
        out = Net.encode(model, X)
        assert (model.entered, model.probe.saw, str(out.dtype)) == ("float32", "bfloat16", "bfloat16")

    def test_layer_called_from_outside_computes_as_its_policy_says(self):
        assert made().embed(X).dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("policy", [BF16_INSIDE, "mixed_bfloat16"])
def test_carry_of_a_scan_has_the_output_dtype_of_a_policy_inside(policy):
    layer = jmp.with_policy(Block(changes=False, rngs=rngs()), policy)
    scan = nnx.scan(lambda x, layer: layer(x), length=2, in_axes=(nnx.Carry, None), out_axes=nnx.Carry)
    output_dtype = jmp.get_policy(policy).output_dtype
    assert scan(X.astype(output_dtype), layer).dtype == output_dtype
    if output_dtype != X.dtype:
        with pytest.raises(TypeError, match=r"carry.* has type float32\[2,4\] .* has type bfloat16\[2,4\]"):
            scan(X, layer)
