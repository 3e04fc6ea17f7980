"""The policy of `tf.keras.mixed_precision.experimental`, which carried a loss scale."""

from typing import Any

from ...loss_scale import LossScale
from ._dtype_policy import DTypePolicy
from ._loss_scale import read_loss_scale, write_loss_scale

_ALIASES = {"infer_float32_vars": "infer_with_float32_vars", "float32_with_float32_vars": "float32"}


class Policy(DTypePolicy):
    """A dtype policy with a loss scale.

    Args:
      name: as of `DTypePolicy`, and `"infer"` (both dtypes come from the first input),
        `"infer_with_float32_vars"` or `"infer_float32_vars"` (the compute dtype is), `"<dtype>_with_float32_vars"`.
      loss_scale: `"dynamic"`, a number for a constant scale, a `LossScale` or the config of one, TensorFlow's
        `DynamicLossScale` and `FixedLossScale` among them, or `None` for no scaling. The default, `"auto"`, is dynamic
        for `"mixed_float16"` and `None` for any other name, as in Keras; prefer `jmp_policy.Policy.loss_scale`, which
        asks for the compute dtype.

    Raises:
      TypeError: `name` is not a string.
      ValueError: `name` names no policy, or `loss_scale` none of these.

    Source: `tf.keras.mixed_precision.experimental.Policy` of TensorFlow 2.0 to 2.4.

    >>> from jmp_policy.compat import keras
    >>> policy = keras.Policy("mixed_float16", loss_scale=1024)
    >>> policy, policy.should_cast_variables
    (<Policy "mixed_float16", loss_scale=StaticLossScale(loss_scale=1024.0)>, True)
    """

    def __init__(self, name: str, loss_scale: Any = "auto"):
        if name is None:  # the legacy class had no default
            raise TypeError("'name' must be a string, such as 'mixed_float16'. Received: name=None")
        super().__init__(_ALIASES.get(name, name) if isinstance(name, str) else name)
        self._is_default = isinstance(loss_scale, str) and loss_scale == "auto"
        if self._is_default:
            loss_scale = "dynamic" if self.name == "mixed_float16" else None
        self._loss_scale = read_loss_scale(loss_scale)

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale to train with, or `None`."""
        return self._loss_scale

    @property
    def should_cast_variables(self) -> bool:
        """Whether the variable dtype is another one than the compute dtype."""
        return self.variable_dtype != self.compute_dtype

    def resolve(self, *inputs: Any) -> "Policy":
        """This policy with what it infers filled in from the first floating input, as at a layer's first call.

        >>> import jax.numpy as jnp
        >>> from jmp_policy.compat import keras
        >>> keras.Policy("infer").resolve(jnp.ones(2, jnp.float16)).name
        'float16'
        >>> keras.Policy("infer_float32_vars").resolve(jnp.ones(2, jnp.float16)).name
        'float16_with_float32_vars'
        """
        if self.compute_dtype is not None:
            return self
        dtype = self._policy.resolve(*inputs).compute_dtype
        return Policy(f"{dtype}_with_float32_vars" if self.variable_dtype else str(dtype), self._loss_scale)

    def get_config(self) -> dict[str, Any]:
        """As of `DTypePolicy`, with the loss scale where it is not the default one."""
        config = super().get_config()
        return config if self._is_default else config | {"loss_scale": write_loss_scale(self._loss_scale)}

    def __repr__(self) -> str:
        return f'<Policy "{self.name}", loss_scale={self.loss_scale}>'
