"""Mixed precision for JAX and Flax: dtype policies, loss scaling, and reports of the dtype of each operation.

`import jmp_policy as jmp` replaces DeepMind's `jmp`. Flax and optax are loaded when they are first needed.

Dtype policies:

- `with_policy` gives a function or a Flax module a policy. `policy_of` returns it, and `explain` shows its effects.
- `autocast` casts each operation of a function, by tables that `AutocastRules` changes.
- `Policy` has three dtypes, `PolicyMap` has policies by module path; `get_policy` makes both from strings and configs.
- `default_policy`, `set_default_policy` and `use_policy` read and set the policy of `with_policy` without a policy.
- `force_full_precision` keeps a function in float32.
- `cast_floating`, `cast_to_half`, `cast_to_full` and `half_dtype` cast trees.
- `tune` finds the smallest set of modules that must stay in float32 to keep results within a tolerance. It returns a
  `Tuning`, with a `Trial` for each step of its search.

Loss scaling:

- `value_and_grad` and `grad` scale the loss and return true gradients.
- `DynamicLossScale`, `StaticLossScale` and `NoOpLossScale` are the scales; `LossScale` is their base class.
- `get_loss_scale` finds the scale in a state, and `metrics` returns its values for a logger.
- `all_finite` and `select_tree` are for custom training loops.
- `convert_state` converts a checkpoint to the state of a run under another policy.

Packages, each with a list like this one (`help(jmp.optim)`):

- `optim`: optimizers that skip non-finite steps, and half-precision parameters.
- `linen`, `nnx`: additions for the two APIs of Flax.
- `numerics`: audit, statistics and debugging of non-finite values.
- `quant`: weights in 8 and 4 bits, and training in float8.
- `sharding`: dtypes of data that moves between devices.
- `compat`: the names of Keras, and of PyTorch's `GradScaler`.
- `contrib`: proofs about overflow, differences of two runs, `gptq`, `awq` and `tune_bits`. Names may change.
"""

import typing as _typing

from ._base import (  # importing `_base` also makes its JAX contexts, before anything is compiled
    cast_floating as cast_floating,
    cast_to_full as cast_to_full,
    cast_to_half as cast_to_half,
    half_dtype as half_dtype,
    load_lazily as _load_lazily,
)
from .autocast import autocast as autocast  # the function has the name of its package
from .gradients import grad as grad, value_and_grad as value_and_grad
from .loss_scale import (
    DynamicLossScale as DynamicLossScale,
    LossScale as LossScale,
    NoOpLossScale as NoOpLossScale,
    StaticLossScale as StaticLossScale,
    all_finite as all_finite,
    get_loss_scale as get_loss_scale,
    metrics as metrics,
    select_tree as select_tree,
)
from .modules import force_full_precision as force_full_precision, policy_of as policy_of, with_policy as with_policy
from .policy import (
    Policy as Policy,
    PolicyMap as PolicyMap,
    default_policy as default_policy,
    get_policy as get_policy,
    set_default_policy as set_default_policy,
    use_policy as use_policy,
)

if _typing.TYPE_CHECKING:
    from . import (
        compat as compat,
        contrib as contrib,
        linen as linen,
        nnx as nnx,
        numerics as numerics,
        optim as optim,
        quant as quant,
        sharding as sharding,
    )
    from .autocast import AutocastRules as AutocastRules
    from .checkpoints import convert_state as convert_state
    from .numerics import Trial as Trial, Tuning as Tuning, explain as explain, tune as tune

__version__ = "0.4.0"

# Most of them import Flax or optax.
_LAZY = ("compat", "contrib", "linen", "nnx", "numerics", "optim", "quant", "sharding")

_SOURCES = {
    **dict.fromkeys(_LAZY, ""),
    "autocast": "AutocastRules",
    "checkpoints": "convert_state",
    "numerics": "numerics Trial Tuning explain tune",
}

_UNLISTED = "LossScale Trial Tuning checkpoints cli gradients loss_scale modules policy report"
"""Result types, a base class, and packages whose names stand here: `dir` leaves them out."""

_ELSEWHERE = {
    **{name: f"numerics.{name}" for name in ("audit", "collect", "first_nonfinite", "predict")},
    **{name: f"contrib.{name}" for name in ("BitRow", "awq", "certify", "diverge", "gptq")},
    **{name: f"optim.{name}" for name in ("loss_scaled", "master_weights", "minimize", "skip_nonfinite", "step")},
    **{name: f"quant.{name}" for name in ("calibrate", "dot_general", "quantize")},
    "gather_params": "sharding.gather_params",
    "GradScaler": "DynamicLossScale, with value_and_grad and optim.loss_scaled",
    "amp": "autocast, and optim.loss_scaled in place of a GradScaler",
    "MixedPrecisionPolicy": "Policy, with reduce_dtype",
    "DTypePolicy": "get_policy, or compat.keras.DTypePolicy",
    **dict.fromkeys(
        ("mixed_precision", "set_dtype_policy", "set_global_policy"),
        "set_default_policy, for with_policy(model) and autocast(fun) without a policy",
    ),
    "DynamicScale": "DynamicLossScale",
    "LossScaleOptimizer": "compat.keras.LossScaleOptimizer, or optim.loss_scaled",
    "TrainState": "linen.TrainState",
}
"""The places of names that users look for here."""

if not _typing.TYPE_CHECKING:  # a type checker would accept any misspelled name
    __getattr__, __dir__ = _load_lazily(__name__, _SOURCES, globals(), unlisted=_UNLISTED, elsewhere=_ELSEWHERE)
