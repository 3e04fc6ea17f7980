"""Policies on Flax linen modules, and a train state in which a skipped step changes nothing: `TrainState`."""

from ..quant._weights import register_with_flax as _register_with_flax
from ._train_state import TrainState as TrainState

_register_with_flax()
