"""What is counted of programs for devices that are not there: the same as by hand, and of the same programs."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import make_mesh

from benchmarks._scale_model import AXES, GPT, make_step
from benchmarks.scale import FORMATS, MODELS, Figures, make_abstract_mesh, make_table, measure, write_program

FLOAT8_STATE = 3 * (1 + 1024) * 4  # a scale and a history for each of the three operands of a product, in float32
COUNTERS = 3 * 4 + 1  # the steps of AdamW, two counters of skipped steps, and whether the last one was
ONE_TABLE = {"1.3 B": 50_304 * 2048, "407 B": 50_304 * 16_384}
SPLIT = {"1.3 B": 24 * 12 * 2048**2 + ONE_TABLE["1.3 B"], "407 B": 126 * 12 * 16_384**2 + ONE_TABLE["407 B"]}
WHOLE = {"1.3 B": (2 * 24 + 1) * 2048, "407 B": (2 * 126 + 1) * 16_384}
PRODUCTS = {"1.3 B": 24 * 4, "407 B": 126 * 4}


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # for optax's AdamW
        yield


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "format", "shape", "gathered_in", "reduced_in"),
    [
        ("1.3 B", "float32", (1, 8), 4, 4),
        ("407 B", "bf16, reduced in bf16", (8, 512), 2, 2),
        pytest.param("1.3 B", "bf16, reduced in float32", (2, 4), 2, 4, marks=pytest.mark.slow),
        pytest.param("407 B", "float8", (8, 512), 2, 4, marks=pytest.mark.slow),
    ],
)
def test_the_bytes_are_those_that_one_counts_by_hand(model, format, shape, gathered_in, reduced_in):
    (data, fsdp), table, split, whole = shape, ONE_TABLE[model], SPLIT[model], WHOLE[model]
    part = split // fsdp if data > 1 else 0
    float8 = PRODUCTS[model] * FLOAT8_STATE if format == "float8" else 0
    gathered = gathered_in * (2 * (split - table) + table)  # layers again in the backward pass, the table once
    reduced = reduced_in * (split + part + whole)  # scattered along fsdp, the part added along data, norms over both
    ring = lambda bytes, devices: bytes * (devices - 1) // devices
    sent = ring(gathered, fsdp) + ring(reduced_in * split, fsdp) + 2 * ring(reduced_in * part, data)
    sent += 2 * ring(reduced_in * whole + float8, data * fsdp)
    figures = measure(MODELS[model], FORMATS[format], shape)
    assert figures.gathered == gathered
    assert figures.reduced == reduced
    assert 0 <= figures.sent - sent <= 16  # the loss, and the check
    assert figures.state == 12 * (split // fsdp + whole) + COUNTERS + float8
    assert figures.checkpoint == 12 * (split + whole) + COUNTERS + float8


@pytest.mark.exhaustive
def test_the_program_for_devices_is_that_for_none():
    gpt, format = GPT(2, 128), FORMATS["bf16, reduced in float32"]
    there = write_program(gpt, format, make_mesh((2, 2), AXES, axis_types=(AxisType.Auto,) * 2))
    assert "stablehlo.reduce_scatter" in there
    assert there == write_program(gpt, format, make_abstract_mesh((2, 2)))


@pytest.mark.slow
def test_the_programs_for_eight_devices_are_those_for_none():
    """In a process of its own, since this one has four."""
    subprocess.run([sys.executable, "-m", "benchmarks.scale", "compare"], check=True, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["float32", "bf16, reduced in bf16", "float8"])
def test_the_step_learns_a_batch(format):
    mesh = make_mesh((2, 2), AXES, axis_types=(AxisType.Auto,) * 2)
    gpt = GPT(2, 128, context=16, vocabulary=64)
    step, described = make_step(gpt, FORMATS[format], mesh)
    params, state, tokens = jax.tree_util.tree_map_with_path(_fill, described)
    losses = []
    for _ in range(20):
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    assert abs(losses[0] - math.log(64)) < 0.5
    assert losses[-1] < losses[0] - 0.1
    float8 = params["layers"].get("float8")
    assert float8 is None or all(jnp.all(leaf[:, 0] > 0) for leaf in jax.tree.leaves(float8))  # products are in float8


def _fill(path, leaf):
    name, rng = jax.tree_util.keystr(path), np.random.default_rng(0)
    if leaf.dtype == jnp.int32 and leaf.ndim == 2:
        values = rng.integers(0, 64, leaf.shape)
    elif name.startswith("[0]") and "history" not in name:
        values = np.ones(leaf.shape) if "norm" in name or "scale" in name else rng.normal(0, 0.05, leaf.shape)
    else:
        values = np.zeros(leaf.shape)
    return jax.device_put(values.astype(leaf.dtype), leaf.sharding)


def test_formats_that_agree_share_a_row():
    figures = {name: Figures(10**9 * (2 + (name == "float32")), 1, 1, 1, 1) for name in FORMATS}
    lines = make_table({("1.3 B", (2, 4)): figures}).to_markdown().splitlines()
    assert lines[0] == "| bytes | format | 1.3 B, 2 x 4 |"
    assert lines[2] == "| gathered | float32 | 3 GB |"
    assert lines[3].startswith("| gathered | bf16, reduced in float32; bf16, reduced in bf16; float8")
    assert len([line for line in lines if line.startswith("|")]) == 2 + 6
