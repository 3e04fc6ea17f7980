"""`tune_bits`, with a limit of bits per weight: the prediction, the choice, and what is stored under the map."""

import itertools
import json
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp
from jmp_policy import quant

# The whole front of a table of costs, of which a result shows a few points only.
from jmp_policy.contrib import _tune_bits

INT4, INT8 = "int4/8(min_size=0)", "int8(activations=false,min_size=0)"
FORMATS = [INT8, INT4, "bfloat16"]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for index, size in enumerate((16, 4)):
            x = nn.Dense(size, name=f"layer_{index}")(nn.tanh(x))
        return x


def draw(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def loss_fn(model, variables, x, labels):
    return jnp.mean(jnp.square(model.apply(variables, x) - labels))


def nnx_loss(model, x, labels):
    return jnp.mean(jnp.square(model(x) - labels))


X = draw(0, (8, 8))
VARIABLES = {
    "params": {
        "layer_0": {"kernel": draw(2, (8, 16)), "bias": jnp.zeros(16)},
        "layer_1": {"kernel": draw(3, (16, 4)), "bias": jnp.zeros(4)},
    }
}
# Near a minimum of the loss, as after training.
LABELS = jnp.tanh(jnp.tanh(X) @ VARIABLES["params"]["layer_0"]["kernel"]) @ VARIABLES["params"]["layer_1"]["kernel"]
LABELS += 0.2 * draw(1, (8, 4))
ARGS = (VARIABLES, X, LABELS)


def tune(model, args, metric=loss_fn, policy="float32", **options):
    options = {"metric": metric, "formats": FORMATS, "effective_bits": 9.5, **options}
    return jmp.contrib.tune_bits(model, args, policy, **options)


def list_stored(tree):
    is_leaf = lambda node: isinstance(node, quant.QuantizedArray)
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_leaf) if is_leaf(leaf)]


@pytest.fixture(scope="module")
def tuning():
    return tune(Net(), ARGS)


def test_the_stored_weights_take_the_bits_that_the_result_says(tuning):
    stored = list_stored(quant.quantize(VARIABLES, tuning.policy_map))
    assert {str(weight.format) for weight in stored} == {*tuning.formats.values()} == {INT4, INT8}
    taken = 8 * sum(weight.nbytes for weight in stored) / sum(weight.size for weight in stored)
    assert tuning.effective_bits == pytest.approx(taken, rel=1e-12)
    assert taken <= 9.5


@pytest.mark.slow
def test_the_error_is_the_increase_of_the_loss_with_stored_weights(tuning):
    served = jmp.with_policy(Net(), tuning.policy_map)
    quantized = quant.quantize(VARIABLES, tuning.policy_map)
    before, after = float(loss_fn(Net(), *ARGS)), float(loss_fn(served, quantized, X, LABELS))
    assert tuning.error == pytest.approx(after / before - 1, rel=1e-4)
    assert tuning.trials[0].kept
    kept = tuple(f"{path}={name}" for path, name in tuning.formats.items() if name != INT4)
    (error,) = [trial.error for trial in tuning.trials if trial.kept == kept]
    assert error == pytest.approx(tuning.error, rel=1e-4)


def test_the_result_prints_as_tables_and_is_json(tuning):
    text = str(tuning)
    assert re.search(r"layer +format +suspicion\n", text)
    assert re.search(r"bits +predicted +measured\n", text)
    assert text.endswith(tuning.to_code())
    low_error = tuning.curve[0].error
    assert low_error == tuning.low_error is not None
    assert f"and with all in {INT4} by {100 * low_error:+.2g} %. {len(tuning.trials)} trials." in " ".join(text.split())
    assert repr(tuning).startswith(f"<BitTuning: {tuning.effective_bits:.4g} bits per weight, loss ")
    plain = json.loads(json.dumps(tuning.to_dict(), allow_nan=False))
    assert plain["curve"][0]["formats"] == {"layer_0": INT4, "layer_1": INT4}
    assert plain["tolerance"] is None
    bits = [row.bits for row in tuning.curve]
    assert bits == sorted(bits)
    assert bits[-1] == 16.0
    assert [row.predicted for row in tuning.curve] == sorted((row.predicted for row in tuning.curve), reverse=True)


@pytest.mark.slow
def test_the_plot_has_predicted_and_measured_losses(tuning):
    axes = tuning.plot().axes[0]
    assert [line.get_label() for line in axes.lines] == ["predicted", "measured"]
    assert list(axes.lines[1].get_xdata()) == [row.bits for row in tuning.curve]
    assert axes.get_xlabel() == "bits per weight, with scales"


def test_predictions_are_in_proportion_to_the_mean_square_of_gradient_times_error(tuning):
    """Over examples, and summed over layers. The unit is fitted to the trials."""
    gradient = jax.grad(lambda variables, x, labels: loss_fn(Net(), variables, x[None], labels[None]))
    grads = jax.jit(jax.vmap(gradient, (None, 0, 0)))(*ARGS)["params"]

    def predict(path, format):
        kernel = VARIABLES["params"][path]["kernel"]
        is_int = format.startswith("int")
        rounded = quant.quantize_array(kernel, format).dequantize() if is_int else kernel.astype(format)
        error = np.asarray(rounded, np.float64) - np.asarray(kernel, np.float64)
        return np.mean(np.sum(np.asarray(grads[path]["kernel"], np.float64) * error, axis=(1, 2)) ** 2)

    by_hand = np.array([sum(predict(*layer) for layer in row.formats.items()) for row in tuning.curve])
    predicted = np.array([row.predicted for row in tuning.curve])
    np.testing.assert_allclose(predicted / predicted[0], by_hand / by_hand[0], rtol=1e-3)


@pytest.mark.parametrize("seed", range(2))
def test_the_front_is_that_of_all_choices(seed):
    rng = random.Random(seed)
    bits = [[rng.randint(1, 9) * size for _ in range(3)] for size in (1, 4, 4, 16, 5)]
    predicted = [[rng.random() for _ in range(3)] for _ in bits]
    front = _tune_bits.find_front(bits, predicted)
    total = lambda table, formats: sum(row[index] for row, index in zip(table, formats, strict=True))
    every = list(itertools.product(range(3), repeat=5))
    for choice in front:
        assert choice.bits == total(bits, choice.formats)
        assert choice.predicted == pytest.approx(total(predicted, choice.formats), rel=1e-12)
    for limit in range(front[0].bits, front[-1].bits + 9):
        best = min(total(predicted, formats) for formats in every if total(bits, formats) <= limit)
        assert [choice for choice in front if choice.bits <= limit][-1].predicted == pytest.approx(best, rel=1e-12)
    assert front[0].bits == min(total(bits, formats) for formats in every)


def test_a_thinned_front_loses_little(monkeypatch):
    rng = random.Random(0)
    bits = [[n * rng.randint(900, 1100) for n in (4, 8, 16)] for _ in range(40)]
    predicted = [[rng.random() * n for n in (16, 4, 0.1)] for _ in bits]
    whole = _tune_bits.find_front(bits, predicted)
    monkeypatch.setattr(_tune_bits, "_MOST_CHOICES", 200)
    thin = _tune_bits.find_front(bits, predicted)
    assert len(thin) < len(whole) / 2
    for limit in range(whole[0].bits + 5000, whole[-1].bits, 5000):
        exact, near = (next(c for c in reversed(front) if c.bits <= limit).predicted for front in (whole, thin))
        assert exact <= near <= 1.1 * exact  # 1.07 at most


class TwoLinears(nnx.Module):
    def __init__(self, is_tied=False):
        self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        if is_tied:
            self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.slow
def test_an_nnx_model_is_stored_within_the_limit_with_a_dtype_among_the_formats():
    model, args = TwoLinears(), (X, draw(5, (8, 8)))
    found = tune(model, args, nnx_loss, formats=[INT4, "bfloat16"], effective_bits=14.0)
    assert sorted(found.formats.values()) == ["bfloat16", INT4]
    served = quant.quantize(jmp.nnx.cast_params(model, found.policy_map), found.policy_map)
    weights = served.first.kernel[...], served.second.kernel[...]
    assert 8 * sum(weight.nbytes for weight in weights) / 128 == found.effective_bits <= 14.0
    assert float(nnx_loss(served, *args)) / float(nnx_loss(model, *args)) - 1 == pytest.approx(found.error, abs=1e-5)


@pytest.mark.slow
def test_a_tied_weight_is_one_layer():
    found = tune(TwoLinears(is_tied=True), (X, draw(5, (8, 8))), nnx_loss, effective_bits=13.0)
    assert {*found.formats} == {"first", "second"}
    assert len({*found.formats.values()}) == 1
    assert found.effective_bits == 8 * quant.quantize_array(jnp.ones((8, 8)), INT8).nbytes / 64


class Tokens(nnx.Module):
    def __init__(self):
        self.table = nnx.Embed(8, 16, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(16, 8, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.table(x))


@pytest.mark.slow
def test_a_table_is_in_int8_under_int4_and_no_trial_repeats_another():
    model, args = Tokens(), (jnp.arange(8), draw(5, (8, 8)))
    found = tune(model, args, nnx_loss, formats=[INT4, INT8], effective_bits=20.0)
    assert found.formats["table"] == "int8"
    assert found.formats["head"] in (INT4, INT8)
    assert {trial.kept for trial in found.trials} == {(), (f"head={INT8}",)}
    assert len(found.trials) == 2
    assert not np.isnan(found.low_error)
    assert {row.formats["table"] for row in found.curve} == {"int8"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effective_bits": None}, "effective_bits must be a number above 0, got None. For example: tune_bits(model, "),
        ({"effective_bits": True}, "effective_bits must be a number above 0, got True."),
        ({"formats": []}, "effective_bits needs a list of formats to choose from, got []."),
        ({"formats": ["bfloat16"]}, "No format quantizes, got ['bfloat16']."),
        ({"formats": ["int8", "float8"]}, "The format 'float8' in formats stores no weights."),
        ({"formats": ["int5"]}, "Unknown quantization 'int5' in formats. Did you mean 'int"),
        ({"policy": "int8_from_float32"}, "The policy 'int8_from_float32' has a quantization, and formats replace it."),
        ({"policy": jmp.PolicyMap({}, "float32")}, "tune_bits takes one policy and finds the map, got PolicyMap"),
        ({"model": Net}, "tune_bits takes a Flax module, got "),
        ({"args": X}, "tune_bits takes a tuple of arguments, got "),
        ({"effective_bits": 4.0}, "The weights of Net take at least 9 bits, scales included, got effective_bits=4."),
        ({"formats": ["int8"]}, "Nothing to quantize under the policy 'int8_from_float32': 'layer_0/kernel': 128"),
        ({"metric": lambda *args: jnp.nan * loss_fn(*args)}, "The loss of Net is nan before quantization."),
        ({"metric": lambda *args: 0 * loss_fn(*args)}, "The loss of Net is 0 before quantization."),
        ({"metric": lambda *args: 1 + jnp.sqrt(0 * loss_fn(*args))},
         "The gradients of the loss of Net are not finite. Find the origin with numerics.first_nonfinite."),
        ({"args": ARGS[:2], "metric": None},
         "effective_bits needs a scalar loss of Net, got float32[8, 4]. For example: tune_bits(model, (variables, x, "),
        ({"model": TwoLinears(), "args": ARGS[1:2], "metric": None},
         "got float32[8, 8]. For example: tune_bits(model, (x, labels), 'mixed_bfloat16', metric=loss_fn, "),
        ({"args": (VARIABLES, X, jnp.float32(2.0)),
          "metric": lambda model, variables, x, scale: scale * jnp.mean(model.apply(variables, x))},
         "the inputs of Net have no leading axis of the same length, got [(), (8,)]."),
        ({"model": nnx_loss, "args": (X,)}, "effective_bits is for the weights of a module, and nnx_loss is a func"),
    ],
)  # fmt: skip
def test_what_cannot_be_tuned_is_an_error(options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        tune(**{"model": Net(), "args": ARGS, **options})


def test_a_tuned_function_of_a_module_is_an_error_that_names_the_module():
    with pytest.raises(ValueError, match=r"Tune the module itself\. For example: tune\(model, \(x,\), 'int8_from"):
        jmp.tune(nnx_loss, (TwoLinears(), *ARGS[1:]), "int8_from_float32", tolerance=0.1)
