"""The site has every page and notebook, in order; what its hook adds is what stands in the repository."""

import base64
import doctest
import importlib
import json
import pathlib
import re
import tomllib

import levels
import links
import notebook_page
import pytest
import test_doors
import yaml

import jmp_policy as jmp

ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
GENERATED = {"changelog.md", "architecture.md", "benchmarks-notes.md"}
"""Pages that the hook makes."""

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def list_pages(nav: object) -> list[str]:
    """The paths of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in list_pages(entry)]


NAV = list_pages(CONFIG["nav"])


def make_code(outputs: list[dict]) -> str:
    cells = [
        {"cell_type": "markdown", "source": "# Title\n\n[meshes](../docs/mesh.md)"},
        {"cell_type": "code", "source": ["x = table[0](y)\n", "x"], "outputs": outputs},
    ]
    return json.dumps({"cells": cells})


def test_the_navigation_has_every_page_once():
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(page for page in NAV if page.endswith(".md")) == sorted(written | GENERATED)


def test_the_navigation_has_every_notebook_in_the_order_of_their_page():
    text = (ROOT / "docs" / "notebooks" / "index.md").read_text(encoding="utf-8")
    index = re.findall(r"^\d+\. \[[^]]*\]\(\.\./\.\./notebooks/([^)]*)\)", text, re.MULTILINE)
    assert [page for page in NAV if page.endswith(".ipynb")] == [f"notebooks/{name}" for name in index]
    assert sorted(index) == sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_the_links_of_a_page_lead_somewhere_in_the_repository_too():
    """Where its pages are read without a site; only the drawing of the levels is the site's alone."""
    missing = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", text):
            if not (page.parent / target).exists() and target != "images/levels.svg":
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert missing == []


def test_the_page_of_installation_names_every_extra():
    text = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    named = {name for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) == named


def test_the_parts_of_the_site_come_in_the_order_in_which_they_are_read():
    assert [title for entry in CONFIG["nav"] for title in entry] == [
        "Home", "Start", "Guides", "Migrating from", "FAQ", "Troubleshooting", "Reference", "How it works",
        "Benchmarks", "Limitations", "Notebooks", "Changelog",
    ]  # fmt: skip


def test_what_is_wrong_with_a_link_fails_a_strict_build():
    assert CONFIG["validation"] == {
        "nav": {"omitted_files": "warn", "not_found": "warn", "absolute_links": "warn"},
        "links": {"not_found": "warn", "anchors": "warn", "absolute_links": "warn", "unrecognized_links": "warn"},
    }


def test_nothing_is_fetched_from_another_address_to_read_the_site():
    """Material fetches fonts from one, and the program that draws diagrams from another."""
    assert CONFIG["theme"]["font"] is False
    assert [path for path in (ROOT / "docs").rglob("*.md") if "```mermaid" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("module", [levels, links, notebook_page], ids=lambda module: module.__name__)
def test_the_examples_of_the_hook_are_true(module):
    _assert_examples_are_true(module)


def test_the_examples_of_docstrings_are_blocks_of_code():
    pytest.importorskip("griffe")
    docstrings = importlib.import_module("docstrings")
    _assert_examples_are_true(docstrings)
    fenced = docstrings.fence_examples(jmp.value_and_grad.__doc__ + jmp.get_policy.__doc__)
    outside = re.sub(r"```pycon\n.*?```", "", fenced, flags=re.DOTALL)
    assert ">>>" in fenced
    assert ">>>" not in outside


def _assert_examples_are_true(module):
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_notebook_is_a_page_with_its_outputs():
    outputs = [
        {"output_type": "stream", "text": ["\x1b[31mred\x1b[0m\n", "```\n"]},
        {"output_type": "display_data", "data": {"image/png": base64.b64encode(PIXEL).decode(), "text/plain": "<F>"}},
        {"output_type": "execute_result", "data": {"text/html": ["<table>", "</table>"], "text/plain": "no"}},
        {"output_type": "execute_result", "data": {"text/plain": "7"}},
    ]
    page = notebook_page.make_page(make_code(outputs), "sums")
    assert page.markdown.startswith("# Title")
    assert "```python\nx = table[0](y)\nx\n```" in page.markdown
    assert "````text\nred\n```\n````" in page.markdown
    assert "](pictures/sums-1.png)" in page.markdown
    assert page.pictures == {"pictures/sums-1.png": PIXEL}
    assert page.markdown.endswith("```text\n7\n```")
    (word,) = page.html
    assert page.insert_html(f"<p>{word}</p>") == '<div class="notebook-html" data-search-exclude><table></table></div>'


def test_links_of_a_notebook_are_mended_and_its_code_is_not():
    page = notebook_page.make_page(make_code([]), "sums", lambda text: links.mend_links(text, "notebooks/", "", "../"))
    assert "[meshes](../mesh.md)" in page.markdown
    assert "table[0](y)" in page.markdown


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_picture_and_no_table_of_a_notebook_is_left_out(path):
    page = notebook_page.make_page(path.read_text(encoding="utf-8"), path.stem)
    outputs = [
        output for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] for output in cell.get("outputs", [])
    ]
    html = [output for output in outputs if "text/html" in output.get("data", {})]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert (len(page.html), len(page.pictures)) == (len(html), len(pictures))
    assert page.markdown.count("```python") == sum(
        '"code"' in line for line in path.read_text(encoding="utf-8").splitlines()
    )


def test_the_picture_has_each_package_on_the_level_that_the_tests_check():
    drawn = levels.read_levels((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    on_levels = {name.rstrip("/").removesuffix(".py"): level for level, names in drawn.items() for name in names}
    assert on_levels == {name: level for name, level in test_doors.LEVELS.items() if name != "__main__"}
    assert list(drawn) == sorted(drawn)
    picture = levels.draw_levels(drawn)
    assert re.findall(r'class="name"[^>]*>([^<]*)<', picture) == [
        name for names in reversed(drawn.values()) for name in names
    ]
    assert re.findall(r'class="number"[^>]*>(\d+)<', picture) == [str(level) for level in reversed(drawn)]


def test_no_package_is_drawn_beyond_the_edge_of_the_picture():
    picture = levels.draw_levels(levels.read_levels((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")))
    (width, height) = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0])
    boxes = re.findall(r'class="package" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', picture)
    assert all(float(x) + float(w) <= width and float(y) + float(h) <= height for x, y, w, h in boxes)


class TestHook:
    @pytest.fixture
    def hook(self):
        pytest.importorskip("mkdocs")
        return importlib.import_module("hook")

    @pytest.mark.slow
    def test_it_adds_the_notebooks_and_what_stands_at_the_root(self):
        pytest.importorskip("mkdocs")
        from mkdocs.config import load_config
        from mkdocs.structure.files import Files

        config = load_config(str(ROOT / "mkdocs.yml"))
        files = config.plugins.run_event("files", Files([]), config=config)
        pages = {file.src_uri for file in files.documentation_pages()}
        assert pages == GENERATED | {page for page in NAV if page.endswith(".ipynb")}
        added = {file.src_uri: file for file in files}
        assert added["notebooks/quickstart.ipynb"].url == "notebooks/quickstart/"
        stored = (ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8")
        assert added["notebooks/download/quickstart.ipynb"].content_string == stored
        assert added["changelog.md"].content_string.startswith("# Changelog")
        assert "<svg" in added["images/levels.svg"].content_string

    @pytest.mark.slow
    def test_the_page_of_benchmarks_has_the_results_where_there_are_any(self, hook, tmp_path):
        results = tmp_path / "RESULTS.md"
        assert "python -m benchmarks" in hook.read_results(results)
        results.write_text(
            "# Results\n\n## Bytes\n\n![bytes](plots/bytes.png) of [steps](README.md)\n", encoding="utf-8"
        )
        text = hook.read_results(results)
        assert text == "\n## Bytes\n\n![bytes](images/benchmarks/bytes.png) of [steps](benchmarks-notes.md)\n"

    def test_the_page_of_benchmarks_has_a_place_for_the_results(self, hook):
        assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").count(hook.RESULTS_MARK) == 1

    def test_the_address_of_the_repository_is_that_of_the_package(self, hook):
        assert f'repository = "{hook.find_repository()}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
