"""The generated parts of the reference: the tables of autocast, the ranges of formats, the help of commands.

`python docs/_site/generated.py` writes these parts anew; a test holds that they are up to date.
"""

import ast
import contextlib
import functools
import io
import itertools
import os
import pathlib
import re
import unittest.mock
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from examples.gpt import __main__ as examples_main
from jmp_policy import quant
from jmp_policy.autocast import _tables
from jmp_policy.cli import _main

REFERENCE = pathlib.Path(__file__).parent.parent / "reference"

FLOATS = {
    "float32": "parameters, losses, sums",
    "TF32": "float32 as matrix units of NVIDIA GPUs read it; no dtype of an array",
    "bfloat16": "computing without a loss scale: the range of float32",
    "float16": "computing with a loss scale",
    "float8_e4m3fn": "forward operands of `float8`; numbers of `e4m3` and `mxfp8`; scales of `nvfp4`",
    "float8_e5m2": "gradients of `float8`",
    "float8_e4m3": "the IEEE form of e4m3",
    "float8_e3m4": "a dtype of JAX",
    "float8_e4m3b11fnuz": "a dtype of JAX",
    "float8_e4m3fnuz": "AMD's e4m3",
    "float8_e5m2fnuz": "AMD's e5m2",
    "float4_e2m1fn": "numbers of `mxfp4` and `nvfp4`",
}
"""By name of the format, what it is for. All but TF32 are dtypes."""

TF32_BITS, TF32_MANTISSA = 19, 10
"""Of TF32 there is no dtype: the bits are NVIDIA's, the exponent is that of float32, the numbers follow from them."""


def fill(text: str) -> str:
    """Writes the generated parts of a page, each between `<!-- generated: name -->` and `<!-- end -->`."""

    def write(part: re.Match[str]) -> str:
        return f"<!-- generated: {part['name']} -->\n\n{PARTS[part['name']]().strip()}\n\n<!-- end -->"

    return re.sub(r"<!-- generated: (?P<name>[\w ]+) -->.*?<!-- end -->", write, text, flags=re.DOTALL)


def make_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown.

    >>> print(make_table(["a", "b"], [["1", "x|y"]]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])


def make_operations(table: str) -> str:
    """A table of operations with its reasons: those with the same reason in one row, in the order of the table."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in getattr(_tables, table).items():
        by_reason.setdefault(reason, []).append(name)
    rows = [(", ".join(f"`{name}`" for name in names), reason) for reason, names in by_reason.items()]
    return f"{read_comment(table)}\n\n{make_table(['operation', 'why'], rows)}"


def make_functions() -> str:
    """The functions that are one operation to a reader, by how they are treated."""
    by_treatment: dict[str, list[str]] = {}
    for name, treatment in _tables.FUNCTIONS.items():
        by_treatment.setdefault(treatment, []).append(name)
    rows = [(f"`{treatment}`", ", ".join(f"`{name}`" for name in names)) for treatment, names in by_treatment.items()]
    return f"{read_comment('FUNCTIONS')}\n\n{make_table(['treatment', 'functions'], rows)}"


def read_comment(table: str) -> str:
    """Returns the string below a table, which explains it."""
    body = ast.parse(pathlib.Path(_tables.__file__).read_text(encoding="utf-8")).body
    for statement, below in itertools.pairwise(body):
        names = [ast.unparse(target) for target in statement.targets] if isinstance(statement, ast.Assign) else []
        if table in names and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            return " ".join(str(below.value.value).split())
    return ""


def make_classes() -> str:
    """Makes the table of autocast's classes of operations."""
    rows = [(f"`{precision.name.lower()}`", precision.value) for precision in _tables.Precision]
    return make_table(["class", "treatment"], rows)


def make_floats() -> str:
    """The ranges of floating formats, by `ml_dtypes.finfo`."""
    header = ["format", "sign, exponent, mantissa", "largest", "smallest normal", "smallest subnormal", "epsilon"]
    rows = []
    for name in FLOATS:
        format = describe_float(name)
        ends = [format.largest, format.smallest_normal, format.smallest_subnormal, format.epsilon]
        rows.append([f"`{name}`", f"1 + {format.exponent} + {format.mantissa}", *map(format_number, ends)])
    return make_table(header, rows)


def make_uses() -> str:
    """Makes the table of infinities and uses of floating formats."""
    rows = [(f"`{name}`", "yes" if describe_float(name).has_infinity else "no", use) for name, use in FLOATS.items()]
    return make_table(["format", "infinities", "what for"], rows)


class Float(NamedTuple):
    """A floating format.

    Attributes:
      bits: of a number.
      exponent: bits of its exponent.
      mantissa: bits of its mantissa.
      largest: the largest finite number.
      smallest_normal: the smallest normal one above 0.
      smallest_subnormal: the smallest one above 0.
      epsilon: the step above 1.
      has_infinity: whether it has infinities.
    """

    bits: int
    exponent: int
    mantissa: int
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    has_infinity: bool


def describe_float(name: str) -> Float:
    """The bits, the range and the step of a format.

    >>> describe_float("float16").largest
    65504.0
    """
    if name == "TF32":
        wide = describe_float("float32")
        epsilon = 2.0**-TF32_MANTISSA
        return wide._replace(
            bits=TF32_BITS,
            mantissa=TF32_MANTISSA,
            largest=2.0 ** ml_dtypes.finfo("float32").maxexp * (1 - epsilon / 2),
            smallest_subnormal=wide.smallest_normal * epsilon,
            epsilon=epsilon,
        )
    info = ml_dtypes.finfo(name)
    with np.errstate(all="ignore"):
        has_infinity = bool(np.isinf(np.array(np.inf, np.float32).astype(info.dtype).astype(np.float32)))
    ends = (float(end) for end in (info.max, info.smallest_normal, info.smallest_subnormal, info.eps))
    return Float(info.bits, info.nexp, info.nmant, *ends, has_infinity)


def format_number(number: float) -> str:
    """The number, and the power of two where it is one.

    >>> format_number(65504.0), format_number(2.0**-24)
    ('65504', '2<sup>-24</sup>, 5.96e-08')
    """
    if number < 1 and np.frexp(number)[0] == 0.5:
        return f"2<sup>{int(np.frexp(number)[1]) - 1}</sup>, {number:.3g}"
    return f"{number:.6g}"


def make_quantized() -> str:
    """Makes the table of formats with scales: the dtypes of elements and scales, and the bits per element."""
    rows = [
        (
            "`int8`", "8-bit integers, -127 to 127", "an output channel of a weight, a row of an input",
            "float32", measure_bits(quant.Int8()),
        ),
        (
            "`int4`", "4-bit integers, 16 levels", f"a block of {quant.Int4().block_size} inputs of a channel",
            "float32, and a zero point", measure_bits(quant.Int4()),
        ),
        (
            "`e4m3`", "`float8_e4m3fn`", f"a square of {quant.E4M3().block_size} inputs by as many outputs",
            "float32", measure_bits(quant.E4M3()),
        ),
        (
            "`nf4`", "16 quantiles of a normal distribution",
            f"a block of {quant.NF4().block_size} inputs of a channel", "float32", measure_bits(quant.NF4()),
        ),
        (
            "`float8`", "`float8_e4m3fn` forward, `float8_e5m2` for gradients",
            "a tensor, or with `current/row` a row", "float32, in the state of the layer", "weights stay as they are",
        ),
        (
            "`mxfp8`", "`float8_e4m3fn`", f"a block of {quant.MXFP8().block_size}",
            "a power of two in 8 bits (`float8_e8m0fnu`)", measure_bits(quant.MXFP8()),
        ),
        (
            "`mxfp4`", "`float4_e2m1fn`", f"a block of {quant.MXFP4().block_size}",
            "a power of two in 8 bits (`float8_e8m0fnu`)", measure_bits(quant.MXFP4()),
        ),
        (
            "`nvfp4`", "`float4_e2m1fn`", f"a block of {quant.NVFP4().block_size}, and the tensor",
            "`float8_e4m3fn`, and float32 for the tensor", measure_bits(quant.NVFP4()),
        ),
    ]  # fmt: skip
    return make_table(["format", "numbers", "one scale for", "scales are", "bits per element, with scales"], rows)


def measure_bits(quantization: object) -> str:
    """The bits of a number of a stored weight, 4096 by 4096, with all that belongs to it."""
    import jax
    import jax.numpy as jnp

    weight = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    stored = jax.eval_shape(lambda weight: quant.quantize_array(weight, quantization), weight)
    bits = sum(leaf.size * leaf.dtype.itemsize * 8 for leaf in jax.tree.leaves(stored))
    return f"{bits / weight.size:.3g}"


def make_help(program: str, main: Callable[[list[str]], int], command: str) -> str:
    """Returns the `--help` text of a command, 80 columns wide."""
    printed = io.StringIO()
    narrow = unittest.mock.patch.dict(os.environ, COLUMNS="80")
    with narrow, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    # Before Python 3.13 an option with a short name has its value twice: `-o FILE, --output FILE`.
    text = re.sub(r"^(  -\w) (\w+)(, --[\w-]+ \2)\n +", _write_option, printed.getvalue().strip(), flags=re.MULTILINE)
    return f"```console\n$ {program} {command} --help\n{text}\n```"


def _write_option(found: re.Match[str]) -> str:
    return f"{found[1]}{found[3]}".ljust(_HELP_COLUMN)


_HELP_COLUMN = 24
"""The column of `argparse` in which the description of an option begins."""


PARTS: Mapping[str, Callable[[], str]] = {
    "classes": make_classes,
    **{table: (lambda table=table: make_operations(table)) for table in vars(_tables) if table.isupper()},
    "FUNCTIONS": make_functions,
    "floats": make_floats,
    "uses": make_uses,
    "quantized": make_quantized,
    **{f"help {name}": functools.partial(make_help, "jmp-policy", _main.main, name) for name in _main.COMMANDS},
    **{
        f"example {name}": functools.partial(make_help, "python -m examples.gpt", examples_main.main, name)
        for name in ("train", "compare")
    },
}
"""What a page may ask for, by name."""


def main() -> None:
    """Writes the generated parts of all pages of the reference."""
    for page in sorted(REFERENCE.glob("*.md")):
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
