"""Hysteresis against the documented rules of Megatron-LM and DeepSpeed, written out in plain Python."""

import math

import pytest
from hypothesis import given, strategies as st
from properties import examples

import jmp_policy as jmp


class Megatron:
    """The rule of Megatron-LM's DynamicGradScaler: the tracker is refilled where the scale grows, and only there."""

    def __init__(self, scale, interval, hysteresis, floor=1.0):
        self.scale, self.interval, self.hysteresis, self.floor = scale, interval, hysteresis, floor
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def update(self, found_inf):
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale / 2, self.floor)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.interval:
                self.growth_tracker, self.hysteresis_tracker = 0, self.hysteresis
                self.scale *= 2


class DeepSpeed:
    """The rule of DeepSpeed's DynamicLossScaler, which counts iterations since the last overflow."""

    def __init__(self, scale, window, hysteresis, consecutive, floor=1.0):
        self.scale, self.window, self.hysteresis, self.consecutive = scale, window, hysteresis, consecutive
        self.floor, self.current_hysteresis, self.iteration, self.last_overflow = floor, hysteresis, 0, -1

    def update(self, found_inf):
        if found_inf:
            if self.hysteresis == 1 or self.current_hysteresis == 1:
                self.scale = max(self.scale / 2, self.floor)
            else:
                self.current_hysteresis -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive:
                self.current_hysteresis = self.hysteresis
            if (self.iteration - self.last_overflow) % self.window == 0:
                self.current_hysteresis = self.hysteresis
                self.scale *= 2
        self.iteration += 1


@pytest.mark.parametrize(
    ("make_peer", "consecutive"),
    [
        (lambda w, h: Megatron(2.0**12, w, h), False),
        (lambda w, h: DeepSpeed(2.0**12, w, h, consecutive=False), False),
        (lambda w, h: DeepSpeed(2.0**12, w, h, consecutive=True), True),
    ],
    ids=["Megatron", "DeepSpeed", "DeepSpeed, consecutive"],
)
@given(overflows=st.lists(st.booleans(), max_size=20), window=st.integers(1, 4), hysteresis=st.integers(1, 3))
@examples(12)
def test_hysteresis_is_that_of_the_peer(make_peer, consecutive, overflows, window, hysteresis):
    reference = make_peer(window, hysteresis)
    ours = jmp.DynamicLossScale(
        2.0**12, period=window, max_loss_scale=math.inf, hysteresis=hysteresis, consecutive_hysteresis=consecutive
    )
    for overflow in overflows:
        reference.update(overflow)
        ours = ours.adjust(not overflow)
        assert float(ours.loss_scale) == reference.scale


@pytest.mark.parametrize("consecutive", [True, False])
def test_the_first_overflows_only_spend_a_credit_and_one_finite_step_refills_them_if_consecutive(consecutive):
    scale = jmp.DynamicLossScale(16.0, hysteresis=3, consecutive_hysteresis=consecutive)
    seen = []
    for finite in (False, False, False, False, True):
        scale = scale.adjust(finite)
        seen.append((float(scale.loss_scale), int(scale.credits)))
    assert seen == [(16, 1), (16, 0), (8, 0), (4, 0), (4, 2 if consecutive else 0)]
