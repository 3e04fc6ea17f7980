"""The weights that nnx modules multiply by in their own code, where no layer of Flax does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from flax import nnx

from .._base import REWRITING, Args, Kwargs, is_array, is_floating
from ..modules import hide_constants, show_constants
from ..policy import Policy, PolicyMap, list_policies
from ..quant import find_accumulate_dtype, is_quantized
from ._layer_table import find_layer
from ._lift import lift
from ._module_spec import ModuleSpec, find_spec, plan_again
from ._products import QuantizedParam
from ._shadow import NodeKind, find_kind

if TYPE_CHECKING:
    from ..autocast import WeightFormat


def is_rewritten(module: nnx.Module, spec: ModuleSpec, is_outermost: bool) -> bool:
    """True if a call of a module begins to rewrite the matmuls inside by their weights: of the outermost one."""
    if all(policy.quantization is None for policy in list_policies(spec.given)):
        return False
    return is_outermost and any(True for _ in list_own_weights(module))


def call_rewritten(
    call: Callable[..., Any], module: nnx.Module, given: Policy | PolicyMap, path: str, args: Args, kwargs: Kwargs
) -> Any:
    """Calls `call(module, *args, **kwargs)` with the matmuls by weights of the model, at a path, quantized."""
    from ..autocast import Weights, quantize_products  # loads the rewriter

    outer = f"{path}/".lstrip("/")
    known = {own.key: own for own in list_own_weights(module)}

    def call_inside(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = show_constants((args, kwargs))
        with REWRITING(True):
            return call(*args, **kwargs)

    def find_weights(state: Any) -> Weights:
        found = Weights({}, {})
        leaves = ((keys, leaf) for keys, leaf in jax.tree.leaves_with_path(state) if is_array(leaf))
        for number, (keys, _) in enumerate(leaves):
            # The first keys are indices: in `(args, kwargs)`, and of the module in `args`.
            which, argument, *names = [jax.tree_util.keystr((key,), simple=True) for key in keys]
            own = known.get("/".join(names)) if (which, argument) == ("0", "0") else None
            if own is not None and is_quantized(own.value):
                found.stored[number] = outer + own.path, own.value
            elif own is not None:
                found.floating[number] = outer + own.path, own.format
        return found

    run = lambda pure, state: quantize_products(pure, (state,), given, lambda: find_weights(state))
    args, kwargs = hide_constants((args, kwargs))
    return lift(run, call_inside, (module, *args), kwargs)


class OwnParam(NamedTuple):
    """A weight that the code of a module multiplies by, without a layer of Flax."""

    path: str
    key: str  # the place of its array in the state of the model
    variable: nnx.Variable
    value: Any  # the array or stored weight; or one array of a Param that holds a tree of them
    policy: Policy
    format: WeightFormat


def list_own_weights(model: nnx.Module) -> Iterator[OwnParam]:
    """Yields the Params of two or more axes, outside of Flax's own modules and LoRA, and stored weights alike.

    The quantized table of an `nnx.Embed` is among them: the code around may multiply by it.
    """
    from ..autocast import WeightFormat

    nodes = dict(nnx.iter_graph(model, graph=True))
    for path, node in nodes.items():
        is_param = find_kind(type(node)) is NodeKind.PARAM and not isinstance(node, nnx.LoRAParam)
        if not is_param and not isinstance(node, QuantizedParam):
            continue
        around = (nodes[path[:n]] for n in reversed(range(len(path))) if path[:n] in nodes)
        owner = next(node for node in around if find_kind(type(node)) is NodeKind.MODULE)
        spec = find_spec(owner)
        if spec is None or spec.policy.quantization is None:
            continue
        is_table = is_param and issubclass(spec.base, nnx.Embed) and path[-1] == "embedding"
        is_table = is_table and plan_again(owner, spec)[1].format is not None
        if is_table or not is_of_flax(spec.base):
            accumulate = find_accumulate_dtype(spec.policy)
            format = WeightFormat(spec.policy.quantization, accumulate, is_table=is_table, is_of_layer=is_table)
            here = "/".join(map(str, path))
            for keys, value in jax.tree.leaves_with_path(node.get_raw_value(), is_leaf=is_quantized):
                rest = "".join(f"/{jax.tree_util.keystr((key,), simple=True)}" for key in keys)
                if is_quantized(value):
                    yield OwnParam(here + rest, f"{here}/value{rest}/values", node, value, spec.policy, format)
                elif is_floating(value) and value.ndim > 1:
                    own = format._replace(is_part=bool(keys))
                    yield OwnParam(here + rest, f"{here}/value{rest}", node, value, spec.policy, own)


def is_of_flax(base: type) -> bool:
    """True for a class of Flax's modules, or a subclass of a layer."""
    return find_layer(base) is not None or base.__module__.startswith("flax.nnx.")
