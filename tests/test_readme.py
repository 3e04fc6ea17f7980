"""The README is true: its Python runs, its commands are complete, its links lead somewhere, also on a package page.

So is `docs/mesh.md`.
"""

import doctest
import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import hatch_build
import jmp_policy as jmp

README = pathlib.Path(__file__).parent.parent / "README.md"
MESH = README.parent / "docs" / "mesh.md"
TEXT = README.read_text(encoding="utf-8")
HOME = "https://host/owner/name"


def read_blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


BLOCKS = read_blocks(README)


def run(blocks: list[str]) -> dict[str, object]:
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    return namespace


@pytest.fixture
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # as a user runs it
        yield


@pytest.mark.usefixtures("_standard_promotion")
def test_every_python_block_runs(capsys):
    names = run(BLOCKS)
    assert "loss_scale" in capsys.readouterr().out
    assert jmp.metrics(names["optimizer"])["loss_scale"] == 2.0**15


@pytest.mark.usefixtures("_standard_promotion")
def test_the_policy_computes_the_same_bits_as_the_casts_by_hand():
    names = run(BLOCKS[:2])
    x = jax.random.normal(jax.random.key(0), (16, 32))
    variables = names["model"].init(jax.random.key(1), x)
    logits, expected = names["model"].apply(variables, x), names["MLPByHand"]().apply(variables, x)
    assert logits.dtype == "float32"
    assert (logits == expected).all()
    assert (logits != names["MLP"]().apply(variables, x)).any()


@pytest.mark.usefixtures("_standard_promotion")
def test_its_train_step_computes_the_loss_in_float32_on_a_tpu_too():
    """A loss in bfloat16 is a warning, which is an error here."""
    (step,) = (block for block in BLOCKS if "def train_step" in block)
    (spelling,) = re.findall(r'On a TPU write `"(.*?)"` and change nothing else', TEXT)
    names = run([step.replace("params=float32,compute=float16,output=float32", spelling)])
    assert names["policy"].compute_dtype == "bfloat16"
    assert names["loss"].dtype == "float32"


def test_there_are_two_commands_each_complete_on_a_fresh_machine():
    commands = [line for line in TEXT.splitlines() if line.startswith("python3 -m venv")]
    assert commands == [
        "python3 -m venv .venv && .venv/bin/pip install -e '.[demo]' && .venv/bin/jmp-policy train",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest",
    ]


def test_the_wheel_that_it_installs_is_the_one_that_it_builds():
    assert f"dist/jmp_policy-{jmp.__version__}-py3-none-any.whl" in TEXT


@pytest.mark.parametrize("page", [README, MESH], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.cpu("the page is written for four CPU devices")
@pytest.mark.usefixtures("_standard_promotion")
def test_the_limits_of_a_mesh_are_there_and_their_ways_out_work():
    """A block fails as soon as one of the limits is gone: then the page is to be shortened."""
    devices = 'jax.config.update("jax_num_cpu_devices", 4)\n'  # the tests have eight
    first, *others = read_blocks(MESH)
    assert devices in first
    names = run([first.replace(devices, ""), *others])
    assert names["rows"].shape == (8, 3, 8)


@pytest.mark.slow
@pytest.mark.cpu("the compiler that dies is that of CPUs")
def test_a_half_sum_beside_an_axis_left_to_xla_still_kills_a_process_without_the_option():
    setup, (block,) = read_blocks(MESH)[0], [block for block in read_blocks(MESH) if "xla_disable_hlo_passes" in block]
    for program, dies in [(block, False), (block.replace("compiler_options=options", ""), True)]:
        command = [sys.executable, "-c", setup + program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ("Invalid binary instruction opcode copy" in done.stderr) == dies, done.stderr
        assert (done.returncode < 0) == dies


def test_every_notebook_is_in_its_index():
    notebooks = {f"notebooks/{path.name}" for path in (README.parent / "notebooks").glob("*.ipynb")}
    assert set(re.findall(r"^\d+\. \[[^]]*\]\((notebooks/[^)]*)\)", TEXT, re.MULTILINE)) == notebooks


@pytest.mark.parametrize("repository", ["", HOME])
def test_no_link_of_a_package_page_is_relative(repository):
    page = hatch_build.mend_links(TEXT, repository)
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith("https://")]
    assert ("OWNER/REPOSITORY" in page) == (not repository)
    assert ("](https://host/owner/name/blob/HEAD/notebooks/float8.ipynb)" in page) == bool(repository)


def test_the_page_of_a_package_says_what_its_functions_say():
    assert doctest.testmod(hatch_build).failed == 0


def test_the_metadata_has_the_readme_as_it_is_on_a_package_page():
    command = [sys.executable, "-m", "hatchling", "metadata"]
    metadata = json.loads(subprocess.run(command, cwd=README.parent, check=True, capture_output=True, text=True).stdout)
    repository = metadata.get("urls", {}).get("Repository", "")
    assert metadata["readme"]["text"] == hatch_build.mend_links(TEXT, repository)
    assert metadata.get("urls", {}) == hatch_build.name_pages(repository)
