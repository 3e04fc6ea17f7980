"""Policies on Flax linen modules, and a train state in which a skipped step changes nothing: `TrainState`."""

from ..quant import _serialization as _serialization
from ._train_state import TrainState as TrainState
