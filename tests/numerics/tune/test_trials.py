"""Bad arguments of `tune` are errors; the file of trials is reused, and never overwritten by mistake."""

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp

# To see that scopes are not ranked a second time.
from jmp_policy.numerics import _tune

HALF = "params=float32,compute=float16,output=none"
ARGS = tuple(jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32) for _ in range(2))


def net(x, weight):
    """A function that takes a moment to tune: products, of which one overflows in float16."""
    for name in "abcd":
        with jax.named_scope(name):
            gain = 1e6 if name == "c" else 1.0
            x = (x @ (weight * gain)) / gain
    return x


def count_up(start=0.0):
    noise = itertools.count()
    return lambda net, *args: start + next(noise)


PHRASES = [
    ({"policy": "mixed_float61"}, "'float61' is not half precision in policy 'mixed_float61'."),
    ({"policy": "float32"}, "Nothing to tune: the policy 'float32' computes in float32. For example: tune(loss_fn, "),
    ({"policy": "float32"}, "For a function of float64 arrays: 'params=float64,compute=float32,output=float64'."),
    ({"policy": "float64"}, "The policy 'float64' needs jax.config.update('jax_enable_x64', True): without it, JAX"),
    ({"policy": "infer"}, "Nothing to tune: the policy 'infer' has no compute dtype."),
    ({"policy": jmp.PolicyMap({"a": "float32"}, "float16")}, "tune takes one policy and finds the map, got PolicyMap("),
    ({"policy": "int8_from_float32"}, "The policy 'int8_from_float32' quantizes the weights of modules, but "),
    *[
        ({"tolerance": bad}, f"above 0 and at most 1, got {bad!r}. For example: tune(")
        for bad in (0, -1, float("nan"), float("inf"), "0.1", True, None)
    ],
    *[({"budget": bad}, f"at least 1, got {bad!r}. For example: budget=20.") for bad in (0, -3, 1.5, "many", True)],
    *[({"target": bad}, "tune takes a function or a Flax module, got ") for bad in (3, "net", nn.Dense)],
    ({"args": ARGS[0]}, "tune takes a tuple of arguments, got "),
    (
        {"target": nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "args": ARGS[:1], "policy": "int8_from_float32"},
        "The policy 'int8_from_float32' would not quantize any layer of Linear: explain(with_policy(model, policy), x)",
    ),
    ({"metric": lambda *_: "good"}, "<lambda> returns no floating-point values to compare"),
    ({"metric": lambda *_: float("nan")}, "returns nan or infinity in float32"),
    ({"target": jnp.log, "args": (-jnp.ones(3),)}, "log returns nan or infinity in float32, so nothing"),
    (
        {"metric": count_up(11.0)},
        "in float32 differ by 0.0909, more than the tolerance of 0.02, so maps cannot be compared.",
    ),
]


@pytest.mark.parametrize(("options", "message"), PHRASES)
def test_what_cannot_be_tuned_is_an_error(options, message):
    given = {"target": net, "args": ARGS, "policy": HALF, "tolerance": 0.02} | options
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        jmp.tune(given.pop("target"), given.pop("args"), given.pop("policy"), **given)


@pytest.mark.slow
def test_a_metric_that_is_nan_in_half_is_out_of_tolerance():
    def measure(net, *args):
        out = net(*args)
        return float(jnp.mean(out)) if jnp.isfinite(out).all() else float("nan")

    assert jmp.tune(net, ARGS, HALF, tolerance=0.1, metric=measure).scopes == ("c",)


class Counted:
    """A metric that counts its calls, and raises an error at one of them."""

    def __init__(self, stop=None, error=KeyboardInterrupt):
        self.calls, self._stop, self._error = 0, stop, error

    def __call__(self, net, *args):
        self.calls += 1
        if self.calls == self._stop:
            raise self._error
        return net(*args)


REFERENCE_RUNS = 2  # of float32, whose results are in no file


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trials.jsonl"


def tune(metric, **options):
    return jmp.tune(net, ARGS, HALF, **{"tolerance": 0.02, "metric": metric} | options)


def test_what_the_function_raises_says_which_map_was_tried():
    with pytest.raises(RuntimeError) as caught:
        tune(Counted(4, RuntimeError))
    assert caught.value.__notes__[0].startswith("Raised while tune tried PolicyMap({")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3, 5])
def test_interrupted_and_resumed_is_as_never_interrupted(stop, file, monkeypatch):
    whole, rest, again = Counted(), Counted(), Counted()
    wanted = tune(whole)
    with pytest.raises(KeyboardInterrupt):
        tune(Counted(stop), trials_file=file)
    if stop > REFERENCE_RUNS:  # the ranking is in the file, too
        monkeypatch.setattr(_tune, "rank_scopes", None)
    assert tune(rest, trials_file=file) == wanted
    assert rest.calls == whole.calls - max(0, stop - 1 - REFERENCE_RUNS)
    monkeypatch.setattr(_tune, "rank_scopes", None)
    assert tune(again, trials_file=file) == wanted
    assert again.calls == REFERENCE_RUNS
    lines, loose = file.read_text(encoding="utf-8"), Counted()
    assert tune(loose, tolerance=0.03, trials_file=str(file)).scopes == ("c",)  # another tolerance uses the same trials
    assert loose.calls == REFERENCE_RUNS
    assert file.read_text(encoding="utf-8") == lines


def test_a_line_that_was_cut_off_is_run_again(file):
    wanted, metric = tune(Counted(), trials_file=file), Counted()
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole[:-9])
    assert tune(metric, trials_file=file) == wanted
    assert metric.calls == REFERENCE_RUNS + 1
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["kept"] for line in lines[1:]] == [list(trial.kept) for trial in wanted.trials]
    file.write_text(whole[:40])  # in its first line: the file is begun again
    assert tune(Counted(), trials_file=file) == wanted
    assert file.read_text(encoding="utf-8") == whole


OTHERS = [
    ({"args": (ARGS[0] + 1, ARGS[1])}, "trials of another run: its arguments is '"),
    ({"policy": HALF.replace("float16", "bfloat16")}, "another run: its policy is 'params=float32,compute=float16"),
    ({"seed": 1}, "another run: its seed is 0, expected 1. It was not changed. Pass another name. For"),
    ({"loss_scale": 8.0}, "another run: its loss scale is None, expected 8.0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), OTHERS)
def test_trials_of_something_else_are_refused_and_left(change, message, file):
    tune(None, trials_file=file)
    before = file.read_text(encoding="utf-8")
    options = {"args": ARGS, "policy": HALF, "tolerance": 0.02, "trials_file": file, **change}
    with pytest.raises(ValueError, match=message):
        jmp.tune(net, options.pop("args"), options.pop("policy"), **options)
    assert file.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("text", ["a diary\n", '{"ranking": 3}\n', "[1]\n", '{"a": 1}\n{"b": 2}\n', "no end"])
def test_a_file_of_something_else_is_refused_and_left(text, file):
    file.write_text(text)
    with pytest.raises(
        ValueError, match=r"trials\.jsonl is not a file of trials, or is damaged, so it was not changed"
    ):
        tune(None, trials_file=file)
    assert file.read_text(encoding="utf-8") == text


def edit(gain):
    def net(x, weight):
        with jax.named_scope("a"):
            return jnp.tanh(x * gain) @ weight

    return net


def score(candidate, *args):
    return candidate(*args)


def score_twice(candidate, *args):
    return 2 * candidate(*args)


@pytest.mark.slow
def test_trials_of_an_edited_function_or_metric_are_refused(file):
    """They answered for it: a map that overflowed was reported with an error of 0."""
    options = {"tolerance": 0.05, "trials_file": file}
    jmp.tune(edit(1.0), ARGS, HALF, **options, metric=score)
    before = file.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"trials of another run: its traced program is '\w+', expected '\w+'\."):
        jmp.tune(edit(2.0), ARGS, HALF, **options, metric=score)
    score_twice.__qualname__ = score.__qualname__
    with pytest.raises(ValueError, match=r"trials of another run: its code of the metric is '\w+', expected '\w+'\."):
        jmp.tune(edit(1.0), ARGS, HALF, **options, metric=score_twice)
    assert file.read_text(encoding="utf-8") == before
    jmp.tune(edit(1.0), ARGS, HALF, **options, metric=score)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_module", [False, True], ids=["function", "module"])
def test_a_model_that_has_a_policy_is_warned_of(is_module, half):
    model = jmp.with_policy(nn.Dense(2), f"params=float32,compute={half},output=float32")
    variables, x = model.init(jax.random.key(0), jnp.ones((2, 4))), jnp.ones((2, 4))
    target = model if is_module else (lambda variables, x: model.apply(variables, x).sum())
    with pytest.warns(UserWarning, match=rf"multiplies in {half} without the policy of tune.*Pass a model without"):
        jmp.tune(target, (variables, x), "mixed_float16", tolerance=0.1)  # any other warning is an error
