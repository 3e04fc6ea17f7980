"""The grammar of policy strings.

    policy     ::= [quantized "_from_"] plain
    quantized  ::= format ["(" option ("," option)* ")"]               (such as int8(activations=false))
    format     ::= "int8" | ("int4" | "nf4" | "e4m3" | "mxfp8" | "mxfp4" | "nvfp4") ["/" block_size]
               | "float8" ["/" amax_history_length]
               | "gptq/4/" block_size | "awq/4/" block_size | "gptq/8/-1"              (Keras's names of int4 and int8)
    option     ::= argument "=" (number | "true" | "false" | recipe | word)   (of the format's class in jmp.quant)
    recipe     ::= "delayed" ["/most_recent"] ["/2"] | "current" ["/row"]
    word       ::= "e4m3" | "e5m2" | "up" | "floor" | "dynamic" | "static"    (of MXFP8, MXFP4 and Int8)
    plain      ::= dtype | "mixed_" half | dtype "_with_float32_vars"
                 | "infer" | "infer_float32_vars" | "infer_with_float32_vars"
                 | field "=" value ("," field "=" value)*
    field      ::= "params" | "compute" | "output" | "accumulate" | "reduce" | "precision" | "cache"
                                                                                                 (or p, c, o, a, r)
    value      ::= dtype | "none"                        (of `cache`: "int8" | "float8" | "float8_e4m3fn" | "none")

Spaces and case are ignored. Parameters default to float32, compute to parameters, output to compute. Without `reduce`,
the function determines the dtype of gradient reductions; without `accumulate`, matmuls output the compute dtype;
without `cache`, the decode cache of attention has the compute dtype.
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
    "cache": "cache",
}
_INFERRING = {
    "infer": (None, None, None),
    "infer_float32_vars": ("float32", None, None),
    "infer_with_float32_vars": ("float32", None, None),
}
_DTYPES = ("param_dtype", "compute_dtype", "output_dtype")
_KIND = re.compile(rf"({'|'.join(KINDS)})\b")
_QUANTIZED = re.compile(f"(?P<format>.*?){FROM}(?P<source>.*)", re.IGNORECASE | re.DOTALL)
_LIGHTNING = re.compile("(bf16|bfloat16|fp16|float16|16|32|64)[-_](mixed|true)")
_APEX = {"o0": "float32", "o1": "mixed_float16", "o2": "mixed_float16", "o3": "float16", "amp": "mixed_float16"}
_FLOAT32_VARS = "_with_float32_vars"


def parse_policy(text: str) -> Policy:
    """Reads a policy from a string. Errors quote the part that is wrong and say where it is."""
    quantized = _QUANTIZED.match(text)
    if quantized is None:
        return _make_policy(text, _parse_plain(text))
    format, source, where = quantized["format"], quantized["source"], f" in policy {quote(text)}"
    if nested := _QUANTIZED.match(source):
        parse_quantization(nested["format"], where=where)
        _reject(f"{quote(source.strip())} is quantized already", text, "For example: 'int8_from_mixed_bfloat16'.")
    try:
        fields = _parse_plain(source)
    except ValueError as error:
        raise ValueError(f"In policy {quote(text)}: {error}") from None
    return _make_policy(text, fields | {"quantization": parse_quantization(format, where=where)})


def _make_policy(text: str, fields: dict[str, Any]) -> Policy:
    try:
        return Policy(**fields)
    except ValueError as error:  # an unknown precision, or dtypes that do not fit together
        raise ValueError(f"In policy {quote(text)}: {error}") from None


def _parse_plain(text: str) -> dict[str, Any]:
    """Returns the fields of a policy without quantization."""
    name = text.strip().lower()
    if kind := _KIND.match(name):
        example = f"For example: '{kind[0]}{FROM}mixed_bfloat16'."
        _reject(f"{quote(name)} does not say which dtypes to use around it", text, example)
    if separator := re.search("[:;]", name):
        suggestion = f"Write key=dtype, with commas between. For example: {EXAMPLE!r}."
        _reject(f"Unknown separator {quote(separator[0])}", text, suggestion)
    if (lightning := _LIGHTNING.fullmatch(name)) and (here := _translate_lightning(*lightning.groups())):
        _reject(f"{quote(name)} is a name of Lightning's", text, f"Here it is {here!r}.")
    if name in _APEX:
        _reject(f"{quote(text)} is a name of PyTorch's and Apex's", text, f"Here it is {_APEX[name]!r}.")
    if "=" in name:
        return _parse_fields(text)
    if name in _INFERRING:
        return dict(zip(_DTYPES, _INFERRING[name], strict=True))
    if name.startswith("mixed_"):
        return {"compute_dtype": _parse_half(name, text)}
    if name.endswith(_FLOAT32_VARS):
        base = name.removesuffix(_FLOAT32_VARS)
        return {"compute_dtype": parse_dtype(base, where=f" in policy {quote(text)}", example=repr(EXAMPLE))}
    return {"param_dtype": _parse_whole(name, text)}


def _translate_lightning(word: str, kind: str) -> str:
    """Translates Lightning's `16-mixed`, `bf16-mixed`, `16-true`; returns an empty string for unknown names."""
    dtype = parse_dtype(f"float{word}" if word.isdecimal() else word).name
    if kind == "true":
        return dtype
    return f"mixed_{dtype}" if dtype in ("float16", "bfloat16") else ""


def _parse_fields(text: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        field = _FIELDS.get(key.lower())
        if not equals:
            _reject(f"{quote(part.strip())} is not a 'key=value'", text, f"For example: {EXAMPLE!r}.")
        if field is None:
            nearest = did_you_mean(key, ("params", "compute", "output", "accumulate", "reduce", "precision", "cache"))
            _reject(f"Unknown key {quote(key)} in {quote(part.strip())}", text, f"{nearest} For example: {EXAMPLE!r}.")
        if field in given:
            _reject(f"{quote(part.strip())} sets {field} a second time", text, f"For example: {EXAMPLE!r}.")
        if value.lower() == "none":
            given[field] = None
        elif field in ("precision", "cache"):
            given[field] = value
        else:
            where = f" in {quote(part.strip())} of policy {quote(text)}"
            given[field] = parse_dtype(value, where=where, example=repr(EXAMPLE))
    return given


def _parse_half(name: str, text: str) -> np.dtype:
    half = name.removeprefix("mixed_")
    dtype = parse_dtype(half) if half in dtype_names() else None
    if dtype is None or dtype not in (np.dtype("float16"), np.dtype("bfloat16")):
        _reject(f"{quote(half)} is not half precision", text, did_you_mean(name, ("mixed_float16", "mixed_bfloat16")))
    return dtype


def _parse_whole(name: str, text: str) -> np.dtype:
    """Reads a dtype name; the error also suggests policy names."""
    try:
        return parse_dtype(name)
    except ValueError:
        quantized = [f"{kind}{FROM}mixed_bfloat16" for kind in KINDS]
        nearest = did_you_mean(name, [*dtype_names(), *_INFERRING, "mixed_float16", "mixed_bfloat16", *quantized])
        raise ValueError(f"Unknown dtype or policy {quote(text)}. {nearest} For example: {EXAMPLE!r}.") from None


def _reject(problem: str, text: str, suggestion: str) -> NoReturn:
    raise ValueError(f"{problem} in policy {quote(text)}. {suggestion}")
