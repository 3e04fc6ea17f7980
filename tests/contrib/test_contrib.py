"""`jmp_policy.contrib`: the rest of the library does not know it, and its tools do not know each other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_doors import FILES, PACKAGE, imported, package_of

import jmp_policy as jmp

CONTRIB = PACKAGE / "contrib"
OTHERS = [PACKAGE / "__init__.py", *(path for path in FILES if package_of(path) != "contrib")]
TOOLS = [{"_certify"}, {"_diverge"}, {"_gptq_awq.py", "_layer_by_layer.py"}, {"_bit_tuning.py", "_tune_bits.py"}]
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


@pytest.mark.slow
def test_the_rest_of_the_library_runs_without_it_and_it_loads_nothing_before_a_name_is_asked_for():
    code = (
        "import sys, jax.numpy as jnp, jmp_policy as jmp\n"
        "from flax import nnx\n"
        "jmp.linen, jmp.optim, jmp.sharding, jmp.compat, jmp.tune\n"
        "model = jmp.with_policy(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), 'int8_from_float32')\n"
        "x = jnp.ones((2, 64))\n"
        "jmp.explain(model, x), jmp.quant.quantize(model, 'int8_from_float32'), jmp.quant.calibrate(model, [x])\n"
        "jmp.numerics.audit(jnp.sin)(x), jmp.numerics.collect(jnp.sin)(x), jmp.numerics.first_nonfinite(jnp.sin)(x)\n"
        "print(*(name for name in sys.modules if name.startswith('jmp_policy.contrib')), 'then')\n"
        "import jmp_policy.contrib\n"
        "print(*(name for name in sys.modules if name.startswith('jmp_policy.contrib')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == ["then", "jmp_policy.contrib"]


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
