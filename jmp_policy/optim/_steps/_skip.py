"""A step that is taken or skipped, in the form that costs least on the platform that runs it.

A branch computes the step or nothing. A select computes it always, and keeps the old bits where the step is skipped.
Both leave the same bits behind. They differ in what XLA makes of them: bytes accessed and temporaries of a whole step,
in float32 copies of the parameters, of an MLP with 100 million (`python -m benchmarks.compiled`, jax 0.10.2):

    |      | step                          | no check     | branch       | select       |
    |------|-------------------------------|--------------|--------------|--------------|
    | CPU  | `step`, float32 gradients     | 14.89 / 1.00 | 20.39 / 2.00 | 21.39 / 2.83 |
    |      | `minimize`, float16 gradients | 14.89 / 1.00 | 17.89 / 1.25 | 21.39 / 2.83 |
    |      | `update` and `apply_updates`  | 14.89 / 1.00 | 23.39 / 2.00 | 21.39 / 2.83 |
    |      | `kahan`, bfloat16 gradients   | 20.89 / 1.25 | 22.89 / 1.83 | 26.39 / 2.83 |
    | v5e  | `step`, float32 gradients     | 10.76 /  .01 | 12.08 / 1.01 | 11.41 /  .34 |
    |      | `minimize`, float16 gradients | 10.76 /  .01 | 11.24 /  .26 | 11.41 /  .34 |
    |      | `update` and `apply_updates`  | 10.76 /  .01 | 16.44 / 2.01 | 11.41 /  .34 |
    |      | `kahan`, bfloat16 gradients   | 11.09 /  .18 | 11.76 /  .51 | 15.95 /  .51 |
    | H100 | `step`, float32 gradients     |  9.98 /  .51 | 17.98 / 4.00 | 10.48 /  .51 |
    |      | `minimize`, float16 gradients |  9.98 /  .51 | 16.48 / 3.50 | 10.48 /  .51 |
    |      | `update` and `apply_updates`  |  9.98 /  .51 | 10.48 /  .51 | 10.48 /  .51 |
    |      | `kahan`, bfloat16 gradients   |  9.48 /  .51 | 15.98 / 3.50 |  9.98 /  .51 |

- An H100 copies parameters and state for a branch with jax 0.10; with jax 0.12 `step` still accesses 11.98. A GPU also
  waits for the host, which reads the predicate of a branch.
- A TPU writes float32 gradients down before a branch, which a select fuses away; half-precision ones are written
  either way. From a select it cannot make the two results that half-precision storage updates together.
- On a TPU v6e and tpu7x XLA transposes parameters and moments, and back, into the layout in which the backward pass
  leaves a gradient: 27.00 without a check, 26.75 with a select. A branch is in its way: 13.27 for `step`, 12.44 for
  `minimize`. All TPUs are one platform where a program is lowered, and `with_layout_constraint`, with which a select
  accesses 14.10, cannot be exported.
- On a CPU a `while_loop` of at most one turn needs fewer temporaries (1.38), but it has no reverse derivative.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from ..._base import PyTree, is_half
from ...loss_scale import LossScale, select_tree


class Operands(NamedTuple):
    """What a step is made from.

    Attributes:
      grads: the gradients.
      scale: the loss scale that they are still multiplied by.
      inner_state: the state of the wrapped transformation.
      params: the parameters.
      extra: further arguments that are trees of arrays.
    """

    grads: PyTree
    scale: LossScale
    inner_state: PyTree
    params: PyTree
    extra: dict[str, Any]


Result = tuple[PyTree, PyTree]
"""Updates or parameters, and the next inner state."""


def make_skippable(
    take: Callable[[Operands], Result], skip: Callable[[Operands], Result], stores_half: bool
) -> Callable[[jax.Array, Operands], Result]:
    """Makes the function `(finite, operands)` that takes a step or skips it.

    Where the function is lowered, it gets the form of its platform: exports for several platforms have one for each.
    Make it once and keep it: a function that JAX has not seen before is compiled at each eager call.

    Args:
      take: the step, under `jax.jit`, which traces it once for both forms.
      skip: what is left where it is not taken, in the shapes and dtypes of `take`.
      stores_half: whether the step keeps half-precision parameters in a storage of their own.
    """

    def branch(finite: jax.Array, operands: Operands) -> Result:
        return lax.cond(finite, take, skip, operands)

    def select(finite: jax.Array, operands: Operands) -> Result:
        return select_tree(finite, take(operands), skip(operands))

    # Where it is called eagerly, JAX would otherwise wait for the device to learn the platform.
    @functools.partial(jax.jit, inline=True)
    def take_or_skip(finite: jax.Array, operands: Operands) -> Result:
        branching = ("cpu", "tpu") if stores_half or _are_mostly_half(operands.grads) else ("cpu",)
        return lax.platform_dependent(finite, operands, **dict.fromkeys(branching, branch), default=select)

    return take_or_skip


def _are_mostly_half(tree: PyTree) -> bool:
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size if is_half(leaf) else -leaf.size for leaf in leaves) > 0
