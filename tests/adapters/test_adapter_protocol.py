"""The written interface between the library and Flax, as both adapters keep it."""

import jax
import jax.numpy as jnp
import pytest
from flax_apis import LINEN, NNX, X

import jmp_policy as jmp

# What `explain`, `audit`, `collect` and others ask of an adapter can be seen through them only in part, and far slower.
from jmp_policy.linen._adapter import LINEN as LINEN_ADAPTER
from jmp_policy.modules._adapter import find_adapter, find_lifting_adapter, find_loaded_adapters
from jmp_policy.nnx._adapter import NNX as NNX_ADAPTER

POLICY = "params=float32,compute=bfloat16,output=float16"
ADAPTERS = {LINEN: LINEN_ADAPTER, NNX: NNX_ADAPTER}


def make_net(api):
    @api.module(inner=api.dense)
    class Net:
        def encode(self, x):
            return self.inner(x)

        def __call__(self, x):
            return self.encode(x)

    return Net


def make(api, policy=None):
    """A model, which for linen is bound to its variables."""
    model = make_net(api)() if policy is None else jmp.with_policy(make_net(api)(), policy)
    return model.bind(model.init(jax.random.key(0), X)) if api is LINEN else model


def note(calls, name=""):
    """A hook that notes where and how each method was called."""

    def hook(call, next_fun, args, kwargs):
        calls.append((name + call.path, call.method, str(args[0].dtype) if args else ""))
        return next_fun(*args, **kwargs)

    return hook


def test_each_module_is_known_to_its_adapter(api):
    model = make(api)
    assert find_adapter(model) is find_adapter(type(model)) is ADAPTERS[api]
    assert ADAPTERS[api] in find_loaded_adapters()
    assert find_adapter(lambda x: x) is None


def test_hook_runs_in_place_of_each_method_by_path_and_not_after_the_function(api):
    model, calls = make(api), []
    kind = type(model)
    ADAPTERS[api].run(model, (X,), None, {}, note(calls))
    assert calls == [("", "__call__", "float32"), ("", "encode", "float32"), ("inner", "__call__", "float32")]
    model(X)
    assert (len(calls), type(model)) == (3, kind)


def test_hook_may_change_what_comes_out(api):
    model = make(api)

    def double(call, next_fun, args, kwargs):
        return 2 * next_fun(*args, **kwargs) if call.path == "inner" else next_fun(*args, **kwargs)

    assert jnp.array_equal(ADAPTERS[api].run(model, (X,), "encode", {}, double), 2 * model.encode(X))


def test_hooks_nest_and_the_outer_one_runs_first(api):
    calls, model = [], make(api)
    function = lambda variables: model.unbind()[0].apply(variables, X) if api is LINEN else variables(X)
    inside = ADAPTERS[api].hook_calls(function, note(calls, "inside:"))
    ADAPTERS[api].hook_calls(inside, note(calls, "around:"))(model.variables if api is LINEN else model)
    paths = ["", "", "inner"]
    assert [path for path, *_ in calls] == [name + path for path in paths for name in ("around:", "inside:")]


def test_setup_runs_under_a_hook_that_asks_for_it():
    model, calls = make(LINEN), []
    LINEN_ADAPTER.hook_calls(model.unbind()[0].apply, note(calls), setup=True)(model.variables, X)
    assert ("", "setup", "") in calls


def test_hook_runs_inside_of_the_casts_of_linen_and_outside_of_those_of_nnx(api):
    calls = []
    ADAPTERS[api].run(make(api, POLICY), (X,), None, {}, note(calls))
    assert calls[0] == ("", "__call__", "bfloat16" if api is LINEN else "float32")


def test_examining_shows_what_enters_before_it_is_cast(api):
    calls = []
    trace = lambda fun, *args: jax.eval_shape(lambda: fun(*jax.tree.map(draw, args)))
    draw = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    model = api.under(make_net(api), POLICY) if api is LINEN else make(api, POLICY)
    info = ADAPTERS[api].examine(model, (X,), None, None, {}, trace, note(calls))
    assert calls[0] == ("", "__call__", "float32")
    assert list(info.modules) == ["", "inner"]
    assert str(info.modules["inner"].compute_dtype) == "bfloat16"
    assert sorted(leaf.shape for leaf in info.params["inner"]) == [(4,), (4, 4)]


def test_quantization_is_described_while_the_call_runs(api):
    found = {}

    def hook(call, next_fun, args, kwargs):
        found[call.path] = call.describe_quantization()
        return next_fun(*args, **kwargs)

    ADAPTERS[api].run(make(api, "int8(min_size=0)_from_float32"), (X,), None, {}, hook)
    assert found == {"": "", "inner": "int8(min_size=0)"}


def test_weights_are_found_by_the_path_of_their_module(api):
    weights = ADAPTERS[api].find_weights(make(api))
    assert {path: weight.shape for path, weight in weights.items()} == {"inner": (4, 4)}


def test_only_objects_of_nnx_are_lifted_and_what_is_written_lands_in_them():
    class Counting(make_net(NNX)):
        def __call__(self, x):
            self.inner.bias[...] += 1
            return self.encode(x)

    model, linen_model = Counting(), make(LINEN)
    assert find_lifting_adapter({"model": model}) is NNX_ADAPTER
    assert find_lifting_adapter(linen_model.variables) is None
    out = NNX_ADAPTER.lift(lambda pure, state: jax.jit(pure)(state), lambda model, x: model(x), (model, X), {})
    assert jnp.array_equal(out, model.encode(X))
    assert (model.inner.bias[...] == 1).all()
    run = lambda pure, arguments: pure(arguments)
    assert jnp.array_equal(LINEN_ADAPTER.lift(run, lambda model, x: model(x), (linen_model, X), {}), linen_model(X))


def test_examples_in_errors_are_those_of_each_api(api):
    adapter = ADAPTERS[api]
    for call, example in ((jmp.autocast, adapter.autocast_example), (jmp.numerics.audit, adapter.audit_example)):
        with pytest.raises(TypeError) as error:
            call(make(api))
        assert f"For example: {example}." in str(error.value)
