"""ARCHITECTURE.md speaks of files and functions that are there, and of every room."""

import ast
import re
from pathlib import Path

import pytest

import jmp_policy

PACKAGE = Path(jmp_policy.__file__).parent
TEXT = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
PLACES = re.findall(r"`([\w/]+\.py)`: (`\w+`(?:, `\w+`)*)", TEXT)
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())


def names_in(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_it_names_places():
    assert len(PLACES) > 20


def test_every_function_it_names_is_where_it_says():
    missing = []
    for file, names in PLACES:
        known = names_in(PACKAGE / file) if (PACKAGE / file).exists() else set()
        missing += [f"{file}: {name}" for name in re.findall(r"\w+", names) if name not in known]
    assert missing == []


def test_every_file_it_names_exists():
    files = set(re.findall(r"`([\w/]+\.py)`", TEXT))
    places = (PACKAGE, PACKAGE.parent)
    assert [file for file in sorted(files) if not any((place / file).exists() for place in places)] == []


@pytest.mark.parametrize("room", [room for room in ROOMS if not room.startswith("__")])
def test_it_has_a_place_for_every_room(room):
    assert f"`{room}`" in TEXT or f"`{room}/`" in TEXT


def test_all_laws_are_there_that_tests_cite():
    sources = [path.read_text() for path in (PACKAGE.parent / "tests").rglob("*.py")]
    cited = {int(number) for source in sources for number in re.findall(r"\bLaw (\d+)", source)}
    assert cited <= {int(number) for number in re.findall(r"^(\d+)\. \*", TEXT, re.MULTILINE)}
