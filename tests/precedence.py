"""The sources that a dtype can come from, in a model whose root holds `inner`, which holds the layer `leaf`.

Two of them meet in every test of precedence. Each asks for a dtype of its own, and `winner` is the order that the
documentation of `with_policy` writes down.
"""

import itertools
from typing import Any, NamedTuple

import jmp_policy as jmp

PLACES = ["written", "layer", "submodule", "root", "default"]
"""The nearest first: what an author wrote on the layer, the modules from the inside out, the default policy."""

TIMES = ["class", "instance", "attribute"]
"""When a module gets a policy, the earliest first: with its class, when it is made, after the model was made."""


class Source(NamedTuple):
    place: str
    time: str = "instance"
    of_map: str = ""  # "rule" or "others", for what one map on the root says


SOURCES = {
    "dtype written on the layer": Source("written"),
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
"""What asks for a dtype; each API adds the ways that only it has."""


def winner(first: str, second: str, sources: dict[str, Source] = SOURCES) -> str:
    """The source whose dtype the layer computes in: the order as written, `first` being asked before `second`."""
    a, b = sources[first], sources[second]
    if a.place != b.place:  # the nearest
        return min(first, second, key=lambda name: PLACES.index(sources[name].place))
    if a.of_map and b.of_map:  # the first rule that covers it
        return first if a.of_map == "rule" else second
    return max(second, first, key=lambda name: TIMES.index(sources[name].time))  # on one module the latest


def pairs(sources: dict[str, Source] = SOURCES) -> list[tuple[str, str]]:
    """Every source with every other, and in both orders where both speak of one module.

    Elsewhere the order of asking reaches nothing: each source is asked for on a line of its own.
    """
    both = itertools.permutations(sources, 2)
    names = list(sources)
    return [(a, b) for a, b in both if names.index(a) < names.index(b) or sources[a].place == sources[b].place]


def given(target: Any, asked: dict[str, str], *names: str) -> Any:
    """A target with the policies that these sources ask for, in the order of asking."""
    for name in [name for name in asked if name in names]:
        policy = asked[name]
        target = jmp.with_policy(target, jmp.PolicyMap({"leaf": policy}, FULL) if "map of" in name else policy)
    return target


def root_policies(asked: dict[str, str], layer: type) -> list[Any]:
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


FULL = "params=float32,compute=float32,output=none"
