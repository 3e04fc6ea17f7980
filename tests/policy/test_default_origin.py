"""Law 11: the default policy knows the object of another library that it was made from, by the object's key."""

import jax
import pytest

import jmp_policy as jmp
from jmp_policy.policy import default_origin


@pytest.fixture
def restored_default():
    before = jmp.default_policy()
    yield
    jmp.set_default_policy(before)


class Carrier:
    """A policy of another library."""

    def __jmp_policy__(self):
        return "mixed_bfloat16"


class KeyedCarrier(Carrier):
    """One that is more than its policy; it is compared by its key alone."""

    def __init__(self, key):
        self.key = key

    def __jmp_key__(self):
        return self.key

    __eq__ = __hash__ = None


def test_the_default_policy_knows_the_object_with_a_key_that_it_was_made_from(restored_default):
    keyed = KeyedCarrier("a")
    with jmp.use_policy(keyed):
        assert default_origin() is keyed
        assert jmp.default_policy() is jmp.get_policy("mixed_bfloat16")
        with jmp.use_policy(Carrier()):
            assert default_origin() is None
        keyed.key = "changed"
        assert default_origin() is None
    jmp.set_default_policy(KeyedCarrier("b"))
    assert default_origin().key == "b"


def test_equal_keys_compile_once_and_other_keys_again():
    traced = []
    f = jax.jit(lambda x: traced.append(x) or x)
    for key in ("a", "b", "a", "b"):
        with jmp.use_policy(KeyedCarrier(key)):
            f(1.0)
    assert len(traced) == 2
