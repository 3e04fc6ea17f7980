"""Layers of linen under float8 policies: each computes in 8 bits, or as it did without, and `explain` knows which."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from float8_linen import (
    AS_CONVOLUTION,
    BY_ROW,
    CASES,
    CURRENT,
    DELAYED,
    FLOAT8,
    LEFT_BY_ROWS,
    OVERWRITE,
    X,
    abstract_variables,
    float8_products,
)
from linen_layers import LAYERS
from programs import program_text

import jmp_policy as jmp
from jmp_policy import quant

PLAIN = "mixed_bfloat16"
LEFT = [name for name in LAYERS if not any(word in name for word in ("RNN", "Bidirectional", "Multi", "Fp8", "float8"))]
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

pytestmark = pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated soon:DeprecationWarning")


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # norms with dtype=bfloat16 promote their own float32 statistics
        yield


def _sum_of_squares(tree):
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))


def _gradients(case, module, variables):
    loss = lambda variables: _sum_of_squares(module.apply(variables, *case.inputs, method=case.method))
    return jax.make_jaxpr(jax.grad(loss))(variables)


@pytest.mark.filterwarnings("ignore:No layer of the model computes in float8")  # of the rows that are odd
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layer_multiplies_in_8_bits_where_explain_says_so(name):
    case = CASES[name]
    model = jmp.with_policy(case.module, DELAYED)
    rows = jmp.explain(model, *case.inputs, method=case.method).rows
    assert {row.path: row.quantization for row in rows if row.quantization} == case.quantization
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), *case.inputs, method=case.method))
    products = float8_products(_gradients(case, model, variables).jaxpr)
    in_8_bits = list(case.quantization.values()).count(FLOAT8)
    assert products >= 3 * in_8_bits
    assert (products > 0) == (in_8_bits > 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_state_is_beside_the_variables_of_layers_fit_for_it(name):
    case = CASES[name]
    model = jmp.with_policy(case.module, DELAYED)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), *case.inputs, method=case.method))
    state = variables.pop(OVERWRITE, {})
    assert variables == abstract_variables(name)
    paths = {"/".join(key.key for key in keys[:-1]) for keys, _ in jax.tree_util.tree_leaves_with_path(state)}
    fit = (FLOAT8, AS_CONVOLUTION, LEFT_BY_ROWS)
    assert paths == {path for path, quantization in case.quantization.items() if quantization in fit}
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {jnp.dtype("float32")}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [CURRENT, BY_ROW])
def test_current_scaling_has_no_state(policy):
    case = CASES["attention"]
    model = jmp.with_policy(case.module, policy)
    assert jax.eval_shape(model.init, jax.random.key(0), *case.inputs) == abstract_variables("attention")
    assert float8_products(_gradients(case, model, abstract_variables("attention")).jaxpr) == 12


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LEFT)
def test_layer_of_odd_sizes_is_what_it_is_without_float8(name):
    layer = LAYERS[name]

    def gradients(policy):
        module = jmp.with_policy(layer.make(), policy)

        def init():
            init_inputs = layer.inputs if layer.init_inputs is None else layer.init_inputs
            return module.init(
                RNGS, *init_inputs, method=None if layer.init_inputs else layer.method,
                **({} if layer.init_inputs else layer.kwargs),
            )  # fmt: skip

        def loss(params, others, inputs):
            options = {"method": layer.method, "mutable": ["batch_stats", "cache"], "rngs": RNGS, **layer.kwargs}
            out, updated = module.apply({**others, "params": params}, *inputs, **options)
            return _sum_of_squares(out), updated

        variables = jax.eval_shape(init)
        assert OVERWRITE not in variables
        params = variables.pop("params", {})
        return str(jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(params, variables, layer.inputs))

    assert gradients(DELAYED) == gradients(PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [DELAYED, CURRENT, BY_ROW, "float8/4(weight_grad=false,min_size=0)_from_mixed_bfloat16"]
)
def test_stack_of_layers_is_the_program_of_the_products_by_hand(policy):
    policy = jmp.get_policy(policy)
    model = jmp.with_policy(nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(32)]), policy)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)

    def by_hand(variables, x):
        x = x.astype(jnp.bfloat16)
        for name in ("layers_0", "layers_2"):
            kernel, bias = (variables["params"][name][weight].astype(jnp.bfloat16) for weight in ("kernel", "bias"))
            state = {"state": variables[OVERWRITE][name]} if OVERWRITE in variables else {}
            x = quant.dot_general(x, kernel, (((1,), (0,)), ((), ())), quantization=policy.quantization, **state)
            x = x + bias.reshape(1, -1)
            x = nn.relu(x) if name == "layers_0" else x
        return x

    def lowered(apply):
        scale = jmp.StaticLossScale(2.0)
        loss = lambda variables, x: _sum_of_squares(apply(variables, x))
        return program_text(jax.jit(jmp.value_and_grad(loss, loss_scale=scale)).lower(variables, X))

    assert lowered(model.apply) == lowered(by_hand)


@pytest.mark.slow
def test_layer_with_an_operation_of_flaxs_keeps_that_and_its_state():
    dense = functools.partial(nn.Dense, 16, dot_general_cls=nn.Fp8DirectDotGeneralOp)

    def gradients(policy, variables):
        model = jmp.with_policy(dense(), policy)
        return jax.grad(lambda variables: _sum_of_squares(model.apply(variables, X)))(variables)

    @jax.jit
    def are_equal(key):
        variables = dense().init(key, X)
        ours, flaxs = gradients(DELAYED, variables), gradients(PLAIN, variables)
        return jax.tree.map(lambda x, y: jnp.all(x == y), ours, flaxs)

    assert jax.tree.all(are_equal(jax.random.key(0)))


class Body(nn.Module):
    """A layer, and a head that may have a policy of its own."""

    head: nn.Module = nn.Dense(16)

    @nn.compact
    def __call__(self, x):
        return self.head(nn.relu(nn.Dense(16, name="body")(x)))


CURRENT_FORMAT = CURRENT.partition("_from_")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "quantization", "states"),
    [
        (jmp.with_policy(Body(), jmp.PolicyMap({"head": PLAIN}, DELAYED)), {"body": FLOAT8}, ["body"]),
        (
            jmp.with_policy(Body(), jmp.PolicyMap({"head": CURRENT}, DELAYED)),
            {"body": FLOAT8, "head": CURRENT_FORMAT},
            ["body"],
        ),
        (
            jmp.with_policy(nn.WeightNorm(nn.Dense(16)), jmp.PolicyMap({nn.Dense: DELAYED}, PLAIN)),
            {"layer_instance": FLOAT8},
            ["layer_instance"],
        ),
        (
            jmp.with_policy(Body(jmp.with_policy(nn.Dense(16), CURRENT)), DELAYED),
            {"body": FLOAT8, "head": CURRENT_FORMAT},
            ["body"],
        ),
        (jmp.with_policy(Body(jmp.with_policy(nn.Dense(16), DELAYED)), PLAIN), {"head": FLOAT8}, ["head"]),
        (Body(jmp.with_policy(nn.Dense(16), DELAYED)), {"head": FLOAT8}, ["head"]),
    ],
    ids=["a rule", "two recipes", "a rule in a norm", "two policies", "a policy inside", "a policy inside of none"],
)
def test_each_layer_has_the_format_of_its_own_policy(model, quantization, states):
    rows = jmp.explain(model, X).rows
    assert {row.path: row.quantization for row in rows if row.quantization} == quantization
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert list(variables[OVERWRITE]) == states
    loss = jmp.grad(lambda variables: _sum_of_squares(model.apply(variables, X)), loss_scale=jmp.StaticLossScale(2.0))
    program = jax.make_jaxpr(loss)(variables)
    assert float8_products(program.jaxpr) == 3 * len(quantization)
    assert [aval.dtype for aval in program.out_avals] == [jnp.float32] * len(jax.tree.leaves(variables))


def test_audit_counts_the_products_in_8_bits():
    model = jmp.with_policy(Body(), DELAYED)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    scale = jmp.StaticLossScale(2.0)
    loss_fn = lambda variables: _sum_of_squares(model.apply(variables, X))
    report = jmp.numerics.audit(jmp.value_and_grad(loss_fn, loss_scale=scale))(variables)
    assert report.findings == ()
    assert {matmul.dtype for matmul in report.matmuls} == {"float8_e4m3fn", "float8_e5m2"}


def test_comparison_says_that_weights_stay_as_they_are():
    params = {"params": {"kernel": X, "bias": X[0]}}
    before, after = (jmp.with_policy(nn.Dense(16), policy).bind(params) for policy in ("float32", CURRENT))
    comparison = quant.compare(before, after, X)
    said = "left: computes as float8(recipe=current,min_size=0), from an unquantized weight"
    assert comparison[""].quantization == said
    assert 0.01 < comparison.output_error < 0.1


def call_abstractly(model, rows, **options):
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 16)))  # which warns of nothing
    jax.eval_shape(functools.partial(model.apply, **options), variables, jnp.ones((rows, 16)))


def test_rows_that_keep_every_layer_out_of_8_bits_are_told_once():
    model = jmp.with_policy(nn.Sequential([nn.Dense(16), nn.Dense(16)]), DELAYED)
    call_abstractly(model, 32)
    message = r"float8 in this call, but in bfloat16: .* a multiple of 16; it is 8\. Pad the batch to 16 rows\."
    with pytest.warns(UserWarning, match=message):
        call_abstractly(model, 8)
    call_abstractly(model, 24)


def test_rows_are_not_told_where_a_layer_computes_in_8_bits_or_explain_says_so():
    class Halves(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16)(x[:8]), nn.Dense(16)(x)

    call_abstractly(jmp.with_policy(Halves(), DELAYED), 16)
    jmp.explain(jmp.with_policy(nn.Dense(16), DELAYED), jnp.ones((8, 16)))
    call_abstractly(jmp.with_policy(nn.Dense(10), DELAYED), 8)  # whose weight is not fit, whatever the rows
