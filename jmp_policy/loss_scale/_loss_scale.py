"""Loss scales: immutable values that work under `jit` and keep small float16 gradients above zero."""

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, Never, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import Uncast, at_least_float32, is_floating, note_for_observer
from ._scale_settings import (
    NEVER,
    check_constant,
    check_scalar,
    check_scale,
    check_settings,
    clamp,
    explain_argument,
    explain_attribute,
    warn_if_not_floating,
)

T = TypeVar("T")

_LARGEST_WITH_RECIPROCAL = 2.0**126  # the reciprocal of a larger scale is subnormal, which XLA may flush to zero


class LossScale(Uncast):
    """Base class of `NoOpLossScale`, `StaticLossScale` and `DynamicLossScale`.

    The scale is float32 and no cast changes it. `scale` and `unscale` compute in float32 or wider.

    >>> import jmp_policy as jmp
    >>> isinstance(jmp.NoOpLossScale(), jmp.LossScale)
    True
    """

    loss_scale: Any

    def scale(self, tree: T) -> T:
        """Multiplies the floating and complex elements of a tree by the scale, in float32 or wider."""
        note_for_observer("loss scale", lambda: [(type(self).__name__, spell_settings(self))])
        return _map_numbers(operator.mul, tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the floating and complex elements of a tree by the scale. Half-precision leaves become float32."""
        return _map_numbers(operator.truediv, tree, self.loss_scale)

    def adjust(self, grads_finite: jax.Array) -> "LossScale":
        """Returns the loss scale of the next step, given whether the gradients of this step were finite."""
        del grads_finite
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(explain_attribute(type(self).__name__, name), name=name, obj=self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        register_loss_scales()  # this process may not have made a loss scale yet


def spell_settings(scale: LossScale) -> str:
    """Lists the settings of a loss scale, such as `"period 2000, factor 2.0"`; its state is not one."""
    fields = dataclasses.fields(scale) if dataclasses.is_dataclass(scale) else ()
    pairs = ((field.name, getattr(scale, field.name)) for field in fields if not field.name.startswith("_"))
    settings = {name: value for name, value in pairs if isinstance(value, bool | int | float)}
    state = {"loss_scale", "counter", "credits"} if isinstance(scale, DynamicLossScale) else set[str]()
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name not in state) or "no settings"


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclasses.dataclass(frozen=True, init=False)
class NoOpLossScale(LossScale):
    """Loss scale of one, for float32 and bfloat16.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> grads = {"w": jnp.ones(2)}
    >>> jmp.NoOpLossScale().scale(grads) is grads
    True
    """

    def __init__(self) -> None:
        if not _is_registered and "flax.serialization" in sys.modules:
            register_loss_scales()

    def __reduce__(self) -> tuple:
        return type(self), ()  # without attributes, a pickle does not call __setstate__

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
    """Constant loss scale; a pytree without leaves.

    Args:
      loss_scale: a positive number; a power of two makes scaling exact. Zero, which DeepMind's `jmp` accepts, makes
        every gradient 0 / 0 and gives a warning.

    Raises:
      ValueError: `loss_scale` is not a positive normal float32 number.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.StaticLossScale(1024.0).scale(jnp.float16(100))
    Array(102400., dtype=float32)
    """

    loss_scale: float

    def __post_init__(self) -> None:
        number = check_constant(self.loss_scale)
        object.__setattr__(self, "loss_scale", float(self.loss_scale) if number is None else number)
        register_loss_scales()


@dataclasses.dataclass(frozen=True, init=False, eq=False)
@functools.partial(  # flattened in C++, and its settings are one tuple: each dispatch of a step pays for both
    jax.tree_util.register_dataclass,
    data_fields=["loss_scale", "counter", "credits"],
    meta_fields=["_settings"],
)
class DynamicLossScale(LossScale):
    """Loss scale that adapts to the largest value that keeps gradients finite.

    After `period` finite steps in a row the scale is multiplied by `factor`, if the result is finite and at most
    `max_loss_scale`. A non-finite step multiplies it by `backoff_factor`, down to `min_loss_scale`, and restarts the
    count. The leaves of the pytree are the arrays `loss_scale` (float32, shape `()`) and `counter` (int32, shape `()`).
    All settings are static.

    Flax's `DynamicScale` is `DynamicLossScale(2.0**16, period=2001, min_loss_scale=2.0**-126,
    max_loss_scale=math.inf)`: it grows one step later than its `growth_interval` says.

    Args:
      loss_scale: the initial scale. A scale outside of the bounds starts at the nearer bound, with a warning.
      counter: finite steps in a row since the scale last changed.
      period: the number of finite steps in a row after which the scale grows.
      factor: the growth factor.
      min_loss_scale: the floor. Zero, which DeepMind's `jmp` accepts, becomes 2**-126 with a warning.
      backoff_factor: the factor of a non-finite step; `1 / factor` by default.
      max_loss_scale: the ceiling of growth.
      hysteresis: the number of overflows after which the scale is lowered; earlier ones only skip their step. Above
        one, the pytree has a third leaf, `credits`.
      consecutive_hysteresis: refill the credits on every finite step (DeepSpeed), not only after a complete period of
        finite steps (Megatron-LM).
      credits: int32, the number of overflows that may still pass without backoff; `hysteresis - 1` by default.

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
        _settings: tuple | None = None,
        **unknown: Never,
    ):
        # JAX unflattens with leaves of any kind (shapes, shardings, None, object()), which must not be inspected. Each
        # dispatch of a step comes here, so nothing is called.
        if _settings is not None:
            attributes = self.__dict__
            attributes["_settings"] = _settings
            attributes["loss_scale"], attributes["counter"], attributes["credits"] = loss_scale, counter, credits
            if not _is_registered and "flax.serialization" in sys.modules:
                register_loss_scales()
            return
        register_loss_scales()
        for name in unknown:
            raise TypeError(explain_argument(name))
        start = check_scale(loss_scale)
        warn_if_not_floating(loss_scale, "loss_scale")
        warn_if_not_floating(min_loss_scale, "min_loss_scale")
        settings = check_settings(period, factor, min_loss_scale, backoff_factor, max_loss_scale, hysteresis)
        settings["consecutive_hysteresis"] = bool(consecutive_hysteresis)
        check_scalar(counter, "counter")
        check_scalar(credits, "credits")
        if settings["hysteresis"] == 1:
            credits = None
        elif credits is None:
            credits = settings["hysteresis"] - 1
        bounds = settings["min_loss_scale"], settings["max_loss_scale"]
        loss_scale = clamp(_scalar(loss_scale, jnp.float32), start, *bounds)
        leaves = {"counter": _scalar(counter, jnp.int32), "credits": _scalar(credits, jnp.int32)}
        vars(self).update(_settings=tuple(settings.items()), loss_scale=loss_scale, **leaves)

    def __getattr__(self, name: str) -> Any:
        settings = dict(vars(self).get("_settings", ()))
        if name in settings:
            return settings[name]
        return super().__getattr__(name)

    def __eq__(self, other: object) -> bool:
        """True if settings and values are equal. The values must not be traced."""
        if not isinstance(other, DynamicLossScale):
            return NotImplemented
        return self._settings == other._settings and all(map(_is_same, jax.tree.leaves(self), jax.tree.leaves(other)))

    def __hash__(self) -> int:
        return hash(self._settings)

    def unscale(self, tree: T) -> T:
        """Divides the floating and complex elements of a tree by the scale. Half-precision leaves become float32."""
        # The reciprocal is exact for powers of two, and within 1.5 units in the last place for other scales. A
        # multiplication fuses into each use, while a quotient would be stored in memory.
        if self.max_loss_scale > _LARGEST_WITH_RECIPROCAL:
            return super().unscale(tree)
        return _map_numbers(operator.mul, tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: jax.Array) -> "DynamicLossScale":
        """Returns the loss scale of the next step, given whether all gradients were finite, as a boolean scalar."""
        finite = jnp.asarray(grads_finite)
        if finite.shape != () or finite.dtype != jnp.bool_:
            raise ValueError(
                f"Expected boolean scalar for grads_finite, got {jax.typeof(finite)}. For example: all_finite(grads)."
            )
        scale, complete, credits = self.loss_scale, self.counter >= min(self.period, NEVER) - 1, self.credits
        grown = scale * self.factor
        grown = jnp.where(complete & jnp.isfinite(grown) & (grown <= self.max_loss_scale), grown, scale)
        lowered = jnp.maximum(scale * self.backoff_factor, self.min_loss_scale)
        if credits is not None:  # the first overflows only skip their step
            lowered = jnp.where(credits == 0, lowered, scale)
            refill = finite if self.consecutive_hysteresis else finite & complete
            spent = jnp.where(finite, credits, jnp.maximum(credits - 1, 0))
            credits = jnp.where(refill, self.hysteresis - 1, spent)
        scale = jnp.where(finite, grown, lowered)
        counter = jnp.where(finite & ~complete, self.counter + 1, 0)
        return type(self)(scale, counter, credits=credits, _settings=self._settings)


_is_registered = False  # with Flax


def register_loss_scales() -> None:
    """Registers loss scales with `flax.serialization` if it is loaded. Called wherever one is made or received."""
    global _is_registered
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or serialization.is_serializable(DynamicLossScale):
        return
    _is_registered = True
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
            "saved under another kind of loss scale. Convert the whole saved state: "
            "jmp_policy.convert_state(flax.serialization.msgpack_restore(data), target)."
        )
    return jax.tree.unflatten(jax.tree.structure(target), [state[name] for name in expected])


def _map_numbers(op: Callable[[Any, Any], Any], tree: T, scale: Any) -> T:
    def apply(leaf: Any) -> Any:
        if isinstance(leaf, float | complex) and not isinstance(leaf, np.generic):
            leaf = jnp.asarray(leaf, jnp.complex64 if isinstance(leaf, complex) else jnp.float32)
        if is_floating(leaf):
            leaf = jnp.asarray(leaf)  # makes float32 of float64 if 64 bits are disabled
            wide = at_least_float32(leaf.dtype)
            return op(lax.convert_element_type(leaf, wide), lax.convert_element_type(scale, wide))
        arrays = jax.Array | np.ndarray | np.generic
        if isinstance(leaf, arrays) and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            # An infinite part times a complex number would make the other part nan.
            return lax.complex(apply(leaf.real), apply(leaf.imag))
        return leaf

    return jax.tree.map(apply, tree)


def _scalar(value: Any, dtype: Any) -> Any:
    """Returns a strongly typed array for a number, and anything else unchanged."""
    numbers = (int, float, np.generic, np.ndarray, jax.Array)
    return jnp.asarray(value, dtype=dtype) if isinstance(value, numbers) else value


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    arrays = np.ndarray | jax.Array
    if isinstance(one, arrays) and isinstance(other, arrays):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)
