"""Number formats look the same in every plot, and curves that coincide are told apart."""

import itertools

import pytest

import jmp_policy as jmp
from jmp_policy.policy import KINDS
from jmp_policy.report import FORMAT_STYLES, OTHER_STYLES, UNSCALED, find_style

OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#000000"}
GREY = "#B0B0B0"


def test_colors_are_those_of_okabe_and_ito_and_no_two_styles_look_alike():
    for styles in ([*FORMAT_STYLES.values()], OTHER_STYLES):
        assert {style.color for style in styles} <= {*OKABE_ITO, GREY}
        for one, other in itertools.combinations(styles, 2):
            assert one.width != other.width
            assert one.dash != other.dash or one.dash == "solid"
            wide, narrow = sorted([one, other], key=lambda style: -style.width)
            assert wide.line["zorder"] < narrow.line["zorder"]
    colors = [find_style(kind).color for kind in KINDS]  # bar charts have colors alone
    assert len({*colors}) == len(KINDS)


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


def test_a_dtype_without_a_style_is_named():
    with pytest.raises(ValueError, match=r"No style for 'float64'\. There is one for 'float32', 'bfloat16', "):
        find_style("float64")
