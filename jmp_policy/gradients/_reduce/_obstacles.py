"""What is said of gradients that cannot be reduced in the dtype that was asked for."""

import os
from collections.abc import Mapping, Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from ._marks import Obstacle

_SHOWN = 5
_LIBRARIES = ("flax", "jax", "jmp_policy", "optax")


def explain_obstacles(found: Mapping[str, Sequence[Obstacle]], dtype: np.dtype) -> tuple[str, bool]:
    """Says where the walks from gradients ended.

    Args:
      found: for each gradient, by name, where its walk ended.
      dtype: the dtype of reductions.

    Returns:
      The message, and whether it is of a reduction that is narrower than the program's: a refusal in any case.
    """
    narrowed = {name: [o for o in obstacles if not o.is_opaque] for name, obstacles in found.items()}
    is_refused = any(narrowed.values())
    lines = [
        f"{name or 'the argument'!r}: {_describe(obstacles[0])}"
        for name, obstacles in (narrowed if is_refused else found).items()
        if obstacles
    ]
    where = "\n".join(f"  {line}" for line in [*lines[:_SHOWN], *["..."] * (len(lines) > _SHOWN)])
    if is_refused:
        return (
            f"reduce_dtype={str(dtype)!r} is narrower than what these gradients are summed in:\n{where}\n"
            "Under jit XLA reduces in the dtype of the sum, which is never narrowed here. In a jax.shard_map, a cast "
            "before the collective does it: jmp.sharding has psum and psum_scatter. For example: "
            "reduce_dtype='float32'."
        ), True
    return (
        f"These gradients cannot be followed to the sums that make them, which XLA may reduce over devices in half "
        f"precision, not in {dtype}, at an operation whose inside is unknown:\n{where}\n"
        f"Have the operation return {dtype}, or pass strict=False, which makes this a warning. For example: "
        f"value_and_grad(loss_fn, loss_scale=scale, reduce_dtype='{dtype}', strict=False)."
    ), False


def _describe(obstacle: Obstacle) -> str:
    return f"{obstacle.eqn.primitive.name} in {obstacle.dtype}{_locate(obstacle.eqn)}"


def _locate(eqn: JaxprEqn) -> str:
    """The user's line of an equation, or the innermost one outside of JAX."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    packages = [(frame, frame.file_name.split(os.sep)) for frame in frames]
    users = [frame for frame, parts in packages if not any(name in parts for name in _LIBRARIES)]
    return f", at {users[0].file_name}:{users[0].line_num} ({users[0].function_name})" if users else ""
