"""Optimizers whose moments `quantize_state` stores, and a model in NumPy of how it does."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# The codes, whose tables `test_moment_codes.py` constructs by hand, and the roles of moments are given to the model.
from jmp_policy.optim._moment_codes import (
    DYNAMIC,
    MU,
    UNSIGNED_FLOAT,
    DynamicCode as DynamicCode,
    UnsignedFloatCode as UnsignedFloatCode,
    find_step,
    list_roles,
    map_moments,
)


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if jnp.ndim(p) > 1 else "rest", params)


ELEMENTWISE: dict[str, Callable[[], Any]] = {
    "adadelta": lambda: optax.adadelta(1.0),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=_matrices),
    "adan": lambda: optax.adan(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0.0, 10)),
    "lion": lambda: optax.lion(1e-3, mask=_matrices),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "partition": lambda: optax.partition({"matrix": optax.adam(1e-2), "rest": optax.sgd(1e-2, 0.9)}, _labels),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9, centered=True),
}

CODES = {True: DYNAMIC, False: UNSIGNED_FLOAT}
"""By whether moments are averages of gradients."""


def make_params(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Three large leaves, of which two are alike, and three that stay: small, of odd lengths, and an embedding."""
    random = np.random.default_rng(1)
    large = {"w": (512, 24), "x": (512, 24), "blocks": {"v": (256, 4, 8)}}
    shapes = large | {"b": (24,), "odd": (63, 21), "embed": (64, 16)}
    draw = lambda shape: jnp.asarray(random.normal(size=shape), dtype)
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def make_grads(params: Any, step: int) -> Any:
    """Gradients of many magnitudes, with rows of zeros, as those of rows that were not used."""
    random = np.random.default_rng(100 + step)

    def draw(p: jax.Array) -> jax.Array:
        numbers = random.normal(size=p.shape) * 2.0 ** random.integers(-12, 4, p.shape[-1])
        if p.ndim > 1:
            numbers[random.random(p.shape[0]) < 0.3] = 0
        return jnp.asarray(numbers, p.dtype)

    return jax.tree.map(draw, params)


def make_noise(shape: tuple[int, ...], leaf: int, step: int) -> np.ndarray:
    """The 16-bit noise of a moment: a hash of the position, plus multiples of the golden ratio.

    Args:
      shape: of the moment.
      leaf: its index among the leaves of gradients and state.
      step: the number of steps before this one.
    """
    words = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(leaf * 0x9E3779B1 % 2**32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = words % 2**32
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    words = (words % 2**32 >> np.uint64(16)) + np.uint64(step * 2654435769 % 2**32 >> 16)
    return words.astype(np.uint16).reshape(shape)


def store(
    moment: np.ndarray, is_mean: bool, sides: tuple[int, ...], noise: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a moment in blocks of these sides, one block after the other."""
    relative = np.zeros(moment.shape, np.float32)
    counts = [length // side for length, side in zip(moment.shape, sides, strict=True)]
    scales = np.zeros(counts, np.float32)
    for place in itertools.product(*map(range, counts)):
        tile = tuple(slice(i * side, (i + 1) * side) for i, side in zip(place, sides, strict=True))
        block = moment[tile]
        largest = np.abs(block).max()
        scale = -largest if (block == -largest).any() else largest
        relative[tile] = block / np.float32(scale if scale else 1)
        scales[place] = scale
    return np.array(_encode(CODES[is_mean], relative, noise)), scales


_encode = jax.jit(lambda code, relative, noise: code.encode(relative, noise), static_argnums=0)


def read(codes: np.ndarray, scales: np.ndarray, is_mean: bool) -> np.ndarray:
    """The numbers that codes and scales stand for."""
    for axis, (length, count) in enumerate(zip(codes.shape, scales.shape, strict=True)):
        scales = scales.repeat(length // count, axis)
    return CODES[is_mean].values[codes] * scales


class Model:
    """An optimizer on whole float32 leaves, whose large moments lose in NumPy what 8 bits cannot say after each step.

    Args:
      inner: the optimizer.
      params: the first parameters.
      sides: by the shapes of large parameters, the sides of their blocks.
    """

    def __init__(self, inner: Any, params: Any, sides: dict[tuple[int, ...], tuple[int, ...]]):
        self._update = jax.jit(inner.update)
        self._sides = sides
        self.stored: list[tuple[np.ndarray, np.ndarray] | None] = []
        self._leaves_before = len(jax.tree.leaves(params))
        self._steps = 0
        self.state = self._round(inner.init(params), None)

    def update(self, grads: Any, params: Any) -> Any:
        updates, state = self._update(grads, self.state, params)
        count = find_step(self.state)
        self.state = self._round(state, self._steps if count is None else int(count))
        self._steps += 1
        return updates

    def _round(self, state: Any, step: int | None) -> Any:
        """Rounds to nearest without a step."""
        self.stored = []

        def round_one(i: int, role: str | None, moment: Any) -> Any:
            if role is None:
                return moment
            sides = self._sides.get(moment.shape)
            noise = None if step is None else make_noise(moment.shape, self._leaves_before + i, step)
            stored = None if sides is None else store(np.asarray(moment), role == MU, sides, noise)
            self.stored.append(stored)
            return moment if stored is None else jnp.asarray(read(*stored, role == MU))

        leaves, structure = jax.tree.flatten(state)
        rows = zip(list_roles(state), leaves, strict=True)
        return structure.unflatten([round_one(i, role, moment) for i, (role, moment) in enumerate(rows)])


SIDES = {(512, 24): (32, 8), (256, 4, 8): (8, 4, 8)}
"""The blocks of `make_params`, as the documentation says them."""


def list_stored(state: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Codes and scales of a `QuantizedMomentsState`, in order; where a moment is no codes, itself and a one."""
    moments: list[Any] = []
    map_moments(lambda role, field: moments.extend(jax.tree.leaves(field)), state.inner_state)
    return [(np.asarray(x), np.asarray(s)) for x, s in zip(moments, jax.tree.leaves(state.scales), strict=True)]
