"""The driver: a robot acts at every control step, within its limits, whatever the server does."""

import threading
import time

import numpy as np
import pytest

from robopolicy.client.driver import ActionLimits, Driver, described_policy
from robopolicy.client.notices import Notices
from robopolicy.client.policy_client import RefusedError
from robopolicy.client.policy_description import limits_of
from robopolicy.core.errors import ConfigError, NonFiniteError, RobopolicyWarning, ServingError, SpecError
from robopolicy.core.spec import IMAGE_PREFIX, STATE, Field
from robopolicy.serving.configuration import RobotSettings

STILL = np.array([0.25])


class Clock:
    """Time that passes when told; `sleep` by a real driver is not needed in these tests."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Scripted:
    """A server that answers what the test puts in, when it says so."""

    def __init__(self, *, chunk=4, history=1, low=-1.0, high=1.0, **said):
        fields = {STATE: Field((1,)).to_json()}
        action = Field((1,), low=low, high=high).to_json()
        self.metadata = {"observation": fields, "history": history, "chunk": chunk, "fps": 10.0, "action": action}
        self.metadata |= said
        self.asked: list[np.ndarray] = []
        self.answers: list = []
        self.go = threading.Semaphore(0)

    def infer(self, observation):
        self.asked.append(observation[STATE])
        assert self.go.acquire(timeout=20)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"actions": np.asarray(answer, np.float32).reshape(-1, 1)}

    def say(self, driver, answer):
        """Answer the request under way, and wait until the driver has it."""
        request = driver._request
        self.answers.append(answer)
        self.go.release()
        if request is not None:
            request.exception(timeout=20)


def make(server, **options):
    clock = Clock()
    return Driver(
        server, **{"hold": STILL, "patience": 0.0, "grace": 0.0, "prefetch": 1, "clock": clock} | options
    ), clock


def see(value=0.0):
    return {STATE: np.array([value])}


def test_a_chunk_is_cut_by_the_steps_that_were_acted_and_the_next_is_asked_for_ahead():
    server = Scripted()
    driver, _ = make(server, prefetch=2)
    assert driver.step(see(0)) == STILL  # nothing has come yet
    assert driver.step(see(1)) == STILL
    server.say(driver, [0.1, 0.2, 0.3, 0.4])  # for the observation of step 0, and the robot has not moved since
    assert driver.step(see(2)) == pytest.approx(0.1)
    assert driver.step(see(3)) == pytest.approx(0.2)
    assert driver.step(see(4)) == pytest.approx(0.3)
    assert driver._asked.step == 4  # two steps were left, one of them taken now
    assert driver.step(see(5)) == pytest.approx(0.4)
    assert driver.step(see(6)) == STILL
    server.say(driver, [0.5, 0.6, 0.7, 0.8])  # for that of step 4, since when it has acted twice
    assert driver.step(see(7)) == pytest.approx(0.7)
    assert driver.counts == {"steps": 8, "held": 3, "clipped": 0}


def test_an_answer_that_is_too_old_is_thrown_away_and_so_is_the_rest_of_an_old_chunk():
    server = Scripted()
    driver, clock = make(server, max_age=0.5, prefetch=0)
    driver.step(see())
    clock.now = 0.6
    server.say(driver, [0.1] * 4)
    assert driver.step(see()) == STILL
    assert driver.counts["stale"] == 1
    server.say(driver, [0.2] * 4)
    assert driver.step(see()) == pytest.approx(0.2)
    clock.now = 1.2
    assert driver.step(see()) == STILL


def test_actions_are_clipped_to_the_policys_bounds_and_the_robots_own():
    server = Scripted(low=-1.0, high=0.5)
    keep_out = ActionLimits(low=-0.8, high=2.0, change=0.3, workspace=lambda action: np.minimum(action, 0.4))
    driver, _ = make(server, limits=keep_out, prefetch=0)
    driver.step(see())
    server.say(driver, [9e9, 1000.0, -1000.0, 0.2])
    assert [float(driver.step(see())[0]) for _ in range(4)] == pytest.approx([0.4, 0.4, 0.1, 0.2])
    assert driver.counts["clipped"] == 3
    wide, _ = make(Scripted(), limits=ActionLimits(low=-5.0, high=5.0))
    assert wide._limited(np.array([3.0])) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"change": -0.05},
        {"change": np.nan},
        {"low": np.nan},
        {"high": [1.0, np.nan]},
        {"change": np.inf},
        {"low": -np.inf},
        {"high": [1.0, np.inf]},
    ],
)
def test_limits_that_would_drive_a_robot_away_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"NaN|at least 0|infinity is not a limit"):
        ActionLimits(**{name: np.asarray(value) for name, value in wrong.items()})


def test_the_first_action_of_an_episode_is_no_jump():
    """Nor is the first after a reset, after it was held, or after a gap; a robot outside its bounds is led back."""
    server = Scripted(low=-np.inf, high=np.inf)
    driver, clock = make(server, limits=ActionLimits(change=0.1), hold=np.array([0.0]), prefetch=0)
    for _ in range(2):
        driver._first = False
        driver.look(see())
        server.say(driver, [1e30] * 4)
        assert [float(driver.step(see())[0]) for _ in range(2)] == pytest.approx([0.1, 0.2])
        clock.now += 100.0
        assert driver.step(see()) == pytest.approx(0.1)  # it comes to rest as slowly
        driver.reset()
    shown, _ = make(
        Scripted(low=-1.0, high=1.0), limits=ActionLimits(change=0.5), hold=lambda frames, last: frames[STATE]
    )
    shown.look(see(3.0))
    assert shown._limited(np.array([0.0])) == 2.5  # not 1.0, a jump to the nearest bound
    assert shown._limited(np.array([3.0]), held=True) == 3.0
    unknown, _ = make(Scripted(), limits=ActionLimits(change=0.1), start=lambda frames, last: np.array([np.nan]))
    assert unknown._limited(np.array([0.7])) == 0.7


def test_a_policy_without_bounds_needs_some():
    action = {"shape": [2], "names": ["lift", "x.vel"], "high": [np.inf, 1.0], "low": [-1.0, -1.0]}
    server = Scripted(action=action)
    for wrong in (None, ActionLimits(low=-1.0)):
        with pytest.raises(ConfigError, match=r"No limit applies to lift: .*drive\.bounds={lift: .*unbounded=True"):
            make(server, hold=np.zeros(2), limits=wrong)
    for given in (ActionLimits(high=1.0), ActionLimits(change=0.1), ActionLimits(unbounded=True)):
        make(server, hold=np.zeros(2), limits=given)
    policy, bounded = described_policy(server.metadata), RobotSettings(bounds={"lift": (-0.5, 0.5)})
    assert np.array_equal(limits_of(bounded, policy, policy.names).low, [-0.5, -1.0])
    with pytest.raises(ConfigError, match="No limit applies to lift"):
        limits_of(RobotSettings(), policy, policy.names)
    limits_of(RobotSettings(), policy, policy.names, np.array([True, False]))  # the robot's own max_relative_target
    with pytest.raises(ConfigError, match="bounds contains 'lft'"):
        limits_of(RobotSettings(bounds={"lft": (-0.5, 0.5)}), policy, policy.names)
    with pytest.raises(ConfigError, match=r"bounds of 'x\.vel' are 5 to 6, but the policy's are -1 to 1: no action is"):
        limits_of(RobotSettings(bounds={"x.vel": (5.0, 6.0)}), policy, policy.names)


def test_a_robot_far_from_what_its_policy_knows_is_said_before_it_moves_and_now_and_then():
    fields = {STATE: {"shape": [2], "names": ["lift", "pan"]}}
    server = Scripted(observation=fields, known={STATE: {"low": [0.0, -1.0], "high": [1.0, 1.0]}})
    lines: list[str] = []
    now = [0.0]
    driver, _ = make(server, prefetch=0, notices=Notices(lines.append, every=10.0, clock=lambda: now[0]))
    driver.look({STATE: np.array([1.2, 0.0])})  # a little beyond
    assert lines == [] and driver.counts["outside"] == 0
    driver.look({STATE: np.array([90.0, 0.0])})
    assert (
        len(lines) == 1
        and "lift is 90 (training data: 0 to 1)" in lines[0]
        and lines[0].startswith("Before the first movement")
    )
    driver.act()
    for now[0] in (1.0, 9.0, 11.0):
        driver.step({STATE: np.array([90.0, 5.0])})
    assert len(lines) == 2 and "pan is 5" in lines[1] and not lines[1].startswith("Before")
    assert driver.counts["outside"] == 4
    for wrong in (
        {STATE: {"low": [0.0], "high": [1.0]}},
        {STATE: {"low": [0, np.nan], "high": [1, 1]}},
        {"x": {}},
        [1],
    ):
        with pytest.raises(ServingError, match="is invalid"):
            described_policy(server.metadata | {"known": wrong})


def test_answers_that_all_come_too_late_are_said_and_so_is_a_server_that_is_away():
    server, lines = Scripted(), []
    driver, clock = make(server, max_age=0.5, prefetch=0, patience=60.0, grace=0.0, notices=Notices(lines.append))
    driver._first = False
    driver.step(see())
    clock.now = 0.6
    server.say(driver, [0.1] * 4)
    driver.step(see())
    assert len(lines) == 1 and "0.6 s after its observation, too late to be executed" in lines[0], lines
    clock.now = 3.0
    driver.step(see())
    assert len(lines) == 2 and lines[1].startswith("No answer for 2.4 s; the robot holds still: it does not answer"), (
        lines
    )
    server.say(driver, [0.1] * 4)
    slow, clock = make(Scripted(), max_age=9.0, prefetch=0, notices=Notices(lines.append))
    slow.look(see())
    clock.now = 0.7  # a chunk lasts 0.4 s
    slow._requests.client.say(slow, [0.1] * 4)
    assert slow.step(see()) == pytest.approx(0.1)
    assert "Before the first movement: the first answer took 0.7 s, but a chunk of actions lasts 0.4 s" in lines[2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_age": -1.0},
        {"max_age": 0.0},
        {"max_age": np.nan},
        {"max_age": "1"},
        {"grace": -0.1},
        {"grace": np.nan},
        {"patience": -1.0},
        {"patience": np.nan},
        {"prefetch": 1.5},
        {"prefetch": True},
        {"latency_steps": 0.5},
        {"blend": 1.0},
        {"blend": -1},
    ],
)
def test_numbers_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make(Scripted(), **wrong)


def test_answers_that_all_come_too_late_are_asked_for_ever_later():
    server = Scripted()
    driver, clock = make(server, max_age=0.1, prefetch=0)
    asked = []
    for step in range(40):
        clock.now = 0.2 * step
        driver.step(see())
        if driver._request is not None:
            asked.append(clock.now)
            clock.now += 0.15
            server.say(driver, [0.1] * 4)
    assert driver.counts["stale"] > 3 and len(asked) < 12, asked


def test_without_a_hold_names_and_units_say_how_a_robot_stands_still():
    names = ["arm.pos", "x.vel", "gripper"]
    action = {"shape": [3], "names": names, "low": -9.0, "high": 9.0}
    fields = {STATE: {"shape": [2], "names": ["x.vel", "arm.pos"]}}
    driver, _ = make(Scripted(action=action, observation=fields), hold=None)
    assert driver.step({STATE: np.array([0.3, 5.0])}).tolist() == [5.0, 0.0, 0.0]
    driver._last = np.array([4.0, 0.3, 1.0])
    assert driver.step({STATE: np.array([0.3, 5.0])}).tolist() == [4.0, 0.0, 1.0]
    with pytest.raises(ConfigError, match="hold action of element 0 is undefined"):
        make(Scripted(), hold=None)


def test_a_hold_that_moves_the_robot_is_named():
    action = {"shape": [2], "names": ["arm.pos", "x.vel"], "low": -9.0, "high": 9.0}
    server = Scripted(action=action, observation={STATE: {"shape": [2]}})
    driver, _ = make(server, hold=lambda frames, last: frames[STATE])
    with pytest.warns(RobopolicyWarning, match=r"hold keeps x\.vel at \[0\.3\] .* the robot would keep moving"):
        driver.step({STATE: np.array([5.0, 0.3])})
    driver.step({STATE: np.array([5.0, 0.3])})  # said once
    with pytest.warns(RobopolicyWarning, match=r"hold moves arm\.pos to a fixed position"):
        make(server, hold=np.zeros(2))


def test_a_silent_server_is_away_since_the_oldest_question_that_it_has_not_answered():
    server = Scripted()
    driver, clock = make(server, patience=2.0, grace=0.0, max_age=60.0)
    driver._first = False  # its first chunk is not waited for here
    for clock.now in (1.0, 2.0, 3.0):
        assert driver.step(see()) == STILL
        driver.require_server()
    assert driver.away == 2.0 and driver.error is None
    clock.now = 3.5
    assert driver.step(see()) == STILL
    with pytest.raises(ServingError, match=r"not answered for more than 2 s"):
        driver.require_server()
    server.say(driver, ServingError("gone"))
    driver.step(see())
    assert driver.away == 2.5  # what failed is still without an answer
    clock.now = 4.0
    driver.look(see())
    server.say(driver, [0.1] * 4)
    assert driver.step(see()) == pytest.approx(0.1)
    driver.require_server()
    assert driver.away == 0.0 and driver.error is None


def test_an_answer_that_is_held_back_is_no_silence_and_an_episode_that_ended_leaves_none():
    server = Scripted()
    driver, clock = make(server, patience=2.0, grace=0.0, max_age=60.0, latency_steps=3)
    driver._first = False
    driver.step(see())
    assert driver.away == 0.0
    clock.now = 5.0
    assert driver.away == 5.0
    server.say(driver, [0.1] * 4)
    assert driver.step(see()) == STILL and driver.away == 0.0
    driver.require_server()
    driver.step(see())
    assert driver.step(see()) == pytest.approx(0.1)
    for _ in range(3):
        driver.step(see())  # and asks for the next chunk
    clock.now = 100.0
    driver.reset()
    assert driver.away == 0.0


def test_a_silent_server_is_waited_for_once_where_the_world_waits():
    server = Scripted()
    driver, _ = make(server, patience=0.5, wait=True, clock=time.monotonic)
    started = time.monotonic()
    assert driver.step(see()) == STILL
    assert 0.5 <= time.monotonic() - started < 0.9
    with pytest.raises(ServingError, match="not answered"):
        driver.require_server()
    server.say(driver, [0.1] * 4)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"low": 0.5, "high": -0.5}, "must not exceed high"),
        ({"low": np.zeros(3), "high": np.ones(2)}, "an array with the shape of an action"),
        ({"low": "none"}, "an array with the shape of an action"),
        ({"low": np.zeros(3)}, r"low has shape \[3\], but the policy's actions have \[1\]"),
        ({"change": np.ones((2, 1))}, r"change has shape \[2, 1\]"),
        ({"low": 2.0}, "No action is within both the robot's bounds and the policy's"),
    ],
)
def test_limits_that_do_not_fit_the_actions_are_refused(limits, text):
    with pytest.raises(ConfigError, match=text):
        make(Scripted(), limits=ActionLimits(**limits))


def test_what_is_no_action_of_the_policys_is_never_sent():
    for hold in (np.zeros(3), np.array([np.nan])):
        with pytest.raises(ConfigError, match="hold"):
            make(Scripted(), hold=hold)
    driver, _ = make(Scripted(), hold=lambda frames, last: np.zeros(2))
    with pytest.raises(ConfigError, match=r"hold has shape \[2\]"):
        driver.step(see())
    driver, _ = make(Scripted(), limits=ActionLimits(workspace=lambda action: np.zeros(2)))
    with pytest.raises(ConfigError, match=r"workspace returned an action of shape \[2\]"):
        driver.step(see())


def test_a_frame_of_another_shape_is_refused_before_it_is_remembered():
    front = IMAGE_PREFIX + "front"
    fields = {STATE: Field((1,)).to_json(), front: Field((4, 4, 3), "uint8").to_json()}
    driver, _ = make(Scripted(history=2, observation=fields))
    image = np.zeros((8, 6, 3), np.uint8)  # which the server resizes
    driver.step({**see(), front: image})
    for wrong, text in (
        ({front: image[:4]}, r"has shape \[4, 6, 3\] now but had \[8, 6, 3\] before"),
        ({STATE: np.zeros(3)}, r"has shape \[3\], but the policy reads shape \[1\]"),
        ({STATE: ["x"]}, "must be a numeric array"),
        ({STATE: [[0.0], [0.0, 1.0]]}, "not an array"),
    ):
        with pytest.raises(SpecError, match=text):
            driver.step({**see(), front: image, **wrong})
    assert driver.step({**see(), front: image}) == STILL
    driver.reset()
    assert driver.step({**see(), front: image[:4]}) == STILL  # another episode, another camera


def test_a_latency_that_leaves_no_answer_of_use_is_refused():
    ahead = {"chunking": "rtc", "prediction": 8}
    with pytest.raises(
        ConfigError, match=r"latency_steps=5 is too large: this server is called every 4 steps .* at most 4 steps"
    ):
        make(Scripted(**ahead), latency_steps=5, prefetch=0)
    with pytest.raises(ConfigError, match="3 further steps, so the latency can be at most 3 steps"):
        make(Scripted(**ahead | {"prediction": 7}), latency_steps=4, prefetch=0)
    make(Scripted(**ahead), latency_steps=4, prefetch=0)
    with pytest.raises(ConfigError, match=r"delayed by 0\.8 s is older than max_age \(0\.8 s\)"):
        make(Scripted(), latency_steps=8)
    make(Scripted(), latency_steps=8, wait=True)
    make(Scripted(), latency_steps=8, max_age=2.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_action_change": -0.05},
        {"max_action_change": float("nan")},
        {"blend": -3},
        {"max_observation_age": 0.0},
        {"server_timeout": 0.0},
    ],
)
def test_settings_that_no_robot_is_driven_by_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RobotSettings(**wrong)


def test_what_holds_a_robot_still_is_a_number_or_nothing_is_executed():
    driver, _ = make(Scripted(), hold=lambda frames, last: np.array([np.nan]))
    with pytest.raises(NonFiniteError, match="no action was executed"):
        driver.step(see())


def test_a_new_chunk_leads_over_from_the_old_one():
    server = Scripted()
    driver, _ = make(server, prefetch=3, blend=2)
    driver.step(see())
    server.say(driver, [0.0, 0.0, 0.0, 0.0])
    assert driver.step(see()) == driver.step(see()) == 0.0
    server.say(driver, [0.9, 0.9, 0.9, 0.9])
    assert [float(driver.step(see())[0]) for _ in range(3)] == pytest.approx([0.3, 0.6, 0.9])


def test_what_goes_round_takes_the_short_way_and_what_switches_changes_at_once():
    names = ["x", "yaw", "gripper", "lamp"]
    pi, old, new = np.pi, np.array([0.0, -3.1, 0.0, 0.0]), np.array([0.4, 3.1, 1.0, 1.0])

    def blended(unit, turn=np.inf, **options):
        action = {"shape": [4], "names": names, "unit": unit, "low": [-9, -turn, -9, -9], "high": [9, turn, 9, 9]}
        driver, _ = make(
            Scripted(action=action), hold=np.zeros(4), blend=3, limits=ActionLimits(unbounded=True), **options
        )
        driver._chunk = np.tile(old, (4, 1))
        return driver, driver._blended(np.tile(new, (4, 1)), 0)

    driver, chunk = blended(", rad, , ", pi)
    np.testing.assert_allclose(chunk[:, 0], [0.1, 0.2, 0.3, 0.4])
    gap = 2 * pi - 6.2
    np.testing.assert_allclose(np.cos(chunk[:, 1]), np.cos(3.1 + gap * np.array([0.75, 0.5, 0.25, 0])), atol=1e-9)
    assert (abs(chunk[:, 1]) <= pi + 1e-9).all() and chunk[0, 1] < 0 < chunk[2, 1]
    assert chunk[:, 2].tolist() == [1.0] * 4 and chunk[:3, 3].tolist() == [0.25, 0.5, 0.75]
    assert blended("")[1][:, 1].tolist() == [3.1] * 4  # a yaw of which nobody says how long a turn is
    _, chunk = blended("", switches=["lamp"], turns={"yaw": 6.2, "gripper": 0.0})
    assert chunk[0].tolist() == pytest.approx([0.1, 3.1, 0.25, 1.0])
    with pytest.raises(ConfigError, match="periods contains 'yau'"):
        blended("", turns={"yau": 6.2})
    # A limit of change counts the short way round too.
    driver.limits = ActionLimits(change=0.05)
    steps = [driver.limits.limited(old, np.array([0.0, 3.1, 0.0, 0.0]), driver.policy)[1]]
    steps.append(driver.limits.limited(old, np.array([0.0, steps[-1], 0.0, 0.0]), driver.policy)[1])
    assert steps == pytest.approx([3.15 - 2 * pi, -3.1]) or steps == pytest.approx([3.15 - 2 * pi, 3.2 - 2 * pi])


def test_a_connection_that_is_refused_is_named_before_the_client_gives_up_itself():
    server = Scripted()
    driver, clock = make(server, patience=2.0, max_age=60.0)
    driver._first = False
    driver.step(see())
    server.trouble = ServingError("No server listens at ws://127.0.0.1:9.")
    clock.now = 2.5
    driver.step(see())
    with pytest.raises(
        ServingError, match=r"not answered for more than 2 s .*No server listens at ws://127\.0\.0\.1:9"
    ):
        driver.require_server()
    server.say(driver, [0.1] * 4)


@pytest.mark.parametrize(
    "wrong",
    [ServingError("gone"), [np.nan] * 4, ValueError("odd"), [], np.zeros((4, 3))],
    ids=["gone", "nan", "odd", "empty", "shape"],
)
def test_a_server_that_fails_holds_the_robot_still_and_is_asked_again_later(wrong):
    server = Scripted()
    driver, clock = make(server, prefetch=0)
    if isinstance(wrong, np.ndarray):
        server.infer = lambda observation: {"actions": wrong}
        driver.step(see())
        driver._request.exception(timeout=20)
    else:
        driver.step(see())
        server.say(driver, wrong)
    assert driver.step(see()) == STILL
    assert driver.error is not None
    clock.now = 0.05
    assert driver.step(see()) == STILL
    assert driver._request is None  # not before the back-off is over
    assert driver.away == pytest.approx(0.05)
    clock.now = 0.11
    driver.step(see())
    if isinstance(wrong, np.ndarray):
        assert driver.counts["failures"] == 1
        return
    server.say(driver, [0.7] * 4)
    assert driver.step(see()) == pytest.approx(0.7)
    assert driver.error is None
    assert driver.away == 0.0


def test_the_whole_history_goes_with_every_request_so_a_restarted_server_misses_nothing():
    server = Scripted(history=3)
    driver, _ = make(server, prefetch=3)
    for value in (1.0, 2.0):
        driver.step(see(value))
    server.say(driver, [0.0] * 4)
    for value in (3.0, 4.0):
        driver.step(see(value))
    server.say(driver, [0.0] * 4)
    assert server.asked[-1].ravel().tolist() == [2.0, 3.0, 4.0]
    driver.step(see(4.0))
    driver.reset()
    server.say(driver, [0.5] * 4)  # belongs to the episode before
    assert driver.step(see(9.0)) == STILL
    server.say(driver, [0.6] * 4)
    assert server.asked[-1].ravel().tolist() == [9.0, 9.0, 9.0]


def test_hold_may_be_a_function_of_what_is_seen_and_was_done():
    server = Scripted()
    driver, _ = make(server, hold=lambda frames, last: frames[STATE] if last is None else last / 2)
    assert driver.step(see(0.8)) == pytest.approx(0.8)
    assert driver.step(see(0.1)) == pytest.approx(0.4)


def test_what_cannot_be_driven_is_said_at_once():
    server = Scripted()
    with pytest.raises(ConfigError, match="prefetch must be between 0 and 3"):
        make(server, prefetch=4)
    driver, _ = make(server)
    with pytest.raises(ServingError, match=r"reads observation\.state"):
        driver.step({"other": 1})
    for wrong in ({"history": 10**7}, {"chunk": "x"}, {"action": {"shape": None}}, {"fps": 0}):
        with pytest.raises(ServingError):
            described_policy(server.metadata | wrong)
    with pytest.raises(ServingError, match=r'control rate is unknown: add "fps": N to its robopolicy\.json'):
        described_policy(server.metadata | {"fps": 0.0})
    refused, _ = make(Scripted())
    refused.error = RefusedError("no camera")
    assert refused.hopeless


def test_a_robot_whose_place_nobody_shows_needs_a_hold():
    """Zero, before there is a last action, would drive an arm there."""

    def driven(shown, taken):
        fields = {STATE: {"shape": [1], "names": [shown]}}
        server = Scripted(action={"shape": [1], "names": [taken]}, observation=fields)
        return Driver(server, limits=ActionLimits(change=0.5))

    with pytest.raises(ConfigError, match=r"No field contains the position of arm\.pos.*pass hold"):
        driven("other.pos", "arm.pos")
    for shown, taken in (("arm.pos", "arm.pos"), ("other.pos", "base.vel"), ("other.pos", "gripper")):
        driven(shown, taken).close()


def test_a_sensor_that_shows_nothing_lets_no_first_action_through():
    """Where the robot is nobody would know, and `change` would bind nothing."""
    server = Scripted(low=-np.inf, high=np.inf)
    driver, _ = make(server, hold=lambda frames, last: frames[STATE], limits=ActionLimits(change=0.5))
    for value in (np.nan, np.inf):
        with pytest.raises(NonFiniteError, match=f"robot's '{STATE}' contains NaN or infinity"):
            driver.step(see(value))
    assert not server.asked


def test_an_instruction_is_text():
    """str() would make instructions of None and of arrays: "None", "['go']"."""
    driver, _ = make(Scripted())
    for task in (5, np.array(["go"]), ["go"], b"go"):
        with pytest.raises(SpecError, match="instruction, 'task', must be text"):
            driver.look({**see(), "task": task})
    driver.look({**see(), "task": None})
    assert driver._task is None
    driver.look({**see(), "task": np.str_("go")})
    assert driver._task == "go" and type(driver._task) is str


def test_a_bound_is_no_truth_value():
    with pytest.raises(ConfigError, match="not true or false"):
        ActionLimits(change=True)
