"""The weights that nnx modules multiply by in their own code, where no layer of Flax does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from .._base import REWRITING, Args, Kwargs, drop_value_key, is_array, is_floating
from ..policy import list_policies
from ..quant import find_accumulate_dtype, is_observing
from ._layer_table import find_layer
from ._lift import lift
from ._module_spec import ModuleSpec, find_spec
from ._shadow import NodeKind, find_kind

if TYPE_CHECKING:
    from ..autocast import WeightFormat


def is_rewritten(module: nnx.Module, spec: ModuleSpec) -> bool:
    """True if a call of a module begins to rewrite the matmuls inside by their weights: of the attached one.

    Under `jax.disable_jit` hooks need the values of modules inside, so that each module without any begins for itself.
    """
    if REWRITING.value or is_observing():
        return False
    if all(policy.quantization is None for policy in list_policies(spec.given)):
        return False
    is_outermost = spec.attached
    if jax.config.jax_disable_jit:
        is_outermost = find_layer(spec.base) is None and len(list(nnx.iter_modules(module))) == 1
    return is_outermost and any(True for _ in _list_weights(module))


def call_rewritten(call: Callable[..., Any], module: nnx.Module, path: str, args: Args, kwargs: Kwargs) -> Any:
    """Calls `call(module, *args, **kwargs)` with the matmuls by weights of the model, at a path, quantized."""
    from ..autocast import quantize_products  # loads the rewriter

    weights = dict(_list_weights(module))

    def call_inside(*args: Any, **kwargs: Any) -> Any:
        with REWRITING(True):
            return call(*args, **kwargs)

    def find_formats(state: Any) -> list[Any]:
        found: list[Any] = []
        for keys, leaf in jax.tree.leaves_with_path(state):
            if is_array(leaf):
                # The first keys are the index in `(args, kwargs)`, and that of the module in `args`.
                which, argument, *names = [jax.tree_util.keystr((key,), simple=True) for key in drop_value_key(keys)]
                here = "/".join(names) if (which, argument) == ("0", "0") else None
                found.append((f"{path}/{here}".lstrip("/"), weights[here]) if here in weights else None)
        return found

    run = lambda pure, state: quantize_products(pure, (state,), {}, lambda: find_formats(state))
    return lift(run, call_inside, (module, *args), kwargs)


def _list_weights(model: nnx.Module) -> Iterator[tuple[str, WeightFormat]]:
    """Yields the path and format of each Param of two or more axes, but those of Flax's own modules and of LoRA.

    The table of an `nnx.Embed` is among them: the code around may multiply by it.
    """
    from ..autocast import WeightFormat

    nodes = dict(nnx.iter_graph(model, graph=True))
    for path, node in nodes.items():
        if find_kind(type(node)) is not NodeKind.PARAM or isinstance(node, nnx.LoRAParam):
            continue
        value = node.get_raw_value()
        if not is_array(value) or not is_floating(value) or value.ndim < 2:
            continue
        around = (nodes[path[:n]] for n in reversed(range(len(path))) if path[:n] in nodes)
        owner = next(node for node in around if find_kind(type(node)) is NodeKind.MODULE)
        spec = find_spec(owner)
        if spec is None or spec.policy.quantization is None:
            continue
        is_table = issubclass(spec.base, nnx.Embed) and path[-1] == "embedding"
        is_of_flax = find_layer(spec.base) is not None or spec.base.__module__.startswith("flax.nnx.")
        if is_table or not is_of_flax:
            accumulate = find_accumulate_dtype(spec.policy)
            yield "/".join(map(str, path)), WeightFormat(spec.policy.quantization, accumulate, is_of_layer=is_table)
