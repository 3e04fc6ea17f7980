"""The written interface between the library and Flax, as both adapters keep it."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp
from jmp_policy.linen._adapter import LINEN
from jmp_policy.modules._adapter import find_adapter, find_lifting_adapter, find_loaded_adapters
from jmp_policy.nnx._adapter import NNX

X = jnp.ones((2, 4))
POLICY = "params=float32,compute=bfloat16,output=float16"


class LinenNet(nn.Module):
    def setup(self):
        self.inner = nn.Dense(4)

    def encode(self, x):
        return self.inner(x)

    def __call__(self, x):
        return self.encode(x)


class NnxNet(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def encode(self, x):
        return self.inner(x)

    def __call__(self, x):
        self.calls[...] += 1
        return self.encode(x)


def linen_model(policy=None):
    model = LinenNet() if policy is None else jmp.with_policy(LinenNet(), policy)
    return model.bind(model.init(jax.random.key(0), X))


def nnx_model(policy=None):
    return NnxNet() if policy is None else jmp.with_policy(NnxNet(), policy)


CASES = {"linen": (LINEN, linen_model), "nnx": (NNX, nnx_model)}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request):
    return request.param


def noting(calls, name=""):
    """A hook that notes where and how each method was called."""

    def hook(call, next_fun, args, kwargs):
        calls.append((name + call.path, call.method, str(args[0].dtype)))
        return next_fun(*args, **kwargs)

    return hook


def test_each_module_is_known_to_its_adapter(case):
    adapter, make = case
    model = make()
    assert find_adapter(model) is find_adapter(type(model)) is adapter
    assert adapter in find_loaded_adapters()
    assert find_adapter(lambda x: x) is None


def test_hook_runs_in_place_of_each_method_by_path(case):
    adapter, make = case
    calls = []
    adapter.run(make(), (X,), None, {}, noting(calls))
    assert calls == [("", "__call__", "float32"), ("", "encode", "float32"), ("inner", "__call__", "float32")]


@pytest.mark.slow
def test_hook_may_change_what_goes_in_and_what_comes_out(case):
    adapter, make = case
    model = make()

    def double(call, next_fun, args, kwargs):
        return 2 * next_fun(*args, **kwargs) if call.path == "inner" else next_fun(*args, **kwargs)

    assert jnp.array_equal(adapter.run(model, (X,), "encode", {}, double), 2 * model.encode(X))


def test_hooks_nest_and_the_outer_one_runs_first(case):
    adapter, _ = case
    calls = []
    function, arguments = {
        LINEN: (lambda variables, x: LinenNet().apply(variables, x), (linen_model().variables, X)),
        NNX: (lambda model, x: model(x), (NnxNet(), X)),
    }[adapter]
    inside = adapter.hook_calls(function, noting(calls, "inside:"))
    adapter.hook_calls(inside, noting(calls, "around:"))(*arguments)
    assert [path for path, *_ in calls] == [
        "around:", "inside:", "around:", "inside:", "around:inner", "inside:inner",
    ]  # fmt: skip


def test_nothing_is_hooked_when_the_function_is_over(case):
    adapter, make = case
    model, calls = make(), []
    kind = type(model)
    adapter.hook_calls(lambda model: model(X), noting(calls))(model)
    assert calls
    calls.clear()
    model(X)
    assert not calls
    assert type(model) is kind


def test_setup_runs_under_a_hook_that_asks_for_it():
    methods = []

    def hook(call, next_fun, args, kwargs):
        methods.append((call.path, call.method))
        return next_fun(*args, **kwargs)

    LINEN.hook_calls(LinenNet().apply, hook, setup=True)(linen_model().variables, X)
    assert ("", "setup") in methods


@pytest.mark.slow
def test_hook_runs_inside_of_the_casts_of_linen_and_outside_of_those_of_nnx(case):
    adapter, make = case
    calls = []
    adapter.run(make(POLICY), (X,), None, {}, noting(calls))
    assert calls[0] == ("", "__call__", "bfloat16" if adapter is LINEN else "float32")


@pytest.mark.slow
def test_examining_shows_what_enters_before_it_is_cast(case):
    adapter, make = case
    model, calls = make(POLICY), []
    model = model.unbind()[0] if adapter is LINEN else model
    info = adapter.examine(model, (X,), None, None, {}, lambda fun, *args: fun(*_drawn(args)), noting(calls))
    assert calls[0] == ("", "__call__", "float32")
    assert list(info.modules) == ["", "inner"]
    assert str(info.modules["inner"].compute_dtype) == "bfloat16"
    assert sorted(leaf.shape for leaf in info.params["inner"]) == [(4,), (4, 4)]


def _drawn(args):
    """The arguments with arrays in place of abstract ones."""
    is_abstract = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if is_abstract(leaf) else leaf, args)


@pytest.mark.slow
def test_quantization_is_described_while_the_call_runs(case):
    adapter, make = case
    found = {}

    def hook(call, next_fun, args, kwargs):
        found[call.path] = call.describe_quantization()
        return next_fun(*args, **kwargs)

    adapter.run(make("int8(min_size=0)_from_float32"), (X,), None, {}, hook)
    assert found == {"": "", "inner": "int8(min_size=0)"}


def test_weights_are_found_by_the_path_of_their_module(case):
    adapter, make = case
    assert {path: weight.shape for path, weight in adapter.find_weights(make()).items()} == {"inner": (4, 4)}


def test_only_objects_of_nnx_are_lifted_and_what_is_written_lands_in_them():
    model = NnxNet()
    assert find_lifting_adapter({"model": model}) is NNX
    assert find_lifting_adapter(linen_model().variables) is None
    out = NNX.lift(lambda pure, state: jax.jit(pure)(state), lambda model, x: model(x), (model, X), {})
    assert jnp.array_equal(out, model.encode(X))
    assert int(model.calls[...]) == 1


def test_linen_has_nothing_that_a_function_could_write_to():
    run = lambda pure, arguments: pure(arguments)
    assert jnp.array_equal(LINEN.lift(run, lambda model, x: model(x), (linen_model(), X), {}), linen_model()(X))


def test_examples_in_errors_are_those_of_each_api(case):
    adapter, make = case
    for call, example in ((jmp.autocast, adapter.autocast_example), (jmp.numerics.audit, adapter.audit_example)):
        with pytest.raises(TypeError) as error:
            call(make())
        assert f"For example: {example}." in str(error.value)
