"""The function or module that is tuned, and the map that keeps scopes out of a policy."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._base import Args, PyTree, is_array, is_floating_dtype, list_paths_to
from ...autocast import autocast
from ...gradients import value_and_grad
from ...loss_scale import LossScale
from ...modules import find_adapter, find_lifting_adapter, with_policy
from ...policy import Policy, PolicyMap


def make_map(scopes: Sequence[str], kept: Collection[str], policy: Policy, kept_policy: Policy) -> PolicyMap:
    """The map under which some scopes have another policy than all the others.

    A scope is what runs right at a path: what is inside of it at longer paths is a scope of its own. A rule covers
    what is inside, so that there is one only where a scope differs from the one around it, and inner rules come first.
    Results leave a scope in the dtype in which they were computed, and the whole in the output dtype of the policy,
    unless the root is kept.

    Args:
      scopes: the paths of all scopes; the root's is the empty string.
      kept: those that have the other policy.
      policy: what the others have.
      kept_policy: the other policy.

    >>> import jmp_policy as jmp
    >>> low, full = map(jmp.get_policy, ("bfloat16", "float32"))
    >>> make_map(["", "a/x", "a/y", "b"], ["a/x", "a/y"], low, full).rules[0].key
    'a'
    """
    wanted = {scope: scope in kept for scope in scopes}
    paths = sorted({path for scope in scopes for path in list_paths_to(scope)} | {""})
    children: dict[str, list[str]] = {path: [] for path in paths}
    for path in paths:
        if path:
            children[path.rpartition("/")[0]].append(path)
    inner = {True: kept_policy.replace(output_dtype=None), False: policy.replace(output_dtype=None)}
    is_kept = wanted.get("", False)
    rules = [(re.escape(path), inner[of_path]) for path, of_path in _Tree(children, wanted).list_rules("", is_kept)]
    return PolicyMap(rules, inner[True] if is_kept else policy)


class _Tree:
    """Paths, and which of them are to be kept; for the others it does not matter."""

    def __init__(self, children: dict[str, list[str]], wanted: dict[str, bool]):
        self._children, self._wanted = children, wanted
        self._costs: dict[tuple[str, bool], int] = {}

    def list_rules(self, path: str, is_kept: bool) -> Iterator[tuple[str, bool]]:
        """The rules for what is inside of a path, inner ones first, where the path itself is kept or not."""
        for child in self._children[path]:
            chosen = self._choose(child, is_kept)
            yield from self.list_rules(child, chosen)
            if chosen != is_kept:
                yield child, chosen

    def _choose(self, path: str, outer: bool) -> bool:
        """Whether a path is to be kept, where the one around it is or is not."""
        if path in self._wanted:
            return self._wanted[path]
        return min((outer, not outer), key=lambda is_kept: (is_kept != outer) + self._count_rules(path, is_kept))

    def _count_rules(self, path: str, is_kept: bool) -> int:
        if (path, is_kept) not in self._costs:
            chosen = [(child, self._choose(child, is_kept)) for child in self._children[path]]
            self._costs[path, is_kept] = sum((c != is_kept) + self._count_rules(child, c) for child, c in chosen)
        return self._costs[path, is_kept]


def write_code(policy_map: PolicyMap) -> str:
    """Python that makes a map, one rule on a line.

    >>> import jmp_policy as jmp
    >>> print(write_code(jmp.PolicyMap({"head": "float32"}, "params=float32,compute=float16,output=none")))
    jmp.PolicyMap(
        {
            'head': 'params=float32,compute=float32,output=float32',
        },
        default='params=float32,compute=float16,output=none',
    )
    """
    default = None if policy_map.default is None else str(policy_map.default)
    rules = [f"        {rule.key!r}: {str(rule.policy)!r}," for rule in policy_map.rules]
    body = ["    {", *rules, "    },"] if rules else ["    {},"]
    return "\n".join(["jmp.PolicyMap(", *body, f"    default={default!r},", ")"])


Observed = dict[str, PyTree]
"""What a run returned, by name: the outputs, and the gradients where there are any."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function or module of Flax, and what it is called with.

    Attributes:
      target: the function or module.
      args: its arguments; for a linen module the variables come first.
      differentiates: whether gradients with respect to the first argument, or the parameters, count too.
      has_aux: whether the function returns a loss and auxiliary data, as in `jax.grad`.
      seed: of the projection that makes a loss of a module's outputs.
    """

    target: Any
    args: Args
    differentiates: bool
    has_aux: bool
    seed: int

    @property
    def is_module(self) -> bool:
        """Whether it is a module of Flax's, not a function."""
        return find_adapter(self.target) is not None

    @property
    def holds_variables(self) -> bool:
        """Whether it is a module of nnx, which has its own; those of linen are the first argument."""
        return find_lifting_adapter(self.target) is not None

    @property
    def name(self) -> str:
        """What files and errors call it."""
        target = type(self.target) if self.is_module else self.target
        return getattr(target, "__qualname__", None) or type(target).__qualname__

    def attach(self, policy: Policy | PolicyMap | None) -> Any:
        """The function or module under a policy; as it is if `None`."""
        if policy is None:
            return self.target
        return with_policy(self.target, policy) if self.is_module else autocast(self.target, policy)

    def make_run(
        self, policy: Policy | PolicyMap | None, scale: LossScale, look: Callable[..., Any] = lambda fun: fun
    ) -> tuple[Callable[..., Any], PyTree]:
        """A function of one tree of arrays that runs under a policy, and that tree; what it writes is lost.

        Args:
          policy: the policy; `None` for none.
          scale: the loss scale.
          look: what is made of the function of the arguments, such as `collect`.
        """
        observe, args = self._make_observed(policy, scale)
        has_objects = find_lifting_adapter(args) is not None
        arrays, rebuild = (_take_nnx_apart if has_objects else _take_apart)(args)
        observed = look(observe)
        return lambda arrays: observed(*rebuild(arrays)), arrays

    def make_candidate(self, policy: Policy | PolicyMap | None) -> Args:
        """What a metric is called with: the function or module under a policy, and the arguments.

        Objects of nnx are copies that share their arrays, since a metric may train them.
        """
        arguments = (self.attach(policy), *self.args)
        if find_lifting_adapter(arguments) is None:
            return arguments
        from flax import nnx

        is_object = lambda leaf: find_lifting_adapter((leaf,)) is not None
        return tuple(nnx.clone(value) if is_object(value) else value for value in arguments)

    def _make_observed(
        self, policy: Policy | PolicyMap | None, scale: LossScale
    ) -> tuple[Callable[..., Observed], Args]:
        """The function of the arguments that returns what is compared, and those arguments."""
        attached, args = self.attach(policy), self.args
        if not self.is_module:
            fun = attached
        elif find_lifting_adapter(attached) is not None:
            fun, args = _call_model, (attached, *self.args)
        else:
            fun = attached.apply
        differentiate = _choose_gradient(args[:1])
        loss_fn = functools.partial(_call_loss, fun, self.has_aux, self.seed)

        def observe(*args: Any) -> Observed:
            if not self.differentiates:
                return {"outputs": fun(*args)[0] if self.has_aux else fun(*args)}
            (_, out), grads = differentiate(loss_fn, has_aux=True, loss_scale=scale)(*args)
            return {"outputs": out, "gradients": [leaf for leaf in jax.tree.leaves(grads) if _is_floating(leaf)]}

        return observe, args


def _call_model(model: Any, *inputs: Any) -> Any:
    return model(*inputs)


def _choose_gradient(first: Args) -> Callable[..., Any]:
    adapter = find_lifting_adapter(first)
    own = None if adapter is None else adapter.value_and_grad
    return own or functools.partial(value_and_grad, allow_int=True)


def _call_loss(fun: Callable[..., Any], has_aux: bool, seed: int, *args: Any) -> tuple[jax.Array, PyTree]:
    """The loss, which is differentiated, and what is compared: the outputs without auxiliary data."""
    out = fun(*args)[0] if has_aux else fun(*args)
    if is_loss(out):
        return out, out
    return project(out, seed), out


def is_loss(out: PyTree) -> bool:
    """Whether a result is one real number."""
    return _is_floating(out) and jnp.ndim(out) == 0


def project(out: PyTree, seed: int) -> jax.Array:
    """A loss of any outputs, float32: their sum with random weights, which are the same for the same seed."""
    total = jnp.zeros((), jnp.float32)
    for index, leaf in enumerate(leaf for leaf in jax.tree.leaves(out) if _is_floating(leaf)):
        weights = jax.random.normal(jax.random.fold_in(jax.random.key(seed), index), leaf.shape, jnp.float32)
        total += jnp.sum(leaf.astype(jnp.float32) * weights) / max(1, leaf.size) ** 0.5
    return total


def _is_floating(leaf: Any) -> bool:
    return is_array(leaf) and is_floating_dtype(leaf.dtype)


def _take_apart(args: Args) -> tuple[list[Any], Callable[[list[Any]], Args]]:
    """The arrays of some arguments, and what puts them back; all else is as it is, Python numbers too."""
    leaves, structure = jax.tree.flatten(args)
    where = [index for index, leaf in enumerate(leaves) if is_array(leaf)]

    def rebuild(arrays: list[Any]) -> Args:
        new = list(leaves)
        for index, array in zip(where, arrays, strict=True):
            new[index] = array
        return jax.tree.unflatten(structure, new)

    return [leaves[index] for index in where], rebuild


def _take_nnx_apart(args: Args) -> tuple[Any, Callable[[Any], Args]]:
    """The same of arguments with objects of nnx: what a run writes to them is written to copies."""
    from flax import nnx

    graph, state = nnx.split(args)
    return state, lambda state: nnx.merge(graph, state)
