"""The strings that name a policy.

    policy     ::= [quantized "_from_"] plain
    quantized  ::= format ["(" option ("," option)* ")"]               (such as int8(activations=false))
    format     ::= "int8" | ("int4" | "mxfp8" | "mxfp4" | "nvfp4") ["/" block_size] | "float8" ["/" amax_history_length]
    option     ::= argument "=" (number | "true" | "false" | recipe | word)   (of the class of the format in jmp.quant)
    recipe     ::= "delayed" ["/most_recent"] ["/2"] | "current" ["/row"]
    word       ::= "e4m3" | "e5m2" | "up" | "floor"                           (of quant.MXFP8 and quant.MXFP4)
    plain      ::= dtype | "mixed_" half | dtype "_with_float32_vars"
                 | "infer" | "infer_float32_vars" | "infer_with_float32_vars"
                 | field "=" value ("," field "=" value)*
    field      ::= "params" | "compute" | "output" | "accumulate" | "reduce" | "precision"   (or p, c, o, a, r)
    value      ::= dtype | "none"

Spaces and case are forgiven. Parameters default to float32, compute to parameters, output to compute. Without
`reduce`, the program decides in which dtype gradients are reduced; without `accumulate`, products hand over their sums
in the compute dtype.
"""

import re
from typing import Any, NoReturn

import numpy as np

from .._base import did_you_mean, dtype_names, parse_dtype, quote
from ._formats import KINDS, parse_quantization
from ._policy import FROM, Policy

EXAMPLE = "params=float32,compute=bfloat16,output=float32"

_FIELDS = {
    "p": "param_dtype",
    "param": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "out": "output_dtype",
    "output": "output_dtype",
    "a": "accumulate_dtype",
    "accumulate": "accumulate_dtype",
    "r": "reduce_dtype",
    "reduce": "reduce_dtype",
    "precision": "precision",
}
_INFERRING = {
    "infer": (None, None, None),
    "infer_float32_vars": ("float32", None, None),
    "infer_with_float32_vars": ("float32", None, None),
}
_KIND = re.compile(rf"({'|'.join(KINDS)})\b")
_QUANTIZED = re.compile(f"(?P<format>.*?){FROM}(?P<source>.*)", re.IGNORECASE | re.DOTALL)
_LIGHTNING = re.compile("(bf16|bfloat16|fp16|float16|16|32|64)-(mixed|true)")
_MIXED = "mixed_"
_FLOAT32_VARS = "_with_float32_vars"


def parse_policy(text: str) -> Policy:
    """Reads a policy from a string.

    Raises:
      ValueError: the string is none of the grammar; the message quotes the bad piece and says where it stands.

    >>> parse_policy("C = bf16")
    Policy(param_dtype='float32', compute_dtype='bfloat16', output_dtype='bfloat16')
    """
    quantized = _QUANTIZED.match(text)
    if quantized:
        return _parse_quantized(quantized["format"], quantized["source"], text)
    name = text.strip().lower()
    kind = _KIND.match(name)
    if kind:
        example = f"For example: '{kind[0]}{FROM}mixed_bfloat16'."
        _fail(f"{quote(name)} says nothing of the dtypes around it", text, example)
    if separator := re.search("[:;]", name):
        remedy = f"Write key=dtype, with commas between. For example: {EXAMPLE!r}."
        _fail(f"Unknown separator {quote(separator[0])}", text, remedy)
    if (lightning := _LIGHTNING.fullmatch(name)) and (here := _of_lightning(*lightning.groups())):
        _fail(f"{quote(name)} is a name of Lightning's", text, f"Here it is {here!r}.")
    if "=" in name:
        return _parse_fields(text)
    if name in _INFERRING:
        return Policy(*_INFERRING[name])
    if name.startswith(_MIXED):
        half = _parse_half(name, text)
        return Policy("float32", half, half)
    if name.endswith(_FLOAT32_VARS):
        dtype = _parse_dtype_name(name.removesuffix(_FLOAT32_VARS), text)
        return Policy("float32", dtype, dtype)
    return Policy(*[_parse_whole(name, text)] * 3)


def _of_lightning(word: str, kind: str) -> str:
    """The policy that Lightning calls `16-mixed`, `bf16-mixed`, `16-true`; the empty string for one that it has not."""
    dtype = parse_dtype(f"float{word}" if word.isdecimal() else word).name
    if kind == "true":
        return dtype
    return f"{_MIXED}{dtype}" if dtype in ("float16", "bfloat16") else ""


def _parse_quantized(format: str, source: str, text: str) -> Policy:
    where = f" in policy {quote(text)}"
    nested = _QUANTIZED.match(source)
    if nested:  # not read by parse_policy, which would call itself as often as a string repeats itself
        parse_quantization(nested["format"], where=where)
        _fail(f"{quote(source.strip())} is quantized already", text, "For example: 'int8_from_mixed_bfloat16'.")
    try:
        plain = parse_policy(source)
    except ValueError as error:
        raise ValueError(f"In policy {quote(text)}: {error}") from None
    return plain.replace(quantization=parse_quantization(format, where=where))


def _parse_fields(text: str) -> Policy:
    given: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        field = _FIELDS.get(key.lower())
        if not equals:
            _fail(f"{quote(part.strip())} is not a 'key=value'", text, f"For example: {EXAMPLE!r}.")
        if field is None:
            remedy = did_you_mean(key, ("params", "compute", "output", "accumulate", "reduce", "precision"))
            _fail(f"Unknown key {quote(key)} in {quote(part.strip())}", text, f"{remedy} For example: {EXAMPLE!r}.")
        if field in given:
            _fail(f"{quote(part.strip())} sets {field} a second time", text, f"For example: {EXAMPLE!r}.")
        given[field] = value if field == "precision" else _parse_optional_dtype(value, part, text)
    param_dtype = given.get("param_dtype", np.dtype(np.float32))
    compute_dtype = given.get("compute_dtype", param_dtype)
    output_dtype = given.get("output_dtype", compute_dtype)
    precision = _parse_precision(given.get("precision"), text)
    later = {field: given.get(field) for field in ("reduce_dtype", "accumulate_dtype")}
    try:
        return Policy(param_dtype, compute_dtype, output_dtype, precision=precision, **later)
    except ValueError as error:  # of dtypes that do not go together
        raise ValueError(f"In policy {quote(text)}: {error}") from None


def _parse_optional_dtype(value: str, part: str, text: str) -> np.dtype | None:
    if value.lower() == "none":
        return None
    return parse_dtype(value, where=f" in {quote(part.strip())} of policy {quote(text)}", example=repr(EXAMPLE))


def _parse_half(name: str, text: str) -> np.dtype:
    """The dtype of a mixed policy; its error offers no dtype that is known but not half, such as float64."""
    half = name.removeprefix(_MIXED)
    dtype = parse_dtype(half) if half in dtype_names() else None
    if dtype is None or dtype not in (np.dtype("float16"), np.dtype("bfloat16")):
        _fail(f"{quote(half)} is not half precision", text, did_you_mean(name, ("mixed_float16", "mixed_bfloat16")))
    return dtype


def _parse_dtype_name(name: str, text: str) -> np.dtype:
    return parse_dtype(name, where=f" in policy {quote(text)}", example=repr(EXAMPLE))


def _parse_precision(name: str | None, text: str) -> str | None:
    if name is None or name.lower() == "none":
        return None
    try:
        return Policy(None, None, None, precision=name).precision
    except ValueError as error:
        raise ValueError(f"In policy {quote(text)}: {error}") from None


def _parse_whole(name: str, text: str) -> np.dtype:
    """A string that is all dtype; if it is none, the error offers the names of policies too."""
    try:
        return parse_dtype(name)
    except ValueError:
        quantized = [f"{kind}{FROM}mixed_bfloat16" for kind in KINDS]
        remedy = did_you_mean(name, [*dtype_names(), *_INFERRING, "mixed_float16", "mixed_bfloat16", *quantized])
        raise ValueError(f"Unknown dtype or policy {quote(text)}. {remedy} For example: {EXAMPLE!r}.") from None


def _fail(what: str, text: str, remedy: str) -> NoReturn:
    raise ValueError(f"{what} in policy {quote(text)}. {remedy}")
