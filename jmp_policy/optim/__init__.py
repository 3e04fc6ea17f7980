"""Optimizers in mixed precision: skipping non-finite steps, and training half-precision parameters.

Non-finite steps:

- `loss_scaled` carries a loss scale and skips steps; its state is a `LossScaledState`.
- `skip_nonfinite` skips steps without a scale.
- `skip_spikes` skips steps with unusually large gradients or losses; its state is a `SpikeState`.
- `step` updates and applies, `minimize` builds a whole training step.
- `raise_if_stuck` raises an error if training is stuck.
- `find_origin` makes an `OriginFinder`, which finds the origin of a skipped step on the host, as a `SkippedStep` with a
  `BadGradient` per parameter, and judges it: a `Verdict`. `SkipLog` stores verdicts in a file.

Gradients:

- `accumulate` sums microbatches, `global_norm` measures, `clip_by_global_norm` clips; `sharding.pmean` averages.

Half-precision parameters:

- `master_weights` keeps float32 copies or the missing bits, `kahan` compensates rounding, `stochastic_rounding` rounds
  at random.
- `master_params` and `with_master_params` read and write the float32 values.
- `cast_state` stores moments in other dtypes, `quantize_state` in 8 bits. `state_report` lists the bytes of moments, a
  `MomentRow` each.
"""

import typing as _typing

from .._base import load_lazily as _load_lazily
from ._gradients import accumulate as accumulate, clip_by_global_norm as clip_by_global_norm, global_norm as global_norm
from ._loss_scaled import loss_scaled as loss_scaled, skip_nonfinite as skip_nonfinite
from ._step import step as step
from ._transformation import LossScaledState as LossScaledState

if _typing.TYPE_CHECKING:
    from ._cast_state import cast_state as cast_state
    from ._find_origin import OriginFinder as OriginFinder, find_origin as find_origin
    from ._master_weights import (
        MasterWeightsState as MasterWeightsState,
        SplitWeightsState as SplitWeightsState,
        master_params as master_params,
        master_weights as master_weights,
        with_master_params as with_master_params,
    )
    from ._minimize import minimize as minimize
    from ._quantize_state import quantize_state as quantize_state
    from ._quantized_update import QuantizedMomentsState as QuantizedMomentsState
    from ._skip_log import SkipLog as SkipLog
    from ._skip_spikes import SpikeState as SpikeState, skip_spikes as skip_spikes
    from ._skipped_step import BadGradient as BadGradient, SkippedStep as SkippedStep
    from ._state_report import MomentRow as MomentRow, StateReport as StateReport, state_report as state_report
    from ._stochastic_rounding import (
        KahanState as KahanState,
        StochasticRoundingState as StochasticRoundingState,
        kahan as kahan,
        stochastic_rounding as stochastic_rounding,
    )
    from ._stuck import raise_if_stuck as raise_if_stuck
    from ._verdict import Verdict as Verdict

    # for other packages of the library
    # isort: off
    # fmt: off
    from ._half_parameters import Storage  # noqa: F401
    from ._master_weights import COPIES, SPLIT  # noqa: F401
    from ._moment_blocks import MomentBlocks, Shape, dequantize_moment, quantize_moment  # noqa: F401
    from ._moment_codes import find_role, list_roles  # noqa: F401
    from ._quantize_state import CODES  # noqa: F401
    from ._step import fill_zeros, overwrite_state, warn_of_half_params  # noqa: F401
    from ._stochastic_rounding import COMPENSATED  # noqa: F401
    from ._transformation import ParameterUpdate  # noqa: F401
    # fmt: on
    # isort: on
else:  # most training loops need only the steps
    _SOURCES = {
        "_cast_state": "cast_state",
        "_find_origin": "OriginFinder find_origin",
        "_master_weights": "MasterWeightsState SplitWeightsState master_params master_weights with_master_params",
        "_minimize": "minimize",
        "_quantize_state": "quantize_state",
        "_quantized_update": "QuantizedMomentsState",
        "_skip_log": "SkipLog",
        "_skip_spikes": "SpikeState skip_spikes",
        "_skipped_step": "BadGradient SkippedStep",
        "_state_report": "MomentRow StateReport state_report",
        "_stochastic_rounding": "KahanState StochasticRoundingState kahan stochastic_rounding",
        "_stuck": "raise_if_stuck",
        "_verdict": "Verdict",
    }
    _INTERNAL = {
        "_half_parameters": "Storage",
        "_master_weights": "COPIES SPLIT",
        "_moment_blocks": "MomentBlocks Shape dequantize_moment quantize_moment",
        "_moment_codes": "find_role list_roles",
        "_quantize_state": "CODES",
        "_step": "fill_zeros overwrite_state warn_of_half_params",
        "_stochastic_rounding": "COMPENSATED",
        "_transformation": "ParameterUpdate",
    }
    __getattr__, __dir__ = _load_lazily(
        __name__,
        _SOURCES,
        globals(),
        internal=_INTERNAL,
        unlisted="BadGradient KahanState LossScaledState MasterWeightsState MomentRow OriginFinder "
        "QuantizedMomentsState SkippedStep SpikeState SplitWeightsState StateReport StochasticRoundingState Verdict",
        elsewhere={"pmean": "sharding.pmean", "GradScaler": "optim.loss_scaled, with value_and_grad"},
    )
