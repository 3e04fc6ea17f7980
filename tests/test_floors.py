"""The house: a module imports only from floors below its own, and only public JAX."""

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import jmp_policy

PACKAGE = Path(jmp_policy.__file__).parent

# The longest prefix decides. Within one floor, files of one package may import each other.
FLOORS = {
    "_dtypes": 0,
    "_memory": 0,
    "_contexts": 0,
    "_mapped_axes": 0,
    "_made_classes": 0,
    "_messages": 0,
    "_paths": 0,
    "_scale_settings": 0,
    "_float8_state": 0,
    "_trees": 0,
    "_types": 0,
    "_unused_rules": 0,
    "_finite": 0,
    "_rounding": 0,
    "_misuse": 1,
    "_loss_scale": 1,
    "_block_formats": 1,
    "_float8_format": 1,
    "_formats": 1,
    "_policy": 2,
    "_scaled_state": 2,
    "_find_scale": 2,
    "_grammar": 3,
    "_reduce_dtype": 3,
    "_policy_map": 3,
    "_signatures": 4,
    "_get_policy": 4,
    "_adapter": 4,
    "_call_casts": 4,
    "_boundary": 5,
    "_full_precision": 5,
    "_grad": 5,
    "_wide_results": 5,
    "interpreter": 5,
    "reduction": 5,
    "optim": 6,
    "autocast": 6,
    "measurement": 6,
    "statistics": 6,
    "prediction": 6,
    "origins": 6,
    "collectives": 6,
    "numerics": 6,
    "quant": 6,
    "sharding": 6,
    "explanation": 6,
    "report": 6,
    "_explain": 7,
    "checkpoints": 7,
    "linen": 7,
    "nnx": 7,
    "compat": 8,
    "tuning": 8,
    "cli": 9,
    "demo": 9,
    "doctor": 9,
    "__main__": 9,
}

# Files of one floor that build on each other, in this order.
SAME_FLOOR = [("_trees", "_dtypes"), ("_trees", "_float8_state"), ("_trees", "_memory"),
              ("_finite", "_trees"), ("_call_casts", "_adapter"),
              ("_made_classes", "_memory"), ("_rounding", "_dtypes"),
              ("_scale_settings", "_messages"), ("_dtypes", "_messages"),
              ("_block_formats", "_float8_format"), ("_formats", "_block_formats"),
              ("_formats", "_float8_format"), ("_policy_map", "_grammar"),
              ("_get_policy", "_signatures"),
              ("numerics", "explanation"),
              ("numerics", "autocast"), ("autocast", "quant"), ("quant", "explanation"),
              ("statistics", "measurement"), ("statistics", "report"), ("measurement", "quant"),
              ("numerics", "measurement"), ("numerics", "statistics"), ("numerics", "prediction"),
              ("prediction", "autocast"), ("prediction", "measurement"), ("prediction", "statistics"),
              ("prediction", "report"),
              ("numerics", "origins"), ("numerics", "collectives"), ("collectives", "report"),
              ("optim", "origins"), ("optim", "numerics"), ("optim", "sharding"), ("optim", "report"),
              ("explanation", "report"), ("numerics", "report"), ("quant", "report"), ("nnx", "linen"),
              ("_find_scale", "_scaled_state"), ("reduction", "interpreter"), ("_grad", "reduction"),
              ("cli", "demo"), ("demo", "cli"), ("cli", "doctor"), ("demo", "doctor"), ("__main__", "cli")]  # fmt: skip

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top(name: str) -> str:
    return name.split(".")[0]


def floor(path: Path) -> int:
    return FLOORS[top(name_of(path))]


@functools.cache
def imported(path: Path) -> set[str]:
    """What a file imports, absolute, wherever in the file the import stands; types alone do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
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


def offenders(wrong: Callable[[Path], object], files: list[Path] = FILES) -> dict[str, object]:
    """What is wrong with each file, of the files with which anything is."""
    return {name_of(path): found for path in files if (found := wrong(path))}


def circles() -> set[tuple[str, ...]]:
    """The files of one room that reach each other by imports, each circle once, sorted."""
    names = {name_of(path) for path in FILES}

    def file_of(module: str) -> str:
        while module not in names and "." in module:
            module = module.rpartition(".")[0]
        return module

    ours = {name_of(path): [name for name in imported(path) if name.startswith("jmp_policy.")] for path in FILES}
    edges = {name: {file_of(to.removeprefix("jmp_policy.")) for to in found} - {name} for name, found in ours.items()}

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            new = {to for to in edges.get(waiting.pop(), ()) if top(to) == top(start)} - seen
            seen |= new
            waiting += new
        return seen

    reach = {name: reached(name) for name in edges}
    return {tuple(sorted(to for to in reach[name] if name in reach[to])) for name in edges if name in reach[name]}


def test_every_file_stands_on_a_floor():
    assert [name_of(path) for path in FILES if top(name_of(path)) not in FLOORS] == []


def test_imports_go_down():
    def imports_from_above(path):
        here = top(name_of(path))
        inside = {top(name.removeprefix("jmp_policy.")) for name in imported(path) if name.startswith("jmp_policy.")}
        if here in ("cli", "demo", "doctor", "__main__"):
            inside &= set(FLOORS)  # they may import the package itself: `import jmp_policy as jmp`
        return {name for name in inside - {here} if FLOORS[name] >= FLOORS[here] and (here, name) not in SAME_FLOOR}

    assert offenders(imports_from_above) == {}


def test_no_files_of_a_room_import_each_other_in_a_circle():
    assert circles() == set()


def test_only_public_jax_is_read():
    def private(path):
        jaxlib = {name for name in imported(path) if name.startswith("jaxlib")}
        return jaxlib | ({"jax._src"} if "jax._src" in path.read_text(encoding="utf-8") else set())

    assert offenders(private, [*FILES, PACKAGE / "__init__.py"]) == {}


def test_the_core_imports_neither_flax_nor_optax():
    def heavy(path):
        return {name for name in imported(path) if top(name) in ("flax", "optax", "matplotlib", "orbax", "rich")}

    assert offenders(heavy, [path for path in FILES if floor(path) <= 5]) == {}


def test_the_library_never_imports_the_demo():
    def demo(path):
        above = ("jmp_policy.demo", "jmp_policy.cli", "jmp_policy.doctor")
        return {name for name in imported(path) if name.startswith(above)}

    assert offenders(demo, [path for path in FILES if floor(path) < 9]) == {}


def test_the_doctor_needs_no_extra():
    def extra(path):
        return {name for name in imported(path) if top(name) in ("matplotlib", "orbax") or "demo" in name.split(".")}

    assert offenders(extra, [path for path in FILES if top(name_of(path)) == "doctor"]) == {}


def test_the_adapters_are_the_one_import_by_name():
    by_name = [name_of(path) for path in FILES if "import_module(" in path.read_text(encoding="utf-8")]
    # A map's config names the types of its keys; the state of float8 layers has a dtype of Flax's.
    assert set(by_name) <= {"_adapter", "_policy_map", "_float8_state"}


def test_nothing_is_asserted_on():
    def asserts(path):
        return [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Assert)
        ]

    assert offenders(asserts, [path for path in FILES if floor(path) <= 5]) == {}


def test_nothing_is_left_to_do():
    assert offenders(lambda path: "TODO" in path.read_text(encoding="utf-8")) == {}
