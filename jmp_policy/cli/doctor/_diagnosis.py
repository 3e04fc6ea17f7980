"""Everything that the doctor says of a machine."""

import dataclasses
from typing import Any

from ._machine import Machine, find_machine
from ._measure import (
    MATMULS,
    MatmulRate,
    Sizes,
    StepTime,
    choose_sizes,
    measure_matmuls,
    measure_steps,
)
from ._recommend import Recommendation, recommend_policy


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was measured on a machine, and what follows.

    Attributes:
      machine: the device, and the versions that drive it.
      sizes: the sizes of what was measured.
      matmuls: the rates of matrix products.
      steps: the times of a perceptron's forward and backward pass, by compute dtype.
      recommendation: the policy to train with.
    """

    machine: Machine
    sizes: Sizes
    matmuls: list[MatmulRate]
    steps: dict[str, StepTime]
    recommendation: Recommendation

    @property
    def noise(self) -> float:
        """By how much the speed-ups of a step differ between thirds of the turns, as a share of them: the worst."""
        speedups = [step.speedup for step in self.steps.values()]
        return max((speedup.high - speedup.low) / speedup.value for speedup in speedups)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain dictionaries, lists, strings and numbers, for JSON.

        Its keys: `versions` and `device`, as `Machine.to_dict` has them; `sizes`; `matmuls`, each with its `name`,
        `dtype`, `multiplied_in`, `teraflops` and `speedup`; `steps`, by dtype, each with `seconds`, `speedup` (its
        `value`, `low` and `high`) and `multiplied_in`; `recommendation`, with its `policy` and `reason`. Speed-ups
        are over float32. `teraflops` and `speedup` of a matmul that the device lacks are `null`, and so is
        `multiplied_in` where XLA does not tell.
        """
        return {
            **self.machine.to_dict(),
            "sizes": dataclasses.asdict(self.sizes),
            "matmuls": [
                {
                    "name": rate.kind.name,
                    "dtype": rate.kind.dtype,
                    "multiplied_in": rate.multiplied_in,
                    "teraflops": rate.teraflops,
                    "speedup": None if rate.teraflops is None else rate.speedup,
                }
                for rate in self.matmuls
            ],
            "steps": {dtype: dataclasses.asdict(step) for dtype, step in self.steps.items()},
            "recommendation": dataclasses.asdict(self.recommendation),
        }


def diagnose() -> Diagnosis:
    """Measures the default device."""
    machine = find_machine()
    sizes = choose_sizes(machine.platform)
    matmuls, steps = measure_matmuls(MATMULS, size=sizes.matrix), measure_steps(sizes.rows, sizes.width)
    return Diagnosis(machine, sizes, matmuls, steps, recommend_policy(matmuls, steps, machine))
