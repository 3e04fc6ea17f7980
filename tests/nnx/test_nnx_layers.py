"""Every layer under every policy is the layer with its dtypes written by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_layers import EXEMPT, LAYERS, X
from programs import assert_costs_no_more, cost

import jmp_policy as jmp

OTHER_DEFAULT = "mixed_float16"  # holds while the programs are made: a policy that was given must win over it
POLICIES = ["mixed_float16", "params=float32,compute=bfloat16,output=float32"]
OTHERS = ["mixed_bfloat16", "float32"]  # which differ from those in nothing that depends on the layer
REPRESENTATIVE = ["Linear", "Embed", "BatchNorm", "MultiHeadAttention with a cache", "RNN of LSTM cells"]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # norms with dtype=bfloat16 promote their own float32 statistics
        yield


def _identical(ours, by_hand):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), ours, by_hand)


def _arrays(state):
    """The arrays of a state by path; the raw data of PRNG keys."""
    pure = nnx.to_pure_dict(state)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, pure)


def _step(name, model, dtype, cast_inputs, cast_output):
    """A pure function of (params, other state, inputs): gradients of the sum of squares, output, and new state."""
    LAYERS[name].prepare(model, dtype)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, inputs):
        module = nnx.merge(graphdef, params, rest, copy=True)
        out = cast_output(LAYERS[name].call(module, *cast_inputs(inputs)))
        loss = sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(out))
        return loss, (out, nnx.to_pure_dict(nnx.state(module)))

    return jax.grad(loss_fn, has_aux=True), (params, rest)


def _made(name, dtype):
    """A layer; where that will do, its arrays are shapes and dtypes, for to draw them takes more time than to lower."""
    make = lambda: LAYERS[name].make(dtype, nnx.Rngs(0))
    return make() if LAYERS[name].drawn else nnx.eval_shape(make)


def _filled(name):
    """A layer with some numbers for its arrays."""

    def fill(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return jnp.asarray(np.linspace(0.1, 0.9, x.size).reshape(x.shape), x.dtype)

    graphdef, state = nnx.split(_made(name, None))
    return nnx.merge(graphdef, jax.tree.map(fill, state))


def _uncast(x):
    return x


def _ours(name, policy):
    return _step(name, jmp.with_policy(_made(name, None), policy), None, _uncast, _uncast)


def _by_hand(name, policy):
    model = _made(name, policy.compute_dtype)
    return _step(name, model, policy.compute_dtype, policy.cast_to_compute, policy.cast_to_output)


def _lowered(step, name, variables):
    return jax.jit(step).trace(*variables, LAYERS[name].inputs).lower(lowering_platforms=(LAYERS[name].platform,))


def _dtypes_by_path(tree):
    return {path: x.dtype for path, x in jax.tree.leaves_with_path(tree)}


def _shapes(variables):
    return {path: (x.shape, x.dtype) for path, x in jax.tree.leaves_with_path(variables)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "spec"), [*itertools.product(LAYERS, POLICIES), *itertools.product(REPRESENTATIVE, OTHERS)]
)
def test_layer_is_the_program_by_hand(name, spec):
    policy = jmp.get_policy(spec)
    by_hand, variables_by_hand = _by_hand(name, policy)
    with jmp.use_policy(OTHER_DEFAULT):
        ours, variables = _ours(name, policy)
        lowered = _lowered(ours, name, variables)
    assert _shapes(variables) == _shapes(variables_by_hand)
    # The same text is the same bits and the same cost, and what is not compiled costs no time.
    assert lowered.as_text() == _lowered(by_hand, name, variables).as_text()
    grads, (out, state) = lowered.out_info
    assert {x.dtype for x in jax.tree.leaves(out)} == {policy.output_dtype}
    assert _dtypes_by_path(grads) == _dtypes_by_path(variables[0])
    before = _dtypes_by_path(nnx.to_pure_dict(nnx.merge_state(*variables)))
    assert before.items() <= _dtypes_by_path(state).items()  # parameters, running statistics and counts keep theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layer_inside_a_model_is_the_layer_with_its_dtype_by_hand(name):
    """Its inputs and outputs are what the model around makes of them."""
    inside = jmp.with_policy(nnx.List([_made(name, None)]), "mixed_bfloat16")[0]
    ours, variables = _step(name, inside, None, _uncast, _uncast)
    by_hand, _ = _step(name, _made(name, jnp.bfloat16), jnp.bfloat16, _uncast, _uncast)
    assert _lowered(ours, name, variables).as_text() == _lowered(by_hand, name, variables).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Linear", "BatchNorm", "MultiHeadAttention", "Bidirectional", "module of modules"])
def test_layer_that_takes_the_dtype_of_its_inputs_is_the_layer_with_it_by_hand(name):
    cast = jmp.get_policy("mixed_bfloat16").cast_to_compute
    model = jmp.with_policy(_made(name, None), "params=float32,compute=none,output=none")
    ours, variables = _step(name, model, None, cast, _uncast)
    by_hand, _ = _step(name, _made(name, jnp.bfloat16), jnp.bfloat16, cast, _uncast)
    assert _lowered(ours, name, variables).as_text() == _lowered(by_hand, name, variables).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Linear", "BatchNorm", "MultiHeadAttention", "module of modules"])
@pytest.mark.parametrize("spec", ["mixed_bfloat16", "mixed_float16"])
def test_policy_costs_nothing(name, spec):
    """Law 16, in counts: StableHLO operations, flops, bytes accessed, temporaries."""
    policy, inputs = jmp.get_policy(spec), LAYERS[name].inputs
    ours, variables = _ours(name, policy)
    by_hand, _ = _by_hand(name, policy)
    assert_costs_no_more(cost(ours, *variables, inputs), cost(by_hand, *variables, inputs))


def _uncovered_modules():
    """The names of Flax's modules that have no entry, by the class that it makes, and no exemption."""
    made = {type(_made(name, None)) for name in LAYERS}
    exported = vars(nnx) | vars(nnx.bridge)
    modules = {name: x for name, x in exported.items() if isinstance(x, type) and issubclass(x, nnx.Module)}
    return {name for name, kind in modules.items() if kind not in made and not name.startswith("_")} - EXEMPT.keys()


@pytest.mark.slow
def test_every_module_that_flax_exports_is_in_the_registry():
    assert not _uncovered_modules()


@pytest.mark.slow
def test_module_that_flax_adds_is_missed_by_name(monkeypatch):
    monkeypatch.setattr(nnx, "Mamba", type("Mamba", (nnx.Module,), {}), raising=False)
    assert _uncovered_modules() == {"Mamba"}


def test_only_what_flax_exports_is_exempt():
    assert EXEMPT.keys() <= (vars(nnx) | vars(nnx.bridge)).keys()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LAYERS)
def test_variables_are_those_of_the_layer_without_a_policy(name):
    plain = _made(name, None)
    policied = jmp.with_policy(plain, "mixed_bfloat16")
    before, after = nnx.state(plain), nnx.state(policied)
    assert jax.tree.structure(before) == jax.tree.structure(after)  # the classes of Variables, and their metadata
    assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    variables = [dict(nnx.iter_graph(m, graph=True)) for m in (plain, policied)]
    shared = {p for p, v in variables[0].items() if isinstance(v, nnx.Variable)}
    assert all(variables[0][path] is variables[1][path] for path in shared)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_are_drawn_in_the_authors_dtype_and_stored_in_param_dtype(name):
    plain = _filled(name)
    cast = jmp.nnx.cast_params(plain, "bfloat16")
    expected = _arrays(jmp.cast_floating(nnx.state(plain, nnx.Param), "bfloat16"))
    _identical(_arrays(nnx.state(cast, nnx.Param)), expected)
    others = nnx.Not(nnx.Param)
    _identical(_arrays(nnx.state(cast, others)), _arrays(nnx.state(plain, others)))  # statistics are never narrowed
    assert jmp.policy_of(jmp.with_policy(cast, "bfloat16")).name == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["bfloat16", "params=float32,compute=none,output=none"])
@pytest.mark.parametrize("name", ["WeightNorm", "SpectralNorm"])
def test_weight_that_a_layer_rewrites_keeps_its_stored_dtype(name, spec):
    model = jmp.with_policy(jmp.nnx.cast_params(LAYERS[name].make(None, nnx.Rngs(0)), spec), spec)
    before = _dtypes_by_path(nnx.to_pure_dict(nnx.state(model)))
    model(X.astype(jnp.bfloat16))
    assert _dtypes_by_path(nnx.to_pure_dict(nnx.state(model))) == before
