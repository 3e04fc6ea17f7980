"""Policies of linen modules, where linen alone can do it: fields, methods by name, compact modules, lifted classes."""

import copy
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax_apis import BF16_INSIDE, X

import jmp_policy as jmp

KEY = jax.random.key(0)
BF16, F16 = jnp.dtype("bfloat16"), jnp.dtype("float16")


class Project(nn.Module):
    """A module with a dtype that it passes on."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, dtype=self.dtype, name="down")(nn.Dense(4, dtype=self.dtype, name="up")(x))


class Net(nn.Module):
    """Submodules in setup, and several methods."""

    def setup(self):
        self.encoder = Project()
        self.head = nn.Dense(3)

    def encode(self, x):
        return self.encoder(x)

    def __call__(self, x):
        return self.head(self.encode(x))


def test_names_hash_and_fields_are_those_of_the_module():
    policied = jmp.with_policy(Project(dtype=None), BF16_INSIDE)
    assert (type(policied).__name__, isinstance(policied, Project)) == ("Project", True)
    assert policied == jmp.with_policy(Project(), BF16_INSIDE)
    assert hash(policied) == hash(jmp.with_policy(Project(), BF16_INSIDE))
    assert policied.clone(dtype="float16").dtype == "float16"
    assert type(jmp.with_policy(jmp.with_policy(Project(), "float16"), BF16_INSIDE)) is type(policied)


def test_submodule_made_with_a_policy_in_a_compact_method_keeps_its_name_and_computes_in_it():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jmp.with_policy(Project(name="inner"), "p=f32,c=bf16,o=none")(x)

    out, variables = jax.eval_shape(jmp.with_policy(Outer(), "p=f32,c=f16,o=none").init_with_output, KEY, X)
    assert (out.dtype, set(variables["params"]["inner"])) == (BF16, {"up", "down"})


@pytest.mark.slow
def test_fields_are_as_written_when_the_call_is_over():
    class Author(nn.Module):
        def setup(self):
            self.project = Project()
            self.dense = nn.Dense(4, param_dtype=jnp.float16)

        def __call__(self, x):
            return self.dense(self.project(x))

    model = jmp.with_policy(Author(), BF16_INSIDE)
    bound = model.bind(model.init(KEY, X))
    bound(X)
    assert (bound.dense.dtype, bound.dense.param_dtype, bound.project.dtype) == (None, jnp.float16, None)
    assert "param" not in vars(bound.project)


@pytest.mark.parametrize(
    "method",
    ["encode", Net.encode, lambda m, x: m.encode(x), Net().encode, lambda m, x: m.encoder(x)],
    ids=["by name", "unbound", "function", "bound to the original", "function of submodules"],
)
def test_no_way_to_name_a_method_runs_without_the_policy(method):
    model = jmp.with_policy(Net(), "params=float32,compute=bfloat16,output=float16")
    variables = jax.eval_shape(model.init, KEY, X)
    program = jax.make_jaxpr(lambda variables: model.apply(variables, X, method=method))(variables)
    assert program.out_avals[0].dtype == F16
    assert str(program).count("bf16[2,4] = dot_general") == 2


class Table(nn.Module):
    """Its parameter is made in setup, and read by the module around it."""

    def setup(self):
        self.weights = self.param("weights", nn.initializers.normal(), (4,))

    def _product(self, x):
        return x * self.weights

    def __call__(self, x):
        return self._product(x)


@pytest.mark.parametrize("ask", [lambda t, x: t.weights, lambda t, x: t._product(x), lambda t, x: t(x)])
def test_own_policy_of_a_submodule_holds_for_setup_and_private_methods_too(ask):
    class Reader(nn.Module):
        def setup(self):
            self.table = jmp.with_policy(Table(), "p=bf16,c=f16,o=f16")

        def __call__(self, x):
            return ask(self.table, x.astype(jnp.float16))

    for model in (Reader(), jmp.with_policy(Reader(), "p=f32,c=f32,o=none")):
        out, variables = jax.eval_shape(model.init_with_output, KEY, X)
        assert (variables["params"]["table"]["weights"].dtype, out.dtype) == (BF16, F16)


@pytest.mark.parametrize("in_setup", [True, False])
def test_jitted_siblings_of_equal_fields_each_have_the_policy_of_their_place(in_setup):
    inner = nn.jit(Project)

    class InCompact(nn.Module):
        @nn.compact
        def __call__(self, x):
            return [inner(name=name)(x) for name in ("first", "second")]

    class InSetup(nn.Module):
        def setup(self):
            self.first, self.second = inner(), inner()

        def __call__(self, x):
            return [self.first(x), self.second(x)]

    rules = jmp.PolicyMap({"second/down": "p=f32,c=f16,o=none"}, "p=f32,c=bf16,o=none")
    model = jmp.with_policy(InSetup() if in_setup else InCompact(), rules)
    outs, variables = jax.eval_shape(model.init_with_output, KEY, X)
    assert [out.dtype for out in outs] == [BF16, F16]
    assert jax.eval_shape(model.apply, variables, X) == outs


@pytest.mark.slow
def test_rule_inside_a_jitted_module_is_not_taken_for_unused_when_its_program_is_found_again():
    jitted = nn.jit(Project)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jitted(name="jitted")(x)

    model = jmp.with_policy(Model(), jmp.PolicyMap({"jitted/up": "float16"}, "p=f32,c=bf16,o=none"))
    variables = model.init(KEY, X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = [model.apply(variables, X) for _ in range(2)]
    assert not caught
    np.testing.assert_array_equal(*outs)


@jmp.with_policy(BF16_INSIDE)
class Importable(nn.Module):
    """Found under its name, unlike the class of an instance that was given a policy."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_keep_the_policy(again):
    for model in (jmp.with_policy(Project(dtype="float16"), BF16_INSIDE), Importable()):
        assert again(model) == model
        assert jmp.policy_of(again(model)) is jmp.policy_of(model)


def test_partitioned_parameters_stay_boxed():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = jmp.with_policy(nn.Dense(4, kernel_init=init), "bfloat16")
    kernel = jax.eval_shape(model.init, KEY, X)["params"]["kernel"]
    assert (kernel.names, kernel.value.dtype) == ((None, "model"), BF16)


def test_initializers_find_the_authors_dtypes_however_they_ask():
    class Asking(nn.Module):
        handed_down: jnp.dtype
        dtype: jnp.dtype | None = None
        param_dtype: jnp.dtype = jnp.float32

        @nn.compact
        def __call__(self, x):
            def remember(key, *args, **kwargs):
                asked.append((key, [str(jnp.zeros((), dtype).dtype) for dtype in (*args, *kwargs.values())]))
                return jnp.zeros(2)

            made = lambda name: lambda *_: remember(name, self.param_dtype, self.dtype)
            self.param("weight", made("weight by self"))
            self.param("scale", lambda _, *args: remember("scale", *args), self.handed_down, self.dtype)
            self.param("bias", lambda _, *args, **kw: remember("bias", *args, **kw), self.dtype, dtype=self.param_dtype)
            self.variable("batch_stats", "mean", made("mean by self"))
            self.variable("batch_stats", "var", remember, "var", self.dtype, dtype=self.param_dtype)
            self.variable("cache", "key", made("key by self"))
            self.variable("cache", "value", remember, "value", self.dtype, dtype=self.param_dtype)
            return x

    class Around(nn.Module):
        param_dtype: jnp.dtype = jnp.float32

        @nn.compact
        def __call__(self, x):
            return Asking(self.param_dtype)(x)

    asked = []
    model = jmp.with_policy(Around(), "float16")
    variables = jax.eval_shape(model.init, KEY, X)
    parameters = {key: ["float32", "float32"] for key in ("weight by self", "scale", "bias")}
    statistics = {key: ["float32", "float32"] for key in ("mean by self", "var")}
    cache = {"key by self": ["float32", "float16"], "value": ["float16", "float32"]}
    assert dict(asked) == parameters | statistics | cache
    asked.clear()
    jax.eval_shape(model.apply, variables, X)  # Flax asks for the shapes of parameters again
    assert dict(asked) == parameters
