"""What pickles without a policy pickles with one, by `pickle` and by value, into this process and others."""

import abc
import copy
import os
import pickle
import subprocess
import sys

import cloudpickle
import jax.numpy as jnp
import pickled
import pytest
from pickled import BY_VALUE, CASES, X

import jmp_policy as jmp


@pytest.fixture
def by_value():
    """Pickles what the file defines by value, as cloudpickle does with what a notebook defines."""
    cloudpickle.register_pickle_by_value(pickled)
    yield lambda thing: pickle.loads(cloudpickle.dumps(thing))
    cloudpickle.unregister_pickle_by_value(pickled)


def same(run, thing, other):
    out, again = run(thing), run(other)
    assert out.dtype == again.dtype == jnp.float16
    return bool((out == again).all())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_has_a_policy_comes_back_out_of_a_pickle(case):
    make, run = CASES[case]
    thing = make()
    assert same(run, thing, pickle.loads(pickle.dumps(thing)))


@pytest.mark.parametrize("case", [next(iter(CASES)), *BY_VALUE])
def test_what_has_a_policy_comes_back_out_of_a_pickle_by_value(case, by_value):
    make, run = (CASES | BY_VALUE)[case]
    thing = make()
    assert same(run, thing, by_value(thing))


@pytest.mark.slow
def test_classes_come_back_as_the_classes_that_they_were():
    classes = [pickled.Decorated, pickled.OfDecorated, pickled.NNXDecorated, jmp.with_policy(pickled.Net, "bfloat16")]
    models = [pickled.nnx_model(policy) for policy in (pickled.POLICY, pickled.INT8, pickled.FLOAT8, pickled.MAP)]
    decorated = jmp.with_policy(pickled.NNXNet, "bfloat16")
    for kind in (*classes, *map(type, models), decorated, type(decorated(pickled.nnx.Rngs(0)))):
        assert pickle.loads(pickle.dumps(kind)) is kind
        assert copy.deepcopy(kind) is kind


def test_a_function_that_came_out_of_a_pickle_casts(by_value):
    @jmp.with_policy("bfloat16")
    def recurse(x, depth):
        return recurse(x.astype(jnp.float32), depth - 1) if depth else str(x.dtype)

    assert by_value(recurse)(X, 0) == "bfloat16"
    assert by_value(recurse)(X, 1) == "bfloat16"


@pytest.mark.slow
def test_a_policied_class_may_be_mixed_with_one_of_another_metaclass():
    class Both(pickled.Decorated, metaclass=abc.ABCMeta):
        pass

    assert pickled.run_module(Both()).dtype == jnp.float16


CHILD = """
import pickle, sys
for thing in pickle.load(open(sys.argv[1], "rb")):
    run, thing = thing
    print(run(thing).dtype)
"""


@pytest.mark.slow
def test_another_process_runs_what_was_pickled_by_value(by_value, tmp_path):
    cases = {name: case for name, case in (CASES | BY_VALUE).items() if name not in FEW}
    things = [(run, make()) for make, run in cases.values()]
    (tmp_path / "things").write_bytes(cloudpickle.dumps(things))
    child = [sys.executable, "-c", CHILD, str(tmp_path / "things")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(child, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.stdout.split() == ["float16"] * len(things), done.stderr


FEW = ("a quantized linen module", "those of a quantized one", "those of a float8 one")
"""What differs from others in this process alone."""
