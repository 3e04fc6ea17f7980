"""A Flax train state in which a non-finite step changes nothing."""

import dataclasses
from typing import Any, Self

from flax.training import train_state

from .. import optim
from .._base import OVERWRITE
from ..loss_scale import select_tree, was_step_taken
from ..optim import overwrite_state


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for optimizers under `optim.loss_scaled` or `optim.skip_nonfinite`.

    On a skipped step, `step` does not advance, and other fields, such as batch statistics, keep their values. With
    float8 layers, pass both collections as `params`: `{"params": ..., "_overwrite_with_gradient": ...}`. The loss scale
    is in `opt_state`, so the state itself can be passed as `loss_scale`:

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0))
    >>> state = jmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    >>> loss, grads = jmp.value_and_grad(lambda p: jnp.sum(p["w"] / 0.0), loss_scale=state)(state.params)
    >>> state = state.apply_gradients(grads=grads)
    >>> int(state.step), state.params["w"].tolist(), float(jmp.get_loss_scale(state).loss_scale)
    (0, [1.0, 1.0], 2.0)
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Takes one step.

        Args:
          grads: true gradients, a tree like `params`.
          **kwargs: new values of other fields, such as `batch_stats`; a skipped step keeps the old values. `value`,
            the loss, `grad`, `value_fn`, `grad_fn` and `obj_fn` are extra arguments of the optimizer, unless they are
            fields.

        Returns:
          The next state.
        """
        names = {"value", "grad", "value_fn", "grad_fn", "obj_fn"} - {field.name for field in dataclasses.fields(self)}
        extra = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        if OVERWRITE in grads:
            trained, opt_state = optim.step(self.tx, grads["params"], self.opt_state, self.params["params"], **extra)
            state = overwrite_state(self.params[OVERWRITE], grads[OVERWRITE], self.opt_state, opt_state)
            params = {**self.params, "params": trained, OVERWRITE: state}
        else:
            params, opt_state = optim.step(self.tx, grads, self.opt_state, self.params, **extra)
        taken = was_step_taken(opt_state)
        if taken is True:
            return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)
        kept = {name: select_tree(taken, value, getattr(self, name)) for name, value in kwargs.items()}
        # Not `step + taken`: Flax's first step is a Python int, and a change of its type would compile a jitted train
        # step a second time.
        step = select_tree(taken, self.step + 1, self.step)
        return self.replace(step=step, params=params, opt_state=opt_state, **kept)
