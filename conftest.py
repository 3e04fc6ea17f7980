"""What every test and doctest runs under."""

import os
import pathlib
import platform
import sys

import hypothesis
import jax
import pytest

ROOT = pathlib.Path(__file__).parent
# Registries and oracles beside the tests are imported by their names, which are all different.
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_site"), str(ROOT / "tests")]
sys.path[3:3] = [str(folder) for folder in (ROOT / "tests").rglob("[!_]*/")]

from public_names import is_public  # noqa: E402

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers and child processes share a GPU
# XLA:CPU rounds float16 arithmetic at other places where a processor has float16 instructions.
if "xla_cpu_max_isa" not in os.environ.get("XLA_FLAGS", "") and platform.machine() in ("x86_64", "AMD64"):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX2".strip()
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)  # other examples each time, and more of them
hypothesis.settings.load_profile("repeat")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_sessionstart() -> None:
    """Has float32 multiplied as float32 where the default is less, as on GPUs; in child processes too."""
    if jax.default_backend() != "cpu":
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
        jax.config.update("jax_default_matmul_precision", "highest")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds doctests to the slow tests, as the pages of the documentation are."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _paste_examples(request: pytest.FixtureRequest) -> None:
    """Runs the examples of public names as a reader does, who pastes them into a Python that has imported nothing.

    Those of private functions have the names of their module.
    """
    if isinstance(request.node, pytest.DoctestItem) and is_public(request.node.dtest.name):
        request.node.dtest.globs.clear()
