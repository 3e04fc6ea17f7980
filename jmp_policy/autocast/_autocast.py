"""The public function `autocast`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from .._base import P, R
from ..modules import NO_TARGET
from ..policy import Decorator, F, FirstSpec, Jitted, PolicySpec

if TYPE_CHECKING:
    from ._attach import Weights
    from ._rules import AutocastRules


CustomRules = Literal["opaque", "inside"]


class _AutocastOptions(TypedDict, total=False):
    rules: AutocastRules | None
    custom_rules: CustomRules
    weights: Weights | None


@overload
def autocast(fun: FirstSpec, **options: Unpack[_AutocastOptions]) -> Decorator: ...
@overload
def autocast(*, policy: PolicySpec = None, **options: Unpack[_AutocastOptions]) -> Decorator: ...
@overload
def autocast(fun: Jitted[P, R], policy: PolicySpec = None, **options: Unpack[_AutocastOptions]) -> Callable[P, R]: ...
@overload
def autocast(fun: F, policy: PolicySpec = None, **options: Unpack[_AutocastOptions]) -> F: ...
def autocast(
    fun: Any = NO_TARGET,
    policy: PolicySpec = None,
    *,
    rules: AutocastRules | None = None,
    custom_rules: str = "opaque",
    weights: Weights | None = None,
) -> Any:
    """Runs each operation of a function in the dtype that suits it.

    The function may be written in plain float32. It is traced at each call, and its jaxpr is rewritten:

    1. Matmuls and convolutions run in the compute dtype.
    2. Operations that lose accuracy there (exponentials, logarithms, sums, linear algebra) run in the full dtype of the
       policy: float64 if its parameters or its compute dtype are float64, else float32, as below.
    3. Everything else follows JAX's promotion of the dtypes that its inputs have by then: half precision with float32
       is float32. A branch returns float32 if one branch does, and loops carry float32 as float32. Only constants, and
       the bias that is added to the result of a matmul or convolution, give way to half precision.
    4. Epsilons, bounds and large numbers that half precision would lose keep their operation in float32. So does a
       sigmoid or softmax that a logarithm reads. Masks (large negative numbers, limits of a dtype) are clamped instead
       where elements are selected. Casts of the author and `force_full_precision` stay.
    5. Parameters are cast where they are used, so gradients have their dtype. Optimizers inside compute in float32.

    `jit`, `grad`, `vmap` and other transformations work around the result and inside it. The rules of a `PolicyMap`
    apply to linen modules, nnx modules among the arguments, and `jax.named_scope`s. A module whose policy computes in
    its full dtype runs in it only, and casts its outputs to its output dtype. Float64 stays as it is, unless the policy
    or a rule has float64. Flax nnx objects may be updated if they are arguments, but not if they are closed over.

    Args:
      fun: any function of trees of arrays: also a method, partial, jitted function or callable object. Without it, or
        with a policy in its place, the result is a decorator. For Flax modules write `autocast(model.apply, ...)` or,
        for nnx, `autocast(lambda model, x: model(x), ...)`.
      policy: anything that `get_policy` reads; None is the current default policy. The compute dtype is float64,
        float32, bfloat16 or float16; by default the dtype of the first floating input. Outputs are cast to the output
        dtype, if there is one. With `accumulate=float32`, matmuls return float32 to bias additions, softmaxes, losses
        and outputs; other operations cast it down. These matmuls have no forward-mode derivative.
        A quantized policy needs `weights`; a rule of a `PolicyMap` may leave scopes out. Float8 needs current scaling.
      rules: changes to the tables of operations and functions, and rules by scope, which win over the map.
      custom_rules: treatment of `jax.custom_jvp` and `jax.custom_vjp` functions of users: `"opaque"` runs them as
        traced, `"inside"` casts inside the function and its forward pass. Their derivative stays the user's.
      weights: for a quantized policy, the arguments that hold weights: a number, several, or a function of the paths of
        all arrays, such as `lambda path: path.endswith("kernel")`. A path begins with the number or name of its
        argument: `"0/layers/0/kernel"`. Values that come from these arrays by casts, transposes, reshapes and slices,
        also in loops, are quantized in matmuls and convolutions as `quant.dot_general` does, and in `lax.ragged_dot` as
        `quant.ragged_dot` does, from the dtype that the arrays have. Tables that are indexed are not quantized.
        A format with `attention=true` also quantizes both matmuls of `jax.nn.dot_product_attention`, and of attention
        in Flax, Equinox and Haiku.
        `explain(autocast(f, ...), *args)` lists all. Other policies ignore `weights`.

    Returns:
      A function of the arguments of `fun`.

    Raises:
      TypeError: `fun` is not a function, or it returned something else than a tree of arrays; or `weights` is of
        another type.
      ValueError: `policy` is unreadable, has another compute or accumulate dtype, or float64 without x64. Of a
        quantized policy: `weights` is missing, one of them reaches no matmul, or the format needs a state or a key for
        each layer.

    Warns:
      UserWarning: no policy was given and the default one computes in float32; a rule decides for no operation; no
        matmul is cast, as all are in float64 under a policy without it, in a narrower dtype already, or inside
        functions with custom derivatives, which run as traced; all arguments are in float64 under `"float32"`; or the
        function is inside `jax.vmap`, where a bias cannot be told from other arrays: write `autocast(vmap(f))`.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; torch.autocast's operator lists; JAX issue 5257.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> predict = jmp.autocast(lambda weight, x: jax.nn.softmax(x @ weight), "mixed_bfloat16")
    >>> report = jmp.numerics.audit(predict)(jnp.ones((2, 2)), jnp.ones((1, 2)))
    >>> {row.operation: row.dtype for row in report.rows if row.operation in ("dot_general", "exp")}
    {'dot_general': 'bfloat16', 'exp': 'float32'}
    >>> predict = jmp.autocast(lambda weight, x: x @ weight, "int8_from_mixed_bfloat16", weights=0)
    >>> jmp.explain(predict, jnp.ones((64, 64)), jnp.ones((1, 64)))["0"].quantization
    'int8'
    """
    from ._attach import attach  # loads the rewriter, which `import jmp_policy` must not

    return attach(fun, policy, rules, custom_rules, weights)
