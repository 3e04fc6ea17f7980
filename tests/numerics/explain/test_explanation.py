"""The value that `explain` returns: totals, and what it looks like."""

import dataclasses
import json
import re

import pytest

import jmp_policy as jmp
from jmp_policy.numerics import Explanation, ModuleRow

MIXED = jmp.get_policy("mixed_bfloat16")
ROOT = ModuleRow("", "Net", MIXED, "default", (), ("float32",), ("float32",), ("bfloat16",), 0, 0, ())
BLOCK = dataclasses.replace(ROOT, path="blocks/0", type="Block")
NORM = ModuleRow(
    "blocks/0/norm", "LayerNorm", jmp.get_policy("float32"), ".*norm", ("float32",), ("bfloat16",), ("float32",),
    ("float32",), 64, 64, ("", "blocks/0"),
)  # fmt: skip
HEAD = ModuleRow(
    "head", "Dense", MIXED, "default", ("bfloat16",), ("float32",), ("bfloat16",), ("bfloat16",), 6000, 12000, (),
)  # fmt: skip
EXPLANATION = Explanation((ROOT, BLOCK, NORM, HEAD), ("policy rule 'haed' matches no module",))


@pytest.fixture
def columns(monkeypatch):
    return lambda count: monkeypatch.setenv("COLUMNS", str(count))


def test_row_is_found_by_its_path():
    assert EXPLANATION["blocks/0/norm"] is NORM
    message = "No module at 'haed'. Those explained are '', 'blocks/0', 'blocks/0/norm', 'head'."
    with pytest.raises(KeyError, match=re.escape(message)):
        EXPLANATION["haed"]


def test_dictionary_is_plain():
    found = EXPLANATION.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["rows"][2] == {
        "path": "blocks/0/norm", "type": "LayerNorm", "policy": "float32", "rule": ".*norm",
        "param_dtypes": ["float32"], "input_dtypes": ["bfloat16"], "compute_dtypes": ["float32"],
        "output_dtypes": ["float32"], "param_bytes": 64, "float32_bytes": 64, "leaks_into": ["", "blocks/0"],
        "quantization": "", "half_sums": [], "accumulate_dtype": "",
        "output_cast": "", "precision_faults": [], "is_weight": False, "layout": None,
    }  # fmt: skip
    assert found["unused"] == ["policy rule 'haed' matches no module"]
    assert (found["total_bytes"], found["float32_bytes"]) == (6064, 12064)


def test_wide_text_has_the_policy_in_each_row(columns):
    columns(140)
    assert str(EXPLANATION) == """\
module      type       policy          rule     param  in    compute  out   bytes
─────────────────────────────────────────────────────────────────────────────────
Net         Net        mixed_bfloat16  default         f32   f32      bf16
blocks/0    Block      mixed_bfloat16  default         f32   f32      bf16
  norm (!)  LayerNorm  float32         .*norm   f32    bf16  f32      f32    64 B
head        Dense      mixed_bfloat16  default  bf16   f32   bf16     bf16   6 kB

parameters: 6.06 kB, 50% of what they would take in float32
blocks/0/norm (!) leaks f32 into the code of the model itself, blocks/0; 'params=float32,compute=float32,output=bfloat16' does not
policy rule 'haed' matches no module"""  # fmt: skip # noqa: E501


def test_narrow_text_has_a_table_of_the_rules(columns):
    columns(80)
    lines = str(EXPLANATION).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["module", "type", "rule", "param", "in", "compute", "out", "bytes"]
    assert [line.split() for line in lines if line.startswith(("default ", ".*norm "))] == [
        ["default", "mixed_bfloat16", "3"],
        [".*norm", "float32", "1"],
    ]


def test_model_without_policy_has_no_table_of_rules_and_brackets_are_text(columns):
    columns(80)
    assert "[bold]" in str(Explanation((dataclasses.replace(ROOT, rule="[bold]"),)))
    text = str(Explanation((dataclasses.replace(ROOT, policy=None, rule=""),)))
    assert "policy" not in text
    assert text.endswith("no parameters")


def test_several_modules_of_one_rule_leak_in_one_sentence(columns):
    columns(200)
    other = dataclasses.replace(NORM, path="norm", leaks_into=("a", "b", "c", "d"))
    text = str(Explanation((ROOT, BLOCK, NORM, other, dataclasses.replace(HEAD, path="a"))))
    assert "blocks/0/norm (!) and 1 more leak f32 into the code of the model itself, blocks/0, a and 3 more;" in text


def test_modules_that_take_the_same_sum_in_half_share_a_sentence_and_have_a_mark(columns):
    columns(300)
    sums = ("reduce_window_sum of 4 numbers in float16",)
    pooling = [dataclasses.replace(HEAD, path=path, half_sums=sums) for path in "ab"]
    lines = str(Explanation((ROOT, *pooling))).splitlines()
    assert [line.split("Dense")[0].strip() for line in lines if "Dense" in line] == ["a (!)", "b (!)"]
    assert lines[-1] == (
        "a, b (!): reduce_window_sum of 4 numbers in float16, whose error grows with their count; sum in float32: cast "
        "first, as jnp.sum does, or wrap the call, as in jmp.force_full_precision(nn.avg_pool)(x, (2, 2))"
    )


@pytest.mark.parametrize("width", [64, 80])
def test_narrow_text_has_a_table_of_the_quantization(columns, width):
    columns(width)
    rows = (ROOT, dataclasses.replace(HEAD, quantization="float8"), dataclasses.replace(NORM, quantization="float8"))
    text = str(Explanation(rows))
    assert max(map(len, text.splitlines())) <= width
    assert text.splitlines()[0].split()[-1] == "bytes"
    assert re.search(r"\nquantization  modules\n─+\nfloat8        head, blocks/0/norm\n", text)


def test_options_of_a_format_are_not_abbreviated_and_advice_on_an_authors_dtype_is_not_about_policies(columns):
    columns(80)
    policy = jmp.get_policy("float8/4(min_size=0)_from_params=float32,compute=bfloat16,output=float32")
    text = str(Explanation((dataclasses.replace(ROOT, policy=policy),)))
    assert " float8/4(min_size=0)_from_p=f32,c=bf16,o=f32 " in text
    columns(200)
    text = str(Explanation((ROOT, BLOCK, dataclasses.replace(NORM, rule="author's dtype"))))
    assert "blocks/0; cast what it returns, where that is not meant" in text


def test_quantization_has_a_column_where_there_is_any(columns):
    columns(200)
    left = "left: 64 elements are fewer than min_size=4096"
    mlp, norm = dataclasses.replace(HEAD, quantization="int8"), dataclasses.replace(NORM, quantization=left)
    found = Explanation((ROOT, mlp, norm))
    assert [line.split()[-1] for line in str(found).splitlines()[:4:3]] == ["quantization", "int8"]
    assert left in str(found)
    html = found._repr_html_()
    assert re.findall("<th.*?>(.*?)</th>", html)[-3:] == ["bytes", "quantization", "leaks into"]
    assert f'<td style="text-align:left">{left}</td>' in html
    assert "quantization" not in str(EXPLANATION) + EXPLANATION._repr_html_()
