"""New tools, and algorithms of papers that are still changing. Names and arguments may change in any version.

- `certify` returns a `Certificate`: a proof that a small function cannot overflow or divide by zero for inputs in given
  ranges, or an input that breaks it.
- `diverge` runs two functions of one model, and returns a `Divergence`: the scopes that introduce their difference. Its
  rows are `ScopeErrors`, with the `Worst` element of each, and its outputs `OutputErrors`. `record` saves the values of
  one process, to compare with in another.
- `parity` compares the log-probabilities of a trainer and a sampler, and returns a `Parity`: statistics, the scopes
  that make them differ, and causes other than rounding.
- `gptq` and `awq` quantize the weights of a model like `quant.quantize`, rounded for the inputs that data gives them.
- `read_quantized` reads checkpoints that other libraries quantized (GPTQ, AWQ, compressed-tensors, MXFP4) into the
  state of a model, bit for bit, and `write_quantized` writes them. `policy_of_checkpoint` returns their policy.
- `tune_bits` finds the quantized format of each layer within a number of bits per weight. It returns a `BitTuning`,
  with a `BitRow` for each point of its curve.
"""

import typing as _typing

from .._base import load_lazily as _load_lazily

if _typing.TYPE_CHECKING:
    from ._bit_tuning import BitRow as BitRow, BitTuning as BitTuning
    from ._certify import Certificate as Certificate, certify as certify
    from ._checkpoint_files import policy_of_checkpoint as policy_of_checkpoint
    from ._diverge import (
        Divergence as Divergence,
        OutputErrors as OutputErrors,
        ScopeErrors as ScopeErrors,
        Worst as Worst,
        diverge as diverge,
        record as record,
    )
    from ._gptq_awq import awq as awq, gptq as gptq
    from ._parity import Parity as Parity, parity as parity
    from ._read_quantized import read_quantized as read_quantized
    from ._tune_bits import tune_bits as tune_bits
    from ._write_quantized import write_quantized as write_quantized
else:  # none of them needs another
    _SOURCES = {
        "_bit_tuning": "BitRow BitTuning",
        "_certify": "Certificate certify",
        "_checkpoint_files": "policy_of_checkpoint",
        "_diverge": "Divergence OutputErrors ScopeErrors Worst diverge record",
        "_gptq_awq": "awq gptq",
        "_parity": "Parity parity",
        "_read_quantized": "read_quantized",
        "_tune_bits": "tune_bits",
        "_write_quantized": "write_quantized",
    }
    __getattr__, __dir__ = _load_lazily(
        __name__,
        _SOURCES,
        globals(),
        unlisted="BitRow BitTuning Certificate Divergence OutputErrors Parity ScopeErrors Worst",
    )
