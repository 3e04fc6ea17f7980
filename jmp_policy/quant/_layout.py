"""Layouts of weights: the axes that are summed over, and share a scale."""

import dataclasses
import math
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from ..policy import NF4, PER_CHANNEL, BlockFormat, Int4, StoredFormat

BlockedFormat = Int4 | NF4 | BlockFormat
"""Formats of blocks along the summed axes."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Axes of a weight: first a stack or batch, then the summed axes, then the output channels."""

    contracted: tuple[int, ...]  # lengths of the summed axes, which are adjacent
    channels: int  # number of axes after these

    @property
    def axes(self) -> tuple[int, ...]:
        """The summed axes, as negative numbers, because a stack may be sliced into its layers."""
        return tuple(range(-self.channels - len(self.contracted), -self.channels))

    @property
    def length(self) -> int:
        """Number of elements that an output channel sums over."""
        return math.prod(self.contracted)

    def of(self, shape: tuple[int, ...]) -> "Layout":
        """Returns the layout for another shape, such as a shard's in `shard_map`."""
        return Layout(tuple(shape[axis] for axis in self.axes), self.channels)


def kernel_layout(shape: tuple[int, ...], bias_shape: tuple[int, ...] | None = None, stacked: int = 0) -> Layout:
    """Returns the layout of a Flax `kernel`: the axes of its bias, or the last axis, are the output channels.

    A shape alone is ambiguous: `(4, 8, 16)` may be a query projection of an attention with 8 heads, an output
    projection, a convolution, or a stack of four Dense layers. The bias tells these apart. `stacked` is the number of
    leading axes of a stack; it is needed without a bias, or if the stack is as deep as its layers are wide.

    >>> kernel_layout((64, 4, 16), (4, 16)), kernel_layout((4, 16, 64), (64,))
    (Layout(contracted=(64,), channels=2), Layout(contracted=(4, 16), channels=1))
    """
    shape = shape[stacked:]
    bias = () if bias_shape is None else bias_shape[stacked:]
    fitting = (n for n in range(min(len(shape) - 1, len(bias)), 0, -1) if shape[-n:] == bias[-n:])
    channels = next(fitting, 1)
    before = len(bias) - channels  # a batch or a stack of layers: kernel and bias begin with the same axes
    if before < 0 or len(shape) - channels <= before or shape[:before] != bias[:before]:
        before = 0
    return Layout(shape[before : len(shape) - channels], channels)


def table_layout(shape: tuple[int, ...]) -> Layout:
    """Returns the layout of a Flax `embedding`, with a scale per row."""
    return Layout(shape[-1:], 0)


def weight_layout(
    name: str, shape: tuple[int, ...], bias_shape: tuple[int, ...] | None = None, stacked: int = 0
) -> Layout:
    """Returns the layout of a weight by its name in Flax: `embedding` is a table, anything else a kernel."""
    return table_layout(shape) if name == "embedding" else kernel_layout(shape, bias_shape, stacked)


def layer_size(shape: tuple[int, ...], layout: Layout) -> int:
    """Returns the number of elements of a weight; for a stack, of one layer."""
    return math.prod(shape[len(stack_shape(shape, layout)) :])


def stack_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Returns the leading axes that form a stack or batch; the rows of a table do not."""
    own = len(layout.contracted) + max(layout.channels, 1)
    return shape[: max(len(shape) - own, 0)]


def choose_format(quantization: StoredFormat, layout: Layout) -> StoredFormat:
    """Returns the format of a weight under a policy, which may differ for tables."""
    if layout.channels or isinstance(quantization, BlockFormat):
        return quantization
    return quantization.for_tables


WHY_TABLES_WIDE = "the rows of a table are read, and its logits want all the bits"


def reason_unquantized(shape: tuple[int, ...], layout: Layout, quantization: StoredFormat) -> str | None:
    """Returns the reason why a weight stays in the compute dtype, or None if it is quantized."""
    if isinstance(quantization, BlockFormat) and not layout.channels:
        return WHY_TABLES_WIDE
    size = layer_size(shape, layout)
    if size < quantization.min_size or size == 0:
        return f"{size} elements are fewer than min_size={quantization.min_size}"
    return None


def block_length(layout: Layout, quantization: BlockedFormat) -> int:
    """Returns the number of inputs that share a scale; the last block may be padded with zeros."""
    block, length = quantization.block_size, layout.length
    is_whole = isinstance(quantization, Int4 | NF4) and (block == PER_CHANNEL or length < block)
    return length if is_whole else block


def count_blocks(layout: Layout, quantization: BlockedFormat) -> int:
    return -(-layout.length // block_length(layout, quantization))


def describe_padding(layout: Layout, quantization: StoredFormat) -> str:
    """Says how many inputs a weight is stored with, as the end of a sentence; empty without padding."""
    if not isinstance(quantization, BlockedFormat):
        return ""
    padded = count_blocks(layout, quantization) * block_length(layout, quantization)
    return "" if padded == layout.length else f", padded from {layout.length} to {padded} inputs"


def describe_whole(array: Any, layout: Layout, quantization: Any) -> str:
    """Says that blocks cannot be split over devices like their weight; empty if they can, or if JAX does not tell."""
    if not isinstance(quantization, BlockedFormat):
        return ""
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return ""
    spec = (*sharding.spec, *[None] * array.ndim)
    names = spec[array.ndim + layout.axes[0]] or ()
    parts = math.prod(sharding.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
    block, blocks = block_length(layout, quantization), count_blocks(layout, quantization)
    if blocks % parts == 0:
        return ""
    fits = (size for size in range(2, block, 2) if layout.length % (size * parts) == 0)
    size = max(fits, default=None)
    fix = "" if size is None else f"; with '{quantization.kind}/{size}' it is split"
    return f"its {blocks} blocks of {block} cannot be split over the {parts} devices of {names!r}{fix}"
