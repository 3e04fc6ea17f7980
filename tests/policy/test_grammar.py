"""Laws 2 and 3: what the strings mean, and that anything else is a ValueError."""

import dataclasses
import pickle
import string

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from properties import examples

import jmp_policy as jmp
from jmp_policy import Policy, get_policy
from jmp_policy._base import dtype_names
from jmp_policy.policy import (
    MXFP4,
    MXFP8,
    NVFP4,
    CurrentScaling,
    DelayedScaling,
    Float8,
    Int4,
    Int8,
    parse_quantization,
)
from jmp_policy.policy._block_formats import parse_recipe
from jmp_policy.policy._grammar import parse_policy
from jmp_policy.policy._policy import PRECISIONS

MEANINGS = {
    "float32": ("float32", "float32", "float32"),
    "full": ("float32", "float32", "float32"),
    "bf16": ("bfloat16", "bfloat16", "bfloat16"),
    "half": ("float16", "float16", "float16"),
    "mixed_float16": ("float32", "float16", "float16"),
    "mixed_bfloat16": ("float32", "bfloat16", "bfloat16"),
    "params=float32,compute=bfloat16,output=float32": ("float32", "bfloat16", "float32"),
    "p=f32,c=bf16,o=f32": ("float32", "bfloat16", "float32"),
    "c=f16": ("float32", "float16", "float16"),
    "p=f16": ("float16", "float16", "float16"),
    "p=f16,c=bf16": ("float16", "bfloat16", "bfloat16"),
    "o=half": ("float32", "float32", "float16"),
    "output=f32,params=bf16": ("bfloat16", "bfloat16", "float32"),
    "p=none": (None, None, None),
    "c=f16,o=none": ("float32", "float16", None),
    "infer": (None, None, None),
    "infer_float32_vars": ("float32", None, None),
    "infer_with_float32_vars": ("float32", None, None),
    "bfloat16_with_float32_vars": ("float32", "bfloat16", "bfloat16"),
    "float16_with_float32_vars": ("float32", "float16", "float16"),
    "float32_with_float32_vars": ("float32", "float32", "float32"),
}

PIECES = [*dtype_names(), *MEANINGS, "mixed_", "params", "compute", "output", "precision", "p", "c", "o", "=", ",", "_",
          " ", "reduce", "r", "accumulate", "a", "cache", "none", "_with_float32_vars", "infer", *PRECISIONS,
          "int8_from_", "int4/64", "_from_",
          "(", "(min_size=0)", "float8", "(recipe=current)", "/", "mxfp8", "nvfp4", "mxfp4/16", "F32_F32_F32", "",
          "\0", "\u017f", "\u0130"]  # fmt: skip

QUANTIZED = {
    "int8": Int8(),
    "int8()": Int8(),
    "int8(activations=false)": Int8(activations=False),
    "int8(min_size=0,activations=true)": Int8(min_size=0),
    "int8(act_scale=static)": Int8(act_scale="static"),
    "int4": Int4(),
    "int4/64": Int4(block_size=64),
    "int4(block_size=64)": Int4(block_size=64),
    "int4/-1": Int4(block_size=-1),
    "int4/64(min_size=10)": Int4(block_size=64, min_size=10),
    "float8": Float8(),
    "float8/16": Float8(amax_history_length=16),
    "float8(recipe=delayed/max, amax_history_length=1024)": Float8(),
    "float8(recipe=delayed/2)": Float8(DelayedScaling(delay=2)),
    "float8(recipe=delayed/most_recent,margin=1,weight_grad=false,min_size=0)": Float8(
        DelayedScaling("most_recent"), margin=1, weight_grad=False, min_size=0
    ),
    "float8/1(recipe=delayed/most_recent/2)": Float8(DelayedScaling("most_recent", 2), 1),
    "float8(recipe=current)": Float8(CurrentScaling()),
    "float8/16(recipe=current/row)": Float8(CurrentScaling("row"), 16),
    "mxfp8": MXFP8(),
    "mxfp8/64": MXFP8(block_size=64),
    "mxfp8(activations=false,gradients=e5m2,scale_rounding=floor)": MXFP8(False, 32, "e5m2", "floor"),
    "mxfp4": MXFP4(),
    "mxfp4/16(activations=true, min_size=0)": MXFP4(True, 16, min_size=0),
    "nvfp4": NVFP4(),
    "nvfp4/32(hadamard=true,square_weights=false,stochastic_rounding=true)": NVFP4(
        block_size=32, hadamard=True, square_weights=False, stochastic_rounding=True
    ),
}


@pytest.mark.parametrize(("text", "dtypes"), MEANINGS.items())
def test_strings_mean_what_the_law_says(text, dtypes):
    assert parse_policy(text) == Policy(*dtypes)


@pytest.mark.parametrize("text", MEANINGS)
def test_spaces_and_case_are_forgiven(text):
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


@given(st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=9).map("".join)))
@examples(40)
def test_any_text_is_a_policy_or_a_value_error(text):
    policy, message = policy_or_message(text)
    if policy is None:
        assert text.strip().lower() in message.lower() or repr(text) in message
    else:
        assert get_policy(str(policy)) is policy


dtypes = st.sampled_from([None, *dtype_names()])
precisions = st.sampled_from([None, *PRECISIONS, "F32_F32_F32", "BF16_BF16_F32_X3"])
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


@pytest.mark.sample(57)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bflaot16", r"^Unknown dtype or policy 'bflaot16'\. Did you mean 'bfloat16'\? For example: 'params=float32,"),
        ("mixed_float61", r"^'float61' is not half precision in policy 'mixed_float61'\. Did you mean 'mixed_float16'"),
        ("mixed_float32", r"^'float32' is not half precision in policy 'mixed_float32'\. Did you mean 'mixed_float16'"),
        ("params=float32,compute=bflaot16",
         r"^Unknown dtype 'bflaot16' in 'compute=bflaot16' of policy 'params=float32,compute=bflaot16'\. "
         r"Did you mean 'bfloat16'\? For example: 'params=float32,compute=bfloat16,output=float32'\.$"),
        ("parms=f32", r"^Unknown key 'parms' in 'parms=f32' in policy 'parms=f32'\. Did you mean 'params'\? For examp"),
        ("p=f32; c=f16", r"^Unknown separator ';' in policy 'p=f32; c=f16'\. Write key=dtype, with commas between\. "),
        ("p:f32,c:f16", r"^Unknown separator ':' in policy 'p:f32,c:f16'\. Write key=dtype, with commas between\. "),
        ("c=f16,f32", r"^'f32' is not a 'key=value' in policy 'c=f16,f32'\. For example: "),
        ("c=f16,", r"^'' is not a 'key=value' in policy 'c=f16,'"),
        ("c=f16,compute=f32", r"^'compute=f32' sets compute_dtype a second time in policy 'c=f16,compute=f32'\."),
        ("c=f16,r=f33", r"^Unknown dtype 'f33' in 'r=f33' of policy 'c=f16,r=f33'\. Did you mean 'f32'"),
        ("c=f16,acumulate=f32", r"^Unknown key 'acumulate' in 'acumulate=f32' in .*Did you mean 'accumulate'\?"),
        ("a=f16,accumulate=f32,c=f16", r"^'accumulate=f32' sets accumulate_dtype a second time in policy 'a=f16,accu"),
        ("c=f16,cache=in8", r"^In policy 'c=f16,cache=in8': Unknown cache 'in8'\. Did you mean 'int8'\? For"),
        ("cache=int8,cache=float8", r"^'cache=float8' sets cache a second time in policy 'cache=int8,cache=float8'\."),
        ("c=f16,redcue=f32", r"^Unknown key 'redcue' in 'redcue=f32' in policy .*Did you mean 'reduce'\? For exam"),
        ("r=f16,reduce=f32", r"^'reduce=f32' sets reduce_dtype a second time in policy 'r=f16,reduce=f32'\."),
        ("c=f16,precision=hihg", r"^In policy 'c=f16,precision=hihg': Unknown precision 'hihg'\. Did you mean 'high'"),
        ("int8_with_float32_vars", r"^Unknown dtype 'int8' in policy 'int8_with_float32_vars'"),
        ("", r"^Unknown dtype or policy ''\."),
        ("int8", r"^'int8' does not say which dtypes to use around it in policy 'int8'\. .*8_from_mixed_bfloat16'\.$"),
        ("int4/6", r"^'int4/6' does not say which dtypes to use .*For example: 'int4_from_mixed_bfloat16'\.$"),
        ("int9_from_f32",
         r"^Unknown quantization 'int9' in policy 'int9_from_f32'\. Did you mean 'int8'\? For example: 'int8'\.$"),
        ("_from_f32", r"^Unknown quantization '' in policy '_from_f32'\. Known are 'int8', 'int4', 'float8', "),
        ("float8", r"^'float8' does not say which dtypes .*For example: 'float8_from_mixed_bfloat16'\.$"),
        ("float8(recipe=current)", r"^'float8\(recipe=current\)' does not say .*: 'float8_from_mixed_bfloat16'\.$"),
        ("float8_form_mixed_bfloat16", r"^Unknown dtype or policy .* Did you mean 'float8_from_mixed_bfloat16'\? For "),
        ("float8_e4m3nf", r"^Unknown dtype or policy 'float8_e4m3nf'\. Did you mean 'float8_e4m3fn"),
        ("flaot8_from_f32", r"^Unknown quantization 'flaot8' in policy 'flaot8_from_f32'\. Did you mean 'float8'\? "),
        ("int8_from_bflaot16",
         r"^In policy 'int8_from_bflaot16': Unknown dtype or policy 'bflaot16'\. Did you mean 'bfloat16'\? For exa"),
        ("int8_from_int4_from_f32",
         r"^'int4_from_f32' is quantized already in policy 'int8_from_int4_from_f32'\. For example: 'int8_from_"),
        ("int8/3_from_f32", r"^int8 takes no '/3' in 'int8/3' in policy 'int8/3_from_f32'\. For example: 'int8\(min_s"),
        ("int8(min=0)_from_f32",
         r"^'min' is not an option of int8 in 'int8\(min=0\)'.*Known are 'activations', 'min_size', 'act_scale'"),
        ("int8(min_size=0,)_from_f32", r"^'' is not an option of int8 in 'int8\(min_size=0,\)' in policy "),
        ("int4/3(block_size=4)_from_f32",
         r"^'block_size' is given twice in 'int4/3\(block_size=4\)' in policy .*For example: 'int4/128\(min_size=0\)"),
        ("int4/x_from_f32",
         r"^'x' in 'int4/x' in policy 'int4/x_from_f32' is neither a number nor true or false\. .*'int4/128\(min"),
        ("int4/0_from_f32",
         r"^In 'int4/0' in policy 'int4/0_from_f32': block_size must be at least 1, got 0\. For example: Int4\(block"),
        ("int4/-2_from_f32", r"^In 'int4/-2' in policy 'int4/-2_from_f32': block_size must be at least 1, got -2\. Fo"),
        ("float8/x_from_f32", r"^'x' in 'float8/x' in policy 'float8/x_from_f32' is neither a number nor "),
        ("float8/0_from_f32",
         r"^In 'float8/0' in policy 'float8/0_from_f32': amax_history_length must be at least 1, got 0\. For exam"),
        ("float8/2(amax_history_length=2)_from_f32", r"^'amax_history_length' is given twice in 'float8/2\(amax_his"),
        ("float8(recipe=delayd)_from_f32",
         r"^In 'float8\(recipe=delayd\)' in policy 'float8\(recipe=delayd\)_from_f32': Unknown recipe 'delayd'\. "
         r"Did you mean 'delayed'\? For example: 'current/row'\.$"),
        ("float8(recipe)_from_f32", r"^In .*: Unknown recipe ''\. Known are 'delayed', 'delayed/2', .*'current/row'\."),
        ("float8(recipe=current/column)_from_f32", r"^In .*: Unknown recipe 'current/column'\. Did you mean 'current"),
        ("float8(recipe=delayed/3)_from_f32", r"^In .*: Unknown recipe 'delayed/3'\. Did you mean 'delayed"),
        ("float8(recipes=current)_from_f32",
         r"^'recipes' is not an option of float8 in .*\. Did you mean 'recipe'\? For example: 'float8\(min_size=0\)'"),
        ("float8(margin=true)_from_f32", r"^In .*: margin must be an int, got True\. For example: Float8\(margin=1\)"),
        ("float8(weight_grad=0)_from_f32", r"^In .*: weight_grad is True or False, got 0\. For example: Float8\(\)\.$"),
        ("int8(min_size=true)_from_f32", r"^In .*: min_size must be an int, got True\. For example: Int8\(min_size"),
        ("int8(activations=1)_from_f32", r"^In .*: activations is True or False, got 1\. For example: Int8\(\)\.$"),
        ("mxfp8", r"^'mxfp8' does not say which dtypes to use around it in .*'mxfp8_from_mixed_bfloat16'\.$"),
        ("mxpf8_from_f32", r"^Unknown quantization 'mxpf8' in policy 'mxpf8_from_f32'\. Did you mean 'mxfp8'\? For"),
        ("mxfp8/0_from_f32",
         r"^In 'mxfp8/0' in policy 'mxfp8/0_from_f32': block_size must be at least \d, got 0\. For example: MXFP8\("),
        ("mxfp8(gradients=e3m4)_from_f32",
         r"^In 'mxfp8\(gradients=e3m4\)' in .*: Unknown gradients 'e3m4'\. .*: MXFP8\(gradients='e5m2'\)\.$"),
        ("mxfp8(scale_rounding=down)_from_f32", r"^In .*: Unknown scale_rounding 'down'\. .*'floor', 'up'.*: MXFP8\("),
        ("mxfp4/15_from_f32",
         r"^In 'mxfp4/15' in .*: block_size of a 4-bit format must be even, got 15\. .*: MXFP4\(block_size=16\)\.$"),
        ("nvfp4/17_from_f32",
         r"^In 'nvfp4/17' in .*: block_size of a 4-bit format must be even, got 17\. .*: NVFP4\(block_size=16\)\.$"),
        ("nvfp4(hadamard=1)_from_f32", r"^In .*: hadamard is True or False, got 1\. For example: NVFP4\(\)\.$"),
        ("mxfp4(gradients=e5m2)_from_f32", r"^'gradients' is not an option of mxfp4 in .* For example: 'mxfp4\("),
        ("mxfp8/32(block_size=32)_from_f32", r"^'block_size' is given twice in 'mxfp8/32\(block_size=32\)' in policy "),
    ],
)  # fmt: skip
def test_errors_quote_the_piece_its_place_and_the_nearest_spelling(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


def test_precision_is_a_field_of_the_string():
    policy = parse_policy("c=f32,precision=HIGHEST")
    assert policy.precision == "highest"
    assert policy.compute_dtype == np.float32
    assert parse_policy("c=f32,precision=none").precision is None


@pytest.mark.parametrize("text", ["c=bf16,accumulate=float32", "A = F32, c=bf16", "c=bf16,precision=none,a=full"])
def test_accumulate_is_a_field_of_the_string(text):
    policy = get_policy(text)
    assert policy is Policy("float32", "bfloat16", "bfloat16", accumulate_dtype="float32")
    assert policy.name == "params=float32,compute=bfloat16,output=bfloat16,accumulate=float32"
    assert get_policy("c=bf16,a=none") is get_policy("c=bf16")


@pytest.mark.parametrize("format", ["int8", "float8_e4m3fn"])
def test_cache_is_a_field_of_the_string(format):
    dtype = np.dtype(getattr(jnp, format))
    policy = Policy("float32", "bfloat16", "bfloat16", cache=dtype)
    assert policy.cache == dtype
    for spelling in (format, f" {format.upper()}", *(["float8"] if format == "float8_e4m3fn" else [])):
        assert get_policy(f"c=bf16, Cache={spelling}") is policy
        assert Policy("float32", "bfloat16", "bfloat16", cache=spelling) is policy
    assert policy.name == f"params=float32,compute=bfloat16,output=bfloat16,cache={format}"
    assert get_policy("c=bf16,cache=none") is get_policy("mixed_bfloat16")


@pytest.mark.parametrize("text", ["c=bf16,reduce=float32", "R = F32, c=bf16", "c=bf16,precision=none,reduce=full"])
def test_reduce_is_a_field_of_the_string(text):
    policy = parse_policy(text)
    assert policy is Policy("float32", "bfloat16", "bfloat16", reduce_dtype="float32")
    assert policy.name == "params=float32,compute=bfloat16,output=bfloat16,reduce=float32"
    assert parse_policy("c=bf16,r=none").name == "mixed_bfloat16"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Int8(activations=1), TypeError, r"^activations is True or False, got 1\. For example: Int8\(\)\.$"),
        (lambda: Int8(act_scale="statik"), ValueError, r"^Unknown act_scale 'statik'\. Did you mean 'static'\? For"),
        (lambda: Int8(False, act_scale="static"), ValueError, r"^act_scale='static' is for quantized inputs, and act"),
        (lambda: Int8(min_size=2.0), TypeError, r"^min_size must be an int, got 2\.0\. For example: Int8\(min_size"),
        (lambda: Int8(min_size=-1), ValueError, r"^min_size must be at least 0, got -1\. For example: Int8\(min_size"),
        (lambda: Int4(block_size=True), TypeError, r"^block_size must be an int, got True\. For example: Int4\(block"),
        (lambda: Int4(table_bits=5), ValueError, r"^table_bits is 8 or 4, got 5\. For example: Int4\(table_bits=4\)"),
        (lambda: Int4(table_bits=8.0), ValueError, r"^table_bits is 8 or 4, got 8\.0\. For example: Int4\(table_bits="),
        (lambda: DelayedScaling(delay=2.0), ValueError, r"^delay is 1 or 2, got 2\.0\. For example: DelayedScaling\(d"),
        (lambda: Int4(block_size=0), ValueError, r"^block_size must be at least 1, got 0\. For example: Int4\(block"),
        (lambda: Float8("currant"), ValueError, r"^Unknown recipe 'currant'\. Did you mean 'current'\? For example: '"),
        (lambda: Float8(None), ValueError, r"^Unknown recipe None\. Known are 'delayed', .* For example: 'current/"),
        (lambda: Float8(amax_history_length=True), TypeError, r"^amax_history_length must be an int, got True\. For e"),
        (lambda: Float8(margin=-1), ValueError, r"^margin must be at least 0, got -1\. For example: Float8\(margin=1"),
        (lambda: Float8(weight_grad=1), TypeError, r"^weight_grad is True or False, got 1\. For example: Float8\(\)\."),
        (lambda: Float8(min_size=-1), ValueError, r"^min_size must be at least 0, got -1\. For example: Float8\(min_"),
        (lambda: CurrentScaling("rows"), ValueError,
         r"^Unknown granularity 'rows'\. Did you mean 'row'\? For example: CurrentScaling\(granularity='row'\)\.$"),
        (lambda: DelayedScaling(2), ValueError, r"^Unknown amax 2\. Known are 'max', 'most_recent'\. For example: Del"),
        (lambda: DelayedScaling(delay=0), ValueError, r"^delay is 1 or 2, got 0\. For example: DelayedScaling\(delay="),
        (lambda: DelayedScaling(delay=True), ValueError, r"^delay is 1 or 2, got True\. For example: DelayedScaling\("),
        (lambda: MXFP8(activations=1), TypeError, r"^activations is True or False, got 1\. For example: MXFP8\(\)\.$"),
        (lambda: MXFP8(block_size=32.0), TypeError, r"^block_size must be an int, got 32\.0\. For example: MXFP8\(bl"),
        (lambda: MXFP8(gradients=None), ValueError, r"^Unknown gradients None\. Known are 'e4m3', 'e5m2'\. For exampl"),
        (lambda: MXFP4(min_size=-1), ValueError, r"^min_size must be at least 0, got -1\. For example: MXFP4\(min_siz"),
        (lambda: NVFP4(block_size=0), ValueError, r"^block_size must be at least \d, got 0\. For example: NVFP4\(bloc"),
        (lambda: parse_quantization(8), ValueError, r"^Unknown quantization 8\. .* For example: 'int8'\.$"),
        (lambda: parse_quantization(Int8), ValueError, r"^Unknown quantization <class '.*Int8'>\. .* For example: "),
    ],
)  # fmt: skip
def test_a_bad_format_is_an_error(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_formats_know_their_bits_and_have_no_other_spelling_than_their_repr():
    assert (Int8().bits, Int4().bits) == (8, 4)
    assert (MXFP8().bits, MXFP4().bits, NVFP4().bits) == (8, 4, 4)
    assert eval(repr(Int4(64)), {"Int4": Int4}) == Int4(64)
    assert len({Int4(), Int4(128), Int8(), Int8(True)}) == 2


def test_a_recipe_may_be_given_as_its_string():
    format = Float8(" Delayed / Most_Recent ", 16)
    assert format == Float8(DelayedScaling("most_recent"), 16)
    assert eval(repr(format), vars(jmp.quant)) == format
    assert dataclasses.replace(format, recipe="current").recipe == CurrentScaling()
    for recipe in (CurrentScaling(), CurrentScaling("row"), DelayedScaling(), DelayedScaling("most_recent", 2)):
        assert parse_recipe(str(recipe)) == parse_recipe(recipe) == recipe


def test_formats_of_float8_are_immutable_and_hash_by_value():
    assert len({Float8(), Float8("delayed"), Float8(DelayedScaling()), Float8("current")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Float8().margin = 1
