"""What every test and doctest runs under."""

import jax
import pytest
from public_names import is_public

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def _paste_examples(request: pytest.FixtureRequest) -> None:
    """Runs the examples of public names as a reader does, who pastes them into a Python that has imported nothing.

    Those of private functions have the names of their module.
    """
    if isinstance(request.node, pytest.DoctestItem) and is_public(request.node.dtest.name):
        request.node.dtest.globs.clear()
