"""`tune`: finds by trial which scopes must stay in float32."""

from ._search import Ranking as Ranking, Trial as Trial, TrialLog as TrialLog
from ._subject import Subject as Subject, is_loss as is_loss
from ._tune import check_budget as check_budget, name_metric as name_metric, tune as tune
from ._tuning import CHOSEN as CHOSEN, Tuning as Tuning
