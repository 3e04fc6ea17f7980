"""Links of files that were written for the repository, on a page of the site."""

import posixpath
import re

_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "ARCHITECTURE.md": "architecture.md",
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks-notes.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
}
_FOLDERS = {"docs/": "", "notebooks/": "notebooks/", "benchmarks/plots/": "images/benchmarks/"}


def mend_links(text: str, path: str, repository: str, root: str = "") -> str:
    """Converts the links of a repository file to links of a site page; `root` is the page's path to the site root.

    Links to files without a page lead to the repository, or become the file's path if it has no address.

    >>> mend_links("[meshes](../docs/mesh.md#some) and ![losses](plots/loss.png)", "benchmarks/RESULTS.md", "")
    '[meshes](mesh.md#some) and ![losses](images/benchmarks/loss.png)'
    >>> mend_links("[rules](tests/test_doors.py)", "ARCHITECTURE.md", "")
    'rules (`tests/test_doors.py`)'
    >>> mend_links("[rules](tests/test_doors.py)", "ARCHITECTURE.md", "https://host/owner/name")
    '[rules](https://host/owner/name/blob/HEAD/tests/test_doors.py)'

    Links within the same folder stay as they are, and so does code that looks like a link.

    >>> mend_links("[laws](../ARCHITECTURE.md#the-laws), [mesh](mesh.md), f[0](x)", "docs/how-it-works.md", "")
    '[laws](architecture.md#the-laws), [mesh](mesh.md), f[0](x)'
    """

    def mend(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        file, anchor, name = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
        if path.startswith("docs/") and file.startswith("docs/"):
            return link[0]
        page = _find_page(file)
        if page is not None:
            return f"{image}[{label}]({root}{page}{anchor}{name})"
        if repository:
            return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/HEAD/{file}{anchor}{name})"
        return "" if image else f"{label} (`{file}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", mend, text)


def _find_page(file: str) -> str | None:
    if file in _PAGES:
        return _PAGES[file]
    for folder, on_site in _FOLDERS.items():
        if file.startswith(folder):
            return on_site + file.removeprefix(folder)
    return None
