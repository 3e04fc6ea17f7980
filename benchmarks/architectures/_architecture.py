"""An architecture in functional form, whichever Flax API its author used."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

import jmp_policy as jmp


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as two functions.

    Attributes:
      init: `(key) -> (params, variables)`.
      loss: `(params, variables, batch) -> (loss, variables)`.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model that its author wrote, and how it is trained.

    Attributes:
      api: "linen" or "nnx".
      make: the author's constructor: of a dtype in linen, of a dtype and `rngs` in nnx.
      loss_fn: the author's loss: of `apply_fn`, variables and a batch in linen, of a model and a batch in nnx.
      inputs: the entries of a batch that a linen model is called on.
      batches: one batch for each step, stacked.
      tx: the optimizer.
    """

    api: str
    make: Callable[..., Any]
    loss_fn: Callable[..., Any]
    batches: dict[str, Any]
    tx: optax.GradientTransformation
    inputs: tuple[str, ...] = ()

    @property
    def batch(self) -> dict[str, Any]:
        """The first batch."""
        return jax.tree.map(lambda stacked: stacked[0], self.batches)

    def without_policy(self) -> Model:
        """The model as its author left it."""
        return self._model(self.make)

    def by_hand(self, dtype: Any) -> Model:
        """The model with its dtype written by hand."""
        return self._model(lambda **rngs: self.make(dtype=dtype, **rngs))

    def with_policy(self, policy: jmp.Policy) -> Model:
        """The model as its author left it, under a policy."""
        return self._model(lambda **rngs: jmp.with_policy(self.make(**rngs), policy))

    def _model(self, make: Callable[..., Any]) -> Model:
        return _of_linen(make(), self) if self.api == "linen" else _of_nnx(make, self)


def _of_linen(module: Any, architecture: Architecture) -> Model:
    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = dict(module.init(key, *[architecture.batch[name] for name in architecture.inputs]))
        return variables.pop("params"), variables

    def loss(params: Any, variables: Any, batch: Any) -> tuple[jax.Array, Any]:
        loss, updates = architecture.loss_fn(module.apply, {"params": params, **variables}, batch)
        return loss, dict(updates)

    return Model(init, loss)


def _of_nnx(make: Callable[..., Any], architecture: Architecture) -> Model:
    def init(key: jax.Array) -> tuple[Any, Any]:
        _, params, variables = nnx.split(make(rngs=nnx.Rngs(key)), nnx.Param, ...)
        return nnx.as_pure(params), nnx.as_pure(variables)

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))

    def loss(params: Any, variables: Any, batch: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params, variables, copy=True)
        return architecture.loss_fn(model, batch), nnx.as_pure(nnx.state(model, nnx.Not(nnx.Param)))

    return Model(init, loss)
