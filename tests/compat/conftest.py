"""Takes back what a test sets as the default policy."""

from collections.abc import Iterator

import pytest

import jmp_policy as jmp


@pytest.fixture(autouse=True)
def _restored_default() -> Iterator[None]:
    before = jmp.default_policy()
    yield
    jmp.set_default_policy(before)
