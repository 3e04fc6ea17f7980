"""`jmp-policy train` in several processes: who is one of them, and the child process that each of them trains in.

JAX ends a process whose peers are gone from C++, with a stack trace. So what the user starts does not train: it starts
a child that does, passes signals on to it, and makes one line of what JAX says. With `--local-processes` it starts all
of the children, on this machine. A child ends when the process that started it does.
"""

import argparse
import contextlib
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Iterator

from .._base import escape_controls
from ._children import Children, describe_loss
from ._command import UserError, positive_int

TIMEOUT = 50
_CHILD = "JMP_POLICY_CHILD"
_LOST = re.compile("gloo|coordination|heartbeat|unavailable|connection|deadline|barrier", re.IGNORECASE)


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that make several processes of a command."""
    group = parser.add_argument_group("several processes", "They need a file system that all of them see.")
    group.add_argument(
        "--local-processes",
        type=positive_int,
        metavar="N",
        help="train in N processes on the CPU of this machine, each with its share of the devices of --mesh",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where the processes meet: an address of the machine of process 0, and a free port there; or auto, as "
        "JAX finds it in Slurm, Open MPI, Kubernetes and on TPUs (default: JAX_COORDINATOR_ADDRESS)",
    )
    group.add_argument("--processes", type=positive_int, metavar="N", help="how many (default: JAX_NUM_PROCESSES)")
    group.add_argument("--process", type=int, metavar="I", help="which one this is, from 0 (default: JAX_PROCESS_ID)")
    group.add_argument(
        "--timeout",
        type=positive_int,
        default=TIMEOUT,
        metavar="SECONDS",
        help="how long to wait for a process that does not come, or does not answer any more (default: %(default)s)",
    )


def should_start_processes(arguments: argparse.Namespace) -> bool:
    """Whether this process starts others that train, and is not one of those."""
    has_several = arguments.local_processes is not None or _find_coordinator(arguments) is not None
    return has_several and _CHILD not in os.environ


def start_processes(arguments: argparse.Namespace) -> int:
    """Starts the processes that train on this machine, and waits for them; returns the exit status.

    Raises:
      UserError: the options do not fit together, the port is not free, or this is Windows.
    """
    if sys.platform == "win32":
        raise UserError("several processes need Linux or macOS: on Windows JAX has no collectives between CPUs")
    command = [sys.executable, "-m", "jmp_policy", *arguments.argv]
    environment = {**os.environ, _CHILD: "1"}
    count = arguments.local_processes
    if count is None:
        place = _read_place(arguments)
        _check_port(place)
        return Children([command], environment).wait()
    if arguments.coordinator is not None or arguments.process is not None or arguments.processes is not None:
        raise UserError("--local-processes starts all processes: leave --coordinator, --processes and --process out")
    environment |= {"JAX_PLATFORMS": "cpu"}
    environment.setdefault("JAX_NUM_CPU_DEVICES", str(_share_devices(arguments.mesh, count)))
    where = ["--coordinator", f"127.0.0.1:{find_free_port()}", "--processes", str(count)]
    commands = [[*command, *where, "--process", str(index)] for index in range(count)]
    return Children(commands, environment).wait()


def join_processes(arguments: argparse.Namespace) -> bool:
    """Joins the other processes of the run, if there are any; returns whether this one is the first.

    Raises:
      UserError: the options do not fit together.
    """
    if _CHILD not in os.environ:
        return True
    import jax
    from jax.experimental import multihost_utils

    threading.Thread(target=_end_with_parent, daemon=True).start()
    waits = {
        "initialization_timeout": arguments.timeout,
        "heartbeat_timeout_seconds": arguments.timeout,
        "shutdown_timeout_seconds": arguments.timeout,
    }
    place = _read_place(arguments)
    if place is None:
        jax.distributed.initialize(**waits)
    else:
        jax.distributed.initialize(*place, **waits)
    # On CPUs they have 30 seconds to meet for the first time: before one of them is busy.
    multihost_utils.sync_global_devices("joined")
    return jax.process_index() == 0


Place = tuple[str, int, int]


def _find_coordinator(arguments: argparse.Namespace) -> str | None:
    return arguments.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")


def _read_place(arguments: argparse.Namespace) -> Place | None:
    """The address of the coordinator, the number of processes and which one this is; `None` if JAX finds them."""
    address = _find_coordinator(arguments)
    if address is None or address == "auto":
        return None
    count = arguments.processes if arguments.processes is not None else _read_number("JAX_NUM_PROCESSES")
    index = arguments.process if arguments.process is not None else _read_number("JAX_PROCESS_ID")
    if count is None or index is None:
        missing = "--processes (or JAX_NUM_PROCESSES)" if count is None else "--process (or JAX_PROCESS_ID)"
        raise UserError(f"--coordinator {address} needs {missing}, for example: --processes 2 --process 0")
    if not 0 <= index < count:
        raise UserError(f"--process {index}: {count} processes are numbered from 0 to {count - 1}")
    port = address.rpartition(":")[2]
    if not re.fullmatch(r".+:\d+", address) or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator {address}: expected a host and a port, for example: 10.0.0.1:1234")
    return address, count, index


def _read_number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.isdecimal():
        raise UserError(f"{variable}={text!r}: expected a number, for example: {variable}=2")
    return None if text is None else int(text)


def _check_port(place: Place | None) -> None:
    """Checks that the coordinator can listen: gRPC would share the port of another run, and confuse the two."""
    if place is None or place[2] != 0:
        return
    address = place[0]
    try:
        with socket.create_server(("", int(address.rpartition(":")[2]))):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"--coordinator {address}: process 0 cannot listen there ({reason}): choose another port"
        ) from None


def find_free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _share_devices(mesh: str | None, count: int) -> int:
    """How many devices each of the local processes makes of the CPU."""
    if mesh is None:
        return 1
    from examples.gpt import MeshShape

    size = MeshShape.parse(mesh).size
    if size % count:
        raise UserError(f"--mesh {mesh} has {size} devices, which {count} processes cannot share equally")
    return size // count


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone, whose end of the pipe closes however it went."""
    os.read(0, 1)
    os._exit(1)


@contextlib.contextmanager
def end_after_errors() -> Iterator[None]:
    """Ends a process of several at once where something has failed: to leave as usual would be to wait for the others.

    What all processes know of, such as the errors of a user, is left to the caller.
    """
    try:
        yield
    except (UserError, FloatingPointError):
        raise
    except Exception as error:
        if _CHILD not in os.environ:
            raise
        if type(error).__name__ == "JaxRuntimeError" and _LOST.search(str(error)):
            print("jmp-policy: error:", escape_controls(describe_loss(str(error))), file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
