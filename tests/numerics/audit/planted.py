"""The registry of planted faults: a faulty function and a clean one, with comments where the faults are."""

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


def plant(name: str, *args: Any) -> Callable[..., None]:
    """Returns a function that registers `faulty` and, written below it, `clean`, both functions of `args`."""

    def register(faulty: Callable[..., Any], clean: Callable[..., Any]) -> None:
        first, end = faulty.__code__.co_firstlineno, clean.__code__.co_firstlineno
        lines = inspect.findsource(faulty)[0][first - 1 : end - 1]
        faults = {(found, first + i) for i, line in enumerate(lines) for found in re.findall(r"# fault: (\S+)", line)}
        assert faults, name
        PLANTED[name] = Planted(faulty, clean, args, frozenset(faults))

    return register


def planted(*args: Any) -> Callable[[type], type]:
    """Registers a class with the static functions `faulty` and `clean` of the arguments `args`."""

    def register(cls: type) -> type:
        plant(cls.__name__.replace("_", " "), *args)(cls.__dict__["faulty"], cls.__dict__["clean"])
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


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def half(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)
