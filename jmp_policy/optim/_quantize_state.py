"""`quantize_state`: moments of optimizers in 8 bits."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._base import PyTree, is_floating_dtype, list_paths_to, quote
from ._elementwise import find_constants
from ._moment_blocks import Shape, choose_sides, place_alike, quantize_moment, scale_shape
from ._moment_codes import DYNAMIC, MU, NU, UNSIGNED_FLOAT, MomentCode, find_step, map_moments
from ._quantized_update import QuantizedMomentsState, QuantizedUpdate
from ._stochastic_rounding import check_key
from ._transformation import Transformation, check_not_loss_scaled, check_not_outermost, check_transformation

Path = tuple[Any, ...]

Where = Callable[[str, Any], bool] | str | Sequence[str]

CODES: dict[str, MomentCode] = {MU: DYNAMIC, NU: UNSIGNED_FLOAT}
_EMBEDDING = re.compile(r"(.*/)?([^/]*embed[^/]*|w[tp]e)(/.*)?", re.IGNORECASE)


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

    AdamW stores two float32 values per parameter, 8 bytes; here 2.03. A moment is split into blocks of 256 elements,
    each with a float32 scale, its largest element. First moments use the dynamic code, which has the highest precision
    near the largest elements and covers seven decades below. Second moments use unsigned floats with 5 exponent and 3
    mantissa bits; a nonzero value never becomes zero, because parameters are divided by its root.

    Moments are rounded up or down by a threshold that differs for each element and changes in each step, so that
    changes smaller than a code add up. This needs no key and repeats exactly. With `b2` from 0.9 to 0.999 and gradients
    that were constant, noisy, sparse, or grew and shrank at different rates, the norms of AdamW's updates stayed within
    2 % over 1,000 steps. Elements whose gradients are below a 10,000th of the largest in their block get smaller
    updates.

    A gradient that is not finite makes only its own update nan. If `inner` has second moments, a gradient above 2**62,
    whose square may overflow, counts as zero: AdamW would stop updating that element.

    An update decodes, computes in float32 and encodes one chunk of a parameter after the other, so that a whole float32
    moment never exists. The optimizer must be elementwise: clipping by the global norm, layer-wise rates or factored
    moments raise an error that names the op. Put clipping outside: `optax.chain(optax.clip_by_global_norm(1.0),
    quantize_state(optax.adamw(1e-3)))`.

    A block has 32 rows of 8 columns if the last two axes allow it. A parameter that is split over devices along
    multiples of these has whole blocks on each; codes and scales are sharded like it
    (`jmp_policy.sharding.state_shardings`). Moments
    with axes that blocks do not divide are not quantized. It goes next
    to the optimizer, inside all other transformations of `jmp_policy.optim`. `state_report` shows the result.

    Args:
      inner: the transformation to wrap.
      bits: 8.
      block_size: the largest number of elements per scale, a power of two from 16 to 4096.
      min_size: moments of parameters with fewer elements stay in float32.
      where: the parameters with quantized moments: regular expressions that match the path of a parameter or of a
        subtree, `"blocks/0/kernel"`, or a function `(path, param) -> bool`. By default all but embeddings, whose rows
        get gradients at different times: a path with a name that contains `embed`, or is `wte` or `wpe`.
      stochastic: a random key, `jax.random.key(seed)`, for thresholds that are random numbers.
      elementwise: `False` runs any `inner` on whole float32 moments, which are quantized between steps.

    Returns:
      A transformation whose state is a `QuantizedMomentsState`.

    Raises:
      TypeError: `inner` is not an optax transformation, or `stochastic` is not one random key.
      ValueError: `bits` or `block_size` is invalid; `inner` goes outside of `quantize_state`; at `init`, `inner` has no
        moments with the shapes of parameters, or `where` matches no parameter; in a step, `inner` is not elementwise.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> state = jmp.optim.quantize_state(optax.adamw(1e-3)).init({"w": jnp.ones((128, 64)), "b": jnp.ones(64)})
    >>> state.inner_state[0].mu["w"].dtype, state.scales[0]["w"].shape, state.inner_state[0].mu["b"].dtype
    (dtype('uint8'), (4, 8), dtype('float32'))
    """
    check_transformation(inner)
    check_not_outermost(inner, "quantize_state")
    if bits != 8:
        raise ValueError(f"bits must be 8, got {quote(bits)}. For example: quantize_state(optax.adamw(1e-3), bits=8).")
    if not (isinstance(block_size, int) and 16 <= block_size <= 4096 and block_size & (block_size - 1) == 0):
        raise ValueError(
            f"block_size must be a power of two from 16 to 4096, got {quote(block_size)}. For example: block_size=256."
        )
    if where is not None and not callable(where):
        _compile_patterns(where)
    key = None if stochastic is None else check_key(stochastic, "stochastic")

    def init(params: PyTree) -> Any:
        chosen = _choose_parameters(params, block_size, min_size, where)
        inner_state, scales = _quantize_first(inner, params, chosen)
        check_not_loss_scaled(inner_state, "quantize_state")
        if not scales:
            raise ValueError(
                "quantize_state is for optimizers with moments, but the state of this one has none. For example: "
                "quantize_state(optax.adamw(1e-3))."
            )
        if chosen and not any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(inner_state)):
            paths = ", ".join(quote(show_path(path)) for path in list(chosen)[:5])
            raise ValueError(
                f"quantize_state found no moments with the shape of a parameter: {paths}. It is for elementwise "
                "optimizers. For example: quantize_state(optax.adamw(1e-3))."
            )
        if key is not None:
            data = jnp.array(jax.random.key_data(key))  # a copy: the state may be donated
        else:
            data = jnp.uint32(0) if find_step(inner_state) is None else None
        return QuantizedMomentsState(inner_state, scales, data)

    implementation = None if key is None else jax.random.key_impl(key)
    return optax.GradientTransformationExtraArgs(init, QuantizedUpdate(inner, CODES, implementation, elementwise))


def _choose_parameters(
    params: PyTree, block_size: int, min_size: int, where: Where | None
) -> dict[Path, tuple[Shape, Shape]]:
    """Chooses the parameters with quantized moments. Returns their shapes and the sides of their blocks, by path."""
    keyed = dict(jax.tree_util.tree_leaves_with_path(params))
    patterns = None if callable(where) or where is None else _compile_patterns(where)

    def is_covered(path: Path, leaf: Any) -> bool:
        text = show_path(path)
        if patterns is not None:
            return any(pattern.fullmatch(place) for place in list_paths_to(text) for pattern in patterns)
        return bool(where(text, leaf)) if callable(where) else not is_embedding(text)

    covered = {path: leaf for path, leaf in keyed.items() if is_covered(path, leaf)}
    if where is not None and keyed and not covered:
        paths = ", ".join(quote(show_path(path)) for path in list(keyed)[:5])
        raise ValueError(
            f"where={where!r} matches no parameter of {paths}. A pattern matches a whole path, or the path of a "
            "subtree. For example: where='.*kernel'."
        )
    large = {path: leaf for path, leaf in covered.items() if is_floating_dtype(leaf.dtype) and leaf.size >= min_size}
    fits = {path: (leaf.shape, choose_sides(leaf.shape, block_size)) for path, leaf in large.items()}
    return {path: (shape, sides) for path, (shape, sides) in fits.items() if sides is not None}


def show_path(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_embedding(path: str) -> bool:
    """True if a parameter's path names a table of embeddings.

    >>> is_embedding("decoder/token_embedding/table"), is_embedding("wte"), is_embedding("blocks/0/kernel")
    (True, True, False)
    """
    return _EMBEDDING.fullmatch(path) is not None


def _compile_patterns(where: str | Sequence[str]) -> list[re.Pattern[str]]:
    try:
        return [re.compile(pattern) for pattern in ([where] if isinstance(where, str) else where)]
    except (re.error, TypeError) as error:
        raise ValueError(
            f"where={where!r} contains an invalid regular expression: {error}. For example: where='.*kernel'."
        ) from None


def _quantize_first(
    inner: Transformation, params: PyTree, sides: dict[Path, tuple[Shape, Shape]]
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the initial state of an optimizer with quantized moments, and its scales."""
    inner_state = inner.init(params)
    constants = iter(find_constants(jax.make_jaxpr(inner.init)(params).jaxpr))
    scales = []

    def write(role: str, field: PyTree) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(field)
        written = [_write(leaf, sides.get(path), CODES[role], next(constants)) for path, leaf in leaves]
        scales.append(structure.unflatten([scale for _, scale in written]))
        return structure.unflatten([moment for moment, _ in written])

    def skip(leaf: Any) -> Any:
        next(constants)
        return leaf

    return map_moments(write, inner_state, skip), tuple(scales)


def _write(
    moment: Any, fit: tuple[Shape, Shape] | None, code: MomentCode, constant: float | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes and scales of an initial moment, or the moment itself and a one if it is not quantized."""
    if fit is None or fit[0] != moment.shape:
        return moment, jnp.ones((1,) * moment.ndim, jnp.float32)
    if constant is None:
        return quantize_moment(jnp.asarray(moment, jnp.float32), code, fit[1])
    # Encodes one element: XLA would encode a constant array at compile time, which is slow.
    first = code.encode(jnp.sign(jnp.float32(constant)))
    scale = jnp.full(scale_shape(moment.shape, fit[1]), abs(constant), jnp.float32)
    return jnp.full_like(moment, first, jnp.uint8), place_alike(scale, moment)
