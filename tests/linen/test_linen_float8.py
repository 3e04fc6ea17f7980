"""Float8 policies in linen alone: lifted transforms, layers of a user's own, and the collection that has the state."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from programs import products

import jmp_policy as jmp
from jmp_policy import quant

DELAYED, PLAIN = "float8/4(min_size=0)_from_mixed_bfloat16", "mixed_bfloat16"
CURRENT = "float8(recipe=current,min_size=0)_from_mixed_bfloat16"
FLOAT8, CURRENT_FORMAT = (policy.partition("_from_")[0] for policy in (DELAYED, CURRENT))
OVERWRITE = "_overwrite_with_gradient"
LEFT_BY_CODE = "left: it multiplies by a function of its own"
LEFT_BY_ROWS = "left: the number of its rows is not a multiple of 16"
KEY, SCALE = jax.random.key(0), jmp.StaticLossScale(2.0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # LSTM cells promote their own float32 carry
        yield


class OwnProduct(nn.Dense):
    """A subclass with a product of its own."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype)
        return x @ kernel.astype(x.dtype)


class OwnKernel(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 16))
        return x @ kernel.astype(x.dtype)


class Scanned(nn.Module):
    """Layers that are scanned over, with the collection of their state."""

    axes: object

    @nn.compact
    def __call__(self, x):
        step = nn.remat(lambda dense, x, _: (jnp.tanh(dense(x)), None))
        over_layers = nn.scan(step, variable_axes=self.axes, split_rngs={"params": True}, length=3)
        return over_layers(nn.Dense(x.shape[-1], name="layers"), x, None)[0]


class Mapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        over_rows = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        return over_rows(16, name="layers")(x[None])


class Body(nn.Module):
    """A layer, and a head that may have a policy of its own."""

    head: nn.Module = nn.Dense(16)

    @nn.compact
    def __call__(self, x):
        return self.head(nn.relu(nn.Dense(16, name="body")(x)))


def sum_of_squares(tree):
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))


def inside(model, policy=DELAYED):
    return jmp.with_policy(model, policy)


GATES = {f"{of}{gate}": LEFT_BY_CODE for of in "ih" for gate in "ifgo"}
MODELS = {
    "scan": (inside(Scanned({"params": 0, OVERWRITE: 0})), {"layers": FLOAT8}),
    "jit of a layer": (inside(nn.Sequential([nn.jit(nn.Dense)(16)])), {"layers_0": FLOAT8}),
    "own product": (inside(OwnProduct(16)), {"": f"{LEFT_BY_ROWS}, or its code is no layer of Flax's"}),
    "own kernel": (inside(OwnKernel()), {"kernel": CURRENT_FORMAT}),
    "optimized cell": (
        inside(nn.RNN(nn.OptimizedLSTMCell(16))),
        {f"cell/{name}": said for name, said in GATES.items()},
    ),
    "a rule in a norm": (
        inside(nn.WeightNorm(nn.Dense(16)), jmp.PolicyMap({nn.Dense: DELAYED}, PLAIN)),
        {"layer_instance": FLOAT8},
    ),
    "two policies": (inside(Body(inside(nn.Dense(16), CURRENT))), {"body": FLOAT8, "head": CURRENT_FORMAT}),
    "a policy inside": (inside(Body(inside(nn.Dense(16))), PLAIN), {"head": FLOAT8}),
    "a policy inside of none": (Body(inside(nn.Dense(16))), {"head": FLOAT8}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No layer of the model computes in float8")
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_multiplies_in_8_bits_where_explain_says_so(name):
    model, quantization = MODELS[name]
    x = X[:, None] if "cell" in name else X
    assert {row.path: row.quantization for row in jmp.explain(model, x).rows if row.quantization} == quantization
    variables = jax.eval_shape(model.init, KEY, x)
    with_state = {path for path, said in quantization.items() if said == FLOAT8}
    state = jax.tree.leaves_with_path(variables.get(OVERWRITE, {}))
    assert {"/".join(key.key for key in path[:-1]) for path, _ in state} == with_state
    loss = lambda variables: sum_of_squares(model.apply(variables, x))
    program = jax.make_jaxpr(jmp.grad(loss, loss_scale=SCALE))(variables)
    in_8_bits = [dtype for _, dtype in products(program) if dtype.startswith("float8")]
    again = "scan" in name  # what remat computes twice
    assert len(in_8_bits) == 3 * sum(said in (FLOAT8, CURRENT_FORMAT) for said in quantization.values()) + again
    assert {aval.dtype.name for aval in program.out_avals} == {"float32"}


def test_rows_are_not_told_where_another_call_of_the_layer_computes_in_8_bits():
    class Halves(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16)(x[:8]), nn.Dense(16)(x)

    model = inside(Halves())
    jax.eval_shape(model.apply, jax.eval_shape(model.init, KEY, X), X)


@pytest.mark.parametrize("module", [Scanned({"params": 0}), Mapped()])
def test_a_transform_that_does_not_hand_the_state_on_is_named(module):
    model = inside(module)
    message = (
        "The layer 'layers' scales by an amax history ('float8/4(min_size=0)') and finds none: its variables have no "
        "collection '_overwrite_with_gradient', or it is inside of a transform that does not pass it on. "
        "For example: variables = model.init(key, x) | {'params': params}; or nn.scan(Layer, variable_axes="
        "{'params': 0, '_overwrite_with_gradient': 0}, ...); or the policy 'float8(recipe=current)_from_mixed_bfloat16'"
        ", which has no state."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(lambda: model.apply(model.init(KEY, X), X))


MODEL = inside(nn.Dense(16, name="layer"), "float8/4(min_size=0)_from_float32")
VARIABLES = jax.eval_shape(MODEL.init, KEY, X)


def test_the_example_of_the_error_about_missing_state_runs_as_written():
    names = {"model": MODEL, "key": KEY, "x": X, "params": VARIABLES["params"]}
    with pytest.raises(ValueError, match="finds none: its variables have no collection") as raised:
        jax.eval_shape(MODEL.apply, {"params": names["params"]}, X)
    example, other = re.search(r"variables = (.*?);.* the policy '(.*?)'", str(raised.value)).groups()
    found = jax.eval_shape(lambda params: eval(example, names | {"params": params}), VARIABLES["params"])
    assert found == VARIABLES
    jax.eval_shape(inside(nn.Dense(16), other).apply, {"params": names["params"]}, X)


def test_a_history_is_as_long_as_the_one_that_was_saved():
    longer = inside(nn.Dense(16), "float8/8(min_size=0)_from_float32")
    loss = lambda variables: jnp.sum(longer.apply(variables, X))
    assert jax.eval_shape(jmp.grad(loss, loss_scale=SCALE), VARIABLES) == VARIABLES


def test_what_a_model_returns_of_its_state_is_float32_and_has_no_derivative():
    def pulled_back(variables):  # as Flax's tables count the operations of a backward pass
        out, pull_back = jax.vjp(functools.partial(MODEL.apply, mutable=True), variables, X)
        return out[1], pull_back(out)[0]

    mutable, grads = jax.eval_shape(pulled_back, VARIABLES)
    lazy = jax.eval_shape(lambda: MODEL.lazy_init(KEY, jax.ShapeDtypeStruct(X.shape, X.dtype)))
    assert mutable == grads == lazy == jax.eval_shape(MODEL.init_with_output, KEY, X)[1] == VARIABLES
    assert jax.tree.map(jnp.shape, VARIABLES[OVERWRITE]) == jax.tree.map(jnp.shape, quant.float8_state(FLOAT8))


def test_tables_and_captures_of_flax_have_the_state_beside_the_parameters():
    assert "output_grad_amax_history" in MODEL.tabulate(KEY, X, console_kwargs={"width": 200})
    captured = jax.eval_shape(functools.partial(MODEL.apply, capture_intermediates=True), VARIABLES, X)[1]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(captured)} == {"float32"}


def test_parameters_that_are_differentiated_without_float8_state_are_an_error_that_names_the_layer():
    loss_fn = lambda params, rest: MODEL.apply({"params": params} | rest, X).sum()
    tx = jmp.optim.skip_nonfinite(optax.sgd(0.1))
    rest = {OVERWRITE: VARIABLES[OVERWRITE]}
    steps = [
        jmp.optim.minimize(loss_fn, tx),
        lambda params, state, rest: jmp.value_and_grad(loss_fn, loss_scale=state)(params, rest),
        lambda params, state, rest: jax.value_and_grad(loss_fn)(params, rest),
    ]
    message = r"^The weight 'kernel' of shape \(16, 16\), .* state that scales it is not"
    for step in steps:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(step, VARIABLES["params"], jax.eval_shape(tx.init, VARIABLES["params"]), rest)
