"""Loss scales: immutable, jit-friendly values that keep small float16 gradients above zero."""

import dataclasses
import operator
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import Uncast, at_least_float32, is_floating
from ._scale_settings import (
    NEVER,
    check_constant,
    check_scalar,
    check_scale,
    check_settings,
    clamp,
    refuse_other_names,
    warn_if_not_floating,
)

T = TypeVar("T")

_LARGEST_WITH_RECIPROCAL = 2.0**126  # beyond it the reciprocal is subnormal, which XLA may flush to zero


class LossScale(Uncast):
    """What `NoOpLossScale`, `StaticLossScale` and `DynamicLossScale` have in common; `isinstance` knows all three.

    The scale is float32 and no cast narrows it. `scale` and `unscale` work in float32 or wider: 2**15 times a
    float16 loss of 2 is already infinite in float16.

    >>> import jmp_policy as jmp
    >>> isinstance(jmp.NoOpLossScale(), jmp.LossScale)
    True
    """

    loss_scale: Any

    def scale(self, tree: T) -> T:
        """Multiplies the floating and complex numbers of a tree by the scale, in float32 or wider."""
        return _map_numbers(operator.mul, tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the floating and complex numbers of a tree by the scale; half-precision ones become float32."""
        return _map_numbers(operator.truediv, tree, self.loss_scale)

    def adjust(self, grads_finite: jax.Array) -> "LossScale":
        """The loss scale of the next step, given whether the gradients of this one were finite."""
        del grads_finite
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Comes back from a pickle, in a process where no loss scale may have been made."""
        vars(self).update(state)
        register_with_flax()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(LossScale):
    """Scales nothing: for float32 and bfloat16, whose exponent range needs no help.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> grads = {"w": jnp.ones(2)}
    >>> jmp.NoOpLossScale().scale(grads) is grads
    True
    """

    def __post_init__(self) -> None:
        register_with_flax()

    def __reduce__(self) -> tuple:
        return type(self), ()  # with nothing to set, a pickle would go past __setstate__

    @property
    def loss_scale(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One."""
        return 1.0

    def scale(self, tree: T) -> T:
        """Returns the tree itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns the tree itself."""
        return tree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(LossScale):
    """Scales by a constant; a pytree without leaves.

    Args:
      loss_scale: the constant, a positive number; a power of two makes scaling exact. Zero, which DeepMind's `jmp`
        takes, makes every gradient 0 / 0; a warning says so.

    Raises:
      ValueError: `loss_scale` is not a positive normal number of float32.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.StaticLossScale(1024.0).scale(jnp.float16(100))
    Array(102400., dtype=float32)
    """

    loss_scale: float

    def __post_init__(self) -> None:
        number = check_constant(self.loss_scale)
        object.__setattr__(self, "loss_scale", float(self.loss_scale) if number is None else number)
        register_with_flax()


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, init=False, eq=False)
class DynamicLossScale(LossScale):
    """Looks for the largest scale that keeps gradients finite.

    Every `period` finite steps in a row the scale is multiplied by `factor`, if the result is finite and at most
    `max_loss_scale`; a non-finite step multiplies it by `backoff_factor`, down to `min_loss_scale`, and starts the
    count anew. The arrays `loss_scale` (float32, shape `()`) and `counter` (int32, shape `()`) are the leaves of the
    pytree; everything else is static and survives every tree operation.

    Flax's `DynamicScale` has other defaults, and grows after one finite step more than its `growth_interval`. As it
    does `DynamicLossScale(2.0**16, period=2001, min_loss_scale=2.0**-126, max_loss_scale=math.inf)`. PyTorch's
    `GradScaler` begins at 2**16, too, and has neither floor nor ceiling.

    Args:
      loss_scale: the scale to start from. Outside of floor and ceiling it starts at the nearer one, with a warning.
      counter: finite steps in a row since the scale last changed.
      period: how many finite steps in a row make the scale grow.
      factor: what it grows by.
      min_loss_scale: the floor. Reaching it means that the model, not the scale, makes the infinities. Zero, which
        DeepMind's `jmp` takes, is taken as 2**-126, with a warning: by a scale of zero nothing can be divided.
      backoff_factor: what a non-finite step multiplies the scale by; `1 / factor` if not given.
      max_loss_scale: the ceiling of growth.
      hysteresis: the number of overflows it takes to lower the scale; the ones before only skip their step. Above
        one, the pytree has a third leaf, `credits` (int32): the overflows that may still pass unanswered.
      consecutive_hysteresis: refill the credits on every finite step (DeepSpeed), not only when a period of finite
        steps is complete (Megatron-LM).
      credits: see `hysteresis`; `hysteresis - 1` if not given.

    Raises:
      ValueError: a setting is out of its range.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2; growth follows DeepMind's
    `jmp`; hysteresis follows Megatron-LM's `DynamicGradScaler` and DeepSpeed's `DynamicLossScaler`.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> scale = jmp.DynamicLossScale(2.0**15, period=2)
    >>> for finite in (True, True, False):
    ...     scale = scale.adjust(jnp.array(finite))
    ...     print(float(scale.loss_scale))
    32768.0
    65536.0
    32768.0
    """

    loss_scale: jax.Array
    counter: jax.Array
    period: int
    factor: float
    min_loss_scale: float
    backoff_factor: float
    max_loss_scale: float
    hysteresis: int
    consecutive_hysteresis: bool
    credits: jax.Array | None
    _settings: tuple = dataclasses.field(init=False, repr=False)

    @refuse_other_names
    def __init__(
        self,
        loss_scale: Any = 2.0**15,
        counter: Any = 0,
        period: int = 2000,
        factor: float = 2,
        min_loss_scale: Any = 1.0,
        *,
        backoff_factor: float | None = None,
        max_loss_scale: float = 2.0**24,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        credits: Any = None,
    ):
        register_with_flax()
        start = check_scale(loss_scale)
        warn_if_not_floating(loss_scale, "loss_scale")
        warn_if_not_floating(min_loss_scale, "min_loss_scale")
        settings = check_settings(period, factor, min_loss_scale, backoff_factor, max_loss_scale, hysteresis)
        settings["consecutive_hysteresis"] = bool(consecutive_hysteresis)
        for name, value in (("counter", counter), ("credits", credits)):
            check_scalar(value, name)
        if settings["hysteresis"] == 1:
            credits = None
        elif credits is None:
            credits = settings["hysteresis"] - 1
        bounds = settings["min_loss_scale"], settings["max_loss_scale"]
        loss_scale = clamp(_scalar(loss_scale, jnp.float32), start, *bounds)
        leaves = (loss_scale, _scalar(counter, jnp.int32), _scalar(credits, jnp.int32))
        self._assign(tuple(settings.items()), leaves)

    def __eq__(self, other: object) -> bool:
        """Whether settings and numbers are equal; the numbers must be known, not traced."""
        if not isinstance(other, DynamicLossScale):
            return NotImplemented
        return self._settings == other._settings and all(map(_is_same, self.tree_flatten()[0], other.tree_flatten()[0]))

    def __hash__(self) -> int:
        return hash(self._settings)

    def unscale(self, tree: T) -> T:
        """Divides the floating and complex numbers of a tree by the scale; half-precision ones become float32.

        By way of the reciprocal: the result is exact for powers of two, and within 1.5 units in the last place for
        other scales. XLA repeats a multiplication wherever its result is read, and would write a quotient to memory.
        """
        if self.max_loss_scale > _LARGEST_WITH_RECIPROCAL:
            return super().unscale(tree)
        return _map_numbers(operator.mul, tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: jax.Array) -> "DynamicLossScale":
        """The loss scale of the next step.

        Args:
          grads_finite: whether all gradients of this step were finite, a boolean scalar.

        Raises:
          ValueError: `grads_finite` is not a boolean scalar.
        """
        finite = jnp.asarray(grads_finite)
        if finite.shape != () or finite.dtype != jnp.bool_:
            raise ValueError(
                f"Expected boolean scalar for grads_finite, got {jax.typeof(finite)}. For example: all_finite(grads)."
            )
        complete = self.counter >= min(self.period, NEVER) - 1
        credits, overdrawn = self._next_credits(finite, complete)
        loss_scale = jnp.where(finite, self._grown(complete), self._lowered(overdrawn))
        counter = jnp.where(finite & ~complete, self.counter + 1, 0)
        return self.tree_unflatten(self._settings, (loss_scale, counter, credits))

    def _grown(self, complete: jax.Array) -> jax.Array:
        grown = self.loss_scale * self.factor
        return jnp.where(complete & jnp.isfinite(grown) & (grown <= self.max_loss_scale), grown, self.loss_scale)

    def _lowered(self, overdrawn: jax.Array | bool) -> jax.Array:
        lowered = jnp.maximum(self.loss_scale * self.backoff_factor, self.min_loss_scale)
        return lowered if overdrawn is True else jnp.where(overdrawn, lowered, self.loss_scale)

    def _next_credits(self, finite: jax.Array, complete: jax.Array) -> tuple[jax.Array | None, jax.Array | bool]:
        """The credits after this step, and whether an overflow in it finds none left."""
        if self.credits is None:
            return None, True
        refill = finite if self.consecutive_hysteresis else finite & complete
        spent = jnp.where(finite, self.credits, jnp.maximum(self.credits - 1, 0))
        return jnp.where(refill, self.hysteresis - 1, spent), self.credits == 0

    # The settings are one tuple, and unflattening goes past __init__: a step's dispatch pays for both, and JAX
    # rebuilds a state with leaves of any kind (shapes, shardings, None, object()), which must not be inspected.

    def _assign(self, settings: tuple, leaves: tuple) -> None:
        vars(self).update(settings, _settings=settings, loss_scale=leaves[0], counter=leaves[1], credits=leaves[2])

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The arrays, and the settings."""
        return (self.loss_scale, self.counter, self.credits), self._settings

    def tree_flatten_with_keys(self) -> tuple[tuple, tuple]:
        """As `tree_flatten`, with the names of the arrays."""
        names = ("loss_scale", "counter", "credits")
        return tuple((jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in names), self._settings

    @classmethod
    def tree_unflatten(cls, settings: tuple, leaves: tuple) -> "DynamicLossScale":
        """The loss scale of these settings and arrays, whatever stands in for the arrays."""
        new = object.__new__(cls)
        new._assign(settings, leaves)
        register_with_flax()
        return new


def register_with_flax() -> None:
    """Teaches `flax.serialization` loss scales, once, if it is loaded; called wherever one is made or received."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or serialization.is_serializable(DynamicLossScale):
        return
    for kind in (NoOpLossScale, StaticLossScale, DynamicLossScale):
        serialization.register_serialization_state(kind, _state_dict, _from_state_dict)


def _state_dict(scale: LossScale) -> dict[str, Any]:
    keys_and_leaves, _ = jax.tree_util.tree_flatten_with_path(scale)
    return {path[0].name: leaf for path, leaf in keys_and_leaves}


def _from_state_dict(target: LossScale, state: dict[str, Any]) -> LossScale:
    expected = _state_dict(target)
    if state.keys() != expected.keys():
        raise ValueError(
            f"The saved loss scale has {sorted(state)}, but {type(target).__name__} has {sorted(expected)}: it was "
            "saved under another kind of loss scale. Convert what was saved, as a whole: "
            "jmp_policy.convert_state(flax.serialization.msgpack_restore(data), target)."
        )
    return jax.tree.unflatten(jax.tree.structure(target), [state[name] for name in expected])


def _map_numbers(op: Callable[[Any, Any], Any], tree: T, scale: Any) -> T:
    def apply(leaf: Any) -> Any:
        if isinstance(leaf, float | complex) and not isinstance(leaf, np.generic):
            leaf = jnp.asarray(leaf, jnp.complex64 if isinstance(leaf, complex) else jnp.float32)
        if is_floating(leaf):
            leaf = jnp.asarray(leaf)  # whose float64 is float32 if 64 bits are disabled, as everywhere in JAX
            wide = at_least_float32(leaf.dtype)
            return op(lax.convert_element_type(leaf, wide), lax.convert_element_type(scale, wide))
        arrays = jax.Array | np.ndarray | np.generic
        if isinstance(leaf, arrays) and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            # By parts: an infinite part times a complex number would turn the other part into nan.
            return lax.complex(apply(leaf.real), apply(leaf.imag))
        return leaf

    return jax.tree.map(apply, tree)


def _scalar(value: Any, dtype: Any) -> Any:
    """A strong-typed array of a number, and anything else as it is."""
    numbers = (int, float, np.generic, np.ndarray, jax.Array)
    return jnp.asarray(value, dtype=dtype) if isinstance(value, numbers) else value


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    arrays = np.ndarray | jax.Array
    if isinstance(one, arrays) and isinstance(other, arrays):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)
