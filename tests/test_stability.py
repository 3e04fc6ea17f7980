"""The names of 0.4.0 in core, and their parameters, are still there, as `docs/reference/stability.md` promises."""

import importlib
import inspect
import pathlib
from collections.abc import Iterator
from inspect import Parameter

from public_names import list_exported

PROMISED = pathlib.Path(__file__).parent / "names_of_0_4_0.txt"
VAR_POSITIONAL, VAR_KEYWORD = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
PACKAGES = ("", "linen", "nnx", "numerics", "optim", "quant", "sharding", "compat.keras", "compat.torch")


def list_signatures() -> Iterator[str]:
    """Yields a line for each function, class and method: its name, and those of its parameters."""
    for package in PACKAGES:
        module = importlib.import_module(f"jmp_policy.{package}".rstrip("."))
        for name, value in list_exported(module).items():
            if not getattr(value, "__module__", "").startswith("jmp_policy"):
                continue
            yield describe(f"{package}.{name}".lstrip("."), value)
            for method, function in vars(value).items() if inspect.isclass(value) else ():
                if not method.startswith("_"):
                    yield describe(f"{package}.{name}.{method}".lstrip("."), function)


def describe(name: str, value: object) -> str:
    function = getattr(value, "__func__", value)  # of a class method
    parameters = inspect.signature(function).parameters.values() if callable(function) else ()
    named = [parameter.name for parameter in parameters if parameter.kind not in (VAR_POSITIONAL, VAR_KEYWORD)]
    return " ".join([name, *(each for each in named if each not in ("self", "cls") and not each.startswith("_"))])


def test_no_name_and_no_parameter_of_0_4_0_is_gone():
    """One that changes gives a `DeprecationWarning` for a version, and only then leaves the list."""
    names = {name: set(parameters) for name, *parameters in map(str.split, list_signatures())}
    promised = [line.split() for line in PROMISED.read_text(encoding="utf-8").splitlines()]
    assert [name for name, *_ in promised if name not in names] == []
    assert [(name, gone) for name, *parameters in promised if (gone := set(parameters) - names[name])] == []
    assert len(promised) > 300


if __name__ == "__main__":
    PROMISED.write_text("\n".join(sorted(list_signatures())) + "\n", encoding="utf-8")
