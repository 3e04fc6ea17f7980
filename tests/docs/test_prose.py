"""The prose of the package reads as plain English: turns of phrase that need a second reading are counted."""

import ast
import io
import itertools
import json
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
AVOIDED = re.compile(
    r"""^(What|Which|Whether|Why|How|Where)\ (?!.*\?)                      # a clause in place of a verb or a noun
    |\bwhat\ (is|are|was|were|it|they|the|an?|he|has|made|makes|leaves|enters|follows|comes|runs|holds)\b(?!.*\?)
    |\bof\ (which|whose|what)\b|\bas\ it\ (is|was|has)\b|\bas\ they\ (are|were)\b|\bthose\ of\b|\bthat\ of\b
    |\b(so\ many|hands?\ over|mends?|mended|cures?|bad\ steps?|products?\ of\ matrices|formats?\ of\ blocks)\b
    |\b(is|are)\ no\ (?!longer|more|less|need)
    |(?<![\w.\d])\.\d+\b                                                   # a decimal without a zero
    |\b(bytes|bits)\ an?\ (parameter|element|weight|number)\b""",
    re.VERBOSE,
)
MOST = 1.0
"""Matches in 1,000 words."""


def read_source(kind: str, source: str) -> Iterator[str]:
    if kind == "comments":
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        yield from (token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)
        return
    for node in ast.walk(ast.parse(source)):
        if kind == "docstrings" and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            lines = (ast.get_docstring(node) or "").splitlines()
            yield from (line for line in lines if not line.strip().startswith((">>>", "...")))
        elif kind == "errors" and isinstance(node, ast.Raise) and node.exc is not None:
            texts = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str) and " " in text)


def read_page(text: str) -> Iterator[str]:
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (re.sub(r"`[^`]*`", "X", line) for line in text.splitlines())


def read(kind: str) -> Iterator[str]:
    if kind == "pages":
        for page in [*ROOT.glob("[ACR]*.md"), *sorted((ROOT / "docs").rglob("*.md"))]:
            if page.name != "CHANGELOG.md":
                yield from read_page(page.read_text(encoding="utf-8"))
    elif kind == "notebooks":
        for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            for cell in cells:
                yield from read_page("".join(cell["source"])) if cell["cell_type"] == "markdown" else ()
    else:
        for folder in ("jmp_policy", "examples"):
            for path in sorted((ROOT / folder).rglob("*.py")):
                yield from read_source(kind, path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["docstrings", "errors", "comments", "pages", "notebooks"])
def test_prose_has_few_turns_of_phrase_that_need_a_second_reading(kind):
    lines = [line.strip() for line in read(kind)]
    found = [line for line in lines if AVOIDED.search(line)]
    assert len(found) <= MOST * sum(len(line.split()) for line in lines) / 1000, found


def test_a_turn_of_phrase_is_found():
    for sentence in (
        "What is kept for the backward pass.", "Mends what is read.", "Returns those of the layer.",
        "5 bytes a parameter", "An error of .3 %", "This is no number", "It hands over its sums",
    ):  # fmt: skip
        assert AVOIDED.search(sentence), sentence


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["docstrings", "pages"])
def test_no_two_powers_of_a_sentence_make_bold_text(kind):
    """Markdown shows `2**15 to 2**24` as bold text between the powers unless they are code."""
    text = "\n".join(line.strip() for line in read(kind) if not line.lstrip().startswith("|"))
    lines = re.sub(r"`[^`\n]*(\n[^`\n]+)?`", "X", text).splitlines()
    pairs = [f"{first} {second}" for first, second in itertools.pairwise(lines)]
    assert [pair for pair in pairs if len(re.findall(r"\w\*\*-?\w", pair)) > 1] == []
