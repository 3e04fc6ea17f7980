"""Packages import each other only through their `__init__`, from lower levels, without circles, and only public JAX."""

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import jmp_policy

PACKAGE = Path(jmp_policy.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
LEVELS = {
    "_base": 0,
    "loss_scale": 1,
    "policy": 2,
    "modules": 3,
    "report": 3,
    "_jaxpr": 4,
    "gradients": 5,
    "quant": 5,
    "sharding": 5,
    "autocast": 6,
    "numerics": 7,
    "optim": 8,
    "linen": 9,
    "nnx": 9,
    "checkpoints": 9,
    "compat": 9,
    "contrib": 10,
    "cli": 11,
    "__main__": 12,
}
"""A package imports only from packages of lower levels."""

CORE = ("_base", "loss_scale", "policy", "modules", "_jaxpr", "gradients")
"""Packages that import neither Flax nor optax."""

PROGRAMS = ("cli", "__main__")
"""Packages that may import `jmp_policy` itself."""


class Import(NamedTuple):
    """One name that a file imports from this package.

    Attributes:
      to: the file that it is imported from.
      name: the name.
      is_late: True if the import stands in a function or under `TYPE_CHECKING`.
    """

    to: Path
    name: str
    is_late: bool


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported(path: Path) -> tuple[Import, ...]:
    found = []

    def visit(node: ast.AST, is_late: bool) -> None:
        for child in ast.iter_child_nodes(node):
            is_type = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body
            if isinstance(child, ast.ImportFrom):
                found.extend(read(child, is_late or is_type))
            visit(child, is_late or is_type or isinstance(child, ast.FunctionDef))

    def read(node: ast.ImportFrom, is_late: bool) -> Iterator[Import]:
        words = (node.module or "").split(".") if node.module else []
        if node.level:
            base = path.parents[node.level - 1].joinpath(*words)
        elif words[:1] == ["jmp_policy"]:
            base = PACKAGE.joinpath(*words[1:])
        else:
            return
        for alias in node.names:
            places = (
                base / f"{alias.name}.py",
                base / alias.name / "__init__.py",
                base.with_suffix(".py"),
                base / "__init__.py",
            )
            to = next(place for place in places if place.exists() and place != PACKAGE.with_suffix(".py"))
            yield Import(to, alias.name, is_late)

    visit(tree_of(path), False)
    return tuple(found)


def offenders(wrong: Callable[[Path], object], files: list[Path] = FILES) -> dict[str, object]:
    """Maps the name of each file for which `wrong` returns anything to what it returns."""
    return {name_of(path): found for path in files if (found := wrong(path))}


def test_other_packages_are_imported_through_their_doors():
    def past_doors(path):
        others = [one for one in imported(path) if one.to.parent not in path.parents]
        return {one.name for one in others if one.to.name != "__init__.py" or one.name.startswith("_")}

    assert offenders(past_doors) == {}


def find_circles(edges: dict[str, set[str]]) -> set[tuple[str, ...]]:
    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    reach = {name: reached(name) for name in edges}
    return {
        tuple(sorted(to for to in reach[name] if name in reach.get(to, ()))) for name in edges if name in reach[name]
    }


def pairs_of(path: Path) -> set[tuple[str, str]]:
    """Returns pairs of the package of a file and each other package that the file imports from."""
    here = package_of(path)
    others = [one.to for one in imported(path) if one.to != PACKAGE / "__init__.py"]
    return {(here, package_of(to)) for to in others} - {(here, here)}


def test_every_package_has_a_level():
    assert {package_of(path) for path in FILES} == set(LEVELS)


def test_packages_import_only_from_lower_levels():
    def imports_from_above(path):
        return {(here, there) for here, there in pairs_of(path) if LEVELS[here] <= LEVELS[there]}

    assert offenders(imports_from_above) == {}


def test_no_file_of_the_library_imports_the_package_itself():
    def imports_all(path):
        return [one.name for one in imported(path) if one.to == PACKAGE / "__init__.py" and one.name != "__version__"]

    assert offenders(imports_all, [path for path in FILES if package_of(path) not in PROGRAMS]) == {}


def test_no_files_import_each_other_in_a_circle():
    edges = {
        name_of(path): {name_of(one.to) for one in imported(path) if not one.is_late} - {name_of(path)}
        for path in FILES
    }
    assert find_circles(edges) == set()


def others(path: Path) -> set[str]:
    """Returns the third-party packages that a file imports from, inside functions too."""
    nodes = list(ast.walk(tree_of(path)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.split(".")[0] for name in names}


def test_only_public_jax_is_read():
    def private(path):
        text = path.read_text(encoding="utf-8")
        return (others(path) & {"jaxlib"}) | {name for name in ("jax._src",) if name in text}

    assert offenders(private, [*FILES, PACKAGE / "__init__.py"]) == {}


def test_the_core_imports_neither_flax_nor_optax():
    heavy = {"flax", "optax", "matplotlib", "orbax", "rich"}
    assert offenders(lambda path: others(path) & heavy, [path for path in FILES if package_of(path) in CORE]) == {}


def test_the_library_never_imports_a_program():
    assert {
        pair for path in FILES for pair in pairs_of(path) if pair[0] not in PROGRAMS and pair[1] in PROGRAMS
    } == set()


def test_the_doctor_needs_no_extra():
    extra = {"matplotlib", "orbax"}
    assert offenders(lambda path: others(path) & extra, [PACKAGE / "cli" / "_doctor.py"]) == {}


@pytest.mark.parametrize("package", ["jmp_policy", "jmp_policy.autocast", "jmp_policy.numerics", "jmp_policy.optim"])
def test_a_type_checker_reads_the_names_that_a_package_loads_late(package):
    module = importlib.import_module(package)
    nodes = [node for node in ast.walk(tree_of(Path(str(module.__file__)))) if isinstance(node, ast.ImportFrom)]
    read = {alias.asname for node in nodes for alias in node.names if alias.asname and alias.asname[0] != "_"}
    unlisted = {
        name for name in read - {*dir(module)} if not inspect.isroutine(getattr(module, name))
    }  # results, states
    shown = {name for name in dir(module) if name[0] != "_" and not inspect.ismodule(getattr(module, name))}
    modules = {name for name in read if inspect.ismodule(getattr(module, name))}
    assert read - modules - unlisted == shown
    assert modules <= set(dir(module))


def test_few_files_import_by_name():
    by_name = {name_of(path) for path in FILES if "import_module(" in path.read_text(encoding="utf-8")}
    # Lazy packages, Flax's adapters, the types of a saved map, and the dtype of the state of float8 layers.
    assert by_name <= {"_base._lazy", "modules._adapter", "policy._map_keys", "_base._float8_state"}


def test_nothing_is_asserted_on():
    def asserts(path):
        return [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]

    assert offenders(asserts, [path for path in FILES if package_of(path) in CORE]) == {}


def test_there_are_at_most_95_public_names():
    """Without `compat`, which has the names of other libraries."""
    packages = ["", ".contrib", ".linen", ".nnx", ".numerics", ".optim", ".quant", ".sharding"]
    modules = [importlib.import_module(f"jmp_policy{package}") for package in packages]
    names = [(m, name) for m in modules for name in dir(m) if name[0] != "_"]
    assert len([name for m, name in names if not inspect.ismodule(getattr(m, name))]) <= 95


def test_compat_torch_lists_what_it_is_for():
    torch = importlib.import_module("jmp_policy.compat.torch")
    assert torch.__all__ == dir(torch) == ["grad_scaler_state_dict", "loss_scale_from_state_dict"]
