"""Islands of float32 inside half-precision code."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from .._base import IN_FULL_PRECISION, P, PyTree, R, at_least_float32, cast_floating, floating_leaves, is_floating
from ..policy import Jitted
from ._adapter import is_flax_object

F = TypeVar("F", bound=Callable[..., Any])

FULL_PRECISION = "force_full_precision"
"""The scope that marks what is inside: where the inputs are float32 already nothing else tells `autocast` of it."""


@overload
def force_full_precision(fun: Jitted[P, R]) -> Callable[P, R]: ...
@overload
def force_full_precision(fun: F) -> F: ...
def force_full_precision(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `fun` in float32, its matmuls at the highest precision.

    Floating inputs narrower than float32 enter as float32, and floating outputs leave in the dtype that
    `jnp.result_type` gives the floating inputs together; without a floating input they leave as they are. Flax modules
    and Variables, which `fun` may write to, are handed to it as they are.

    Flax layers and functions with a policy that `fun` calls compute in float32 as well, whatever their policy says. A
    `dtype` that an author wrote on a layer stays, and so does the quantization of a policy.

    Args:
      fun: any function of trees of arrays.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.force_full_precision(jnp.cumsum)(jnp.ones(3, jnp.bfloat16)).dtype
    dtype(bfloat16)
    """

    @functools.wraps(fun)
    def in_full_precision(*args: Any, **kwargs: Any) -> Any:
        wide_args, wide_kwargs = jax.tree.map(_widened, (args, kwargs), is_leaf=is_flax_object)
        with jax.default_matmul_precision("highest"), jax.named_scope(FULL_PRECISION), IN_FULL_PRECISION(True):
            out = fun(*wide_args, **wide_kwargs)
        return cast_floating(out, _joint_dtype((args, kwargs)), is_leaf=is_flax_object)

    return in_full_precision


def _widened(leaf: Any) -> Any:
    return cast_floating(leaf, at_least_float32(leaf.dtype)) if is_floating(leaf) else leaf


def _joint_dtype(tree: PyTree) -> np.dtype | None:
    leaves = floating_leaves(tree, is_leaf=is_flax_object)
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(*leaves)) if leaves else None
