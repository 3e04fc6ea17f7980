"""`jmp_policy.contrib`: the rest of the library does not know it, and its tools do not know each other."""

import re
from pathlib import Path

import pytest
from test_doors import FILES, PACKAGE, imported, package_of

import jmp_policy as jmp

CONTRIB = PACKAGE / "contrib"
OTHERS = [PACKAGE / "__init__.py", *(path for path in FILES if package_of(path) != "contrib")]
TOOLS = [
    {"_certify"},
    {"_diverge", "_parity"},
    {"_gptq_awq.py", "_layer_by_layer.py", "_suspended_run.py"},
    {"_bit_tuning.py", "_tune_bits.py"},
    {f"_checkpoint_{part}.py" for part in ("arrays", "files", "layouts")}
    | {"_read_quantized.py", "_write_quantized.py"},
]
"""The folder or the files of each tool."""


def list_own(path: Path) -> set[str]:
    """The first part of the path of each file of `contrib` that a file imports."""
    return {one.to.relative_to(CONTRIB).parts[0] for one in imported(path) if CONTRIB in one.to.parents}


def test_no_other_file_imports_it():
    word = re.compile(r"(from|import)[^\n]*\bcontrib\b")
    knowing = [path for path in OTHERS if word.search(path.read_text(encoding="utf-8")) or list_own(path)]
    assert knowing == [PACKAGE / "__init__.py"]  # for type checkers


def test_every_file_belongs_to_a_tool_which_imports_no_other_tool():
    for path in CONTRIB.rglob("*.py"):
        if path.parent != CONTRIB or path.name != "__init__.py":
            (tool,) = (tool for tool in TOOLS if path.relative_to(CONTRIB).parts[0] in tool)
            assert list_own(path) <= tool


MOVED = {
    jmp: "BitRow awq certify diverge gptq",
    jmp.numerics: "Certificate Divergence OutputErrors ScopeErrors Worst certify diverge record",
    jmp.quant: "awq gptq",
}


@pytest.mark.parametrize("module", MOVED, ids=lambda module: module.__name__)
def test_a_name_is_answered_in_its_old_place(module):
    for name in MOVED[module].split():
        message = rf"^module '{module.__name__}' has no attribute '{name}'\. It is jmp_policy\.contrib\.{name}\.$"
        with pytest.raises(AttributeError, match=message):
            getattr(module, name)
        assert getattr(jmp.contrib, name).__name__ == name
