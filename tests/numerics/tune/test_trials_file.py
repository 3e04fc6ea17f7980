"""The file of trials: what was tried is not tried again, and nothing is overwritten by mistake."""

import json

import jax
import jax.numpy as jnp
import pytest
from tuned_net import ARGS, HALF, net

import jmp_policy as jmp
from jmp_policy.numerics import _tune


class Counted:
    """A metric that counts its calls, and is interrupted at one of them."""

    def __init__(self, stop=None):
        self.calls, self._stop = 0, stop

    def __call__(self, net, *args):
        self.calls += 1
        if self.calls == self._stop:
            raise KeyboardInterrupt
        return net(*args)


REFERENCE_RUNS = 2


def tune(metric, **options):
    return jmp.tune(net, ARGS, HALF, tolerance=0.02, metric=metric, **options)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3, 5])
def test_interrupted_and_resumed_is_as_never_interrupted(stop, tmp_path, monkeypatch):
    file = tmp_path / "trials.jsonl"
    whole = Counted()
    wanted = tune(whole)
    with pytest.raises(KeyboardInterrupt):
        tune(Counted(stop), trials_file=file)
    rest = Counted()
    if stop > REFERENCE_RUNS:  # the ranking is in the file, too
        monkeypatch.setattr(_tune, "rank_scopes", None)
    assert tune(rest, trials_file=file) == wanted
    repeated = REFERENCE_RUNS  # of float32, whose results are in no file
    assert rest.calls == whole.calls - max(0, stop - 1 - REFERENCE_RUNS)
    again = Counted()
    monkeypatch.setattr(_tune, "rank_scopes", None)
    assert tune(again, trials_file=file) == wanted
    assert again.calls == repeated


@pytest.mark.slow
def test_another_tolerance_uses_the_same_trials(tmp_path):
    file = tmp_path / "trials.jsonl"
    tune(Counted(), trials_file=file)
    lines = file.read_text(encoding="utf-8").splitlines()
    metric = Counted()
    loose = jmp.tune(net, ARGS, HALF, tolerance=0.03, metric=metric, trials_file=str(file))
    assert loose.scopes == ("c",)
    assert metric.calls == REFERENCE_RUNS
    assert file.read_text(encoding="utf-8").splitlines() == lines


def test_a_line_that_was_cut_off_is_run_again(tmp_path):
    file = tmp_path / "trials.jsonl"
    wanted = tune(Counted(), trials_file=file)
    file.write_text(file.read_text(encoding="utf-8")[:-9])
    metric = Counted()
    assert tune(metric, trials_file=file) == wanted
    assert metric.calls == REFERENCE_RUNS + 1
    assert [json.loads(line)["kept"] for line in file.read_text(encoding="utf-8").splitlines()[1:]] == [
        list(trial.kept) for trial in wanted.trials
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args": (ARGS[0] + 1, ARGS[1])}, "trials of another run: its arguments is '"),
        ({"policy": HALF.replace("float16", "bfloat16")}, "another run: its policy is 'params=float32,compute=float16"),
        ({"seed": 1}, "another run: its seed is 0, expected 1. It was not changed. Pass another name. For"),
        ({"loss_scale": 8.0}, "another run: its loss scale is None, expected 8.0"),
    ],
)
def test_trials_of_something_else_are_refused_and_left(change, message, tmp_path):
    file = tmp_path / "trials.jsonl"
    tune(None, trials_file=file)
    before = file.read_text(encoding="utf-8")
    options = {"args": ARGS, "policy": HALF, "tolerance": 0.02, "trials_file": file, **change}
    with pytest.raises(ValueError, match=message):
        jmp.tune(net, options.pop("args"), options.pop("policy"), **options)
    assert file.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("text", ["a diary\n", '{"ranking": 3}\n', "[1]\n", '{"a": 1}\n{"b": 2}\n', "no end"])
def test_a_file_of_something_else_is_refused_and_left(text, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"notes\.txt is not a file of trials, or is damaged, so it was not changed"):
        tune(None, trials_file=file)
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_keys_are_part_of_the_arguments(tmp_path):
    def draw(key, x):
        with jax.named_scope("a"):
            return jax.random.normal(key, x.shape) @ x

    file = tmp_path / "trials.jsonl"
    options = {"tolerance": 0.05, "trials_file": file}
    jmp.tune(draw, (jax.random.key(0), jnp.ones((4, 4))), HALF, **options)
    with pytest.raises(ValueError, match="its arguments is"):
        jmp.tune(draw, (jax.random.key(1), jnp.ones((4, 4))), HALF, **options)


def edit(gain):
    def net(x, weight):
        with jax.named_scope("a"):
            return jnp.tanh(x * gain) @ weight

    return net


def score(candidate, *args):
    return candidate(*args)


def score_twice(candidate, *args):
    return 2 * candidate(*args)


def test_trials_of_an_edited_function_or_metric_are_refused(tmp_path):
    """They answered for it: a map that overflowed was reported with an error of 0."""
    file = tmp_path / "trials.jsonl"
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


def test_a_file_that_was_cut_off_in_its_first_line_is_begun_again(tmp_path):
    file = tmp_path / "trials.jsonl"
    wanted = tune(None, trials_file=file)
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole[:40])
    assert tune(None, trials_file=file) == wanted
    assert file.read_text(encoding="utf-8") == whole
