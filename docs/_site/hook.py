"""Adds to the pages of docs/: notebooks, changes, ARCHITECTURE.md, and measured results.

MkDocs calls the functions `on_*` while it builds; `mkdocs.yml` names this file.
"""

import functools
import pathlib
import tomllib

from levels import draw_levels, read_levels
from links import mend_links
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_page import NotebookPage, make_page

ROOT = pathlib.Path(__file__).parent.parent.parent
WHOLE_FILES = {
    "CHANGELOG.md": "changelog.md",
    "ARCHITECTURE.md": "architecture.md",
    "benchmarks/README.md": "benchmarks-notes.md",
}
"""Files of the repository that are pages as they are."""

RESULTS_MARK = "<!-- results -->"
"""Where docs/benchmarks.md has the results."""

SEARCH_BOOSTS = {"start": 2.0, "guides": 2.0, "faq": 2.0, "notebooks": 0.5, "benchmarks": 0.5, "architecture": 0.5}
"""Weights of pages in the search, by the beginning of their paths: guides come before notebooks and benchmarks."""

NO_RESULTS = """!!! note "Nothing has been measured on this checkout"

    `python -m benchmarks` measures, and writes the file that is shown here, `benchmarks/RESULTS.md`.
"""

_NOTEBOOKS: dict[str, NotebookPage] = {}


class NotebookFile(File):
    """A notebook that MkDocs takes for a page, so that other pages link to `notebooks/name.ipynb`."""

    def is_documentation_page(self) -> bool:
        """True, whatever the name ends with."""
        return True


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files that stand elsewhere in the repository."""
    repository = find_repository()
    mend_notebook = functools.partial(mend_links, path="notebooks/", repository=repository, root="../")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        page = _NOTEBOOKS[f"notebooks/{path.name}"] = make_page(text, path.stem, mend_notebook)
        files.append(NotebookFile.generated(config, f"notebooks/{path.name}", content=page.markdown))
        files.append(File.generated(config, f"notebooks/download/{path.name}", content=text))
        for name, picture in page.pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    for name, uri in WHOLE_FILES.items():
        text = mend_links((ROOT / name).read_text(encoding="utf-8"), name, repository)
        files.append(File.generated(config, uri, content=text))
    levels = draw_levels(read_levels((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")))
    files.append(File.generated(config, "images/levels.svg", content=levels))
    for path in sorted((ROOT / "benchmarks" / "plots").glob("*.png")):
        files.append(File.generated(config, f"images/benchmarks/{path.name}", content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Writes the results into docs/benchmarks.md, converts links, and sets the weight of the page in the search."""
    boosts = [boost for start, boost in SEARCH_BOOSTS.items() if page.file.src_uri.startswith(start)]
    page.meta["search"] = {"boost": boosts[0] if boosts else 1.0}
    if page.file.src_uri == "benchmarks.md":
        markdown = markdown.replace(RESULTS_MARK, read_results(ROOT / "benchmarks" / "RESULTS.md"))
    repository = find_repository()
    if (ROOT / "docs" / page.file.src_uri).exists():
        markdown = mend_links(markdown, f"docs/{page.file.src_uri}", repository, "../" * page.file.src_uri.count("/"))
    return markdown


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts the tables into notebooks that they print as HTML."""
    notebook = _NOTEBOOKS.get(page.file.src_uri)
    return html if notebook is None else notebook.insert_html(html)


def read_results(path: pathlib.Path) -> str:
    """Returns the measured results without their title, or how to measure them."""
    if not path.exists():
        return NO_RESULTS
    text = mend_links(path.read_text(encoding="utf-8"), "benchmarks/RESULTS.md", find_repository())
    return text.partition("\n")[2] if text.startswith("# ") else text


def find_repository() -> str:
    """The address in pyproject.toml, or nothing while the project has no home."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"].rstrip("/")
