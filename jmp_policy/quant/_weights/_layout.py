"""Which axes of a weight are summed over, and share a scale."""

import dataclasses
import math

from ...policy import PER_CHANNEL, BlockFormat, Int4, KeptNVFP4, StoredFormat


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the axes of a weight are for: a stack or a batch first, then the sums, then the output channels.

    Attributes:
      contracted: the lengths of the axes that are summed over, which share a scale. They stand together.
      channels: the number of axes after these, for output channels. The axes before them make a stack or a batch.
    """

    contracted: tuple[int, ...]
    channels: int

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that are summed over, counted from the end: a stack may be cut into its layers."""
        return tuple(range(-self.channels - len(self.contracted), -self.channels))

    @property
    def length(self) -> int:
        """How many weights an output channel sums over."""
        return math.prod(self.contracted)

    def of(self, shape: tuple[int, ...]) -> "Layout":
        """The layout of a weight of another shape: of the part that one device has in `shard_map`.

        >>> Layout((64,), 1).of((16, 8))
        Layout(contracted=(16,), channels=1)
        """
        return Layout(tuple(shape[axis] for axis in self.axes), self.channels)


def kernel_layout(shape: tuple[int, ...], bias_shape: tuple[int, ...] | None = None, stacked: int = 0) -> Layout:
    """The layout of a Flax `kernel`: the axes of its bias are the output channels, or the last axis without a bias.

    A kernel says nothing of its axes by itself: `(4, 8, 16)` may be the query projection of an attention of 8 heads,
    its output projection, a convolution, or a stack of four Dense layers. Its bias tells them apart.

    Args:
      shape: of the kernel.
      bias_shape: of the bias beside it, if there is one.
      stacked: how many leading axes make a stack of layers (`nn.scan`, `nn.vmap`). The biases of a stack tell this,
        except where it is as deep as its layers are wide.

    >>> kernel_layout((64, 4, 16), (4, 16)), kernel_layout((4, 16, 64), (64,))
    (Layout(contracted=(64,), channels=2), Layout(contracted=(4, 16), channels=1))
    >>> kernel_layout((12, 64, 256), (12, 256)), kernel_layout((12, 64, 256), stacked=1)
    (Layout(contracted=(64,), channels=1), Layout(contracted=(64,), channels=1))
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
    """The layout of a Flax `embedding`: each row has its scale.

    >>> table_layout((256, 64))
    Layout(contracted=(64,), channels=0)
    """
    return Layout(shape[-1:], 0)


def weight_layout(
    name: str, shape: tuple[int, ...], bias_shape: tuple[int, ...] | None = None, stacked: int = 0
) -> Layout:
    """The layout of a weight by its name in Flax's layers: `embedding` is a table, anything else a kernel.

    >>> weight_layout("embedding", (256, 64)) == table_layout((256, 64))
    True
    """
    return table_layout(shape) if name == "embedding" else kernel_layout(shape, bias_shape, stacked)


def layer_size(shape: tuple[int, ...], layout: Layout) -> int:
    """The number of elements of a weight; of a stack, the number in one layer.

    >>> layer_size((12, 64, 256), kernel_layout((12, 64, 256), stacked=1))
    16384
    """
    return math.prod(shape[len(stack_shape(shape, layout)) :])


def stack_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The lengths of the leading axes that make a stack or a batch; the rows of a table do not.

    >>> stack_shape((12, 64, 256), kernel_layout((12, 64, 256), stacked=1))
    (12,)
    >>> stack_shape((256, 64), table_layout((256, 64)))
    ()
    """
    own = len(layout.contracted) + max(layout.channels, 1)
    return shape[: max(len(shape) - own, 0)]


def choose_format(quantization: StoredFormat, layout: Layout) -> StoredFormat:
    """Chooses the format of a weight under a quantized policy, which may say another for tables than for kernels.

    >>> str(choose_format(Int4(), table_layout((256, 64)))), str(choose_format(Int4(), kernel_layout((256, 64))))
    ('int8(activations=false)', 'int4/128')
    """
    if layout.channels or isinstance(quantization, BlockFormat):
        return quantization
    return quantization.for_tables


WHY_TABLES_WIDE = "the rows of a table are read, and its logits want all the bits"
"""Why embeddings compute in the compute dtype."""


def why_left(shape: tuple[int, ...], layout: Layout, quantization: StoredFormat) -> str | None:
    """Why a weight stays in the compute dtype: it is too small, or blocks do not fit. `None` if it is quantized.

    The blocks of `Int4` have to fit: see `block_length`.

    Args:
      shape: of the weight, or of a stack of them.
      layout: which of its axes are summed over.
      quantization: its format.

    >>> why_left((8, 8), kernel_layout((8, 8)), Int4())
    '64 elements are fewer than min_size=4096'
    >>> from jmp_policy.quant import MXFP8
    >>> why_left((100, 128), kernel_layout((100, 128)), MXFP8())
    'blocks of 32 do not divide its 100 inputs'
    """
    if isinstance(quantization, BlockFormat) and not layout.channels:
        return WHY_TABLES_WIDE
    if isinstance(quantization, KeptNVFP4):
        return f"nvfp4 keeps what is named {quantization.name!r}, unless keep=none"
    size = layer_size(shape, layout)
    if size < quantization.min_size or size == 0:
        return f"{size} elements are fewer than min_size={quantization.min_size}"
    if not isinstance(quantization, BlockFormat):
        return None
    # The backward pass sums over outputs and over rows as well, to which its products add zeros.
    fits = layout.length % quantization.block_size == 0
    return None if fits else f"blocks of {quantization.block_size} do not divide its {layout.length} inputs"


def block_length(layout: Layout, quantization: Int4 | BlockFormat, where: str = "") -> int:
    """How many weights share a scale.

    Args:
      layout: of the weight.
      quantization: its block size.
      where: what the error message says of the place the weight stands in.

    Raises:
      ValueError: the blocks do not divide what is summed over.

    >>> [block_length(kernel_layout((512, 8)), Int4(block_size)) for block_size in (128, 1024, -1)]
    [128, 512, 512]
    """
    block, length = quantization.block_size, layout.length
    if isinstance(quantization, Int4) and (block == PER_CHANNEL or length <= block):
        return length
    if length % block:
        # Two numbers of 4 bits of floating point are a byte, so that their blocks are even.
        step = 2 if isinstance(quantization, BlockFormat) and quantization.bits == 4 else 1
        fitting = max((n for n in range(step, block + 1, step) if length % n == 0), default=None)
        kind = str(quantization).partition("(")[0].partition("/")[0]
        remedy = "Leave" if fitting is None else f"The largest that do are of {fitting}: '{kind}/{fitting}', or leave"
        raise ValueError(
            f"Blocks of {block} do not divide the {length} inputs of the weight{where}. {remedy} the weight out by a "
            "rule of a PolicyMap: {'path': 'float32'}."
        )
    return block
