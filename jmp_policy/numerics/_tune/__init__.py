"""`tune`: finds by trial which scopes must stay in float32."""

from ._search import Trial as Trial
from ._tune import tune as tune
from ._tuning import FLOOR as FLOOR, BitRow as BitRow, Tuning as Tuning
