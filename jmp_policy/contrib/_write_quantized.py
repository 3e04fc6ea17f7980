"""Writes quantized checkpoints of other libraries."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base import PyTree, did_you_mean, hide_frames
from ..policy import E4M3, MXFP4, NF4, Int4, Int8
from ..quant import QuantizedArray, is_quantized, stack_shape
from ._checkpoint_arrays import TensorLayout, Unreadable, find_dimensions, take_apart
from ._checkpoint_files import StoredWeights, describe_weights, save_folder
from ._checkpoint_layouts import (
    AWQ,
    BLOCKS,
    GPTQ,
    GPTQ_V2,
    NORMAL,
    PACKED,
    PLAIN_FLOAT8,
    PLAIN_INT8,
    SQUARES,
    is_symmetric,
)
from ._read_quantized import NO_NAME, Names, join_path, raise_problems, read_names, spell_kind

_WRITTEN: dict[str, dict[type, TensorLayout]] = {
    "gptq": {Int4: GPTQ},
    "gptq_v2": {Int4: GPTQ_V2},
    "awq": {Int4: AWQ},
    "compressed-tensors": {Int4: PACKED, Int8: PLAIN_INT8, E4M3: PLAIN_FLOAT8},
    "mxfp4": {MXFP4: BLOCKS},
    "fp8": {E4M3: SQUARES},
    "bitsandbytes": {NF4: NORMAL},
    "plain": {},
}
"""The layouts of each `format` of `write_quantized`, by our formats."""


@hide_frames
def write_quantized(state: PyTree, folder: str | os.PathLike[str], *, format: str, names: Names = None) -> None:
    """Writes the state of a model in the layout of another library: `model.safetensors`, and the config of its weights.

    Quantized arrays keep their bits, so that a checkpoint that was read is written with the same tensors. Scales are
    written in the narrowest of bfloat16, float16 and float32 that holds all of them. Other arrays keep their dtype;
    kernels are transposed to `(outputs, inputs)`, and convolutions to `(outputs, inputs, *window)`.

    `config.json` has `quantization_config` and `torch_dtype`. Add the rest of the model's config for other libraries.
    That of `"fp8"` names dynamic float8 inputs, which its readers require, also if the policy has `activations=false`.

    Args:
      state: linen variables or parameters, or the `nnx.state` of a model.
      folder: where to write; it is made if it does not exist.
      format: `"gptq"`, `"gptq_v2"`, `"awq"`, `"bitsandbytes"` (nf4), `"compressed-tensors"`, `"fp8"`, `"mxfp4"`;
        or `"plain"`, which dequantizes.
      names: gives the name of a weight for its path, without the collection `params`; as for `read_quantized`, the
        other way round. A `*` in a name stands for the index along the leading axis of a stack, which is then written
        element by element: `{r"blocks/(.*)/kernel": r"model.layers.*.\\1.weight"}`. By default, slashes become dots,
        and a last `kernel`, `embedding` or `scale` becomes `weight`.

    Raises:
      ImportError: safetensors is not installed.
      FileExistsError: a file to write exists.
      ValueError: `format` is not known, or arrays cannot be stored in it. The message lists them.

    >>> import pathlib, tempfile, jax.numpy as jnp, jmp_policy as jmp
    >>> folder = pathlib.Path(tempfile.mkdtemp()) / "quantized"
    >>> state = {"dense": {"kernel": jmp.quant.quantize_array(jnp.ones((128, 8)), "int4/64")}}
    >>> jmp.contrib.write_quantized(state, folder, format="awq")
    >>> jmp.contrib.policy_of_checkpoint(folder).name
    'int4/64(min_size=0)_from_float32'
    """
    if format not in _WRITTEN:
        raise ValueError(f"Unknown format {format!r}. {did_you_mean(format, _WRITTEN)}")
    writer = Writer(state, format, names)
    save_folder(Path(folder), writer.tensors, writer.config)


class Writer:
    """Makes the tensors and the config of a checkpoint."""

    def __init__(self, state: PyTree, format: str, names: Names) -> None:
        found = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_quantized)
        leaves = {join_path(path).removeprefix("params/"): leaf for path, leaf in found}
        self._format, self._find_name = format, read_names(names or _guess_name, {})
        self._weights = {path: leaf for path, leaf in leaves.items() if is_quantized(leaf)}
        scales = [leaf.scale for leaf in self._weights.values() if not isinstance(leaf.format, MXFP4)]
        self._scale_dtype = _choose_dtype(scales)
        self._left_out: list[str] = []  # names of modules with matrices that are not quantized
        self._is_symmetric, self._is_ordered = True, False
        self.tensors: dict[str, np.ndarray] = {}
        self._problems = self._list_mixed_formats()
        for path, leaf in leaves.items():
            try:
                self._add_leaf(path, leaf)
            except Unreadable as error:
                self._problems.append(f"{path!r}: {error}")
        raise_problems(f"The state cannot be written as {format!r}:", self._problems)
        self.config = self._describe()

    def _list_mixed_formats(self) -> list[str]:
        """Lists the formats, if a config cannot name all of them."""
        spelled = {path: spell_kind(leaf.format) for path, leaf in self._weights.items()}
        if self._format == "plain" or len(set(spelled.values())) < 2:
            return []
        firsts = {format: path for path, format in reversed(spelled.items())}
        each = ", ".join(f"{path!r} in {format!r}" for format, path in firsts.items())
        return [f"it has weights in several formats: {each}. Tables are left out by a rule of the policy"]

    def _add_leaf(self, path: str, leaf: Any) -> None:
        name = self._find_name(path)
        if name is None:
            return
        if not name:
            raise Unreadable(NO_NAME)
        depth = name.count("*")
        stack = stack_shape(leaf.shape, leaf.layout) if is_quantized(leaf) else leaf.shape
        if depth > len(stack):
            raise Unreadable(f"its name {name!r} has {depth} '*', and the axes of its stack are {stack}")
        kind = path.rpartition("/")[2]
        for index in np.ndindex(*leaf.shape[:depth]):
            numbers = iter(index)
            element = jax.tree.map(lambda array: np.asarray(array)[index], leaf)  # noqa: B023
            self._add_element(re.sub(r"\*", lambda _: str(next(numbers)), name), kind, element)  # noqa: B023

    def _add_element(self, name: str, kind: str, leaf: Any) -> None:
        made = self._encode(name, leaf) if is_quantized(leaf) and self._format != "plain" else None
        if made is None:
            if kind in ("kernel", "embedding") and leaf.ndim > 1 and not is_quantized(leaf):
                self._left_out.append(name.removesuffix(".weight"))
            made = {name: _spell_axes(kind, leaf)}
        for one in made:
            if one in self.tensors:
                raise Unreadable(f"the name {one!r} is that of another leaf too")
        self.tensors |= made

    def _encode(self, name: str, weight: QuantizedArray) -> dict[str, np.ndarray]:
        layout = _WRITTEN[self._format].get(type(weight.format))
        if isinstance(weight.format, E4M3) and layout is not None:
            fits = weight.format.block_size == (128 if layout is SQUARES else -1)
            layout = layout if fits else None
        if layout is None:
            raise Unreadable(f"it is stored in {spell_kind(weight.format)!r}, which this layout has not")
        if weight.input_scale is not None:
            raise Unreadable("it has input scales, of `awq`, which this layout has not")
        if not name.endswith(layout.ending):
            raise Unreadable(f"its name {name!r} does not end in {layout.ending!r}")
        matrix = take_apart(weight)
        self._is_symmetric &= is_symmetric(matrix)
        self._is_ordered |= matrix.order is not None
        stem = name.removesuffix(layout.ending)
        return {stem + suffix: array for suffix, array in layout.write(matrix, self._scale_dtype).items()}

    def _describe(self) -> dict[str, Any]:
        """Returns the config, with the entries of the library that reads it."""
        dtypes = {leaf.dtype for leaf in self._weights.values()} or {x.dtype for x in self.tensors.values()}
        config: dict[str, Any] = {"torch_dtype": dtypes.pop().name if len(dtypes) == 1 else "float32"}
        formats = [leaf.format for leaf in self._weights.values()]
        if self._format == "plain" or not formats:
            return config
        stored = StoredWeights(formats, self._is_symmetric, self._is_ordered, self._left_out)
        return config | {"quantization_config": describe_weights(self._format, stored)}


def _guess_name(path: str) -> str:
    *modules, last = path.split("/")
    return ".".join([*modules, "weight" if last in ("kernel", "embedding", "scale") else last])


def _choose_dtype(scales: Iterable[Any]) -> np.dtype:
    """Returns the dtype of scales in a checkpoint: half precision if all are exact, bfloat16 before float16."""
    # float16 has 3 more bits, so scales of float16 are all exact in bfloat16 by chance only.
    dtypes = [np.dtype(jnp.bfloat16), np.dtype(np.float16)]
    for scale in scales:
        numbers = np.asarray(scale)
        with np.errstate(over="ignore", under="ignore"):
            dtypes = [dtype for dtype in dtypes if (numbers.astype(dtype).astype(np.float32) == numbers).all()]
    return next(iter(dtypes), np.dtype(np.float32))


def _spell_axes(kind: str, leaf: Any) -> np.ndarray:
    """Returns a floating array with the axes of PyTorch."""
    array = np.asarray(leaf.dequantize() if is_quantized(leaf) else leaf)
    if kind != "kernel" or array.ndim < 2:
        return array
    if array.ndim == 2:
        return array.T
    if is_quantized(leaf) and (array.ndim == 3 or leaf.layout.channels > 1):
        *stack, inputs, outputs = find_dimensions(leaf)
        return array.reshape(*stack, inputs, outputs).swapaxes(-1, -2)
    if array.ndim == 3:
        raise Unreadable(
            f"its three axes {array.shape} may be of a convolution or of heads. Reshape it to (inputs, outputs), or "
            "write a stack of layers by a '*' in its name"
        )
    return np.moveaxis(array, (-1, -2), (0, 1))
