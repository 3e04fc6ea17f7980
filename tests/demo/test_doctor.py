"""What is measured, and what follows from it."""

import re

import pytest

from jmp_policy.demo import MatmulRate, diagnose
from jmp_policy.demo._doctor import MATMULS, measure_matmuls, recommend_policy


def rates(**speedups: float) -> list[MatmulRate]:
    return [MatmulRate(kind, 1.0, speedups.get(kind.name, 1.0)) for kind in MATMULS]


SLOW = {"float32": 1.0, "bfloat16": 1.5, "float16": 1.25}


@pytest.mark.parametrize(
    ("speedups", "policy", "reason"),
    [
        ({"bfloat16": 8.0, "float16": 8.0}, "mixed_bfloat16", "no loss scale"),
        ({"float16": 8.0}, "mixed_float16", "dynamic loss scale"),
        ({"bfloat16": 1.2, "float16": 0.5}, "float32", "half precision is slower here: .* bfloat16 takes 1.50 times"),
        ({"bfloat16": 0.0, "float16": 0.0}, "float32", "half precision is slower here"),
    ],
)
def test_half_is_recommended_where_it_has_units(speedups, policy, reason):
    recommendation = recommend_policy(rates(**speedups), SLOW)
    assert recommendation.policy == policy
    assert re.search(reason, recommendation.reason)


def test_half_that_gains_nothing_is_not_called_slower():
    same = dict.fromkeys(SLOW, 1.0)
    assert "half precision gains nothing here" in recommend_policy(rates(), same).reason


def test_float32_is_native_and_the_others_where_they_are_faster():
    native = {rate.kind.name for rate in rates(int8=4.0, float16=1.4) if rate.native}
    assert native == {"float32 highest", "float32 default", "int8"}


def test_every_kind_is_measured_or_said_to_be_unsupported():
    measured = measure_matmuls(size=32)
    assert [rate.kind for rate in measured] == list(MATMULS)
    assert measured[0].speedup == 1.0
    for rate in measured:
        assert rate.teraflops is None or rate.teraflops > 0


def test_a_diagnosis_names_the_device_and_a_policy():
    diagnosis = diagnose(half_only=True)
    assert diagnosis.device.startswith(("cpu", "gpu", "tpu"))
    assert set(diagnosis.perceptron_seconds) == {"float32", "bfloat16", "float16"}
    assert diagnosis.recommendation.policy in ("float32", "mixed_bfloat16", "mixed_float16")
