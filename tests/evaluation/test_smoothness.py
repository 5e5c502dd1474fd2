"""Differences of executed actions and jumps at chunk borders, against hand tables."""

import json

import numpy as np
import pytest
from evaluation_toys import LineWorld

from robopolicy.core.player import PlayedStep
from robopolicy.core.spec import Field
from robopolicy.core.world import Step
from robopolicy.evaluation.smoothness import SmoothnessMeter
from robopolicy.evaluation.success import evaluate_policy


def played(actions: list[list[float]], valid: list[list[bool]], running: list[bool]) -> PlayedStep[object]:
    flags = np.asarray(valid)
    nothing = np.zeros(len(flags), dtype=bool)
    step = Step({}, {}, {}, flags, nothing, nothing, nothing)
    return PlayedStep(None, np.asarray(actions)[..., None], step, np.asarray(running), True)


def test_differences_and_jumps_of_what_was_executed():
    meter = SmoothnessMeter(seams=(0,))
    meter(None)
    meter(played([[0, 1, 3], [5, 5, 5]], [[True] * 3, [True] * 3], [True, False]))  # the second row is not played
    meter(played([[3, 7, 9], [0, 9, 0]], [[True, True, False], [True] * 3], [True, False]))  # it ended after 7
    smoothness = meter.measured()
    # Actions 0 1 3 | 3 7: differences 1 2 0 4, of which the third is at the border.
    assert smoothness.border_jump == 0.0 and smoothness.borders == 1
    assert smoothness.inner_jump == pytest.approx((1 + 2 + 4) / 3)
    assert smoothness.second_difference == pytest.approx((1 + 2 + 4) / 3)  # 1 -2 4
    assert smoothness.jerk == pytest.approx((3 + 6) / 2)  # -3 6


def test_the_beginning_is_no_border_and_episodes_are_not_joined():
    meter = SmoothnessMeter(seams=(2,), start=2)
    for _ in range(2):
        meter(None)
        meter(played([[0, 0, 4, 5]], [[True] * 4], [True]))
        meter(played([[6, 7, 3, 4]], [[True] * 4], [True]))
    smoothness = meter.measured()
    assert (smoothness.borders, smoothness.border_jump, smoothness.inner_jump) == (2, 4.0, 1.0)
    nothing = SmoothnessMeter().measured()
    assert json.loads(json.dumps(nothing.to_json()))["jerk"] is None and "nan" not in nothing.text
    # Differences 0 4 1 1 1 -4 1; of these 4 -3 0 0 -5 5; and of those -7 3 0 -5 10.
    assert smoothness.text == "jump at 2 chunk borders 4.0000, elsewhere 1.0000, second difference 2.8333, jerk 5.0000"


def test_an_evaluation_is_watched():
    class Alternating:
        def reset(self, rows=None):
            self.sign = 1.0

        def act(self, observation):
            self.sign = -self.sign
            return np.full((len(observation["task"]), 1), 0.05 * self.sign)

    meter = SmoothnessMeter()
    result = evaluate_policy(LineWorld(2), Alternating(), [11, 12, 13, 14], watch=meter)
    smoothness = meter.measured()
    assert smoothness.borders == result.steps - len(result.seeds)
    assert smoothness.border_jump == pytest.approx(0.1) and smoothness.second_difference == pytest.approx(0.2)


def test_an_angle_that_goes_round_is_no_jump():
    turn = [[170.0, 178.0, -174.0, -166.0, -158.0]]
    yaw = Field((1,), low=-180.0, high=180.0, unit="deg", names=("yaw",))
    for action, jump, bend in ((yaw, 8.0, 0.0), (None, (8 + 352 + 8 + 8) / 4, (360 + 360 + 0) / 3)):
        meter = SmoothnessMeter(seams=(), action=action)
        meter(None)
        meter(played(turn, [[True] * 5], [True]))
        smoothness = meter.measured()
        assert (smoothness.inner_jump, smoothness.second_difference) == pytest.approx((jump, bend))
