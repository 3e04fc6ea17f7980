"""Every layer under every policy is the layer with its dtypes written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_layers import LAYERS
from programs import assert_costs_no_more, cost

import jmp_policy as jmp

POLICIES = ["mixed_bfloat16", "mixed_float16", "float32", "params=float32,compute=bfloat16,output=float32"]


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


def _step(model, cast_inputs, cast_output):
    """A pure function of (params, other state, inputs): output, new state, and gradients of the sum of squares."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, inputs):
        module = nnx.merge(graphdef, params, rest, copy=True)
        out = cast_output(module(*cast_inputs(inputs)))
        loss = sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(out))
        return loss, (out, nnx.state(module, nnx.Not(nnx.Param)))

    return jax.grad(loss_fn, has_aux=True), (params, rest)


def _ours(name, policy):
    return _step(jmp.with_policy(LAYERS[name].make(None, nnx.Rngs(0)), policy), lambda x: x, lambda x: x)


def _by_hand(name, policy):
    model = LAYERS[name].make(policy.compute_dtype, nnx.Rngs(0))
    return _step(model, policy.cast_to_compute, policy.cast_to_output)


@pytest.mark.parametrize("spec", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_the_program_by_hand(name, spec):
    policy, inputs = jmp.get_policy(spec), LAYERS[name].inputs
    ours, variables = _ours(name, policy)
    by_hand, variables_by_hand = _by_hand(name, policy)
    _identical(_arrays(variables[0]), _arrays(variables_by_hand[0]))
    # The same text is the same bits, and what is not compiled costs no time.
    lowered, lowered_by_hand = (jax.jit(f).lower(*variables, inputs) for f in (ours, by_hand))
    assert lowered.as_text() == lowered_by_hand.as_text()
    grads, (out, _) = lowered.out_info
    assert all(x.dtype == policy.output_dtype for x in jax.tree.leaves(out))
    jax.tree.map(lambda p, g: np.testing.assert_equal(g.dtype, p.dtype), variables[0], grads)


@pytest.mark.parametrize("name", ["Linear", "BatchNorm", "MultiHeadAttention", "module of modules"])
@pytest.mark.parametrize("spec", ["mixed_bfloat16", "mixed_float16"])
def test_policy_costs_nothing(name, spec):
    """Law 16, in counts: StableHLO operations, flops, bytes accessed, temporaries."""
    policy, inputs = jmp.get_policy(spec), LAYERS[name].inputs
    ours, variables = _ours(name, policy)
    by_hand, _ = _by_hand(name, policy)
    assert_costs_no_more(cost(ours, *variables, inputs), cost(by_hand, *variables, inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_variables_are_those_of_the_layer_without_a_policy(name):
    plain = LAYERS[name].make(None, nnx.Rngs(0))
    policied = jmp.with_policy(plain, "mixed_bfloat16")
    before, after = nnx.state(plain), nnx.state(policied)
    assert jax.tree.structure(before) == jax.tree.structure(after)  # the classes of Variables, and their metadata
    assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    variables = [dict(nnx.iter_graph(m, graph=True)) for m in (plain, policied)]
    shared = {p for p, v in variables[0].items() if isinstance(v, nnx.Variable)}
    assert all(variables[0][path] is variables[1][path] for path in shared)


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_are_drawn_in_the_authors_dtype_and_stored_in_param_dtype(name):
    make = LAYERS[name].make
    plain = make(None, nnx.Rngs(0))
    cast = jmp.nnx.cast_params(plain, "bfloat16")
    expected = _arrays(jmp.cast_floating(nnx.state(plain, nnx.Param), "bfloat16"))
    _identical(_arrays(nnx.state(cast, nnx.Param)), expected)
    others = nnx.Not(nnx.Param)
    _identical(_arrays(nnx.state(cast, others)), _arrays(nnx.state(plain, others)))  # statistics are never narrowed
    assert jmp.policy_of(jmp.with_policy(cast, "bfloat16")).name == "bfloat16"
