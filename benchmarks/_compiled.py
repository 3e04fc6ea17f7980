"""Programs compiled for their figures alone."""

from typing import Any

import jax


def compile_for_figures(lowered: Any) -> Any:
    """Compiles a lowered program, which will not be run, for its `cost_analysis` and `memory_analysis`.

    These are of the optimized HLO and of its buffers. On a CPU, half of the time goes into what comes after, optimizing
    the machine code: left out, the figures are the same to the byte.
    """
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return lowered.compile(compiler_options=options)
