"""The commands: their arguments, the functions that run them, and their outputs."""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .._base import escape_controls
from ._user_code import UserError, check_numbers, load_call, load_function, load_pair, make_arguments, print_out

_ARRAY = "jax.random.normal(jax.random.key(0), (8, 128))"

_TOKENS = "jax.random.randint(jax.random.key(0), (4, 64), 0, 1000)"

_DOCTOR_EPILOG = """\
--json prints one document with these keys: versions, by package; device (platform, name, system, half_instructions);
sizes; matmuls, a list (name, dtype, multiplied_in, teraflops, speedup); steps, by dtype (seconds, speedup,
multiplied_in); recommendation (policy, reason). Speed-ups are over float32: larger is better."""

_AUDIT_EPILOG = """\
For example, where train.py has train_step(state, batch): write in it
`def make_args(): return make_state(), jax.ShapeDtypeStruct((8, 128), jnp.float32)`, and run
`jmp-policy audit train:train_step --args train:make_args`. --json prints one document with these keys: versions, by
package; device (platform, name, system, half_instructions); function; findings, a list (id, message, source, path,
dtypes, backward, count); rows (path, operation, dtype, backward, count, flops, bytes); matmuls (operation, dtypes,
dtype, source, path, backward, count, flops, precision); uncounted_loops; flops; bytes."""

_LOCK_EPILOG = """\
For example: `jmp-policy lock train:train_step --args train:make_args -o train_step.lock` writes the file, which belongs
in version control. With --check it prints what differs, and exits with status 1 if anything does."""

_NUMERICS_EPILOG = f"""\
For example, where train.py has loss_fn(params, batch): write in it `def step(*args): return
jax.value_and_grad(loss_fn)(*args)` and `def make_args(): return make_params(), {_ARRAY}`, and run
`jmp-policy numerics train:step --args train:make_args --formats float16 int8`. --json prints one document with these
keys: versions, by package; device (platform, name, system, half_instructions); function; formats; first_exponent (the
exponent of the second bin of histograms); rows (path, primitive, source, function, direction, turn, dtype, shape,
count, sampled, times, amax, min_nonzero, rms, zeros, nans, infs, histogram, formats)."""

_DIVERGE_EPILOG = f"""\
For example, where train.py has loss_fn(params, batch): write in it `def f(*args): return
jax.value_and_grad(loss_fn)(*args)`, `def g(*args): return jmp.autocast(f, 'mixed_bfloat16')(*args)` and
`def make_args(): return make_params(), {_ARRAY}`, and run `jmp-policy diverge train:f train:g --args train:make_args`.
--json prints one document with these keys: versions, by package; device (platform, name, system, half_instructions);
function; rows (path, direction, incoming, outgoing, introduced, amplification, cosine, worst, dtype, iterations);
outputs (path, error, gap, is_log_probability); unaligned."""

_PARITY_EPILOG = f"""\
For example, where train.py has trainer(params, tokens), which returns logits, and sampler(params, tokens), which
decodes these tokens with a cache: write in it `def make_args(): return make_params(), {_TOKENS}`, and
run `jmp-policy parity train:trainer train:sampler --args train:make_args`. --json prints one document with these keys:
versions, by package; device (platform, name, system, half_instructions); function; count; mean; median; percentile_99;
largest; kl; k3; outside; effective_sample_size; perplexities; where; by_position; causes; unaligned; perplexity_gap;
rows, as those of diverge with a position for each iteration, the largest introduced error first."""

_TUNE_EPILOG = f"""\
For example, where train.py has loss_fn(params, batch): write in it `def make_args(): return make_params(), {_ARRAY}`,
and run `jmp-policy tune train:loss_fn --args train:make_args --policy mixed_float16 --tolerance 0.01`. It prints the
scopes that must stay in float32, and the map as code. It also tunes Flax modules: for linen, make_args must return the
variables first. --json prints one document with these keys: versions, by package; device (platform, name, system,
half_instructions); function; name; low; kept; policy_map, as PolicyMap.from_config reads it; code; scopes; candidates;
error; tolerance; is_met; is_minimal; trials (kept, error); loss_scale; noise."""


def _add_audit(parser: argparse.ArgumentParser) -> None:
    _add_call(parser, "train:train_step", "; jax.ShapeDtypeStructs suffice")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if anything is found")
    _add_json(parser, "tables")


def _add_lock(parser: argparse.ArgumentParser) -> None:
    from ..numerics import PLATFORMS

    _add_call(parser, "train:train_step", "; jax.ShapeDtypeStructs suffice")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("numerics.lock"), metavar="FILE", help="default: numerics.lock"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the file, and exit with status 1 if it differs"
    )
    parser.add_argument(
        "--platform", choices=PLATFORMS, help="whose matmuls count (default: that of the file, or of this machine)"
    )
    parser.add_argument(
        "--compiled", action=argparse.BooleanOptionalAction,
        help="describe the program that XLA compiled (default: as in the file); a TPU need not be there",
    )  # fmt: skip


def _add_numerics(parser: argparse.ArgumentParser) -> None:
    _add_call(parser, "train:grad_step")
    options = {
        "formats": ("FORMAT", "such as float16, bf16, int4/32 or mxfp8 (default: float16 bfloat16 "
                    "float8_e4m3fn float8_e5m2)"),
        "where": ("WHAT", "matmuls, all, operations such as exp, and patterns of paths (default: matmuls)"),
        "of": ("PASS", "some of forward, recomputed, backward, arguments and results (default: all but recomputed)"),
    }  # fmt: skip
    for name, (metavar, text) in options.items():
        parser.add_argument(f"--{name}", nargs="+", metavar=metavar, help=text)
    _add_json(parser, "a table")
    _add_files(parser, page=", with all rows, that sorts", picture="the exponents")


def _add_diverge(parser: argparse.ArgumentParser) -> None:
    _add_pair(parser, ("F", "the reference, such as train:grad_step"), ("G", "train:low_grad_step"))
    _add_json(parser, "a table")
    _add_files(parser, page="", picture="the errors along the depth")


def _add_parity(parser: argparse.ArgumentParser) -> None:
    _add_pair(parser, ("TRAINER", "a teacher-forced pass, such as train:trainer"), ("SAMPLER", "train:sampler"))
    parser.add_argument("--mask", metavar="MODULE:FUNCTION", help="a function that returns True at real tokens")
    for name in ("mean", "largest"):
        parser.add_argument(
            f"--{name}", type=float, metavar="BOUND", help=f"exit with status 1 if the {name} difference is larger"
        )
    _add_json(parser, "a table")
    _add_files(parser, page="", picture="the differences along the positions")


def _add_pair(parser: argparse.ArgumentParser, first: tuple[str, str], second: tuple[str, str]) -> None:
    """Adds two functions, each with its name and a description or an example, and `--args`."""
    parser.add_argument("function", metavar=f"MODULE:{first[0]}", help=f"{first[1]}, in this folder")
    parser.add_argument(
        "other",
        metavar=f"MODULE:{second[0]}",
        help=f"a function of the same arguments, such as {second[1]}, or an .npz file of recorded values",
    )
    _add_call_arguments(parser)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    _add_call(parser, "train:loss_fn")
    parser.add_argument("--policy", default="mixed_float16", help="what to tune (default: mixed_float16)")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, metavar="ERROR", help="the largest relative error (default: 0.01)"
    )
    parser.add_argument(
        "--metric",
        metavar="MODULE:FUNCTION",
        help="a function metric(fun, *args) that returns what to compare, such as the loss after twenty steps; fun is "
        "the function under a trial map",
    )
    budget, seed = _integer_from(1), _integer_from(0)
    parser.add_argument("--budget", type=budget, metavar="N", help="try at most N maps, each with one compilation")
    parser.add_argument("--loss-scale", type=float, metavar="SCALE", help="multiply the loss by this for gradients")
    parser.add_argument("--has-aux", action="store_true", help="the function returns a loss and auxiliary data")
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="seed of the random weights that turn outputs into a loss"
    )
    parser.add_argument("--trials", type=Path, metavar="FILE", help="save trials here, and resume from those in it")
    _add_json(parser, "a table")
    _add_files(parser, page="", picture="the trials")


def _add_call(parser: argparse.ArgumentParser, example: str, note: str = "") -> None:
    """Adds the function of a command and `--args`."""
    parser.add_argument("function", metavar="MODULE:FUNCTION", help=f"such as {example}, in this folder")
    _add_call_arguments(parser, note)


def _add_call_arguments(parser: argparse.ArgumentParser, note: str = "") -> None:
    returned = f"a function that returns the arguments: a tuple of them, or a single one{note} (default: no arguments)"
    parser.add_argument("--args", metavar="MODULE:FUNCTION", help=returned)


def _add_json(parser: argparse.ArgumentParser, instead_of: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print one JSON document instead of {instead_of}")


def _integer_from(least: int) -> Callable[[str], int]:
    """Makes the type of an argument that is an integer from `least` to 2**32 - 1."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**32:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} to {2**32 - 1}, got {text!r}")
        return int(text)

    return read


def _run_doctor(arguments: argparse.Namespace) -> int:
    from ._doctor import diagnose

    diagnosis = diagnose()
    if arguments.json:
        print_out(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        print_text(diagnosis)
    return 0


def _audit(arguments: argparse.Namespace) -> Any:
    from ..numerics import audit

    fun, args = load_call(arguments, audit, example="jax.ShapeDtypeStruct((8, 128), jnp.float32)")
    return audit(fun)(*args)


def _lock(arguments: argparse.Namespace) -> int:
    from ..numerics import load_lock, lock, lock_like, name_locked_function

    file, platform = arguments.output, arguments.platform
    if str(file) == "-":
        raise UserError("--output - is not a file: name one. For example: -o numerics.lock")
    _check_file("--output", file)
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # prints are not part of the report
            warnings.filterwarnings("ignore", "lock found no")  # `save` raises
            fun, args = load_call(arguments, lock, example="jax.ShapeDtypeStruct((8, 128), jnp.float32)")
            locked = load_lock(file, is_damaged_ok=not arguments.check, platform=platform)
            name = name_locked_function(load_function(arguments.function))
            _check_locked(arguments, locked, name)
            now = lock_like(locked, fun, platform, arguments.compiled)(*args)
        now = dataclasses.replace(now, function=name)
        if arguments.check and locked is not None:
            difference = locked.diff(now)
            accept = "\n\nIf you meant to change it: the same command without --check" if difference else ""
            print_text(f"{difference}{accept}")
            return 1 if difference else 0
        now.save(file)
    except ValueError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        if str(error.filename) != str(file):
            raise
        raise UserError(f"--output {file}: {error.strerror}") from None
    print_text(f"{file}: {len(str(now).splitlines())} lines")
    return 0


def _check_locked(arguments: argparse.Namespace, locked: Any, name: str) -> None:
    """Rejects a missing file with `--check`, and without it a file of another function."""
    file, before = arguments.output, locked and locked.function
    if locked is None and arguments.check:
        raise UserError(f"--check: {file} is missing or empty. Write it first, without --check")
    if before and before.rpartition(":")[2] != name and not arguments.check:
        raise UserError(
            f"{file} is of {before}, not of {name}. Name another with -o, or delete it if the function was renamed"
        )


def _collect(arguments: argparse.Namespace) -> Any:
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


def _diverge(arguments: argparse.Namespace) -> Any:
    import jmp_policy as jmp

    diverge = jmp.contrib.diverge
    f, g, args = load_pair(arguments, lambda fun: diverge(fun, fun), example=_ARRAY)
    if not isinstance(g, str):
        return diverge(f, g)(*args)
    try:
        return diverge(f, g)(*args)
    except (OSError, ValueError) as error:
        raise UserError(f"{g}: {error}") from None


def _parity(arguments: argparse.Namespace) -> Any:
    import jmp_policy as jmp

    parity = jmp.contrib.parity
    trainer, sampler, args = load_pair(arguments, lambda fun: parity(fun, fun), example=_TOKENS)
    mask = None if arguments.mask is None else make_arguments(arguments.mask)[0]
    try:
        return parity(trainer, sampler)(*args, mask)
    except (OSError, ValueError) as error:
        raise UserError(f"{arguments.other}: {error}") from None


def _exceeds(parity: Any, arguments: argparse.Namespace) -> bool:
    given = {name: getattr(arguments, name) for name in ("mean", "largest")}
    bounds = {name: bound for name, bound in given.items() if bound is not None}
    try:
        if bounds:
            parity.assert_within(**bounds)
    except AssertionError:
        return True
    except ValueError as error:
        raise UserError(f"--{error}") from None
    return False


def _tune(arguments: argparse.Namespace) -> Any:
    from ..numerics import tune

    _check_file("--trials", arguments.trials)
    target, args = _load_target(arguments)
    check_numbers(args, arguments.args, _ARRAY)
    metric = None if arguments.metric is None else load_function(arguments.metric)
    options = {name: getattr(arguments, name) for name in ("tolerance", "budget", "has_aux", "loss_scale", "seed")}
    try:
        return tune(target, args, arguments.policy, metric=metric, trials_file=arguments.trials, **options)
    except ValueError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        if arguments.trials is None or error.filename != str(arguments.trials):
            raise
        raise UserError(f"--trials {arguments.trials}: {error.strerror}") from None


def _load_target(arguments: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    from ..modules import find_adapter

    found = load_function(arguments.function)
    if isinstance(found, type):
        name = arguments.function
        raise UserError(f"{name}: tune takes a function or a module, and {found.__name__} is a class.")
    if find_adapter(found) is not None:
        return found, () if arguments.args is None else make_arguments(arguments.args)
    return load_call(arguments, callable, example=_ARRAY)


def _run_report(
    make_report: Callable[[argparse.Namespace], Any],
    arguments: argparse.Namespace,
    has_problem: Callable[[Any], bool] = lambda report: False,
) -> int:
    """Makes a report, writes its files, and prints it as a table or as JSON with the machine and the function first."""
    _check_files(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # prints of user code are not part of the report
        report = make_report(arguments)
    _write_files(report, arguments)
    if arguments.json:
        from ._doctor import find_machine

        document = {**find_machine().to_dict(), "function": arguments.function, **report.to_dict()}
        print_out(json.dumps(document, indent=2))
    else:
        print_text(report)
    return 1 if has_problem(report) else 0


def _add_files(parser: argparse.ArgumentParser, *, page: str, picture: str) -> None:
    """Adds the options `--html` and `--plot`; `page` and `picture` describe their contents in the help."""
    parser.add_argument("--html", type=Path, metavar="FILE", help=f"write a page, too{page}")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw {picture}, too: a .png, .svg or .pdf")


def _check_files(arguments: argparse.Namespace) -> None:
    """Checks the options `--html` and `--plot`, if the command has them, before the function runs."""
    if "plot" not in arguments:
        return
    _check_file("--html", arguments.html)
    _check_file("--plot", arguments.plot)
    if arguments.plot is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    if arguments.plot.suffix.removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(
            f"--plot {arguments.plot} is not an image format of matplotlib: name it {arguments.plot.stem}.png"
        )


def _check_file(option: str, file: Path | None) -> None:
    # `Path.is_dir` raises for names that are too long.
    if file is not None and not os.path.isdir(file.parent):
        raise UserError(f"{option} {file}: the folder {file.parent} does not exist")
    if file is not None and os.path.isdir(file):
        raise UserError(f"{option} {file} is a folder: name a file. For example: {option} {file / 'report'}")


def _write_files(report: Any, arguments: argparse.Namespace) -> None:
    """Writes the page and the plot that `--html` and `--plot` ask for."""
    if "plot" not in arguments:
        return
    if arguments.html:
        from ..report import draw_document

        title = f"{arguments.command} of {arguments.function}"
        with _explain_unwritten("--html", arguments.html):
            arguments.html.write_text(draw_document(report, title), encoding="utf-8")
    if arguments.plot:
        with _explain_unwritten("--plot", arguments.plot):
            report.plot().savefig(arguments.plot, dpi=150)


@contextlib.contextmanager
def _explain_unwritten(option: str, file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {file} cannot be written: {error.strerror}") from None


def print_text(report: Any) -> None:
    """Prints a report as text. Paths and names may have control characters."""
    print_out(escape_controls(str(report)))


class Command(NamedTuple):
    """A command of `jmp-policy`: the texts of its help, the function that adds its arguments, and the one that runs."""

    help: str
    description: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "doctor": Command(
        "how fast this machine trains in each dtype, and which policy to use",
        "Measure matmuls, and forward and backward of a perceptron, in each dtype, and recommend a policy.",
        _DOCTOR_EPILOG, lambda parser: _add_json(parser, "tables"), _run_doctor,
    ),
    "audit": Command(
        "which operations of a function run in which dtype, and where that loses numbers",
        "Trace a function without running it. Print the dtype of each operation, and the lines that are likely to lose "
        "precision or time.",
        _AUDIT_EPILOG, _add_audit,
        lambda arguments: _run_report(_audit, arguments, lambda report: arguments.strict and report.findings),
    ),
    "lock": Command(
        "what a function computes in which dtype, as a file that a test compares",
        "Trace a function without running it. Write the dtypes of its matmuls, casts, sums, arguments and results to a "
        "file, a line per module and fact, or compare them with the file.",
        _LOCK_EPILOG, _add_lock, _lock,
    ),
    "numerics": Command(
        "what the tensors of a function look like, and what number formats would do to them",
        "Run a function once. Print the range of each tensor, and the share of it that would underflow or overflow in "
        "each number format.",
        _NUMERICS_EPILOG, _add_numerics, functools.partial(_run_report, _collect),
    ),
    "diverge": Command(
        "which modules make two versions of a function differ",
        "Run two functions of one model once. Print, for each module and named scope, the error that comes in, goes "
        "out, and is introduced if it alone is replaced.",
        _DIVERGE_EPILOG, _add_diverge, functools.partial(_run_report, _diverge),
    ),
    "parity": Command(
        "whether a trainer and a sampler give tokens the same log-probabilities",
        "Run a trainer and a sampler on the same tokens. Print the difference of their log-probabilities, and the "
        "modules and named scopes that introduce it.",
        _PARITY_EPILOG, _add_parity,
        lambda arguments: _run_report(_parity, arguments, lambda report: _exceeds(report, arguments)),
    ),
    "tune": Command(
        "which modules must stay in float32, found by trying",
        "Find the smallest set of modules and named scopes that must stay in float32 for the loss and gradients of a "
        "function to stay within a tolerance of float32. Print it as a PolicyMap.",
        _TUNE_EPILOG, _add_tune, lambda arguments: _run_report(_tune, arguments, lambda report: not report.is_met),
    ),
}  # fmt: skip
