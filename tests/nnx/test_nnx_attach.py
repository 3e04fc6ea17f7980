"""Policies of nnx instances, where nnx alone can do it: shared Variables, `cast_params`, captures, transforms."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_models import BF16_INSIDE, Net, Probe, Scale, X, dtype_of, is_bfloat16, rngs

import jmp_policy as jmp


def test_modules_as_arguments_are_left_to_their_own_policies():
    class Apply(nnx.Module):
        def __call__(self, module, x):
            return module.scale[...].dtype, x.dtype

    assert jmp.with_policy(Apply(), "bfloat16")(Scale(rngs=rngs()), X) == (jnp.float32, jnp.bfloat16)


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
    assert jmp.with_policy(model, "p=f32,c=none,o=none").embed.dtype is None


@pytest.mark.slow
def test_rule_that_names_a_wrapper_of_weights_is_a_boundary():
    model = nnx.Sequential(nnx.SpectralNorm(nnx.Linear(4, 4, rngs=rngs()), rngs=rngs()))
    policied = jmp.with_policy(model, jmp.PolicyMap({"layers/0": "mixed_float16"}, "p=f32,c=f32,o=none"))
    assert dtype_of(policied, X) == "float16"


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
    cast = jmp.nnx.cast_params(plain, jmp.PolicyMap({"head": "float32"}, "bfloat16"))
    assert (cast.head.kernel.dtype, cast.embed.kernel.dtype) == (jnp.float32, jnp.bfloat16)


def test_shared_submodules_stay_shared():
    class Twice(nnx.Module):
        def __init__(self, *, rngs):
            self.first = self.second = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    model = jmp.with_policy(Twice(rngs=rngs()), "mixed_bfloat16")
    assert model.first is model.second
    assert len(jax.tree.leaves(nnx.state(model))) == 2


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


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", {"inner": "float32", "": "mixed_bfloat16"}])
def test_capture_of_method_outputs_has_the_keys_that_it_has_without_a_policy(policy):
    policy = jmp.PolicyMap(policy) if isinstance(policy, dict) else policy
    plain = count_captured(Holder())
    # Two calls of `scale` by the module itself and one from outside; `encode` is inherited, which Flax leaves out.
    assert plain["inner", "scale"] == 3
    assert ("inner", "encode") not in plain
    assert count_captured(jmp.with_policy(Holder(), policy)) == plain
    assert count_captured(Holder(jmp.with_policy(Captured, "mixed_bfloat16"))) == plain


@pytest.mark.slow
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


class Tied(nnx.Module):
    """Two layers with one kernel."""

    def __init__(self):
        self.first, self.second = (nnx.Linear(4, 4, use_bias=False, rngs=rngs()) for _ in range(2))
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.first(x).dtype, self.second(x).dtype


@pytest.mark.parametrize("attach", [lambda m, p: jmp.with_policy(m, p), jmp.nnx.cast_params])
def test_tied_parameter_that_two_rules_store_differently_is_an_error(attach):
    message = (
        r"^The parameter 'second/kernel' is 'first/kernel' as well, but one policy stores it in bfloat16 and the other "
        r"in float32\. Give both places one param dtype\. For example: 'params=float32,compute=bfloat16'\.$"
    )
    with pytest.raises(ValueError, match=message):
        attach(Tied(), jmp.PolicyMap({"second": "bfloat16"}, "float32"))


def test_tied_parameter_is_computed_with_as_the_rule_of_each_place_says():
    rules = jmp.PolicyMap({"second": "params=float32,compute=bfloat16"}, "float32")
    assert jmp.with_policy(Tied(), rules)(X) == (jnp.float32, jnp.bfloat16)


def test_shared_module_follows_the_rules_of_its_first_place_and_the_other_is_named():
    class Shared(Tied):
        def __init__(self):
            self.first = self.second = nnx.Linear(4, 4, rngs=rngs())

    with pytest.warns(UserWarning, match="policy rule 'second' matches no module"):
        model = jmp.with_policy(Shared(), jmp.PolicyMap({"second": "mixed_bfloat16"}, "float32"))
    assert model(X) == (jnp.float32, jnp.float32)
    assert model.first is model.second


@pytest.mark.slow
@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_methods_that_are_transforms_keep_parameters_as_they_are_stored(transform):
    class Transformed(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.scale = nnx.Param(jnp.float32(1.001) * jnp.ones(4))

        __call__ = transform(lambda self, x: self.linear(x) * self.scale)

    model = jmp.with_policy(Transformed(rngs=rngs()), BF16_INSIDE)
    before = model.scale[...]
    out = model(X)
    assert is_bfloat16(out)
    np.testing.assert_array_equal(model.scale[...], before, strict=True)  # not rounded on the way back
    assert nnx.grad(lambda m: m(X).sum())(model)["scale"][...].dtype == jnp.float32


def test_intermediates_are_captured():
    class Sower(nnx.Module):
        def __init__(self, *, rngs):
            self.scale = nnx.Param(jnp.ones(4, jnp.float32))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "hidden", x * self.scale)
            return x

    out, captured = nnx.capture(jmp.with_policy(Sower(rngs=rngs()), BF16_INSIDE), nnx.Intermediate)(X)
    assert captured["hidden"].get_value()[0].dtype == jnp.bfloat16
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("layer", [nnx.Linear, nnx.Einsum, nnx.Conv, nnx.Embed, nnx.MultiHeadAttention, nnx.WeightNorm])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "int8(attention=true)_from_mixed_bfloat16"])
def test_subclass_of_a_layer_may_make_other_attributes(layer, policy):
    class Own(layer):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x):
            return x @ self.kernel

    assert jax.eval_shape(jmp.with_policy(Own(), policy), X).dtype == jnp.bfloat16
