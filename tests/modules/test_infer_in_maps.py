"""A compute dtype left open is that of the first floating input of the module that has the policy, at each call."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp

X = jnp.ones((2, 4))
DTYPES = ["float16", "bfloat16", "float32"]


class LinenHead(nn.Module):
    """A module around a layer."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="dense")(x)


class Linen(nn.Module):
    """A layer, and a head that is called with inputs of another dtype."""

    handed: str

    @nn.compact
    def __call__(self, x):
        body = nn.Dense(4, name="body")(x)
        return body, LinenHead(name="head")(body.astype(self.handed))


class NnxHead(nnx.Module):
    """A module around a layer."""

    def __init__(self):
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x)


class Nnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, handed):
        self._handed = handed
        self.body, self.head = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), NnxHead()

    def __call__(self, x):
        body = self.body(x)
        return body, self.head(body.astype(self._handed))


def linen_dtypes(policy, x, handed):
    model = jmp.with_policy(Linen(handed), policy)
    return [out.dtype for out in jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0]]


def nnx_dtypes(policy, x, handed):
    return [out.dtype for out in nnx.eval_shape(lambda: jmp.with_policy(Nnx(handed), policy)(x))]


in_both = pytest.mark.parametrize("dtypes_of", [linen_dtypes, nnx_dtypes])
OPEN = "params=float32,compute=none,output=none"
HALF = "params=float32,compute=bfloat16,output=none"


@pytest.mark.sample(1)
@in_both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", [OPEN, jmp.PolicyMap({}, OPEN), jmp.PolicyMap({"unknown|": OPEN}, "float32")])
def test_open_policy_of_the_root_holds_inside_whatever_is_handed_down(dtypes_of, policy, dtype):
    for handed in DTYPES:
        assert dtypes_of(policy, X.astype(dtype), handed) == [dtype, dtype]


@in_both
@pytest.mark.parametrize("handed", DTYPES)
@pytest.mark.parametrize("default", [HALF, OPEN])
def test_rule_that_leaves_the_dtype_open_takes_it_from_the_inputs_of_the_module_it_matches(dtypes_of, default, handed):
    rules = jmp.PolicyMap({"head": OPEN}, default)
    assert dtypes_of(rules, X.astype(jnp.bfloat16), handed) == ["bfloat16", handed]


@in_both
@pytest.mark.parametrize("dtype", DTYPES)
def test_rule_with_a_dtype_decides_inside_an_open_root(dtypes_of, dtype):
    assert dtypes_of(jmp.PolicyMap({"head": HALF}, OPEN), X.astype(dtype), "float32") == [dtype, "bfloat16"]


@in_both
def test_without_floating_inputs_it_is_float32(dtypes_of):
    assert dtypes_of(jmp.PolicyMap({"head": OPEN}, OPEN), jnp.ones((2, 4), jnp.int32), "int32") == ["float32"] * 2
