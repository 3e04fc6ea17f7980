"""Reports in a real Jupyter kernel: a text is a text, and only what is asked for is shown."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient
from reports import REPORTS

FOLDER = pathlib.Path(__file__).parent
WIDTH = 80

pytestmark = pytest.mark.filterwarnings("default")  # those of the kernel's own machinery are not ours to mend

CELLS = {
    "str": "text = str(report)",
    "format": "formatted = f'{report}'",
    "text": "[text, formatted]",
    "repr": "summary = repr(report)",
    "print": "print(report)",
    "display": "report",
}
CONSOLE = "from jmp_policy.cli._commands import print_text\nprint_text('a line')"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What a kernel shows: by report and cell, a list of outputs."""
    cells = {("", "import"): "from reports import REPORTS", ("", "console"): CONSOLE}
    for name in REPORTS:
        cells |= {(name, "choose"): f"report = REPORTS[{name!r}]"}
        cells |= {(name, key): source for key, source in CELLS.items()}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells.values()])
    resources = {"metadata": {"path": str(FOLDER)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(WIDTH))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.setenv("PYTHONWARNINGS", "ignore")
        NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources, allow_errors=True).execute()
    return {key: cell.outputs for key, cell in zip(cells, notebook.cells, strict=True)}


def read_stream(shown):
    """What was printed, which a busy kernel sends in pieces."""
    assert {(output.output_type, output.name) for output in shown} == {("stream", "stdout")}
    return "".join(output.text for output in shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_a_kernel_shows_nothing_but_what_is_asked_for(name, outputs):
    for key in ("choose", "str", "format", "repr"):
        assert outputs[name, key] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_a_text_in_a_kernel_is_that_of_a_terminal_of_its_width(name, outputs, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = str(REPORTS[name])
    [shown] = outputs[name, "text"]
    assert eval(shown.data["text/plain"]) == [text, text]
    assert read_stream(outputs[name, "print"]) == f"{text}\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_a_kernel_displays_the_page(name, outputs):
    [shown] = outputs[name, "display"]
    assert shown.output_type == "execute_result"
    assert shown.data["text/html"] == REPORTS[name]._repr_html_()
    assert shown.data["text/plain"] == repr(REPORTS[name])


@pytest.mark.slow
def test_the_commands_print_lines_in_a_kernel(outputs):
    assert read_stream(outputs["", "console"]) == "a line\n"
