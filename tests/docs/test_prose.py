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
SOURCES = sorted((ROOT / "jmp_policy").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

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


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield from (line for line in text.splitlines() if not line.strip().startswith((">>>", "...")))


def errors(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.value


def comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def prose_of_page(text: str) -> Iterator[str]:
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (re.sub(r"`[^`]*`", "X", line) for line in text.splitlines())


def prose_of_notebook(path: pathlib.Path) -> Iterator[str]:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            yield from prose_of_page("".join(cell["source"]))


def read(kind: str) -> Iterator[str]:
    if kind == "pages":
        for page in PAGES:
            yield from prose_of_page(page.read_text(encoding="utf-8"))
    elif kind == "notebooks":
        for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
            yield from prose_of_notebook(path)
    else:
        find = {"docstrings": docstrings, "errors": errors, "comments": comments}[kind]
        for path in SOURCES:
            source = path.read_text(encoding="utf-8")
            yield from find(source if kind == "comments" else ast.parse(source))


@pytest.mark.parametrize("kind", ["docstrings", "errors", "comments", "pages", "notebooks"])
def test_prose_has_few_turns_of_phrase_that_need_a_second_reading(kind):
    lines = [line.strip() for line in read(kind)]
    found = [line for line in lines if AVOIDED.search(line)]
    words = sum(len(line.split()) for line in lines)
    assert len(found) <= MOST * words / 1000, found


@pytest.mark.parametrize(
    "sentence",
    [
        "What is kept for the backward pass.", "Mends what is read.", "Returns those of the layer.",
        "5 bytes a parameter",
        "An error of .3 %", "This is no number", "It hands over its sums",
    ],
)  # fmt: skip
def test_a_turn_of_phrase_is_found(sentence):
    assert AVOIDED.search(sentence)


@pytest.mark.parametrize("kind", ["docstrings", "pages"])
def test_no_two_powers_of_a_sentence_make_bold_text(kind):
    """Markdown shows `2**15 to 2**24` as bold text between the powers unless they are code."""
    text = "\n".join(line.strip() for line in read(kind) if not line.lstrip().startswith("|"))
    lines = re.sub(r"`[^`\n]*(\n[^`\n]+)?`", "X", text).splitlines()
    pairs = [f"{first} {second}" for first, second in itertools.pairwise(lines)]
    assert [pair for pair in pairs if len(re.findall(r"\w\*\*-?\w", pair)) > 1] == []
