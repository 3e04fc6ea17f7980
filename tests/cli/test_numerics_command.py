"""`jmp-policy numerics`: the function runs once, and what is wrong with what it was given is one line."""

import json

import jax
import pytest

from jmp_policy.cli import main

pytestmark = pytest.mark.usefixtures("folder")

MODULE = """
import jax, jax.numpy as jnp

class Model:
    pass

def product(x, w):
    with jax.named_scope("head"):
        return x @ w

def noisy(x, w):
    print("running"); return product(x, w)

def arguments():
    return jnp.full((2, 3), 2.0**-13), jnp.full((3, 4), 2.0**-13)  # products of 3 * 2**-26: half of float16's least

def shapes():
    return jax.ShapeDtypeStruct((2, 3), jnp.float32), jnp.ones((3, 4))

def failing(x, w):
    raise RuntimeError("no data")

def wrong(x, w):
    raise ValueError("where has the data gone")

def nothing():
    return 1
"""
NAME = "measured_module"
PRODUCT = ["numerics", f"{NAME}:product", "--args", f"{NAME}:arguments"]


def check_error(capsys, message):
    error = capsys.readouterr().err
    assert error.startswith(f"jmp-policy: error: {message}")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_report_is_printed_with_the_formats_that_were_asked_for(capsys):
    assert main([*PRODUCT, "--formats", "float8_e5m2", "int8", "--of", "forward"]) == 0
    shown = capsys.readouterr().out
    header, _, line, *_ = shown.splitlines()
    assert header.split()[-3:] == ["amax", "e5m2", "int8"]
    assert line.split()[:4] == ["head", "dot_general", "measured_module.py:9", "forward"]
    assert line.split()[4:] == ["4.5e-08", "↓100%"]  # the numbers are equal, and a scale of int8 fits them


def test_json_is_one_document_and_nothing_else(capsys):
    command = ["numerics", f"{NAME}:noisy", "--args", f"{NAME}:arguments", "--where", "head", "--of", "forward"]
    assert main([*command, "--formats", "float16", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == "running\n"  # what the function prints
    assert list(document)[:3] == ["versions", "device", "function"]
    assert document["device"]["platform"] == jax.default_backend()
    (row,) = document["rows"]
    assert (row["path"], row["primitive"], row["count"]) == ("head", "dot_general", 8)
    assert row["amax"] == 3 * 2.0**-26
    assert row["formats"]["float16"]["subnormal"] == 1.0
    main(["numerics", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert [key for key in [*document, *row] if key not in shown] == []


@pytest.mark.slow
def test_a_page_and_a_plot_are_written_where_they_are_wanted(folder, capsys):
    assert main([*PRODUCT, "--of", "forward", "--html", "page.html", "--plot", "plot.png"]) == 0
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert f"<title>numerics of {NAME}:product</title>" in page
    assert "dot_general" in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")  # it needs no network
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_function_without_tensors_says_so(capsys):
    assert main(["numerics", f"{NAME}:nothing"]) == 0
    assert "Nothing was observed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--formats", "float61"], "Unknown format 'float61'"),
        (["--of", "backwards"], "of has 'backwards'. Did you mean 'backward'?"),
        (["--where", "heat"], "where has 'heat', but the function has no such operation, and no module or scope"),
        (["--html", "no/page.html"], "--html no/page.html: the folder no does not exist"),
        (["--plot", "no/plot.png"], "--plot no/plot.png: the folder no does not exist"),
        (["--plot", "plot.bmpp"], "--plot plot.bmpp is not an image format of matplotlib: name it plot.png"),
    ],
)
def test_a_bad_option_is_one_line_and_status_2(options, message, capsys, folder):
    assert main([*PRODUCT, *options]) == 2
    check_error(capsys, message)


@pytest.mark.parametrize(
    ("function", "maker", "message"),
    [
        ("product", None, "MODULE:product takes (x, w), and --args is missing. For example, write `def make_args(): "
         "return x, w` in MODULE, where each is an array or, say, jax.random.normal(jax.random.key(0), (8, 128)), and"),
        ("product", "shapes", "--args MODULE:shapes returns ShapeDtypeStruct(shape=(2, 3), dtype=float32): the "
         "function runs, and needs arrays with values, such as jax.random.normal(jax.random.key(0), (8, 128))"),
        ("Model", None, "MODULE:Model: collect takes a function, got <class 'MODULE.Model'>"),
        ("failing", "arguments", "MODULE:failing raised RuntimeError: no data, at "),
        ("wrong", "arguments", "MODULE:wrong raised ValueError: where has the data gone, at "),
    ],
)  # fmt: skip
def test_what_cannot_run_is_one_line_and_status_2(function, maker, message, capsys):
    arguments = [] if maker is None else ["--args", f"{NAME}:{maker}"]
    assert main(["numerics", f"{NAME}:{function}", *arguments]) == 2
    check_error(capsys, message.replace("MODULE", NAME))


@pytest.mark.slow
def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def describe(*_):
        raise ValueError("a bug")

    monkeypatch.setattr("jmp_policy.numerics._collect._describe_line", describe)
    with pytest.raises(ValueError, match="a bug"):
        main(PRODUCT)
