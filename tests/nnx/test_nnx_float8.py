"""Float8 policies in nnx alone: its own layers, copies, other policies, modules assigned later, and bridges."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import products

import jmp_policy as jmp

DELAYED, FORMAT = "float8/4(min_size=0)_from_mixed_bfloat16", "float8/4(min_size=0)"
SCALE = jmp.StaticLossScale(8.0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)
AMAX = "_overwrite_with_gradient/{}_amax_history"
ANY = nnx.Any(nnx.Param, jmp.nnx.Float8State)


def waves(key, shape, dtype):
    """Numbers of both signs: to draw them would take a compilation."""
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape) / 3, dtype)


def linear(inputs=16, outputs=16):
    return nnx.Linear(inputs, outputs, kernel_init=waves, rngs=nnx.Rngs(0))


class Net(nnx.Module):
    def __init__(self):
        self.hidden, self.head = linear(16, 32), linear(32, 16)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


def mean_square(model, x=X):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def state_of(node):
    """The float8 state of a model, or of gradients, by path."""
    state = nnx.to_flat_state(nnx.state(node, jmp.nnx.Float8State))
    return {"/".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in state}


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(ours[name], expected[name], err_msg=name, strict=True)


def policied(module=None):
    return jmp.with_policy(linear() if module is None else module, DELAYED)


def fresh():
    return policied(Net())


gradients = nnx.jit(jmp.nnx.grad(mean_square, loss_scale=SCALE))


@pytest.fixture(scope="module")
def parts():
    """A model that has seen a batch, as `nnx.split` gives it."""
    model = fresh()
    jmp.nnx.Optimizer(model, optax.set_to_zero(), wrt=nnx.Param).update(model, gradients(model))
    return nnx.split(model)


@pytest.fixture
def model(parts):
    return nnx.merge(*parts, copy=True)


class WithoutBias(nnx.Linear):
    """A subclass that multiplies itself, by the function that its base has."""

    def __call__(self, x):
        x, kernel = self.promote_dtype((x, self.kernel[...]), dtype=self.dtype)
        return self.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


class Contained(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 32, rngs=rngs)])
        self.heads = nnx.Dict(one=nnx.Linear(32, 16, rngs=rngs))

    def __call__(self, x):
        return self.heads.one(self.layers[0](x))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 16, qkv_features=32, rngs=rngs)
        self.attention.init_cache((16, 4, 16), jnp.bfloat16)

    def __call__(self, x):
        return self.attention(x[:, None], decode=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (Contained, 2),
        (Decoder, 4),
        (lambda rngs: WithoutBias(16, 32, rngs=rngs), 1),
        (lambda rngs: nnx.LoRALinear(16, 32, lora_rank=16, rngs=rngs), 1),
    ],
    ids=["List and Dict", "cache", "subclass that multiplies", "LoRALinear"],
)
def test_a_layer_multiplies_in_8_bits_and_explain_says_so(make, count):
    model = nnx.eval_shape(lambda: policied(make(nnx.Rngs(0))))
    graphdef, state = nnx.split(model)
    with jax.numpy_dtype_promotion("standard"):
        said = [row.quantization for row in jmp.explain(model, X).rows]
        program = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state, copy=True)(X))(state)
    assert [text.startswith(FORMAT) for text in said].count(True) == count
    assert [dtype.startswith("float8") for _, dtype in products(program)].count(True) == count
    assert len(state_of(state)) == 6 * count


def updated(model):
    new = fresh()
    nnx.update(new, nnx.state(model))
    return new


COPIES = {
    "split by type and merge": lambda model: nnx.merge(*nnx.split(model, nnx.Param, jmp.nnx.Float8State, ...)),
    "clone": nnx.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "update": updated,
    "policy again": policied,
    "jit": nnx.jit(lambda model: model),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_the_state_and_goes_on_with_it(name, model):
    copied, before = COPIES[name](model), state_of(model)
    assert_same(state_of(copied), before)
    assert nnx.graphdef(copied) == nnx.graphdef(model)
    expected = state_of(gradients(model))
    assert_same(state_of(gradients(copied)), expected)
    assert_same(state_of(model), before)  # gradients change nothing
    assert (expected[f"head/{AMAX.format('input')}"] > 0).sum() == 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float8(recipe=current,min_size=0)_from_mixed_bfloat16"])
def test_a_policy_without_state_takes_it_away_and_back_again_it_starts_anew(policy, model):
    without = jmp.with_policy(model, policy)
    assert state_of(without) == state_of(jmp.quant.quantize(model, "int8(min_size=0)_from_float32")) == {}
    assert nnx.graphdef(without) == nnx.graphdef(jmp.with_policy(Net(), policy))
    again = policied(without)
    assert nnx.graphdef(again) == nnx.graphdef(model)
    assert_same(state_of(again), state_of(fresh()))
    assert state_of(model)[f"head/{AMAX.format('input')}"][0] > 0


@pytest.mark.slow
def test_another_float8_policy_keeps_the_state_unless_its_histories_have_another_length(model):
    kept = jmp.with_policy(model, "float8/4(min_size=0,margin=1)_from_mixed_bfloat16")
    assert_same(state_of(kept), state_of(model))
    longer = jmp.with_policy(model, "float8/8(min_size=0)_from_mixed_bfloat16")
    assert_same(state_of(longer), state_of(jmp.with_policy(Net(), "float8/8(min_size=0)_from_mixed_bfloat16")))
    assert state_of(longer)[f"head/{AMAX.format('input')}"].shape == (8,)


@pytest.mark.slow
def test_a_layer_that_is_assigned_later_begins_with_the_step_after(model):
    model.head = linear(32, 16)
    optimizer = jmp.nnx.Optimizer(model, jmp.optim.loss_scaled(optax.set_to_zero(), SCALE), wrt=nnx.Param)
    optimizer.update(model, gradients(model))
    states, new = state_of(model), state_of(fresh())
    assert_same({name: states[name] for name in states if "head" in name}, {n: new[n] for n in new if "head" in n})
    assert (states[f"hidden/{AMAX.format('input')}"] > 0).sum() == 2
    optimizer.update(model, gradients(model))
    assert (state_of(model)[f"head/{AMAX.format('input')}"] > 0).sum() == 1


class Product(nnx.Module):
    """A layer by hand, whose state has a name of its own."""

    def __init__(self, variable):
        self.kernel = nnx.Param(jnp.eye(16))
        self.memory = nnx.data(variable(jmp.quant.float8_state(FORMAT)))

    def __call__(self, x):
        state = nnx.as_pure(nnx.state(self))["memory"]
        return jmp.quant.dot_general(x, self.kernel[...], (((1,), (0,)), ((), ())), quantization=FORMAT, state=state)


EACH = lambda kind: lambda state: {name: kind(leaf) for name, leaf in state.items()}


@pytest.mark.slow
def test_a_layer_by_hand_whose_state_has_its_type_learns_its_scales():
    model = Product(EACH(jmp.nnx.Float8State))
    of_scale = lambda scale: state_of(nnx.jit(jmp.nnx.grad(mean_square, loss_scale=scale))(model))
    scaled, true = map(of_scale, (SCALE, jmp.NoOpLossScale()))
    assert_same(scaled, true)
    assert scaled["memory/output_grad_amax_history"][0] > 0


@pytest.mark.parametrize(
    ("argument", "where", "argnums"),
    [
        (lambda: Product(EACH(nnx.Param)), "memory/input_amax_history", 0),
        (lambda: Product(nnx.Param), "memory/input_amax_history", nnx.DiffState(0, nnx.Param)),
        (lambda: [linear(), jmp.quant.float8_state(FORMAT)], "1/input_amax_history", 0),
        (lambda: {"_overwrite_with_gradient": {"scale": jnp.ones(1)}}, "_overwrite_with_gradient/scale", 0),
    ],
    ids=["each a parameter", "one parameter", "an array", "an array under the name of state"],
)
def test_state_of_another_type_is_an_error_that_says_so(argument, where, argnums):
    error = f"^'{where}' is float8 state by its name, .* has a Float8State. For example: self.state = nnx.data"
    with pytest.raises(ValueError, match=error):
        jmp.nnx.grad(lambda _: 0.0, argnums, loss_scale=SCALE)(argument())


def test_state_of_another_type_may_stand_where_it_is_not_differentiated():
    differentiate = jmp.nnx.grad(lambda model: model.kernel[...].sum(), loss_scale=SCALE)
    assert list(nnx.eval_shape(differentiate, Product(EACH(nnx.BatchStat)))) == ["kernel"]


def of_state(model):
    """Gradients by the state of a model, which is merged inside."""
    graphdef, state = nnx.split(model)
    return jmp.grad(lambda state: mean_square(nnx.merge(graphdef, state)), loss_scale=SCALE)(state)


WAYS = {
    "filter": jmp.nnx.grad(mean_square, nnx.DiffState(0, ANY), loss_scale=SCALE),
    "graph=False": jmp.nnx.grad(mean_square, graph=False, loss_scale=SCALE),
    "module as a tree": jmp.grad(mean_square, loss_scale=SCALE),  # was refused for its state
    "state": of_state,
}


@pytest.mark.parametrize(
    "name", [name if name == "module as a tree" else pytest.param(name, marks=pytest.mark.slow) for name in WAYS]
)
def test_all_ways_to_differentiate_are_one_program(name):
    graphdef, state = nnx.split(nnx.eval_shape(policied))

    def program(differentiate):
        def of_state(state):
            grads = differentiate(nnx.merge(graphdef, state, copy=True))
            return [nnx.to_pure_dict(nnx.state(grads, kind)) for kind in (nnx.Param, jmp.nnx.Float8State)]

        return jax.jit(of_state).lower(state).as_text()

    assert program(WAYS[name]) == program(jmp.nnx.grad(mean_square, loss_scale=SCALE))


@pytest.mark.parametrize(
    ("differentiate", "error"),
    [
        (lambda: nnx.grad(mean_square), "float8 state that scales it is not"),
        (lambda: jmp.nnx.grad(mean_square, nnx.DiffState(0, nnx.Param), loss_scale=SCALE), "that scales it is not"),
        (
            lambda: nnx.grad(mean_square, argnums=nnx.DiffState(0, ANY)),
            "differentiated by JAX or Flax alone: several uses of it would be added",
        ),
    ],
    ids=["gradients of Flax", "a filter without the state", "gradients of Flax by the state too"],
)
def test_float8_with_half_of_a_step_in_nnx_is_an_error(differentiate, error):
    with pytest.raises(ValueError, match=rf"^The weight of the Linear of shape .*{error}.*jmp\.nnx\.value_and_grad\("):
        nnx.eval_shape(differentiate(), policied())


def test_an_optimizer_of_flax_as_loss_scale_of_a_float8_model_is_an_error():
    model, tx = policied(), jmp.optim.skip_nonfinite(optax.sgd(0.1))
    grads = lambda model, optimizer: jmp.nnx.grad(mean_square, loss_scale=optimizer)(model)
    with pytest.raises(ValueError, match=r"/input_amax_history', which a flax\.nnx\.Optimizer does not update"):
        nnx.eval_shape(grads, model, nnx.Optimizer(model, tx, wrt=nnx.Param))
    before, kernel, optimizer = state_of(model), model.kernel[...], nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))
    assert_same(state_of(model), before)
    assert (model.kernel[...] != kernel).any()
    # The update of `skip_nonfinite` overwrites state that it sees.
    assert state_of(nnx.eval_shape(grads, model, nnx.Optimizer(model, tx, wrt=ANY)))


@pytest.mark.slow
def test_a_layer_used_twice_outside_of_jit_is_an_error_that_says_what_to_do():
    model = policied()
    with pytest.raises(ValueError, match=r"used twice outside of jax\.jit"):
        jmp.nnx.grad(lambda model: mean_square(lambda x: model(x) + model(2 * x)), loss_scale=SCALE)(model)
    assert_same(state_of(model), state_of(policied()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx.LinearGeneral(16, 16, batch_axis={0: 2}, rngs=nnx.Rngs(0)),
        lambda: nnx.Einsum("tba,tac->tbc", (2, 16, 16), (2, 16), rngs=nnx.Rngs(0)),
    ],
)
def test_a_batch_inside_of_a_layer_has_one_state_and_a_stack_of_such_layers_one_each(make):
    """It got the state of a stack, and raised a TypeError about `full` when called."""
    stack = lambda: nnx.vmap(lambda _: make(), in_axes=0)(jnp.arange(3))
    scales = [
        nnx.state(nnx.eval_shape(lambda: policied(model())))["_overwrite_with_gradient"]["input_scale"]
        for model in (make, stack)
    ]
    assert [scale.shape for scale in scales] == [(1,), (3, 1)]
