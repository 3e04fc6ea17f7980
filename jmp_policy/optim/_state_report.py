"""Bits, blocks and bytes of the moments of an optimizer."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base import PyTree, is_array, is_floating_dtype
from ..report import Column, Plain, Report, Table, find_row, format_bytes, make_columns, make_plain, shorten_dtypes
from ._moment_blocks import MomentBlocks, choose_sides
from ._moment_codes import list_moments, map_moments
from ._quantize_state import is_embedding, show_path
from ._quantized_update import QuantizedMomentsState


@dataclasses.dataclass(frozen=True)
class MomentRow(Plain):
    """Storage of one moment of one parameter.

    Attributes:
      path: the names of the parameter, joined by `/`.
      role: `"mu"` for averages of gradients, `"nu"` for averages of squares.
      bits: per element, without the scales.
      dtype: the stored dtype, uint8 for codes.
      block: the sides of a block with one scale; empty without blocks.
      bytes: with scales.
      float32_bytes: the size in float32.
      left: the reason why it has no blocks, as far as its path and shape tell; empty if it has blocks, and in other
        optimizers.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> params = {"kernel": jnp.ones((128, 64))}
    >>> row = jmp.optim.state_report(jmp.optim.quantize_state(optax.lion(1e-3)).init(params), params)["kernel"]
    >>> row.role, row.dtype, row.block, row.bytes
    ('mu', 'uint8', (32, 8), 8320)
    """

    path: str
    role: str
    bits: int
    dtype: str
    block: tuple[int, ...]
    bytes: int
    float32_bytes: int
    left: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class StateReport(Report):
    """Result of `optim.state_report`: a table in a terminal and in a notebook.

    Attributes:
      rows: one for each moment of each parameter.
      other_bytes: the size of the rest of the state: counters, masters, sums of gradients.
      param_count: the number of elements of the parameters.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> params = {"kernel": jnp.ones((128, 64))}
    >>> report = jmp.optim.state_report(optax.adam(1e-3).init(params), params)
    >>> report.moment_bytes, report.other_bytes, round(report.bytes_per_param, 2)
    (65536, 4, 8.0)
    """

    rows: tuple[MomentRow, ...]
    other_bytes: int
    param_count: int

    @property
    def moment_bytes(self) -> int:
        """The size of all moments."""
        return sum(row.bytes for row in self.rows)

    @property
    def float32_bytes(self) -> int:
        """The size of all moments in float32."""
        return sum(row.float32_bytes for row in self.rows)

    @property
    def bytes_per_param(self) -> float:
        """The size of the whole state per element of the parameters."""
        return (self.moment_bytes + self.other_bytes) / max(self.param_count, 1)

    def __getitem__(self, path: str) -> MomentRow:
        """Returns the first row of the parameter at a path. Raises a `KeyError` if there is none."""
        return find_row(self.rows, path, "moment", "stored")

    def to_dict(self) -> dict[str, Any]:
        """Returns rows and sizes as dictionaries, lists, strings and numbers."""
        names = ("rows", "moment_bytes", "float32_bytes", "other_bytes", "bytes_per_param")
        return {name: make_plain(getattr(self, name)) for name in names}

    def _summarize(self) -> str:
        return f"{len(self.rows)} moments"

    def _list_tables(self, width: int | None) -> list[Table]:
        columns = [*make_columns("parameter, role, dtype, block", "bytes"), Column("left", wraps=True)]
        return [Table(columns, [_format_row(row) for row in self.rows])]

    def _list_notes(self) -> list[str]:
        share = f"{self.moment_bytes / self.float32_bytes:.3g} of" if self.float32_bytes else "of"
        return [
            f"moments: {format_bytes(self.moment_bytes) or '0 B'}, {share} their size in float32",
            f"the rest of the state: {format_bytes(self.other_bytes) or '0 B'}",
            f"together: {self.bytes_per_param:.3g} bytes per parameter",
        ]


def state_report(state: PyTree, params: PyTree) -> StateReport:
    """Reports the bits in which an optimizer stores its moments, and why some are float32.

    Args:
      state: the state of any optimizer, or its `jax.eval_shape`: `optim.quantize_state` in any wrapper, or plain optax.
      params: its parameters, or their `jax.ShapeDtypeStruct`s.

    Returns:
      A `StateReport`: a table when printed or shown in a notebook, `.rows` and `.to_dict()` for code.

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> params = {"kernel": jnp.ones((128, 64)), "embed": jnp.ones((256, 64)), "bias": jnp.ones(64)}
    >>> state = jmp.optim.quantize_state(optax.lion(1e-3)).init(params)
    >>> [(row.path, row.bits, row.left) for row in jmp.optim.state_report(state, params).rows]
    [('bias', 32, '64 numbers: fewer than min_size, or by a rule'), ('embed', 32, 'embeddings'), ('kernel', 8, '')]
    """
    is_quantized = lambda node: isinstance(node, QuantizedMomentsState)
    has_blocks = any(map(is_quantized, jax.tree.leaves(state, is_leaf=is_quantized)))
    joined = jax.tree.map(
        lambda node: _pair_with_scales(node) if is_quantized(node) else node, state, is_leaf=is_quantized
    )
    rows = tuple(
        _make_moment_row(show_path(path), role, moment, has_blocks)
        for role, field in list_moments(joined)
        for path, moment in jax.tree_util.tree_leaves_with_path(field, is_leaf=_is_blocks)
        if is_array(moment) or _is_blocks(moment)
    )
    total = sum(_count_bytes(leaf) for leaf in jax.tree.leaves(state))
    count = sum(leaf.size for leaf in jax.tree.leaves(params) if is_array(leaf))
    return StateReport(tuple(sorted(rows, key=lambda row: row.path)), total - sum(row.bytes for row in rows), count)


def _pair_with_scales(state: QuantizedMomentsState) -> Any:
    """Pairs the moments of an optimizer with their scales."""
    scales: Iterator[Any] = iter(jax.tree.leaves(state.scales))
    join = lambda moment: MomentBlocks(moment, next(scales))
    return map_moments(lambda role, field: jax.tree.map(join, field), state.inner_state)


def _is_blocks(node: Any) -> bool:
    return isinstance(node, MomentBlocks)


def _make_moment_row(path: str, role: str, moment: Any, has_blocks: bool) -> MomentRow:
    codes, scale = moment if _is_blocks(moment) else (moment, None)
    size = _count_bytes(codes) + (0 if scale is None else _count_bytes(scale))
    bits, wide = 8 * codes.dtype.itemsize, 4 * codes.size
    if scale is not None and codes.dtype == np.uint8:
        sides = [length // max(count, 1) for length, count in zip(codes.shape, scale.shape, strict=True)]
        return MomentRow(path, role, bits, codes.dtype.name, tuple(sides), size, wide)
    return MomentRow(
        path, role, bits, codes.dtype.name, (), size, wide, _explain_missing_blocks(path, codes) if has_blocks else ""
    )


def _explain_missing_blocks(path: str, moment: Any) -> str:
    """Returns why a moment has no blocks. The settings of `quantize_state` are not in its state."""
    if not is_floating_dtype(moment.dtype):
        return "no floating numbers"
    if choose_sides(moment.shape, 256) is None:
        return "no blocks of 256 divide its axes"
    if is_embedding(path):
        return "embeddings"
    return f"{moment.size:,} numbers: fewer than min_size, or by a rule"


def _count_bytes(leaf: Any) -> int:
    if not is_array(leaf):
        return 0
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return leaf.size * np.dtype(leaf.dtype).itemsize


def _format_row(row: MomentRow) -> list[str]:
    block = " x ".join(map(str, row.block))
    return [row.path, row.role, shorten_dtypes([row.dtype]), block, format_bytes(row.bytes), row.left]
