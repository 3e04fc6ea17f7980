"""Several devices and several processes: the mesh of a run, where its arrays lie, and what processes agree on.

The functions that run inside `jit` read the mesh that `jax.set_mesh` has set. Without one they return their arguments,
and the compiled program is that of one device.
"""

import contextlib
import functools
import itertools
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from . import UserError
from .model import GPTConfig

GRACE = 15.0
"""Seconds that the other local processes have to end by themselves once one has failed."""


AXES = "data", "fsdp", "tensor"
"""data splits the windows of a batch; fsdp those too and, at rest, parameters and optimizer state; tensor splits heads,
wide layers and the vocabulary."""

ROWS = "data", "fsdp"
"""The axes along which a batch is split."""

# Megatron's split: layers that widen are split along tensor by their outputs, the next ones by their inputs, so each
# pair costs one sum of activations. The other dimension is split along fsdp. Arrays that are not here are copied.
_RULES = (
    (re.compile(r"\bembed\.embedding$"), P("tensor", "fsdp")),
    (re.compile(r"\bpositions\.embedding$"), P(None, "fsdp")),
    (re.compile(r"\b(qkv|expand)\.kernel$"), P("fsdp", "tensor")),
    (re.compile(r"\b(project|contract)\.kernel$"), P("tensor", "fsdp")),
    (re.compile(r"\bexpand\.bias$"), P("tensor")),
)


def parse_mesh(text: str) -> dict[str, int]:
    """Reads the number of devices along each axis; raises a UserError if the text says something else.

    >>> parse_mesh("data=2,tensor=4")
    {'data': 2, 'fsdp': 1, 'tensor': 4}
    """
    sizes = [part.replace(" ", "").partition("=") for part in text.split(",")]
    named = {axis: int(size) for axis, _, size in sizes if axis in AXES and size.isdecimal() and int(size)}
    if len(named) != len(sizes):
        raise UserError(f"--mesh {text}: expected sizes of the axes {', '.join(AXES)}, for example: data=2,fsdp=2")
    return dict.fromkeys(AXES, 1) | named


def make_mesh(text: str, model: GPTConfig, batch_size: int) -> Mesh:
    """Makes the mesh of the first devices, or of all devices of several processes.

    Raises:
      UserError: an axis does not divide the size that it splits, there are too few devices, or a process has none.
    """
    data, fsdp, tensor = parse_mesh(text).values()
    for axes, size, count, what in (
        ("data * fsdp", data * fsdp, batch_size, "windows of a batch"),
        ("fsdp", fsdp, model.width, "channels of the model"),
        ("tensor", tensor, model.heads, "heads of the model"),
        ("tensor", tensor, model.vocabulary, "tokens of the vocabulary"),
    ):
        if count % size:
            raise UserError(f"--mesh {text}: {axes} = {size} does not divide the {count} {what}")
    needed, found, processes = data * fsdp * tensor, jax.device_count(), jax.process_count()
    if needed > found or (processes > 1 and needed < found):
        raise UserError(
            f"--mesh {text} needs {needed} devices, and there are {found} in {processes} process(es): for example "
            f"--mesh data={found}. On a CPU, JAX_NUM_CPU_DEVICES sets the number of devices of a process"
        )
    # XLA places the arrays that have no constraint below, so the model is written as for one device.
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def find_spec(path: jax.tree_util.KeyPath) -> P:
    """Returns how an array of the state is split: a parameter, its gradient, or its optimizer state.

    >>> find_spec(tuple(map(jax.tree_util.DictKey, ("mu", "blocks_0", "attention", "qkv", "kernel"))))
    P('fsdp', 'tensor')
    """
    name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")  # of an nnx.Variable
    return next((spec for pattern, spec in _RULES if pattern.search(name)), P())


def shard_state(tree: Any) -> Any:
    """Constrains a state to `find_spec`, inside `jit`. Otherwise XLA chooses, and the next step may compile again."""
    if not _has_mesh():
        return tree
    constrain = lambda path, leaf: jax.lax.with_sharding_constraint(leaf, find_spec(path))
    return jax.tree_util.tree_map_with_path(constrain, tree)


def shard_rows(x: jax.Array, *others: str | None) -> jax.Array:
    """Constrains activations `(batch, ...)` to the rows of a batch, inside `jit`, and further dimensions to `others`.

    Otherwise XLA may split the channels of activations like those of parameters, and move both.
    """
    return jax.lax.with_sharding_constraint(x, P(ROWS, *others)) if _has_mesh() else x


def shard_channels(x: jax.Array) -> jax.Array:
    """Constrains embeddings `(batch, length, channels)` to the layout of a lookup in a split table, inside `jit`.

    Changing to `shard_rows` afterwards moves each activation once. Otherwise XLA gathers the whole batch.
    """
    return jax.lax.with_sharding_constraint(x, P("data", None, "fsdp")) if _has_mesh() else x


def _has_mesh() -> bool:
    return set(AXES) <= set(jax.sharding.get_abstract_mesh().axis_names)


def place_state(tree: Any, mesh: Mesh) -> Any:
    """Puts a state, which every process has whole, onto a mesh."""

    def place(path: jax.tree_util.KeyPath, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf  # of a checkpoint, which is read to where it belongs
        whole, sharding = np.asarray(leaf), NamedSharding(mesh, find_spec(path))
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree_util.tree_map_with_path(place, tree)


def make_batch(draw: Callable[[slice], np.ndarray], shape: tuple[int, ...], mesh: Mesh) -> jax.Array:
    """Makes a batch that is split along its rows; each process draws only the rows of its devices."""

    def draw_part(index: Any) -> np.ndarray:
        return draw(index[0])

    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(ROWS)), draw_part)


def copy_to_all(tree: Any, mesh: Mesh | None) -> Any:
    """Gives every device a whole copy, so that every process can read it on the host."""
    return tree if mesh is None else jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)


def run_locally(argv: Sequence[str], count: int, mesh: str | None) -> int:
    """Trains in `count` processes on the CPU of this machine; returns the exit status.

    Raises:
      UserError: the processes cannot share the devices of the mesh equally.
    """
    size = count if mesh is None else math.prod(parse_mesh(mesh).values())
    if size % count:
        raise UserError(f"--mesh {mesh} has {size} devices, which {count} processes cannot share equally")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(size // count), CHILD: "1"}
    command = [sys.executable, "-m", "examples.gpt", *argv, "--coordinator", f"127.0.0.1:{port}"]
    children = [
        subprocess.Popen(
            [*command, "--processes", str(count), "--process", str(index)],
            env=environment,
            stdin=subprocess.PIPE,  # closes when this process ends, however it does: `join` waits for that
        )
        for index in range(count)
    ]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the children too
    signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in children])
    try:
        while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
            time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for child in children:
                child.wait(GRACE)
    finally:
        for child in children:
            child.kill()
    return next((status if status > 0 else 1 for child in children if (status := child.wait())), 0)


CHILD = "EXAMPLE_GPT_CHILD"
"""The variable that marks a process that `run_locally` has started."""


def join(coordinator: str | None, count: int | None, index: int | None, timeout: int) -> None:
    """Joins the other processes of the run, at the address of a coordinator, or where JAX finds it with `auto`."""
    if CHILD in os.environ:
        threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    jax.distributed.initialize(
        None if coordinator == "auto" else coordinator,
        count,
        index,
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=timeout,
        shutdown_timeout_seconds=timeout,
    )
    multihost_utils.sync_global_devices("joined")


class ToldElsewhere(UserError):
    """Ends a process because of an error of another process of the run, which prints it."""


def is_first() -> bool:
    """True in the process that prints, and writes everything but the checkpoints."""
    return jax.process_index() == 0


def agree(function: Callable[[], Any]) -> Any:
    """Calls a function in every process, and raises in all of them if it raised in one: none waits for another.

    Raises:
      ToldElsewhere: it raised in another process, which prints why.
    """
    result, error = None, None
    try:
        result = function()
    except Exception as caught:
        error = caught
    failed = [error is not None]
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.array(error is not None)).tolist()
    if error is not None and not any(failed[: jax.process_index()]):
        raise error
    if any(failed):
        raise ToldElsewhere(f"process {failed.index(True)} prints what is wrong")
    return result


def share(text: str) -> str:
    """Gives every process the text of the first, of at most 64 KiB."""
    padded = np.frombuffer(text.encode().ljust(2**16, b"\0"), np.uint8)
    shared = np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)
    return shared.tobytes().rstrip(b"\0").decode()


def meet(mesh: Mesh) -> None:
    """Has the processes of a mesh meet along each of its axes, and along each combination of them.

    On CPUs, processes that communicate for the first time have 30 seconds to meet. Without this, that would be during
    the first train step, which one process may compile for longer than another.
    """
    if jax.process_count() == 1:
        return
    here, whole = P(*mesh.axis_names), np.ones(mesh.devices.shape, np.float32)
    ones = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, here), whole.__getitem__)
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    for some in itertools.chain(*(itertools.combinations(axes, count) for count in range(1, len(axes) + 1))):
        there = P(*(None if axis in some else axis for axis in mesh.axis_names))
        total = functools.partial(jax.lax.psum, axis_name=some)
        multihost_utils.sync_global_devices(f"along {some}")
        jax.block_until_ready(jax.jit(jax.shard_map(total, mesh=mesh, in_specs=here, out_specs=there))(ones))


class StopRequest:
    """Makes the first Ctrl-C or SIGTERM in a `with` block a request to stop after a step. A second one interrupts."""

    def __enter__(self) -> "StopRequest":
        self.number = 0  # the signal
        # Of several processes, SIGTERM belongs to JAX, whose handler has them agree on a step. Ctrl-C becomes one.
        numbers = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)
        self._previous = {number: signal.signal(number, self._request) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: object) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def is_due(self, step: int) -> bool:
        """True if the run stops after this step, in all processes alike. Every process must ask after each step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self.number != 0
