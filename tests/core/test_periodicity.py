"""Which elements of an action go round or switch, by names, units and bounds."""

import math

import numpy as np
import pytest
import torch

from robopolicy.client.periodicity import periodicity_of
from robopolicy.core.spec import Field

TURN = 2 * math.pi


def one(name, unit="", low=-math.inf, high=math.inf):
    turns = periodicity_of(Field((1,), low=low, high=high, unit=unit, names=(name,)))
    return float(turns.period[0]), bool(turns.at_once[0])


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        (("yaw", "rad"), (TURN, False)),
        (("base_yaw", "deg"), (360.0, False)),
        (("heading",), (0.0, True)),  # nobody says how long a turn is
        (("heading", "", 0.0, 360.0), (360.0, False)),
        (("wrist_3", "rad", -math.pi, math.pi), (TURN, False)),
        (("wrist_roll.pos", "rad", -2.74, 2.84), (0.0, False)),  # a joint with ends
        (("yaw", "rad", -1.0, 1.0), (0.0, False)),
        (("yaw", "rad", -3.5, 3.5), (TURN, False)),
        (("ur_joint", "rad", -TURN, TURN), (0.0, False)),
        (("yaw_rate", "rad/s", -math.pi, math.pi), (0.0, False)),
        (("delta_yaw", "rad"), (0.0, False)),
        (("x", "m", -math.pi, math.pi), (0.0, False)),
        (("gripper",), (0.0, True)),
        (("left_gripper", "", -1.0, 1.0), (0.0, True)),
        (("gripper", "m"), (0.0, False)),
        (("gripper.pos",), (0.0, False)),
        (("lamp_switch",), (0.0, True)),
        (("ee_qw",), (0.0, True)),
        (("lift", "bool"), (0.0, True)),
        (("base_theta", "rad"), (TURN, False)),
        (("theta_1", "rad"), (0.0, False)),  # a joint
        (("tcp.rot.roll", "rad"), (TURN, False)),  # of a gripper that points down: near half a turn
        (("euler_x", "deg"), (360.0, False)),
        (("suction",), (0.0, True)),
    ],
)
def test_names_units_and_bounds_say_what_goes_round_or_switches(element, expected):
    assert one(*element) == expected


def test_differences_are_taken_the_short_way_and_results_stay_within_the_turn():
    action = Field((2,), low=(-9.0, -math.pi), high=(9.0, math.pi), unit="m, rad", names=("x", "yaw"))
    turns = periodicity_of(action)
    apart, values = np.array([[6.2, 6.2], [-6.2, -3.0]]), np.array([[4.0, 4.0], [4.0, -4.0]])
    expected = np.array([[6.2, 6.2 - TURN], [-6.2, -3.0]]), np.array([[4.0, 4.0 - TURN], [4.0, TURN - 4.0]])
    np.testing.assert_allclose(turns.shortest(apart), expected[0])
    np.testing.assert_allclose(turns.within(values), expected[1])
    tensors = turns.like(torch.zeros(1))
    np.testing.assert_allclose(tensors.shortest(torch.tensor(apart).float()), expected[0], atol=1e-5)
    np.testing.assert_allclose(tensors.within(torch.tensor(values).float()), expected[1], atol=1e-5)
    unnamed = periodicity_of(Field((2,)))
    assert not unnamed.period.any() and not unnamed.at_once.any()
