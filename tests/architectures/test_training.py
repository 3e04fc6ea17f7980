"""Half precision learns what float32 learns, in architectures as their authors write them.

Compared are final losses: the mean of the last ten of fifty steps, each on a batch that was never trained on, the same
batches in the same order in all runs. Five float32 runs, of five initial parameters, have a mean and a standard
deviation; the mean of five half runs, from the same initial parameters, lies within two such deviations of the mean.
Seeds are fixed, and a program repeats its results to the bit on one kind of machine.

On other machines, which round differently, four of the five architectures stay where they are: they are within a tenth
of a deviation of float32, but for the VAE in float16, which skips its first steps. Runs of ResNet-50 part: rounding
alone takes a seed a deviation or two elsewhere, in float32 as well. Five runs against one is for that; the difference
of two such means, over a deviation estimated from five, is sqrt(2 / 5) t with four degrees of freedom, and exceeds two
in 3 % of draws.
"""

import jax
import pytest
from trained import trained

from benchmarks.architectures._registry import ARCHITECTURES, SMALL_SCALE

pytestmark = pytest.mark.optimized

HALF = ["mixed_bfloat16", "mixed_float16"]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "ResNet-50"])
def test_half_learns_what_float32_learns(name):
    float32 = trained(name, "float32")
    assert float32.final.mean() < 0.65 * float32.losses[:, 0].mean()
    assert not float32.skipped_steps.any()
    for policy in HALF:
        half = trained(name, policy)
        assert abs(half.distance(float32)) < 2.0, policy
        assert (half.losses != float32.losses).any(), policy
        assert {leaf.dtype.name for leaf in jax.tree.leaves(half.params)} == {"float32"}


@pytest.mark.slow
def test_a_smaller_first_scale_saves_the_steps_that_a_summed_loss_would_overflow():
    """The VAE's loss is a sum over 256 pixels, and 2**15 times that is beyond float16."""
    default = trained("VAE", "mixed_float16")
    saved = trained("VAE", "mixed_float16", float(SMALL_SCALE.loss_scale))
    float32 = trained("VAE", "float32")
    assert default.skipped_steps.min() >= 1
    assert not saved.skipped_steps.any()
    assert abs(saved.distance(float32)) < 0.25 < default.distance(float32)
