"""Faults: non-finite numbers that appear in one gradient, at random steps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BAD_NUMBERS = (np.inf, -np.inf, np.nan)
BURST = 8  # as at the start of a float16 run, whose first loss scale is too large


@dataclasses.dataclass(frozen=True)
class Fault:
    """A non-finite number in the gradient of one parameter.

    Attributes:
      leaf: the number of the array among the leaves of the parameters.
      index: the place in the flattened array.
      number: infinity of either sign, or nan.
    """

    leaf: int
    index: int
    number: float


def plan_faults(params: Any, steps: int, rate: float, seed: int) -> list[Fault | None]:
    """The fault of each step: none at most steps, and once a burst of faults in a row.

    >>> plan = plan_faults([jnp.ones(3), jnp.ones(2)], steps=100, rate=0.1, seed=0)
    >>> len(plan), sum(fault is not None for fault in plan)
    (100, 18)
    """
    rng = np.random.default_rng(seed)
    bad = rng.random(steps) < rate
    start = rng.integers(steps // 4, steps - BURST)
    bad[start : start + BURST] = True
    return [_random_fault(rng, jax.tree.leaves(params)) if is_bad else None for is_bad in bad]


def fault_tree(params: Any, fault: Fault | None) -> Any:
    """Returns an array to add to the gradients: zeros, and the number of the fault where it strikes."""
    leaves, treedef = jax.tree.flatten(params)
    added = [np.zeros(leaf.shape, np.float32) for leaf in leaves]
    if fault is not None:
        added[fault.leaf].flat[fault.index] = fault.number
    return jax.tree.unflatten(treedef, added)


@jax.custom_vjp
def with_faults(params: Any, faults: Any) -> Any:
    """The parameters, whose gradients have `faults` added: the loss is finite, and so are the batch statistics."""
    del faults
    return params


def _forward(params: Any, faults: Any) -> tuple[Any, Any]:
    return params, faults


def _backward(faults: Any, grads: Any) -> tuple[Any, Any]:
    faulty = jax.tree.map(lambda g, fault: g + fault.astype(g.dtype), grads, faults)
    return faulty, jax.tree.map(jnp.zeros_like, faults)


with_faults.defvjp(_forward, _backward)


def _random_fault(rng: np.random.Generator, leaves: list[Any]) -> Fault:
    leaf = int(rng.integers(len(leaves)))
    return Fault(leaf, int(rng.integers(leaves[leaf].size)), float(rng.choice(BAD_NUMBERS)))
