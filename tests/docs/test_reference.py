"""The reference has every public name once, and the parts that are made of the code are up to date."""

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

# The tables and the commands themselves, which the pages list.
from jmp_policy.autocast import _tables
from jmp_policy.cli._commands import COMMANDS

PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(generated.REFERENCE.glob("*.md"))}
DIRECTIVES = [name for text in PAGES.values() for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
ROOMS = ("jmp_policy", *(f"jmp_policy.{name}" for name in jmp._LAZY), "jmp_policy.compat.keras")
ROOMS += ("jmp_policy.compat.keras.dtype_policies", "jmp_policy.compat.torch")
"""The modules that a user imports from."""


def find(path: str) -> object:
    """Returns the value of a public path: modules are imported, though a name of their package may hide them."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def list_names(room: str) -> dict[str, object]:
    """Returns the public functions, classes and tables of a module, by name."""
    module = importlib.import_module(room)
    ours = {name: x for name, x in list_exported(module).items() if not inspect.ismodule(x)}
    if not hasattr(module, "__path__"):  # it imports names that are not its own
        ours = {name: x for name, x in ours.items() if getattr(x, "__module__", None) == room}
    return {name: x for name, x in ours.items() if getattr(x, "__module__", "jmp_policy").startswith("jmp_policy")}


def test_every_public_name_has_one_place_with_an_example():
    shown = {name: find(name) for name in DIRECTIVES}
    ids = [id(x) for x in shown.values()]
    assert len(DIRECTIVES) == len(ids) == len(set(ids))
    assert [f"{room}.{name}" for room in ROOMS for name, x in list_names(room).items() if id(x) not in ids] == []
    assert [name for name, x in shown.items() if callable(x) and ">>>" not in (inspect.getdoc(x) or "")] == []

    wanted = {name for name in find_public_names() if name.split(".")[1:2] not in ([], ["report"])}
    wanted = {name for name in wanted if not name.startswith("jmp_policy.cli") and name not in sys.modules}
    written_at = {f"{x.__module__}.{x.__qualname__}" for x in shown.values() if callable(x)}
    assert wanted - written_at == set()


def test_another_name_of_the_same_thing_is_said_and_a_private_one_is_not():
    """As `global_policy` of Keras: the place has the name under which it was written."""
    last_names = {name.rpartition(".")[2] for name in DIRECTIVES}
    others = {name for room in ROOMS for name in list_names(room)} - last_names
    text = "\n".join(PAGES.values())
    assert {name for name in others if f"`{name}`" not in text} == set()
    assert [name for name in DIRECTIVES if "._" in name] + re.findall(r"jmp_policy\.[\w.]*\._?_\w+", text) == []


def test_the_index_leads_to_every_page():
    assert [name for name in PAGES if name != "index" and f"({name}.md)" not in PAGES["index"]] == []


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if "<!-- generated" in text])
def test_the_generated_parts_of_a_page_are_up_to_date(page):
    assert PAGES[page] == generated.fill(PAGES[page]), "run: python docs/_site/generated.py"


def test_each_table_of_autocast_has_a_part_that_follows_it(monkeypatch):
    text = PAGES["autocast-tables"]
    tables = {name: table for name, table in vars(_tables).items() if name.isupper() and isinstance(table, dict)}
    assert sorted(re.findall(r"<!-- generated: ([A-Z_0-9]+) -->", text)) == sorted(tables)
    for name, table in tables.items():
        part = generated.PARTS[name]()
        assert all(f"`{operation}`" in part for operation in table)
    monkeypatch.setitem(_tables.LOW, "dot_general", "for another reason")
    assert generated.fill(text) != text


@pytest.mark.parametrize("name", [name for name in generated.FLOATS if name != "TF32"])
def test_the_range_of_a_format_is_that_of_its_values(name):
    """All values of 16 bits and fewer, one by one: `finfo` alone proves nothing."""
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
    smallest = positive[0]
    ends = (positive[-1], smallest, smallest * 2**format.mantissa, positive[positive > 1][0] - 1)
    assert (format.largest, format.smallest_subnormal, format.smallest_normal, format.epsilon) == ends
    assert format.has_infinity == np.isinf(numbers).any()


def test_tf32_has_the_range_of_float32_and_the_step_of_float16():
    tf32 = generated.describe_float("TF32")
    assert tf32.largest == (2 - 2**-10) * 2.0**127
    assert tf32.epsilon == generated.describe_float("float16").epsilon
    assert tf32.bits == tf32.exponent + tf32.mantissa + 1


def test_each_command_has_its_help_and_an_example():
    sections = dict(re.findall(r"^## (\w+)$(.*?)(?=^## |\Z)", PAGES["command-line"], re.MULTILINE | re.DOTALL))
    assert set(sections) == set(COMMANDS)
    for name, section in sections.items():
        assert re.search(rf"^\$ jmp-policy {name}(?! --help)", section, re.MULTILINE)
        assert f"<!-- generated: help {name} -->" in section


@pytest.mark.slow
@pytest.mark.parametrize("command", ["audit", "numerics", "diverge", "parity", "tune"])
def test_a_command_prints_what_its_example_says(command, tmp_path):
    text = PAGES["command-line"]
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
    sections = dict(re.findall(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", PAGES["audit-findings"], re.MULTILINE | re.DOTALL))
    assert list(sections) == list(jmp.numerics.FINDINGS)
    for name, section in sections.items():
        assert any(block.output and f": {name}" in block.output for block in read_blocks(section)), name
        assert "**What to do.**" in section
