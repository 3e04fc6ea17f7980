"""The registry of planted faults: classes of a faulty function and a clean one, with comments where the faults are."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Planted:
    faulty: Callable[..., Any]
    clean: Callable[..., Any]
    args: tuple
    faults: frozenset[tuple[str, int]]  # the names of findings, and the lines they are on


PLANTED: dict[str, Planted] = {}


def planted(*args: Any) -> Callable[[type], type]:
    """Registers a class with the static functions `faulty` and `clean` of the arguments `args`, made when asked for."""

    def register(cls: type) -> type:
        lines, first = inspect.getsourcelines(cls)
        faults = [(name, first + i) for i, line in enumerate(lines) for name in re.findall(r"# fault: (\S+)", line)]
        assert faults
        PLANTED[f"{cls.__module__.rpartition('planted_')[2]}: {cls.__name__.replace('_', ' ')}"] = Planted(
            cls.__dict__["faulty"], cls.__dict__["clean"], args, frozenset(faults)
        )
        return cls

    return register


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float16)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
