"""An optimizer of nnx modules that skips non-finite steps, and rounds half-precision parameters as `optim` does."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from .. import optim
from .._base import PyTree, split_state
from ..loss_scale import has_scaled_state, was_step_taken
from ..optim import ParameterUpdate, fill_zeros, overwrite_state, warn_of_half_params
from ._layer_state import Float8State


class Optimizer(nnx.Optimizer):
    """`flax.nnx.Optimizer` in which a non-finite step advances neither the parameters, nor the moments, nor `step`.

    It has the signature of Flax's. With a `tx` of `jmp_policy.optim.loss_scaled` or `skip_nonfinite` it holds the loss
    scale, and `value_and_grad`, `get_loss_scale` and `metrics` accept it as their state. Half-precision parameters
    (`nnx.cast_params`) are updated exactly as by `jmp_policy.optim.step`. With any other transformation it does the
    same as Flax's.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> import optax
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> tx = jmp.optim.loss_scaled(optax.sgd(0.1), jmp.DynamicLossScale(4.0))
    >>> optimizer = jmp.nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> grads = jmp.nnx.grad(lambda model: model(jnp.full((1, 2), jnp.inf)).sum(), loss_scale=optimizer)(model)
    >>> optimizer.update(model, grads)
    >>> int(optimizer.step[...]), float(jmp.get_loss_scale(optimizer).loss_scale)
    (0, 2.0)
    """

    def __init__(self, model: nnx.Module, tx: Any, **options: Any):
        super().__init__(model, tx, **options)
        if not has_scaled_state(self.opt_state):  # `loss_scaled` has warned
            params = nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph))
            warn_of_half_params(tx, params, nnx.as_pure(self.opt_state))

    def update(self, model: nnx.Module, grads: PyTree, /, **extra: Any) -> Any:
        """Updates the parameters of a model and the state of the optimizer, unless a gradient is not finite.

        Args:
          model: the module that the optimizer was made for.
          grads: true gradients, as `jmp_policy.nnx.value_and_grad` returns them.
          **extra: extra arguments of the transformation, such as `value`.

        Returns:
          `None` under `loss_scaled`, and with a transformation for half-precision parameters: the step makes no array
          of updates, which is cheaper and exact. With any other transformation the updates, as Flax's.

        Raises:
          TypeError: the gradients come first.
        """
        if isinstance(model, nnx.State) and isinstance(grads, nnx.Module):  # Flax would change the gradients
            raise TypeError(
                f"update takes the model, then its gradients, got a State and a {type(grads).__name__}. "
                "For example: optimizer.update(model, grads)."
            )
        new = nnx.state(grads, Float8State, graph=self.graph)
        paths = {path for path, _ in nnx.to_flat_state(new)}  # a layer that was assigned in the step is not among them
        differentiated = nnx.All(Float8State, lambda path, _: path in paths)
        old, before = nnx.as_pure(nnx.state(model, differentiated, graph=self.graph)), nnx.as_pure(self.opt_state)
        updates = self._update_params(model, grads, extra)
        if paths:
            nnx.update(model, overwrite_state(old, nnx.as_pure(new), before, nnx.as_pure(self.opt_state)))
        return updates

    def _update_params(self, model: nnx.Module, grads: PyTree, extra: dict[str, Any]) -> Any:
        if not (isinstance(self.tx.update, ParameterUpdate) or has_scaled_state(self.opt_state)):
            return super().update(model, fill_zeros(*split_state(grads)), **extra)
        params = nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph))
        true_grads = nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph))
        opt_state = nnx.as_pure(self.opt_state)
        params, opt_state = optim.step(self.tx, true_grads, opt_state, params, **nnx.as_pure(extra))
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state, graph=self.graph))
        self.step[...] += jnp.uint32(was_step_taken(opt_state))
        return None
