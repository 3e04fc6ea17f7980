"""`jmp-policy numerics`."""

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from ._command import Commands, UserError, add_call
from ._outputs import add_files, check_files, print_report, write_files
from ._user_code import check_numbers, load_call

if TYPE_CHECKING:
    from ..numerics import Stats

_ARRAY = "jax.random.normal(jax.random.key(0), (8, 128))"

_EPILOG = f"""\
For example, where train.py has loss_fn(params, batch): write in it `def step(*args): return
jax.value_and_grad(loss_fn)(*args)` and `def make_args(): return make_params(), {_ARRAY}`, and run
`jmp-policy numerics train:step --args train:make_args --formats float16 int8`. --json prints one document with these
keys: versions, by package; device (platform, name, system, half_instructions); function; formats; first_exponent (the
exponent of the second bin of histograms); rows (path, primitive, source, function, direction, turn, dtype, shape,
count, sampled, times, amax, min_nonzero, rms, zeros, nans, infs, histogram, formats)."""


def add_numerics(commands: Commands) -> None:
    """Adds `jmp-policy numerics` to the subparsers of argparse."""
    parser = commands.add_parser(
        "numerics",
        help="what the tensors of a function look like, and what number formats would do to them",
        description="Run a function once. Print the range of each tensor, and the share of it that would underflow "
        "or overflow in each number format.",
        epilog=_EPILOG,
    )
    add_call(parser, "train:grad_step")
    options = {
        "formats": ("FORMAT", "such as float16, bf16, int4/32 or mxfp8 (default: float16 bfloat16 "
                    "float8_e4m3fn float8_e5m2)"),
        "where": ("WHAT", "matmuls, all, operations such as exp, and patterns of paths (default: matmuls)"),
        "of": ("PASS", "some of forward, recomputed, backward, arguments and results (default: all but recomputed)"),
    }  # fmt: skip
    for name, (metavar, text) in options.items():
        parser.add_argument(f"--{name}", nargs="+", metavar=metavar, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    add_files(parser, page=", with all rows, that sorts", picture="the exponents")
    parser.set_defaults(run=_run_numerics)


def _run_numerics(arguments: argparse.Namespace) -> int:
    check_files(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # prints of user code are not part of the report
        stats = _measure_function(arguments)
    write_files(stats, arguments, f"numerics of {arguments.function}")
    print_report(stats, arguments)
    return 0


def _measure_function(arguments: argparse.Namespace) -> "Stats":
    from ..numerics import collect

    chosen = {name: getattr(arguments, name) for name in ("formats", "where", "of") if getattr(arguments, name)}
    measure = lambda fun: collect(fun, **chosen)
    try:
        measure(len)
    except ValueError as error:
        raise UserError(str(error)) from None
    fun, args = load_call(arguments, measure, example=_ARRAY)
    check_numbers(args, arguments.args, _ARRAY)
    try:
        return measure(fun)(*args)[1]
    except ValueError as error:
        if not str(error).startswith("where has"):  # patterns can only be checked after tracing
            raise
        raise UserError(str(error)) from None
