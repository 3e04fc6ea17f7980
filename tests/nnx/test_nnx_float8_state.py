"""Where the state of float8 layers in nnx goes: copies, checkpoints, other policies, and modules assigned later."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from float8_nnx import DELAYED, SCALE, Net, X, assert_same, gradients, linear, mean_square, state_of, trained

import jmp_policy as jmp


@pytest.fixture(scope="module")
def parts():
    """A model that has seen a batch, as `nnx.split` gives it."""
    return nnx.split(trained(jmp.with_policy(Net(), DELAYED)))


@pytest.fixture
def model(parts):
    return nnx.merge(*parts, copy=True)


def fresh():
    return jmp.with_policy(Net(), DELAYED)


def updated(model):
    new = fresh()
    nnx.update(new, nnx.state(model))
    return new


def from_numbers(model):
    new = fresh()
    state = nnx.state(new)
    nnx.replace_by_pure_dict(state, nnx.to_pure_dict(nnx.state(model)))
    nnx.update(new, state)
    return new


COPIES = {
    "split and merge": lambda model: nnx.merge(*nnx.split(model)),
    "split by type and merge": lambda model: nnx.merge(*nnx.split(model, nnx.Param, jmp.nnx.Float8State, ...)),
    "clone": nnx.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "update": updated,
    "numbers": from_numbers,
    "policy again": lambda model: jmp.with_policy(model, DELAYED),
    "jit": nnx.jit(lambda model: model),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_the_state_and_goes_on_with_it(name, model):
    copied = COPIES[name](model)
    assert_same(state_of(copied), state_of(model))
    assert nnx.graphdef(copied) == nnx.graphdef(model)
    before, expected = state_of(model), state_of(gradients(model))
    assert_same(state_of(gradients(copied)), expected)
    assert_same(state_of(model), before)  # gradients change nothing
    assert (expected["head/_overwrite_with_gradient/input_amax_history"] > 0).sum() == 2


@pytest.mark.slow
def test_checkpoints_restore_the_state_into_models_of_arrays_and_of_shapes(model, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(model))
        checkpointer.save(tmp_path / "numbers", nnx.to_pure_dict(nnx.state(model)))
    with ocp.StandardCheckpointer() as checkpointer:
        for target in (fresh(), nnx.eval_shape(fresh)):
            graphdef, state = nnx.split(target)
            restored = nnx.merge(graphdef, checkpointer.restore(tmp_path / "state", state))
            assert_same(state_of(restored), state_of(model))
            assert nnx.graphdef(restored) == nnx.graphdef(model)
        numbers = checkpointer.restore(tmp_path / "numbers", nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, numbers)
    assert_same(state_of(nnx.merge(graphdef, state)), state_of(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", "float8(recipe=current,min_size=0)_from_mixed_bfloat16", "int8_from_mixed_bfloat16"]
)
def test_a_policy_without_state_takes_it_away_and_back_again_it_starts_anew(policy, model):
    without = jmp.with_policy(model, policy)
    assert state_of(without) == {}
    assert nnx.graphdef(without) == nnx.graphdef(jmp.with_policy(Net(), policy))
    again = jmp.with_policy(without, DELAYED)
    assert nnx.graphdef(again) == nnx.graphdef(model)
    assert_same(state_of(again), state_of(fresh()))
    assert state_of(model)["head/_overwrite_with_gradient/input_amax_history"][0] > 0


@pytest.mark.slow
def test_another_float8_policy_keeps_the_state_unless_its_histories_have_another_length(model):
    kept = jmp.with_policy(model, "float8/4(min_size=0,margin=1)_from_mixed_bfloat16")
    assert_same(state_of(kept), state_of(model))
    longer = jmp.with_policy(model, "float8/8(min_size=0)_from_mixed_bfloat16")
    assert_same(state_of(longer), state_of(jmp.with_policy(Net(), "float8/8(min_size=0)_from_mixed_bfloat16")))
    assert state_of(longer)["head/_overwrite_with_gradient/input_amax_history"].shape == (8,)


@pytest.mark.slow
def test_a_quantized_copy_has_no_state(model):
    assert state_of(jmp.quant.quantize(model, "int8(min_size=0)_from_mixed_bfloat16")) == {}


@pytest.mark.slow
def test_a_layer_that_is_assigned_later_begins_with_the_step_after(model):
    model.head = linear(32, 16)
    optimizer = jmp.nnx.Optimizer(model, jmp.optim.loss_scaled(optax.set_to_zero(), SCALE), wrt=nnx.Param)
    optimizer.update(model, gradients(model))
    states = state_of(model)
    new = {name: leaf for name, leaf in states.items() if name.startswith("head")}
    assert_same(new, {name: leaf for name, leaf in state_of(fresh()).items() if name.startswith("head")})
    assert (states["hidden/_overwrite_with_gradient/input_amax_history"] > 0).sum() == 2
    optimizer.update(model, gradients(model))
    assert (state_of(model)["head/_overwrite_with_gradient/input_amax_history"] > 0).sum() == 1


class Tied(nnx.Module):
    """One module twice, and a second module with the kernel of the first."""

    def __init__(self):
        self.first = self.again = linear()
        self.other = linear()
        self.other.kernel = self.first.kernel

    def __call__(self, x):
        return self.other(nnx.relu(self.again(nnx.relu(self.first(x)) * 4)))


@pytest.mark.exhaustive
def test_tied_layers_have_one_state_for_each_module():
    model = jmp.with_policy(Tied(), DELAYED)
    assert model.first is model.again
    assert model.first.kernel is model.other.kernel
    states = state_of(gradients(model))
    assert {name.split("/")[0] for name in states} == {"again", "other"}  # a module has the path that comes first
    second = float(jnp.max(jmp.with_policy(linear(), DELAYED)(X)) * 4)
    assert second > float(jnp.max(jnp.abs(X)))
    assert states["again/_overwrite_with_gradient/input_amax_history"][0] == second


@pytest.mark.slow
def test_a_decorated_class_and_its_subclasses_make_models_with_state(model):
    decorated = jmp.with_policy(Net, DELAYED)

    class Deeper(decorated):
        def __init__(self):
            super().__init__()
            self.last = linear()

        def __call__(self, x):
            return self.last(super().__call__(x))

    assert_same(state_of(decorated()), state_of(fresh()))
    deeper = state_of(gradients(Deeper()))
    assert {name.split("/")[0] for name in deeper} == {"hidden", "head", "last"}
    first = state_of(gradients(fresh()))
    of_head = "head/_overwrite_with_gradient/input_amax_history"
    np.testing.assert_array_equal(deeper[of_head], first[of_head])


@pytest.mark.slow
def test_models_in_a_dictionary_learn_in_turns():
    """As a generator and a discriminator do: who is not differentiated keeps its state."""
    models = jmp.with_policy(nnx.Dict(generator=linear(), critic=linear()), DELAYED)
    optimizers = {name: jmp.nnx.Optimizer(models[name], optax.set_to_zero(), wrt=nnx.Param) for name in models}

    @nnx.jit(static_argnums=1)
    def step(models, name, optimizer):
        def loss_fn(learner):
            other = {**models, name: learner}
            return jnp.mean(other["critic"](other["generator"](X)).astype(jnp.float32) ** 2)

        optimizer.update(models[name], jmp.nnx.grad(loss_fn, loss_scale=SCALE)(models[name]))

    for name, other in (("generator", "critic"), ("critic", "generator")):
        before = state_of(models[other])
        step(models, name, optimizers[name])
        assert_same(state_of(models[other]), before)
        assert (state_of(models[name])["_overwrite_with_gradient/output_grad_amax_history"] > 0).sum() == 1


class Product(nnx.Module):
    """A layer by hand, whose state has a name of its own."""

    def __init__(self, variable):
        self.kernel = nnx.Param(jnp.eye(16))
        self.memory = nnx.data(variable(jmp.quant.float8_state(FORMAT)))

    def __call__(self, x):
        state = nnx.as_pure(nnx.state(self))["memory"]
        return jmp.quant.dot_general(x, self.kernel[...], (((1,), (0,)), ((), ())), quantization=FORMAT, state=state)


FORMAT = "float8/4(min_size=0)"
EACH = lambda kind: lambda state: {name: kind(leaf) for name, leaf in state.items()}


@pytest.mark.slow
def test_a_layer_by_hand_whose_state_has_its_type_learns_its_scales():
    model = Product(EACH(jmp.nnx.Float8State))
    of_scale = lambda scale: state_of(nnx.jit(jmp.nnx.grad(mean_square, loss_scale=scale))(model))
    scaled, true = map(of_scale, (SCALE, jmp.NoOpLossScale()))
    assert_same(scaled, true)
    assert scaled["memory/output_grad_amax_history"][0] > 0


@pytest.mark.parametrize(
    ("argument", "where"),
    [
        (lambda: Product(EACH(nnx.Param)), "memory/input_amax_history"),
        (lambda: Product(nnx.Param), "memory/input_amax_history"),
        (lambda: [linear(), jmp.quant.float8_state(FORMAT)], "1/input_amax_history"),
        (lambda: {"_overwrite_with_gradient": {"scale": jnp.ones(1)}}, "_overwrite_with_gradient/scale"),
    ],
    ids=["each a parameter", "one parameter", "an array", "an array under the name of state"],
)
@pytest.mark.parametrize("argnums", [0, nnx.DiffState(0, nnx.Param)], ids=["argument", "filter"])
def test_state_of_another_type_is_an_error_that_says_so(argument, where, argnums):
    error = f"^'{where}' is float8 state by its name, .* has a Float8State. For example: self.state = nnx.data"
    with pytest.raises(ValueError, match=error):
        jmp.nnx.grad(lambda _: 0.0, argnums, loss_scale=SCALE)(argument())


@pytest.mark.slow
def test_state_of_another_type_may_stand_where_it_is_not_differentiated():
    grads = jmp.nnx.grad(lambda model: model.kernel[...].sum(), loss_scale=SCALE)(Product(EACH(nnx.BatchStat)))
    assert list(grads) == ["kernel"]
