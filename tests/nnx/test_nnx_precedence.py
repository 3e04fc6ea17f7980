"""Who wins where several policies and dtypes meet in an nnx model: the order written in `with_policy`, in pairs."""

import warnings

import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_models import X, rngs
from precedence import PLACES, SOURCES, Source, given, pairs, root_policies, winner

import jmp_policy as jmp

LATER = {"layer set later": "layer", "submodule set later": "submodule"}
NNX_SOURCES = SOURCES | {name: Source(place, "attribute") for name, place in LATER.items()}
POLICIES = {dtype: f"params=none,compute={dtype},output=none" for dtype in ("float16", "bfloat16")}


class Inner(nnx.Module):
    """Holds the layer."""

    def __init__(self, asked):
        written = asked.get("dtype written on the layer")
        kind = given(nnx.Linear, asked, "class of the layer")
        self.leaf = given(kind(4, 4, dtype=written, rngs=rngs()), asked, "layer")

    def __call__(self, x):
        return self.leaf(x)


class Root(nnx.Module):
    """Holds the submodule."""

    def __init__(self, asked):
        kind = Inner
        for source in asked:
            kind = given(kind, asked, source) if source in ("class of the submodule", "base of its class") else kind
            if source == "base of its class":
                kind = type(kind)("Inner", (kind,), {"__module__": __name__})
        self.inner = given(kind(asked), asked, "submodule", "map of the submodule")

    def __call__(self, x):
        return self.inner(x)


def model_of(asked):
    """The model, with everything that is asked for."""
    model = given(Root, asked, "class of the root")(asked)
    with jmp.use_policy(asked.get("default policy", "float32")):
        for policy in root_policies(asked, nnx.Linear):
            model = jmp.with_policy(model, policy)
    model.inner = given(model.inner, asked, "submodule set later")
    model.inner.leaf = given(model.inner.leaf, asked, "layer set later")
    return model


def dtype_of(asked):
    """The dtype that the layer computes in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some rules decide nothing: that is what is tested
        return nnx.eval_shape(lambda: model_of(asked)(X)).dtype


@pytest.mark.sample(5)
@pytest.mark.parametrize(("first", "second"), pairs(NNX_SOURCES))
def test_of_two_sources_the_one_that_the_written_order_says_wins(first, second):
    asked = {first: "float16", second: "bfloat16"}
    by_policy = {name: dtype if "written" in name else POLICIES[dtype] for name, dtype in asked.items()}
    assert dtype_of(by_policy) == asked[winner(first, second, NNX_SOURCES)]


@pytest.mark.sample(8)
@pytest.mark.parametrize("source", NNX_SOURCES)
def test_each_source_alone_decides(source):
    assert dtype_of({source: "float16" if "written" in source else POLICIES["float16"]}) == jnp.float16


def test_sources_cover_every_place():
    assert {source.place for source in NNX_SOURCES.values()} == set(PLACES)
