"""Law 8: which rule covers which module, and what a bad map says."""

import copy
import functools
import importlib
import json
import pickle
import re
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn, nnx
from hypothesis import given, strategies as st
from properties import examples

import jmp_policy as jmp
from jmp_policy import Policy, PolicyMap
from jmp_policy.compat import keras


class Block:
    pass


class Norm:
    class Inner(Block):
        pass


RULES = {"head": "float32", r"block_\d+": "mixed_bfloat16", r"block_\d+/norm": "float32", Norm: "float32"}
MAPS = [
    PolicyMap({"mlp": "int8_from_mixed_bfloat16", "attention": "int4/64_from_bf16", "head": "f32"}, "int8_from_f32"),
    PolicyMap({}),
    PolicyMap({}, "bfloat16"),
    PolicyMap({"head": "float32"}),
    PolicyMap(RULES, "mixed_float16"),
    PolicyMap([(Norm.Inner, "infer"), (r".*/a|b", Policy("float32", None, None, precision="highest"))], np.float32),
]


@pytest.mark.parametrize(
    ("types", "name"),
    [
        ({"a": Norm}, "float32"),
        ({"a": Norm.Inner}, "bfloat16"),
        ({"": Norm, "a": Block}, "float32"),  # inside the root, which is a Norm
        ({"a": None}, "bfloat16"),
        (Norm, "float32"),
        (None, "bfloat16"),
        (type("Child", (Norm,), {}), "float32"),
    ],
)
def test_a_type_covers_its_instances_and_everything_inside(types, name):
    assert PolicyMap({Norm: "float32"}, "bfloat16").resolve("a", types).name == name


def test_only_the_module_a_rule_names_is_a_boundary():
    rules = PolicyMap({"a": "bfloat16"}, "float32")
    boundaries = {path: rules.match(path).boundary for path in ("", "a", "a/b", "c")}
    assert boundaries == {"": True, "a": True, "a/b": False, "c": False}


def reference(rules, default, path):
    """Law 8 read aloud: the first rule whose key fullmatches a path, or one around it, decides."""
    names = path.split("/")
    outer = ["", *("/".join(names[: i + 1]) for i in range(len(names)))]
    return next((policy for key, policy in rules if any(re.fullmatch(key, p) for p in outer)), default)


keys = st.sampled_from(["a", "b", "a/b", ".*", r"a/\w", "(a|b)/c", "", ".+/c", "aa", r"a\/b", r"\a", "a/b-", r"b/c\-"])
names = st.sampled_from(["float32", "bfloat16", "mixed_float16", "int8_from_mixed_float16"])


@given(
    st.lists(st.tuples(keys, names), max_size=4),
    st.lists(st.sampled_from(["a", "b", "c", "c-"]), min_size=1, max_size=3).map("/".join),
)
@examples(40)
def test_lookup_follows_the_law_read_aloud(rules, path):
    assert PolicyMap(rules, "float16")[path].name == reference(rules, "float16", path)


@pytest.mark.parametrize(
    "round_trip",
    [
        lambda m: PolicyMap.from_config(json.loads(json.dumps(m.get_config()))),
        lambda m: pickle.loads(pickle.dumps(m)),
        copy.deepcopy,
        lambda m: PolicyMap([(rule.key, str(rule.policy)) for rule in m.rules], m.default),
        lambda m: eval(repr(m), {"PolicyMap": PolicyMap}) if "Norm" not in repr(m) else m,
        jax.jit(lambda m: m),
    ],
)
def test_every_round_trip_gives_an_equal_map(round_trip):
    assert [round_trip(rules) for rules in MAPS] == MAPS
    assert [hash(round_trip(rules)) for rules in MAPS] == [hash(rules) for rules in MAPS]


def test_maps_are_immutable_and_do_not_follow_the_mapping_they_were_made_from():
    given_rules = {"head": "float32"}
    rules = PolicyMap(given_rules)
    given_rules["head"] = "bfloat16"
    assert rules["head"].name == "float32"
    with pytest.raises(AttributeError):
        rules.default = None
    with pytest.raises(TypeError):
        rules["head"] = "bfloat16"


def test_an_open_default_is_the_default_policy_until_the_map_is_read():
    rules = PolicyMap({"head": "float32"})
    with jmp.use_policy("mixed_bfloat16"):
        assert rules["body"].name == "mixed_bfloat16"
        closed = jmp.get_policy(rules)
    assert closed["body"].name == "mixed_bfloat16"
    assert rules["body"].name == "float32"
    assert jmp.get_policy(closed) is closed


def test_a_map_may_be_the_default_policy():
    with jmp.use_policy(PolicyMap({"head": "float32"}, "bfloat16")):
        rules = jmp.get_policy(PolicyMap({"body": "float16"}))
        assert [rules[path].name for path in ("head", "body", "x")] == ["float32", "float16", "bfloat16"]
        assert PolicyMap({"body": "float16"})["head"].name == "float32"


@pytest.mark.parametrize(
    ("rules", "dynamic"),
    [
        (PolicyMap({"a": "float32"}, "mixed_bfloat16"), False),
        (PolicyMap({"a": "float32"}, "float16"), True),
        (PolicyMap({"a": "int4_from_mixed_float16"}, "int8_from_float32"), True),
        (PolicyMap({"a": "float32"}), False),
    ],
)
def test_loss_scale_is_dynamic_if_any_policy_computes_in_float16_or_the_default_if_the_map_is_open(rules, dynamic):
    assert isinstance(rules.loss_scale(), jmp.DynamicLossScale) == dynamic
    with jmp.use_policy("mixed_float16"):
        assert isinstance(rules.loss_scale(), jmp.DynamicLossScale) == (dynamic or rules.default is None)


def test_rules_that_decide_nothing_are_named_and_explained():
    rules = PolicyMap({"a": "bfloat16", "a/b": "float32", "haed": "float32", Norm: "float32", "zzz": "float32"})
    modules = {"": Block, "a": Block, "a/b": Norm, "head": Block}
    assert PolicyMap({"a": "float32", r".*": "bfloat16"}).unused(modules) == ()  # hidden only somewhere
    assert rules.unused(modules) == ("a/b", "haed", Norm, "zzz")
    assert rules.explain_unused(modules) == [
        "policy rule 'a/b' decides nothing: the earlier rule 'a' hides it",
        "policy rule 'haed' matches no module; the closest path is 'head'",
        "policy rule Norm decides nothing: the earlier rule 'a' hides it",
        "policy rule 'zzz' matches no module; the model has the paths 'a', 'a/b', 'head'",
    ]


def test_unused_rules_after_the_fifth_are_named_in_one_sentence():
    *first, rest = PolicyMap({f"x{i}": "float32" for i in range(200)}).explain_unused(["a"])
    assert [text.partition(";")[0] for text in first] == [f"policy rule 'x{i}' matches no module" for i in range(5)]
    assert rest == "other policy rules that decide nothing: 'x5', 'x6', 'x7', 'x8', 'x9' and 190 more"
    last = PolicyMap(dict.fromkeys("abcdef", "float32")).explain_unused([""])[5]
    assert last == "other policy rules that decide nothing: 'f'"


def test_types_and_patterns_are_tried_in_order():
    rules = PolicyMap({"a/.*": "float32", Block: "float16", "a": "bfloat16", "b": "bfloat16", Norm: "float64"})
    types = {"a": Block, "a/b": Block, "b": Norm, "c": Norm, "d": Block}
    assert {path: rules.match(path, types).policy.name for path in types} == {
        "a": "float16", "a/b": "float32", "b": "bfloat16", "c": "float64", "d": "float16",
    }  # fmt: skip


def test_rule_that_matches_nothing_names_what_it_comes_nearest_to():
    explain = lambda key, modules: PolicyMap({key: "float32"}).explain_unused(modules)[0].partition("; ")[2]
    deep = ["transformer/decoder/block_0/attention", "transformer/decoder/lm_head"]
    assert explain("transformer/decoder/lm_haed", deep) == "the closest path is 'transformer/decoder/lm_head'"
    assert explain("haed", deep) == "the closest path is 'transformer/decoder/lm_head', which r'(.*/)?lm_head' matches"
    assert PolicyMap({"(.*/)?lm_head": "float32"}).unused(deep) == ()
    assert explain("zzz", [f"a{i}" for i in range(7)]) == "the model has the paths 'a0', 'a1', 'a2', 'a3', 'a4', ..."
    assert explain("zzz", [""]) == explain(Norm, {"": dict}) == ""
    other = type("Norm", (), {"__module__": "other.library"})  # as linen and nnx have layers of one name
    assert explain(Norm, {"a": other}) == "the closest type is other.library.Norm"


def name_type(name):
    return {"rules": [[{"type": name}, jmp.get_policy("float32").get_config()]], "default": None}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: PolicyMap({"(": "float32"}), ValueError,
         r"^The key '\(', rule 0 of a PolicyMap, is not a valid pattern: .*For example: r'block_\\d\+/mlp'\.$"),
        (lambda: PolicyMap([("a", "float32"), (3, "float32")]), TypeError,
         r"^The key 3, rule 1 of a PolicyMap, is neither a pattern nor a module type\. For example: 'head'\.$"),
        (lambda: PolicyMap({"*norm": "float32"}), ValueError,
         r"nothing to repeat at position 0\. Keys are regular expressions\. For example: '\.\*norm'\.$"),
        (lambda: PolicyMap({Norm(): "float32"}), TypeError,
         r"^The key <.*Norm object .*, rule 0 of a PolicyMap, is neither .* For example: 'head'\.$"),
        (lambda: PolicyMap({functools.partial(print): "float32"}), TypeError, r"module type\. For example: partial\.$"),
        (lambda: PolicyMap("float32"), TypeError,
         r"^The rules of a PolicyMap are a mapping or pairs, got 'float32'\. For example: PolicyMap\(\{'head': 'fl"),
        (lambda: PolicyMap({"a": {"b": "float32"}}), ValueError,
         r"rule 0 of a PolicyMap is not the policy .* slashes\. For example: \{'head/b': 'mixed_bfloat16'\}\.$"),
        (lambda: PolicyMap({"a": "bflaot16"}), ValueError,
         r"^Unknown dtype or policy 'bflaot16'.* It stands for key 'a', rule 0 of a PolicyMap\.$"),
        (lambda: PolicyMap({}, default="x"), ValueError, r"^Unknown dtype or policy 'x'.* as default of a PolicyMap"),
        (lambda: PolicyMap({"a": PolicyMap({})}), ValueError,
         r"^PolicyMap\(.*\) for key 'a', rule 0 of a PolicyMap is not the policy of one module\. For example: 'mixed_"),
        (lambda: PolicyMap([("a",)]), TypeError, r"^\('a',\), rule 0 of a PolicyMap, is not a pair\. For example: "),
        (lambda: PolicyMap.from_config({"rules": []}), ValueError,
         r"^A map's config has the keys 'rules' and 'default', got \['rules'\]\. For example: \{"),
        (lambda: PolicyMap.from_config({"rules": [[{"x": 1}, {}]], "default": None}), ValueError,
         r"^The key \{'x': 1\} of a PolicyMap's config has neither 'path' nor 'type'\. For example: \{'rules': \[\["),
        (lambda: PolicyMap.from_config({"rules": ["head"], "default": None}), ValueError,
         r"^The rule 'head' of a PolicyMap's config is not a pair\. For example: \{'rules': \[\["),
        (lambda: PolicyMap.from_config({"rules": 3, "default": None}), ValueError,
         r"^The rules 3 of a PolicyMap's config are not a list\. For example: \{'rules': \[\["),
        (lambda: PolicyMap.from_config({"rules": [[{"path": 3}, {}]], "default": None}), ValueError,
         r"^3 in the key \{'path': 3\} of a PolicyMap's config is not a string\. For example: \{'rules': \[\["),
        *[
            (lambda name=name: PolicyMap.from_config(name_type(name)), ValueError,
             rf"^The module type '{name}' of a PolicyMap's config cannot be found: {reason}\.$")
            for name, reason in {
                "no_module.layers:A": r"import its Python module first\. For example: import no_module.layers",
                ".relative:A": r"import its Python module first\. For example: import my_project.layers",
                "": r"import its Python module first\. For example: import my_project.layers",
                "json:NoSuchClass": r"'json' has no such class\. For example: 'flax.nnx.nn.linear:Linear'",
                "json:dumps": r"'json' has no such class\. For example: 'flax.nnx.nn.linear:Linear'",
                "flax.no_such_module:A": r"Flax has no such type\. For example: 'flax.nnx.nn.linear:Linear'",
            }.items()
        ],
    ],
)  # fmt: skip
def test_bad_maps_fail_at_construction(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_config_runs_no_code(tmp_path, monkeypatch):
    for name in ("module_beside_the_config", "loaded_with_lazy_names"):
        code = "import pathlib\npathlib.Path('ran').touch()\ndef __getattr__(name):\n    pathlib.Path('ran').touch()\n"
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setitem(sys.modules, "loaded_with_lazy_names", importlib.import_module("loaded_with_lazy_names"))
    (tmp_path / "ran").unlink()
    for name in ("module_beside_the_config:A", "loaded_with_lazy_names:A"):
        with pytest.raises(ValueError, match="of a PolicyMap's config cannot be found"):
            jmp.get_policy(name_type(name))
    assert not (tmp_path / "ran").exists()
    assert "module_beside_the_config" not in sys.modules


def test_a_config_finds_types_of_flax_and_of_loaded_modules():
    rules = PolicyMap({nn.Dense: "bfloat16", nnx.Linear: "bfloat16", Norm.Inner: "float32"}, "float32")
    assert PolicyMap.from_config(json.loads(json.dumps(rules.get_config()))) == rules


VALUES = [
    None, True, 0, -1, 1.5, float("nan"), 10**400, "", "x", "(", "float32", "int8", [], [1], [[]], {}, {"a": 1},
    {1: 2, "a": 3}, {"path": None}, {"type": None}, b"x", object(), float,
    functools.reduce(lambda x, _: [x], range(900), []),
]  # fmt: skip
CONFIGS = {
    "a map": PolicyMap({"head": "int8_from_bf16", Norm: "float32"}, "float8_from_mixed_bfloat16").get_config(),
    "a policy": jmp.get_policy("p=f32,c=bf16,o=f32,a=f32,r=f32,precision=highest,cache=int8").get_config(),
    "a Keras policy with a history": keras.dtype_policies.serialize(keras.dtype_policies.get("float8_from_bfloat16")),
    "a Keras policy with a loss scale": keras.dtype_policies.serialize(keras.Policy("mixed_float16", loss_scale=1024)),
    "a Keras map": keras.dtype_policies.serialize(keras.DTypePolicyMap("float32", {"head": "bfloat16"})),
}


def list_damaged(tree):
    """Yields the tree with each part replaced, left out, or with one more beside it."""
    yield from VALUES
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
            rest = {other: part for other, part in pairs if other != key}
            for changed in [rest, rest | {"zzz": 1}, *({**rest, key: part} for part in list_damaged(tree[key]))]:
                yield changed if isinstance(tree, dict) else [*changed.values()]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore:loss_scale=0 makes")
def test_a_malformed_config_raises_a_value_error_alone(name):
    read: Any = keras.dtype_policies.deserialize if "Keras" in name else jmp.get_policy
    read(CONFIGS[name])
    refused = 0
    for config in list_damaged(CONFIGS[name]):
        try:
            read(config)
        except ValueError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("(a|a)*b", "a" * 40),
        pytest.param("(?x)(a+)+$ # why", "a" * 40 + "!", marks=pytest.mark.slow),
        pytest.param("(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)x", "a" * 80, marks=pytest.mark.slow),
        pytest.param("a?" * 40 + "z", "a" * 40, marks=pytest.mark.slow),
    ],
)
def test_a_pattern_that_backtracks_is_refused(key, path):
    example = r"For example: r'\(\.\*/\)\?block_\\d\+/mlp'\.$"
    text = f"^The key {re.escape(repr(key))} of a PolicyMap takes too long on the path '{path}': .*{example}"
    with pytest.raises(ValueError, match=text):
        PolicyMap({key: "float32"}, "bfloat16").resolve(path)
    with pytest.raises(ValueError, match=text):
        keras.DTypePolicyMap("bfloat16", {key: "float32"})[path]


def test_patterns_with_repetitions_that_match_in_one_way_are_not_refused():
    path = "encoder/" * 20 + "block_1/" * 20 + "mlp"
    keys = r"(.*/)?block_\d+/mlp", r"((encoder|block_\d+)/)*mlp", r"(?:\w+/)*mlp", r"(?i).*/BLOCK_\d+/(mlp|norm)?"
    for key in keys:
        assert PolicyMap({key: "float32"}, "bfloat16")[path].name == "float32"


def test_a_path_of_many_modules_has_a_policy():
    rules = PolicyMap({"a/a": "float32"}, "bfloat16")
    assert (rules["/".join("a" * 3000)].name, rules["/".join("b" * 3000)].name) == ("float32", "bfloat16")
