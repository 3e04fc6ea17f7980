"""The update of an optimizer with 8-bit moments, in chunks."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

from .._base import PyTree, at_least_float32
from ._elementwise import describe_mixing, find_mixing
from ._half_parameters import widen_half
from ._moment_blocks import (
    Chunks,
    MomentBlocks,
    Shape,
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
_GROUP = 8  # parameters of one loop

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
        self._large: dict[int, list[int]] = {owner: [] for owner in sorted(set(owners.values()))}  # all leaves of each
        self._unowned = []
        for i, owner in enumerate(self._owners):
            if owner is None:
                self._unowned.append(i)
            elif owner in self._large:
                self._large[owner].append(i)
        self._sides = {i: read_sides(self._blocks(i), self._leaves[owner].shape) for i, owner in owners.items()}

    def run_whole(self, source: jax.Array) -> tuple[PyTree, Any, Any]:
        values = [_dequantize(self._blocks(i), self._layout(i)) for i in range(len(self._leaves))]
        grads = {owner: widen_half(values[owner]) for owner in self._large}
        for owner, grad in grads.items():
            values[owner] = _hide_bad(grad, self._find_largest(owner))
        new = self._run(values)
        for owner, grad in grads.items():
            new[owner] = _show_bad(new[owner], grad)
        for i in self._codes:
            new[i] = _quantize(new[i], self._layout(i), source, np.uint32(i), number_positions(new[i].shape))
        return self._join(new)

    def run_in_chunks(self, source: jax.Array) -> tuple[PyTree, Any, Any]:
        """Runs the optimizer on chunks of the parameters with quantized moments, and on all others at once."""
        if self._large:
            self._check_elementwise()
        new = self._run(self._select(lambda i: self._owners[i] not in self._large))
        largest = max(_SMALL, sum(self._leaves[owner].size for owner in self._large) // _CHUNKS)
        for owners, chunk in self._group_large(largest):
            for i, result in self._run_loop(owners, chunk, source).items():
                new[i] = result
        return self._join(new)

    def _group_large(self, largest: int) -> Iterable[tuple[list[int], int]]:
        """Groups parameters that are alike, with the size of their chunks.

        One loop updates a group, because each takes long to trace. Its chunks have at most `largest` elements together,
        or are whole parameters, which XLA compiles without a loop.
        """
        groups: dict[Any, list[int]] = {}
        for owner, own in self._large.items():
            kinds = [(jax.typeof(self._leaves[i]), self._layout(i), i < self._results.num_leaves) for i in own]
            groups.setdefault(tuple(kinds), []).append(owner)
        for kinds, group in groups.items():
            first, count, chunk = self._leaves[group[0]], min(len(group), _GROUP), largest
            if first.size > largest:
                # At least one row of blocks of each, as columns are slow to cut.
                sides = next(layout.sides for _, layout, _ in kinds if layout is not None)
                count = max(1, min(count, largest // (math.prod(sides[:-1]) * first.shape[-1])))
                chunk = largest // count
            yield from ((group[n : n + count], chunk) for n in range(0, len(group), count))

    def _run_loop(self, owners: list[int], largest: int, source: jax.Array) -> dict[int, Any]:
        """Updates parameters that are alike, and all of their state, chunk by chunk."""
        own = self._large[owners[0]]
        updates = sum(i < self._results.num_leaves for i in own)
        layouts = tuple(map(self._layout, own))
        devices = max(_count_shards(self._leaves[i]) for i in own)
        shape, sides = self._leaves[owners[0]].shape, next(layout.sides for layout in layouts if layout is not None)
        plan = functools.partial(plan_chunks, shape, sides, largest, devices)
        largest_grad = self._find_largest(owners[0])
        written = [self._large[owner][:updates] for owner in owners]  # first the update

        def run(chunks: Chunks, carried: list[Any], read: list[Any], whole: list[Any], source: jax.Array) -> list[Any]:
            read = jax.tree.map(chunks.split, read)

            def update_chunk(n: jax.Array, carry: list[Any]) -> list[Any]:
                # Leaves of the parameter are float32 chunks; leaves without a parameter are passed whole.
                values: list[Any] = [optax.MaskedNode()] * len(self._leaves)
                for i, x in zip(self._unowned, whole, strict=True):
                    values[i] = x
                for owner, *leaves in zip(owners, carry, read, strict=True):
                    chunk = _read_chunk([*itertools.chain(*leaves)], n, largest_grad, chunks, layouts)
                    for i, x in zip(self._large[owner], chunk, strict=True):
                        values[i] = x
                new = self._run(values)
                # The results overwrite their inputs.
                return [
                    _write_chunk(old, [new[i] for i in each], n, source, np.array(each, np.uint32), chunks, layouts)
                    for old, each in zip(carry, written, strict=True)
                ]

            carry = jax.tree.map(chunks.split, carried)
            carry = lax.fori_loop(0, chunks.count, update_chunk, carry)
            return jax.tree.map(lambda x, old: x.reshape(old.shape), carry, carried)

        results = _run_on_automatic_axes(
            _choose_by_platform(run, tpu=plan(cuts_columns=False), default=plan()),
            [[widen_half(self._leaves[i]) if i in owners else self._blocks(i) for i in each] for each in written],
            [[self._leaves[i] for i in self._large[owner][updates:]] for owner in owners],
            [self._leaves[i] for i in self._unowned],
            source,
        )
        return dict(zip(itertools.chain(*written), itertools.chain(*results), strict=True))

    def _run(self, values: Sequence[Any]) -> list[Any]:
        """Runs the optimizer on leaves that may be masked, and returns its updates and its state."""
        updates, state, params, extra = self._structure.unflatten(values)
        new = self._update(widen_half(updates), state, widen_half(params), **extra)
        return self._results.flatten_up_to(new)

    def _find_largest(self, owner: int) -> float:
        """Returns the largest magnitude of a gradient that keeps its moments finite."""
        has_squares = any(self._codes.get(i) == UNSIGNED_FLOAT for i in self._large[owner])
        return _LARGEST if has_squares else float(jnp.finfo(at_least_float32(self._leaves[owner].dtype)).max)

    def _select(self, is_seen: Callable[[int], bool]) -> list[Any]:
        return [leaf if is_seen(i) else optax.MaskedNode() for i, leaf in enumerate(self._leaves)]

    def _blocks(self, i: int) -> Any:
        """Returns leaf `i`, with its scales if it is quantized."""
        return MomentBlocks(self._leaves[i], self._scales[i]) if i in self._codes else self._leaves[i]

    def _layout(self, i: int) -> "_Layout | None":
        return _Layout(self._codes[i], self._sides[i]) if i in self._codes else None

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


class _Layout(NamedTuple):
    """The format of a quantized moment."""

    code: MomentCode
    sides: Shape  # of its blocks


# Jitted, so that JAX traces them once for all parameters of one shape.


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _read_chunk(
    leaves: list[Any], n: jax.Array, largest: float, chunks: Chunks, layouts: tuple[_Layout | None, ...]
) -> list[Any]:
    """Returns a chunk of each leaf of a parameter, dequantized. The first is the gradient."""
    parts = [jax.tree.map(lambda x: chunks.take(x, n), leaf) for leaf in leaves]
    values = list(map(_dequantize, parts, layouts))
    return [_hide_bad(values[0], largest), *values[1:]]


@functools.partial(jax.jit, static_argnums=(5, 6))
def _write_chunk(
    leaves: list[Any],
    new: list[Any],
    n: jax.Array,
    source: jax.Array,
    salts: np.ndarray,
    chunks: Chunks,
    layouts: tuple[_Layout | None, ...],
) -> list[Any]:
    """Writes a chunk of each leaf of a parameter, quantized. The first is the update in place of the gradient."""
    sides = next(layout.sides for layout in layouts if layout is not None)
    positions = chunks.number(tuple(count * side for count, side in zip(chunks.blocks, sides, strict=True)), n)
    new = [_show_bad(new[0], chunks.take(leaves[0], n)), *new[1:]]
    parts = [
        _quantize(x, layout, source, salts[i], positions)
        for i, (x, layout) in enumerate(zip(new, layouts, strict=False))
    ]
    put = lambda old, new: chunks.put(old, lax.convert_element_type(new, old.dtype), n)
    return jax.tree.map(put, leaves, parts)


def _hide_bad(grad: jax.Array, largest: float) -> jax.Array:
    """Replaces gradients that would spoil the blocks of their moments by zeros: nan, and those that overflow."""
    return jnp.where(jnp.abs(grad) <= largest, grad, jnp.zeros_like(grad))


def _show_bad(update: jax.Array, grad: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(grad), update, jnp.full_like(update, jnp.nan))


def _dequantize(leaf: Any, layout: _Layout | None) -> Any:
    return leaf if layout is None else dequantize_moment(leaf, *layout)


def _quantize(leaf: jax.Array, layout: _Layout | None, source: jax.Array, salt: Any, positions: jax.Array) -> Any:
    """Quantizes elements of a moment whose places in the parameter are `positions`."""
    if layout is None:
        return leaf
    if jnp.issubdtype(source.dtype, jax.dtypes.prng_key):
        noise = _hash(positions, fold_in_devices(jax.random.fold_in(source, lax.optimization_barrier(salt)), leaf))
    else:
        noise = make_thresholds(positions, source, salt)
    return quantize_moment(widen_half(leaf), *layout, noise)


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
