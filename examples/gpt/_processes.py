"""What the processes of one run do together: errors that end them all, words of the first, and when to stop.

The first process prints, and writes all but the checkpoints. A run of one process goes through none of this.
"""

import functools
import itertools
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmp_policy.cli import ToldElsewhere

from ._display import StopRequest

T = TypeVar("T")


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def agree(function: Callable[[], T]) -> T:
    """Calls a function in every process, and raises in all of them if it raised in one: none waits for another.

    Raises:
      ToldElsewhere: it raised in another process, which says what.
    """
    if jax.process_count() == 1:
        return function()
    try:
        result, error = function(), None
    except Exception as caught:
        result, error = None, caught
    failed = np.flatnonzero(multihost_utils.process_allgather(np.array(error is not None)))
    if not len(failed):
        return result  # pyright: ignore[reportReturnType]  # there is one where nothing was raised
    if error is not None and failed[0] == jax.process_index():
        raise error
    raise ToldElsewhere(f"process {failed[0]} says what is wrong")


def share(text: str) -> str:
    """Gives every process the text of the first."""
    if jax.process_count() == 1:
        return text
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    padded = data if is_first() else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)).decode()


def meet_along_axes(mesh: Mesh) -> None:
    """Has the processes of a mesh meet along each of its axes, and along each few of them.

    On CPUs, those that send each other something for the first time have 30 seconds to meet. The first step would be
    that time, and one process may compile it for so much longer than another.
    """
    if jax.process_count() == 1:
        return
    here = PartitionSpec(*mesh.axis_names)
    ones = jax.make_array_from_callback(
        mesh.devices.shape, NamedSharding(mesh, here), lambda index: np.ones(mesh.devices.shape, np.float32)[index]
    )
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    for count in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, count):
            there = PartitionSpec(*(None if axis in some else axis for axis in mesh.axis_names))
            total = functools.partial(jax.lax.psum, axis_name=some)
            multihost_utils.sync_global_devices(f"along {some}")
            jax.block_until_ready(jax.jit(jax.shard_map(total, mesh=mesh, in_specs=here, out_specs=there))(ones))


class SharedStopRequest(StopRequest):
    """Stops all processes after the same step, whichever of them is asked to.

    SIGTERM belongs to JAX, whose handler has the processes agree on a step. So Ctrl-C becomes one.
    """

    SIGNALS = (signal.SIGINT,)

    def is_due(self, step: int) -> bool:
        """Whether to stop after this step, which every process must ask after each."""
        return multihost_utils.reached_preemption_sync_point(step)

    def _request(self, number: int, frame: FrameType | None) -> None:
        super()._request(number, frame)
        os.kill(os.getpid(), signal.SIGTERM)


def make_stop_request() -> StopRequest:
    """What looks for Ctrl-C and SIGTERM in this run."""
    return SharedStopRequest() if jax.process_count() > 1 else StopRequest()
