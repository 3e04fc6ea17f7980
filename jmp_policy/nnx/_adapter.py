"""`NNX`: what the library asks of nnx."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._base import Args, Kwargs, PyTree, warn_user
from ..modules import Adapter, Hook, Method
from ..policy import Policy, PolicyMap
from ..quant import QuantizedArray
from ..quant._layers import Promote, read_narrow
from ._attachment import AUTOCAST_EXAMPLE, Attachment, reject_param
from ._calls import find_modules, hook_calls
from ._decorate import attach_wrapped, decorate_class, find_given_policy
from ._explain import examine, find_method
from ._grad import value_and_grad
from ._layer_table import LayerWeight, find_weight, weight_name
from ._lift import lift
from ._methods import parse_keep
from ._module_spec import ModuleSpec, find_spec
from ._quantized import QuantizedParam


class _Nnx:
    """The adapter of nnx. Its modules hold their Variables, and a call may write to them."""

    autocast_example = AUTOCAST_EXAMPLE
    audit_example = "audit(lambda model, x: model(x))(model, x)"

    def attach(self, target: Any, policy: Policy | PolicyMap, keep: Collection[str]) -> Any:
        """Returns an nnx module or module class with a policy.

        A module is copied, with the modules inside it, and shares its Variables with the copy. A class gives a subclass
        of the same name, whose instances get the policy when their constructor ends.

        Raises:
          ValueError: a Param is stored in another dtype than the param dtype, or `keep` names no argument.
        """
        base = target if isinstance(target, type) else type(target)
        names = parse_keep(base, keep)
        if isinstance(target, type):
            return decorate_class(target, policy, names)
        attachment = Attachment(policy, reject_param, keep=names)
        module = attachment.attach(target)
        for message in (*attachment.explain_unused_rules(), *attachment.explain_written_dtypes()):
            warn_user(message)
        return module

    def policy_of(self, target: Any) -> Policy | PolicyMap | None:
        """Returns the policy that a module or class was given, by itself or by a rule of a map that names it."""
        if isinstance(target, type):
            return find_given_policy(target)
        spec = find_spec(target)
        if spec is None or not spec.casts:
            return None
        return spec.given if spec.attached else spec.policy

    def hook_calls(self, fun: Callable[..., Any], hook: Hook, *, setup: bool = False) -> Callable[..., Any]:
        """Returns the same function, in which a hook runs in place of each method of a module among its arguments."""
        return hook_calls(fun, hook)

    def find_modules(self, arguments: PyTree) -> dict[str, type]:
        """Returns the classes, by path, of the modules among some arguments."""
        return find_modules(arguments)

    def bind(self, model: nnx.Module, variables: Any) -> nnx.Module:
        """Returns the model, which has its variables.

        Raises:
          ValueError: it is given others.
        """
        if variables is not None:
            raise ValueError("variables are those of a linen module; an nnx model has its own.")
        return model

    def run(self, model: nnx.Module, inputs: Args, method: Method, kwargs: Kwargs, hook: Hook) -> Any:
        """Calls a copy of a model under a hook."""

        def call(copy: nnx.Module) -> Any:  # the inputs are not arguments: modules among them are not hooked
            return find_method(copy, method)(*inputs, **kwargs)

        return hook_calls(call, hook)(nnx.clone(model))

    examine = staticmethod(examine)
    value_and_grad = staticmethod(value_and_grad)

    def find_weights(self, model: nnx.Module) -> dict[str, Any]:
        """Returns the weights of a model that can be quantized, or are, by the path of their module."""
        weights = {}
        for path, module in nnx.iter_modules(model):
            spec = find_spec(module)
            found = find_weight(type(module) if spec is None else spec.base, vars(module))
            if found is not None:
                weights["/".join(map(str, path))] = found.value
        return weights

    def quantize(
        self, model: nnx.Module, policy: Policy | PolicyMap, quantize_weight: Callable[..., Any]
    ) -> tuple[nnx.Module, list[str]]:
        """Quantizes the weights of a copy of a model; see `jmp_policy.quant.quantize`."""
        spec = find_spec(model)
        attachment = Attachment(policy, reject_param, keep=spec.keep if spec else ())
        attached = attachment.attach(nnx.clone(model))
        # What became of what: a weight of two layers stays one. The values keep the ids in the keys alive.
        done: dict[Any, tuple[Any, nnx.Variable]] = {}
        for path, module in nnx.iter_modules(attached):
            spec = find_spec(module)
            weight = None if spec is None else find_weight(spec.base, vars(module))
            if spec is None or weight is None:
                continue
            name, mask = weight_name(spec.base), vars(module).get("mask")
            variable = vars(module)[name]
            # Layers that differ in any of these make different numbers of one weight.
            key = id(variable), id(mask), weight.layout, spec.policy.quantization
            if key not in done:
                new = _quantize_layer(quantize_weight, "/".join(map(str, path)), module, spec, weight)
                done[key] = (variable, mask), variable if new is None else QuantizedParam(new)
            vars(module)[name] = done[key][1]
            if mask is not None and done[key][1] is not variable:
                module.mask = None  # type: ignore[attr-defined]  # the stored numbers have it
        return attached, attachment.explain_unused_rules()

    attach_wrapped = staticmethod(attach_wrapped)

    def lift(self, run: Callable[..., Any], fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Runs a function of nnx objects by means of one that knows trees of arrays only."""
        return lift(run, fun, args, kwargs)


NNX: Adapter = _Nnx()


def _quantize_layer(
    quantize_weight: Callable[..., Any], path: str, module: nnx.Module, spec: ModuleSpec, weight: LayerWeight
) -> QuantizedArray | None:
    """The weight of a layer, quantized; `None` if it stays as it is."""
    is_ours = isinstance(read_narrow(vars(module)["promote_dtype"]), Promote)
    unfit = None if is_ours else "its author wrote the functions that it computes with"
    value, mask = weight.value, vars(module).get("mask")
    if mask is not None and not isinstance(value, QuantizedArray):
        value = _mask_kernel(value, mask)
    return quantize_weight(path, weight_name(spec.base), value, weight.layout, spec.policy, unfit)


def _mask_kernel(kernel: Any, mask: Any) -> Any:
    """A kernel as its convolution uses it; abstract, if it is."""
    is_abstract = isinstance(kernel, jax.ShapeDtypeStruct)
    return jax.eval_shape(jnp.multiply, kernel, mask) if is_abstract else kernel * mask
