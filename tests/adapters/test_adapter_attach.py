"""Where a policy reaches in a model, where things are cast, and what stays as it was."""

import copy
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from flax_apis import BF16_INSIDE, F16_INSIDE, LINEN, NNX, X, is_rounded_to_bfloat16

import jmp_policy as jmp

HALF_RULE = "params=float32,compute=float16,output=float32"


def make_net(api, seen=None):
    """A model of layers, a module with layers, and a Param. Its methods call each other and note the dtypes."""
    seen = {} if seen is None else seen

    @api.module(up=api.dense, down=api.dense)
    class Project:
        def __call__(self, x):
            x = self.up(x)
            seen["up"] = str(x.dtype)
            return self.down(x)

    @api.module(params=["scale"])
    class Scale:
        def __call__(self, x):
            seen["scale"] = str(self.scale.dtype)
            return x * self.scale.astype(x.dtype)

    @api.module(encoder=Project, scale=Scale, head=lambda: api.dense(3))
    class Net:
        def encode(self, x):
            seen["entered"] = str(x.dtype)
            x = self.encoder(x)
            seen["encoder"] = str(x.dtype)
            return self.scale(x)

        def __call__(self, x):
            x = self.encode(x)
            seen["encoded"] = str(x.dtype)
            return self.head(x)

    return Net


def see(api, policy, method="__call__", kind=None):
    """The dtypes inside a model under a policy, and of its output."""
    seen: dict[str, Any] = {}
    kind = make_net(api, seen) if kind is None else kind(make_net(api, seen))
    out = api.run(api.make(kind) if policy is None else api.under(kind, policy), X, method=method)
    return seen | {"out": str(out.dtype)}


ALL_BF16 = dict.fromkeys(["entered", "up", "encoder", "scale", "encoded"], "bfloat16") | {"out": "float32"}
KINDS = {
    "decorated class": jmp.with_policy(policy=BF16_INSIDE),
    "subclass of a decorated class": lambda kind: make_subclass(jmp.with_policy(kind, BF16_INSIDE)),
    "class under another policy": lambda kind: jmp.with_policy(jmp.with_policy(kind, "float16"), BF16_INSIDE),
}


def make_subclass(kind):
    class Sub(kind):
        def __call__(self, x):
            return super().__call__(x)

        def score(self, x):
            return self.encode(x) + x

    return Sub


def test_everything_inside_computes_in_compute_dtype_and_the_boundary_casts_once(api):
    assert see(api, BF16_INSIDE) == ALL_BF16  # a second cast would say float32 inside
    assert set(see(api, None).values()) == {"float32"}


@pytest.mark.parametrize("give", KINDS.values(), ids=KINDS)
def test_instances_of_a_class_with_a_policy_have_it(api, give):
    assert see(api, None, kind=give) == ALL_BF16


def test_every_public_method_is_a_boundary(api):
    seen = see(api, BF16_INSIDE, method="encode")
    assert (seen["entered"], seen["out"]) == ("bfloat16", "float32")


@pytest.mark.slow
def test_method_that_a_subclass_adds_to_a_decorated_class_is_a_boundary(api):
    model = api.make_drawn(make_subclass(jmp.with_policy(make_net(api), BF16_INSIDE)))
    assert is_rounded_to_bfloat16(api.call(model, X, method="score"))


def test_methods_of_a_matched_module_that_call_each_other_cast_once(api):
    seen: dict[str, str] = {}

    @api.module(net=lambda: make_net(api, seen)())
    class Outer:
        def __call__(self, x):
            return self.net(x), self.net.encode(x)

    rules = jmp.PolicyMap({"net": "params=float32,compute=bfloat16,output=float16"}, "p=f32,c=f32,o=none")
    assert [str(out.dtype) for out in api.run(api.under(Outer, rules), X)] == ["float16", "float16"]
    assert set(seen.values()) == {"bfloat16"}


def test_private_methods_run_inside(api):
    @api.module(dense=api.dense)
    class Helpers:
        def _hidden(self, x):
            return self.dense(x), x

        def __call__(self, x):
            return self._hidden(x)

    assert [str(out.dtype) for out in api.run(api.under(Helpers, "p=f32,c=bf16,o=none"), X)] == ["bfloat16"] * 2


def test_keyword_and_nested_arguments_are_cast_and_integers_and_kept_ones_are_not(api):
    seen = []

    @api.module()
    class Nested:
        def __call__(self, pair, *, mask, position):
            seen[:] = [str(x.dtype) for x in (pair["x"], mask, position)]
            return pair["x"]

    model = api.under(Nested, "bfloat16", no_cast=["position"])
    api.run(model, {"x": X}, mask=jnp.ones(2, bool), position=X)
    assert seen == ["bfloat16", "bool", "float32"]


def test_keep_that_names_no_argument_is_an_error(api):
    with pytest.raises(ValueError, match=r"no_cast names 'positions', but .*Net.__call__ has no such argument"):
        api.under(make_net(api), BF16_INSIDE, no_cast=["positions"])


def test_original_stays_as_it_is_and_the_policied_model_is_of_its_class(api):
    kind = make_net(api)
    original = api.make(kind)
    model = jmp.with_policy(original, BF16_INSIDE)
    assert (type(original), jmp.policy_of(original), jmp.policy_of(kind)) == (kind, None, None)
    assert jmp.policy_of(model) is jmp.get_policy(BF16_INSIDE)
    assert isinstance(model, kind)
    assert type(model).__name__ == "Net"
    api.run(model, X)
    assert api.run(original, X).dtype == jnp.float32
    assert api.find_stored_dtypes(original, X) == api.find_stored_dtypes(model, X)


def test_own_policy_of_a_submodule_wins(api):
    @api.module(inner=lambda: jmp.with_policy(api.dense(), F16_INSIDE), head=api.dense)
    class Outer:
        def __call__(self, x):
            return self.inner(x), self.head(x)

    assert [str(out.dtype) for out in api.run(api.under(Outer, "mixed_bfloat16"), X)] == ["bfloat16"] * 2
    assert [str(out.dtype) for out in api.run(api.under(Outer, "p=f32,c=bf16,o=none"), X)] == ["float32", "bfloat16"]
    assert [str(out.dtype) for out in api.run(api.make(Outer), X)] == ["float32", "float32"]


def test_second_policy_replaces_the_first(api):
    first = api.under(make_net(api), "mixed_bfloat16")
    second = jmp.with_policy(first, "mixed_float16")
    assert [jmp.policy_of(model).name for model in (first, second)] == ["mixed_bfloat16", "mixed_float16"]
    assert [str(api.run(model, X).dtype) for model in (first, second)] == ["bfloat16", "float16"]


@pytest.mark.parametrize("written", ["float32", jnp.float32, np.dtype("float32")])
def test_dtype_that_the_author_wrote_wins(api, written):
    assert api.run(api.under(lambda: api.dense(dtype=written), "p=f32,c=bf16,o=none"), X).dtype == jnp.float32


class LinenDefaulted(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, dtype=self.dtype)(x)


class NnxDefaulted(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        self.dtype = dtype
        self.linear = nnx.Linear(4, 4, dtype=dtype, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)


def test_dtype_that_is_the_default_of_a_field_or_constructor_is_not_the_authors(api):
    kind = {LINEN: LinenDefaulted, NNX: NnxDefaulted}[api]
    assert api.run(api.under(kind, "p=f32,c=bf16,o=none"), X).dtype == jnp.bfloat16
    assert api.run(api.under(lambda: kind(dtype=jnp.float16), "p=f32,c=bf16,o=none"), X).dtype == jnp.float16


@pytest.mark.slow
def test_rule_leaves_the_inputs_and_the_dtype_of_a_layer_whose_dtype_is_written_alone(api):
    @api.module(head=lambda: api.dense(dtype=jnp.float32))
    class Exact:
        def __call__(self, x):
            return self.head(x.astype(jnp.float32) / 3)  # which half precision would round

    model = api.make_drawn(Exact)
    policied = jmp.with_policy(model, jmp.PolicyMap({"head": BF16_INSIDE}, "float32"))
    np.testing.assert_array_equal(api.call(policied, X), api.call(model, X), strict=True)


def test_rules_cover_what_is_inside_by_path_pattern_and_type(api):
    rules = jmp.PolicyMap({"encoder/down": HALF_RULE, r"sc.le": "float32", api.dense_type: HALF_RULE}, BF16_INSIDE)
    inside = {"entered": "bfloat16", "up": "float32", "encoder": "float32", "scale": "float32", "encoded": "float32"}
    assert see(api, rules) == inside | {"out": "float32"}
    assert see(api, jmp.PolicyMap({"encoder/down": "p=f32,c=f16,o=f16"}, "p=f32,c=bf16,o=none"))["encoder"] == "float16"
    assert see(api, jmp.PolicyMap({"encoder": "p=f32,c=f16,o=none"}, "p=f32,c=bf16,o=none"))["up"] == "float16"


def test_matched_module_casts_its_inputs_and_outputs_and_others_leave_theirs_alone(api):
    seen: dict[str, list[str]] = {"ruled": [], "free": []}

    def make_probe(name):
        @api.module()
        class Probe:
            def __call__(self, x, context):
                seen[name][:] = str(x.dtype), str(context["y"].dtype)
                return x

        return Probe()

    @api.module(ruled=lambda: make_probe("ruled"), free=lambda: make_probe("free"))
    class Two:
        def __call__(self, x):
            x = x.astype(jnp.float32)
            return self.ruled(x, context={"y": x}), self.free(x, context={"y": x})

    model = api.under(Two, jmp.PolicyMap({"ruled": HALF_RULE}, "p=f32,c=bf16,o=none"))
    assert [str(out.dtype) for out in api.run(model, X)] == ["float32", "float32"]
    assert seen == {"ruled": ["float16"] * 2, "free": ["float32"] * 2}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"haed": "float32"}, "policy rule 'haed' matches no module; the closest path is 'head'"),
        ({"encoder": HALF_RULE, "encoder/up": "float32"},
         "policy rule 'encoder/up' decides nothing: the earlier rule 'encoder' hides it"),
    ],
)  # fmt: skip
def test_rule_that_decides_nothing_is_named(api, rules, message):
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}"):
        api.run(api.under(make_net(api), jmp.PolicyMap(rules, "mixed_bfloat16")), X)


def test_policy_of_tells_what_a_module_was_given(api):
    rules = jmp.PolicyMap({"scale": BF16_INSIDE}, "float32")
    assert jmp.policy_of(api.under(make_net(api), rules)) is rules
    assert jmp.policy_of(jmp.with_policy(make_net(api), rules)) is rules


def test_default_policy_is_captured_when_a_policy_is_applied(api):
    with jmp.use_policy("mixed_bfloat16"):
        model, kind = jmp.with_policy(api.make(api.dense)), jmp.with_policy(make_net(api))
        ruled = jmp.with_policy(api.make(make_net(api)), jmp.PolicyMap({"head": "float32"}))
    with jmp.use_policy("mixed_float16"):
        assert api.run(model, X).dtype == jnp.bfloat16
        assert api.run(api.make(kind), X).dtype == jnp.bfloat16
        assert api.run(ruled, X, method="encode").dtype == jnp.bfloat16


@pytest.mark.usefixtures("no_default_precision")
def test_matmuls_run_at_the_policys_precision(api):
    model = api.make(api.dense)
    assert "HIGHEST" in str(api.trace(jmp.with_policy(model, "params=float32,precision=highest"), X))
    assert "HIGHEST" not in str(api.trace(model, X))


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_copies_keep_the_policy(api, make_copy):
    model = api.under(api.dense, BF16_INSIDE)
    clone = make_copy(model)
    assert jmp.policy_of(clone) is jmp.policy_of(model)
    assert "bf16[2,4] = dot_general" in str(api.trace(clone, X))


@pytest.mark.slow
def test_one_jitted_function_keeps_policies_apart_and_traces_each_once(api):
    traces = []

    @api.module(dense=api.dense)
    class Net:
        def __call__(self, x):
            traces.append(x.dtype)
            return self.dense(x)

    model = api.make_drawn(Net)
    run = api.make_jitted_call(model, X)
    for spec in ("mixed_bfloat16", "mixed_float16", "p=f32,c=bf16"):  # the last is the first under another name
        assert run(jmp.with_policy(model, spec), X).dtype == jmp.get_policy(spec).output_dtype
    assert run(model, X).dtype == jnp.float32
    assert [str(dtype) for dtype in traces[-3:]] == ["bfloat16", "float16", "float32"]


def test_no_name_of_flax_is_patched(api):
    def list_names():
        # `_jmp_memory` is an attribute of our own, for the classes that were made of this one.
        pairs = [(kind, name) for kind in (api.dense_type, api.base) for name in vars(kind)]
        return {(kind, name): vars(kind)[name] for kind, name in pairs if name != "_jmp_memory"}

    before = list_names()
    api.run(api.under(make_net(api), "mixed_bfloat16"), X)
    after = list_names()
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []


def test_models_of_one_class_that_hold_other_modules_are_told_apart(api):
    """Instances of one class may hold different modules: what was seen in one says nothing about another."""
    kinds = {name: make_net(api) for name in ("Mixer", "Attention")}

    @api.module(block=lambda: kinds[held]())
    class Outer:
        def __call__(self, x):
            return self.block(x)

    rules = jmp.PolicyMap({kinds["Mixer"]: "p=f32,c=f16,o=none"}, "p=f32,c=bf16,o=none")
    held = "Mixer"
    assert api.run(api.under(Outer, rules), X).dtype == jnp.float16
    held = "Attention"
    with pytest.warns(UserWarning, match="policy rule .*Net matches no module"):
        assert api.run(api.under(Outer, rules), X).dtype == jnp.bfloat16


def test_rule_of_the_type_of_the_root_is_that_of_its_boundary(api):
    net = make_net(api)
    model = api.under(net, jmp.PolicyMap({net: "p=f32,c=bf16,o=f16"}, "float32"))
    assert api.run(model, X).dtype == jnp.float16


def test_integers_pass_and_parameters_are_stored_in_param_dtype(api):
    @api.module(embed=api.embed, head=api.dense)
    class Reader:
        def __call__(self, tokens):
            return self.head(self.embed(tokens))

    for spec, stored in ((BF16_INSIDE, "float32"), ("p=f16,c=bf16,o=f32", "float16")):
        model = api.under(Reader, spec)
        assert api.run(model, jnp.arange(3)).dtype == jnp.float32
        assert set(api.find_stored_dtypes(model, jnp.arange(3)).values()) == {stored}
