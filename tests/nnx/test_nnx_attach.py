"""Policies of nnx instances: where things are cast, whose policy wins, and what is shared."""

import copy
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_models import BF16_INSIDE, Net, Probe, Scale, X, dtype_of, rngs

import jmp_policy as jmp


def test_instance_casts_once_at_its_boundary():
    model = jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)
    assert dtype_of(model, X) == "float32"
    assert (model.entered, model.probe.saw, model.encoded) == ("bfloat16",) * 3  # a second cast would say float32


def test_every_public_method_is_a_boundary():
    model = jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)
    assert model.encode(X).dtype == jnp.float32
    assert model.entered == "bfloat16"


def test_keyword_and_nested_arguments_are_cast_and_integers_are_not():
    class Nested(nnx.Module):
        def __call__(self, pair, *, mask, position):
            return [str(x.dtype) for x in (pair["x"], mask, position)]

    model = jmp.with_policy(Nested(), "bfloat16", no_cast=["position"])
    assert model({"x": X}, mask=jnp.ones(2, bool), position=X) == ["bfloat16", "bool", "float32"]


def test_modules_as_arguments_are_left_to_their_own_policies():
    class Apply(nnx.Module):
        def __call__(self, module, x):
            return module.scale[...].dtype, x.dtype

    assert jmp.with_policy(Apply(), "bfloat16")(Scale(rngs=rngs()), X) == (jnp.float32, jnp.bfloat16)


def test_keep_that_names_no_argument_is_an_error():
    with pytest.raises(ValueError, match=r"no_cast names 'positions', but Net.__call__ has no such argument"):
        jmp.with_policy(Net(rngs=rngs()), "bfloat16", no_cast=["positions"])


def test_keep_that_is_a_string_is_an_error():
    with pytest.raises(ValueError, match=r"no_cast must be a collection of argument names, got the string 'x'"):
        jmp.with_policy(Net(rngs=rngs()), "bfloat16", no_cast="x")


def test_keep_may_name_an_argument_of_any_public_method():
    class Two(nnx.Module):
        def __call__(self, x):
            return x.dtype

        def decode(self, x, position):
            return x.dtype, position.dtype

    model = jmp.with_policy(Two(), "bfloat16", no_cast=["position"])
    assert model(X) == jnp.bfloat16
    assert model.decode(X, X) == (jnp.bfloat16, jnp.float32)


@pytest.mark.slow
def test_original_is_untouched_and_shares_its_variables():
    plain = Net(rngs=rngs())
    graphdef = nnx.graphdef(plain)
    model = jmp.with_policy(plain, "mixed_bfloat16")
    model(X)
    assert nnx.graphdef(plain) == graphdef
    assert dtype_of(plain, X) == "float32"
    assert model.embed.kernel is plain.embed.kernel
    assert model.scale.scale is plain.scale.scale
    model.embed.kernel[...] = jnp.zeros((4, 4))
    assert not plain.embed.kernel[...].any()


def test_policied_model_is_an_instance_of_its_class():
    model = jmp.with_policy(Net(rngs=rngs()), "mixed_bfloat16")
    assert isinstance(model, Net)
    assert isinstance(model.embed, nnx.Linear)
    assert type(model).__name__ == "Net"


def test_own_policy_of_a_submodule_wins():
    plain = Net(rngs=rngs())
    plain.head = jmp.with_policy(plain.head, "float32")
    model = jmp.with_policy(plain, "mixed_bfloat16")
    assert (model.head.dtype, model.embed.dtype) == (jnp.float32, jnp.bfloat16)
    model(X)
    assert model.encoded == "bfloat16"
    assert model.head(X.astype(jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.slow
def test_second_policy_replaces_the_first():
    first = jmp.with_policy(Net(rngs=rngs()), "mixed_bfloat16")
    second = jmp.with_policy(first, "mixed_float16")
    assert jmp.policy_of(second).name == "mixed_float16"
    assert (second.embed.dtype, first.embed.dtype) == (jnp.float16, jnp.bfloat16)
    second(X)
    assert (second.entered, second.scale.read) == ("float16", "float16")
    assert jmp.with_policy(second, "p=f32,c=none,o=none").embed.dtype is None


@pytest.mark.parametrize("written", ["float32", jnp.float32, np.dtype("float32")])
def test_dtype_that_the_author_wrote_wins(written):
    plain = Net(rngs=rngs())
    plain.embed = nnx.Linear(4, 4, dtype=written, rngs=rngs())
    model = jmp.with_policy(plain, "mixed_bfloat16")
    model(X)
    assert model.embed.dtype is written
    assert model.probe.saw == "float32"


def test_dtype_that_is_the_default_of_the_constructor_is_not_written():
    class Cell(nnx.Module):
        def __init__(self, dtype=jnp.float32, *, rngs):
            self.dtype = dtype
            self.linear = nnx.Linear(4, 4, dtype=dtype, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    model = jmp.with_policy(Cell(rngs=rngs()), BF16_INSIDE)
    assert (model.dtype, model.linear.dtype) == (jnp.bfloat16, jnp.bfloat16)
    written = jmp.with_policy(Cell(jnp.float16, rngs=rngs()), BF16_INSIDE)
    assert (written.dtype, written.linear.dtype) == (jnp.float16, jnp.float16)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_wrappers_of_weights_are_left_to_the_layer_they_wrap(wrapper):
    plain = wrapper(nnx.Linear(4, 4, rngs=rngs()), rngs=rngs())
    model = jmp.with_policy(plain, BF16_INSIDE)
    assert dtype_of(model, X) == "float32"
    assert (model.dtype, model.layer_instance.dtype) == (None, jnp.bfloat16)
    assert {str(v.dtype) for v in jax.tree.leaves(nnx.state(model)) if jnp.issubdtype(v.dtype, jnp.floating)} == {
        "float32"
    }


@pytest.mark.slow
def test_rule_that_names_a_wrapper_of_weights_is_a_boundary():
    model = nnx.Sequential(nnx.SpectralNorm(nnx.Linear(4, 4, rngs=rngs()), rngs=rngs()))
    policied = jmp.with_policy(model, jmp.PolicyMap({"layers/0": "mixed_float16"}, "p=f32,c=f32,o=none"))
    assert dtype_of(policied, X) == "float16"


def test_lists_of_modules_take_policies():
    layers = jmp.with_policy(nnx.List([nnx.Linear(4, 4, rngs=rngs())]), "mixed_bfloat16")
    layers.append(nnx.Linear(4, 4, rngs=rngs()))
    assert (len(layers), layers[0].dtype) == (2, jnp.bfloat16)


@pytest.mark.usefixtures("no_default_precision")
def test_precision_reaches_the_matmuls_inside():
    class Product(nnx.Module):
        def __call__(self, x):
            return x @ x.T

    model = jmp.with_policy(Product(), "p=f32,c=f32,o=f32,precision=highest")
    assert "HIGHEST" in str(jax.make_jaxpr(model)(X))
    assert "HIGHEST" not in str(jax.make_jaxpr(Product())(X))


def test_stored_parameter_of_another_dtype_is_an_error_that_names_cast_params():
    message = (
        r"The parameter 'embed/kernel' is stored in float32, but the policy 'bfloat16' stores parameters in "
        r"bfloat16. Cast a copy first: with_policy\(jmp_policy.nnx.cast_params\(model, policy\), policy\)."
    )
    with pytest.raises(ValueError, match=message):
        jmp.with_policy(Net(rngs=rngs()), "bfloat16")


def test_cast_params_makes_the_copy_that_with_policy_takes():
    plain = Net(rngs=rngs())
    plain.norm = nnx.BatchNorm(4, rngs=rngs())
    cast = jmp.nnx.cast_params(plain, "bfloat16")
    assert {str(p.dtype) for p in jax.tree.leaves(nnx.state(cast, nnx.Param))} == {"bfloat16"}
    assert {str(p.dtype) for p in jax.tree.leaves(nnx.state(cast, nnx.BatchStat))} == {"float32"}
    assert {str(p.dtype) for p in jax.tree.leaves(nnx.state(plain, nnx.Param))} == {"float32"}
    assert jmp.policy_of(cast) is None
    assert dtype_of(jmp.with_policy(cast, "bfloat16"), X) == "bfloat16"


def test_cast_params_follows_a_map():
    cast = jmp.nnx.cast_params(Net(rngs=rngs()), jmp.PolicyMap({"head": "float32"}, "bfloat16"))
    assert (cast.head.kernel.dtype, cast.embed.kernel.dtype) == (jnp.float32, jnp.bfloat16)


def test_policy_of_tells_what_a_module_was_given():
    rules = jmp.PolicyMap({"scale": BF16_INSIDE}, "float32")
    model = jmp.with_policy(Net(rngs=rngs()), rules)
    assert jmp.policy_of(model) is rules
    assert jmp.policy_of(model.scale) is jmp.get_policy(BF16_INSIDE)
    assert jmp.policy_of(model.embed) is None
    assert jmp.policy_of(Net(rngs=rngs())) is None


def test_rule_of_a_map_is_a_boundary_where_it_matches():
    model = jmp.with_policy(Net(rngs=rngs()), jmp.PolicyMap({"scale": BF16_INSIDE, "blocks/1": "float32"}, "float32"))
    model(X)
    assert (model.entered, model.scale.read, model.encoded) == ("float32", "bfloat16", "float32")


@pytest.mark.slow
def test_rules_cover_what_is_inside_by_path_pattern_and_type():
    rules = jmp.PolicyMap({"blocks": "float32", r"sc.le": "float32", nnx.Linear: "mixed_float16"}, "mixed_bfloat16")
    model = jmp.with_policy(Net(rngs=rngs()), rules)
    assert [block.dtype for block in model.blocks] == [jnp.float32, jnp.float32]
    assert (model.embed.dtype, model.head.dtype) == (jnp.float16, jnp.float16)
    model(X)
    assert (model.entered, model.scale.read) == ("bfloat16", "float32")


@pytest.mark.slow
def test_rule_leaves_a_dtype_that_the_author_wrote_alone():
    plain = Net(rngs=rngs())
    plain.head = nnx.Linear(4, 3, dtype=jnp.float32, rngs=rngs())
    model = jmp.with_policy(plain, jmp.PolicyMap({"head": "mixed_float16"}, BF16_INSIDE))
    x = jnp.full((1, 4), 1 + 2.0**-12)  # which float16 would round
    np.testing.assert_array_equal(model.head(x), plain.head(x), strict=True)


def test_rule_that_matches_nothing_is_named_with_the_closest_path():
    with pytest.warns(UserWarning, match=r"policy rule 'haed' matches no module; the closest path is 'head'") as record:
        jmp.with_policy(Net(rngs=rngs()), jmp.PolicyMap({"haed": "float32"}, "mixed_bfloat16"))
    assert record[0].filename == __file__


@pytest.mark.slow
def test_map_captures_the_default_policy_when_it_is_applied():
    with jmp.use_policy("mixed_bfloat16"):
        model = jmp.with_policy(Net(rngs=rngs()), jmp.PolicyMap({"head": "float32"}))
    model.embed = nnx.Linear(4, 4, rngs=rngs())
    model(X)
    assert model.embed.dtype == jnp.bfloat16


def test_shared_submodules_stay_shared():
    class Twice(nnx.Module):
        def __init__(self, *, rngs):
            self.first = self.second = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    model = jmp.with_policy(Twice(rngs=rngs()), "mixed_bfloat16")
    assert model.first is model.second
    assert len(jax.tree.leaves(nnx.state(model))) == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, nnx.clone, lambda m: nnx.merge(*nnx.split(m))])
def test_copies_keep_the_policy(make_copy):
    model = jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)
    clone = make_copy(model)
    assert jmp.policy_of(clone) is jmp.policy_of(model)
    clone(X)
    assert (clone.entered, clone.scale.read) == ("bfloat16", "bfloat16")


def test_pickles_keep_the_policy():
    model = pickle.loads(pickle.dumps(jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)))
    assert jmp.policy_of(model) is jmp.get_policy(BF16_INSIDE)
    model(X)
    assert model.entered == "bfloat16"


def test_equal_policies_give_one_class_so_that_jit_caches_hit():
    first, second = (jmp.with_policy(Net(rngs=rngs()), spec) for spec in ("mixed_bfloat16", "p=f32,c=bf16"))
    assert nnx.graphdef(first) == nnx.graphdef(second)


def test_no_name_of_flax_is_patched():
    list_names = lambda: {
        (kind, name): value
        for kind in (nnx.Linear, nnx.Module, Net)
        for name, value in vars(kind).items()
        if name != "_jmp_memory"  # an attribute of our own, for the classes that were made of this one
    }
    before = list_names()
    jmp.with_policy(Net(rngs=rngs()), "mixed_bfloat16")(X)
    after = list_names()
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] for key in before)


def test_method_that_returns_the_module_returns_the_policied_one():
    class Fluent(nnx.Module):
        def configured(self):
            return self

    model = jmp.with_policy(Fluent(), "bfloat16")
    assert model.configured() is model


def test_modules_that_are_no_pytrees_take_policies():
    class Plain(nnx.Module, pytree=False):
        def __init__(self):
            self.probes = [Probe()]

        def __call__(self, x):
            return self.probes[0](x)

    model = jmp.with_policy(Plain(), BF16_INSIDE)
    assert dtype_of(model, X) == "float32"
    assert model.probes[0].saw == "bfloat16"


def test_attaching_warns_of_nothing_else():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.with_policy(Net(rngs=rngs()), jmp.PolicyMap({"head": "float32"}, "mixed_bfloat16"))(X)


class Encoder(nnx.Module):
    def encode(self, x):
        return self.linear(x)

    def scale(self, x):
        return 2 * x


class Captured(Encoder):
    def __init__(self):
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.gain = nnx.Param(jnp.ones(3))

    def __call__(self, x):
        return self.scale(self.last(self.scale(self.encode(x))))

    def scale(self, x):
        return super().scale(x) * self.gain.astype(x.dtype)


class Holder(nnx.Module):
    def __init__(self, kind=Captured):
        self.inner = kind()

    def __call__(self, x):
        return self.inner(x), self.inner.encode(x), self.inner.scale(self.inner.encode(x))


def capture_outputs(model, x=X[:1, :2]):
    return nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)[1]


def count_captured(model):
    return {path: len(value.get_value()) for path, value in nnx.to_flat_state(capture_outputs(model))}


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", {"inner": "float32", "": "mixed_bfloat16"}])
def test_capture_of_method_outputs_has_the_keys_that_it_has_without_a_policy(policy):
    policy = jmp.PolicyMap(policy) if isinstance(policy, dict) else policy
    plain = count_captured(Holder())
    # Two calls of `scale` by the module itself and one from outside; `encode` is inherited, which Flax leaves out.
    assert plain["inner", "scale"] == 3
    assert ("inner", "encode") not in plain
    assert count_captured(jmp.with_policy(Holder(), policy)) == plain
    assert count_captured(Holder(jmp.with_policy(Captured, "mixed_bfloat16"))) == plain


def test_methods_that_a_module_calls_on_itself_are_captured_as_they_compute():
    captured = capture_outputs(jmp.with_policy(Captured(), "params=float32,compute=bfloat16,output=float32"))
    assert [value.dtype for value in captured["scale"].get_value()] == [jnp.bfloat16] * 2
    assert captured["__call__"].get_value()[0].dtype == jnp.float32


def test_inherited_methods_have_the_policy():
    model = jmp.with_policy(Captured(), "params=float32,compute=bfloat16,output=float32")
    assert jax.eval_shape(lambda x: model.linear(x), X[:, :2]).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda x: Encoder.encode(model, x), X[:, :2]).dtype == jnp.bfloat16  # past the policy
    assert jax.eval_shape(lambda x: model.encode(x), X[:, :2]).dtype == jnp.float32
    assert pickle.loads(pickle.dumps(model)).encode(X[:, :2]).dtype == jnp.float32


def test_a_policy_that_is_given_while_flax_captures_holds_after_it():
    class Late(Captured):
        def __call__(self, x):
            return self.scale(self.encode(x))

    give = lambda model, x: jmp.with_policy(model, "mixed_bfloat16")(x)
    nnx.capture(give, nnx.Intermediate, method_outputs=nnx.Intermediate)(Late(), X[:, :2])
    assert give(Late(), X[:, :2]).dtype == jnp.bfloat16
