"""Layers of both APIs under quantized policies: trained as if quantized, quantized, and left alone."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import products, program_text
from quantized_apis import (
    ALONE,
    APIS,
    LAYERS,
    TOKENS,
    Scanned,
    X,
    dataflow,
    filled,
    made,
    run,
    run_quantized,
    sum_of_squares,
    waves,
)  # fmt: skip

import jmp_policy as jmp
from jmp_policy import quant

INT8, INT4 = "int8(min_size=0)_from_mixed_bfloat16", "int4/4(min_size=0)_from_mixed_bfloat16"
W4A8 = "int4/4(activations=true,min_size=0)_from_mixed_bfloat16"
E4M3 = "e4m3/8(activations=true,min_size=0)_from_mixed_bfloat16"
NF4 = "nf4/8(min_size=0)_from_mixed_bfloat16"
WEIGHTS, PLAIN = "int8(activations=false,min_size=0)_from_float32", "mixed_bfloat16"
MXFP8, NVFP4 = "mxfp8/8(min_size=0)_from_mixed_bfloat16", "nvfp4/8(min_size=0)_from_float32"
MXFP4 = "mxfp4/8(activations=true,min_size=0)_from_mixed_bfloat16"
PADDED4 = "int4/6(activations=true,min_size=0)_from_mixed_bfloat16"
PADDED8 = "mxfp8/6(min_size=0)_from_mixed_bfloat16"
READS_ROWS = ("Embed", "table whose methods call each other")  # quantized, of the rows that are read alone
OWN = "function of its author's"  # which linen stores in 8 bits and computes with as numbers, and nnx leaves
NET = "two layers"
LIFTED = ("scan", "vmap")  # whose text has functions, in another order


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # an LSTM cell promotes its own float32 carry
        yield


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def of_both(names, policies):
    """Each layer of each API under one policy after another; the first quarter is not slow."""
    cases = [(api, name) for name in names for api in APIS] + [(api, name) for api in APIS for name in ALONE[api]]
    cases = [(*case, policy) for case, policy in zip(cases, itertools.cycle(policies), strict=False)]
    cases = [case for case in cases if case[:2] != ("nnx", OWN) and not case[1].startswith(LIFTED)]
    return [case if i % 4 == 0 else slow(*case) for i, case in enumerate(cases)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api", "name", "policy"),
    of_both([name for name in LAYERS if name not in READS_ROWS], [INT8, WEIGHTS, INT4, W4A8, E4M3]),
)
def test_training_computes_what_the_quantized_layer_will(api, name, policy):
    trained = jax.jit(run(api, name, policy)).lower(made(api, name)[1])
    # Weights whose sum is last are stored in int8.
    assert any(word in trained.as_text() for word in ("round_nearest_even", *["f8E4M3FN"] * (policy == E4M3)))
    assert dataflow(trained) == dataflow(jax.jit(run_quantized(api, name, policy)).lower(made(api, name)[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api", "policy", "bound"),
    [
        ("linen", INT8, 0.05), ("nnx", INT8, 0.05), ("linen", MXFP8, 0.15), ("nnx", MXFP8, 0.15),
        ("linen", NVFP4, 0.4), ("nnx", MXFP4, 0.5), ("linen", W4A8, 0.3), ("nnx", W4A8, 0.3),
        ("linen", E4M3, 0.12), ("nnx", E4M3, 0.12), ("linen", NF4, 0.4),
        ("nnx", PADDED4, 0.4), ("linen", PADDED8, 0.15),
    ],
)  # fmt: skip
def test_all_layers_compute_in_training_the_bits_of_the_quantized_weights_and_nearly_those_of_floats(
    api, policy, bound
):
    in_blocks = policy not in (INT8, W4A8, E4M3, NF4, PADDED4)
    alone = ("scan of layers", "vmap of layers") if api == "linen" else ("LoRALinear",)
    names = [name for name, layer in LAYERS.items() if (layer.in_blocks or not in_blocks) and name != OWN]
    names += [] if in_blocks and api == "nnx" else alone

    @jax.jit
    def outputs(variables):
        runs = {name: (run(api, name, policy), run_quantized(api, name, policy), run(api, name)) for name in names}
        return {name: [call(variables[name]) for call in runs[name]] for name in names}

    for name, outs in outputs({name: filled(made(api, name)[1], 1) for name in names}).items():
        trained, quantized, floats = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(out)]) for out in outs)
        np.testing.assert_array_equal(trained, quantized, err_msg=name, strict=True)
        error = np.linalg.norm(np.float64(trained) - np.float64(floats)) / np.linalg.norm(np.float64(floats))
        assert 1e-4 < error < bound, (name, error)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("policy", [INT8, pytest.param(INT4, marks=pytest.mark.slow), W4A8])
def test_rows_are_those_that_the_quantized_table_reads(api, policy):
    given = jmp.get_policy(policy)

    @jax.jit
    def rows(variables):
        table = APIS[api].params(variables)["embedding"]
        outs = [call(api, "Embed", policy)(variables) for call in (run, run_quantized)]
        return *outs, rounded_rows(table, given.quantization.for_tables).astype(given.compute_dtype)[TOKENS]

    trained, quantized, expected = rows(filled(made(api, "Embed")[1]))
    np.testing.assert_array_equal(quantized, trained, strict=True)
    np.testing.assert_array_equal(trained, expected, strict=True)


def rounded_rows(table, format):
    """The table as `quant.quantize` stores one."""
    return quant.quantize({"params": {"embedding": table}}, f"{format}_from_float32")["params"][
        "embedding"
    ].dequantize()


LEFT = [
    ("Dense", "int8_from_mixed_bfloat16"), ("Embed", "int8_from_mixed_bfloat16"),
    ("ConvTranspose", "int8_from_mixed_bfloat16"), ("attention", jmp.PolicyMap({"|.*": PLAIN}, INT8)),
    ("Conv of an image", "mxfp8_from_mixed_bfloat16"), ("Einsum to heads", "nf4_from_mixed_bfloat16"),
    ("Embed", MXFP8), ("Embed attended to", MXFP8),
    ("table whose methods call each other", MXFP8), ("two layers", jmp.PolicyMap({"|.*": PLAIN}, MXFP8)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("api", "name", "policy"),
    [(api, *case) if i % 2 == 0 else slow(api, *case) for case in LEFT for i, api in enumerate(APIS)],
)
def test_a_weight_that_is_left_costs_nothing(api, name, policy):
    plain = PLAIN if isinstance(policy, str) else jmp.PolicyMap({"|.*": PLAIN}, "float32")
    variables = made(api, name)[1]

    def text(policy):
        return program_text(
            jax.jit(
                jmp.grad(lambda v: sum_of_squares(run(api, name, policy)(v)), loss_scale=jmp.NoOpLossScale())
            ).lower(variables)
        )

    assert text(policy) == text(plain)


def dense_by_hand(params, x, format):
    out = quant.dot_general(x, params["kernel"], (((1,), (0,)), ((), ())), quantization=format)
    return out + params["bias"].astype(x.dtype).reshape(1, -1)


def attend_by_hand(params, x, format):
    return quant.dot_general(x, params["embedding"], (((1,), (1,)), ((), ())), quantization=format.for_tables)


def einsum_by_hand(params, x, format):
    out = quant.einsum("tba,tac->tbc", x, params["kernel"], quantization=format)
    return out + params["bias"].astype(x.dtype)[:, None]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("name", "by_hand", "policy"),
    [
        ("Dense", dense_by_hand, INT8),
        ("Einsum of a batch", einsum_by_hand, INT4),
        slow("Embed attended to", attend_by_hand, INT8),
    ],
)
def test_a_layer_computes_what_is_written_by_hand(api, name, by_hand, policy):
    given, (x,) = jmp.get_policy(policy), LAYERS[name].args

    @jax.jit
    def both(variables):
        expected = by_hand(APIS[api].params(variables), x.astype(given.compute_dtype), given.quantization)
        return run(api, name, policy)(variables), expected

    np.testing.assert_array_equal(*both(filled(made(api, name)[1])), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api", "policy", "bound"),
    [
        ("linen", INT8, 0.05),
        ("nnx", INT8, 0.05),
        ("linen", MXFP8, 0.15),
        ("nnx", INT4, 0.4),
        ("linen", W4A8, 0.4),
        ("linen", E4M3, 0.15),
        ("nnx", NF4, 0.4),
        ("linen", MXFP4, 0.6),
    ],
)
def test_gradients_pass_straight_through_to_the_floating_weights(api, policy, bound):
    names = ["Dense", "Einsum in another order", "Embed attended to", "subclass that adds", NET]
    names += ["scan of layers"] if api == "linen" else []

    def gradients(policy):
        def loss(variables):
            outs = [run(api, name, policy)(variables[name]) for name in names]
            return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in outs)

        return jax.jit(jax.grad(loss))({name: filled(made(api, name)[1], 1) for name in names})

    found, expected = gradients(policy), gradients(None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}
    for name in names:
        ours, theirs = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(g[name])]) for g in (found, expected))
        assert np.linalg.norm(ours - theirs) < bound * np.linalg.norm(theirs), name


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("subclass that adds", "int8"), ("table whose methods call each other", "int8"), (OWN, "bfloat16")],
)
def test_code_of_flax_multiplies_integers_and_code_of_a_users_numbers(api, name, dtype):
    assert [read for _, read in products(jax.make_jaxpr(run(api, name, INT8))(made(api, name)[1]))] == [dtype]


@pytest.mark.parametrize("api", APIS)
def test_a_map_gives_each_module_its_own_format(api):
    rules = jmp.PolicyMap({"hidden": INT4, "head": PLAIN}, INT8)
    model, shapes = made(api, NET)
    quantized = jax.eval_shape(lambda v: APIS[api].quantize(model, v, rules)[1], shapes)
    leaves = jax.tree.leaves(quantized, is_leaf=lambda node: isinstance(node, quant.QuantizedArray))
    assert [type(leaf.format) for leaf in leaves if isinstance(leaf, quant.QuantizedArray)] == [quant.Int4]
    dtypes = [
        dtype for _, dtype in products(jax.make_jaxpr(run(api, NET, jmp.PolicyMap({"head": PLAIN}, INT8)))(shapes))
    ]
    assert dtypes == ["int8", "bfloat16"]


def scanned_layers(api):
    """Three layers without biases in one, run one after the other."""
    if api == "linen":
        model = Scanned(use_bias=False)
        return model, lambda model, v, x: model.apply(v, x), {"params": {"layers": {"kernel": KERNELS}}}
    model = nnx.eval_shape(lambda: nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    state["kernel"] = state["kernel"].replace(KERNELS)
    step = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))
    scan = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return model, lambda model, v, x: scan(nnx.merge(nnx.graphdef(model), v, copy=True), x), state


KERNELS = jnp.stack([factor * waves(None, (16, 16), jnp.float32) for factor in (1, 10, -1)])


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("policy", [INT8, INT4, W4A8, E4M3, NF4, MXFP8])
def test_a_stack_has_a_scale_for_each_of_its_layers_and_computes_as_they_do(api, policy):
    model, call, variables = scanned_layers(api)
    policy = f"{jmp.get_policy(policy).quantization}_from_float32"
    rounded = [quant.quantize({"params": {"kernel": kernel}}, policy)["params"]["kernel"] for kernel in KERNELS]
    by_hand = lambda x, kernel: jnp.tanh(
        quant.dot_general(x, kernel, (((1,), (0,)), ((), ())), quantization=jmp.get_policy(policy).quantization)
    )

    @jax.jit
    def outputs(variables):
        trained = jmp.with_policy(model, policy)
        loss = lambda variables: jnp.sum(call(trained, variables, X) ** 2)
        expected = X
        for kernel in rounded:
            expected = by_hand(expected, kernel)
        return call(trained, variables, X), jax.grad(loss)(variables), expected

    out, grads, expected = outputs(variables)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    (kernel,) = jax.tree.leaves(grads)
    assert np.asarray(kernel).any(axis=(1, 2)).all()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("int8_from_float32", "'kernel': 256 elements are fewer than min_size=4096"),
        ("float32", "the policy 'float32' stores no quantized weights"),
    ],
)
def test_errors_name_the_weight(api, policy, message):
    model, variables = made(api, "Dense")
    message = re.escape(message)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda v: APIS[api].quantize(model, v, policy)[1], variables)
