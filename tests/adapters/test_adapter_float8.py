"""Layers of both APIs under float8 policies: they compute in 8 bits or as without, and `explain` knows which."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from programs import products, program_text
from quantized_apis import (
    APIS,
    AS_CONVOLUTION,
    BY_ROWS,
    DENSE,
    FLOAT8,
    LAYERS,
    Layer,
    X,
    filled,
    made,
    nn,
    sum_of_squares,
)  # fmt: skip

import jmp_policy as jmp
from jmp_policy import quant

DELAYED, PLAIN = "float8/4(min_size=0)_from_mixed_bfloat16", "mixed_bfloat16"
CURRENT, BY_ROW = (f"float8(recipe={kind},min_size=0)_from_mixed_bfloat16" for kind in ("current", "current/row"))
ONE_WAY = "float8/4(weight_grad=false,min_size=0)_from_mixed_bfloat16"
SCALE = jmp.StaticLossScale(2.0)
IN_8_BITS = [name for name, layer in LAYERS.items() if FLOAT8 in layer.float8 or AS_CONVOLUTION in layer.float8]
LEFT = [name for name, layer in LAYERS.items() if layer.float8 and name not in IN_8_BITS]


def of_each_api(names):
    """Each name once for one of the APIs, and for the other in the slow tests."""
    turns = itertools.cycle(("linen", "nnx"))
    first = [(next(turns), name) for name in names]
    others = [pytest.param("nnx" if api == "linen" else "linen", name, marks=pytest.mark.slow) for api, name in first]
    return pytest.mark.parametrize(("api", "name"), [*first, *others])


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # attention promotes its own float32 mask
        yield


def quantization_of(model, *inputs, **options):
    return [row.quantization for row in jmp.explain(model, *inputs, **options).rows if row.quantization]


def gradients(api, name, policy):
    model, variables = made(api, name, policy)
    layer = LAYERS[name]
    loss = lambda variables: sum_of_squares(APIS[api].call(model, variables, *layer.args, method=layer.method))
    return jax.make_jaxpr(jmp.grad(loss, loss_scale=SCALE))(variables)


def float8_products(program):
    return sum(dtype.startswith("float8") for _, dtype in products(program))


@of_each_api(IN_8_BITS)
def test_a_layer_multiplies_in_8_bits_and_has_state_where_explain_says_so(api, name):
    layer, (model, variables) = LAYERS[name], made(api, name, DELAYED)
    assert quantization_of(model, *layer.args, method=layer.method) == list(layer.float8)
    state = APIS[api].state(variables)
    assert len(state) == 6 * len(layer.float8)
    assert {leaf.dtype.name for leaf in state.values()} == {"float32"}
    assert jax.tree.map(jnp.shape, APIS[api].params(variables)) == jax.tree.map(
        jnp.shape, APIS[api].params(made(api, name, PLAIN)[1])
    )
    program = gradients(api, name, DELAYED)
    assert float8_products(program) == 3 * layer.float8.count(FLOAT8)
    assert ("float8_e5m2" in str(program)) == (FLOAT8 in layer.float8 or AS_CONVOLUTION in layer.float8)


@pytest.mark.filterwarnings("ignore:No layer of the model computes in float8")  # of the few rows
@of_each_api(LEFT)
def test_a_layer_that_is_left_computes_as_without_float8_and_explain_says_why(api, name):
    layer, (model, variables) = LAYERS[name], made(api, name, DELAYED)
    assert quantization_of(model, *layer.args, method=layer.method) == list(layer.float8)
    if layer.float8 == (BY_ROWS,):
        assert len(APIS[api].state(variables)) == 6  # another call may have other rows
        layer_alone = lambda policy: jax.make_jaxpr(
            lambda v: APIS[api].call(made(api, name, policy)[0], v, *layer.args)
        )
        program = layer_alone(DELAYED)(variables)
        assert products(program) == products(layer_alone(PLAIN)(made(api, name, PLAIN)[1]))
    else:
        assert APIS[api].state(variables) == {}
        assert str(gradients(api, name, DELAYED)) == str(gradients(api, name, PLAIN))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [CURRENT, BY_ROW])
@pytest.mark.parametrize("api", APIS)
def test_current_scaling_has_no_state(api, policy):
    assert APIS[api].state(made(api, "attention", policy)[1]) == {}
    assert float8_products(gradients(api, "attention", policy)) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api", "policy"),
    [
        ("linen", DELAYED),
        ("nnx", CURRENT),
        ("linen", BY_ROW),
        ("nnx", DELAYED),
        ("linen", ONE_WAY),
        ("nnx", ONE_WAY),
    ],
)
def test_a_stack_of_layers_is_the_program_of_its_products_by_hand(api, policy):
    model, variables = made(api, "two layers", policy)
    api, policy = APIS[api], jmp.get_policy(policy)

    def by_hand(variables, x):
        params, states = api.params(variables), api.state(variables)
        x = x.astype(jnp.bfloat16)
        for name in ("hidden", "head"):
            kernel, bias = (params[name][weight].astype(jnp.bfloat16) for weight in ("kernel", "bias"))
            state = {leaf.partition("/")[2]: states[leaf] for leaf in states if leaf.startswith(name)} or None
            x = quant.dot_general(x, kernel, (((1,), (0,)), ((), ())), quantization=policy.quantization, state=state)
            x = x + bias.reshape(1, -1)
            x = nnx.relu(x) if name == "hidden" else x
        return x

    def lowered(apply):
        loss = lambda variables, x: sum_of_squares(apply(variables, x))
        return program_text(jax.jit(jmp.value_and_grad(loss, loss_scale=SCALE)).lower(variables, X))

    text = lowered(by_hand)
    assert "f8E4M3FN" in text
    assert lowered(lambda variables, x: api.call(model, variables, x)) == text


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (jmp.PolicyMap({"head": PLAIN}, DELAYED), {"hidden": FLOAT8}),
        (jmp.PolicyMap({"head": DELAYED}, PLAIN), {"head": FLOAT8}),
        (jmp.PolicyMap({"head": CURRENT}, DELAYED), {"hidden": FLOAT8, "head": "float8(recipe=current,min_size=0)"}),
    ],
    ids=["a head that is left", "a head alone", "two recipes"],
)
def test_each_layer_has_the_format_of_its_own_rule(api, rules, expected):
    model, variables = made(api, "two layers", rules)
    assert {row.path: row.quantization for row in jmp.explain(model, X).rows if row.quantization} == expected
    with_state = {name for name, format in expected.items() if format == FLOAT8}
    assert {name.partition("/")[0] for name in APIS[api].state(variables)} == with_state
    program = gradients(api, "two layers", rules)
    assert float8_products(program) == 3 * len(expected)
    assert {aval.dtype.name for aval in program.out_avals} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_audit_counts_the_products_in_8_bits(api):
    model, variables = made(api, "two layers", DELAYED)
    loss = lambda variables: sum_of_squares(APIS[api].call(model, variables, X))
    report = jmp.numerics.audit(jmp.value_and_grad(loss, loss_scale=SCALE))(variables)
    assert report.findings == ()
    assert {matmul.dtype for matmul in report.matmuls} == {"float8_e4m3fn", "float8_e5m2"}


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_comparison_says_that_weights_stay_as_they_are(api):
    before, after = (APIS[api].make(DENSE, policy) for policy in ("float32", CURRENT))
    variables = filled(APIS[api].shapes(before, DENSE))
    comparison = quant.compare(*(APIS[api].bind(model, variables) for model in (before, after)), X)
    said = "left: computes as float8(recipe=current,min_size=0), from an unquantized weight"
    assert comparison[""].quantization == said
    assert 0.01 < comparison.output_error < 0.1


@pytest.mark.parametrize("api", APIS)
def test_rows_that_keep_every_layer_out_of_8_bits_are_told_once(api):
    kinds = type("Own", (nn.Dense,), {}), type("Own", (nnx.Linear,), {})  # of which nothing was said before
    layer = Layer(kinds[0](16), lambda rngs: kinds[1](16, 16, rngs=rngs), X)
    model = APIS[api].make(layer, DELAYED)
    variables = APIS[api].shapes(model, layer)
    call = lambda rows: jax.eval_shape(lambda v: APIS[api].call(model, v, jnp.ones((rows, 16))), variables)
    call(32)
    jmp.explain(model, X[:8])  # which says it by itself
    message = r"float8 in this call, but in bfloat16: .* a multiple of 16; it is 8\. Pad the batch to 16 rows\."
    with pytest.warns(UserWarning, match=message):
        call(8)
    call(24)


@pytest.mark.parametrize("api", APIS)
def test_rows_are_not_told_of_a_weight_that_is_not_fit_whatever_they_are(api):
    layer = LAYERS["Dense of an odd width"]
    model, variables = made(api, "Dense of an odd width", DELAYED)
    jax.eval_shape(lambda v: APIS[api].call(model, v, layer.inputs[:3]), variables)
