"""What a package says of its home: its page, and the links of the README, which are relative in the repository."""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

PLACEHOLDER = "https://github.com/OWNER/REPOSITORY"
"""What the README says in place of an address that it cannot know."""


class PackagePage(MetadataHookInterface):
    """Makes `urls` and `readme` of two addresses under `tool.hatch.metadata.hooks.custom` in pyproject.toml."""

    def update(self, metadata: dict) -> None:
        """Writes both into the metadata of the package."""
        repository = self.config.get("repository", "").rstrip("/")
        text = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = name_pages(repository, self.config.get("documentation", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": mend_links(text, repository)}


def name_pages(repository: str, documentation: str = "") -> dict[str, str]:
    """The pages of the project, none while it has no home; until its site has an address, the README documents it.

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


def mend_links(text: str, repository: str) -> str:
    """Leads relative links to the repository; without one, says where the file stands in the sources.

    >>> mend_links("[on a GPT](notebooks/float8.ipynb)", "https://host/owner/name")
    '[on a GPT](https://host/owner/name/blob/HEAD/notebooks/float8.ipynb)'
    >>> mend_links("[on a GPT](notebooks/float8.ipynb)", "")
    'on a GPT (`notebooks/float8.ipynb`)'
    """

    def mend(link: re.Match[str]) -> str:
        image, label, path = link.groups()
        if repository:
            return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/HEAD/{path})"
        return "" if image else f"{label} (`{path}`)"

    text = re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", mend, text)
    return text.replace(PLACEHOLDER, repository or PLACEHOLDER)
