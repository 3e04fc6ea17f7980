"""`tune`: finds by trial which scopes must stay in float32."""

from ._trial_log import Trial as Trial
from ._tune import tune as tune
from ._tuning import BitRow as BitRow, Tuning as Tuning
