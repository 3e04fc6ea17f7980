"""Mixed precision for Flax nnx: what its optimizer and its gradients need on top of `with_policy`.

- `Optimizer` skips steps that overflowed.
- `value_and_grad` and `grad` scale the loss and return true gradients.
- `cast_params` stores the Params of a model in the param dtype of a policy.
- `set_rounding_rngs` gives the layers of a policy with stochastic rounding their keys.
- `QuantizedParam` and `Float8State` are the Variables of quantized weights and of float8 layers.
"""

import sys as _sys
import typing as _typing

from .._base import load_lazily as _load_lazily
from ._grad import grad as grad, value_and_grad as value_and_grad
from ._layer_state import Float8State as Float8State  # also registers its name with nnx
from ._optimizer import Optimizer as Optimizer

if "jmp_policy.quant" in _sys.modules:  # it was loaded before Flax
    from ..quant import register_weights_with_flax as _register_with_flax

    _register_with_flax()
if _typing.TYPE_CHECKING:
    from ._decorate import cast_params as cast_params
    from ._layer_table import set_rounding_rngs as set_rounding_rngs
    from ._products import QuantizedParam as QuantizedParam
else:  # load everything that changes layers
    _SOURCES = {"_decorate": "cast_params", "_layer_table": "set_rounding_rngs", "_products": "QuantizedParam"}
    __getattr__, __dir__ = _load_lazily(__name__, _SOURCES, globals(), unlisted="Float8State QuantizedParam")
