"""Build hook: the project URLs, and the README with absolute links."""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PackagePage(MetadataHookInterface):
    """Sets `urls` and `readme` from two addresses under `tool.hatch.metadata.hooks.custom` in pyproject.toml."""

    def update(self, metadata: dict) -> None:
        """Writes both into the package metadata."""
        repository = self.config.get("repository", "").rstrip("/")
        text = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = name_pages(repository, self.config.get("documentation", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, repository)}


def name_pages(repository: str, documentation: str = "") -> dict[str, str]:
    """Returns the project URLs; the README is the documentation until the site has an address.

    >>> name_pages("https://host/owner/name")["Documentation"]
    'https://host/owner/name/blob/HEAD/README.md'
    >>> name_pages("https://host/owner/name", "https://owner.host/name/")["Documentation"]
    'https://owner.host/name/'
    """
    if not repository:
        return {"Documentation": documentation} if documentation else {}
    return {
        "Repository": repository,
        "Documentation": documentation or f"{repository}/blob/HEAD/README.md",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def absolute_links(text: str, repository: str) -> str:
    """Makes relative links absolute; without a repository, replaces a link by its text and path.

    >>> absolute_links("[on a GPT](notebooks/float8.ipynb)", "https://host/owner/name")
    '[on a GPT](https://host/owner/name/blob/HEAD/notebooks/float8.ipynb)'
    >>> absolute_links("[on a GPT](notebooks/float8.ipynb)", "")
    'on a GPT (`notebooks/float8.ipynb`)'
    """

    def absolute(link: re.Match[str]) -> str:
        image, label, path = link.groups()
        if repository:
            return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/HEAD/{path})"
        return "" if image else f"{label} (`{path}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", absolute, text)
