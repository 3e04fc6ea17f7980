"""A notebook as a page: its text, its code, and the outputs that are stored in it. Nothing is run."""

import base64
import dataclasses
import json
import re
from collections.abc import Callable

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # colors of a terminal


@dataclasses.dataclass
class NotebookPage:
    """A notebook as a page of the site.

    Attributes:
      markdown: the page. An HTML output is one paragraph of it, a word that `insert_html` knows.
      pictures: the PNGs that it shows, by their names, which the markdown gives relative to the page.
      html: the HTML outputs, by their words.
    """

    markdown: str
    pictures: dict[str, bytes]
    html: dict[str, str]

    def insert_html(self, content: str) -> str:
        """Inserts HTML outputs into the rendered page. Markdown would change them."""
        for word, html in self.html.items():
            content = content.replace(f"<p>{word}</p>", f'<div class="notebook-html" data-search-exclude>{html}</div>')
        return content


def make_page(text: str, stem: str, mend: Callable[[str], str] = str) -> NotebookPage:
    """Converts the JSON of a notebook named `stem` into a page; `mend` rewrites the links of its text cells.

    >>> cells = [{"cell_type": "markdown", "source": ["# Title"]}]
    >>> cells += [{"cell_type": "code", "source": "print(1)", "outputs": [{"output_type": "stream", "text": "1"}]}]
    >>> print(make_page(json.dumps({"cells": cells}), "sums").markdown)
    # Title
    <BLANKLINE>
    [Download this notebook](download/sums.ipynb){ .notebook-download }
    <BLANKLINE>
    ```python
    print(1)
    ```
    <BLANKLINE>
    ```text
    1
    ```
    """
    page = NotebookPage("", {}, {})
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = _join(cell["source"])
        if cell["cell_type"] == "code":
            parts.append(_fence(source, "python"))
            parts += [_show(output, page, stem) for output in cell["outputs"]]
        else:
            parts.append(mend(source))
    parts.insert(1, f"[Download this notebook](download/{stem}.ipynb){{ .notebook-download }}")
    page.markdown = "\n\n".join(parts)
    return page


def _show(output: dict, page: NotebookPage, stem: str) -> str:
    """The Markdown of one output; what Markdown cannot hold goes into the page."""
    if output["output_type"] == "stream":
        return _fence(_join(output["text"]), "text")
    data = output["data"]
    if "text/html" in data:
        word = f"output-{len(page.html) + 1}-of-{stem.replace('_', '-')}"
        page.html[word] = _join(data["text/html"])
        return word
    if "image/png" in data:
        name = f"pictures/{stem}-{len(page.pictures) + 1}.png"
        page.pictures[name] = base64.b64decode(_join(data["image/png"]))
        return f"![The plot that this cell draws]({name}){{ .notebook-plot }}"
    return _fence(_join(data["text/plain"]), "text")


def _join(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def _fence(text: str, language: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{_ESCAPES.sub('', text).rstrip()}\n{fence}"
