"""What `reduce_dtype` costs, on a tiny model."""

import jax
import pytest

from benchmarks import reduce_dtype
from benchmarks._compiled import figures
from examples.gpt.model import GPTConfig


@pytest.mark.slow
@pytest.mark.cpu("the figures are those of XLA:CPU")
def test_operations_stay_and_bytes_grow_little():
    config = GPTConfig(width=64, depth=1, heads=4, context=32)
    with jax.numpy_dtype_promotion("standard"):  # as Flax's own code asks for
        compiled = [reduce_dtype.compile_on(jax.devices()[:1], dtype, config) for dtype in (None, "float32")]
    plain, wide = map(figures, compiled)
    assert 0.99 <= wide.flops / plain.flops <= 1.01
    assert wide.bytes_accessed / plain.bytes_accessed <= 1.1
