"""Passes through a model, layer by layer, that round each matrix of a weight for its inputs."""

import base64
import collections
import contextlib
import dataclasses
import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .._base import JsonLog, Kwargs, PyTree, describe, escape_controls, sum_arrays, sum_program, warn_user
from ..modules import Method, check_batches, require_adapter
from ..policy import Int4, Int8, Policy, PolicyMap
from ..quant import (
    Bilinear,
    Convolution,
    Layout,
    QuantizedArray,
    Quantizer,
    apply_quantizer,
    block_length,
    is_matmul,
    observe_products,
    pack,
    stack_shape,
)
from ._suspended_run import SuspendedRun


class InputStatistics(NamedTuple):
    """Float32 sums over the rows that a matrix multiplies, for each group of a convolution."""

    hessian: jax.Array  # (groups, inputs, inputs): of the products of two inputs
    magnitude: jax.Array  # (groups, inputs): of the magnitudes of the inputs

    def pad(self, missing: int) -> "InputStatistics":
        """Adds inputs that are always zero."""
        rest = ((0, 0), (0, missing))
        return InputStatistics(jnp.pad(self.hessian, (*rest, (0, missing))), jnp.pad(self.magnitude, rest))


@jax.jit
def measure_inputs(rows: jax.Array) -> InputStatistics:
    """Computes the statistics of rows `(groups, rows, inputs)`."""
    rows = rows.astype(jnp.float32)
    return InputStatistics(jnp.einsum("gmk,gml->gkl", rows, rows, precision="highest"), jnp.abs(rows).sum(1))


class Rounded(NamedTuple):
    """Arrays of a rounded matrix, named as in `QuantizedArray`."""

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    input_scale: jax.Array | None = None

    @classmethod
    def decode(cls, line: dict[str, Any]) -> "Rounded":
        """Reads the arrays from a JSON object."""
        decode = lambda dtype, shape, text: jnp.asarray(np.frombuffer(base64.b64decode(text), dtype).reshape(shape))
        arrays: dict[str, Any] = {name: line[name] and decode(*line[name]) for name in cls._fields}
        return cls(**arrays)

    def encode(self) -> dict[str, Any]:
        """Returns the arrays as a JSON object."""
        encode = lambda part: [str(part.dtype), part.shape, base64.b64encode(np.asarray(part).tobytes()).decode()]
        return {name: None if part is None else encode(part) for name, part in self._asdict().items()}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A way to round matrices for the inputs that they get.

    Weights and values are `(groups, inputs, inner, channels)`, scales and zero points `(groups, blocks, channels)` in
    stored order, input scales `(inputs,)`. `inner` are outputs that share scales with the inputs, else 1. Only
    convolutions have more than one group.
    """

    name: str  # of the public function
    round_groups: Callable[[jax.Array, InputStatistics, Int4 | Int8, int], Rounded]  # the integer is the block
    settings: dict[str, Any]  # further entries of the header of the file
    scales_inputs: bool = False  # the result has input scales, which `Int4` alone stores


def add_input_scale(weight: QuantizedArray) -> QuantizedArray:
    """Adds an input scale of ones to an int4 weight."""
    channels = weight.layout.channels
    assert isinstance(weight.format, Int4)
    length = block_length(weight.layout, weight.format)
    shape = (*weight.scale.shape[: -1 - channels], length, *[1] * channels)
    return dataclasses.replace(weight, input_scale=jnp.ones(shape, jnp.float32))


@dataclasses.dataclass
class Weight:
    """A weight, perhaps a stack of matrices: floating, and rounded as far as the passes have come."""

    path: str
    array: jax.Array
    stored: QuantizedArray


class StackedMatrix(NamedTuple):
    weight: Weight
    place: int  # in the stack

    def read(self) -> jax.Array:
        """Returns the floating matrix."""
        return _flatten(self.weight.array, self.weight.stored)[self.place].astype(jnp.float32)

    def read_stored(self) -> QuantizedArray:
        return jax.tree.map(lambda leaf: _flatten(leaf, self.weight.stored)[self.place], self.weight.stored)

    def store(self, made: Rounded) -> None:
        """Replaces the stored matrix by one of the same shapes."""
        stored = self.weight.stored
        new = {}
        for name, part in made._asdict().items():
            if part is not None:
                whole = getattr(stored, name)
                flat = _flatten(whole, stored).at[self.place].set(part)
                new[name] = flat.reshape(whole.shape)
        self.weight.stored = dataclasses.replace(stored, **new)


def _flatten(leaf: jax.Array, weight: QuantizedArray) -> jax.Array:
    """Returns an array of a weight with the axes of its stack as one."""
    depth = len(stack_shape(weight.shape, weight.layout))
    return leaf.reshape(-1, *leaf.shape[depth:])


def round_matrix(
    calibration: Calibration, matrix: StackedMatrix, statistics: InputStatistics, inner: int
) -> tuple[Rounded, float]:
    """Returns the stored arrays of a matrix, and its error relative to nearest; nearest if that is not larger."""
    path, nearest = matrix.weight.path, matrix.read_stored()
    layout, format, name = nearest.layout, nearest.format, calibration.name
    assert isinstance(format, Int4 | Int8)
    hessian = statistics.hessian
    if not bool(jnp.isfinite(hessian).all()):
        raise ValueError(
            f"The inputs of the weight {path!r} are not all finite, or their squares overflow float32, so {name} "
            "cannot round it. Leave such batches out. For example: [x for x in batches if np.isfinite(x).all()]."
        )
    groups, inputs, _ = hessian.shape
    split = lambda weight: jnp.moveaxis(weight.reshape(inputs, inner, groups, -1), 2, 0)
    block = layout.length if isinstance(format, Int8) else block_length(layout, format)
    weight = split(matrix.read())
    missing = -layout.length % block // inner  # inputs that are padded with zeros
    padded = jnp.pad(weight, ((0, 0), (0, missing), (0, 0), (0, 0)))
    made = calibration.round_groups(padded, statistics.pad(missing), format, block)
    values = jnp.moveaxis(made.values, 0, 2).reshape(-1, block, *nearest.shape[len(layout.contracted) :])
    is_packed = isinstance(format, Int4)
    values = pack(values.astype(jnp.uint4), -1 - layout.channels) if is_packed else values.reshape(nearest.shape)
    join = lambda part: jnp.moveaxis(part, 0, 1).reshape(nearest.scale.shape)
    new = Rounded(values, join(made.scale), None if made.zero_point is None else join(made.zero_point))
    if nearest.input_scale is not None:
        assert made.input_scale is not None
        new = new._replace(input_scale=jnp.repeat(made.input_scale, inner).reshape(nearest.input_scale.shape))
    rounded = dataclasses.replace(nearest, **new._asdict())
    error, before = (
        float(measure_error(split(one.dequantize(jnp.float32)) - weight, hessian)) for one in (rounded, nearest)
    )
    if math.isnan(error):
        raise ValueError(
            f"The Hessian of the weight {path!r} is singular: its inputs depend on each other, or there are fewer rows "
            f"of them than the {inputs} inputs of the layer. Pass more batches or more damping. "
            f"For example: {name}(..., damping=0.01)."
        )
    if error < before:
        return new, error / before
    return Rounded(*(getattr(nearest, name) for name in Rounded._fields)), 1.0


@jax.jit
def measure_error(change: jax.Array, hessian: jax.Array) -> jax.Array:
    """Returns the square error of the outputs for a change of a weight, `(groups, inputs, ...)`."""
    change = change.reshape(*change.shape[:2], -1)
    return jnp.sum(change * jnp.matmul(hessian, change, precision="highest"))


def quantize_layer_by_layer(
    calibration: Calibration,
    model: Any,
    batches: Iterable[Any],
    variables: PyTree,
    method: Method,
    kwargs: Kwargs,
    options: dict[str, Any],
    file: str | os.PathLike[str] | None,
    progress: bool | None,
) -> Any:
    """Quantizes a model as `gptq` and `awq` say; `options` are arguments of `quantize`."""
    name = calibration.name
    example = f"{name}(with_policy(Net(), 'int4_from_mixed_bfloat16'), batches, variables=variables)"
    adapter = require_adapter(model, f"{name} takes a Flax module, got {describe(model)}. For example: {example}.")
    policy = adapter.policy_of(model)
    if policy is None:
        raise ValueError(
            f"{name} quantizes by the policy of a model, and {describe(model)} has none. "
            f"For example: {name}(with_policy(model, 'int4_from_mixed_bfloat16'), batches)."
        )
    check_batches(name, batches)
    batches = list(batches)
    if not batches:
        raise ValueError(f"{name} was given no batches. For example: {name}(model, [x], variables=variables).")
    target = adapter.bind(model, variables)
    weights, is_linen = sum_arrays(adapter.list_parameters(target)), adapter.quantize is None
    if is_linen:
        model, target = target.unbind()
    quantizer = _Quantizer(calibration, policy, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last call of `apply_quantizer` warns
        marked = apply_quantizer(target, quantizer, options["stacked"])
    if calibration.scales_inputs and not quantizer.matrices:
        return marked  # nothing is stored in int4
    bound = adapter.bind(model, marked) if is_linen else marked

    def run(batch: Any) -> None:
        inputs = batch if isinstance(batch, tuple) else (batch,)
        adapter.run(bound, inputs, method, kwargs, lambda call, next_fun, args, kwargs: next_fun(*args, **kwargs))

    header = (
        {}
        if file is None
        else {
            "method": name,
            "policy": str(policy),
            **calibration.settings,
            "weights": weights,
            "batches": sum_arrays(batches),
            "arguments": f"method={getattr(method, '__name__', method)}, {sum_arrays(kwargs)}",
            "traced program": sum_program(lambda: run(batches[0])),  # with statistics of the model
        }
    )
    log = JsonLog(None if file is None else Path(file), header, "matrices", f"{name}(..., file={{!r}})", name)
    done = log.read(lambda stored, lines: {line["matrix"]: Rounded.decode(line) for line in lines})
    if done is None:
        log.start()
    is_shown = sys.stderr.isatty() if progress is None else progress
    with _Passes(quantizer.matrices, run, batches) as passes:
        uses = passes.find_uses()
        _check_uses(name, quantizer.matrices, uses)
        for count, (number, times) in enumerate(uses.items(), 1):
            matrix = quantizer.matrices[number]
            if done is not None and number in done:
                matrix.store(done[number])
                continue
            statistics = passes.measure(number, times)
            if statistics is None:
                continue
            made, share = round_matrix(calibration, matrix, statistics, passes.inner)
            matrix.store(made)
            log.add({"matrix": number, "path": matrix.weight.path, **made.encode()})
            if is_shown:
                line = f"{name}: {count} of {len(uses)}, {matrix.weight.path}: {share:.2g} of the error of nearest"
                print(escape_controls(line), file=sys.stderr)
    return apply_quantizer(target, quantizer, options["stacked"])


class _Quantizer(Quantizer):
    """Rounds weights to nearest at first, with marks; when called again, returns them as the passes rounded them.

    A mark is the number of a matrix. It lies in `tensor_scale`, which integers do not use, so that whatever slices or
    shares a weight hands on its marks.
    """

    def __init__(self, calibration: Calibration, given: Policy | PolicyMap, options: Mapping[str, Any]) -> None:
        super().__init__(given, options["clip"], options["input_clips"] or {}, options["explanation"])
        self.matrices: list[StackedMatrix] = []
        self._calibration = calibration
        self._weights: dict[tuple[str, str], Weight] = {}

    def quantize_weight(
        self, module: str, name: str, array: Any, layout: Layout, policy: Policy, unfit: str | None = None
    ) -> QuantizedArray | None:
        key = module, name
        stored = super().quantize_weight(module, name, array, layout, policy, unfit)
        if key in self._weights:
            return self._weights[key].stored
        if stored is None or not layout.channels:  # tables are read row by row
            return stored
        path, calibration = "/".join(filter(None, key)), self._calibration
        if calibration.scales_inputs and isinstance(stored.format, Int8):
            return stored
        if not isinstance(stored.format, Int4 | Int8):
            raise ValueError(
                f"{calibration.name} rounds to int4 and int8, and the weight {path!r} has the format "
                f"{str(stored.format)!r}. Leave it out by a rule of the map, and quantize it afterwards. "
                f"For example: PolicyMap({{{module!r}: 'mixed_bfloat16'}}, 'int4_from_mixed_bfloat16')."
            )
        if calibration.scales_inputs:
            stored = add_input_scale(stored)
        weight = self._weights[key] = Weight(path, array, stored)
        stack = stack_shape(array.shape, layout)
        first = len(self.matrices)
        self.matrices += [StackedMatrix(weight, place) for place in range(math.prod(stack))]
        marks = jnp.arange(first, len(self.matrices)).reshape(stack)
        return dataclasses.replace(stored, tensor_scale=marks)


class _Enough(Exception):
    """Ends a run: the rest of the model does not matter."""


class _Passes:
    """Runs a model with marked weights, and puts each rounded matrix in the place of the marked one.

    Each batch runs once: it waits at a matrix, with the values that the rest of the model needs, until that is rounded.
    A matrix with several uses is measured by runs of its own, because no batch can wait at the first of them.
    """

    def __init__(self, matrices: Sequence[StackedMatrix], run: Callable[[Any], None], batches: Sequence[Any]) -> None:
        self._matrices, self._run_model, self._batches = matrices, run, batches
        self._uses: collections.Counter[int] = collections.Counter()
        self._inputs: dict[int | None, str] = {}  # checksums for matrices that are used once
        self._number: int | None = None
        self._left = 0
        self._statistics: InputStatistics | None = None
        self.inner = 1

        self._measured: set[int] = set()
        self._runs = [SuspendedRun(functools.partial(self._run, batch)) for batch in batches]
        self._running: SuspendedRun | None = None
        self._passed: dict[SuspendedRun, set[int]] = {run: set() for run in self._runs}  # before they were measured

    def __enter__(self) -> "_Passes":
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs:
            run.abandon()

    def find_uses(self) -> dict[int, int]:
        """Returns how often a run uses each matrix, in the order of first uses. Only readable inputs count."""
        self._number = None
        self._run(self._batches[0])
        return dict(self._uses)

    def measure(self, number: int, uses: int) -> InputStatistics | None:
        """Returns the statistics of the inputs of one matrix, or None if no run used it."""
        before, self._number = self._number, number
        self._measured.add(number)
        if self._statistics is not None and uses == 1 and self._inputs.get(before) == self._inputs[number]:
            return self._statistics  # as the query, key and value of an attention: one matrix is enough
        self._statistics = None
        for batch, run in zip(self._batches, self._runs, strict=True):
            if uses == 1 and number not in self._passed[run]:
                self._running = run
                run.advance()
                self._running = None
            else:
                self._left = uses
                self._run(batch)
        return self._statistics

    def _run(self, batch: Any) -> None:
        with observe_products(self._observe), contextlib.suppress(_Enough):
            self._run_model(batch)

    def _observe(self, path: str, operation: Bilinear, left: jax.Array, weight: Any) -> Any:
        """Reads the inputs of a matmul, and returns the weight to multiply by."""
        marks = weight.tensor_scale if isinstance(weight, QuantizedArray) else None
        if marks is None or isinstance(marks, Tracer) or not isinstance(weight.format, Int4 | Int8):
            return weight
        with jax.disable_jit(False):
            numbers = np.asarray(marks).ravel().tolist()
            read = lambda: (
                None if isinstance(left, Tracer) else read_inputs(operation, left, self._replace(weight, numbers))
            )
            if self._number is None:
                self._count(numbers, read())
            elif self._running is not None:
                self._wait(self._running, numbers, read)
            elif self._number in numbers:
                self._add(numbers, read())
        return self._replace(weight, numbers)

    def _count(self, numbers: Sequence[int], found: tuple[jax.Array, int] | None) -> None:
        if found is None:
            return
        rows, inner = found
        self._uses.update(numbers)
        for number, inputs in zip(numbers, rows, strict=True):
            self._inputs[number] = sum_arrays((inputs, inner, self._uses[number]))

    def _wait(self, run: SuspendedRun, numbers: Sequence[int], read: Callable[[], Any]) -> None:
        """Measures the inputs of the matrix that is asked for, and waits until another one is."""
        while self._number in numbers and self._measure(numbers, read()):
            run.pause()
        self._passed[run].update(set(numbers) - self._measured)

    def _add(self, numbers: Sequence[int], found: tuple[jax.Array, int] | None) -> None:
        self._left -= self._measure(numbers, found)
        if self._left == 0:
            raise _Enough

    def _measure(self, numbers: Sequence[int], found: tuple[jax.Array, int] | None) -> bool:
        """Adds the statistics of one matmul. Returns False if its inputs cannot be read."""
        if found is None:
            return False
        rows, self.inner = found
        assert self._number is not None
        new = measure_inputs(rows[numbers.index(self._number)])
        self._statistics = new if self._statistics is None else jax.tree.map(jnp.add, self._statistics, new)
        return True

    def _replace(self, weight: QuantizedArray, numbers: Sequence[int]) -> QuantizedArray:
        stored = [self._matrices[number].read_stored() for number in numbers]
        new = {
            name: jnp.stack([getattr(one, name) for one in stored]).reshape(getattr(weight, name).shape)
            for name in Rounded._fields
            if getattr(weight, name) is not None
        }
        return dataclasses.replace(weight, **new)


def read_inputs(operation: Bilinear, left: jax.Array, weight: QuantizedArray) -> tuple[jax.Array, int] | None:
    """Returns the rows that a weight multiplies, `(matrices, groups, rows, inputs)`, in its order of inputs.

    A convolution has a row per patch, and a matrix per group of features. The second result is the number of outputs
    that share scales with the inputs. Returns None if the scales lie otherwise along the inputs.
    """
    layout = weight.layout
    if isinstance(operation.compute, Convolution):
        return _read_patches(dict(operation.compute.options), left, weight)
    before = weight.ndim - layout.channels - len(layout.contracted)
    batch, shared, channels = (
        operation.right[:before],
        operation.right[before : weight.ndim - layout.channels],
        operation.right[weight.ndim - layout.channels :],
    )
    summed = tuple(label for label in shared if label not in operation.out)
    inner = shared[len(summed) :]
    fits = (
        is_matmul(operation, left.shape, weight.shape)
        and shared == summed + inner
        and set(batch) <= set(operation.out)
        and not set(operation.left) & {*inner, *channels}
        and not set(channels) - set(operation.out)
    )
    width = math.prod(layout.contracted[len(summed) :])
    block = block_length(layout, weight.format) if isinstance(weight.format, Int4) else layout.length
    if not fits or (block % width and width % block):
        return None
    rows = [label for label in operation.left if label not in (*batch, *summed)]
    own = [label for label in batch if label in operation.left]
    moved = lax.transpose(left, [operation.left.index(label) for label in (*own, *rows, *summed)])
    inputs = layout.length // width
    # Matrices of a batch that multiply the same rows, as experts do, each have all of them.
    lengths = [length if label in own else 1 for label, length in zip(batch, weight.shape, strict=False)]
    moved = moved.reshape(*lengths, 1, -1, inputs)
    shape = (*weight.shape[:before], *moved.shape[before:])
    return jnp.broadcast_to(moved, shape).reshape(-1, *moved.shape[before:]), width


def _read_patches(options: dict[str, Any], left: jax.Array, weight: QuantizedArray) -> tuple[jax.Array, int] | None:
    numbers: lax.ConvDimensionNumbers = options["dimension_numbers"]
    *spatial, inputs, _ = weight.shape
    is_in_order = tuple(numbers.rhs_spec) == (weight.ndim - 1, weight.ndim - 2, *range(weight.ndim - 2))
    if not is_in_order or weight.layout.channels != 1 or options.get("batch_group_count", 1) != 1:
        return None
    kept: dict[str, Any] = {
        name: options.get(name) for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    }
    patches = lax.conv_general_dilated_patches(
        lax.transpose(left, numbers.lhs_spec), spatial, **kept, precision=lax.Precision.HIGHEST
    )
    groups = options.get("feature_group_count", 1)
    examples = patches.reshape(len(patches), groups, inputs, math.prod(spatial), -1)
    return examples.transpose(1, 0, 4, 3, 2).reshape(1, groups, -1, weight.layout.length), 1


def _check_uses(name: str, matrices: Sequence[StackedMatrix], uses: dict[int, int]) -> None:
    unseen = dict.fromkeys(matrix.weight.path for n, matrix in enumerate(matrices) if n not in uses)
    named = ", ".join(map(repr, unseen))
    why = (
        "they are not called, run inside of vmap, remat or a gradient, or compute with a function that no policy "
        "replaces"
    )
    if not uses:
        raise ValueError(f"{name} cannot read the inputs of any weight ({named or 'there are tables alone'}): {why}.")
    if unseen:
        warn_user(f"{name} rounds {named} to nearest and cannot read their inputs: {why}")
