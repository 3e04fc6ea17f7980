"""Comparing a model with what quantization made of it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from .._base import Args, Kwargs, is_array, is_floating_dtype
from ..modules import Adapter, Method, ModuleCall, find_adapter
from ._comparison import Comparison, LayerComparison
from ._weights import QuantizedArray


def compare(before: Any, after: Any, *inputs: Any, method: Method = None, **kwargs: Any) -> Comparison:
    """Runs a model and its quantized self on the same inputs, and says what each layer lost and saved.

    Both run one operation after the other, so that the layers of a scan are seen as well.

    Args:
      before: the model as it was, with a policy or without: a bound linen module (`model.bind(variables)`), or an nnx
        model. It stays as it is.
      after: the same with quantized weights: `with_policy(model, policy).bind(quantize(variables, policy))`, or what
        `quantize` returns for an nnx model.
      *inputs: positional arguments of the method.
      method: what to call instead of the module itself, as for `explain`.
      **kwargs: other arguments of the call; of `apply`, for linen.

    Returns:
      A `Comparison`: a table when printed or shown in a notebook, `.plot()`, `.rows` and `.to_dict()` for programs.

    Raises:
      TypeError: one of the two is not a Flax module.
      ValueError: they are not the same model, or a linen module is not bound.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    >>> comparison = jmp.quant.compare(model, jmp.quant.quantize(model, "int8_from_float32"), jnp.ones((1, 64)))
    >>> row = comparison.rows[0]
    >>> row.quantization, row.bytes_before, row.bytes_after, row.weight_error < 0.01
    ('int8', 16384, 4352, True)
    """
    old, new = _weights(before), _weights(after)
    _check_same(old, new)
    wanted, got = _Outputs(old), _Outputs(old)
    whole = [_arrays(_run(*run, inputs, method, kwargs)) for run in ((before, wanted), (after, got))]
    rows = (
        _row(path, old[path], new[path], got.called.get(path), _error(wanted.by_path[path], got.by_path[path]))
        for path in dict.fromkeys([*wanted.called, *old])
    )
    return Comparison(tuple(rows), _error(*whole) or 0.0)


class _Called(NamedTuple):
    """What is told of a layer that was called.

    Attributes:
      type: the name of its class.
      quantization: what becomes of its weight, in the words of `explain`.
    """

    type: str
    quantization: str


class _Outputs:
    """What the layers of a model return.

    Args:
      paths: of the layers.

    Attributes:
      called: those that were called, by path, in the order of their first calls.
      by_path: the arrays that each returned, in the order of its calls.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.called: dict[str, _Called] = {}
        self.by_path: dict[str, list[Any]] = {path: [] for path in paths}
        self._running: set[str] = set()

    def hook(self, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a method of a module; of methods that call each other, the outermost one counts."""
        if call.path not in self.by_path or call.path in self._running:
            return next_fun(*args, **kwargs)
        if call.path not in self.called:
            self.called[call.path] = _Called(call.type.__name__, call.describe_quantization())
        self._running.add(call.path)
        try:
            out = next_fun(*args, **kwargs)
        finally:
            self._running.discard(call.path)
        self.by_path[call.path].extend(_arrays(out))
        return out


def _find_adapter(model: Any) -> Adapter:
    adapter = None if isinstance(model, type) else find_adapter(model)
    if adapter is None:
        raise TypeError(
            f"compare takes Flax modules, got {model!r}. For example: compare(model.bind(variables), "
            "with_policy(model, policy).bind(quantize(variables, policy)), x)."
        )
    return adapter


def _weights(model: Any) -> dict[str, Any]:
    adapter = _find_adapter(model)
    return adapter.find_weights(adapter.bind(model, None))


def _check_same(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Checks that two models have weights of the same shapes at the same paths."""
    for path in sorted(before.keys() | after.keys()):
        shapes = [weights[path].shape if path in weights else None for weights in (before, after)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"before and after are not the same model: the weight of {path!r} has the shapes {shapes[0]} and "
                f"{shapes[1]}."
            )
    if not before:
        raise ValueError("There is nothing to compare: the model has no 'kernel' or 'embedding' of two or more axes.")


def _run(model: Any, outputs: _Outputs, inputs: Args, method: Method, kwargs: Kwargs) -> Any:
    with jax.disable_jit():
        return _find_adapter(model).run(model, inputs, method, kwargs, outputs.hook)


def _row(path: str, before: Any, after: Any, called: _Called | None, error: float | None) -> LayerComparison:
    return LayerComparison(
        path=path,
        type="" if called is None else called.type,
        quantization=_quantization(after, called),
        bytes_before=before.nbytes,
        bytes_after=after.nbytes,
        weight_error=_error([_numbers(before)], [_numbers(after)]) or 0.0,
        output_error=error,
    )


def _quantization(weight: Any, called: _Called | None) -> str:
    if isinstance(weight, QuantizedArray):
        return str(weight.format)
    if called is None:
        return "left: not called"
    said = called.quantization or "left: no quantization in its policy"
    if said.startswith("left: "):
        return said
    # Float8 rounds the operands of products: weights are not stored in it, before or after.
    stored = "from a weight that stays as it is" if said.startswith("float8") else "and is yet to be quantized"
    return f"left: computes as {said}, {stored}"


def _numbers(weight: Any) -> Any:
    return weight.dequantize() if isinstance(weight, QuantizedArray) else weight


def _arrays(out: Any) -> list[Any]:
    """The floating arrays of a result, where they have numbers."""
    leaves = [leaf for leaf in jax.tree.leaves(out) if is_array(leaf) and is_floating_dtype(leaf.dtype)]
    return [] if any(isinstance(leaf, Tracer) for leaf in leaves) else leaves


def _error(before: Sequence[Any], after: Sequence[Any]) -> float | None:
    """The norm of the difference of some arrays, relative to the norm of the first ones; `None` without arrays."""
    if not before:
        return None
    lost = kept = 0.0
    for old, new in zip(before, after, strict=True):
        wide = np.asarray(old).astype(np.float64)
        lost += float(np.sum((np.asarray(new).astype(np.float64) - wide) ** 2))
        kept += float(np.sum(wide**2))
    if kept == 0:
        return 0.0 if lost == 0 else math.inf
    return math.sqrt(lost / kept)
