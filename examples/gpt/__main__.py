"""The command line: `python -m examples.gpt train` and `python -m examples.gpt compare`."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from . import UserError
from .devices import CHILD, ToldElsewhere, join, run_locally


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, 1 if training is stuck, 2 for an error of the user, or 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = make_parser().parse_args(argv)
    try:
        return arguments.run(arguments, argv)
    except ToldElsewhere:
        return 2
    except ModuleNotFoundError as error:
        return fail(f"{error.name} is not installed: pip install -e '.[demo]'", 2)
    except UserError as error:
        return fail(str(error), 2)
    except FloatingPointError as error:
        return fail(str(error), 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except Exception:
        if CHILD not in os.environ and jax.process_count() == 1:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # to leave as usual would be to wait for the other processes


def fail(message: str, status: int) -> int:
    """Prints an error in one line; returns the exit status."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    return status


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of both commands."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpt", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train(commands)
    add_compare(commands)
    return parser


def add_train(commands: Any) -> None:
    """Adds the command `train` and its options."""
    train = commands.add_parser(
        "train",
        help="train a byte-level GPT in mixed precision on real text",
        description="Train a byte-level GPT in mixed precision, by default on the sources of the Python standard "
        "library. Ctrl-C and SIGTERM save first; --resume continues bit-exactly.",
    )
    train.set_defaults(run=run_train)
    train.add_argument("--api", choices=("nnx", "linen"), help="the Flax API of the model (default: nnx)")
    train.add_argument("--data", nargs="+", metavar="PATH", help="text files and folders to train on")
    train.add_argument("--policy", help="such as float8_from_mixed_bfloat16 (default: compute in half precision)")
    train.add_argument("--steps", type=integer(1), help="where to stop (default: 1500)")
    train.add_argument("--seed", type=integer(0), help="of the parameters and batches (default: 0)")
    train.add_argument("--out", type=Path, help="the folder of the run (default: the next of runs/001, runs/002, ...)")
    train.add_argument("--numerics", type=integer(1), metavar="N", help="measure tensors on every Nth step")
    train.add_argument("--resume", action="store_true", help="continue the run in --out, or the last one in runs/")
    train.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="train on several devices, such as data=2,fsdp=2,tensor=2: data splits the batch; fsdp also splits "
        "parameters; tensor splits heads and wide layers. A run may be resumed on another mesh. On a CPU, "
        "JAX_NUM_CPU_DEVICES sets how many devices there are (default: one device; with several processes, data over "
        "all devices)",
    )
    several = train.add_argument_group("several processes", "All processes need a shared file system.")
    several.add_argument(
        "--local-processes", type=integer(1), metavar="N", help="train in N processes on the CPU of this machine"
    )
    several.add_argument(
        "--coordinator",
        default=os.environ.get("JAX_COORDINATOR_ADDRESS"),
        metavar="HOST:PORT",
        help="address of process 0; or auto, as JAX finds it in Slurm, Open MPI, Kubernetes and on TPUs",
    )
    several.add_argument("--processes", type=integer(1), metavar="N", help="the number of processes")
    several.add_argument("--process", type=integer(0), metavar="I", help="the number of this process, from 0")
    several.add_argument(
        "--timeout",
        type=integer(1),
        default=50,
        metavar="SECONDS",
        help="how long to wait for a process that does not answer",
    )


def add_compare(commands: Any) -> None:
    """Adds the command `compare` and its options."""
    compare = commands.add_parser(
        "compare",
        help="the same short training in float32, bfloat16 and float16 with and without loss scaling",
        description="Train in float32, in bfloat16, and in float16 without and with a loss scale, and print one table.",
    )
    compare.set_defaults(run=run_compare)
    compare.add_argument("--data", nargs="+", default=(), metavar="PATH", help="text files and folders to train on")
    compare.add_argument("--steps", type=integer(1), default=200, help="of each training (default: %(default)s)")
    compare.add_argument("--seed", type=integer(0), default=0, help="of parameters and batches (default: %(default)s)")
    compare.add_argument("--out", type=Path, help="the folder (default: the next of runs/compare-001, ...)")


def run_train(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Trains, or starts the local processes that do."""
    if arguments.local_processes is not None and CHILD not in os.environ:
        return run_locally(argv, arguments.local_processes, arguments.mesh)
    if arguments.coordinator is not None:
        join(arguments.coordinator, arguments.processes, arguments.process, arguments.timeout)
    from .train import train  # after `join`: the processes meet before JAX looks for devices

    names = ("api", "policy", "data", "steps", "seed", "numerics", "mesh")
    wishes = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return 130 if train(wishes, out=arguments.out, resume=arguments.resume) else 0


def run_compare(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Compares the policies."""
    from .compare import compare

    compare(arguments.data, arguments.steps, arguments.seed, arguments.out)
    return 0


def integer(least: int) -> Callable[[str], int]:
    """Returns a function that reads an integer of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**32:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} to {2**32 - 1}, got {text!r}")
        return int(text)

    return read


if __name__ == "__main__":
    sys.exit(main())
