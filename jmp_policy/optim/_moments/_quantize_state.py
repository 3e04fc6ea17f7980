"""Moments of optimizers in 8 bits."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..._base import PyTree, is_floating_dtype, list_paths_to, quote
from .._half import check_key
from .._steps import Transformation, check_not_loss_scaled, check_not_outermost, check_transformation
from ._elementwise import find_constants
from ._moment_blocks import Shape, choose_sides, place_alike, quantize, scale_shape
from ._moment_codes import DYNAMIC, MU, NU, UNSIGNED_FLOAT, MomentCode, map_moments
from ._quantized_update import QuantizedMomentsState, QuantizedUpdate

Path = tuple[Any, ...]

Where = Callable[[str, Any], bool] | str | Sequence[str]

CODES: dict[str, MomentCode] = {MU: DYNAMIC, NU: UNSIGNED_FLOAT}
"""What moments are written as, by their roles."""

_EMBEDDING = re.compile(r"(.*/)?([^/]*embed[^/]*|w[tp]e)(/.*)?", re.IGNORECASE)
"""The paths of tables of embeddings."""


def quantize_state(
    inner: Transformation,
    bits: int = 8,
    block_size: int = 256,
    min_size: int = 4096,
    where: Where | None = None,
    stochastic: jax.Array | None = None,
    *,
    elementwise: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of any elementwise optimizer in 8 bits.

    AdamW keeps two float32 numbers for each parameter, 8 bytes; here 2.03. A moment is cut into blocks of 256
    numbers, each with a float32 scale, its largest number. First moments are written in the dynamic code, whose
    precision is highest near the largest numbers and which reaches seven decades below. Second moments are written as
    floats without sign, with 5 bits of exponent and 3 of mantissa, and what is not zero never becomes zero, for a
    parameter is divided by its root.

    An update reads, computes in float32 and writes one piece of a parameter after the other, so that no whole float32
    moment is ever alive. That is right only where each number is updated by itself: a program that does anything else,
    as clipping by the global norm, layer-wise rates or factored moments, is refused, and named. Put clipping outside:
    `optax.chain(optax.clip_by_global_norm(1.0), quantize_state(optax.adamw(1e-3)))`.

    A block has 32 rows of 8 columns where the last two axes allow it, so that a parameter that is split over devices
    along multiples of these has whole blocks on each; codes lie as their parameter does, and so do scales, whose axes
    are shorter (`jmp_policy.sharding.state_shardings`). Moments that no blocks divide, of axes of odd lengths, stay.

    It goes next to the optimizer, inside everything else of `jmp_policy.optim`, as `cast_state`. `state_report` says
    what has how many bits.

    Args:
      inner: the transformation to wrap.
      bits: 8. (First moments in 4 bits, as by Li et al. 2023, cost a small language model 1 to 2 % of its loss.)
      block_size: how many numbers have one scale at most, a power of two from 16 to 4096.
      min_size: moments of parameters with fewer numbers stay in float32.
      where: whose moments are quantized: regular expressions that match the path of a parameter, `"blocks/0/kernel"`,
        or of what it is in; or a function `(path, param) -> bool`. By default all but tables of embeddings, whose
        rows have gradients at different times: what has `embed` in a name of its path, or is called `wte`, `wpe`.
      stochastic: a random key, `jax.random.key(seed)`, to round codes by chance, not to nearest. An average over
        1,000 steps (`b2=0.999`) moves by less than a code in a step, and to nearest it hardly follows gradients whose
        size changes; by chance it does.
      elementwise: `False` takes `inner` as it is, on whole float32 moments, which are quantized between steps.

    Returns:
      A transformation whose state is a `QuantizedMomentsState`.

    Raises:
      TypeError: `inner` is not an optax transformation, or `stochastic` is not one random key.
      ValueError: `bits` or `block_size` is none of those; `inner` is one of `jmp_policy.optim` that goes outside; at
        `init`, `inner` has no moments of the shapes of parameters, or `where` matches no parameter; in a step, `inner`
        is not elementwise.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.quantize_state(optax.adamw(1e-3))
    >>> state = tx.init({"w": jnp.ones((128, 64)), "b": jnp.ones(64)})
    >>> state.inner_state[0].mu["w"].dtype, state.scales[0]["w"].shape, state.inner_state[0].mu["b"].dtype
    (dtype('uint8'), (4, 8), dtype('float32'))
    """
    check_transformation(inner)
    check_not_outermost(inner, "quantize_state")
    codes = _choose_codes(bits)
    _check_block_size(block_size)
    choose = _Choice(block_size, min_size, where)
    key = None if stochastic is None else check_key(stochastic, "stochastic")

    def init(params: PyTree) -> Any:
        chosen = choose(params)
        inner_state, scales = _quantize_first(inner, params, chosen, codes)
        check_not_loss_scaled(inner_state, "quantize_state")
        if not scales:
            raise ValueError(
                "quantize_state is for optimizers with moments, and the state of this one has none. For example: "
                "quantize_state(optax.adamw(1e-3))."
            )
        if chosen and not any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(inner_state)):
            paths = ", ".join(quote(show_path(path)) for path in list(chosen)[:5])
            raise ValueError(
                f"quantize_state found no moments of the shapes of parameters, of {paths}. It is for optimizers that "
                "treat each number by itself. For example: quantize_state(optax.adamw(1e-3))."
            )
        data = None if key is None else jnp.array(jax.random.key_data(key))  # of its own: a state may be donated
        return QuantizedMomentsState(inner_state, scales, data)

    implementation = None if key is None else jax.random.key_impl(key)
    return optax.GradientTransformationExtraArgs(init, QuantizedUpdate(inner, codes, implementation, elementwise))


def _choose_codes(bits: int) -> dict[str, MomentCode]:
    if bits != 8:
        raise ValueError(f"bits must be 8, got {quote(bits)}. For example: quantize_state(optax.adamw(1e-3), bits=8).")
    return CODES


def _check_block_size(block_size: int) -> None:
    is_fit = isinstance(block_size, int) and 16 <= block_size <= 4096 and block_size & (block_size - 1) == 0
    if not is_fit:
        raise ValueError(
            f"block_size must be a power of two from 16 to 4096, got {quote(block_size)}. For example: block_size=256."
        )


class _Choice:
    """Chooses the parameters whose moments are quantized, and the sides of their blocks."""

    def __init__(self, block_size: int, min_size: int, where: Where | None):
        self._block_size, self._min_size = block_size, min_size
        self._where = where if callable(where) or where is None else _compile_patterns(where)
        self._asked = where

    def __call__(self, params: PyTree) -> dict[Path, tuple[Shape, Shape]]:
        """By the paths of parameters their shapes and those of their blocks."""
        found = {path: self._covers(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        if self._where is not None and found and not any(found.values()):
            paths = ", ".join(quote(show_path(path)) for path in list(found)[:5])
            raise ValueError(
                f"where={self._asked!r} matches no parameter, of {paths}. A pattern matches a whole path, or the path "
                "of what a parameter is in. For example: where='.*kernel'."
            )
        fits = {
            path: (leaf.shape, choose_sides(leaf.shape, self._block_size))
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if found[path] and is_floating_dtype(leaf.dtype) and leaf.size >= self._min_size
        }
        return {path: (shape, sides) for path, (shape, sides) in fits.items() if sides is not None}

    def _covers(self, path: Path, leaf: Any) -> bool:
        text = show_path(path)
        if self._where is None:
            return not is_embedding(text)
        if callable(self._where):
            return bool(self._where(text, leaf))
        return any(pattern.fullmatch(place) for place in list_paths_to(text) for pattern in self._where)


def show_path(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_embedding(path: str) -> bool:
    """Whether a parameter's path says that it is a table of embeddings.

    >>> is_embedding("decoder/token_embedding/table"), is_embedding("wte"), is_embedding("blocks/0/kernel")
    (True, True, False)
    """
    return _EMBEDDING.fullmatch(path) is not None


def _compile_patterns(where: str | Sequence[str]) -> list[re.Pattern[str]]:
    try:
        return [re.compile(pattern) for pattern in ([where] if isinstance(where, str) else where)]
    except (re.error, TypeError) as error:
        raise ValueError(
            f"where={where!r} holds what is no regular expression: {error}. For example: where='.*kernel'."
        ) from None


def _quantize_first(
    inner: Transformation, params: PyTree, sides: dict[Path, tuple[Shape, Shape]], codes: dict[str, MomentCode]
) -> tuple[Any, tuple[Any, ...]]:
    """The first state of an optimizer in blocks, and its scales."""
    inner_state = inner.init(params)
    constants = iter(find_constants(jax.make_jaxpr(inner.init)(params).jaxpr))
    scales = []

    def write(role: str, field: PyTree) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(field)
        written = [_write(leaf, sides.get(path), codes[role], next(constants)) for path, leaf in leaves]
        scales.append(structure.unflatten([scale for _, scale in written]))
        return structure.unflatten([moment for moment, _ in written])

    def skip(leaf: Any) -> Any:
        next(constants)
        return leaf

    return map_moments(write, inner_state, skip), tuple(scales)


def _write(
    moment: Any, fit: tuple[Shape, Shape] | None, code: MomentCode, constant: float | None
) -> tuple[jax.Array, jax.Array]:
    """The codes of a first moment and its scales; the moment itself and a one, where it is not quantized."""
    if fit is None or fit[0] != moment.shape:
        return moment, jnp.ones((1,) * moment.ndim, jnp.float32)
    if constant is None:
        return quantize(jnp.asarray(moment, jnp.float32), code, fit[1])
    # Codes of zeros are written as such: XLA would encode a constant array when it compiles, which takes long.
    first = code.encode(jnp.sign(jnp.float32(constant)))
    scale = jnp.full(scale_shape(moment.shape, fit[1]), abs(constant), jnp.float32)
    return jnp.full_like(moment, first, jnp.uint8), place_alike(scale, moment)
