"""`jmp-policy tune`: the map is printed, and what is wrong with what it was given is one line."""

import json

import jax
import pytest

import jmp_policy as jmp
from jmp_policy.cli import main

pytestmark = pytest.mark.usefixtures("folder")

MODULE = """
import jax, jax.numpy as jnp
from flax import nnx

def net(x, w):
    print("tracing")
    with jax.named_scope("big"):
        x = (x @ (w * 1e6)) / 1e6
    with jax.named_scope("head"):
        return x @ w

def arguments():
    return jnp.ones((2, 4)), jnp.ones((4, 4))

def nothing(x, w):
    return x * jnp.nan

def failing(x, w):
    raise RuntimeError("no data")

def train(net, x, w):
    return net(x, w).mean()

model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

def inputs():
    return jnp.ones((2, 4))

def shapes():
    return jax.ShapeDtypeStruct((2, 4), jnp.float32), jnp.ones((4, 4))
"""
NAME = "tuned_module"
NET = ["tune", f"{NAME}:net", "--args", f"{NAME}:arguments"]


@pytest.mark.exhaustive
def test_the_map_is_printed_as_code(capsys):
    assert main(NET) == 0
    shown = capsys.readouterr().out
    code = shown[shown.index("jmp.PolicyMap(") :]
    assert [rule.key for rule in eval(code).rules] == ["big"]
    assert "1 of 3 scopes of net stay in float32" in shown


@pytest.mark.slow
def test_json_is_one_document_and_its_keys_are_in_the_help(capsys):
    assert main([*NET, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert set(captured.err.splitlines()) == {"tracing"}
    assert document["device"]["platform"] == jax.default_backend()
    assert document["scopes"] == ["big"]
    assert eval(document["code"]) == jmp.PolicyMap.from_config(document["policy_map"])
    main(["tune", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert [key for key in document if key not in shown] == []


@pytest.mark.slow
def test_a_page_a_plot_and_the_trials_are_written(folder, capsys):
    command = [*NET, "--html", "page.html", "--plot", "plot.png", "--trials", "trials.jsonl"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert f"<title>tune of {NAME}:net</title>" in (folder / "page.html").read_text(encoding="utf-8")
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    trials = (folder / "trials.jsonl").read_text(encoding="utf-8")
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert (folder / "trials.jsonl").read_text(encoding="utf-8") == trials


@pytest.mark.slow
def test_a_module_and_a_metric_are_taken(capsys):
    assert main(["tune", f"{NAME}:model", "--args", f"{NAME}:inputs", "--tolerance", "0.1"]) == 0
    assert "scopes of Linear can go to float16" in capsys.readouterr().out
    assert main([*NET, "--metric", f"{NAME}:train"]) == 0
    assert "'big'" in capsys.readouterr().out


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*NET, "--policy", "float32"], "Nothing to tune: the policy 'float32' computes in float32."),
        ([*NET, "--policy", "float61"], "Unknown dtype or policy 'float61'"),
        ([*NET, "--tolerance", "0"], "The tolerance must be a relative error above 0, got 0.0."),
        ([*NET, "--plot", "no/plot.png"], "--plot no/plot.png: the folder no does not exist"),
        ([*NET, "--trials", "no/trials"], "--trials no/trials: the folder no does not exist"),
        ([*NET, "--plot", "plot.xyz"], "--plot plot.xyz is not an image format of matplotlib: name it plot.png"),
        ([*NET, "--trials", f"{NAME}.py"], f"{NAME}.py is not a file of trials, so it was not changed."),
        ([*NET, "--metric", f"{NAME}:tran"], f"{NAME} has no 'tran', of '{NAME}:tran'. Did you mean 'train'?"),
        (["tune", f"{NAME}:net"], f"{NAME}:net takes (x, w), and --args is missing."),
        (["tune", f"{NAME}:net", "--args", f"{NAME}:shapes"], f"--args {NAME}:shapes returns ShapeDtypeStruct"),
        (["tune", f"{NAME}:nothing", "--args", f"{NAME}:arguments"], "nothing returns nan or infinity in float32"),
        (["tune", f"{NAME}:failing", "--args", f"{NAME}:arguments"], f"{NAME}:failing raised RuntimeError: no data"),
        (
            ["tune", f"{NAME}:nnx.Linear"],
            f"{NAME}:nnx.Linear: tune takes a function or a module, and Linear is a class",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err.replace("tracing\n", "")
    assert error.startswith(f"jmp-policy: error: {message}")
    assert error.count("\n") == 1


def test_a_budget_that_was_spent_is_said(capsys):
    assert main([*NET, "--budget", "1"]) == 0  # all in float32, which is within the tolerance
    assert "The budget ran out" in capsys.readouterr().out
