"""`autocast`: mixed precision for functions that were written in float32."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from .._base import P, R
from ..modules import NO_TARGET
from ..policy import Decorator, F, FirstSpec, Jitted, PolicySpec

if TYPE_CHECKING:
    from ._rewrite import AutocastRules


CustomRules = Literal["opaque", "inside"]


@overload
def autocast(
    fun: FirstSpec, *, rules: "AutocastRules | None" = None, custom_rules: CustomRules = "opaque"
) -> Decorator: ...
@overload
def autocast(
    *, policy: PolicySpec = None, rules: "AutocastRules | None" = None, custom_rules: CustomRules = "opaque"
) -> Decorator: ...
@overload
def autocast(
    fun: Jitted[P, R],
    policy: PolicySpec = None,
    *,
    rules: "AutocastRules | None" = None,
    custom_rules: CustomRules = "opaque",
) -> Callable[P, R]: ...
@overload
def autocast(
    fun: F,
    policy: PolicySpec = None,
    *,
    rules: "AutocastRules | None" = None,
    custom_rules: CustomRules = "opaque",
) -> F: ...
def autocast(
    fun: Any = NO_TARGET,
    policy: "PolicySpec" = None,
    *,
    rules: "AutocastRules | None" = None,
    custom_rules: str = "opaque",
) -> Any:
    """Runs each operation of a function in the dtype that suits it.

    The matrix product runs in bfloat16, and the softmax that follows it in
    float32:

    >>> import jax, jax.numpy as jnp
    >>> import jmp_policy as jmp
    >>> @jmp.autocast("params=float32,compute=bfloat16,output=float32")
    ... def predict(weight, x):
    ...     return jax.nn.softmax(x @ weight)
    >>> report = jmp.numerics.audit(predict)(jnp.ones((2, 2)), jnp.ones((1, 2)))
    >>> {row.operation: row.dtype for row in report.rows}["dot_general"]
    'bfloat16'
    >>> {row.operation: row.dtype for row in report.rows}["exp"]
    'float32'

    The function may be written in plain float32. For each of its operations:

    1. Matrix products and convolutions run in the compute dtype.
    2. What loses numbers in half precision (exponentials, logarithms, sums,
       linear algebra) runs in float32, and so do the operations that follow its
       result, until the next matrix product.
    3. All others follow their inputs.
    4. A bound or an epsilon that half precision would round away keeps its
       operation in float32, and so does a sigmoid or softmax that a logarithm
       reads. Masks (large negative numbers, limits of a dtype) are clamped
       instead.
    5. Casts that the author wrote, and `force_full_precision`, stay.
    6. A float32 value that a loop accumulates (each new value is the old one plus,
       times or blended with something) is carried in float32.
    7. Parameters enter in the dtype they have and are cast where they are used.
       So gradients have the dtype of the parameters, and optimizers inside
       compute in float32.

    For the function as a whole:

    1. It is traced at each call. The result is a function of JAX: `jit`,
       `grad`, `vmap` and the like go around and inside.
    2. The rules of a `PolicyMap` hold for the operations of the modules that
       their keys cover: linen modules wherever they are called, nnx modules
       among the arguments. Outside of Flax, `jax.named_scope` makes paths.
    3. In a module whose policy computes in float32 everything is float32; its
       results are cast to its output dtype.
    4. Arguments that are nnx modules, Variables or optimizers are written to as
       without `autocast`. One that is closed over can only be read.

    Args:
      fun: any function of trees of arrays. Without one, or with a policy here
        and none in second place, the result is a decorator:
        `@autocast(policy="mixed_bfloat16")`, `@autocast("mixed_bfloat16")`.
        Static and class methods, partials, jitted functions and callable
        objects count as functions. Write `autocast(model.apply, ...)` for a
        linen module, and `autocast(lambda model, x: model(x), ...)` for one of
        nnx.
      policy: anything that `get_policy` reads; `None` is the default policy, as
        of now. Its compute dtype is float32, bfloat16 or float16; without one,
        the first floating input has it. Results are cast to its output dtype;
        without one they have the dtype that `fun` gives them. With an
        accumulate dtype, float32, products hand over unrounded sums: a bias is
        added to them, and softmaxes, losses and results read them; other
        operations, and the sums of two activations, take them in the compute
        dtype. The derivative is that of the products of layers, without a
        forward mode; the gradient of a float32 weight is a sum in float32.
      rules: what to move in the tables of operations and functions, and rules
        by scope, which come before a map's.
      custom_rules: what becomes of functions with derivatives of the user's own
        (`jax.custom_jvp`, `jax.custom_vjp`): `"opaque"` runs them as they were
        traced, `"inside"` casts inside of the function and its forward pass.
        The derivative is the user's in both.

    Returns:
      A function of the arguments of `fun`.

    Raises:
      TypeError: `fun` is not a function; or, when it is called, it returned
        something else than a tree of arrays.
      ValueError: `get_policy` cannot read `policy`, its compute dtype is
        another one, its accumulate dtype is neither that nor float32, or it is
        quantized: operations do not tell which of their operands are weights.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018;
    torch.autocast's lists of operators; asked for in JAX issue 5257.
    """
    from ._attach import attach  # not before: it loads the interpreter, and importing the library is to cost nothing

    return attach(fun, policy, rules, custom_rules)
