"""What two sides declare of the same vectors is compared: names, units, bounds and control rates."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from robopolicy.core.errors import RobopolicyWarning, SpecError
from robopolicy.core.spec import STATE, Field, PolicySpec, WorldSpec, is_number, require_fit, same_rate, same_units

STATE_FIELD = Field((2,), unit="m, m/s", names=("x", "speed"))
ACTION = Field((1,), low=-1.0, high=1.0, unit="share of the track", names=("velocity",))
POLICY = PolicySpec({STATE: STATE_FIELD}, ACTION, 1, 1, 1, 0, 10.0)
WORLD = WorldSpec("slide", {STATE: STATE_FIELD}, ACTION, 10.0, 20)


def world(state: Field = STATE_FIELD, action: Field = ACTION, fps: float = 10.0) -> WorldSpec:
    return replace(WORLD, observation={STATE: state}, action=action, fps=fps)


def require_silence(policy: PolicySpec, shown: WorldSpec) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_fit(policy, shown)


def test_units_that_both_sides_say_must_be_one() -> None:
    with pytest.raises(SpecError, match=r"'observation.state' is in 'm, m/s' for the policy, in 'mm, mm/s' in the wo"):
        require_fit(POLICY, world(replace(STATE_FIELD, unit="mm, mm/s")))
    with pytest.raises(SpecError, match="the action is in 'share of the track' for the policy, in 'm' in the world"):
        require_fit(POLICY, world(action=replace(ACTION, unit="m")))
    for unsaid in (replace(STATE_FIELD, unit=""), replace(STATE_FIELD, unit="metres, metres per second")):
        require_silence(POLICY, world(unsaid))


@pytest.mark.parametrize(
    ("own", "other", "same"),
    [
        ("rad", "radians", True),
        ("rad", "Radian", True),
        ("rad", "deg", False),
        ("°", "degrees", True),
        ("rad/s", "rad s^-1", True),
        ("rad/s", "radians per second", True),
        ("m / s", "m·s⁻¹", True),
        ("N m", "Nm", True),
        ("mm", "Mm", False),
        ("rad", "rad, rad, rad", True),
        ("rad", "rad, rad, m", False),
        ("rad, rad, m", "rad, , m", True),
        ("rad, rad, m", "rad, m", True),  # a summary of the same units in their order
        ("rad, rad, m", "rad, m, rad", False),
        ("", "rad", True),
        ("none", "rad", True),
        ("m/s^2", "m/s²", True),
    ],
)
def test_units_are_compared_however_they_are_spelled(own: str, other: str, same: bool) -> None:
    assert same_units(Field((3,), unit=own), Field((3,), unit=other)) is same
    assert same_units(Field((3,), unit=other), Field((3,), unit=own)) is same


@pytest.mark.parametrize(
    ("own", "other", "same"),
    [
        ("x, y: m; grip: 1", "m, m, 1", True),
        ("x: m; y: m; grip: m", "m", True),
        ("x, y: m; grip: 1", "grip: 1; x, y: metres", True),
        ("x, y: m; grip: 1", "m, mm, 1", False),
        ("x: m; y: rad; grip: 1", "y: m; x: rad; grip: 1", False),
        ("x: m", "m, rad, deg", True),  # what is not declared matches anything
    ],
)
def test_units_by_name_are_compared_with_units_by_place(own: str, other: str, same: bool) -> None:
    fields = [Field((3,), unit=unit, names=("x", "y", "grip")) for unit in (own, other)]
    assert same_units(*fields) is same
    assert same_units(*reversed(fields)) is same


def test_other_bounds_and_rates_are_said_once() -> None:
    narrow, fast = replace(ACTION, low=-0.4, high=0.4), world(fps=20.0)
    with pytest.warns(RobopolicyWarning, match=r"lower bound of the action is -1 in 'velocity' for the policy, but"):
        require_fit(POLICY, world(action=narrow))
    with pytest.warns(
        RobopolicyWarning, match=r"control rate is 10 steps per second for the policy, but 20 in the world"
    ):
        require_fit(POLICY, fast)
    require_silence(POLICY, world(action=replace(ACTION, low=-np.inf, high=np.inf)))
    require_silence(replace(POLICY, fps=0.0), fast)
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("default")
        for _ in range(3):
            require_fit(POLICY, fast)
    assert len(messages) == 1


def test_control_rates_that_lerobot_rounded_are_one() -> None:
    assert same_rate(12.5, 12) and same_rate(30, 29.97) and same_rate(0, 50) and same_rate(33, 100 / 3)
    assert not same_rate(10, 20) and not same_rate(10, 11) and not same_rate(12.5, 13.4)


def test_names_that_are_mere_numbers_are_compared_by_count() -> None:
    for name in ("motor_0", "state_3", "agent_pos[0]", "keypoint_12", "joint_1", "dim0", "0", "agent.qpos[7]", "q 3"):
        assert is_number(name), name
    for name in ("x", "left_waist", "joint_1.pos", "gripper", "link_3_x"):
        assert not is_number(name), name

    def policy(*names: str) -> PolicySpec:
        return replace(POLICY, observation={STATE: Field((2,), names=names)})

    def shown(*names: str) -> WorldSpec:
        return world(Field((2,), names=names))

    for mine, theirs in (
        (("motor_0", "motor_1"), ("agent_pos[0]", "agent_pos[1]")),
        (("motor_0", "motor_1"), ("x", "y")),
        (("left_waist", "left_elbow"), ("0", "1")),
        (("joint_1", "joint_2"), ("joint_0", "joint_1")),
    ):
        with pytest.warns(RobopolicyWarning, match=r"have only numbered names and are matched by index.*" + mine[0]):
            require_fit(policy(*mine), shown(*theirs))
    for mine, theirs in (
        (("motor_0", "motor_1"), ("motor_1", "motor_0")),  # the same names in another order say a lot
        (("x", "state_1"), ("state_0", "x")),
    ):
        with pytest.raises(SpecError, match=f"Element 0 of '{STATE}' is '{mine[0]}' for the policy, but"):
            require_fit(policy(*mine), shown(*theirs))
    with pytest.raises(SpecError, match=r"is 'x' for the policy, but 'y' in .*train.rename=\{x: y\}"):
        require_fit(policy("x", "speed"), shown("y", "speed"))
    with pytest.raises(SpecError, match=r"train.rename=\{x: right, y: up\}"):
        require_fit(policy("x", "y"), shown("right", "up"))
    with pytest.raises(SpecError, match=r"same names in different order: reorder") as caught:
        require_fit(policy("x", "y"), shown("y", "x"))
    assert "rename" not in str(caught.value)
