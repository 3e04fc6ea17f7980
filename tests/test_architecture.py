"""ARCHITECTURE.md speaks of files and functions that are there, and of every room."""

import ast
import re
from pathlib import Path

import pytest

import jmp_policy

PACKAGE = Path(jmp_policy.__file__).parent
TEXT = (PACKAGE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
PLACES = re.findall(r"`([\w/]+\.py)`: (`\w+`(?:, `\w+`)*)", TEXT)
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())


def names_in(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_it_names_places():
    assert len(PLACES) > 10


def test_every_function_it_names_is_where_it_says():
    missing = []
    for file, names in PLACES:
        paths = [path for path in (PACKAGE / file, PACKAGE.parent / file) if path.exists()]
        known = names_in(paths[0]) if paths else set()
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
    sources = [path.read_text(encoding="utf-8") for path in (PACKAGE.parent / "tests").rglob("*.py")]
    cited = {int(number) for source in sources for number in re.findall(r"\bLaw (\d+)", source)}
    assert cited <= {int(number) for number in re.findall(r"^(\d+)\. \*", TEXT, re.MULTILINE)}


def test_every_context_and_weak_memory_is_listed_with_its_reason():
    made = r"^(\w+)(?:: [^=]+)? = (?:jax\.make_user_context|contextvars\.ContextVar|weakref\.Weak\w+Dictionary)"
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = [(file, name) for file, source in sources.items() for name in re.findall(made, source, re.MULTILINE)]
    assert len(found) > 10
    assert [place for place in found if not all(f"`{word}`" in TEXT for word in place)] == []
