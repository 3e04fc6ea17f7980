"""The site has every page and notebook, in order; its hook adds files that stand elsewhere in the repository."""

import base64
import doctest
import html
import importlib
import json
import pathlib
import re
import tomllib

import jax
import levels
import links
import notebook_page
import pictures
import pytest
import test_doors
import yaml

import jmp_policy as jmp

ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
GENERATED = {"changelog.md", "architecture.md", "benchmarks-notes.md"}
"""Pages that the hook makes."""
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def list_pages(nav: object) -> list[str]:
    """Returns the paths of a navigation, in order."""
    entries = nav.values() if isinstance(nav, dict) else nav
    return [nav] if isinstance(nav, str) else [page for entry in entries for page in list_pages(entry)]


NAV = list_pages(CONFIG["nav"])
NOTEBOOKS = [page for page in NAV if page.endswith(".ipynb")]


def test_the_navigation_has_every_page_and_notebook_once_and_in_order():
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(set(NAV) - set(NOTEBOOKS)) == sorted(written | GENERATED)
    assert len(NAV) == len(set(NAV))
    assert [title for entry in CONFIG["nav"] for title in entry] == [
        "Home", "Start", "Guides", "Migrating from", "FAQ", "Troubleshooting", "Reference", "How it works",
        "Benchmarks", "Limitations", "Notebooks", "Changelog",
    ]  # fmt: skip
    text = (ROOT / "docs" / "notebooks" / "index.md").read_text(encoding="utf-8")
    index = re.findall(r"^\d+\. \[[^]]*\]\(\.\./\.\./(notebooks/[^)]*)\)", text, re.MULTILINE)
    assert index == NOTEBOOKS
    assert sorted(index) == sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_the_links_of_a_page_lead_somewhere_in_the_repository_too():
    """Where its pages are read without a site; only the drawing of the levels is the site's alone."""
    for page in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        targets = set(re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", text)) - {"images/levels.svg"}
        assert [target for target in targets if not (page.parent / target).exists()] == [], page


def test_the_page_of_installation_names_every_extra():
    text = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    named = {name for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) == named


def test_a_wrong_link_fails_a_strict_build_and_nothing_is_fetched_from_another_address():
    """Material fetches fonts from one, and the program that draws diagrams from another."""
    nav, linked = ("omitted_files", "not_found"), ("not_found", "anchors", "unrecognized_links")
    rules = {"nav": nav, "links": linked}
    assert CONFIG["validation"] == {part: dict.fromkeys((*rules[part], "absolute_links"), "warn") for part in rules}
    assert CONFIG["theme"]["font"] is False
    assert [path for path in (ROOT / "docs").rglob("*.md") if "```mermaid" in path.read_text(encoding="utf-8")] == []


def test_the_examples_of_the_hook_are_true_and_those_of_docstrings_are_blocks_of_code():
    pytest.importorskip("griffe")
    docstrings = importlib.import_module("docstrings")
    for module in (levels, links, notebook_page, docstrings):
        result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        assert (result.attempted > 0, result.failed) == (True, 0), module
    fenced = docstrings.fence_examples(jmp.value_and_grad.__doc__ + jmp.get_policy.__doc__)
    assert ">>>" in fenced
    assert ">>>" not in re.sub(r"```pycon\n.*?```", "", fenced, flags=re.DOTALL)


def test_a_notebook_is_a_page_with_its_outputs_and_the_links_of_its_text():
    picture = base64.b64encode(b"PNG").decode()
    outputs = [
        {"output_type": "stream", "text": ["\x1b[31mred\x1b[0m\n", "```\n"]},
        {"output_type": "display_data", "data": {"image/png": picture, "text/plain": "<F>"}},
        {"output_type": "execute_result", "data": {"text/html": ["<table>", "</table>"], "text/plain": "no"}},
        {"output_type": "execute_result", "data": {"text/plain": "7"}},
    ]
    code = {"cell_type": "code", "source": ["x = table[0](y)\n", "x"], "outputs": outputs}
    cells = [{"cell_type": "markdown", "source": "# Title\n\n[meshes](../docs/mesh.md)"}, code]
    mend = lambda text: links.mend_links(text, "notebooks/", "", "../")
    page = notebook_page.make_page(json.dumps({"cells": cells}), "sums", mend)
    assert page.markdown.startswith("# Title\n\n[meshes](../mesh.md)")
    for part in ("```python\nx = table[0](y)\nx\n```", "````text\nred\n```\n````", "](pictures/sums-1.png)"):
        assert part in page.markdown
    assert page.pictures == {"pictures/sums-1.png": b"PNG"}
    assert page.markdown.endswith("```text\n7\n```")
    (word,) = page.html
    assert page.insert_html(f"<p>{word}</p>") == '<div class="notebook-html" data-search-exclude><table></table></div>'


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_picture_and_no_table_of_a_notebook_is_left_out(path):
    text = path.read_text(encoding="utf-8")
    page, cells = notebook_page.make_page(text, path.stem), json.loads(text)["cells"]
    data = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    assert len(page.html) == sum("text/html" in each for each in data)
    assert len(page.pictures) == sum("image/png" in each for each in data)
    assert page.markdown.count("```python") == sum(cell["cell_type"] == "code" for cell in cells)


def test_the_picture_has_each_package_on_its_level_and_within_its_edge():
    drawn = levels.read_levels(ARCHITECTURE)
    on_levels = {name.rstrip("/").removesuffix(".py"): level for level, names in drawn.items() for name in names}
    assert on_levels == {name: level for name, level in test_doors.LEVELS.items() if name != "__main__"}
    assert list(drawn) == sorted(drawn)
    picture = levels.draw_levels(drawn)
    names = [name for names in reversed(drawn.values()) for name in names]
    assert re.findall(r'class="name"[^>]*>([^<]*)<', picture) == names
    assert re.findall(r'class="number"[^>]*>(\d+)<', picture) == [str(level) for level in reversed(drawn)]
    (width, height) = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0])
    boxes = re.findall(r'class="package" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', picture)
    assert all(float(x) + float(w) <= width and float(y) + float(h) <= height for x, y, w, h in boxes)


@pytest.mark.slow
def test_the_hook_adds_notebooks_files_of_the_root_and_results(tmp_path):
    pytest.importorskip("mkdocs")
    from mkdocs.config import load_config
    from mkdocs.structure.files import Files

    config = load_config(str(ROOT / "mkdocs.yml"))
    hook = importlib.import_module("hook")
    files = config.plugins.run_event("files", Files([]), config=config)
    assert {file.src_uri for file in files.documentation_pages()} == GENERATED | set(NOTEBOOKS)
    added = {file.src_uri: file for file in files}
    assert added["notebooks/quickstart.ipynb"].url == "notebooks/quickstart/"
    stored = (ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8")
    assert added["notebooks/download/quickstart.ipynb"].content_string == stored
    assert added["changelog.md"].content_string.startswith("# Changelog")
    assert "<svg" in added["images/levels.svg"].content_string

    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").count(hook.RESULTS_MARK) == 1
    assert f'repository = "{hook.find_repository()}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    results = tmp_path / "RESULTS.md"
    assert "python -m benchmarks" in hook.read_results(results)
    results.write_text("# Results\n\n## Bytes\n\n![bytes](plots/bytes.png) of [steps](README.md)\n", encoding="utf-8")
    shown = "\n## Bytes\n\n![bytes](images/benchmarks/bytes.png) of [steps](benchmarks-notes.md)\n"
    assert hook.read_results(results) == shown


@pytest.mark.slow
def test_the_pictures_of_the_home_page_show_what_its_program_does():
    with jax.numpy_dtype_promotion("standard"):  # as a user runs it
        names, printed = pictures.run_home_page()
    number = re.compile(r"-?\d+\.\d+")  # ranges of operands, which differ with the machine
    picture = (ROOT / "docs" / "images" / "nan.svg").read_text(encoding="utf-8")
    title = html.unescape(re.search("<title>(.*)</title>", picture)[1])
    assert number.sub("#", title) == number.sub("#", printed)
    losses, scales, taken = zip(*names["history"], strict=True)
    assert [step for step, loss in enumerate(losses) if loss != loss] == [80]
    assert not taken[80]
    assert max(scales) == 2.0**19
    assert 4 <= taken.count(False) <= 6
