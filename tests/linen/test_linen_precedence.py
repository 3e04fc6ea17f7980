"""Who wins where several policies and dtypes meet in a linen model: the order written in `with_policy`, in pairs."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from precedence import PLACES, SOURCES, Source, given, pairs, root_policies, winner

import jmp_policy as jmp

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
LINEN_SOURCES = SOURCES | {"submodule in compact": Source("submodule")}
POLICIES = {dtype: f"params={dtype},compute={dtype},output=none" for dtype in ("float16", "bfloat16")}


class Inner(nn.Module):
    """Holds the layer."""

    asked: Any

    @nn.compact
    def __call__(self, x):
        asked = dict(self.asked)
        written = asked.get("dtype written on the layer")
        kind = given(nn.Dense, asked, "class of the layer")
        return given(kind(4, dtype=written, name="leaf"), asked, "layer")(x)


def inner_of(asked, name=None):
    """The submodule, of the class that is asked for, with the policies that are asked for."""
    kind = Inner
    for source in asked:
        kind = given(kind, asked, source) if source in ("class of the submodule", "base of its class") else kind
        if source == "base of its class":
            kind = type("Inner", (kind,), {"__module__": __name__})
    names = "submodule", "map of the submodule", "submodule in compact"
    return given(kind(tuple(asked.items()), name=name), asked, *names)


class InSetup(nn.Module):
    asked: Any

    def setup(self):
        self.inner = inner_of(dict(self.asked))

    def __call__(self, x):
        return self.inner(x)


class InCompact(nn.Module):
    asked: Any

    @nn.compact
    def __call__(self, x):
        return inner_of(dict(self.asked), name="inner")(x)


def model_of(asked):
    """The model, with everything that is asked for."""
    kind = given(InCompact if "submodule in compact" in asked else InSetup, asked, "class of the root")
    model = kind(tuple(asked.items()))
    with jmp.use_policy(asked.get("default policy", "float32")):
        for policy in root_policies(asked, nn.Dense):
            model = jmp.with_policy(model, policy)
    return model


def dtypes_of(asked):
    """The dtypes that the layer computes in, and that it stores its parameters in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some rules decide nothing: that is what is tested
        out, variables = jax.eval_shape(model_of(asked).init_with_output, KEY, X)
    return out.dtype, variables["params"]["inner"]["leaf"]["kernel"].dtype


@pytest.mark.sample(2)
@pytest.mark.parametrize(("first", "second"), pairs(LINEN_SOURCES))
def test_of_two_sources_the_one_that_the_written_order_says_wins(first, second):
    low, high = "float16", "bfloat16"
    by_author = "dtype written on the layer"
    asked = {name: POLICIES[dtype] for name, dtype in ((first, low), (second, high))}
    wins = winner(first, second, LINEN_SOURCES)
    computes = stores = low if wins == first else high
    if by_author in asked:
        asked[by_author] = computes
        stores = high if wins == first else low  # the author's dtype is that of the computation
    assert dtypes_of(asked) == (computes, stores)


@pytest.mark.sample(8)
@pytest.mark.parametrize("source", LINEN_SOURCES)
def test_each_source_alone_decides(source):
    by_author = source == "dtype written on the layer"
    asked = {source: "float16" if by_author else POLICIES["float16"]}
    assert dtypes_of(asked) == ("float16", "float32" if by_author else "float16")


def test_sources_cover_every_place():
    assert {source.place for source in LINEN_SOURCES.values()} == set(PLACES)
