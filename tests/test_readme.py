"""The README is true: its Python runs, its commands are complete, its links lead somewhere, also on a package page."""

import doctest
import json
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable

import jax
import pytest
from pages import read_blocks

import hatch_build
import jmp_policy as jmp

README = pathlib.Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
HOME = "https://host/owner/name"


BLOCKS = [block.code for block in read_blocks(TEXT)]


def run(blocks: list[str]) -> dict[str, object]:
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    return namespace


@pytest.fixture
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # as a user runs it
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_standard_promotion")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_python_block_runs(dtype, capsys):
    """In bfloat16 too, as the README says: a loss in bfloat16 is a warning, which is an error here."""
    names = run([block.replace("compute=float16", f"compute={dtype}") for block in BLOCKS])
    assert "loss_scale" in capsys.readouterr().out
    for state in (names["opt_state"], names["optimizer"]):
        assert jmp.metrics(state)["loss_scale"] == (2.0**15 if dtype == "float16" else 1.0)
    assert names["loss"].dtype == "float32"
    assert jmp.explain(names["model"], names["x"])["layers/3"].compute_dtypes == ("float32",)


def test_there_are_two_commands_each_complete_on_a_fresh_machine():
    commands = [line for line in TEXT.splitlines() if line.startswith("python3 -m venv")]
    assert commands == [
        "python3 -m venv .venv && .venv/bin/pip install -e '.[demo]' && .venv/bin/python -m examples.gpt train",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest",
    ]


def count_lines(paths: Iterable[pathlib.Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_size_is_that_of_the_package():
    core, contrib = (
        int(figure.replace(",", "")) for figure in re.search(r"core has (\S+) lines, contrib (\S+);", TEXT).groups()
    )
    package = README.parent / "jmp_policy"
    in_contrib = count_lines((package / "contrib").rglob("*.py"))
    assert contrib == pytest.approx(in_contrib, rel=0.03)
    assert core == pytest.approx(count_lines(package.rglob("*.py")) - in_contrib, rel=0.03)


LOADED = """
import pathlib, sys
import jax, jax.numpy as jnp, optax
from flax import linen as nn
def count_lines():
    paths = [module.__file__ for name, module in list(sys.modules.items()) if name.split(".")[0] == "jmp_policy"]
    return sum(len(pathlib.Path(path).read_text(encoding="utf-8").splitlines()) for path in paths)
import jmp_policy as jmp
print(count_lines())
net = jmp.with_policy(nn.Dense(3), "params=float32,compute=float16,output=float32")
params = net.init(jax.random.key(0), jnp.ones((1, 3)))
print(count_lines())
tx = jmp.optim.loss_scaled(optax.sgd(0.1), jmp.DynamicLossScale())
step = jmp.optim.minimize(lambda params, x: net.apply(params, x).sum(), tx)
jax.eval_shape(step, params, tx.init(params), jnp.ones((1, 3)))
print(count_lines())
"""


@pytest.mark.slow
def test_no_more_is_loaded_than_it_says():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=300)
    pattern = r"loads (\S+) of them, a linen model with a policy (\S+), a float16 train step (\S+) \|"
    figures = [int(figure.replace(",", "")) for figure in re.search(pattern, TEXT).groups()]
    assert [int(line) for line in done.stdout.split()] == pytest.approx(figures, rel=0.03)


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", TEXT)
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_a_reader_is_through_in_five_minutes():
    assert len(TEXT.splitlines()) <= 100
    assert TEXT.count("![") == 1


@pytest.mark.parametrize("repository", ["", HOME])
def test_no_link_of_a_package_page_is_relative(repository):
    page = hatch_build.absolute_links(TEXT, repository)
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith("https://")]
    assert "OWNER" not in page
    assert ("](https://host/owner/name/blob/HEAD/docs/guides/autocast.md)" in page) == bool(repository)


def test_a_package_page_renders_with_its_picture_and_links():
    """As the page of an index renders it: HTML that may do harm is left out."""
    markdown = pytest.importorskip("readme_renderer.markdown")
    pytest.importorskip("comrak")
    page = markdown.render(hatch_build.absolute_links(TEXT, HOME))
    assert page is not None
    assert [link for link in re.findall(r'href="([^"#][^"]*)"', page) if not link.startswith("https://")] == []
    assert re.findall(r'<img[^>]* src="([^"]*)"', page) == [f"{HOME}/raw/HEAD/docs/images/exponents.png"]
    assert page.count("<table>") == TEXT.count("\n|---")
    assert "<pre" in page


def test_the_page_of_a_package_says_what_its_functions_say():
    assert doctest.testmod(hatch_build).failed == 0


@pytest.mark.slow
def test_the_metadata_has_the_readme_as_it_is_on_a_package_page():
    command = [sys.executable, "-m", "hatchling", "metadata"]
    metadata = json.loads(subprocess.run(command, cwd=README.parent, check=True, capture_output=True, text=True).stdout)
    repository = metadata.get("urls", {}).get("Repository", "")
    assert metadata["readme"]["text"] == hatch_build.absolute_links(TEXT, repository)
    project = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))
    documentation = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["documentation"]
    assert metadata.get("urls", {}) == hatch_build.name_pages(repository, documentation)


def test_a_site_without_a_repository_is_on_the_page_of_a_package():
    assert hatch_build.name_pages("", "https://site") == {"Documentation": "https://site"}
    assert hatch_build.name_pages("") == {}
