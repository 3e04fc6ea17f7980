"""Every layer under every policy is the layer with its dtypes written by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.extend.core import jaxpr_as_fun
from linen_layers import EXEMPT, LAYERS, X
from programs import program_text

import jmp_policy as jmp

OTHER_DEFAULT = "mixed_float16"  # holds while the programs are made: a policy that was given must win over it
POLICIES = ["mixed_float16", "params=float32,compute=bfloat16,output=float32"]
OTHERS = ["mixed_bfloat16", "float32", "bfloat16"]  # which differ from those in nothing that depends on the layer
REPRESENTATIVE = ["Dense", "Embed", "BatchNorm", "MultiHeadAttention with a cache", "RNN of LSTM cells"]
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
TRAINED = ("params", "_overwrite_with_gradient")  # the latter is float8's, with its new values for gradients
UPDATED = ["batch_stats", "cache"]

pytestmark = pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated soon:DeprecationWarning")


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # norms with dtype=bfloat16 promote their own float32 statistics
        yield


def _init(name, module):
    layer = LAYERS[name]
    if layer.init_inputs is not None:
        return module.init(RNGS, *layer.init_inputs)
    return module.init(RNGS, *layer.inputs, method=layer.method, **layer.kwargs)


@functools.cache
def _variables_without_a_policy(name, **dtypes):
    return jax.eval_shape(lambda: _init(name, LAYERS[name].make(**dtypes)))


def _expected_variables(name, policy):
    """Those of the layer without a policy, with parameters in param dtype, and the cache that it has by hand."""
    plain = _variables_without_a_policy(name)
    by_hand = _variables_without_a_policy(name, dtype=policy.compute_dtype)
    policied = {
        "params": lambda tree: jmp.cast_floating(tree, policy.param_dtype),
        "cache": lambda tree: by_hand["cache"],
    }
    return {collection: policied.get(collection, _uncast)(tree) for collection, tree in plain.items()}


def _uncast(tree):
    return tree


def _step(name, module, cast_inputs, cast_output):
    """A function of (variables, inputs): gradients of the sum of squares, output, and updated state."""
    layer = LAYERS[name]

    def loss_fn(trained, state, inputs):
        inputs, kwargs = cast_inputs((inputs, layer.kwargs))
        out, updated = module.apply(trained | state, *inputs, method=layer.method, mutable=UPDATED, rngs=RNGS, **kwargs)
        out = cast_output(out)
        loss = sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(out))
        return loss, (out, updated)

    def step(variables, inputs):
        trained = {collection: variables[collection] for collection in TRAINED if collection in variables}
        return jax.grad(loss_fn, has_aux=True)(
            trained, {name: variables[name] for name in variables.keys() - trained.keys()}, inputs
        )

    return step


def _ours(name, policy):
    return _step(name, jmp.with_policy(LAYERS[name].make(), policy), _uncast, _uncast)


def _by_hand(name, policy):
    layer = LAYERS[name].make(dtype=policy.compute_dtype, param_dtype=policy.param_dtype)
    return _step(name, layer, policy.cast_to_compute, policy.cast_to_output)


def _dtypes(tree):
    return {path: x.dtype for path, x in jax.tree.leaves_with_path(tree)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "spec"), [*itertools.product(LAYERS, POLICIES), *itertools.product(REPRESENTATIVE, OTHERS)]
)
def test_layer_is_the_program_by_hand(name, spec):
    policy, inputs = jmp.get_policy(spec), LAYERS[name].inputs
    variables = _expected_variables(name, policy)
    with jmp.use_policy(OTHER_DEFAULT):
        lowered = jax.jit(_ours(name, policy)).lower(variables, inputs)
    # The same text is the same bits and the same cost, and what is not compiled costs no time.
    assert program_text(lowered) == program_text(jax.jit(_by_hand(name, policy)).lower(variables, inputs))
    grads, (out, updated) = lowered.out_info
    assert {x.dtype for x in jax.tree.leaves(out)} == {policy.output_dtype}
    assert _dtypes(grads) == _dtypes({name: variables[name] for name in grads})
    assert _dtypes(updated) == _dtypes({name: variables[name] for name in updated})


@pytest.mark.sample(1)
@pytest.mark.parametrize("spec", ["mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_variables_are_those_of_the_layer_without_a_policy(name, spec):
    """Their tree, names, shapes and dtypes: parameters in param dtype, running statistics and counts untouched."""
    policy = jmp.get_policy(spec)
    model = jmp.with_policy(LAYERS[name].make(), policy)
    assert jax.eval_shape(lambda: _init(name, model)) == _expected_variables(name, policy)


def _programs_of_leaves(fun):
    """What computes each array of a tree, as the text of a program of its own."""
    jaxpr = jax.make_jaxpr(lambda: jax.tree.leaves(fun()))()
    run = jaxpr_as_fun(jaxpr)
    return [jax.jit(lambda i=i: run()[i]).lower().as_text() for i in range(len(jaxpr.out_avals))]


# The others store what they make of the drawn weight, and make it of the weight in param dtype.
DRAWN = [name for name in LAYERS if not name.startswith(("WeightNorm", "SpectralNorm"))]
# Nor do variants of a layer draw what the layer does not: one of those around a cell, and one with a cache, are enough.
DRAWN = [name for name in DRAWN if " " not in name or name in ("RNN of LSTM cells", "SelfAttention with a cache")]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_parameters_are_drawn_in_the_authors_dtype_and_stored_in_param_dtype(name):
    plain, half = LAYERS[name].make(), jmp.with_policy(LAYERS[name].make(), "bfloat16")
    drawn = _programs_of_leaves(lambda: jmp.cast_floating(_init(name, plain).get("params", {}), "bfloat16"))
    assert _programs_of_leaves(lambda: _init(name, half).get("params", {})) == drawn


@pytest.mark.slow
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
    variables = model.init(RNGS, X)
    parameters = {key: ["float32", "float32"] for key in ("weight by self", "scale", "bias")}
    statistics = {key: ["float32", "float32"] for key in ("mean by self", "var")}
    cache = {"key by self": ["float32", "float16"], "value": ["float16", "float32"]}
    assert dict(asked) == parameters | statistics | cache
    asked.clear()
    model.apply(variables, X)  # Flax asks for the shapes of parameters again
    assert dict(asked) == parameters


@pytest.mark.parametrize("name", ["WeightNorm", "SpectralNorm"])
def test_weight_that_a_layer_rewrites_keeps_its_stored_dtype(name):
    model = jmp.with_policy(LAYERS[name].make(), "bfloat16")
    variables = _expected_variables(name, jmp.policy_of(model))
    _, updated = jax.eval_shape(lambda v: model.apply(v, X, **LAYERS[name].kwargs, mutable=True), variables)
    assert updated == variables


def _uncovered_modules():
    """The names of Flax's modules that have no entry, by the class that it makes, and no exemption."""
    made = {type(layer.make()) for layer in LAYERS.values()}
    modules = {name: x for name, x in vars(nn).items() if isinstance(x, type) and issubclass(x, nn.Module)}
    return {name for name, kind in modules.items() if kind not in made and not name.startswith("_")} - EXEMPT.keys()


def test_every_module_that_flax_exports_is_in_the_registry():
    assert not _uncovered_modules()


def test_module_that_flax_adds_is_missed_by_name(monkeypatch):
    monkeypatch.setattr(nn, "Mamba", type("Mamba", (nn.Module,), {}), raising=False)
    assert _uncovered_modules() == {"Mamba"}


def test_only_what_flax_exports_is_exempt():
    assert EXEMPT.keys() <= vars(nn).keys()
