"""`explain` for linen, where linen alone can do it."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax_apis import LINEN

import jmp_policy as jmp

X = jax.ShapeDtypeStruct((2, 4), "float32")
MIXED = "mixed_bfloat16"


def test_parameters_that_are_no_floats_take_the_same_bytes_in_float32():
    class Table(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + self.param("index", lambda key: jnp.arange(4, dtype=jnp.int8)).astype(x.dtype)

    found = jmp.explain(LINEN.under(Table, "bfloat16"), X)
    assert (found[""].param_dtypes, found.total_bytes, found.float32_bytes) == (("int8",), 4, 4)


def test_module_that_is_set_up_and_not_called_has_no_row():
    @LINEN.module(idle=LINEN.dense)
    class Outer:
        def __call__(self, x):
            return x * self.idle.features

    assert [row.path for row in jmp.explain(Outer(), X).rows] == [""]


def test_path_of_a_scanned_and_rematerialised_module_appears_once():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4, name="dense")(x), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return layers(name="layers")(x, None)[0]

    found = jmp.explain(LINEN.under(Stack, MIXED), X)
    assert [row.path for row in found.rows] == ["", "layers", "layers/dense"]
    dense = found["layers/dense"]
    assert (dense.param_bytes, dense.compute_dtypes) == (3 * 20 * 4, ("bfloat16",))


def test_module_under_nn_jit_is_seen_although_it_was_traced_before():
    @LINEN.module(dense=lambda: nn.jit(nn.Dense)(4))
    class Jitted:
        def __call__(self, x):
            return self.dense(x)

    model = LINEN.under(Jitted, MIXED)
    LINEN.run(model, jnp.ones((2, 4)))
    for _ in range(2):
        assert jmp.explain(model, X)["dense"].input_dtypes == ("bfloat16",)


def test_function_that_calls_no_method_of_the_root_explains_it_all_the_same():
    @LINEN.module(head=LINEN.dense)
    class Net:
        pass

    for model in (Net(), jmp.with_policy(Net(), MIXED)):
        found = jmp.explain(model, X, method=lambda net, x: 2 * net.head(x))
        assert [row.path for row in found.rows] == ["", "head"]
        assert found[""].policy is jmp.policy_of(model)


def test_rngs_are_handed_on():
    class Noise(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + jax.random.normal(self.make_rng("noise"), x.shape, x.dtype)

    for rngs in (None, jax.random.key(1), {"noise": jax.random.key(1)}):
        assert jmp.explain(Noise(), X, rngs=rngs)[""].output_dtypes == ("float32",)


def test_quantization_of_a_kernel_in_code_of_a_users_own():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", nn.initializers.normal(), (4, 4)).astype(x.dtype)

    found = jmp.explain(LINEN.under(Own, "int8(min_size=0)_from_mixed_bfloat16"), X)
    assert (found[""].quantization, found["kernel"].quantization) == ("", "int8(min_size=0)")
