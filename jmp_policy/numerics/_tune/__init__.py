"""`tune`: which scopes must stay in float32, found by trying."""

from ._trial_log import Trial as Trial
from ._tune import tune as tune
from ._tuning import Tuning as Tuning
