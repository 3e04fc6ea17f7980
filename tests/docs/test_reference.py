"""The reference has every public name once, and what it has from the code is up to date."""

import doctest
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys

import generated
import ml_dtypes
import numpy as np
import pytest
from pages import assert_prints, read_blocks
from public_names import find_public_names, list_exported

import jmp_policy as jmp
from jmp_policy.autocast import _tables
from jmp_policy.cli._commands import COMMANDS

REFERENCE = generated.REFERENCE
PAGES = sorted(REFERENCE.glob("*.md"))
DIRECTIVES = [
    (page.stem, name)
    for page in PAGES
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
ROOMS = ("jmp_policy", *(f"jmp_policy.{name}" for name in jmp._LAZY), "jmp_policy.compat.keras")
ROOMS += ("jmp_policy.compat.keras.dtype_policies", "jmp_policy.compat.torch")
"""The modules that a user imports from."""


def find(path: str) -> object:
    """What a public path names: modules are imported, though a name of their package may hide them."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def written_at(value: object) -> str:
    """Where a function or class is written, as `find_public_names` has it."""
    return f"{value.__module__}.{value.__qualname__}"  # pyright: ignore[reportAttributeAccessIssue]


def list_names(room: str) -> dict[str, object]:
    """The public functions, classes and tables of a module, by name."""
    module = importlib.import_module(room)
    values = list_exported(module)
    if hasattr(module, "__path__"):
        ours = {name: x for name, x in values.items() if not inspect.ismodule(x)}
    else:  # which imports what is not its own
        ours = {name: x for name, x in values.items() if getattr(x, "__module__", None) == room}
    return {name: x for name, x in ours.items() if getattr(x, "__module__", "jmp_policy").startswith("jmp_policy")}


def test_every_public_name_has_one_place():
    shown = [id(find(name)) for _, name in DIRECTIVES]
    assert len(shown) == len(set(shown))
    missing = {f"{room}.{name}" for room in ROOMS for name, x in list_names(room).items() if id(x) not in shown}
    assert missing == set()


def test_every_name_that_the_package_calls_public_is_there():
    wanted = {name for name in find_public_names() if name.split(".")[1:2] not in ([], ["report"])}
    wanted = {name for name in wanted if not name.startswith("jmp_policy.cli") and name not in sys.modules}
    shown = {written_at(find(name)) for _, name in DIRECTIVES if callable(find(name))}
    assert wanted - shown == set()


def test_every_function_and_class_has_an_example():
    found = {name: find(name) for _, name in DIRECTIVES}
    assert [name for name, x in found.items() if callable(x) and ">>>" not in (inspect.getdoc(x) or "")] == []


def test_another_name_of_the_same_thing_is_said():
    """As `global_policy` of Keras: the place has the name under which it was written."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    last_names = {name.rpartition(".")[2] for _, name in DIRECTIVES}
    others = {name for room in ROOMS for name in list_names(room)} - last_names
    assert {name for name in others if f"`{name}`" not in text} == set()


def test_no_page_names_what_is_private():
    """But for states that users see: collections, and what Keras itself calls so."""
    assert [name for _, name in DIRECTIVES if "._" in name] == []
    for page in PAGES:
        assert re.findall(r"jmp_policy\.[\w.]*\._?_\w+", page.read_text(encoding="utf-8")) == []


def test_the_index_leads_to_every_page():
    index = (REFERENCE / "index.md").read_text(encoding="utf-8")
    assert [page.stem for page in PAGES if page.stem != "index" and f"({page.name})" not in index] == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_has_from_the_code_is_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert text == generated.fill(text), "run: python docs/_site/generated.py"


@pytest.mark.slow
def test_the_tables_of_autocast_have_a_part_each():
    text = (REFERENCE / "autocast-tables.md").read_text(encoding="utf-8")
    tables = [name for name, value in vars(_tables).items() if name.isupper() and isinstance(value, dict)]
    assert sorted(re.findall(r"<!-- generated: ([A-Z_0-9]+) -->", text)) == sorted(tables)
    for name in tables:
        assert all(f"`{operation}`" in generated.PARTS[name]() for operation in getattr(_tables, name))


def test_a_table_that_changes_makes_the_page_out_of_date(monkeypatch):
    page = (REFERENCE / "autocast-tables.md").read_text(encoding="utf-8")
    monkeypatch.setitem(_tables.LOW, "dot_general", "for another reason")
    assert generated.fill(page) != page


@pytest.mark.parametrize("name", [name for name in generated.FLOATS if name != "TF32"])
def test_the_range_of_a_format_is_that_of_its_numbers(name):
    """All numbers of 16 bits and fewer, one by one; not what `finfo` says of them."""
    info = ml_dtypes.finfo(name)
    format = generated.describe_float(name)
    assert format.bits == info.bits == format.exponent + format.mantissa + 1
    if info.bits > 16:
        assert (format.exponent, format.mantissa) == (8, 23)
        return
    codes = np.arange(2**info.bits, dtype=np.uint16 if info.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # of nan
        numbers = codes.view(name).astype(np.float64)
    positive = np.unique(numbers[np.isfinite(numbers) & (numbers > 0)])
    assert format.largest == positive[-1]
    assert format.smallest_subnormal == positive[0]
    assert format.smallest_normal == positive[0] * 2**format.mantissa
    assert format.epsilon == positive[positive > 1][0] - 1
    assert format.has_infinity == np.isinf(numbers).any()


def test_tf32_has_the_range_of_float32_and_the_step_of_float16():
    tf32, half = generated.describe_float("TF32"), generated.describe_float("float16")
    assert tf32.largest == (2 - 2**-10) * 2.0**127
    assert tf32.epsilon == half.epsilon
    assert tf32.bits == tf32.exponent + tf32.mantissa + 1


def test_each_command_has_its_help_and_an_example():
    text = (REFERENCE / "command-line.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == set(COMMANDS)
    for name in COMMANDS:
        section = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert re.search(rf"^\$ jmp-policy {name}(?! --help)", section, re.MULTILINE)
        assert f"<!-- generated: help {name} -->" in section


@pytest.mark.slow
@pytest.mark.parametrize("command", ["audit", "numerics", "diverge", "tune"])
def test_a_command_prints_what_its_example_says(command, tmp_path):
    text = (REFERENCE / "command-line.md").read_text(encoding="utf-8")
    [model] = [block.code for block in read_blocks(text) if "def make_args" in block.code]
    (tmp_path / "model.py").write_text(model, encoding="utf-8")
    [example] = re.findall(rf"^\$ jmp-policy ({command} model.*?)^```$", text, re.MULTILINE | re.DOTALL)
    line, _, expected = example.partition("\n")
    run = [sys.executable, "-m", "jmp_policy", *shlex.split(line)]
    environment = os.environ | {"COLUMNS": "100", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert_prints(command, done.stdout + done.stderr, expected)


def test_the_examples_of_the_generator_are_true():
    assert doctest.testmod(generated).failed == 0


def test_findings_have_an_example_each():
    text = (REFERENCE / "audit-findings.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(jmp.numerics.FINDINGS)
    for name, section in sections.items():
        assert any(block.output and f": {name}" in block.output for block in read_blocks(section)), name
        assert "**What to do.**" in section
