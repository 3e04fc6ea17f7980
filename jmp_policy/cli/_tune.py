"""`jmp-policy tune`."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._command import Commands, UserError, add_call, integer_from
from ._outputs import add_files, check_files, check_folder, print_report, write_files
from ._user_code import check_numbers, load_call, load_function, make_arguments

if TYPE_CHECKING:
    from .. import Tuning

_ARRAY = "jax.random.normal(jax.random.key(0), (8, 128))"

_EPILOG = f"""\
For example, where train.py has loss_fn(params, batch): write in it `def make_args(): return make_params(), {_ARRAY}`,
and run `jmp-policy tune train:loss_fn --args train:make_args --policy mixed_float16 --tolerance 0.01`. It prints the
scopes that must stay in float32, and the map as code. It also tunes Flax modules: for linen, make_args must return the
variables first. --json prints one document with these keys: versions, by package; device (platform, name, system,
half_instructions); function; name; low; kept; policy_map, as PolicyMap.from_config reads it; code; scopes; candidates;
error; tolerance; is_met; is_minimal; trials (kept, error); loss_scale; noise."""


def add_tune(commands: Commands) -> None:
    """Adds `jmp-policy tune` to the subparsers of argparse."""
    parser = commands.add_parser(
        "tune",
        help="which modules must stay in float32, found by trying",
        description="Find the smallest set of modules and named scopes that must stay in float32 for the loss and "
        "gradients of a function to stay within a tolerance of float32. Print it as a PolicyMap.",
        epilog=_EPILOG,
    )
    add_call(parser, "train:loss_fn")
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
    budget = integer_from(1)
    parser.add_argument("--budget", type=budget, metavar="N", help="try at most N maps, each with one compilation")
    parser.add_argument("--loss-scale", type=float, metavar="SCALE", help="multiply the loss by this for gradients")
    parser.add_argument("--has-aux", action="store_true", help="the function returns a loss and auxiliary data")
    seed = integer_from(0)
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="seed of the random weights that turn outputs into a loss"
    )
    parser.add_argument("--trials", type=Path, metavar="FILE", help="save trials here, and resume from those in it")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    add_files(parser, page="", picture="the trials")
    parser.set_defaults(run=_run_tune)


def _run_tune(arguments: argparse.Namespace) -> int:
    """Prints and writes the report; returns 1 if no map is within the tolerance."""
    check_files(arguments)
    check_folder("--trials", arguments.trials)
    with contextlib.redirect_stdout(sys.stderr):  # prints of user code are not part of the report
        tuning = _tune_function(arguments)
    write_files(tuning, arguments, f"tune of {arguments.function}")
    print_report(tuning, arguments)
    return 0 if tuning.is_met else 1


def _tune_function(arguments: argparse.Namespace) -> "Tuning":
    from ..numerics._tune import tune

    target, args = _load_target(arguments)
    check_numbers(args, arguments.args, _ARRAY)
    metric = None if arguments.metric is None else load_function(arguments.metric)
    try:
        return tune(
            target,
            args,
            arguments.policy,
            tolerance=arguments.tolerance,
            metric=metric,
            budget=arguments.budget,
            has_aux=arguments.has_aux,
            loss_scale=arguments.loss_scale,
            trials_file=arguments.trials,
            seed=arguments.seed,
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def _load_target(arguments: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    from ..modules import find_adapter

    found = load_function(arguments.function)
    if find_adapter(found) is not None and not isinstance(found, type):
        return found, () if arguments.args is None else make_arguments(arguments.args)
    if isinstance(found, type):
        name = arguments.function
        raise UserError(f"{name}: tune takes a function or a module, and {found.__name__} is a class.")
    return load_call(arguments, callable, example=_ARRAY)
