"""The examples of docstrings as blocks: Markdown takes `>>>` for quotations."""

import griffe


def fence_examples(docstring: str) -> str:
    """Puts each example into a block of its own.

    >>> fence_examples("One.\\n\\n>>> 1 + 1\\n2\\n\\nTwo.").splitlines()
    ['One.', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'Two.']
    """
    lines: list[str] = []
    indent: str | None = None  # of the block that is being read
    for line in [*docstring.splitlines(), ""]:
        if indent is None and line.lstrip().startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            lines += [""] if lines and lines[-1].strip() else []
            lines.append(f"{indent}```pycon")
        elif indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines[:-1])


class FenceExamples(griffe.Extension):
    """Has mkdocstrings read docstrings with their examples in blocks; `mkdocs.yml` names it."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Fences the examples of a docstring, so that Markdown renders them as code."""
        if obj.docstring:
            obj.docstring.value = fence_examples(obj.docstring.value)
