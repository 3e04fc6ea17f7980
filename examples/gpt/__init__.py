"""A small GPT trained in mixed precision on real text, and what its command line needs.

Needs `pip install 'jmp-policy[demo]'`. The library never imports this.
"""

from jmp_policy.cli import UserError as UserError
from jmp_policy.cli.doctor import (
    Diagnosis as Diagnosis,
    MatmulRate as MatmulRate,
    Recommendation as Recommendation,
    diagnose as diagnose,
)

from ._compare import CompareOptions as CompareOptions, compare as compare
from ._data import (
    Corpus as Corpus,
    load_corpus as load_corpus,
    sample_batch as sample_batch,
    validation_batches as validation_batches,
)
from ._gpt import (
    GPTConfig as GPTConfig,
    TrainerConfig as TrainerConfig,
    cross_entropy as cross_entropy,
    split_windows as split_windows,
)
from ._gpt_linen import GPT as _GPT
from ._mesh import MeshShape as MeshShape
from ._open_run import TrainOptions as TrainOptions
from ._summary import RunSummary as RunSummary, ScaleHistory as ScaleHistory, StepFacts as StepFacts
from ._train import TrainResult as TrainResult, train as train
from ._trainer import Trainer as Trainer, make_trainer as make_trainer, measure_bits_per_byte as measure_bits_per_byte
from ._verdict import VariantResult as VariantResult, explain_underflow as explain_underflow, judge as judge

LinenGPT = _GPT  # there is one in nnx, too
