"""Operators: axes of a person, LeRobot's teleoperators, the way back, and the rows of a batch that they help."""

from dataclasses import dataclass

import numpy as np
import pytest

from robopolicy.client.executed import ActingAgent, Segment
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE, Field
from robopolicy.operators import OPERATORS
from robopolicy.operators.alarms import RandomAlarm
from robopolicy.operators.assistance import Assistance, assisted
from robopolicy.operators.axes import FRESH, AxesOperator, AxisMapping
from robopolicy.operators.configuration import AssistConfig
from robopolicy.operators.operator import Operator, ScriptedOperator, Site, make_operator
from robopolicy.operators.paths import Paths, usual_decisions

NAMES = ("wheel_velocity", "shoulder.pos", "gripper")
ACTION = Field((3,), low=-1.0, high=1.0, unit="m/s, rad, 0 to 1", names=NAMES)


class Ones:
    """A controller that says how often it was cleared."""

    def __init__(self, site=None):
        self.resets = 0

    def reset(self, rows=None):
        self.resets += 1

    def act(self, observation):
        return np.ones((len(observation[STATE]), 3))


def site(rows: int = 3, expert=Ones) -> Site:
    return Site(ACTION, 10.0, rows, expert)


OBSERVATION = {STATE: np.zeros((3, 1, 1), np.float32)}


def test_costs_decide_how_far_a_robot_goes_back():
    assert usual_decisions([0.01, 0.02, 0.10, 0.30]) == 2  # .03 < .086 <= .13
    assert usual_decisions([]) == 0 and usual_decisions([0.5]) == 0 and usual_decisions([0.1, 1.0]) == 1


def test_velocities_are_mirrored_positions_repeated_backwards_and_grippers_stay():
    paths = Paths(ACTION, 1, rewinds=True)
    path = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
    for action in path:
        paths.add(action[None], np.array([0]))
    assert paths.still(0).tolist() == [0.0, 0.8, 0.9]
    paths.rewind(0, 5)
    back = [paths.undo(0).tolist() for _ in range(3)]
    assert back == [[-0.7, 0.5, 0.9], [-0.4, 0.2, 0.6], [-0.1, 0.2, 0.3]] and paths.is_back(0)
    assert paths.still(0).tolist() == [0.0, 0.0, 0.0]  # nothing is left of the path
    with pytest.raises(ConfigError, match="unbounded"):
        Paths(Field((1,), names=("x_velocity",)), 1, rewinds=True)
    Paths(Field((1,), names=("shoulder.pos",)), 1, rewinds=True)  # needs no range


def test_axes_move_positions_with_a_speed_and_set_velocities():
    mapping = AxisMapping(ACTION, 10.0)
    moved = mapping.action(np.array([0.5, 1.0, -1.0]), np.array([0.9, 0.0, 1.0]))
    assert moved.tolist() == pytest.approx([0.5, 0.05, 0.6])  # a quarter of the range a second, grippers twice it
    assert mapping.action(np.array([-9.0, 1.0, 0.0]), np.array([0.0, 0.99, 0.2])).tolist() == [-1.0, 1.0, 0.2]
    lopsided = AxisMapping(Field((1,), low=1.0, high=3.0, names=("fan_velocity",)), 10.0)
    assert [float(lopsided.action(np.array([axis]), np.zeros(1))[0]) for axis in (-1, 0, 1)] == [1.0, 1.0, 3.0]
    with pytest.raises(ConfigError, match="unbounded"):
        AxisMapping(Field((2,)), 10.0)


def test_axes_count_for_a_moment_and_from_the_takeover_on():
    now = [0.0]
    operator, row = AxesOperator(site(1), clock=lambda: now[0]), np.array([0])
    assert isinstance(operator, Operator) and operator.agent is ActingAgent.HUMAN
    assert np.isnan(operator.act(OBSERVATION, row, np.zeros((1, 3)))).all()
    operator.set_axes([1.0, float("nan")])
    assert operator.act(OBSERVATION, row, np.zeros((1, 3)))[0].tolist() == [1.0, 0.0, 0.0]
    now[0] = FRESH + 0.1
    assert np.isnan(operator.act(OBSERVATION, row, np.zeros((1, 3)))).all()
    operator.finish()
    assert operator.finished(row).tolist() == [True]
    operator.begin(row)
    assert operator.finished(row).tolist() == [False]
    operator.set_axes([])
    assert np.isnan(operator.act(OBSERVATION, row, np.zeros((1, 3)))).all()


def test_operators_are_found_by_name_and_say_what_they_lack():
    assert set(OPERATORS.ours) == {"expert", "lerobot", "browser"}
    assert isinstance(make_operator("expert", site()), ScriptedOperator)
    with pytest.raises(ConfigError, match=r"no operator 'expertt'.*expert"):
        make_operator("expertt", site())
    with pytest.raises(ConfigError, match="has no option 'hurry'; it has: none"):
        make_operator("expert", site(), {"hurry": True})
    with pytest.raises(ConfigError, match="No scripted expert is known"):
        make_operator("expert", site(expert=None))
    with pytest.raises(ConfigError, match="is not an operator: it lacks methods"):
        make_operator(f"{__name__}:Ones", Site(ACTION, 10.0, 1))


@dataclass
class Device:
    """A stand-in for a teleoperator of LeRobot."""

    given: dict[str, float]
    events: dict[str, bool]
    is_connected: bool = False

    @property
    def action_features(self):
        return {"dtype": "float32", "shape": (3,), "names": {"drive": 0, "shoulder.pos": 1, "gripper": 2}}

    def connect(self):
        self.is_connected = True

    def disconnect(self):
        self.is_connected = False

    def get_action(self):
        return self.given

    def get_teleop_events(self):
        return self.events


def test_a_teleoperator_is_wired_by_name(monkeypatch):
    from robopolicy.operators import lerobot

    device = Device({"drive": 50.0, "shoulder.pos": 0.5, "gripper": 1.0}, {})
    monkeypatch.setattr(lerobot, "_make", lambda name, options: device)
    options = {"teleoperator": "mine", "rename": {"drive": "wheel_velocity"}, "scale": {"drive": 0.01}}
    operator, row = make_operator("lerobot", site(), options), np.array([1])
    operator.begin(row)
    assert operator.act(OBSERVATION, row, np.zeros((1, 3)))[0].tolist() == [0.5, 0.5, 1.0]
    device.given.pop("gripper")
    assert operator.act(OBSERVATION, row, np.full((1, 3), 0.2))[0].tolist() == [0.5, 0.5, 0.2]
    device.events["is_intervention"] = False
    assert np.isnan(operator.act(OBSERVATION, row, np.zeros((1, 3)))).all()
    device.events["success"] = True
    operator.act(OBSERVATION, row, np.zeros((1, 3)))
    assert operator.finished(row).tolist() == [True]
    operator.close()
    assert not device.is_connected
    with pytest.raises(ConfigError, match=r"does not give the action element 'wheel_velocity': it gives drive"):
        make_operator("lerobot", site(), {"teleoperator": "mine"})
    with pytest.raises(ConfigError, match="needs its option teleoperator"):
        make_operator("lerobot", site())


def test_chance_calls_by_the_episodes_seed_at_the_rate_that_was_set():
    alarm = RandomAlarm(2000, 0.1)
    alarm.start(np.arange(2000), np.arange(2000) + 7)
    due = alarm._due.copy()
    assert due.min() >= 1 and abs(due.mean() - 10) < 3 * np.sqrt(90 / 2000)  # geometric: mean 1/p, variance (1-p)/p^2
    alarm.step(np.zeros(2000), np.arange(2000) < 1000)
    assert alarm.raised()[:1000].tolist() == (due[:1000] <= 1).tolist() and not alarm.raised()[1000:].any()
    alarm.start(np.array([5]), np.array([12]))
    assert alarm._due[5] == due[5]
    alarm.resume(np.array([5]))
    assert not alarm.raised()[5]


def test_rows_wait_for_one_operator_hold_still_and_say_who_acted():
    operator = ScriptedOperator(site())
    assistance = Assistance(ACTION, 3, {"one": operator}, rewind=1, turn=2)
    assistance.start(np.arange(3), np.arange(3))
    policy, table = np.full((3, 3), 0.5), []
    for step in range(9):
        alarms = [(0, "stuck", None), (2, "stuck", None)] if step == 1 else []
        acting, resumed = assistance.next(alarms)
        actions, turn = assistance.actions(OBSERVATION, policy)
        assert np.array_equal(acting, turn.actor == ActingAgent.POLICY)
        table.append((turn.actor.tolist(), turn.segment.tolist(), actions[:, 0].tolist(), resumed.tolist()))
    pol, exp, nobody = ActingAgent.POLICY, ActingAgent.SCRIPT, ActingAgent.NOBODY
    actors = [[pol] * 3, *[[exp, pol, exp]], *[[exp, pol, nobody]] * 2, *[[pol, pol, exp]] * 2, *[[pol] * 3] * 3]
    assert [each[0] for each in table] == actors
    recover, correct, own = Segment.RECOVER, Segment.CORRECT, Segment.AUTONOMOUS
    assert [each[1] for each in table][1:5] == [
        [recover, own, recover],
        *[[correct, own, own]] * 2,
        [own, own, correct],
    ]
    assert [each[2] for each in table][:5] == [[0.5] * 3, [-0.5, 0.5, -0.5], *[[1, 0.5, 0]] * 2, [0.5, 0.5, 1]]
    assert [np.flatnonzero(each[3]).tolist() for each in table] == [[], [], [], [], [0], [], [2], [], []]
    assert [(each.robot, each.waited) for each in assistance.control.finished] == [(0, 1), (2, 3)]


def test_a_row_that_ends_frees_its_operator():
    assistance = Assistance(ACTION, 3, {"one": ScriptedOperator(site())})
    assistance.start(np.arange(3), np.arange(3))
    assistance.next([(0, "stuck", None), (1, "stuck", None)])
    assert assistance.control.robot_of("one") == 0
    assistance.end(np.array([0]))
    assistance.next()
    assert assistance.control.robot_of("one") == 1 and assistance.control.finished[0].ended is not None


def test_a_person_operates_one_robot_at_a_time_and_in_a_browser_needs_a_console():
    with pytest.raises(ConfigError, match=r"need a console: set drive\.console\.port"):
        assisted(AssistConfig(operator="browser"), ACTION, 1, AxesOperator(site()))
    person = ScriptedOperator(site())
    person.agent = ActingAgent.HUMAN
    with pytest.raises(ConfigError, match="operates one robot at a time: set operators=1"):
        assisted(AssistConfig(operator="lerobot"), ACTION, 3, person)
    assert assisted(AssistConfig(operators=1), ACTION, 3, person).control.operators == ("human",)
    assert assisted(AssistConfig(), ACTION, 2, ScriptedOperator(site())).control.operators == ("script 1", "script 2")
    assert assisted(AssistConfig(), ACTION, 2, None).control.operators == ()


@pytest.mark.parametrize("name", ["pusher", "outside_robotics.operator:Pusher"])
def test_an_operator_of_another_package(name):
    pytest.importorskip("outside_robotics", reason="install it with: pip install -e tests/outside")
    if name == "pusher" and name not in OPERATORS:
        pytest.skip("its entry point is newer than the installation: pip install -e tests/outside")
    operator = make_operator(name, site(), {"steps": 2})
    assistance = Assistance(ACTION, 3, {"pusher": operator})
    assistance.start(np.arange(3), np.arange(3))
    turns = []
    for step in range(4):
        assistance.next([(1, "stuck", None)] if step == 0 else [])
        turns.append(assistance.actions(OBSERVATION, np.zeros((3, 3)))[0][1].tolist())
    assert turns == [[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
