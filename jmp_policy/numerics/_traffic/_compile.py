"""A program as XLA's partitioner leaves it, before what comes later combines, widens, moves and fuses collectives."""

import contextlib
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_OPTIONS = {
    "xla_dump_hlo_pass_re": ".*spmd-partitioning",
    "xla_backend_optimization_level": 0,
    "xla_disable_hlo_passes": "all-reduce-promotion",
}
"""What the compiler writes down, and that it need not try hard, since nothing runs what it makes.

The pass that widens sums over devices on CPUs comes later. It would end the process where a shard_map leaves axes to
XLA: there the function that adds two numbers ends in a copy, which the pass takes for the sum."""


def make_unique(fun: Callable[..., Any], name: str) -> tuple[Callable[..., Any], str]:
    """Gives a function a name that no other has, and returns both.

    JAX's persistent cache knows programs by their names and text. It would hand out what was compiled once, and XLA
    would write nothing down.

    Args:
      fun: the function.
      name: how the name begins, for JAX's errors.
    """
    token = f"{name if name.isidentifier() else 'function'}_collectives_{uuid.uuid4().hex}"

    def call_unique(*args: Any) -> Any:
        return fun(*args)

    call_unique.__name__ = call_unique.__qualname__ = token
    return call_unique, token


def partition(lowered: jax.stages.Lowered, token: str) -> str:
    """Compiles a program, and returns the text of what the partitioner made of it.

    Args:
      lowered: the program of a function of a unique name.
      token: the name.

    Raises:
      RuntimeError: the compiler wrote nothing down.
    """
    with tempfile.TemporaryDirectory(prefix="jmp_collectives_", ignore_cleanup_errors=True) as folder:
        try:
            lowered.compile(compiler_options={"xla_dump_to": folder, **_OPTIONS})
        finally:
            _remove_from_cache(token)
        written = sorted(Path(folder).glob("*.after_*spmd-partitioning*.txt"))
        if written:
            return written[-1].read_text(encoding="utf-8")
    raise RuntimeError(
        "The compiler wrote down no program after its pass 'spmd-partitioning', as one in another process, on a remote "
        "machine, may. What the program itself says, in shard_map, can be read without it: "
        "collectives(fun, compiled=False)(*args)."
    )


def _remove_from_cache(token: str) -> None:
    """Takes a program that nobody asks for again out of a persistent cache on this machine's disk."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if folder and Path(folder).is_dir():
        for file in Path(folder).glob(f"*{token}*"):
            with contextlib.suppress(OSError):
                file.unlink()
