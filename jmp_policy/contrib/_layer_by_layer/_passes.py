"""Rounds the weights of a model one after another, each for the inputs that it gets from those rounded before."""

import collections
import contextlib
import dataclasses
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..._base import JsonLog, Kwargs, PyTree, describe, escape_controls, sum_arrays, sum_program, warn_user
from ...modules import Method, check_batches, require_adapter
from ...policy import Int4, Int8, Policy, PolicyMap
from ...quant._products import Bilinear, Convolution, is_matmul, observe_products
from ...quant._weights import Layout, QuantizedArray, Quantizer, apply_quantizer, block_length, stack_shape
from ._matrix import (
    Calibration,
    InputStatistics,
    Matrix,
    Rounded,
    Weight,
    add_input_scale,
    measure_inputs,
    round_matrix,
)


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
    weights, is_linen = sum_arrays(adapter.find_weights(target)), adapter.quantize is None
    if is_linen:
        model, target = target.unbind()
    quantizer = _Quantizer(calibration, policy, options["clip"], options["input_clips"] or {})
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
    passes = _Passes(quantizer.matrices, run)
    uses = passes.find_uses(batches[0])
    _check_uses(name, quantizer.matrices, uses)
    is_shown = sys.stderr.isatty() if progress is None else progress
    for count, (number, times) in enumerate(uses.items(), 1):
        matrix = quantizer.matrices[number]
        if done is not None and number in done:
            matrix.store(done[number])
            continue
        statistics = passes.measure(number, times, batches)
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

    def __init__(self, calibration: Calibration, given: Policy | PolicyMap, clip: Any, input_clips: Any) -> None:
        super().__init__(given, clip, input_clips)
        self.matrices: list[Matrix] = []
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
        self.matrices += [Matrix(weight, place) for place in range(math.prod(stack))]
        marks = jnp.arange(first, len(self.matrices)).reshape(stack)
        return dataclasses.replace(stored, tensor_scale=marks)


class _Enough(Exception):
    """Ends a run: the rest of the model does not matter."""


class _Passes:
    """Runs a model with marked weights, and puts each rounded matrix in the place of the marked one."""

    def __init__(self, matrices: Sequence[Matrix], run: Callable[[Any], None]) -> None:
        self._matrices, self._run_model = matrices, run
        self._uses: collections.Counter[int] = collections.Counter()
        self._inputs: dict[int | None, str] = {}  # checksums for matrices that are used once
        self._number: int | None = None
        self._left = 0
        self._statistics: InputStatistics | None = None
        self.inner = 1

    def find_uses(self, batch: Any) -> dict[int, int]:
        """Returns how often a run uses each matrix, in the order of first uses. Only readable inputs count."""
        self._number = None
        self._run(batch)
        return dict(self._uses)

    def measure(self, number: int, uses: int, batches: Sequence[Any]) -> InputStatistics | None:
        """Returns the statistics of the inputs of one matrix, or None if no run used it."""
        before, self._number = self._number, number
        if self._statistics is not None and uses == 1 and self._inputs.get(before) == self._inputs[number]:
            return self._statistics  # as the query, key and value of an attention: one matrix is enough
        self._statistics = None
        for batch in batches:
            self._left = uses
            self._run(batch)
        return self._statistics

    def _run(self, batch: Any) -> None:
        with jax.disable_jit(), observe_products(self._observe), contextlib.suppress(_Enough):
            self._run_model(batch)

    def _observe(self, operation: Bilinear, left: jax.Array, weight: Any) -> Any:
        """Reads the inputs of a matmul, and returns the weight to multiply by."""
        marks = weight.tensor_scale if isinstance(weight, QuantizedArray) else None
        if marks is None or isinstance(marks, Tracer) or not isinstance(weight.format, Int4 | Int8):
            return weight
        with jax.disable_jit(False):
            numbers = np.asarray(marks).ravel().tolist()
            weight = self._replace(weight, numbers)
            is_wanted = self._number is None or self._number in numbers
            found = read_inputs(operation, left, weight) if is_wanted and not isinstance(left, Tracer) else None
            if found is None:
                return weight
            rows, self.inner = found
            if self._number is None:
                self._uses.update(numbers)
                for number, inputs in zip(numbers, rows, strict=True):
                    self._inputs[number] = sum_arrays((inputs, self.inner, self._uses[number]))
                return weight
            new = measure_inputs(rows[numbers.index(self._number)])
            self._statistics = new if self._statistics is None else jax.tree.map(jnp.add, self._statistics, new)
        self._left -= 1
        if self._left == 0:
            raise _Enough
        return weight

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
        and set(batch) <= set(operation.left) & set(operation.out)
        and not set(operation.left) & {*inner, *channels}
        and not set(channels) - set(operation.out)
    )
    width = math.prod(layout.contracted[len(summed) :])
    block = layout.length if isinstance(weight.format, Int8) else block_length(layout, weight.format)
    if not fits or (block % width and width % block):
        return None
    rows = [label for label in operation.left if label not in (*batch, *summed)]
    moved = lax.transpose(left, [operation.left.index(label) for label in (*batch, *rows, *summed)])
    inputs = layout.length // width
    matrices = math.prod(weight.shape[:before])
    return moved.reshape(matrices, 1, -1, inputs), width


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


def _check_uses(name: str, matrices: Sequence[Matrix], uses: dict[int, int]) -> None:
    unseen = dict.fromkeys(matrix.weight.path for n, matrix in enumerate(matrices) if n not in uses)
    named = ", ".join(map(repr, unseen))
    why = "they are not called, run inside of vmap or remat, or compute with a function that no policy replaces"
    if not uses:
        raise ValueError(f"{name} cannot read the inputs of any weight ({named or 'there are tables alone'}): {why}.")
    if unseen:
        warn_user(f"{name} rounds {named} to nearest and cannot read their inputs: {why}")
