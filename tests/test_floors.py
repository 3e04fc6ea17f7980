"""The house: a module imports only from floors below its own, and only public JAX."""

import ast
from pathlib import Path

import pytest

import jmp_policy

PACKAGE = Path(jmp_policy.__file__).parent

# The longest prefix decides. Within one floor, files of one package may import each other.
FLOORS = {
    "_dtypes": 0,
    "_memory": 0,
    "_made_classes": 0,
    "_errors": 0,
    "_messages": 0,
    "_scale_settings": 0,
    "_once": 0,
    "_class_alias": 0,
    "_tree": 0,
    "_rounding": 0,
    "_loss_scale": 1,
    "_float8_format": 1,
    "_formats": 1,
    "_overwrite": 1,
    "_policy": 2,
    "_scaled_state": 2,
    "_grammar": 3,
    "_default": 3,
    "_policy_map": 3,
    "_get_policy": 4,
    "_recursion": 4,
    "_boundary": 5,
    "_carry": 5,
    "_full_precision": 5,
    "_grad": 5,
    "_param_casts": 5,
    "interpreter": 5,
    "optim": 6,
    "autocast": 6,
    "numerics": 6,
    "quant": 6,
    "sharding": 6,
    "explanation": 6,
    "_explain": 7,
    "linen": 7,
    "nnx": 7,
    "compat": 8,
    "cli": 9,
    "demo": 9,
    "__main__": 9,
}

# Files of one floor that build on each other, in this order.
SAME_FLOOR = [("_tree", "_dtypes"), ("_tree", "_memory"), ("_made_classes", "_memory"), ("_rounding", "_dtypes"),
              ("_scale_settings", "_messages"), ("_dtypes", "_messages"),
              ("_once", "_messages"), ("_formats", "_float8_format"), ("_policy_map", "_grammar"),
              ("_policy_map", "_default"), ("_default", "_grammar"), ("numerics", "explanation"),
              ("numerics", "autocast"), ("quant", "explanation"), ("cli", "demo"), ("__main__", "cli")]  # fmt: skip

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top(name: str) -> str:
    return name.split(".")[0]


def imported(path: Path) -> set[str]:
    """What a file imports, absolute, wherever in the file the import stands; types alone do not count."""
    tree = ast.parse(path.read_text())
    package = ["jmp_policy", *path.relative_to(PACKAGE).parent.parts]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            is_package = module == "jmp_policy" or (node.level and not node.module)
            names |= {f"{module}.{alias.name}" for alias in node.names} if is_package else {module}
    return names


def test_every_file_stands_on_a_floor():
    assert [name_of(path) for path in FILES if top(name_of(path)) not in FLOORS] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path):
    here = top(name_of(path))
    inside = {top(name.removeprefix("jmp_policy.")) for name in imported(path) if name.startswith("jmp_policy.")}
    if here in ("cli", "demo", "__main__"):
        inside &= set(FLOORS)  # they may import the package itself: `import jmp_policy as jmp`
    above = {name for name in inside - {here} if FLOORS[name] >= FLOORS[here] and (here, name) not in SAME_FLOOR}
    assert above == set()


@pytest.mark.parametrize("path", [*FILES, PACKAGE / "__init__.py"], ids=name_of)
def test_only_public_jax_is_read(path):
    source = path.read_text()
    assert "jax._src" not in source
    assert not [name for name in imported(path) if name.startswith("jaxlib")]


@pytest.mark.parametrize("path", [path for path in FILES if FLOORS[top(name_of(path))] <= 5], ids=name_of)
def test_the_core_imports_neither_flax_nor_optax(path):
    assert not [name for name in imported(path) if top(name) in ("flax", "optax", "matplotlib", "orbax", "rich")]


@pytest.mark.parametrize("path", [path for path in FILES if FLOORS[top(name_of(path))] < 9], ids=name_of)
def test_the_library_never_imports_the_demo(path):
    assert not [name for name in imported(path) if name.startswith(("jmp_policy.demo", "jmp_policy.cli"))]


def test_the_adapters_are_the_one_import_by_name():
    by_name = [name_of(path) for path in FILES if "import_module(" in path.read_text()]
    # A map's config names the types of its keys; the state of float8 layers has a dtype of Flax's.
    assert set(by_name) <= {"_boundary", "_policy_map", "_overwrite"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_asserted_on_and_nothing_is_left_to_do(path):
    tree = ast.parse(path.read_text())
    if FLOORS[top(name_of(path))] <= 5:
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert "TODO" not in path.read_text()
