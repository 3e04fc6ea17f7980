"""Without a compute dtype in the policy, the first floating input decides, anew at each call."""

import concurrent.futures
import threading

import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_models import Net, X, rngs

import jmp_policy as jmp

INFER = "params=float32,compute=none,output=none"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_everything_inside_computes_in_the_dtype_of_the_input(dtype):
    model = jmp.with_policy(Net(rngs=rngs()), INFER)
    assert model(X.astype(dtype)).dtype == dtype
    assert (model.probe.saw, model.scale.read, model.encoded) == (dtype,) * 3


@pytest.mark.slow
def test_the_dtype_of_one_call_is_forgotten_at_the_next():
    model = jmp.with_policy(Net(rngs=rngs()), INFER)
    before = nnx.graphdef(model.embed)
    model(X.astype(jnp.float16))
    assert nnx.graphdef(model.embed) == before
    for name in ("probe", "scale"):
        assert not [key for key in vars(getattr(model, name)) if "inferred" in key]
    model(X)
    assert model.scale.read == "float32"


@pytest.mark.slow
def test_without_floating_inputs_it_is_float32():
    model = jmp.with_policy(nnx.Embed(7, 4, rngs=rngs()), INFER)
    assert model(jnp.arange(3)).dtype == jnp.float32


@pytest.mark.slow
def test_a_layer_alone_is_resolved_too():
    model = jmp.with_policy(nnx.Linear(4, 4, rngs=rngs()), INFER)
    assert model(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert model.dtype is None


def test_child_called_directly_takes_the_dtype_of_its_own_input():
    model = jmp.with_policy(Net(rngs=rngs()), INFER)
    model.scale(X.astype(jnp.float16))
    assert model.scale.read == "float16"


@pytest.mark.slow
def test_rule_with_a_dtype_holds_inside():
    model = jmp.with_policy(Net(rngs=rngs()), jmp.PolicyMap({"scale": "mixed_float16"}, INFER))
    assert model(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert (model.probe.saw, model.scale.read) == ("bfloat16", "float16")


@pytest.mark.slow
def test_new_child_takes_the_dtype_of_the_call():
    model = jmp.with_policy(Net(rngs=rngs()), INFER)
    model.blocks.append(nnx.Linear(4, 4, rngs=rngs()))
    assert model.encode(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert model.entered == "bfloat16"


@pytest.mark.slow
def test_new_child_deep_inside_takes_the_dtype_of_the_call():
    class Outer(nnx.Module):
        def __init__(self, *, rngs):
            self.net = Net(rngs=rngs)

        def __call__(self, x):
            return self.net(x)

    model = jmp.with_policy(Outer(rngs=rngs()), INFER)
    model.net.embed = nnx.Linear(4, 4, rngs=rngs())
    model(X.astype(jnp.bfloat16))
    assert model.net.probe.saw == "bfloat16"


@pytest.mark.slow
def test_layers_under_a_rule_with_a_dtype_keep_theirs():
    class Layers(nnx.Module):
        def __init__(self, *, rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs)])

        def __call__(self, x):
            return str(self.layers[0](x).dtype)

    model = jmp.with_policy(Layers(rngs=rngs()), jmp.PolicyMap({"layers": "mixed_float16"}, INFER))
    assert model(X.astype(jnp.bfloat16)) == "float16"


@pytest.mark.slow
def test_an_error_in_a_call_forgets_the_dtype_too():
    model = jmp.with_policy(Net(rngs=rngs()), INFER)
    with pytest.raises(TypeError, match="contracting dimensions"):
        model(jnp.ones((2, 5), jnp.float16))
    assert model.embed.dtype is None


@pytest.mark.slow
def test_jit_is_keyed_on_the_dtype():
    model = jmp.with_policy(Net(rngs=rngs()), INFER)
    call = nnx.jit(lambda model, x: model(x))
    dtypes = ["float16", "float32", "float16"]
    assert [call(model, X.astype(dtype)).dtype for dtype in dtypes] == dtypes


@pytest.mark.slow
def test_jitted_function_inside_is_traced_for_each_dtype_though_its_arguments_are_the_same():
    @nnx.jit
    def embed(layer, tokens):
        return layer(tokens)

    class Reader(nnx.Module):
        def __init__(self, *, rngs):
            self.embed = nnx.Embed(7, 4, rngs=rngs)

        def __call__(self, x, tokens):
            return embed(self.embed, tokens)

    model = jmp.with_policy(Reader(rngs=rngs()), INFER)
    dtypes = ["float16", "float32", "float16"]
    assert [model(X.astype(dtype), jnp.arange(3)).dtype for dtype in dtypes] == dtypes


@pytest.mark.slow
def test_threads_that_call_one_model_at_a_time_have_each_its_own_dtype():
    dtypes = ["float16", "float32", "bfloat16"]
    everyone_is_inside = threading.Barrier(len(dtypes))

    class Meeting(nnx.Module):
        def __init__(self, *, rngs):
            self.embed = nnx.Embed(7, 4, rngs=rngs)

        def __call__(self, x):
            everyone_is_inside.wait(timeout=60)
            return self.embed(jnp.arange(3))

    model = jmp.with_policy(Meeting(rngs=rngs()), INFER)
    inputs = [X.astype(dtype) for dtype in dtypes]
    with concurrent.futures.ThreadPoolExecutor(len(dtypes)) as pool:
        assert [out.dtype for out in pool.map(model, inputs)] == dtypes


@pytest.mark.slow
def test_model_inside_with_an_inferred_dtype_of_its_own_takes_that_of_its_own_input():
    class Outer(nnx.Module):
        def __init__(self, *, rngs):
            self.net = jmp.with_policy(Net(rngs=rngs), INFER)
            self.scale = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            inner = self.net(x.astype(jnp.float32))
            return inner, self.scale(x)

    model = jmp.with_policy(Outer(rngs=rngs()), INFER)
    assert [out.dtype for out in model(X.astype(jnp.bfloat16))] == ["float32", "bfloat16"]
    assert model.net.scale.read == "float32"
