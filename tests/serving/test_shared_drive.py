"""Driven robots that operators help: whose action is executed, what the policy is asked, and what a console shows."""

import numpy as np
from test_drive import Counter, Forecaster

from robopolicy.cli import main
from robopolicy.client.executed import ActingAgent
from robopolicy.client.protocol import FAILURE
from robopolicy.core.spec import STATE
from robopolicy.operators.alarms import BudgetAlarm, ServerAlarm
from robopolicy.operators.assistance import Assistance
from robopolicy.operators.operator import ScriptedOperator, Site
from robopolicy.serving.console.fleet import Fleet
from robopolicy.serving.drive import drive
from robopolicy.serving.shared import SharedRobots


class Knows:
    """Counts as the world does."""

    def reset(self, rows=None):
        pass

    def act(self, observation):
        return observation[STATE][:, -1].astype(np.float64)


def shared_of(world, operators=1, budget=0, turn=0, console=False) -> SharedRobots:
    site = Site(world.spec.action, world.spec.fps, world.batch_size, Knows)
    names = [f"script {number}" for number in range(operators)]
    assistance = Assistance(
        world.spec.action, world.batch_size, dict.fromkeys(names, ScriptedOperator(site)), turn=turn
    )
    fleet = Fleet(assistance, site, [f"robot {row}" for row in range(world.batch_size)]) if console else None
    alarms = [BudgetAlarm(world.batch_size, budget)] if budget else []
    return SharedRobots(world, assistance, alarms, fleet)


class Doubtful(Forecaster):
    """Alarms from a frame on."""

    def __init__(self, frame, **options):
        super().__init__(**options)
        self.frame = frame

    def infer(self, observation):
        newest = float(observation[STATE][-1, 0])
        index = newest / 10
        alarms = ["float"] if newest >= self.frame else []
        return {**super().infer(observation), FAILURE: {"index": {"float": index}, "alarms": alarms}}


def test_an_operator_acts_between_two_turns_of_the_policy_whose_history_has_no_gap():
    # By hand: the policy acts for 0 1 2, the operator for 3 4, the policy for 5 6 7, the operator for 8.
    world, client = Counter(), Forecaster()  # which refuses frames that do not follow each other
    result = drive(world, client, [1], shared=shared_of(world, budget=3, turn=2))
    assert result["successes"] == 1 and client.seen == [0, 5]
    assert result["assistance"] == {"requests": 2, "takeovers": 2, "mean_wait": 0.0}
    assert result["steps"] == 9 and result["held"] == 0


def test_robots_that_share_an_operator_wait_still():
    world, client = Counter(3), Forecaster()
    shared = shared_of(world, budget=5, console=True)
    result = drive(world, client, np.arange(3), shared=shared)
    assert result["successes"] == 1  # two of them stood still when they should have counted
    assert [event["mode"] for event in shared.fleet._events()].count("operated") == 1
    assert shared.turn.actor.tolist() == [ActingAgent.SCRIPT, ActingAgent.NOBODY, ActingAgent.NOBODY]
    assert set(client.seen) == {0}


def test_the_servers_detector_calls_for_help_and_is_shown():
    world, client = Counter(), Doubtful(frame=5)
    shared = shared_of(world, console=True)
    result = drive(world, client, [1], shared=shared)
    # The answer for frame 5 alarms, so the operator acts from frame 6 on.
    assert result["successes"] == 1 and result["assistance"]["takeovers"] == 1
    robot = shared.fleet.robots[0]
    assert list(robot.index["float"]) == [0.0, 0.5] and robot.alarms == ("float",)
    assert robot.steps == 9 and robot.latency_ms is not None and robot.action.tolist() == [8.0]


def test_an_alarm_of_the_server_counts_anew_after_help():
    alarm, row = ServerAlarm(1), np.array([0])
    alarm.start(row, row)
    assert not alarm.raised()[0]
    alarm.answered(0, {"float": 0.3}, ())
    alarm.resume(row)  # after a turn that no alarm of the server began
    alarm.answered(0, {"float": 0.5}, ("float",))
    assert alarm.raised()[0]
    alarm.resume(row)
    alarm.answered(0, {"float": 1.0}, ("float",))
    assert not alarm.raised()[0]  # it has increased by as much as at the alarm, and not by more
    alarm.answered(0, {"float": 1.1}, ("float",))
    assert alarm.raised()[0]
    alarm.start(row, row)
    assert not alarm.raised()[0]


def test_settings_that_do_not_fit_are_refused(capsys):
    robot = ["drive", "drive.robot=so101_follower"]
    for setting in ("drive.robots=2", "drive.console.port=0", "drive.assist.max_policy_steps=3"):
        assert main([*robot, setting]) == 2
        assert "apply to simulated robots only" in " ".join(capsys.readouterr().err.split())
