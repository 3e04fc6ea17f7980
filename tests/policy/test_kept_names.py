"""Which modules NVFP4 keeps in the compute dtype by their names, and how a policy says so."""

import pickle

import pytest

import jmp_policy as jmp
from jmp_policy.policy._formats import find_kept_name
from jmp_policy.policy._policy_map import forget_name, match_policy
from jmp_policy.quant import NVFP4

POLICY = jmp.get_policy("nvfp4_from_mixed_bfloat16")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("head", "head"),
        ("decoder/LM_Head", "LM_Head"),
        ("params_1/logits_dense", "logits_dense"),
        ("logitdense", "logitdense"),
        ("vit/patch_embed_0/proj", "patch_embed_0"),
        ("Stem_12", "Stem_12"),
        ("conv_init", "conv_init"),
        ("", None),
        ("heads", None),
        ("head_norm", None),
        ("ahead/dense", None),
        ("blocks/0/mlp", None),
    ],
)
def test_a_module_is_kept_by_its_name_or_that_of_one_around_it(path, name):
    assert find_kept_name(NVFP4(), path) == name
    kept = match_policy(POLICY, path).policy
    assert (kept == POLICY) is (name is None)
    assert forget_name(kept) == POLICY


@pytest.mark.parametrize("format", [NVFP4(keep="none"), NVFP4(keep=""), NVFP4(keep=" | "), jmp.quant.MXFP8(), None])
def test_no_other_format_reads_names(format):
    assert find_kept_name(format, "head") is None


def test_a_number_at_the_end_of_a_name_may_be_asked_for():
    format = NVFP4(keep="Dense_0|Dense_3")
    assert [name for name in ("Dense_0", "Dense_1", "Dense_3", "Dense") if find_kept_name(format, name)] == [
        "Dense_0",
        "Dense_3",
    ]


@pytest.mark.parametrize(
    ("string", "format", "written"),
    [
        ("nvfp4", NVFP4(), "nvfp4"),
        ("nvfp4(keep=none)", NVFP4(keep=""), "nvfp4(keep=none)"),
        ("nvfp4(keep=)", NVFP4(keep="none"), "nvfp4(keep=none)"),
        ("NVFP4( keep = Logits | HEAD )", NVFP4(keep="head|logits"), "nvfp4(keep=head|logits)"),
        (f"nvfp4(keep={'|'.join(reversed(NVFP4().keep.split('|')))})", NVFP4(), "nvfp4"),
    ],
)
def test_strings_and_configs_say_what_is_kept(string, format, written):
    policy = jmp.get_policy(f"{string}_from_mixed_bfloat16")
    assert policy.quantization == format
    assert str(policy.quantization) == written
    assert jmp.get_policy(str(policy)) == policy == jmp.Policy.from_config(policy.get_config())
    kept = match_policy(policy, f"{format.keep.split('|')[0]}/dense").policy
    assert str(kept) == str(policy)
    assert pickle.loads(pickle.dumps(kept)) is kept


def test_a_rule_that_names_the_head_keeps_it_unless_it_says_otherwise():
    everything = "nvfp4(keep=none)_from_mixed_bfloat16"
    rules = jmp.PolicyMap({"head": "nvfp4_from_mixed_bfloat16", "logits": everything}, POLICY)
    assert rules["head"] == match_policy(POLICY, "head").policy != POLICY
    assert rules["logits"].quantization == NVFP4(keep="none")
    assert rules["dense"] == POLICY
    assert rules.match("head").rule is rules.rules[0]


def test_names_that_no_string_could_hold_are_refused():
    with pytest.raises(TypeError, match=r"keep is a string of names, got .*\. For example: NVFP4\(keep='head"):
        NVFP4(keep=("head",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'he ad' of keep is not the name of a module\. For example"):
        NVFP4(keep="logits|he ad")
