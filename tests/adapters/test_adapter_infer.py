"""A compute dtype left open is that of the first floating input of the module that has the policy, at each call."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.errors import ScopeParamShapeError
from flax_apis import NNX, X

import jmp_policy as jmp

DTYPES = ["float16", "bfloat16", "float32"]
OPEN = "params=float32,compute=none,output=none"
HALF = "params=float32,compute=bfloat16,output=none"


def find_dtypes(api, policy, dtype, handed, x=X):
    """The dtypes of a layer, of a module that is handed inputs of another dtype, and of the Param that it reads."""
    seen = []

    @api.module(["scale"], dense=api.dense)
    class Head:
        def __call__(self, x):
            seen[:] = [str(self.scale.dtype)]
            return self.dense(x)

    @api.module(body=api.dense, head=Head)
    class Net:
        def __call__(self, x):
            body = self.body(x)
            return body, self.head(body.astype(handed))

    model = api.under(Net, policy)
    first = [str(out.dtype) for out in api.run(model, x.astype(dtype))]
    again = [str(out.dtype) for out in api.run(model, x.astype(dtype))]
    assert first == again
    return first + seen


@pytest.mark.parametrize(
    ("policy", "dtype", "handed"),
    [
        (OPEN, "float16", "float32"),
        (jmp.PolicyMap({}, OPEN), "bfloat16", "float16"),
        (jmp.PolicyMap({"unknown|": OPEN}, "float32"), "float32", "bfloat16"),
    ],
)
def test_open_policy_of_the_root_holds_inside_whatever_is_handed_down(api, policy, dtype, handed):
    assert find_dtypes(api, policy, dtype, handed) == [dtype] * 3


@pytest.mark.parametrize(("default", "handed"), [(HALF, "float16"), (OPEN, "float32"), (OPEN, "bfloat16")])
def test_rule_that_leaves_the_dtype_open_takes_it_from_the_inputs_of_the_module_it_matches(api, default, handed):
    dtypes = find_dtypes(api, jmp.PolicyMap({"head": OPEN}, default), "bfloat16", handed)
    assert dtypes[:2] == ["bfloat16", handed]  # linen reads a Param that setup makes before the inputs are known


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rule_with_a_dtype_decides_inside_an_open_root(api, dtype):
    rules = jmp.PolicyMap({"head": HALF}, OPEN)
    assert find_dtypes(api, rules, dtype, "float32") == [dtype, "bfloat16", "bfloat16"]


def test_without_floating_inputs_it_is_float32(api):
    rules = jmp.PolicyMap({"head": OPEN}, OPEN)
    assert find_dtypes(api, rules, "int32", "int32", jnp.ones((2, 4))) == ["float32"] * 3


def test_model_inside_with_an_open_dtype_of_its_own_takes_that_of_its_own_input(api):
    @api.module(inner=lambda: jmp.with_policy(api.dense(), OPEN), outer=api.dense)
    class Net:
        def __call__(self, x):
            return self.inner(x.astype(jnp.float32)), self.outer(x)

    outs = api.run(api.under(Net, OPEN), X.astype(jnp.bfloat16))
    assert [str(out.dtype) for out in outs] == ["float32", "bfloat16"]


@pytest.mark.slow
def test_jit_is_keyed_on_the_dtype_and_a_call_that_failed_is_forgotten(api):
    model = jmp.with_policy(api.make_drawn(api.dense), OPEN)
    call = api.make_jitted_call(model, X)
    with pytest.raises((TypeError, ScopeParamShapeError)):
        call(model, jnp.ones((2, 5), jnp.float16))
    for dtype in ("float16", "float32", "float16"):
        assert call(model, X.astype(dtype)).dtype == dtype


def test_threads_that_call_one_model_at_a_time_have_each_its_own_dtype(api):
    everyone_is_inside = threading.Barrier(len(DTYPES))

    @api.module(embed=api.embed)
    class Meeting:
        def __call__(self, x):
            everyone_is_inside.wait(timeout=60)
            return self.embed(jnp.arange(3))

    model = jmp.with_policy(api.make_drawn(Meeting), OPEN)
    with concurrent.futures.ThreadPoolExecutor(len(DTYPES)) as pool:
        outs = pool.map(lambda dtype: jax.eval_shape(lambda x: api.run(model, x), X.astype(dtype)), DTYPES)
        assert [str(out.dtype) for out in outs] == DTYPES


def test_jitted_function_inside_is_traced_for_each_dtype_though_its_arguments_are_the_same():
    embed = nnx.jit(lambda layer, tokens: layer(tokens))

    @NNX.module(embed=NNX.embed)
    class Reader:
        def __call__(self, x, tokens):
            return embed(self.embed, tokens)

    model = jmp.with_policy(Reader(), OPEN)
    dtypes = ["float16", "float32", "float16"]
    assert [model(X.astype(dtype), jnp.arange(3)).dtype for dtype in dtypes] == dtypes


def make_open_model(layer=NNX.dense):
    @NNX.module(layer=layer)
    class Inner:
        def __call__(self, x):
            return self.layer(x)

    @NNX.module(inner=Inner)
    class Outer:
        def __call__(self, x):
            return self.inner(x)

    return jmp.with_policy(Outer(), OPEN)


def test_child_that_is_set_later_takes_the_dtype_of_the_call():
    model = make_open_model()
    model.inner.layer = NNX.dense()
    assert model(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_nothing_of_a_call_stays_in_a_model_of_nnx():
    model = make_open_model()
    before = nnx.graphdef(model)
    model(X.astype(jnp.float16))
    assert nnx.graphdef(model) == before
    assert model.inner(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16  # called directly
    with pytest.raises(TypeError, match="contracting dimensions"):
        model(jnp.ones((2, 5), jnp.float16))
    assert model.inner.layer.dtype is None
    assert not [key for module in (model, model.inner) for key in vars(module) if "inferred" in key]
