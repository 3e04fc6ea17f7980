"""Policies on Flax linen modules, and a train state in which a skipped step changes nothing: `TrainState`."""

import sys as _sys

from ._train_state import TrainState as TrainState

if "jmp_policy.quant" in _sys.modules:  # it was loaded before Flax
    from ..quant import register_weights_with_flax as _register_with_flax

    _register_with_flax()
