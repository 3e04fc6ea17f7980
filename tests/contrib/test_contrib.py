"""`jmp_policy.contrib`: the rest of the library does not know it, and it knows little that is not public."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from public_names import list_exported
from test_doors import FILES, PACKAGE, imported, package_of

import jmp_policy as jmp

CONTRIB = PACKAGE / "contrib"
OTHERS = [PACKAGE / "__init__.py", *(path for path in FILES if package_of(path) != "contrib")]
PUBLIC = {name for module in (jmp, jmp.quant) for name in list_exported(module)}

BEYOND = {
    "modules": {"Method", "check_batches", "find_adapter", "find_lifting_adapter", "require_adapter"},
    "numerics": {"CHOSEN", "Ranking", "Subject", "TrialLog"} | {"check_budget", "is_loss", "name_metric"},
    "policy": {"PolicySpec", "assign_policies", "find_format", "make_map", "parse_quantization", "stored_format_of"},
    "quant": {"Clip", "Quantized", "choose_best", "choose_bounds", "choose_peak", "pack"}
    | {"quantize_asymmetric", "quantize_symmetric", "to_numbers"}
    | {"Bilinear", "Convolution", "is_matmul", "observe_products"}
    | {"Layout", "Quantizer", "apply_quantizer", "block_length", "stack_shape"},
}
"""Names that `contrib` imports and that are neither public nor of `_base`, `_jaxpr` or `report`."""


def test_no_other_file_imports_it():
    def knows(path: Path) -> bool:
        named = re.search(r"(from|import)[^\n]*\bcontrib\b", path.read_text(encoding="utf-8"))
        return bool(named) or any(CONTRIB in one.to.parents for one in imported(path))

    assert [path for path in OTHERS if knows(path)] == [PACKAGE / "__init__.py"]  # for type checkers


def test_it_imports_public_names_and_few_others():
    beyond: dict[str, set[str]] = {}
    for path in CONTRIB.rglob("*.py"):
        for one in imported(path):
            if CONTRIB not in one.to.parents:
                door = ".".join(one.to.parent.relative_to(PACKAGE).parts)
                if door not in ("_base", "_jaxpr", "report") and one.name not in PUBLIC:
                    beyond.setdefault(door, set()).add(one.name)
    assert beyond == BEYOND


TOOLS = [{"_certify"}, {"_diverge"}, {"_gptq_awq.py", "_layer_by_layer.py"}, {"_bit_tuning.py", "_tune_bits.py"}]
"""The folder or the files of each tool."""


def test_every_file_belongs_to_a_tool():
    parts = {path.relative_to(CONTRIB).parts[0] for path in CONTRIB.rglob("*.py")}
    assert parts - {"__init__.py"} == set().union(*TOOLS)


@pytest.mark.parametrize("tool", TOOLS, ids=min)
def test_a_tool_imports_no_other_tool(tool):
    paths = [path for path in CONTRIB.rglob("*.py") if path.relative_to(CONTRIB).parts[0] in tool]
    used = {
        one.to.relative_to(CONTRIB).parts[0] for path in paths for one in imported(path) if CONTRIB in one.to.parents
    }
    assert used <= tool


@pytest.mark.slow
def test_the_rest_of_the_library_runs_without_it():
    code = (
        "import sys, jax.numpy as jnp, jmp_policy as jmp\n"
        "from flax import nnx\n"
        "jmp.linen, jmp.optim, jmp.sharding, jmp.compat, jmp.tune\n"
        "model = jmp.with_policy(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), 'int8_from_float32')\n"
        "x = jnp.ones((2, 64))\n"
        "jmp.explain(model, x), jmp.quant.quantize(model, 'int8_from_float32'), jmp.quant.calibrate(model, [x])\n"
        "jmp.numerics.audit(jnp.sin)(x), jmp.numerics.collect(jnp.sin)(x), jmp.numerics.first_nonfinite(jnp.sin)(x)\n"
        "print(*(name for name in sys.modules if name.startswith('jmp_policy.contrib')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == []


@pytest.mark.slow
def test_it_loads_nothing_before_a_name_is_asked_for():
    code = (
        "import sys, jmp_policy.contrib\nprint(*(name for name in sys.modules if name.startswith('jmp_policy.cont')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == ["jmp_policy.contrib"]


MOVED = {
    jmp: "BitRow awq certify diverge gptq",
    jmp.numerics: "Certificate Divergence OutputErrors ScopeErrors Worst certify diverge record",
    jmp.quant: "awq gptq",
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in MOVED for name in MOVED[module].split()])
def test_a_name_is_answered_in_its_old_place(module, name):
    message = rf"^module '{module.__name__}' has no attribute '{name}'\. It is jmp_policy\.contrib\.{name}\.$"
    with pytest.raises(AttributeError, match=message):
        getattr(module, name)
    assert getattr(jmp.contrib, name).__name__ == name
