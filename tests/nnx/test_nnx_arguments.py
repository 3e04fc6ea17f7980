"""Objects of nnx that a caller hands to a policied function or module: what the call writes lands in them."""

import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_models import BF16_INSIDE, X, rngs

import jmp_policy as jmp

BOUNDARIES = {
    "with_policy": lambda fun: jmp.with_policy(fun, BF16_INSIDE),
    "infer": lambda fun: jmp.with_policy(fun, "infer"),
    "force_full_precision": jmp.force_full_precision,
}


@pytest.mark.slow
@pytest.mark.parametrize("boundary", BOUNDARIES.values(), ids=BOUNDARIES)
def test_rngs_and_streams_passed_to_a_function_advance(boundary):
    streams = nnx.Rngs(params=0, dropout=1)
    draw = boundary(lambda x, streams, stream: [x, streams.params(), stream()])
    draw(X, streams, streams.dropout)
    assert int(streams.params.count[...]) == int(streams.dropout.count[...]) == 1


@pytest.mark.parametrize("boundary", BOUNDARIES.values(), ids=BOUNDARIES)
def test_a_function_writes_to_the_variables_it_was_given_and_narrows_none(boundary):
    mean = nnx.BatchStat(jnp.array(1.0 + 2.0**-20))

    def count(x, stats):
        assert stats["mean"][...].dtype == jnp.float32
        stats["mean"][...] += 1
        return x

    boundary(count)(X, {"mean": mean})
    assert float(mean[...]) == 2.0 + 2.0**-20


@pytest.mark.slow
def test_a_model_has_no_say_in_the_dtype_that_an_island_returns():
    model = nnx.Linear(4, 4, rngs=rngs())
    assert jmp.force_full_precision(lambda model, x: model(x))(model, X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_variable_has_no_say_in_the_dtype_that_is_inferred():
    weight = nnx.Param(jnp.ones(4))
    seen = jmp.with_policy(lambda weight, x: str(x.dtype), "infer")(weight, X.astype(jnp.float16))
    assert seen == "float16"
