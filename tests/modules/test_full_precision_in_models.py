"""`force_full_precision` around the layers of Flax that have a policy, and around functions that have one."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp
from jmp_policy._jaxpr import walk

MIXED = "params=float32,compute=float16,output=float32"
X = jnp.full((2, 64), 4.0)
ONE_HOT = lambda key, shape, dtype: jnp.zeros(shape, dtype).at[:, 0].set(2.0)
# One column of 64 is 4 * 2 * 64 = 512, and its square 262,144: over the largest float16, 65,504. The mean is 4,096.
MEAN = 4096.0


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(64, kernel_init=ONE_HOT)
        return jmp.force_full_precision(lambda a: jnp.square(layer(a)).mean())(x)


class LinenMap(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jmp.force_full_precision(lambda a: jnp.square(nn.Dense(64, kernel_init=ONE_HOT, name="head")(a)).mean())(
            x
        )


class LinenJitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.jit(nn.Dense)(64, kernel_init=ONE_HOT)
        return jmp.force_full_precision(lambda a: jnp.square(layer(a)).mean())(x), layer(x)


class OwnParam(nn.Module):
    @nn.compact
    def __call__(self, x):
        declare = lambda: self.param("kernel", ONE_HOT, (64, 64), jnp.float32)
        return jmp.force_full_precision(lambda a: jnp.square(a @ declare()).mean())(x)


class Derived(nn.Dense):
    def __call__(self, x):
        return jmp.force_full_precision(lambda a: jnp.square(nn.Dense.__call__(self, a)).mean())(x)


class Nnx(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(64, 64, kernel_init=ONE_HOT, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jmp.force_full_precision(lambda a: jnp.square(self.layer(a)).mean())(x)


class NnxOwnParam(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(ONE_HOT(None, (64, 64), jnp.float32))

    def __call__(self, x):
        return jmp.force_full_precision(lambda a: jnp.square(a @ self.kernel).mean())(x)


def apply_linen(module, policy=MIXED):
    variables = module.init(jax.random.key(0), X)
    return lambda x: jmp.with_policy(module, policy).apply(variables, x)


MODELS = {
    "linen": lambda: apply_linen(Linen()),
    "linen under a map": lambda: apply_linen(LinenMap(), jmp.PolicyMap({"head": "float16"}, MIXED)),
    "a param that a linen module declares": lambda: apply_linen(OwnParam()),
    "a linen method of the base": lambda: apply_linen(Derived(64, kernel_init=ONE_HOT)),
    "nnx": lambda: jmp.with_policy(Nnx(), MIXED),
    "nnx under a map": lambda: jmp.with_policy(Nnx(), jmp.PolicyMap({"layer": "p=f32,c=f16,o=f16"}, MIXED)),
    "a Param of an nnx module": lambda: jmp.with_policy(NnxOwnParam(), MIXED),
    "nnx that infers": lambda: jmp.with_policy(Nnx(), "params=float32,compute=none,output=none"),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_inside_compute_in_float32_at_highest_precision(name):
    call = MODELS[name]()
    x = X.astype(jnp.float16)
    assert call(x) == MEAN
    program = jax.make_jaxpr(jax.grad(lambda x: call(x).astype(jnp.float32)))(x)
    dots = [step for step in walk(program.jaxpr) if step.name == "dot_general"]
    assert len(dots) == 2
    assert {str(operand.aval.dtype) for dot in dots for operand in dot.operands} == {"float32"}
    assert str(program).count("precision=(Precision.HIGHEST, Precision.HIGHEST)") >= 2


def test_linen_model_in_a_bridge_computes_in_float32_inside():
    model = jmp.with_policy(nnx.bridge.ToNNX(Linen(), rngs=nnx.Rngs(0)).lazy_init(X), MIXED)
    assert model(X.astype(jnp.float16)) == MEAN


def test_layers_outside_keep_their_policy_when_they_are_jitted_once():
    wide, narrow = apply_linen(LinenJitted())(X)
    assert wide == MEAN
    assert narrow.dtype == jnp.float32
    model = jmp.with_policy(LinenJitted(), "mixed_float16")
    assert model.apply(model.init(jax.random.key(0), X), X)[1].dtype == jnp.float16


@pytest.mark.parametrize(
    "apply",
    [
        lambda: jmp.with_policy(nn.Dense(64, kernel_init=ONE_HOT), "mixed_float16"),
        lambda: jmp.with_policy(nnx.Linear(64, 64, kernel_init=ONE_HOT, rngs=nnx.Rngs(0)), "mixed_float16"),
        lambda: jmp.with_policy(lambda x: x @ ONE_HOT(None, (64, 64), x.dtype), "mixed_float16"),
        lambda: jmp.with_policy(lambda x: x @ ONE_HOT(None, (64, 64), x.dtype), "p=f32,c=bf16,o=bf16,a=bf16"),
    ],
)
def test_policied_calls_inside_compute_and_return_in_float32(apply):
    model, x = apply(), X.astype(jnp.float16)
    call = model
    if isinstance(model, nn.Module):
        variables = model.init(jax.random.key(0), X)
        call = lambda x: model.apply(variables, x)
    assert jmp.force_full_precision(lambda x: jnp.square(call(x)).mean())(x) == MEAN
    assert call(x).dtype in (jnp.float16, jnp.bfloat16)  # outside, as its policy says


def test_authors_dtype_stays_and_float64_is_not_narrowed():
    layer = jmp.with_policy(nn.Dense(2, dtype=jnp.bfloat16), "p=f32,c=f16,o=none")
    variables = layer.init(jax.random.key(0), X)
    assert jmp.force_full_precision(lambda x: str(layer.apply(variables, x).dtype))(X) == "bfloat16"
    with jax.enable_x64(True):
        double = jmp.with_policy(lambda x: x, "float64")
        assert jmp.force_full_precision(lambda x: str(double(x).dtype))(X) == "float64"


@pytest.mark.parametrize(("model", "path"), [(Linen(), "Dense_0"), (Nnx(), "layer")])
def test_explain_shows_the_layers_inside(model, path):
    rows = {row.path: row for row in jmp.explain(jmp.with_policy(model, MIXED), X).rows}
    assert rows[path].rule == "force_full_precision"
    assert rows[path].compute_dtypes == ("float32",)
    assert rows[path].policy == jmp.Policy("float32", "float32", "float32", precision="highest")
    assert rows[""].rule == "its own policy"
