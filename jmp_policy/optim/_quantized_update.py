"""The update of an optimizer with 8-bit moments, in chunks."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

from .._base import PyTree
from ._elementwise import describe_mixing, find_mixing
from ._half_parameters import widen_half
from ._moment_blocks import (
    Chunks,
    MomentBlocks,
    dequantize_moment,
    make_thresholds,
    number_positions,
    plan_chunks,
    quantize_moment,
    read_sides,
    scramble,
)
from ._moment_codes import UNSIGNED_FLOAT, MomentCode, find_step, list_roles
from ._step import keep_dtypes
from ._stochastic_rounding import fold_in_devices
from ._transformation import Transformation, with_extra_args

# Of all quantized moments together. The update of a chunk takes 8 bytes per element, and one of `_SMALL` 512 KB.
_CHUNKS, _SMALL = 64, 2**16

# Of gradients beside second moments. The square of a sum of three of them is still finite.
_LARGEST = 2.0**62


class QuantizedMomentsState(NamedTuple):
    """State of `quantize_state`.

    Attributes:
      inner_state: the state of the wrapped transformation, with uint8 codes in place of quantized moments.
      scales: for each field of moments a tree of float32 arrays, the scales of blocks; ones if the moment is not
        quantized.
      key: uint32; the data of the random key for the next step, or without `stochastic` the count of steps of an
        optimizer that has none. Otherwise `None`.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> state = jmp.optim.quantize_state(optax.lion(1e-3)).init({"kernel": jnp.ones((256, 256))})
    >>> state.inner_state[0].mu["kernel"].dtype, state.scales[0]["kernel"].shape, state.key
    (dtype('uint8'), (8, 32), None)
    """

    inner_state: Any
    scales: tuple[Any, ...]
    key: jax.Array | None


class QuantizedUpdate:
    """`update` of `quantize_state`.

    `codes` has the code of each role. `implementation` is the PRNG implementation of the key, or None without a key. An
    `elementwise` optimizer runs on chunks.
    """

    def __init__(self, inner: Transformation, codes: dict[str, MomentCode], implementation: Any, elementwise: bool):
        self._update_inner = with_extra_args(inner).update
        self._codes = codes
        self._implementation = implementation
        self._elementwise = elementwise
        self._compiled = jax.jit(self._update)

    def __call__(self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        if not isinstance(state, QuantizedMomentsState):
            raise TypeError(
                f"Expected the state of quantize_state, got {type(state).__name__}. Make one: tx.init(params)."
            )
        # In eager mode, JAX would trace and compile the loops at each step.
        leaves = jax.tree.leaves((updates, state, params, extra))
        is_eager = all(isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Tracer) for x in leaves)
        return (self._compiled if is_eager else self._update)(updates, state, params, extra)

    def _update(
        self, updates: PyTree, state: QuantizedMomentsState, params: PyTree, extra: dict[str, Any]
    ) -> tuple[PyTree, Any]:
        call = _Call(self._update_inner, self._codes, (updates, state.inner_state, params, extra), state.scales)
        source, key = self._find_source(state)
        new_updates, inner_state, scales = call.run_in_chunks(source) if self._elementwise else call.run_whole(source)
        return new_updates, QuantizedMomentsState(inner_state, scales, key)

    def _find_source(self, state: QuantizedMomentsState) -> tuple[jax.Array, jax.Array | None]:
        """Returns the source of the noise of this step, its number or a random key, and `key` of the next state."""
        if state.key is None:
            step = find_step(state.inner_state)
            assert step is not None, "init counts the steps of other optimizers"
            return step, None
        if state.key.ndim == 0:
            return state.key, state.key + np.uint32(1)
        key, source = jax.random.split(jax.random.wrap_key_data(state.key, impl=self._implementation))
        return source, jax.random.key_data(key)


class _Call:
    """One update: the leaves of all inputs in one list, and the parameter that each of them belongs to."""

    def __init__(self, update: Any, codes: dict[str, MomentCode], tree: tuple[Any, ...], scales: tuple[Any, ...]):
        self._update = update
        paths, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._leaves = [leaf for _, leaf in paths]
        self._results = jax.tree.structure(tree[:2])  # updates and state

        # Moments are fields with a role. Moments in uint8 are codes.
        first = len(jax.tree.leaves(tree[0]))
        moments = [(first + i, role) for i, role in enumerate(list_roles(tree[1])) if role is not None]
        self._scales = dict(zip([i for i, _ in moments], jax.tree.leaves(scales), strict=True))
        self._scales_structure = jax.tree.structure(scales)
        self._codes = {i: codes[role] for i, role in moments if self._leaves[i].dtype == jnp.uint8}

        # A leaf belongs to a parameter if its path ends with the parameter's path and the shapes are equal.
        grads = {path[1:]: i for i, (path, _) in enumerate(paths[:first])}
        self._owners = [self._find_owner(path[1:], leaf, grads) for path, leaf in paths]
        owners = {i: owner for i in self._codes if (owner := self._owners[i]) is not None}
        self._large = sorted(set(owners.values()))
        self._sides = {i: read_sides(self._blocks(i), self._leaves[owner].shape) for i, owner in owners.items()}

    def run_whole(self, source: jax.Array) -> tuple[PyTree, Any, Any]:
        new = self._run_apart([self._read(i, self._blocks(i)) for i in range(len(self._leaves))])
        for i in self._codes:
            new[i] = self._write(i, new[i], source, number_positions(new[i].shape))
        return self._join(new)

    def run_in_chunks(self, source: jax.Array) -> tuple[PyTree, Any, Any]:
        """Runs the optimizer on chunks of the parameters with quantized moments, and on all others at once."""
        if self._large:
            self._check_elementwise()
        new = self._run(self._select(lambda i: self._owners[i] not in self._large))
        largest = max(_SMALL, sum(self._leaves[owner].size for owner in self._large) // _CHUNKS)
        for owner in self._large:
            for i, result in self._run_loop(owner, largest, source).items():
                new[i] = result
        return self._join(new)

    def _run_loop(self, owner: int, largest: int, source: jax.Array) -> dict[int, Any]:
        """Updates one parameter and all of its state chunk by chunk."""
        own = [i for i, other in enumerate(self._owners) if other == owner]
        written = [i for i in own if i < self._results.num_leaves]
        rest = [i for i, other in enumerate(self._owners) if other is None or (other == owner and i not in written)]
        sides = next(self._sides[i] for i in own if i in self._codes)
        devices = max(_count_shards(self._leaves[i]) for i in own)
        plan = functools.partial(plan_chunks, self._leaves[owner].shape, sides, largest, devices)

        def run(chunks: Chunks, carried: list[Any], read: list[Any], source: jax.Array) -> list[Any]:
            read = [chunks.split(x) if self._owners[i] == owner else x for i, x in zip(rest, read, strict=True)]

            def update_chunk(n: jax.Array, carry: list[Any]) -> list[Any]:
                # Leaves of the parameter are float32 chunks; leaves without a parameter are passed whole.
                values: list[Any] = [optax.MaskedNode()] * len(self._leaves)
                for i, x in zip(written, carry, strict=True):
                    values[i] = self._read(i, jax.tree.map(lambda x: chunks.take(x, n), x))
                for i, x in zip(rest, read, strict=True):
                    values[i] = chunks.take(x, n) if self._owners[i] == owner else x
                new = self._run_apart(values)
                # The results overwrite their inputs.
                positions = chunks.number(self._leaves[owner].shape, n)
                write = lambda i: self._write(i, new[i], source, positions) if i in self._codes else new[i]
                chunk = list(map(write, written))
                put = lambda old, new: chunks.put(old, lax.convert_element_type(new, old.dtype), n)
                return jax.tree.map(put, carry, chunk)

            carry = jax.tree.map(chunks.split, carried)
            carry = lax.fori_loop(0, chunks.count, update_chunk, carry)
            return jax.tree.map(lambda x, old: x.reshape(old.shape), carry, carried)

        carried = [widen_half(self._leaves[i]) if i == owner else self._blocks(i) for i in written]
        results = _run_on_automatic_axes(
            _choose_by_platform(run, tpu=plan(cuts_columns=False), default=plan()),
            carried,
            [self._leaves[i] for i in rest],
            source,
        )
        return dict(zip(written, results, strict=True))

    def _run(self, values: Sequence[Any]) -> list[Any]:
        """Runs the optimizer on leaves that may be masked, and returns its updates and its state."""
        updates, state, params, extra = self._structure.unflatten(values)
        new = self._update(widen_half(updates), state, widen_half(params), **extra)
        return self._results.flatten_up_to(new)

    def _run_apart(self, values: Sequence[Any]) -> list[Any]:
        """Runs the optimizer with zeros for gradients that would spoil the blocks of their moments.

        These are gradients that are not finite, whose updates become nan, and gradients whose squares overflow.
        """
        values, kept = list(values), {}
        for owner in self._large:
            if not isinstance(values[owner], optax.MaskedNode):
                grad = kept[owner] = widen_half(values[owner])
                has_squares = any(self._codes[i] == UNSIGNED_FLOAT for i in self._sides if self._owners[i] == owner)
                largest = _LARGEST if has_squares else float(jnp.finfo(grad.dtype).max)
                values[owner] = jnp.where(jnp.abs(grad) <= largest, grad, jnp.zeros_like(grad))
        new = self._run(values)
        for owner, grad in kept.items():
            new[owner] = jnp.where(jnp.isfinite(grad), new[owner], jnp.full_like(new[owner], jnp.nan))
        return new

    def _select(self, is_seen: Callable[[int], bool]) -> list[Any]:
        return [leaf if is_seen(i) else optax.MaskedNode() for i, leaf in enumerate(self._leaves)]

    def _blocks(self, i: int) -> Any:
        """Returns leaf `i`, with its scales if it is quantized."""
        return MomentBlocks(self._leaves[i], self._scales[i]) if i in self._codes else self._leaves[i]

    def _read(self, i: int, leaf: Any) -> Any:
        """Dequantizes leaf `i`, or a chunk of it."""
        return dequantize_moment(leaf, self._codes[i], self._sides[i]) if i in self._codes else leaf

    def _write(self, i: int, moment: jax.Array, source: jax.Array, positions: jax.Array) -> MomentBlocks:
        """Quantizes leaf `i`, or a chunk of it. `positions` are the places of its elements in the parameter."""
        if jnp.issubdtype(source.dtype, jax.dtypes.prng_key):
            noise = _hash(positions, fold_in_devices(jax.random.fold_in(source, i), moment))
        else:
            noise = make_thresholds(positions, source, i)
        return quantize_moment(widen_half(moment), self._codes[i], self._sides[i], noise)

    def _join(self, new: list[Any]) -> tuple[PyTree, Any, Any]:
        """Returns the updates, the state and the scales, in their old dtypes."""
        scales = [new[i].scale if i in self._codes else scale for i, scale in self._scales.items()]
        leaves = [x.codes if i in self._codes else x for i, x in enumerate(new)]
        updates, state = self._results.unflatten(leaves)
        _, old, _, _ = self._structure.unflatten(self._leaves)
        return updates, keep_dtypes(old, state), self._scales_structure.unflatten(scales)

    def _find_owner(self, path: tuple[Any, ...], leaf: Any, grads: dict[tuple[Any, ...], int]) -> int | None:
        """Returns the index of the update of the parameter that a leaf belongs to, or None."""
        owner = next((grads[path[n:]] for n in range(len(path) + 1) if path[n:] in grads), None)
        return owner if owner is not None and jnp.shape(leaf) == self._leaves[owner].shape else None

    def _check_elementwise(self) -> None:
        """Checks that the optimizer is elementwise on large parameters."""
        values = self._select(lambda i: self._owners[i] is None or self._owners[i] in self._large)
        arrays = {i: x for i, x in enumerate(values) if isinstance(x, jax.Array | np.ndarray)}
        dtypes = {i: jnp.float32 if i in self._codes else x.dtype for i, x in arrays.items()}
        kinds = {i: jax.ShapeDtypeStruct(x.shape, dtypes[i]) for i, x in arrays.items()}
        run = lambda arrays: self._run([arrays.get(i, x) for i, x in enumerate(values)])
        try:
            mixing = find_mixing(jax.make_jaxpr(run)(kinds).jaxpr)
        except Exception as error:
            jax.eval_shape(self.run_whole, jnp.uint32(0))  # raises errors that do not depend on chunks
            raise _refuse(f"it cannot be run on some of the parameters alone ({type(error).__name__})") from error
        if mixing:
            raise _refuse(describe_mixing(mixing))


def _refuse(why: str) -> ValueError:
    return ValueError(
        f"quantize_state runs an optimizer on one chunk of a parameter after the other, and this one is not "
        f"elementwise: {why}. Put transformations of whole parameters outside, for example "
        "optax.chain(optax.clip_by_global_norm(1.0), quantize_state(optax.adamw(1e-3))); or use whole float32 moments "
        "in each step: quantize_state(tx, elementwise=False)."
    )


def _hash(positions: jax.Array, key: jax.Array) -> jax.Array:
    """Makes 16 random bits of each position, the same in all partitions of an array."""
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    return scramble((positions ^ first) * np.uint32(0x9E3779B1) + second)


def _count_shards(x: Any) -> int:
    """Returns the number of devices that may hold shards of an array, apart from those that `jax.shard_map` runs on."""
    # Without an ambient mesh, shardings that only `in_shardings` of `jax.jit` names are not known while it traces.
    meshes = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    sizes = [
        [size for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if kind != AxisType.Manual]
        for mesh in meshes
    ]
    return max(map(math.prod, sizes))


def _choose_by_platform(run: Callable[..., Any], *, tpu: Chunks, default: Chunks) -> Callable[..., Any]:
    """Chooses chunks by platform: to cut columns a TPU copies the whole array."""
    if tpu == default:
        return functools.partial(run, default)
    branches = {"tpu": functools.partial(run, tpu), "default": functools.partial(run, default)}
    return lambda *args: lax.platform_dependent(*args, **branches)


def _run_on_automatic_axes(run: Any, carried: list[Any], *rest: Any) -> list[Any]:
    """Runs under automatic axes if the mesh has explicit ones, whose types do not fit chunks."""
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, carried)
    meshes = [sharding.mesh for sharding in jax.tree.leaves(shardings)]
    if not any(AxisType.Explicit in mesh.axis_types for mesh in meshes):
        return run(carried, *rest)
    on_automatic_axes: Any = jax.sharding.auto_axes(run, out_sharding=shardings)
    return on_automatic_axes(carried, *rest)
