"""Policies across the bridges between linen and nnx."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from nnx_models import BF16_INSIDE, X, is_bfloat16, rngs
from nnx_transforms import Block
from programs import walk

import jmp_policy as jmp

BF16, F16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32")


class Pair(nn.Module):
    """Two linen layers; it tells in which dtypes they return, and in which dtype its input came."""

    @nn.compact
    def __call__(self, x, position=None):
        up = nn.Dense(4, name="up")(x)
        down = nn.Dense(4, name="down")(up)
        entered = None if position is None else position.dtype
        return {"entered": x.dtype, "position": entered, "up": up.dtype, "down": down.dtype, "out": down}


class Outer(nnx.Module):
    """A model with a linen module and a layer of nnx in it."""

    def __init__(self):
        self.first = nnx.Linear(4, 4, rngs=rngs())
        self.pair = nnx.bridge.ToNNX(Pair(), rngs=rngs()).lazy_init(X)

    def __call__(self, x):
        self.first(x)
        return self.pair(x.astype(jnp.float32))


def dtypes(out):
    return [out[name] for name in ("entered", "up", "down")] + [out["out"].dtype]


@pytest.mark.slow
def test_linen_module_in_a_bridge_keeps_its_own_policy():
    model = nnx.bridge.ToNNX(jmp.with_policy(nn.Dense(4), "mixed_float16"), rngs=rngs()).lazy_init(X)
    assert jmp.policy_of(jmp.with_policy(model, "p=f32,c=bf16,o=none").to_nnx__module).name == "mixed_float16"


def test_policied_module_in_a_bridge_to_linen():
    model = nnx.bridge.to_linen(jmp.with_policy(Block, BF16_INSIDE), changes=False)
    variables = model.init(jax.random.key(0), X)
    out = model.apply(variables, X)
    assert is_bfloat16(out)
    assert variables["params"]["linear"]["kernel"].dtype == jnp.float32


class TestInside:
    """A linen module inside a model of nnx, which was given a policy or a map."""

    @pytest.mark.slow
    def test_has_the_policy_and_leaves_its_inputs_alone(self):
        assert dtypes(jmp.with_policy(Outer(), BF16_INSIDE)(X)) == [F32, BF16, BF16, F32]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("rules", "expected"),
        [
            ({"pair": "p=f32,c=f16,o=f32"}, [F16, F16, F16, F32]),
            ({"pair/up": "float16"}, [F32, F16, BF16, BF16]),
            ({r".*/down": "float16"}, [F32, BF16, F16, F16]),
            ({nn.Dense: "float16"}, [F32, F16, F16, F16]),
            ({nnx.bridge.ToNNX: "p=f32,c=f16,o=f32"}, [F16, F16, F16, F32]),
            ({"pair/up": "float16", nnx.bridge.ToNNX: "float32"}, [F32, F16, F32, F32]),
            ({nnx.bridge.ToNNX: "float32", "pair/up": "float16"}, [F32, F32, F32, F32]),
        ],
    )
    def test_rules_of_a_map_name_modules_on_both_sides_of_the_bridge(self, rules, expected):
        policies = {key: jmp.get_policy(spec).replace(param_dtype="float32") for key, spec in rules.items()}
        model = jmp.with_policy(Outer(), jmp.PolicyMap(policies, "p=f32,c=bf16,o=none"))
        assert dtypes(model(X)) == expected

    def test_open_dtype_is_that_of_the_models_inputs(self):
        model = jmp.with_policy(Outer(), "params=float32,compute=none,output=none")
        for dtype in (F16, BF16):
            assert dtypes(model(X.astype(dtype))) == [F32, dtype, dtype, dtype]


class TestWrapper:
    """The wrapper of a linen module that was itself given a policy."""

    @pytest.mark.slow
    def test_policy_may_come_before_the_parameters(self):
        model = jmp.with_policy(nnx.bridge.ToNNX(Pair(), rngs=rngs()), BF16_INSIDE).lazy_init(X)
        assert dtypes(model(X)) == [BF16, BF16, BF16, F32]
        assert model.up["kernel"].dtype == F32

    def make(self, policy, no_cast=()):
        return jmp.with_policy(nnx.bridge.ToNNX(Pair(), rngs=rngs()).lazy_init(X), policy, no_cast=no_cast)

    def test_rules_name_the_linen_modules_inside(self):
        model = self.make(jmp.PolicyMap({"up": "p=f32,c=f16,o=f16"}, BF16_INSIDE))
        assert dtypes(model(X)) == [BF16, F16, BF16, F32]

    @pytest.mark.slow
    def test_named_argument_of_the_linen_module_enters_uncast(self):
        model = self.make(BF16_INSIDE, no_cast=["position"])
        for out in (model(X, X), model(X, position=X)):
            assert (out["entered"], out["position"]) == (BF16, F32)

    def test_name_of_no_argument_of_the_linen_module_is_an_error(self):
        with pytest.raises(ValueError, match=r"no_cast names 'posture', but Pair.__call__ has no such argument"):
            self.make(BF16_INSIDE, no_cast=["posture"])


class InNnx(nnx.Module):
    """A module of nnx that wraps a linen layer, and has a layer of its own."""

    def __init__(self, rngs):
        self.dense = nnx.bridge.ToNNX(nn.Dense(4), rngs=rngs).lazy_init(X)
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dense(x))


class InLinen(nn.Module):
    """A linen model that wraps a module of nnx."""

    kind: type = nnx.Linear
    args: tuple = (4, 4)

    @nn.compact
    def __call__(self, x):
        return nnx.bridge.to_linen(self.kind, *self.args, name="inner")(x.astype(jnp.float32))


def matmuls(model, variables):
    program = jax.make_jaxpr(model.apply)(variables, X)
    dots = [step for step in walk(program.jaxpr) if step.name == "dot_general"]
    return [str(operand.aval.dtype) for dot in dots for operand in dot.operands]


class Halves(nnx.Module):
    """Two layers of nnx, and a parameter of its own; it tells in which dtype that is read."""

    saw = ""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, x):
        return self.down(self.up(x))

    def scale_up(self, x):
        Halves.saw = str(self.scale.dtype)
        return self.up(x)


class TestInsideLinen:
    """A module of nnx inside a linen model, which was given a policy or a map."""

    @pytest.mark.slow
    @pytest.mark.parametrize("model", [InLinen(), InLinen(InNnx, ())], ids=["a layer", "nested"])
    def test_computes_and_stores_as_the_policy_says(self, model):
        policied = jmp.with_policy(model, BF16_INSIDE)
        variables = policied.init(jax.random.key(0), X)
        assert matmuls(policied, variables).count("float32") == 0
        assert jax.tree.structure(variables) == jax.tree.structure(model.init(jax.random.key(0), X))
        assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {F32}

    @pytest.mark.parametrize(
        ("rules", "expected"),
        [
            ({"inner/up": "float16"}, ["float16", "bfloat16"]),
            ({nnx.Linear: "float16"}, ["float16", "float16"]),
            ({"inner/down": "float16", nnx.bridge.ToLinen: "float32"}, ["float32", "float16"]),
            ({nnx.bridge.ToLinen: "float32", "inner/down": "float16"}, ["float32", "float32"]),
            ({"Halves": "float16", Halves: "float32"}, ["float32", "float32"]),
        ],
    )
    def test_rules_of_a_map_name_modules_on_both_sides(self, rules, expected):
        policies = {key: jmp.get_policy(spec).replace(param_dtype="float32") for key, spec in rules.items()}
        rules = jmp.PolicyMap(policies, BF16_INSIDE)
        for kind in (Halves, lambda rngs: Halves(rngs)):  # Flax takes any callable that makes a module
            model = jmp.with_policy(InLinen(kind, ()), rules)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "policy rule (ToLinen|'Halves'|'inner/down')")
                variables = jax.eval_shape(model.init, jax.random.key(0), X)
                assert matmuls(model, variables) == [dtype for dtype in expected for _ in range(2)]

    def test_rule_that_names_no_module_inside_is_told(self):
        model = jmp.with_policy(InLinen(Halves, ()), jmp.PolicyMap({"inner/upp": "float16"}, BF16_INSIDE))
        with pytest.warns(UserWarning, match="'inner/upp' matches no module; the closest path is 'inner/up'"):
            jax.eval_shape(model.init, jax.random.key(0), X)

    @pytest.mark.parametrize(("format", "spelled"), [("float8", "f8_e4m3fn"), ("int8", "i8")])
    def test_layers_multiply_in_the_format_of_the_policy(self, format, spelled):
        model = jmp.with_policy(InLinen(nnx.Linear, (256, 256)), f"{format}_from_mixed_bfloat16")
        x = jax.ShapeDtypeStruct((16, 256), F32)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        program = jax.make_jaxpr(lambda *args: model.apply(*args, mutable=True))(variables, x)
        assert f"{spelled}[256,256]" in str(program)

    def test_methods_called_by_name_have_the_policy(self):
        class ByName(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nnx.bridge.to_linen(Halves).scale_up(x)

        model = jmp.with_policy(ByName(), BF16_INSIDE)
        jax.eval_shape(model.init, jax.random.key(0), X)
        assert Halves.saw == "bfloat16"

    def test_explain_says_which_rules_decide_for_layers_without_rows(self):
        model = jmp.with_policy(InLinen(Halves, ()), jmp.PolicyMap({"inner/up": "float16"}, BF16_INSIDE))
        found = jmp.explain(model, X)
        assert found.unused == ()
        assert found.unknown == (
            "'inner' wraps an nnx module, whose layers have no rows: each gets its policy and its format by its own "
            "path ('inner/up' decides for 'inner/up')",
        )
        assert jmp.explain(jmp.with_policy(InLinen(), BF16_INSIDE), X).unknown == ()

    @pytest.mark.slow
    def test_class_with_its_own_policy_keeps_it(self):
        model = jmp.with_policy(InLinen(jmp.with_policy(nnx.Linear, "mixed_float16")), BF16_INSIDE)
        variables = model.init(jax.random.key(0), X)
        assert set(matmuls(model, variables)) == {"float16"}

    @pytest.mark.slow
    def test_bridge_itself_takes_a_policy(self):
        model = jmp.with_policy(nnx.bridge.to_linen(nnx.Linear, 4, 4), BF16_INSIDE)
        variables = model.init(jax.random.key(0), X)
        assert set(matmuls(model, variables)) == {"bfloat16"}
        assert model.apply(variables, X).dtype == F32
