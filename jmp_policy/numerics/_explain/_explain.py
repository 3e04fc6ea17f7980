"""`explain`: which rule and which dtypes hold at each module of a model."""

from typing import Any

from ..._base import PyTree
from ...modules import Method, find_adapter
from ...modules.common import Observation
from ._build import build_explanation
from ._explanation import Explanation


def explain(model: Any, *inputs: Any, method: Method = None, rngs: PyTree = None, **kwargs: Any) -> Explanation:
    """Says what holds at each module of a Flax model: policy, rule, and the dtypes that are seen when it is called.

    The model is traced and not run: parameters and inputs are abstract, so that a model of any size is explained
    without allocating it. A linen module is initialised abstractly; an nnx module is copied, and `nnx.eval_shape`
    makes one without arrays. Rules of a `PolicyMap` that decide for no module are in the explanation, not warned of.
    Sums of many numbers in half precision are there, too: a policy reaches layers, and not functions such as
    `nn.avg_pool`. A model without a policy is explained as well.

    Args:
      model: a linen or nnx module, with a policy or without.
      *inputs: positional arguments of its method: arrays, or `jax.ShapeDtypeStruct`s in their place. Anything else,
        such as a Python bool, is passed on as it is.
      method: what to call instead of the module itself: the name of a method, a method, or a function of the module.
      rngs: for linen, a key or keys by name, as `Module.init` takes them, one that is made up if there are none; for
        nnx, the argument `rngs` of the method.
      **kwargs: keyword arguments of the method.

    Returns:
      An `Explanation`: a table when printed or shown in a notebook, `.rows` and `.to_dict()` for programs.

    Raises:
      TypeError: `model` is not a Flax module. What the model itself raises comes through.

    >>> import jax, jmp_policy as jmp
    >>> from flax import linen as nn
    >>> rules = jmp.PolicyMap({"layers_1": "float32", "layer_0": "float32"}, "mixed_bfloat16")
    >>> model = jmp.with_policy(nn.Sequential([nn.Dense(4), nn.LayerNorm()]), rules)
    >>> explanation = jmp.explain(model, jax.ShapeDtypeStruct((8, 3), "float32"))
    >>> [(row.path, row.rule, row.compute_dtypes) for row in explanation.rows]
    [('', 'default', ()), ('layers_0', 'default', ('bfloat16',)), ('layers_1', 'layers_1', ('float32',))]
    >>> explanation.total_bytes, explanation.unused
    (96, ("policy rule 'layer_0' matches no module; the closest path is 'layers_0'",))
    """
    adapter = None if isinstance(model, type) else find_adapter(model)
    if adapter is None:
        raise TypeError(
            f"explain takes a Flax module, got {model!r}. "
            "For example: explain(Net(), jax.ShapeDtypeStruct((8, 28, 28), 'float32'))."
        )
    observation = Observation()
    examined = adapter.examine(model, inputs, method, rngs, kwargs, observation.trace, observation.hook)
    return build_explanation(examined, observation)
