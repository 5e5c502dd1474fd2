"""Robots whose policy was trained to decide ahead: the driver keeps the queue that the world kept in training."""

import threading

import numpy as np
import pytest

from robopolicy.client.driver import Driver
from robopolicy.client.element_mapping import map_elements
from robopolicy.core.delayed import QUEUE, queue_field
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE
from robopolicy.serving.configuration import RobotSettings
from robopolicy.serving.drive import drive
from sims.registry import make_world

STEPS, CHUNK, NAME = 3, 4, "pick_place"


class Decides:
    """A server whose decisions follow from all that it is shown; remembers what that was."""

    def __init__(self, world, ahead=STEPS, chunk=CHUNK):
        spec = world.spec
        observation = {STATE: spec.observation[STATE].to_json(), QUEUE: queue_field(spec.action, ahead).to_json()}
        self.metadata = {
            "observation": observation,
            "history": spec.history,
            "chunk": chunk,
            "fps": spec.fps,
            "action": spec.action.to_json(),
        }
        self.seen: list[np.ndarray] = []

    def infer(self, observation):
        queue, state = np.asarray(observation[QUEUE])[-1], np.asarray(observation[STATE])[-1]
        self.seen.append(queue)
        return {"actions": decided(state[None], queue[None])[0]}


def decided(state, queue):
    """Return a chunk [B, C, 4] that depends on state [B, S] and queue [B, d * 4]."""
    step = np.arange(1, CHUNK + 1)[:, None]
    place = np.arange(4)
    return np.sin(9 * state.sum(-1)[:, None, None] * step + queue.sum(-1)[:, None, None] + place)


@pytest.mark.parametrize("hold", ["zero", "last"])
def test_a_driven_robot_does_what_the_world_with_a_delay_does(hold):
    options = {"latency_steps": STEPS, "latency_hold": hold}
    now, late = make_world(NAME, 1), make_world(NAME, 1, **options)
    server = Decides(now)
    server.metadata["world"] = {"name": NAME, "options": options}
    actions: list[np.ndarray] = []

    class Remembering:
        spec, batch_size = now.spec, now.batch_size
        reset, close = now.reset, now.close

        def step(self, chunk):
            actions.append(chunk[0, 0].copy())
            return now.step(chunk)

    result = drive(Remembering(), server, [5], robot=RobotSettings(positions=("gripper",)))
    assert result["held"] == result["stale"] == 0 and result["steps"] == now.spec.horizon

    observation, queues = late.reset(seeds=[5]), []
    for _ in range(now.spec.horizon // CHUNK):
        queues.append(observation[QUEUE][0, -1])
        observation = late.step(decided(observation[STATE][:, -1], observation[QUEUE][:, -1])).observation
    assert len(queues) > 5
    np.testing.assert_allclose(server.seen[: len(queues)], queues, atol=1e-6)
    # The last d steps of every queue are what is done next: the actions that the robot got are those of the world.
    sent = np.stack(actions)
    for place, queue in enumerate(queues[1:], 1):
        np.testing.assert_allclose(sent[place * CHUNK : place * CHUNK + STEPS].reshape(-1), queue, atol=1e-6)


class Slow(Decides):
    """Answers when it is told to."""

    def __init__(self, world):
        super().__init__(world)
        self.go = threading.Semaphore(0)

    def infer(self, observation):
        assert self.go.acquire(timeout=20)
        return super().infer(observation)


def test_a_server_that_is_quick_enough_is_never_waited_for_and_one_that_is_not_holds_the_robot_still():
    world = make_world(NAME, 1)
    server, hold = Slow(world), np.array([0.0, 0.0, 0.0, 0.5])
    frames = {STATE: np.zeros(world.spec.observation[STATE].shape)}
    with Driver(server, hold=hold, patience=20.0, grace=0.0) as driver:
        server.go.release()
        first = [driver.step(frames) for _ in range(STEPS)]
        np.testing.assert_array_equal(first, [hold] * STEPS)  # until the first decision counts
        assert driver.counts["held"] == 0
        chunk = decided(np.zeros((1, 1)), np.zeros((1, STEPS * 4)))[0]
        taken = [driver.step(frames)]  # three are left of it then, and the next is asked for
        driver.look(frames)
        request = driver._request
        assert request is not None
        taken.append(driver.act())
        server.go.release()
        request.result(timeout=20)
        taken += [driver.step(frames) for _ in range(2)]
        np.testing.assert_allclose(taken, chunk, atol=1e-6)
        np.testing.assert_allclose(server.seen[1], chunk[1:].reshape(-1), atol=1e-6)  # what it was told is underway
        after = [driver.step(frames) for _ in range(CHUNK)]
        expected = decided(np.zeros((1, 1)), chunk[1:].reshape(1, -1))[0]
        np.testing.assert_allclose(after, expected, atol=1e-6)
        assert driver.counts["held"] == 0
        np.testing.assert_array_equal(driver.step(frames), hold)  # no answer yet
        assert driver.counts["held"] == 1


def test_what_cannot_be_driven_is_refused_and_robots_need_not_show_the_queue():
    world = make_world(NAME, 1)
    with pytest.raises(ConfigError, match="trained with a latency of 5 steps, but its chunks have 4"):
        Driver(Decides(world, ahead=5), hold=np.zeros(4))
    motors = dict.fromkeys(world.spec.observation[STATE].names, float)
    takes = dict.fromkeys(world.spec.action.names, float)
    assert list(map_elements(Decides(world).metadata, motors, takes, {}, {}).vectors) == [STATE]


def test_what_is_decided_ahead_does_not_lead_over_from_what_is_done_before_it():
    plain, blended = ([*_driven(blend=blend)] for blend in (0, 2))
    assert plain == blended


def _driven(**options):
    world = make_world(NAME, 1)
    with Driver(Decides(world), hold=np.zeros(4), wait=True, **options) as driver:
        for _ in range(3 * CHUNK):
            yield driver.step({STATE: np.zeros(world.spec.observation[STATE].shape)}).tolist()


def test_stillness_that_the_policy_was_shown_is_not_lateness():
    """A short queue was shown as one that ends in holding still: its decision is for the step after that."""
    world = make_world(NAME, 1)
    server = Slow(world)
    frames = {STATE: np.zeros(world.spec.observation[STATE].shape)}
    with Driver(server, hold=np.zeros(4), patience=20.0, grace=0.0, max_age=60.0) as driver:
        server.go.release()
        for _ in range(STEPS + CHUNK):  # the first chunk is executed, and the second is not there
            driver.step(frames)
        driver.step(frames)
        assert driver.counts["held"] == 1
        _answer(server, driver)  # one step late: the queue, three steps long, was shown full
        driver.look(frames)
        assert driver.late == 1
        driver._chunk = driver._chunk[: driver._step - driver._begins + 1]  # one action is left, two are still
        driver.look(frames)
        shown = server.seen[-1] if driver._request is None else driver._frames[QUEUE].reshape(-1)
        assert not shown.reshape(STEPS, 4)[1:].any() and shown.reshape(STEPS, 4)[0].any()
        for _ in range(STEPS):
            driver.act()
            driver.look(frames)
        assert driver.counts["held"] == 3
        _answer(server, driver)
        driver.look(frames)
        assert driver.late == 0 and driver._chunk[driver._step - driver._begins].any()


def _answer(server, driver):
    request = driver._request
    assert request is not None
    server.go.release()
    request.result(timeout=20)
