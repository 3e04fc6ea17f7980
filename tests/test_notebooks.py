"""Every notebook runs from top to bottom, and was committed with its outputs."""

import ast
import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHORTER = {
    "autocast": {"STEPS = 150": "STEPS = 25"},
    "block_formats": {"STEPS = 150": "STEPS = 12"},
    "flax_modules": {"epochs=12": "epochs=1"},
    "float8": {"steps = 120": "steps = 25"},
    "half_precision_parameters": {"STEPS, BATCH = 800, 128": "STEPS, BATCH = 120, 16"},
    "quantized": {"steps=800": "steps=8", '"int4_from_float32", 150': '"int4_from_float32", 3'},
    "quickstart": {"2**14, 16": "2**8, 16"},
    "repair": {"STEPS, BATCH = 300, 64": "STEPS, BATCH = 40, 16"},
    "serve_int4": {"STEPS = 800": "STEPS = 8", "(64,), 0": "(8,), 0", "64, 4, 2, 32, 16": "64, 4, 1, 32, 4"},
    "sharded": {"4096, 3": "4096, 1", "BAD_PART = 6, 3, 2": "BAD_PART = 2, 1, 2"},
    "small_state": {"STEPS = 200": "STEPS = 12", "RARE_STEPS = 4096, 16, 600": "RARE_STEPS = 256, 16, 20",
                    "for n in range(10)": "for n in range(1)"},
    "will_it_underflow": {"BEFORE, STEPS, LEARNING_RATE = 60, 60,": "BEFORE, STEPS, LEARNING_RATE = 12, 11,",
                          "BATCH = 32, 2, 2, 32, 128": "BATCH = 32, 2, 1, 32, 16"},
}  # fmt: skip
"""Smaller sizes, so that the code of a notebook runs in seconds. The committed outputs are of the full sizes."""

INSTALL = """
import importlib.util

# In a clone of the repository, where the package is not installed:
if importlib.util.find_spec("jmp_policy") is None:
    %pip install -q "..[notebooks]"
""".strip()
"""The first cell of code of each notebook."""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of the kernel's own machinery are not ours to mend
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    for long, short in SHORTER[path.stem].items():
        assert any(long in cell.source for cell in notebook.cells), long
        for cell in notebook.cells:
            cell.source = cell.source.replace(long, short)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()


def parse(path):
    notebook = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return ast.parse(re.sub(r"^( *)%.*", r"\1pass", code, flags=re.MULTILINE))  # `%` starts a magic of IPython


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_imports_public_names_alone(path):
    imports = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [getattr(node, "module", None) or "" for node in imports] + [a.name for i in imports for a in i.names]
    assert "jmp_policy" in modules
    assert [name for name in modules if any(part.startswith("_") for part in name.split("."))] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_needs_nothing_of_the_repository(path):
    nodes = list(ast.walk(parse(path)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not {module.partition(".")[0] for module in modules} & {"examples", "benchmarks", "tests", ""}
    assert "sys.path" not in [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [text for text in texts if text.startswith("..")] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_installs_what_it_needs_before_anything_else_where_the_package_is_missing(path):
    title, install, *_ = nbformat.read(path, as_version=4).cells
    assert title.source.startswith("# ")
    assert (install.source, install.outputs) == (INSTALL, [])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_the_outputs_of_one_run_and_names_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    text = path.read_text(encoding="utf-8")
    assert not [folder for folder in ("/home/", "/root/", "/tmp/") if folder in text]
