"""`numerics.audit`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util

from .._adapter import find_adapter
from .._messages import describe
from .._trees import is_array
from ..autocast._modules import TRACING, Register
from ..interpreter import trace
from ..interpreter._module_paths import ModulePaths
from ._inspect import Overflow, inspect
from ._report import AuditReport
from ._source import find_running_line


def audit(fun: Callable[..., Any]) -> Callable[..., AuditReport]:
    """Tells which operations of a function run in which dtype, and where that is likely to lose numbers or time.

    The function is traced and not run: `jax.ShapeDtypeStruct`s suffice as arguments, and nothing is allocated. The
    report is of the program as JAX traces it, before XLA fuses and rewrites it, with the bodies of jit, scan, cond,
    remat, shard_map and custom rules; of a whole train step it has the forward and the backward pass apart. What runs
    in kernels of the user's (Pallas, FFI, callbacks) is not seen. The body of a `while` loop counts once, and each
    branch of a `cond` does. `numerics.FINDINGS` has the names of all findings, and what they are. What a backward pass
    sums where the forward pass broadcast, such as the gradient of a bias, is in the table, but not a finding.

    Args:
      fun: any function of trees of arrays. Of what it returns, arrays alone count.

    Returns:
      A function of the same arguments that returns an `AuditReport`: a table when printed or shown in a notebook,
      `.rows`, `.findings` and `.to_dict()` for programs, `.assert_matmuls_in` and `.assert_no` for tests.

    Raises:
      TypeError: `fun` is not a function. What the function itself raises comes through.

    Source: NVIDIA published a speed-up over a baseline that ran in float32 unnoticed (TransformerEngine issue 2976).

    >>> def loss(w, x):
    ...     logits = x @ w.astype(jnp.bfloat16)
    ...     return -jnp.mean(jax.nn.log_softmax(logits).astype(jnp.float32))
    >>> report = audit(jax.grad(loss))(jnp.ones((3, 4)), jax.ShapeDtypeStruct((8, 3), jnp.bfloat16))
    >>> [(row.dtype, row.backward, row.flops) for row in report.rows if row.operation == "dot_general"]
    [('bfloat16', False, 192), ('bfloat16', True, 192)]
    >>> [finding.id for finding in report.findings]
    ['half-logits']
    >>> report.assert_matmuls_in("bfloat16")
    """
    _check_is_function(fun)

    @functools.wraps(fun)
    def trace_and_inspect(*args: Any, **kwargs: Any) -> AuditReport:
        register, overflows = Register(), []
        traceable = register.watch(_make_traceable(fun, overflows))
        with TRACING(register.token):
            program = trace(traceable, args, kwargs).program
        return inspect(program, overflows, ModulePaths(register.list_modules()))

    return trace_and_inspect


def _make_traceable(fun: Callable[..., Any], overflows: list[Overflow]) -> Callable[..., Any]:
    """The function as it is traced: it returns arrays alone, and constants that overflow are noted."""

    def notice(kind: str, flag: int) -> None:
        overflows.append(Overflow(find_running_line(), str(source_info_util.current_name_stack())))

    def list_arrays(*args: Any, **kwargs: Any) -> list[Any]:
        with np.errstate(over="call", call=notice):
            return [leaf for leaf in jax.tree.leaves(fun(*args, **kwargs)) if is_array(leaf)]

    return list_arrays


def _check_is_function(fun: Any) -> None:
    """Checks that `audit` was given a function.

    Raises:
      TypeError: it was given something else.
    """
    adapter = find_adapter(fun)
    if adapter is None and callable(fun) and not isinstance(fun, type):
        return
    example = "audit(train_step)(state, batch)" if adapter is None else adapter.audit_example
    raise TypeError(f"audit takes a function, got {describe(fun)}. For example: {example}.")
