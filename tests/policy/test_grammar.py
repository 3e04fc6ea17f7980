"""Laws 2 and 3: what the strings and the names of number formats mean, and that anything else is a ValueError."""

import dataclasses
import pickle
import string

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from properties import examples

import jmp_policy as jmp
from jmp_policy import Policy, get_policy
from jmp_policy.policy import (
    E4M3,
    MXFP4,
    MXFP8,
    NF4,
    NVFP4,
    CurrentScaling,
    DelayedScaling,
    Float8,
    Int4,
    Int8,
    find_format,
    find_operand_format,
    parse_format,
    parse_policy,
    parse_quantization,
)

DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "f16", "bf16", "half", "full")
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32", "F32_F32_F32", "BF16_BF16_F32_X3")
MEANINGS = {
    "float32": ("float32", "float32", "float32"),
    "full": ("float32", "float32", "float32"),
    "half": ("float16", "float16", "float16"),
    "mixed_bfloat16": ("float32", "bfloat16", "bfloat16"),
    "params=float32,compute=bfloat16,output=float32": ("float32", "bfloat16", "float32"),
    "p=f32,c=bf16,o=f32": ("float32", "bfloat16", "float32"),
    "c=f16": ("float32", "float16", "float16"),
    "p=f16": ("float16", "float16", "float16"),
    "o=half": ("float32", "float32", "float16"),
    "p=none": (None, None, None),
    "c=f16,o=none": ("float32", "float16", None),
    "infer": (None, None, None),
    "infer_float32_vars": ("float32", None, None),
    "bfloat16_with_float32_vars": ("float32", "bfloat16", "bfloat16"),
    "infer_with_float32_vars": ("float32", None, None),
}

PIECES = [*DTYPES, *MEANINGS, "mixed_", "params", "compute", "output", "precision", "p", "c", "o", "=", ",", "_",
          " ", "reduce", "r", "accumulate", "a", "cache", "none", "_with_float32_vars", "infer", *PRECISIONS,
          "int8_from_", "int4/64", "_from_", "(", "(min_size=0)", "float8", "(recipe=current)", "/", "mxfp8", "nvfp4",
          "mxfp4/16", "", "\0", "\u017f", "\u0130"]  # fmt: skip

QUANTIZED = {
    "int8": Int8(),
    "int8(min_size=0,activations=true)": Int8(min_size=0),
    "int8(act_scale=static)": Int8(act_scale="static"),
    "int4": Int4(),
    "int4/-1": Int4(block_size=-1),
    "int4/64(activations=true)": Int4(64, activations=True),
    "nf4": NF4(),
    "nf4/-1(min_size=0)": NF4(-1, 0),
    "e4m3": E4M3(),
    "e4m3/-1(activations=true)": E4M3(-1, True),
    "float8": Float8(),
    "float8(recipe=delayed/most_recent,margin=1,weight_grad=false,min_size=0)": Float8(
        DelayedScaling("most_recent"), margin=1, weight_grad=False, min_size=0
    ),
    "float8/1(recipe=delayed/most_recent/2)": Float8(DelayedScaling("most_recent", 2), 1),
    "float8(recipe=current)": Float8(CurrentScaling()),
    "mxfp8": MXFP8(),
    "mxfp8(activations=false,gradients=e5m2,scale_rounding=floor)": MXFP8(False, 32, "e5m2", "floor"),
    "mxfp4/16(activations=true, min_size=0)": MXFP4(True, 16, min_size=0),
    "nvfp4/32(hadamard=true,square_weights=false,stochastic_rounding=true)": NVFP4(
        block_size=32, hadamard=True, square_weights=False, stochastic_rounding=True
    ),
}


@pytest.mark.parametrize(("text", "dtypes"), MEANINGS.items())
def test_strings_mean_what_the_law_says_and_spaces_and_case_are_forgiven(text, dtypes):
    assert parse_policy(text) == Policy(*dtypes)
    spaced = f"  {text.upper().replace('=', ' = ').replace(',', ' , ')}\t"
    assert parse_policy(spaced) is parse_policy(text)


@pytest.mark.parametrize(("text", "format"), QUANTIZED.items())
def test_a_quantization_stands_before_any_other_string(text, format):
    assert parse_quantization(text) == parse_quantization(str(format)) == format
    for plain in MEANINGS:
        assert parse_policy(f"{text}_from_{plain}") is parse_policy(plain).replace(quantization=format)
    spaced = f" {text.upper().replace('=', ' = ').replace('/', ' / ').replace('(', ' ( ')}_FROM_ mixed_float16 "
    assert parse_policy(spaced) is parse_policy(f"{text}_from_mixed_float16")


def policy_or_message(text):
    """No other exception than ValueError is caught."""
    try:
        return get_policy(text), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.slow
@given(st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=9).map("".join)))
@examples(40)
def test_any_text_is_a_policy_or_a_value_error(text):
    policy, message = policy_or_message(text)
    if policy is None:
        assert text.strip().lower() in message.lower() or repr(text) in message
    else:
        assert get_policy(str(policy)) is policy


dtypes = st.sampled_from([None, *DTYPES])
precisions = st.sampled_from([None, *PRECISIONS])
counts = st.integers(0, 2**40)
recipes = st.one_of(
    st.builds(CurrentScaling, st.sampled_from(["tensor", "row"])),
    st.builds(DelayedScaling, st.sampled_from(["max", "most_recent"]), st.sampled_from([1, 2])),
)
roundings = st.sampled_from(["up", "floor"])
even = st.integers(1, 2**40).map(lambda half: 2 * half)
powers = st.integers(1, 40).map(lambda exponent: 2**exponent)
quantizations = st.one_of(
    st.none(),
    st.builds(Int8, activations=st.booleans(), min_size=counts),
    st.builds(Int4, block_size=st.integers(1, 2**40), min_size=counts),
    st.builds(Float8, recipes, st.integers(1, 2**40), counts, st.booleans(), counts),
    st.builds(MXFP8, st.booleans(), st.integers(2, 2**40), st.sampled_from(["e4m3", "e5m2"]), roundings, counts),
    st.builds(MXFP4, st.booleans(), even, roundings, counts),
    st.builds(NVFP4, st.booleans(), even, st.booleans(), st.just(False), st.booleans(), counts),
    st.builds(NVFP4, st.booleans(), powers, st.booleans(), st.just(True), st.booleans(), counts),
)


accumulates = st.sampled_from([None, "float64"])  # which holds the numbers of all others
caches = st.sampled_from([None, "int8", "float8_e4m3fn"])


@given(dtypes, dtypes, dtypes, precisions, quantizations, dtypes, accumulates, caches)
@example("float64", "float64", "float64", None, None, "float64", None, None)
@example(None, None, None, None, None, None, "float64", None)
@example("float32", "float32", "float32", None, None, None, None, "int8")
@examples(40)
def test_every_policy_survives_its_strings(param, compute, output, precision, quantization, reduce, accumulate, cache):
    options = {"precision": precision, "quantization": quantization, "reduce_dtype": reduce, "cache": cache}
    policy = Policy(param, compute, output, accumulate_dtype=accumulate, **options)
    assert policy.quantization == quantization
    assert policy.accumulate_dtype == accumulate
    assert (policy.cache and policy.cache.name) == cache
    assert policy.reduce_dtype == Policy(reduce, None, None).param_dtype
    assert get_policy(str(policy)) is policy
    assert get_policy(policy.name) is policy
    assert eval(repr(policy), {"Policy": Policy}) is policy
    assert Policy.from_config(policy.get_config()) is policy
    assert pickle.loads(pickle.dumps(policy)) is policy


KNOWN = [*MEANINGS, *(f"{text}_from_bfloat16" for text in QUANTIZED)]


@given(st.sampled_from(KNOWN), st.integers(0, 60), st.sampled_from(string.ascii_lowercase))
@examples(40)
def test_a_typing_mistake_is_a_value_error_or_another_policy(text, at, letter):
    mistaken = text[:at] + letter + text[at + 1 :]
    policy, message = policy_or_message(mistaken)
    assert policy or any(remedy in message for remedy in ("Did you mean", "For example", "Known are"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bflaot16", r"^Unknown dtype or policy 'bflaot16'\. Did you mean 'bfloat16'\? For example: 'params=float32,"),
        ("mixed_float61", r"^'float61' is not half precision in policy 'mixed_float61'\. Did you mean 'mixed_float16'"),
        ("params=float32,compute=bflaot16",
         r"^Unknown dtype 'bflaot16' in 'compute=bflaot16' of policy 'params=float32,compute=bflaot16'\. "
         r"Did you mean 'bfloat16'\? For example: 'params=float32,compute=bfloat16,output=float32'\.$"),
        ("parms=f32", r"^Unknown key 'parms' in 'parms=f32' in policy 'parms=f32'\. Did you mean 'params'\? For examp"),
        ("p=f32; c=f16", r"^Unknown separator ';' in policy 'p=f32; c=f16'\. Write key=dtype, with commas between\. "),
        ("c=f16,f32", r"^'f32' is not a 'key=value' in policy 'c=f16,f32'\. For example: "),
        ("c=f16,compute=f32", r"^'compute=f32' sets compute_dtype a second time in policy 'c=f16,compute=f32'\."),
        ("c=f16,cache=in8", r"^In policy 'c=f16,cache=in8': Unknown cache 'in8'\. Did you mean 'int8'\? For"),
        ("", r"^Unknown dtype or policy ''\."),
        ("int8", r"^'int8' does not say which dtypes to use around it in policy 'int8'\. .*8_from_mixed_bfloat16'\.$"),
        ("int9_from_f32",
         r"^Unknown quantization 'int9' in policy 'int9_from_f32'\. Did you mean 'int8'\? For example: 'int8'\.$"),
        ("float8_form_mixed_bfloat16", r"^Unknown dtype or policy .* Did you mean 'float8_from_mixed_bfloat16'\? For "),
        ("int8_from_bflaot16",
         r"^In policy 'int8_from_bflaot16': Unknown dtype or policy 'bflaot16'\. Did you mean 'bfloat16'\? For exa"),
        ("int8_from_int4_from_f32",
         r"^'int4_from_f32' is quantized already in policy 'int8_from_int4_from_f32'\. For example: 'int8_from_"),
        ("int8/3_from_f32", r"^int8 takes no '/3' in 'int8/3' in policy 'int8/3_from_f32'\. For example: 'int8\(min_s"),
        ("int8(min=0)_from_f32",
         r"^'min' is not an option of int8 in 'int8\(min=0\)'.*Known are 'activations', 'min_size', 'act_scale'"),
        ("int4/3(block_size=4)_from_f32",
         r"^'block_size' is given twice in 'int4/3\(block_size=4\)' in policy .*For example: 'int4/128\(min_size=0\)"),
        ("int4/x_from_f32",
         r"^'x' in 'int4/x' in policy 'int4/x_from_f32' is neither a number nor true or false\. .*'int4/128\(min"),
        ("int4/0_from_f32",
         r"^In 'int4/0' in policy 'int4/0_from_f32': block_size must be at least 1, got 0\. For example: Int4\(block"),
        ("float8(recipe=delayd)_from_f32",
         r"^In 'float8\(recipe=delayd\)' in policy 'float8\(recipe=delayd\)_from_f32': Unknown recipe 'delayd'\. "
         r"Did you mean 'delayed'\? For example: 'current/row'\.$"),
        ("int8(activations=1)_from_f32", r"^In .*: activations is True or False, got 1\. For example: Int8\(\)\.$"),
        ("mxfp8(gradients=e3m4)_from_f32",
         r"^In 'mxfp8\(gradients=e3m4\)' in .*: Unknown gradients 'e3m4'\. .*: MXFP8\(gradients='e5m2'\)\.$"),
        ("mxfp4/15_from_f32",
         r"^In 'mxfp4/15' in .*: block_size of a 4-bit format must be even, got 15\. .*: MXFP4\(block_size=16\)\.$"),
    ],
)  # fmt: skip
def test_errors_quote_the_piece_its_place_and_the_nearest_spelling(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


@pytest.mark.parametrize(
    ("texts", "options", "suffix"),
    [
        (("c=bf16,precision=HIGHEST",), {"precision": "highest"}, "precision=highest"),
        (("c=bf16,accumulate=float32", "A = F32, c=bf16"), {"accumulate_dtype": "float32"}, "accumulate=float32"),
        (("R = F32, c=bf16", "c=bf16,precision=none,reduce=full"), {"reduce_dtype": "float32"}, "reduce=float32"),
        (("c=bf16, Cache= INT8",), {"cache": np.dtype("int8")}, "cache=int8"),
        (("c=bf16,cache=float8", "c=bf16,cache=Float8_e4m3fn"), {"cache": jnp.float8_e4m3fn}, "cache=float8_e4m3fn"),
    ],
)
def test_an_option_is_a_field_of_the_string(texts, options, suffix):
    policy = Policy("float32", "bfloat16", "bfloat16", **options)
    for text in texts:
        assert get_policy(text) is policy
    assert policy.name == f"params=float32,compute=bfloat16,output=bfloat16,{suffix}"
    assert get_policy(f"c=bf16,{suffix.partition('=')[0]}=none") is get_policy("mixed_bfloat16")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Int8(act_scale="statik"), ValueError, r"^Unknown act_scale 'statik'\. Did you mean 'static'\? For"),
        (lambda: Int8(False, act_scale="static"), ValueError, r"^act_scale='static' is for quantized inputs, and act"),
        (lambda: Int8(min_size=2.0), TypeError, r"^min_size must be an int, got 2\.0\. For example: Int8\(min_size"),
        (lambda: Int4(table_bits=5), ValueError, r"^table_bits is 8 or 4, got 5\. For example: Int4\(table_bits=4\)"),
        (lambda: Int4(block_size=True), TypeError, r"^block_size must be an int, got True\. For example: Int4\(block"),
        (lambda: DelayedScaling(delay=2.0), ValueError, r"^delay is 1 or 2, got 2\.0\. For example: DelayedScaling\(d"),
        (lambda: DelayedScaling(2), ValueError, r"^Unknown amax 2\. Known are 'max', 'most_recent'\. For example: Del"),
        (lambda: Float8(None), ValueError, r"^Unknown recipe None\. Known are 'delayed', .* For example: 'current/"),
        (lambda: Float8(margin=-1), ValueError, r"^margin must be at least 0, got -1\. For example: Float8\(margin=1"),
        (lambda: Float8(attention=True), ValueError, r"^attention keeps no state, which the recipe 'delayed' needs\."),
        (lambda: Float8(weight_grad=1), TypeError, r"^weight_grad is True or False, got 1\. For example: Float8\(\)\."),
        (lambda: CurrentScaling("rows"), ValueError,
         r"^Unknown granularity 'rows'\. Did you mean 'row'\? For example: CurrentScaling\(granularity='row'\)\.$"),
    ],
)  # fmt: skip
def test_a_bad_format_is_an_error(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_formats_are_immutable_hash_by_value_and_may_have_their_recipe_as_a_string():
    assert (Int8().bits, Int4().bits, MXFP8().bits, MXFP4().bits, NVFP4().bits) == (8, 4, 8, 4, 4)
    assert (E4M3().bits, NF4().bits) == (8, 4)
    assert eval(repr(Int4(64)), {"Int4": Int4}) == Int4(64)
    assert len({Int4(), Int4(128), Int8(), Int8(True)}) == 2
    assert len({Float8(), Float8("delayed"), Float8(DelayedScaling()), Float8("current")}) == 2
    format = Float8(" Delayed / Most_Recent ", 16)
    assert format == Float8(DelayedScaling("most_recent"), 16)
    assert eval(repr(format), vars(jmp.quant)) == format
    assert dataclasses.replace(format, recipe="current").recipe == CurrentScaling()
    for recipe in (CurrentScaling("row"), DelayedScaling("most_recent", 2)):
        assert Float8(str(recipe)).recipe == recipe
    with pytest.raises(dataclasses.FrozenInstanceError):
        Float8().margin = 1


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("bf16", "bfloat16"), (" Float16 ", "float16"), (jnp.float8_e5m2, "float8_e5m2"), ("int8", "int8"),
     ("INT8 / 64", "int8/64"), ("int4/128", "int4"), ("float4_e2m1fn", "float4_e2m1fn"),
     ("MXFP8 / 32", "mxfp8"), ("mxfp8_e5m2/16", "mxfp8_e5m2/16"), ("mxfp4", "mxfp4"), ("nvfp4/16", "nvfp4")],
)  # fmt: skip
def test_formats_have_one_name(spelling, name):
    assert parse_format(spelling).name == name
    assert parse_format(parse_format(spelling).name) == parse_format(spelling)
    scales = {"int": "float32", "mxf": "float8_e8m0fnu", "nvf": "float8_e4m3fn"}
    assert parse_format(spelling).scale == scales.get(name[:3], "")
    assert bool(parse_format(spelling).block) == (name[:3] in scales)


@pytest.mark.parametrize(
    ("spelling", "near"),
    [("flaot16", "'float16'"), ("int5", "'int4'|'int8'"), ("int8/", "'int8"), ("int8/0", "'int8"), (["float16"], ""),
     ("mxfp6", "'mxfp[48]'"), ("nvfp4/0", "'nvfp4'"), ("mxfp8_e3m4", "'mxfp8_e5m2'"),
     ("float8_e8m0fnu", "'float8_e")],
)  # fmt: skip
def test_an_unknown_format_is_quoted_with_the_nearest(spelling, near):
    with pytest.raises(ValueError, match=rf"Unknown format .*({near}).*For example: 'float16'") as caught:
        parse_format(spelling)
    assert repr(spelling) in str(caught.value)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_the_table_says_what_finfo_says(name):
    info, known = ml_dtypes.finfo(name), find_format(np.dtype(name))
    assert (known.eps, known.max) == (float(info.eps), float(info.max))
    exponents = known.min_exponent, known.least_exponent
    assert exponents == tuple(np.log2(float(each)) for each in (info.smallest_normal, info.smallest_subnormal))
    integers = find_format(np.dtype("int4"))
    assert (integers.max, integers.least_exponent, integers.has_integers) == (7, 0, True)


@pytest.mark.parametrize(
    ("quantization", "format", "of_gradients"),
    [("int8", "int8", "int8"), ("int4/128", "int4", "int4"), ("int4/64", "int4/64", "int4/64"),
     ("int4/-1", "int4", "int4"),
     ("float8/16(margin=1)", "float8_e4m3fn", "float8_e5m2"), ("mxfp8", "mxfp8", "mxfp8"),
     ("mxfp8/64(gradients=e5m2)", "mxfp8/64", "mxfp8_e5m2/64"), ("nvfp4(hadamard=true)", "nvfp4", "nvfp4")],
)  # fmt: skip
def test_operands_of_a_quantized_matmul_have_a_format(quantization, format, of_gradients):
    parsed = parse_quantization(quantization)
    assert find_operand_format(parsed).name == format
    assert find_operand_format(parsed, is_gradient=True).name == of_gradients
