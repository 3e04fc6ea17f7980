"""The README is true: its Python runs, its commands are complete, its links lead somewhere, also on a package page."""

import doctest
import json
import pathlib
import re
import subprocess
import sys
import tomllib

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


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_standard_promotion")
def test_every_python_block_runs(capsys):
    names = run(BLOCKS)
    assert "loss_scale" in capsys.readouterr().out
    assert jmp.metrics(names["opt_state"])["loss_scale"] == 2.0**15
    assert names["stats"].rows()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_standard_promotion")
def test_the_policy_computes_the_same_bits_as_the_casts_by_hand():
    names = run(BLOCKS[:2])
    x = jax.random.normal(jax.random.key(0), (16, 32))
    variables = names["model"].init(jax.random.key(1), x)
    logits, expected = names["model"].apply(variables, x), names["MLPByHand"]().apply(variables, x)
    assert logits.dtype == "float32"
    assert (logits == expected).all()
    assert (logits != names["MLP"]().apply(variables, x)).any()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_standard_promotion")
def test_its_train_step_computes_the_loss_in_float32_on_a_tpu_too():
    """A loss in bfloat16 is a warning, which is an error here."""
    (step,) = (block for block in BLOCKS if "def train_step" in block)
    (spelling,) = re.findall(r'On a TPU write `"(.*?)"` and change nothing else', TEXT)
    names = run([step.replace("params=float32,compute=float16,output=float32", spelling)])
    assert names["policy"].compute_dtype == "bfloat16"
    assert names["loss"].dtype == "float32"


def test_there_are_three_commands_each_complete_on_a_fresh_machine():
    commands = [line for line in TEXT.splitlines() if line.startswith("python3 -m venv")]
    assert commands == [
        "python3 -m venv .venv && .venv/bin/pip install -e '.[demo]' && .venv/bin/python -m examples.gpt train",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[docs]' && .venv/bin/mkdocs serve",
    ]


def test_the_wheel_that_it_installs_is_the_one_that_it_builds():
    assert f"dist/jmp_policy-{jmp.__version__}-py3-none-any.whl" in TEXT


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", TEXT)
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_a_reader_is_through_in_five_minutes():
    assert len(TEXT.splitlines()) <= 150
    assert TEXT.count("![") == 1


@pytest.mark.parametrize("repository", ["", HOME])
def test_no_link_of_a_package_page_is_relative(repository):
    page = hatch_build.mend_links(TEXT, repository)
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith("https://")]
    assert ("OWNER/REPOSITORY" in page) == (not repository)
    assert ("](https://host/owner/name/blob/HEAD/docs/guides/autocast.md)" in page) == bool(repository)


def test_a_package_page_renders_with_its_picture_and_links():
    """As the page of an index renders it: HTML that may do harm is left out."""
    markdown = pytest.importorskip("readme_renderer.markdown")
    pytest.importorskip("comrak")
    page = markdown.render(hatch_build.mend_links(TEXT, HOME))
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
    assert metadata["readme"]["text"] == hatch_build.mend_links(TEXT, repository)
    project = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))
    documentation = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["documentation"]
    assert metadata.get("urls", {}) == hatch_build.name_pages(repository, documentation)


def test_a_site_without_a_repository_is_on_the_page_of_a_package():
    assert hatch_build.name_pages("", "https://site") == {"Documentation": "https://site"}
    assert hatch_build.name_pages("") == {}
