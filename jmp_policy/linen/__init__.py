"""Policies on Flax linen modules, and a train state in which a skipped step changes nothing."""

from ._train_state import TrainState as TrainState
