"""How fast this machine trains in each dtype, and the policy that follows from it.

It needs no extra of the package: neither matplotlib nor Orbax. The library never imports this.
"""

from ._diagnosis import Diagnosis as Diagnosis, diagnose as diagnose
from ._machine import Machine as Machine, find_machine as find_machine, list_versions as list_versions
from ._measure import (
    MATMULS as MATMULS,
    MatmulKind as MatmulKind,
    MatmulRate as MatmulRate,
    Sizes as Sizes,
    Speedup as Speedup,
    StepTime as StepTime,
)
from ._recommend import Recommendation as Recommendation, recommend_policy as recommend_policy
