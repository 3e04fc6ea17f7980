"""Curves of different number formats are told apart, by people with any color vision, and where they coincide."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D

import jmp_policy as jmp
from jmp_policy.policy._formats import KINDS
from jmp_policy.report import FORMAT_STYLES, OTHER_STYLES, UNSCALED, find_style

STYLES = {**FORMAT_STYLES, **{f"other {index}": style for index, style in enumerate(OTHER_STYLES)}}
PAIRS = [*itertools.combinations(FORMAT_STYLES, 2), *itertools.combinations(list(STYLES)[-len(OTHER_STYLES) :], 2)]

# What linear RGB becomes to people without one kind of cones: Machado, Oliveira and Fernandes, A Physiologically-based
# Model for Simulation of Color Vision Deficiency, 2009, severity 1.
VISIONS = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}

# From linear RGB to cones, and from their cube roots to OKLab: Ottosson, A perceptual color space, 2020.
CONES = [
    [0.41222147, 0.53633254, 0.05144599],
    [0.2119035, 0.68069955, 0.10739696],
    [0.08830246, 0.28171884, 0.62997870],
]
OKLAB = [
    [0.21045426, 0.7936178, -0.00407205],
    [1.9779985, -2.4285922, 0.45059371],
    [0.0259040, 0.78277177, -0.80867577],
]


def see(color, vision):
    """A color as OKLab has it, in which equal distances look alike: 0.02 is just visible."""
    encoded = np.asarray(to_rgb(color))
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(VISIONS[vision]) @ linear, 0, 1)
    return np.asarray(OKLAB) @ np.cbrt(np.asarray(CONES) @ seen)


@pytest.mark.sample(30)
@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_no_two_styles_look_alike(one, other, vision):
    distance = np.linalg.norm(see(STYLES[one].color, vision) - see(STYLES[other].color, vision))
    assert distance > 0.08


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("name", STYLES)
def test_every_style_shows_on_white(name, vision):
    assert np.linalg.norm(see(STYLES[name].color, vision) - see("white", vision)) > 0.2


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_curves_that_coincide_differ_in_dash_and_width(one, other):
    assert STYLES[one].width != STYLES[other].width
    both = STYLES[one].dash, STYLES[other].dash
    assert both[0] != both[1] or both == ("solid", "solid")
    wide, narrow = sorted([STYLES[one], STYLES[other]], key=lambda style: -style.width)
    assert wide.line["zorder"] < narrow.line["zorder"]


@pytest.mark.parametrize("name", STYLES)
def test_matplotlib_reads_every_style(name):
    line = Line2D([], [], **STYLES[name].line)
    assert line.get_color() == STYLES[name].color


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("float32", "float32"),
        ("half", None),
        ("infer", "float32"),
        ("mixed_bfloat16", "bfloat16"),
        ("params=float16,compute=float32", "float32"),
        ("float8_from_mixed_bfloat16", "float8"),
        ("float8(min_size=0)_from_float32", "float8"),
        ("int8(activations=false)_from_float32", "int8"),
        ("int4/64(min_size=0)_from_mixed_float16", "int4"),
        ("mxfp8(min_size=0)_from_mixed_bfloat16", "mxfp8"),
        ("mxfp4/16_from_bfloat16", "mxfp4"),
        ("nvfp4(hadamard=true)_from_mixed_bfloat16", "nvfp4"),
        (jmp.Policy("float32", "float16", "float16"), "float16"),
    ],
)
def test_a_policy_looks_as_what_it_computes_in(policy, name):
    expected = jmp.get_policy(policy).compute_dtype.name if name is None else name
    assert find_style(policy) == FORMAT_STYLES[expected]


def test_float16_without_a_scale_has_a_look_of_its_own():
    assert find_style("mixed_float16", is_scaled=False) == FORMAT_STYLES[UNSCALED] != find_style("mixed_float16")
    assert find_style("mixed_bfloat16", is_scaled=False) == find_style("mixed_bfloat16")


@pytest.mark.parametrize("kind", KINDS)
def test_every_quantization_has_a_style(kind):
    """A run of `examples.gpt` plots its losses at the end, in the style of its policy."""
    assert find_style(kind) == FORMAT_STYLES[kind]


def test_a_dtype_without_a_style_is_named():
    with pytest.raises(ValueError, match=r"No style for 'float64'\. There is one for 'float32', 'bfloat16', "):
        find_style("float64")
