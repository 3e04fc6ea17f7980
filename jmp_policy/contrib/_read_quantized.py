"""Reads quantized checkpoints of other libraries: GPTQ, AWQ, compressed-tensors, float8 and MXFP4."""

import dataclasses
import difflib
import functools
import itertools
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .._base import PyTree, describe, drop_value_key, hide_frames, is_array, is_floating_dtype
from ..policy import E4M3
from ..quant import ARRAYS, QuantizedArray, is_quantized
from ._checkpoint_arrays import (
    Facts,
    TensorLayout,
    Unreadable,
    find_dimensions,
    quantize_tensor,
    read_arrays,
    split_heads,
)
from ._checkpoint_files import Source
from ._checkpoint_layouts import FLOATS, find_layout

Names = Callable[[str], str | None] | Mapping[str, str | None] | None
Index = tuple[int, ...]

_SHOWN = 10  # problems in an error
NO_NAME = "no pattern of `names` matches it; with None in place of a template, it is left out"


@hide_frames
def read_quantized(source: str | os.PathLike[str] | Mapping[str, Any], like: PyTree, *, names: Names = None) -> PyTree:
    """Reads a quantized checkpoint of another library into the state of a model with a quantized policy.

    Integers, scales and zero points are moved to our quantized arrays bit for bit; nothing is dequantized. Known are
    GPTQ and AWQ with 4 bits, int4, int8 and float8 of compressed-tensors, float8 in squares of 128 as of DeepSeek and
    Qwen, MXFP4 as in gpt-oss, nf4 of bitsandbytes, and floating tensors. Floating
    tensors are cast to the dtype of `like`, and quantized as `quant.quantize` does where `like` is quantized.

    All headers are checked first, with small tensors of shapes and orders of inputs. Then one leaf at a time is read
    and put on the devices: beside the state, memory holds about one stored leaf. Matrices are laid out as in
    `torch.nn.Linear`, `(outputs, inputs)`: they are transposed for kernels, and reshaped where a kernel has more axes.
    Kernels of convolutions, as floats, are transposed too.

    A quantized weight has the name of its floating tensor: `layer.weight` for `layer.qweight`,
    `layer.weight_packed` and what belongs to them; `gate_up_proj` for `gate_up_proj_blocks`. A GPTQ checkpoint with
    `desc_act` gives arrays with an `input_order`, which is a further leaf of the tree. Zero points of GPTQ are read by
    version 1, one more than stored, unless the config of a folder says `"checkpoint_format": "gptq_v2"`. A stored 15 is
    a 0 that borrowed one from the next zero point of its word, as GPTQModel reads and writes it.

    Args:
      source: a folder with safetensors files, one or several, or a mapping of names to NumPy or JAX arrays.
      like: the abstract state, with `jax.ShapeDtypeStruct` leaves. For linen,
        `jax.eval_shape(lambda: quant.quantize(model.init(key, x), policy))`; for nnx,
        `nnx.state(nnx.eval_shape(lambda: quant.quantize(Model(...), policy)))`. Each leaf is put by its sharding.
        Leaves that the checkpoint does not have, such as random keys, must not be in it: for example,
        `nnx.state(model, (nnx.Param, jmp.nnx.QuantizedParam))`.
      names: gives the path in `like`, joined by `/`, for the name of a weight. A function, whose `None` skips a tensor;
        or a mapping of regular expressions to templates of `re.Match.expand` or `None`: the first that matches
        the whole name counts. By default, dots become slashes, and a last `weight` becomes `kernel`, or `embedding` or
        `scale` where `like` has that. An index in brackets, as in `blocks[3]/dense/kernel`, is an element along the
        leading axis of `blocks/dense/kernel`. The collection `params` may be left out of paths.

    Returns:
      A tree like `like` with arrays.

    Raises:
      ValueError: the checkpoint and `like` differ, or a file is damaged. The message lists the problems.

    Source: the layouts of AutoGPTQ, AutoAWQ, compressed-tensors 0.20 and gpt-oss.

    >>> import jax, jax.numpy as jnp, numpy as np, jmp_policy as jmp
    >>> from flax import linen as nn
    >>> init = lambda: nn.Dense(8).init(jax.random.key(0), jnp.ones((1, 64)))
    >>> like = jax.eval_shape(lambda: jmp.quant.quantize(init(), "int8(min_size=0)_from_mixed_bfloat16"))
    >>> tensors = {"weight": np.ones((8, 64), np.int8), "weight_scale": np.ones((8, 1), np.float16)}
    >>> variables = jmp.contrib.read_quantized(tensors | {"bias": np.zeros(8, np.float16)}, like)
    >>> variables["params"]["kernel"], variables["params"]["bias"].dtype
    (QuantizedArray(int8(min_size=0), shape=(64, 8), dtype=float32), dtype('float32'))
    """
    reader = CheckpointReader(Source(source), like, names)
    reader.check()
    leaves = [reader.read_leaf(path) for path in reader.leaves]
    return jax.tree.unflatten(reader.structure, leaves)


@dataclasses.dataclass
class Part:
    """A tensor of the checkpoint, or the tensors of a quantized weight, that is a leaf or an element of one."""

    name: str  # of the floating tensor
    layout: TensorLayout | None
    tensors: dict[str, str]  # the names of tensors by suffix
    facts: Facts | None = None


class CheckpointReader:
    """Finds the tensors for each leaf of `like`, checks them, and reads them."""

    def __init__(self, source: Source, like: PyTree, names: Names) -> None:
        self._source = source
        self._problems = [*source.problems]
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_quantized)
        self.leaves = {join_path(path): leaf for path, leaf in leaves}
        self._parts: dict[str, dict[Index, Part]] = defaultdict(dict)
        find_path = read_names(names, self.leaves)
        for part in self._group_tensors():
            self._assign(part, find_path(part.name))

    def _group_tensors(self) -> list[Part]:
        """Groups the tensors of each quantized weight."""
        headers = self._source.headers
        config = self._source.config.get("quantization_config") or {}
        is_v2 = config.get("checkpoint_format") == "gptq_v2"
        parts, used = [], set()
        for name in headers:
            found = find_layout(name, headers, is_v2)
            if found is not None:
                stem, layout = found
                tensors = {suffix: stem + suffix for suffix in layout.suffixes if stem + suffix in headers}
                parts.append(Part(stem + layout.ending, layout, tensors))
                used |= set(tensors.values())
        return parts + [Part(name, None, {"": name}) for name in headers if name not in used]

    def _assign(self, part: Part, path: str | None) -> None:
        """Notes that a part is the leaf at a path, which may have indices in brackets."""
        if path is None:
            return
        if not path:
            self._problems.append(f"{part.name!r}: {NO_NAME}")
            return
        plain, index = re.sub(r"\[\d+\]", "", path), tuple(map(int, re.findall(r"\[(\d+)\]", path)))
        full = _complete_path(plain, self.leaves)
        if full is None:
            shown = len(self._problems) < _SHOWN  # the search takes time for each of many paths
            near = difflib.get_close_matches(plain, self.leaves, 1) if shown else []
            hint = f". Did you mean {near[0]!r}?" if near else ""
            self._problems.append(f"{part.name!r} is for {path!r}, which `like` does not have{hint}")
        elif index in self._parts[full]:
            self._problems.append(f"{self._parts[full][index].name!r} and {part.name!r} are both for {path!r}")
        else:
            self._parts[full][index] = part

    def check(self) -> None:
        """Raises an error that lists all problems, if there are any."""
        for path, leaf in self.leaves.items():
            self._check_leaf(path, leaf)
        raise_problems(f"The checkpoint {self._source.name} does not fit `like`:", self._problems)

    def _check_leaf(self, path: str, leaf: Any) -> None:
        parts = self._parts.get(path)
        if not is_array(leaf) and not is_quantized(leaf):
            self._problems.append(f"{path!r} of `like` is {describe(leaf)}, which is not an array")
            return
        if not parts:
            self._problems.append(f"{path!r} of `like` has no tensor in the checkpoint")
            return
        depths = {len(index) for index in parts}
        depth = min(depths)
        length = leaf.shape[:depth]
        if len(depths) > 1 or len(length) < depth:
            self._problems.append(
                f"{path!r} of `like` has the shape {leaf.shape}, and indices of {sorted(depths)} axes"
            )
            return
        wanted = set(np.ndindex(*length))
        wrong = [f"has no tensor for element {list(index)}" for index in sorted(wanted - parts.keys())]
        wrong += [f"has no element {list(index)}, which is given" for index in sorted(parts.keys() - wanted)]
        self._problems += [f"{path!r} of `like` {one}" for one in wrong]
        for part in parts.values():
            try:
                self._check_part(part, path, leaf, depth)
            except Unreadable as error:
                self._problems.append(f"{part.name!r}: {error}")

    def _check_part(self, part: Part, path: str, leaf: Any, depth: int) -> None:
        headers = {suffix: self._source.headers[name] for suffix, name in part.tensors.items()}
        if part.layout is None:
            _check_plain(headers[""], path, leaf, depth)
            return
        missing = [name for name in part.layout.suffixes if name not in headers and name not in part.layout.optional]
        if missing:
            raise Unreadable(f"it has {sorted(part.tensors.values())}, and lacks {missing}")
        part.facts = part.layout.measure(headers, lambda suffix: self._source.read(part.tensors[suffix]))
        _check_weight(part, path, leaf, depth)

    def read_leaf(self, path: str) -> Any:
        """Reads the tensors of a leaf, and puts it on the devices."""
        leaf, parts = self.leaves[path], self._parts[path]
        depth = len(next(iter(parts)))
        stack = leaf.shape[:depth]
        made = [self._read_part(parts[index], path, leaf, depth) for index in np.ndindex(*stack)]
        if not isinstance(leaf, QuantizedArray):
            return _place(_join_stack(made, stack), leaf)
        arrays: dict[str, Any] = dict.fromkeys(ARRAYS)
        for name in dict.fromkeys(itertools.chain(*made)):
            array = _join_stack([one.get(name, _plain_order(leaf)) for one in made], stack)
            like = getattr(leaf, name)
            arrays[name] = _place(array, _describe_order(leaf.values, array) if like is None else like)
        return dataclasses.replace(leaf, **arrays)

    def _read_part(self, part: Part, path: str, leaf: Any, depth: int) -> Any:
        """Returns an element of a leaf; of a quantized one, its arrays by name."""
        tensors = {suffix: self._source.read(name) for suffix, name in part.tensors.items()}
        if part.layout is None:
            array = _orient(tensors[""], path, leaf, depth)
            if isinstance(leaf, QuantizedArray):
                return quantize_tensor(array, leaf, depth)
            return array.astype(leaf.dtype, copy=False)
        assert part.facts is not None
        return read_arrays(part.layout, tensors, part.facts, leaf, depth)


def join_path(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(drop_value_key(path), simple=True, separator="/")


def _complete_path(path: str, leaves: Mapping[str, Any]) -> str | None:
    """Returns the path of a leaf, where the collection of linen parameters may be left out."""
    return next((one for one in (path, f"params/{path}") if one in leaves), None)


def read_names(names: Names, leaves: Mapping[str, Any]) -> Callable[[str], str | None]:
    if names is None:
        return functools.partial(_guess_path, leaves=leaves)
    if not isinstance(names, Mapping):
        return names
    patterns = [(_compile_pattern(pattern), template) for pattern, template in names.items()]

    def expand(name: str) -> str | None:
        for pattern, template in patterns:
            if match := pattern.fullmatch(name):
                return None if template is None else _expand(match, template)
        return ""

    return expand


_EXAMPLE = r"For example: names={r'model\.layers\.(\d+)\.(\w+)\.weight': r'blocks[\1]/\2/kernel'}."


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} of names is not a valid pattern: {error}. {_EXAMPLE}") from None


def _expand(match: re.Match[str], template: str) -> str:
    try:
        return match.expand(template)
    except (re.error, IndexError) as error:
        raise ValueError(f"{template!r} of names is not a valid template: {error}. {_EXAMPLE}") from None


def _guess_path(name: str, leaves: Mapping[str, Any]) -> str:
    path = name.replace(".", "/")
    if path != "weight" and not path.endswith("/weight"):
        return path
    stem = path.removesuffix("weight")
    tries = (f"{stem}{last}" for last in ("kernel", "embedding", "scale"))
    return next((one for one in tries if _complete_path(one, leaves) is not None), f"{stem}kernel")


def _check_weight(part: Part, path: str, leaf: Any, depth: int) -> None:
    """Raises if a quantized weight does not fit a leaf."""
    facts = part.facts
    assert facts is not None
    fix = f"Make `like` with a policy such as '{facts.format}_from_mixed_bfloat16'"
    if not isinstance(leaf, QuantizedArray):
        has = f"{leaf.dtype}{list(leaf.shape)}"
        raise Unreadable(f"it is stored in {spell_kind(facts.format)!r}, and {path!r} of `like` is {has}. {fix}")
    wanted = find_dimensions(leaf, depth)
    if facts.shape not in _list_dimensions(leaf, depth):
        raise Unreadable(
            f"it has (..., inputs, outputs) of {facts.shape}, and {path!r} of `like`, without the axes of its index, "
            f"{wanted}"
        )
    groups = facts.groups if isinstance(leaf.format, E4M3) else _count_blocks(leaf)
    if isinstance(leaf.format, E4M3) and facts.kind == "e4m3" and leaf.format.block_size != facts.square:
        groups = 0  # another form of scales
    if leaf.format.kind != facts.kind or groups != facts.groups:
        raise Unreadable(
            f"it is stored in {spell_kind(facts.format)!r}, with {facts.groups} scales for the inputs of each output, "
            f"and {path!r} of `like` in {spell_kind(leaf.format)!r}, with {groups}. {fix}"
        )
    if leaf.input_clip is not None:
        raise Unreadable(_describe_range(path))
    if not leaf.layout.channels and {".g_idx", "_g_idx"} & part.tensors.keys():
        raise Unreadable(f"it has an order of its inputs, and {path!r} of `like` is a table of rows")


def _describe_range(path: str) -> str:
    return (
        f"{path!r} of `like` has a calibrated range of its inputs, which the checkpoint does not. Make `like` with a "
        "policy without act_scale='static'"
    )


def spell_kind(format: Any) -> str:
    return str(format).partition("(")[0]


def _count_blocks(leaf: QuantizedArray) -> int:
    return math.prod(leaf.scale.shape) // (math.prod(leaf.shape) // leaf.layout.length)


def _check_plain(header: Any, path: str, leaf: Any, depth: int) -> None:
    """Raises if a tensor cannot be cast to a leaf, or quantized for it."""
    is_same = is_array(leaf) and header.dtype == leaf.dtype
    if not is_same and (header.dtype not in FLOATS or not is_floating_dtype(leaf.dtype)):
        raise Unreadable(f"it is {header}, and {path!r} of `like` {leaf.dtype}{list(leaf.shape)}")
    if _find_axes(header.shape, path, leaf, depth) is None:
        raise Unreadable(
            f"its shape is {header.shape}, which does not give the {leaf.shape[depth:]} of {path!r} of `like`"
        )
    if isinstance(leaf, QuantizedArray) and leaf.input_clip is not None:
        raise Unreadable(_describe_range(path))


def _list_dimensions(leaf: QuantizedArray, depth: int) -> list[tuple[int, ...]]:
    """Lists the dimensions that a weight may have in a checkpoint; leading axes may be outputs, such as heads."""
    inputs = leaf.layout.length
    merged = [] if depth else [(inputs, math.prod(leaf.shape) // inputs)]
    return [find_dimensions(leaf, depth), *merged]


def _find_axes(shape: tuple[int, ...], path: str, leaf: Any, depth: int) -> tuple[int, ...] | None:
    """Returns the order of the axes of a tensor of another library that can be reshaped to a leaf, or None."""
    wanted, axes = leaf.shape[depth:], tuple(range(len(shape)))
    is_kernel = (
        path.rpartition("/")[2] == "kernel" if not isinstance(leaf, QuantizedArray) else leaf.layout.channels > 0
    )
    if not is_kernel or len(shape) < 2:
        return axes if shape == wanted or (len(shape) == 1 and shape == (math.prod(wanted),)) else None
    swapped = (*shape[:-2], shape[-1], shape[-2])
    if isinstance(leaf, QuantizedArray):
        fits = swapped in _list_dimensions(leaf, depth)
    else:  # (inputs, outputs), each perhaps several axes
        fits = len(shape) == 2 and any(swapped == (math.prod(wanted[:n]), math.prod(wanted[n:])) for n in range(9))
    if fits:
        return (*axes[:-2], axes[-1], axes[-2])
    is_convolution = (*shape[2:], shape[1], shape[0]) == wanted
    return (*axes[2:], 1, 0) if is_convolution else None


def _orient(array: np.ndarray, path: str, leaf: Any, depth: int) -> np.ndarray:
    axes = _find_axes(array.shape, path, leaf, depth)
    assert axes is not None
    array = array.transpose(axes)
    stack = find_dimensions(leaf, depth)[:-2] if isinstance(leaf, QuantizedArray) else ()
    array = split_heads(array, stack) if stack and array.ndim == 2 else array
    return array.reshape(leaf.shape[depth:])


def _join_stack(made: list[np.ndarray], stack: tuple[int, ...]) -> np.ndarray:
    """Joins the elements of a stack, or returns the only one of no stack."""
    return np.stack(made).reshape(*stack, *made[0].shape) if stack else made[0]


def _plain_order(leaf: QuantizedArray) -> np.ndarray:
    return np.arange(leaf.layout.length, dtype=np.int32)


def _describe_order(values: Any, order: np.ndarray) -> jax.ShapeDtypeStruct:
    """Returns where to put an input order: on each device whole."""
    sharding = getattr(values, "sharding", None)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(order.shape, order.dtype, sharding=sharding)


def _place(array: Any, like: Any) -> jax.Array:
    """Puts an array by the sharding of its leaf, if it has one with devices."""
    sharding = getattr(like, "sharding", None)
    if sharding is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        sharding = None  # the default device
    return jax.device_put(array, sharding, may_alias=False)


def raise_problems(title: str, problems: list[str]) -> None:
    """Raises an error that lists the first problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] * (len(problems) > _SHOWN)
        raise ValueError("\n".join([title, *(f"- {problem}" for problem in [*problems[:_SHOWN], *more])]))
