"""A small GPT trained in mixed precision on real text, and what its command line needs.

Needs `pip install 'jmp-policy[demo]'`. The library never imports this.
"""

from ..cli._command import UserError as UserError
from ._compare import CompareOptions as CompareOptions, VariantResult as VariantResult, compare as compare
from ._doctor import (
    Diagnosis as Diagnosis,
    MatmulRate as MatmulRate,
    Recommendation as Recommendation,
    diagnose as diagnose,
)
from ._gpt import GPTConfig as GPTConfig
from ._summary import RunSummary as RunSummary, ScaleHistory as ScaleHistory, StepFacts as StepFacts
from ._train import TrainOptions as TrainOptions, TrainResult as TrainResult, train as train
