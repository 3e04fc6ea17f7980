"""Every way into a policied linen model, and every way from one of its methods into another, has the policy."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax_apis import BF16_INSIDE, F16_INSIDE, X, is_rounded_to_bfloat16

import jmp_policy as jmp

KEY = jax.random.key(0)
F16, F32 = jnp.dtype("float16"), jnp.dtype("float32")


class Coder(nn.Module):
    """An autoencoder: methods that call each other, and one submodule that both have."""

    def setup(self):
        self.dense = nn.Dense(4)

    def encode(self, x):
        self.sow("dtypes", "encode", jnp.zeros((), x.dtype))
        return self.dense(self.perturb("inputs", x))

    def decode(self, z):
        return self.dense(z)

    def __call__(self, x):
        return self.decode(self.encode(x))


MODEL = jmp.with_policy(Coder(), BF16_INSIDE)
VARIABLES = jax.jit(MODEL.init)(KEY, X)


CALLS: dict[str, Any] = {
    "apply": lambda: MODEL.apply(VARIABLES, X),
    "apply of a clone": lambda: MODEL.clone().apply(VARIABLES, X),
    "apply of a copy": lambda: MODEL.copy(name="copied").apply(VARIABLES, X),
    "bind": lambda: MODEL.bind(VARIABLES)(X),
    "method of a bound module": lambda: MODEL.bind(VARIABLES).encode(X),
    "bind, unbind and bind": lambda: MODEL.bind(VARIABLES).unbind()[0].bind(VARIABLES)(X),
    "init_with_output": lambda: MODEL.init_with_output(KEY, X)[0],
    "init_with_output of a method": lambda: MODEL.init_with_output(KEY, X, method=Coder.encode)[0],
    "nn.apply": lambda: nn.apply(lambda model, x: model(x), MODEL)(VARIABLES, X),
    "nn.apply of a method": lambda: nn.apply(Coder.encode, MODEL)(VARIABLES, X),
    "nn.init_with_output": lambda: nn.init_with_output(lambda model, x: model(x), MODEL)(KEY, X)[0],
    "base class's method": lambda: Coder.encode(MODEL.bind(VARIABLES), X),
    "capture_intermediates": lambda: MODEL.apply(VARIABLES, X, capture_intermediates=True, mutable=True)[0],
    "jax.jit of a method": lambda: jax.jit(lambda v, x: MODEL.apply(v, x, method=MODEL.encode))(VARIABLES, X),
    "jax.vmap": lambda: jax.vmap(lambda x: MODEL.apply(VARIABLES, x))(X),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_call_has_the_policy(name):
    assert is_rounded_to_bfloat16(CALLS[name]())


class Tracing(nn.Module):
    """Tells how many bytes a number has that its methods see."""

    def encode(self, x):
        return x

    @nn.compact
    def __call__(self, x):
        return jnp.array([x.dtype.itemsize, self.encode(x).dtype.itemsize])


class TestMethods:
    """Methods that are lifted, handed to transforms, or share their scope with another module's."""

    def test_lifted_methods_of_a_policied_class_that_call_each_other_cast_once(self):
        lifted = nn.remat(jmp.with_policy(Tracing, F16_INSIDE), methods=["encode", "__call__"])
        assert lifted().apply({}, X).tolist() == [2, 2]
        assert lifted().apply({}, X, method="encode").dtype == F32

    @pytest.mark.parametrize("lift", [nn.jit, nn.remat])
    def test_module_that_a_rule_matches_casts_once_though_its_own_code_is_lifted(self, lift):
        class Lifting(Tracing):
            encode = lift(Tracing.encode)

            @nn.compact
            def __call__(self, x):
                lifted = lift(lambda module, x: module.encode(x))(self, x)
                return [x.dtype, self.encode(x).dtype, lifted.dtype]

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return Lifting(name="ruled")(x), Lifting(name="asked").encode(x).dtype

        model = jmp.with_policy(Model(), jmp.PolicyMap({"ruled|asked": F16_INSIDE}, "float32"))
        assert model.apply({}, X) == ([F16, F16, F16], F32)

    @pytest.mark.slow
    def test_module_that_shares_its_scope_computes_by_the_same_policy(self):
        class Sharing(nn.Module):
            def setup(self):
                self.inner = nn.Dense(4)
                nn.share_scope(self, self.inner)

            def __call__(self, x):
                return self.inner(x)

        for spec in (BF16_INSIDE, jmp.PolicyMap({"": BF16_INSIDE}, "float32")):
            model = jmp.with_policy(Sharing(), spec)
            out, variables = model.init_with_output(KEY, X)
            assert set(variables["params"]) == {"kernel", "bias"}
            assert is_rounded_to_bfloat16(out)
