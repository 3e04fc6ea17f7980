"""Which of two policies or dtypes wins where they meet in one model: the order that `with_policy` documents.

The model's root has a submodule `inner`, which has the layer `leaf`. Each source asks for a dtype of its own.
"""

import itertools
import warnings
from typing import NamedTuple

import pytest
from flax import linen as nn, nnx
from flax_apis import CHEAP, LINEN, NNX, X

import jmp_policy as jmp

PLACES = ["written", "layer", "submodule", "root", "default"]
"""The nearest first: what an author wrote on the layer, the modules from the inside out, the default policy."""
TIMES = ["class", "instance", "attribute"]
"""When a module gets a policy, the earliest first: with its class, when it is made, after the model was made."""
FULL = "params=float32,compute=float32,output=none"


class Source(NamedTuple):
    place: str
    time: str = "instance"
    of_map: str = ""  # "rule" or "others", for what one map on the root says


WRITTEN = "dtype written on the layer"
SOURCES = {
    WRITTEN: Source("written"),
    "layer": Source("layer"),
    "class of the layer": Source("layer", "class"),
    "submodule": Source("submodule"),
    "map of the submodule": Source("submodule"),
    "class of the submodule": Source("submodule", "class"),
    "base of its class": Source("submodule", "class"),
    "root": Source("root"),
    "class of the root": Source("root", "class"),
    "rule for a path": Source("root", of_map="rule"),
    "rule for a pattern": Source("root", of_map="rule"),
    "rule for a type": Source("root", of_map="rule"),
    "rule for the submodule": Source("root", of_map="rule"),
    "others of the map": Source("root", of_map="others"),
    "default policy": Source("default"),
}
LATER = {"layer set later": Source("layer", "attribute"), "submodule set later": Source("submodule", "attribute")}
OF_API = {LINEN: SOURCES | {"submodule in compact": Source("submodule")}, NNX: SOURCES | LATER}
POLICIES = {LINEN: "params={0},compute={0},output=none", NNX: "params=none,compute={0},output=none"}


def find_winner(first, second, sources):
    """The source whose dtype the layer computes in: the order as written, `first` being asked before `second`."""
    a, b = sources[first], sources[second]
    if a.place != b.place:  # the nearest
        return min(first, second, key=lambda name: PLACES.index(sources[name].place))
    if a.of_map and b.of_map:  # the first rule that covers it
        return first if a.of_map == "rule" else second
    return max(second, first, key=lambda name: TIMES.index(sources[name].time))  # on one module the latest


def pair_neighbors(api):
    """Each source with the next one, and in both orders where both speak of one module."""
    sources = OF_API[api]
    for a, b in itertools.pairwise(sorted(sources, key=lambda name: PLACES.index(sources[name].place))):
        yield api, a, b
        if sources[a].place == sources[b].place:
            yield api, b, a


def given(target, asked, *names):
    """A target with the policies that these sources ask for, in the order of asking."""
    for name in [name for name in asked if name in names]:
        policy = asked[name]
        target = jmp.with_policy(target, jmp.PolicyMap({"leaf": policy}, FULL) if "map of" in name else policy)
    return target


def list_root_policies(asked, layer):
    """What the root is given, in the order of asking: policies, and one map of all rules that are asked for."""
    keys = {"rule for a path": "inner/leaf", "rule for a pattern": ".*/le.f", "rule for a type": layer}
    keys["rule for the submodule"] = "inner"
    rules = [(keys[name], asked[name]) for name in asked if name in keys]
    others = asked.get("others of the map")
    found = {name: asked[name] for name in asked if name == "root"}
    if rules or others:
        first = next(name for name in asked if SOURCES.get(name, Source("")).of_map)
        found[first] = jmp.PolicyMap(rules, others or (None if "default policy" in asked else FULL))
    elif "default policy" in asked and not found and "class of the root" not in asked:
        found["default policy"] = None
    return [found[name] for name in asked if name in found]


def make_leaf(api, asked):
    kind, written = given(api.dense_type, asked, "class of the layer"), asked.get(WRITTEN)
    options = {"dtype": written, "kernel_init": CHEAP}
    leaf = kind(4, **options) if api is LINEN else kind(4, 4, rngs=nnx.Rngs(0), **options)
    return given(leaf, asked, "layer")


def make_inner(api, asked, **options):
    @api.module(leaf=lambda: make_leaf(api, asked))
    class Inner:
        def __call__(self, x):
            return self.leaf(x)

    kind = Inner
    for source in asked:
        kind = given(kind, asked, source) if source in ("class of the submodule", "base of its class") else kind
        if source == "base of its class":
            kind = type(kind)("Inner", (kind,), {"__module__": __name__})
    return given(kind(**options), asked, "submodule", "map of the submodule", "submodule in compact")


def make_model(api, asked):
    @api.module(inner=lambda: make_inner(api, asked))
    class Root:
        def __call__(self, x):
            return self.inner(x)

    class InCompact(nn.Module):
        @nn.compact
        def __call__(self, x):
            return make_inner(api, asked, name="inner")(x)

    model = given(InCompact if "submodule in compact" in asked else Root, asked, "class of the root")()
    with jmp.use_policy(asked.get("default policy", "float32")):
        for policy in list_root_policies(asked, api.dense_type):
            model = jmp.with_policy(model, policy)
    if api is NNX:
        model.inner = given(model.inner, asked, "submodule set later")
        model.inner.leaf = given(model.inner.leaf, asked, "layer set later")
    return model


def find_dtypes(api, asked):
    """The dtype that the layer computes in, and the one that it stores its parameters in."""
    asked = {name: dtype if name == WRITTEN else POLICIES[api].format(dtype) for name, dtype in asked.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some rules decide nothing: that is what is tested
        model = make_model(api, asked) if api is LINEN else nnx.eval_shape(lambda: make_model(api, asked))
        return api.run(model, X).dtype, api.find_stored_dtypes(model, X)["inner/leaf/kernel"]


@pytest.mark.parametrize(("api", "first", "second"), [*pair_neighbors(LINEN), *pair_neighbors(NNX)])
def test_of_two_sources_the_one_that_the_written_order_says_wins(api, first, second):
    asked = {first: "float16", second: "bfloat16"}
    wins = find_winner(first, second, OF_API[api])
    (loser,) = asked.keys() - {wins}
    stores = asked[loser if wins == WRITTEN else wins]  # the author's dtype is that of the computation
    assert find_dtypes(api, asked) == (asked[wins], stores if api is LINEN else "float32")


@pytest.mark.slow
def test_each_source_alone_decides(api):
    for source in OF_API[api]:
        stores = "float32" if api is NNX or source == WRITTEN else "float16"
        assert find_dtypes(api, {source: "float16"}) == ("float16", stores), source


def test_sources_cover_every_place(api):
    assert {source.place for source in OF_API[api].values()} == set(PLACES)
