"""`help` of a package lists what is in it: pydoc itself leaves out names that a package imports."""

import importlib
import inspect
import pydoc

import pytest
from public_names import list_exported

ROOMS = ("linen", "nnx", "numerics", "optim", "quant", "sharding")
PACKAGES = ("jmp_policy", *(f"jmp_policy.{name}" for name in ROOMS))


@pytest.mark.parametrize("name", PACKAGES)
def test_help_names_all_that_a_package_has(name):
    package = importlib.import_module(name)
    public = [name for name, value in list_exported(package).items() if not inspect.ismodule(value)]
    shown = pydoc.plaintext.document(package)
    assert public
    assert [name for name in public if f"`{name}`" not in shown] == []


def test_help_names_the_packages():
    import jmp_policy as jmp

    assert [name for name in jmp._LAZY if f"`{name}`" not in jmp.__doc__] == []
