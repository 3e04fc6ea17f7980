"""Measures how fast a machine trains in each dtype. It needs no extra of the package."""

from ._diagnosis import (
    MATMULS as MATMULS,
    Diagnosis as Diagnosis,
    Machine as Machine,
    MatmulKind as MatmulKind,
    MatmulRate as MatmulRate,
    Recommendation as Recommendation,
    Sizes as Sizes,
    Speedup as Speedup,
    StepTime as StepTime,
    diagnose as diagnose,
    find_machine as find_machine,
    list_versions as list_versions,
    recommend_policy as recommend_policy,
)
