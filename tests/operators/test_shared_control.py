"""The queue of robots and operators: hand tables, and rules that hold after any sequence of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robopolicy.operators.shared_control import TRANSITIONS, Mode, SharedControl


@pytest.mark.checks("ARMADA")
def test_three_alarms_and_one_operator_by_hand():
    """Each turn lasts 4: robots 2, 0, 1 alarm at 0, 1, 2 and are taken over at 0, 4, 8, so they wait 0, 3, 6."""
    control, alarms, begun = SharedControl(3, ["expert"]), {0: 2, 1: 0, 2: 1}, {}
    for now in range(13):
        if now in alarms:
            assert control.alarm(alarms[now], now, "stuck")
        for robot, begin in begun.items():
            if now - begin == 4:
                assert control.hand_back(robot, now) and control.resumed(robot, now)
        control.step(now)
        begun |= {each: now for each in range(3) if control.modes[each] is Mode.OPERATED and each not in begun}
    assert [(each.robot, each.asked, each.taken, each.waited, each.ended) for each in control.finished] == [
        (2, 0, 0, 0, 4),
        (0, 1, 4, 3, 8),
        (1, 2, 8, 6, 12),
    ]
    assert control.modes == [Mode.AUTONOMOUS] * 3


def test_a_robot_that_still_goes_back_lets_others_pass_but_keeps_its_place():
    control = SharedControl(3, ["a"])
    control.alarm(0, 0, "stuck", rewind=True)
    control.alarm(1, 1, "stuck")
    control.step(1)
    assert control.modes == [Mode.REWINDING, Mode.OPERATED, Mode.AUTONOMOUS]
    control.alarm(2, 2, "stuck")
    control.step(2)
    assert control.rewound(0, 3) and control.queue == [0, 2]


def test_an_operator_takes_one_robot_at_a_time_also_unasked_and_a_dismissed_robot_resumes():
    control = SharedControl(3, [])
    control.add_operator("browser", assigned=False)
    control.alarm(1, 0, "stuck")
    control.step(0)
    assert control.modes[1] is Mode.WAITING  # nobody is assigned
    assert control.take_over(0, "browser", 1) and not control.take_over(1, "browser", 1)
    assert not control.take_over(1, "stranger", 1)
    assert control.operator_of(0) == "browser" and control.robot_of("browser") == 0
    assert control.dismiss(1, 2) and control.modes[1] is Mode.HANDING_BACK and not control.dismiss(0, 2)
    assert control.resumed(1, 3) and not control.alarm(0, 3, "late alarm of an operated robot")
    control.remove_operator("browser", 4)
    assert control.modes[0] is Mode.WAITING and control.queue == [0] and control.operators == ()


def test_stop_holds_all_until_it_is_released():
    control = SharedControl(2, ["a"])
    control.alarm(0, 0, "stuck")
    control.step(0)
    control.stop(1)
    assert control.add_robot() == 2 and control.modes == [Mode.STOPPED] * 3
    control.reset(0, 2)
    control.step(2)
    assert not control.alarm(1, 2, "stuck") and not control.take_over(1, "a", 2)
    assert control.modes == [Mode.STOPPED] * 3 and control.robot_of("a") is None
    control.release(3)
    assert control.modes == [Mode.HANDING_BACK] * 3 and control.finished[0].ended == 1


ROBOTS, NAMES = st.integers(0, 3), st.sampled_from(["a", "b", "c"])
EVENTS = st.one_of(
    st.tuples(st.just("alarm"), ROBOTS, st.booleans()),
    st.tuples(st.sampled_from(["rewound", "dismiss", "hand_back", "resumed", "reset"]), ROBOTS),
    st.tuples(st.just("take_over"), ROBOTS, NAMES),
    st.tuples(st.sampled_from(["remove_operator", "add_operator"]), NAMES),
    st.tuples(st.sampled_from(["stop", "release", "step"])),
    st.tuples(st.just("step")),
)


def apply(control: SharedControl, event: tuple, now: int) -> None:
    match event:
        case ("alarm", robot, rewind):
            control.alarm(robot, now, "stuck", rewind=rewind)
        case ("take_over", robot, name):
            control.take_over(robot, name, now)
        case ("add_operator", name):
            control.add_operator(name)
        case (name, *arguments):
            getattr(control, name)(*arguments, now)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_rules_that_hold_after_any_events(events: list[tuple]):
    control = SharedControl(4, ["a", "b"])
    for now, event in enumerate(events):
        queue, seen = control.queue, len(control.events)
        apply(control, event, now)
        for change in list(control.events)[seen:]:
            assert change.mode in TRANSITIONS[change.before] or (event[0] == "reset" and change.mode == Mode.AUTONOMOUS)
        serving = [control.operator_of(robot) for robot in range(4)]
        names = [name for name in serving if name]
        assert len(set(names)) == len(names) and set(names) <= set(control.operators)  # one robot per operator
        for robot, mode in enumerate(control.modes):
            assert (serving[robot] is not None) == (mode is Mode.OPERATED)
            asks = mode in (Mode.HOLDING, Mode.REWINDING, Mode.WAITING, Mode.OPERATED)
            assert (control.requests[robot] is not None) == asks
        assert not control.stopped or set(control.modes) == {Mode.STOPPED}
        if event == ("step",):
            assert Mode.HOLDING not in control.modes
            assert not (control.queue and set(control.operators) - set(names))  # nobody is idle while a robot waits
            taken = [robot for robot in queue if control.modes[robot] is Mode.OPERATED]
            assert taken == queue[: len(taken)]  # first come, first served
    modes = [Mode.AUTONOMOUS] * 4
    for change in control.events:  # the log tells the whole story
        assert modes[change.robot] is change.before
        modes[change.robot] = change.mode
    assert modes == control.modes
    assert all(each.waited is None or each.waited >= 0 for each in control.finished)


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_can_be_left_and_all_but_a_stop_can_be_stopped(mode: Mode):
    assert TRANSITIONS[mode] and mode not in TRANSITIONS[mode]
    assert (Mode.STOPPED in TRANSITIONS[mode]) == (mode is not Mode.STOPPED)
