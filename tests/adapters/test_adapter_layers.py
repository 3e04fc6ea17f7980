"""Every layer of Flax under a policy is the layer with its dtypes written by hand."""

import itertools

import jax
import jax.numpy as jnp
import linen_layers
import nnx_layers
import numpy as np
import pytest
from flax import linen as nn, nnx
from programs import program_text

import jmp_policy as jmp

OTHER_DEFAULT = "mixed_float16"  # holds while the programs are made: a policy that was given must win over it
SPECS = ["params=float32,compute=bfloat16,output=float32", "mixed_float16", "mixed_bfloat16"]
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
TRAINED = ("params", "_overwrite_with_gradient")  # the latter is float8's, with its new values for gradients
QUICK = {
    "linen": ["Dense", "Embed", "BatchNorm", "WeightNorm", "SelfAttention with a cache", "RNN of LSTM cells"],
    "nnx": ["Linear", "BatchNorm", "MultiHeadAttention with a cache", "LSTMCell", "LoRALinear", "module of modules"],
}

pytestmark = pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated soon:DeprecationWarning")


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # norms with dtype=bfloat16 promote their own float32 statistics
        yield


def list_dtypes(tree):
    return {jax.tree_util.keystr(path): x.dtype for path, x in jax.tree.leaves_with_path(tree)}


def uncast(x):
    return x


def make_loss(call, policy):
    """The sum of squares of what a call returns, cast by hand where a policy is given."""
    casts = (policy.cast_to_compute, policy.cast_to_output) if policy else (uncast, uncast)

    def loss_fn(trained, state, inputs):
        out, updated = call(trained, state, casts[0](inputs))
        out = casts[1](out)
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(out)), (out, updated)

    return jax.grad(loss_fn, has_aux=True)


class Linen:
    name, layers, exempt = "linen", linen_layers.LAYERS, linen_layers.EXEMPT
    base, exported = nn.Module, vars(nn)

    def make(self, name):
        return self.layers[name].make()

    def init(self, name, module):
        layer = self.layers[name]
        if layer.init_inputs is not None:
            return module.init(RNGS, *layer.init_inputs)
        return module.init(RNGS, *layer.inputs, method=layer.method, **layer.kwargs)

    def expect_variables(self, name, policy):
        """Those of the layer without a policy, with parameters in param dtype, and the cache that it has by hand."""
        plain = jax.eval_shape(lambda: self.init(name, self.make(name)))
        if "cache" in plain:
            by_hand = self.layers[name].make(dtype=policy.compute_dtype)
            plain["cache"] = jax.eval_shape(lambda: self.init(name, by_hand))["cache"]
        return (
            plain | {"params": jmp.cast_floating(plain["params"], policy.param_dtype)} if "params" in plain else plain
        )

    def lower(self, name, policy, *, by_hand):
        """The step of a layer, and the dtypes of what it trains and of its other state before the step."""
        layer = self.layers[name]
        if by_hand:
            module = layer.make(dtype=policy.compute_dtype, param_dtype=policy.param_dtype)
        else:
            module = jmp.with_policy(layer.make(), policy)
        variables = self.expect_variables(name, policy)
        trained = {collection: variables[collection] for collection in TRAINED if collection in variables}
        state = {collection: variables[collection] for collection in variables.keys() - trained.keys()}

        def call(trained, state, inputs):
            kwargs = policy.cast_to_compute(layer.kwargs) if by_hand else layer.kwargs
            options = {"method": layer.method, "mutable": ["batch_stats", "cache"], "rngs": RNGS}
            return module.apply(trained | state, *inputs, **options, **kwargs)

        step = make_loss(call, policy if by_hand else None)
        return (jax.jit(step).lower(trained, state, layer.inputs), list_dtypes(trained), list_dtypes(state))


class Nnx:
    name, layers, exempt = "nnx", nnx_layers.LAYERS, nnx_layers.EXEMPT
    base, exported = nnx.Module, vars(nnx) | vars(nnx.bridge)

    def make(self, name, dtype=None):
        """A layer of shapes and dtypes where that will do: to draw its arrays takes more time than to lower it."""
        make = lambda: self.layers[name].make(dtype, nnx.Rngs(0))
        return make() if self.layers[name].drawn else nnx.eval_shape(make)

    def lower(self, name, policy, *, by_hand):
        layer, dtype = self.layers[name], policy.compute_dtype if by_hand else None
        model = self.make(name, dtype)
        model = model if by_hand else jmp.with_policy(model, policy)
        layer.prepare(model, dtype)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def call(params, rest, inputs):
            module = nnx.merge(graphdef, params, rest, copy=True)
            out = layer.call(module, *inputs)
            return out, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))

        step = jax.jit(make_loss(call, policy if by_hand else None))
        lowered = step.trace(params, rest, layer.inputs).lower(lowering_platforms=(layer.platform,))
        return lowered, list_dtypes(params), list_dtypes(nnx.to_pure_dict(rest))


LINEN, NNX = Linen(), Nnx()


def list_cases():
    """Each layer under one policy, and in quick tests some of them."""
    for api in (LINEN, NNX):
        for name, spec in zip(api.layers, itertools.cycle(SPECS)):
            marks = () if name in QUICK[api.name] else pytest.mark.slow
            yield pytest.param(api, name, spec, marks=marks, id=f"{api.name}: {name}")


@pytest.mark.slow
@pytest.mark.parametrize(("api", "name", "spec"), list(list_cases()))
def test_layer_is_the_program_by_hand(api, name, spec):
    policy = jmp.get_policy(spec)
    by_hand, *dtypes_by_hand = api.lower(name, policy, by_hand=True)
    with jmp.use_policy(OTHER_DEFAULT):
        ours, trained, state = api.lower(name, policy, by_hand=False)
    assert [trained, state] == dtypes_by_hand
    # The same text is the same bits and the same cost, and what is not compiled costs no time.
    assert program_text(ours) == program_text(by_hand)
    grads, (out, updated) = ours.out_info
    assert {x.dtype for x in jax.tree.leaves(out)} == {policy.output_dtype}
    assert list_dtypes(grads) == trained
    assert list_dtypes(updated).items() <= state.items()  # running statistics and counts keep their dtypes


@pytest.mark.parametrize("name", ["Embed", "BatchNorm", "SelfAttention with a cache", "RNN of LSTM cells"])
def test_variables_of_linen_are_those_of_the_layer_without_a_policy(name):
    """Their tree, names, shapes and dtypes: parameters in param dtype, running statistics and counts untouched."""
    policy = jmp.get_policy("bfloat16")
    model = jmp.with_policy(LINEN.make(name), policy)
    assert jax.eval_shape(lambda: LINEN.init(name, model)) == LINEN.expect_variables(name, policy)


@pytest.mark.parametrize("name", ["BatchNorm", "Dropout", "LoRALinear", "module of modules"])
def test_variables_of_nnx_are_those_of_the_layer_without_a_policy(name):
    plain = NNX.make(name)
    policied = jmp.with_policy(plain, "mixed_bfloat16")
    before, after = nnx.state(plain), nnx.state(policied)
    assert jax.tree.structure(before) == jax.tree.structure(after)  # the classes of Variables, and their metadata
    variables = [dict(nnx.iter_graph(model, graph=True)) for model in (plain, policied)]
    shared = {path for path, node in variables[0].items() if isinstance(node, nnx.Variable)}
    assert shared
    assert all(variables[0][path] is variables[1][path] for path in shared)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Dense", "Embed", "SelfAttention with a cache", "LSTMCell", "RNN of LSTM cells"])
def test_parameters_of_linen_are_drawn_in_the_authors_dtype_and_stored_in_param_dtype(name):
    def run(model):
        return jax.jit(lambda: jmp.cast_floating(LINEN.init(name, model)["params"], "bfloat16"))()

    jax.tree.map(
        lambda ours, drawn: np.testing.assert_array_equal(ours, drawn, strict=True),
        jax.jit(lambda: LINEN.init(name, jmp.with_policy(LINEN.make(name), "bfloat16"))["params"])(),
        run(LINEN.make(name)),
    )


@pytest.mark.parametrize("name", ["WeightNorm", "SpectralNorm"])
def test_weight_that_a_layer_rewrites_keeps_its_stored_dtype(name):
    model, layer = jmp.with_policy(LINEN.make(name), "bfloat16"), LINEN.layers[name]
    variables = LINEN.expect_variables(name, jmp.policy_of(model))
    _, updated = jax.eval_shape(lambda v: model.apply(v, *layer.inputs, **layer.kwargs, mutable=True), variables)
    assert updated == variables
    model = jmp.with_policy(jmp.nnx.cast_params(NNX.layers[name].make(None, nnx.Rngs(0)), "bfloat16"), "bfloat16")
    before = list_dtypes(nnx.to_pure_dict(nnx.state(model)))
    _, state = nnx.eval_shape(lambda model: (model(nnx_layers.X), nnx.state(model)), model)
    assert list_dtypes(nnx.to_pure_dict(state)) == before


@pytest.mark.parametrize("api", [LINEN, pytest.param(NNX, marks=pytest.mark.slow)], ids=lambda api: api.name)
def test_every_module_that_flax_exports_is_in_the_registry(api):
    made = {type(api.make(name)) for name in api.layers}
    modules = {name: x for name, x in api.exported.items() if isinstance(x, type) and issubclass(x, api.base)}
    uncovered = {name for name, kind in modules.items() if kind not in made and not name.startswith("_")}
    assert uncovered == api.exempt.keys()
