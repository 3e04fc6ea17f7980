"""The tuned function or module, the map that keeps scopes out of a policy, and the layers that can be quantized."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._base import Args, PyTree, describe, group_by_key, is_floating
from ..._jaxpr import take_apart
from ...autocast import autocast
from ...gradients import value_and_grad
from ...loss_scale import LossScale
from ...modules import find_adapter, find_lifting_adapter, with_policy
from ...policy import Policy, PolicyMap
from ...quant import QuantizedArray, quantize


def write_code(policy_map: PolicyMap) -> str:
    default = None if policy_map.default is None else str(policy_map.default)
    rules = [f"        {rule.key!r}: {str(rule.policy)!r}," for rule in policy_map.rules]
    body = ["    {", *rules, "    },"] if rules else ["    {},"]
    return "\n".join(["jmp.PolicyMap(", *body, f"    default={default!r},", ")"])


Observed = dict[str, PyTree]
"""Compared results by name: the outputs, and the gradients if any."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function or Flax module with its arguments. `seed` draws the projection of a module's outputs to a loss."""

    target: Any
    args: Args
    differentiates: bool
    has_aux: bool
    seed: int

    @property
    def is_module(self) -> bool:
        return find_adapter(self.target) is not None

    @property
    def holds_variables(self) -> bool:
        """True for an nnx module. A linen module gets its variables as the first argument."""
        return find_lifting_adapter(self.target) is not None

    @property
    def name(self) -> str:
        target = type(self.target) if self.is_module else self.target
        return getattr(target, "__qualname__", None) or type(target).__qualname__

    def attach(self, policy: Policy | PolicyMap | None) -> Any:
        if policy is None:
            return self.target
        return with_policy(self.target, policy) if self.is_module else autocast(self.target, policy)

    def make_run(
        self, policy: Policy | PolicyMap | None, scale: LossScale, look: Callable[..., Any] = lambda fun: fun
    ) -> tuple[Callable[..., Any], PyTree]:
        """Returns a function of one tree of arrays, seen through `look`, and that tree. Writes to objects are lost."""
        observe, args = self._make_observed(policy, scale)
        arrays, rebuild = take_apart(args)
        observed = look(observe)
        return lambda arrays: observed(*rebuild(arrays)), arrays

    def make_candidate(self, policy: Policy | PolicyMap | None) -> Args:
        """Returns the arguments of a metric. nnx objects are cloned because a metric may train them."""
        arguments = (self.attach(policy), *self.args)
        if find_lifting_adapter(arguments) is None:
            return arguments
        from flax import nnx

        is_object = lambda leaf: find_lifting_adapter((leaf,)) is not None
        return tuple(nnx.clone(value) if is_object(value) else value for value in arguments)

    def _make_observed(
        self, policy: Policy | PolicyMap | None, scale: LossScale
    ) -> tuple[Callable[..., Observed], Args]:
        attached, args = self.attach(policy), self.args
        if not self.is_module:
            fun = attached
        elif self.holds_variables:
            fun, args = lambda model, *inputs: model(*inputs), (attached, *self.args)
        else:
            fun = attached.apply
        adapter = find_lifting_adapter(args[:1])
        differentiate: Callable[..., Any] = functools.partial(value_and_grad, allow_int=True)
        if adapter is not None and adapter.value_and_grad is not None:
            differentiate = adapter.value_and_grad

        def run(*args: Any) -> PyTree:
            return fun(*args)[0] if self.has_aux else fun(*args)

        def loss_fn(*args: Any) -> tuple[jax.Array, PyTree]:
            out = run(*args)
            return out if is_loss(out) else project(out, self.seed), out

        def observe(*args: Any) -> Observed:
            if not self.differentiates:
                return {"outputs": run(*args)}
            (_, out), grads = differentiate(loss_fn, has_aux=True, loss_scale=scale)(*args)
            return {"outputs": out, "gradients": [leaf for leaf in jax.tree.leaves(grads) if is_floating(leaf)]}

        return observe, args


def is_loss(out: PyTree) -> bool:
    """True for a scalar of a real floating dtype."""
    return is_floating(out) and jnp.ndim(out) == 0


def project(out: PyTree, seed: int) -> jax.Array:
    """Returns a float32 loss of any outputs: their sum with random weights drawn from `seed`."""
    total = jnp.zeros((), jnp.float32)
    for index, leaf in enumerate(leaf for leaf in jax.tree.leaves(out) if is_floating(leaf)):
        weights = jax.random.normal(jax.random.fold_in(jax.random.key(seed), index), leaf.shape, jnp.float32)
        total += jnp.sum(leaf.astype(jnp.float32) * weights) / max(1, leaf.size) ** 0.5
    return total


def write_example(target: Any) -> str:
    """Returns a call for errors, with the arguments of a linen or an nnx model."""
    args = "(variables, x, labels)" if find_lifting_adapter(target) is None else "(x, labels)"
    return (
        f"For example: tune(model, {args}, 'mixed_bfloat16', metric=loss_fn, "
        "formats=['int4/128', 'int8', 'bfloat16'], effective_bits=4.8)."
    )


class Layer(NamedTuple):
    """A weight that some format quantizes."""

    paths: tuple[str, ...]  # the modules that share it
    leaf: int  # its position among the leaves of the model
    weight: Any
    formats: tuple[str, ...]  # the names of its formats
    stored: tuple[Any, ...]  # by format: a QuantizedArray, or the weight in a dtype
    bits: tuple[int, ...]  # by format, of all arrays

    def select(self, order: Sequence[int]) -> "Layer":
        """Returns this layer with its formats in another order, without those that store what an earlier one does."""
        kept: list[int] = []
        for index in order:
            same_size = [self.read(other) for other in kept if self.bits[index] == self.bits[other]]
            if not any(jnp.array_equal(self.read(index), values) for values in same_size):
                kept.append(index)
        formats, stored, bits = ([part[index] for index in kept] for part in (self.formats, self.stored, self.bits))
        return self._replace(formats=tuple(formats), stored=tuple(stored), bits=tuple(bits))

    def name_stored(self, index: int) -> str:
        """Returns a format, or that in which it stores this weight: `int4` stores tables in int8."""
        name, stored = self.formats[index], self.stored[index]
        if not isinstance(stored, QuantizedArray):
            return str(stored.dtype)
        kind = str(stored.format).partition("(")[0]
        return name if name.partition("(")[0] == kind else kind

    def read(self, index: int) -> jax.Array:
        """Returns the values of the weight in a format, in its own dtype."""
        stored = self.stored[index]
        return (stored.dequantize() if isinstance(stored, QuantizedArray) else stored).astype(self.weight.dtype)


class Model:
    """The loss of a model as a function of its weights."""

    def __init__(self, subject: Subject, policy: Policy | PolicyMap, metric: Callable[..., Any] | None):
        arguments = subject.make_candidate(policy)
        count = 1 if subject.holds_variables else 2
        self._subject, self._metric = subject, metric or _call
        self._found = _find_weights(arguments[0], *arguments[1:count])
        arrays, self._rebuild = take_apart(arguments[:count])
        self._leaves, self._tree = jax.tree.flatten(arrays)
        self._inputs, self._rebuild_inputs = take_apart(arguments[count:])
        self._run = jax.jit(self._compute)

    def list_layers(self, policies: dict[str, Policy]) -> list[Layer]:
        """Stores each weight in each format, and lists those that some format quantizes."""
        positions = {id(leaf): index for index, leaf in enumerate(self._leaves)}
        paths = group_by_key((positions[id(weight)], path) for path, weight in self._found.items())
        target = self._subject.target if self._subject.holds_variables else self._subject.args[0]
        by_format = []
        for policy in policies.values():
            if policy.quantization is None:
                by_format.append({path: weight.astype(policy.param_dtype) for path, weight in self._found.items()})
            else:
                made = quantize(target, policy)
                parts = (made,) if self._subject.holds_variables else (self._subject.target, made)
                by_format.append(_find_weights(*parts))
        layers = []
        for leaf, shared in paths.items():
            stored = tuple(found[shared[0]] for found in by_format)
            if any(isinstance(each, QuantizedArray) for each in stored):
                bits = tuple(8 * each.nbytes for each in stored)
                layers.append(Layer(tuple(shared), leaf, self._leaves[leaf], (*policies,), stored, bits))
        return layers

    def measure(self, weights: dict[int, jax.Array]) -> float:
        """Returns the loss with some leaves replaced."""
        return float(self._run(weights, self._leaves, self._inputs))

    def predict(self, layers: Sequence[Layer]) -> list[list[float]]:
        """Predicts the increase of the loss for each layer and format: half the mean square of gradient times error.

        The mean is over examples, whose gradients estimate the Fisher information. The mean gradient is left out: it is
        small after training, and other batches have another one.
        """
        sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(self._inputs)}
        if len(sizes) != 1 or () in sizes:
            raise ValueError(
                f"effective_bits takes the gradient of each example, and the inputs of {self._subject.name} have no "
                f"leading axis of the same length, got {sorted(sizes)}. {write_example(self._subject.target)}"
            )
        weights = {layer.leaf: layer.weight for layer in layers}
        changes = [
            [(layer.read(index) - layer.weight).astype(jnp.float32) for index in range(len(layer.stored))]
            for layer in layers
        ]

        @jax.jit
        def square(weights: Any, leaves: Any, inputs: Any, changes: Any) -> list[jax.Array]:
            def multiply(example: Any) -> list[jax.Array]:
                example = jax.tree.map(lambda leaf: leaf[None], example)
                grads = jax.grad(self._compute)(weights, leaves, example)
                pairs = zip(layers, changes, strict=True)
                return [
                    jnp.array([jnp.vdot(grads[at.leaf].astype(jnp.float32), one) for one in of]) for at, of in pairs
                ]

            return [jnp.mean(jnp.square(products), axis=0) / 2 for products in lax.map(multiply, inputs)]

        return [row.tolist() for row in square(weights, self._leaves, self._inputs, changes)]

    def _compute(self, weights: dict[int, jax.Array], leaves: Sequence[Any], inputs: Any) -> jax.Array:
        leaves = [weights.get(index, leaf) for index, leaf in enumerate(leaves)]
        model = self._rebuild(jax.tree.unflatten(self._tree, leaves))
        loss = self._metric(*model, *self._rebuild_inputs(inputs))
        if not is_loss(loss):
            given = describe(loss) if not isinstance(loss, jax.Array) else f"{loss.dtype}{list(loss.shape)}"
            example = write_example(self._subject.target)
            raise ValueError(f"effective_bits needs a scalar loss of {self._subject.name}, got {given}. {example}")
        return loss.astype(jnp.float32)


def _call(model: Any, *args: Any) -> Any:
    return model(*args) if find_lifting_adapter(model) is not None else model.apply(*args)


def _find_weights(model: Any, variables: Any = None) -> dict[str, Any]:
    adapter: Any = find_adapter(model)
    return adapter.find_weights(adapter.bind(model, variables))
