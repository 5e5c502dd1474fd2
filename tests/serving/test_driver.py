"""The driver: a robot acts at every control step, within its limits, whatever the server does."""

import threading

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError, NonFiniteError, ServingError
from robopolicy.core.spec import STATE, Field
from robopolicy.serving.client import RefusedError
from robopolicy.serving.configuration import RobotSettings
from robopolicy.serving.driver import ActionLimits, Driver, described_policy

STILL = np.array([0.25])


class Clock:
    """Time that passes when told; `sleep` by a real driver is not needed in these tests."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Scripted:
    """A server that answers what the test puts in, when it says so."""

    def __init__(self, *, chunk=4, history=1, low=-1.0, high=1.0):
        fields = {STATE: Field((1,)).to_json()}
        action = Field((1,), low=low, high=high).to_json()
        self.metadata = {"observation": fields, "history": history, "chunk": chunk, "fps": 10.0, "action": action}
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


@pytest.mark.parametrize("wrong", [{"change": -0.05}, {"change": np.nan}, {"low": np.nan}, {"high": [1.0, np.nan]}])
def test_limits_that_would_drive_a_robot_away_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"NaN|0 or more"):
        ActionLimits(**{name: np.asarray(value) for name, value in wrong.items()})


@pytest.mark.parametrize("wrong", [{"change": -0.05}, {"change": float("nan")}, {"blend": -3}, {"max_age": 0.0}])
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
    with pytest.raises(ConfigError, match="prefetch is between 0 and 3"):
        make(server, prefetch=4)
    driver, _ = make(server)
    with pytest.raises(ServingError, match=r"reads observation\.state"):
        driver.step({"other": 1})
    for wrong in ({"history": 10**7}, {"chunk": "x"}, {"action": {"shape": None}}, {"fps": 0}):
        with pytest.raises(ServingError):
            described_policy(server.metadata | wrong)
    with pytest.raises(ServingError, match=r'does not say its control rate: write "fps": N into its robopolicy\.json'):
        described_policy(server.metadata | {"fps": 0.0})
    refused, _ = make(Scripted())
    refused.error = RefusedError("no camera")
    assert refused.hopeless
