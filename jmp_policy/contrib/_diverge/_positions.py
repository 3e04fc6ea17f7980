"""Aligns the values that a decode loop recorded step by step with the positions of a teacher-forced pass."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._layers import list_families, pair_layers
from ._measure import Measured, compare


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """The positions of a batch of sequences.

    Attributes:
      batch: the number of sequences.
      length: the number of positions.
      mask: `(batch, length)`, True at the positions that are compared; None for all.
    """

    batch: int
    length: int
    mask: Any = None

    def cut(self, known: int) -> "Positions":
        """Masks all but the first `known` positions, which the sampler has."""
        if known >= self.length:
            return self
        is_known: Any = np.broadcast_to(np.arange(self.length) < known, (self.batch, self.length))
        return dataclasses.replace(self, mask=is_known if self.mask is None else self.mask & is_known)

    def find_axis(self, shape: Sequence[int]) -> int | None:
        """Returns the axis of positions in a value of the teacher-forced pass, whose first axis is the batch."""
        if not shape or shape[0] != self.batch:
            return None
        return next((axis for axis in range(1, len(shape)) if shape[axis] == self.length), None)

    def unfold(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape with separate axes of batch and positions, which experts often join."""
        if shape and shape[0] == self.batch * self.length and self.find_axis(shape) is None:
            return (self.batch, self.length, *shape[1:])
        return tuple(shape)

    def count_elements(self, shape: Sequence[int]) -> int:
        """Counts the elements at one position."""
        unfolded = self.unfold(shape)
        return math.prod(shape) // (1 if self.find_axis(unfolded) is None else self.length)

    def compare(self, reference: jax.Array, value: jax.Array) -> jax.Array:
        """Measures the difference at each position: `(length, fields)`. Without that axis, all is at the first one."""
        fields = len(Measured._fields)
        if reference is value:
            return jnp.zeros((self.length, fields), np.float32)
        reference = self.choose(reference, value)
        shape = self.unfold(value.shape)
        axis = self.find_axis(shape)
        if axis is None:
            found = compare(reference, value)[None]
            return jnp.concatenate([found, jnp.zeros((self.length - 1, fields), found.dtype)])
        return jax.vmap(compare, axis)(reference.reshape(shape), value.reshape(shape))

    def choose(self, recorded: jax.Array, own: jax.Array) -> jax.Array:
        """Returns recorded values, with the others at positions that are not compared."""
        shape = self.unfold(own.shape)
        axis = self.find_axis(shape)
        if self.mask is None or axis is None:
            return recorded
        sizes = [self.batch if i == 0 else self.length if i == axis else 1 for i in range(len(shape))]
        mask = jnp.asarray(self.mask).reshape(sizes)
        dtype = np.promote_types(recorded.dtype, own.dtype)
        parts = [x.astype(dtype).reshape(shape) for x in (recorded, own)]
        return jnp.where(mask, *parts).reshape(own.shape)


class Target(NamedTuple):
    """A value of the teacher-forced pass.

    Attributes:
      shape: its shape.
      loops: the number of axes of loops around it.
      is_output: True for an output, whose first axis is the batch in the sampler, too.
    """

    shape: tuple[int, ...]
    loops: int = 0
    is_output: bool = False


def align_steps(
    recording: Mapping[str, Sequence[Any]], targets: Mapping[str, Sequence[Target]], positions: Positions
) -> tuple[dict[str, list[Any]], list[str], int]:
    """Puts the positions of recorded values in the place that they have in the teacher-forced pass.

    Args:
      recording: the arrays of each scope, in the order of its calls: of a scan over steps, of the steps of a Python
        loop, and of a pass over the prompt before them.
      targets: the values of the scopes of the teacher-forced pass.
      positions: the positions.

    Returns:
      Arrays of the shapes of targets, by scope; the scopes that could not be aligned, as sentences; and the number of
      positions that all arrays have.
    """
    found: dict[str, list[Any]] = {}
    problems: list[str] = []
    known = positions.length
    stacked, split = pair_steps(recording, targets)
    numbered = {path for paths in stacked.values() for path in paths}
    paired = numbered | split.keys()
    for path, arrays in recording.items():
        # The output of a layer is the output of a scope in it, or only one of the sides has it.
        if (path not in targets or path in split) and any(name.startswith(f"{path}/") for name in paired):
            continue
        wanted = targets.get(path, ())
        if path in split:
            wanted = [Target((len(split[path]), *target.shape), 1) for target in targets[split[path][0]]]
        if path in numbered:
            [whole] = [name for name, paths in stacked.items() if path in paths]
            wanted = [Target(target.shape[1:]) for target in targets[whole]]
        if not wanted:
            found[path] = [*arrays]  # `match` reports it
            continue
        made, problem = _align_scope(arrays, wanted, positions)
        problems += [f"{path!r} of the sampler {problem}"] * bool(problem)
        if made:
            found[path] = [array for array, _ in made]
            known = min(known, *(count for _, count in made))
    for path, paths in split.items():
        for i, name in enumerate(paths):
            found |= {name: [array[i] for array in found[path]]} if path in found else {}
        found.pop(path, None)
    for path, paths in stacked.items():
        layers = [found.pop(name) for name in paths if name in found]
        if len(layers) == len(paths):
            found[path] = [jnp.stack(values) for values in zip(*layers, strict=True)]
    return found, problems, known


def pair_steps(
    recorded: Iterable[str], targets: Mapping[str, Sequence[Target]]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Pairs layers in a scan with numbered ones: those that the trainer scans, and those that the sampler scans."""
    others = [path for path in recorded if path not in targets]
    missing = [path for path in targets if path not in recorded]
    scanned = {path: targets[path][0].shape[0] for path in missing if all(t.loops == 1 for t in targets[path])}
    counts = [len(family) for family in list_families(missing).values()]
    split = {}
    for count in dict.fromkeys(counts):
        split |= pair_layers(dict.fromkeys(others, count), missing)
    return pair_layers(scanned, others), split


class Piece(NamedTuple):
    """A way in which an array may have some positions of a value."""

    place: Callable[[Any], Any]  # puts the array in place
    length: int  # the number of its positions
    is_sure: bool  # False if no axis of the array tells where the positions belong


def _align_scope(
    arrays: Sequence[Any], targets: Sequence[Target], positions: Positions
) -> tuple[list[tuple[Any, int]], str]:
    """Returns an array for each target with the number of its positions, or a reason."""
    made: dict[int, tuple[Any, int]] = {}
    reasons: list[str] = []
    for shape in dict.fromkeys(target.shape for target in targets):
        numbers = [i for i, target in enumerate(targets) if target.shape == shape]
        found = _join(arrays, targets[numbers[0]], len(numbers), positions)
        if isinstance(found, str):
            reasons.append(found)
        else:
            made.update(zip(numbers, found, strict=True))
    return [made[i] for i in sorted(made)] if not reasons else [], "; ".join(reasons[:1])


def _join(arrays: Sequence[Any], target: Target, count: int, positions: Positions) -> list[tuple[Any, int]] | str:
    """Joins the arrays of the steps to `count` arrays of one shape, each with the number of its positions."""
    shape, loops, is_output = target
    whole = (*shape[:loops], *positions.unfold(shape[loops:]))
    axes = [loops + i for i in range(1, len(whole) - loops) if whole[loops + i] == positions.length]
    if whole[loops : loops + 1] != (positions.batch,):
        axes = []
    options: list[tuple[bool, int, list[list[tuple[Any, Piece]]]]] = []
    for axis in axes:
        listed = [(array, _list_pieces(np.shape(array), whole, axis)) for array in arrays]
        # One array may show that the steps have an axis for the query.
        if is_output or any(len(found) == 1 and found[0].is_sure for _, found in listed):
            listed = [(array, [piece for piece in found if piece.is_sure]) for array, found in listed]
        if any(len(found) > 1 for _, found in listed):
            return f"may have the steps on either of two axes, which both have {positions.batch} elements"
        pieces = [(array, found[0]) for array, found in listed if found]
        parts = [piece for piece in pieces if piece[1].length < positions.length]
        if sum(piece.length for _, piece in parts) in (count * positions.length, count * (positions.length - 1)):
            pieces = parts  # a whole beside them is a cache of as many slots
        groups = [pieces[i::count] for i in range(count)]  # a call makes all values before the next one
        totals = {sum(piece.length for _, piece in group) for group in groups}
        if pieces and len(totals) == 1 and totals <= {positions.length, positions.length - 1}:
            options.append((all(piece.is_sure for _, piece in pieces), axis, groups))
    sure = [option for option in options if option[0]]
    if all(np.shape(array) == whole for _, _, groups in sure for group in groups for array, _ in group):
        sure = sure[:1]  # as a whole it needs no axis
    if len(options) > 1 and len(sure) != 1 and len(whole) - loops == 3:
        sure = options[:1]  # of as many features as positions: the features come last
    if len(options) > 1 and len(sure) != 1:
        return f"does not tell which axis of {shape} in the trainer has the positions: use another number of tokens"
    if not options:
        shapes = " and ".join(map(str, dict.fromkeys(np.shape(array) for array in arrays)))
        many = f"{len(arrays)} values of shape" if len(arrays) > 1 else "shape"
        return f"has {many} {shapes}, which are not the steps of {shape} in the trainer"
    _, axis, groups = (sure or options)[0]
    return [_concatenate(group, whole, axis, shape, positions.length) for group in groups]


def _concatenate(
    group: Sequence[tuple[Any, Piece]], whole: tuple[int, ...], axis: int, shape: tuple[int, ...], length: int
) -> tuple[Any, int]:
    parts = [piece.place(array) for array, piece in group]
    total = sum(piece.length for _, piece in group)
    if total < length:  # the last token needs no step
        parts.append(np.zeros([1 if i == axis else n for i, n in enumerate(whole)], np.float32))
    return jnp.concatenate(parts, axis).reshape(shape), total


def _list_pieces(shape: tuple[int, ...], whole: tuple[int, ...], axis: int) -> list[Piece]:
    """Lists the ways in which an array may have some positions of a value: `axis` of `whole`."""
    rest = whole[:axis] + whole[axis + 1 :]
    found = []
    if len(shape) == len(whole) and shape[:axis] + shape[axis + 1 :] == rest:
        found.append(Piece(jnp.asarray, shape[axis], True))  # of the prompt, or of one step of a Python loop
    if len(shape) == len(whole) and shape[1:] == rest:  # of a scan, without an axis for the query
        found.append(Piece(lambda x: jnp.moveaxis(x, 0, axis), shape[0], False))
    if len(shape) == len(whole) + 1 and shape[1:] == (*whole[:axis], 1, *whole[axis + 1 :]):  # of a scan
        found.append(Piece(lambda x: jnp.moveaxis(x.squeeze(axis + 1), 0, axis), shape[0], True))
    if shape == rest:  # of one step of a Python loop, without an axis for the query
        found.append(Piece(lambda x: jnp.expand_dims(x, axis), 1, False))
    return found


def number_names(arrays: Mapping[str, Iterable[Any]]) -> dict[str, Any]:
    """Names several arrays of a scope as `record` does."""
    return {f"{path}:{i}" if i else path: array for path, found in arrays.items() for i, array in enumerate(found)}
