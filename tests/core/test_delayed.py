"""Worlds in which decisions take time, and recordings read as if they had been made in one."""

import numpy as np
import pytest
import torch

from robopolicy.building.worlds import build_controller
from robopolicy.configuration import compose
from robopolicy.core.delayed import QUEUE, DelayedSnapshots, delay_episodes, with_latency
from robopolicy.core.errors import ConfigError, DataError, SpecError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, PolicySpec
from robopolicy.core.world import Snapshots, can_render
from robopolicy.data.record import record
from robopolicy.inference.chunking import Delay, with_chunking
from robopolicy.testing.world import check_world
from sims.registry import load_task, make_world


@pytest.mark.parametrize(("name", "steps"), [("push_cube", 2), ("pick_place", 5), ("push_cube_moving", 1)])
def test_it_keeps_every_promise_of_a_world(name, steps):
    check_world(lambda batch: make_world(name, batch, history=2, latency_steps=steps))


def test_it_does_what_was_decided_so_many_steps_later():
    steps, rows, seeds = 3, 4, np.arange(4)
    late, now = make_world("pick_place", rows, latency_steps=steps), make_world("pick_place", rows)
    observation, expected = late.reset(seeds=seeds), now.reset(seeds=seeds)
    np.testing.assert_array_equal(observation[QUEUE], np.zeros((rows, 1, 4 * steps), np.float32))
    draws = np.random.default_rng(0)
    queue: list[np.ndarray] = []
    for chunk in (2, 5, 1, 4):  # shorter and longer than the delay
        actions = draws.uniform(-1.5, 1.5, (rows, chunk, 4))
        if not queue:  # a robot that waits keeps its gripper as its first decision has it
            still = np.zeros((rows, 4))
            still[:, 3] = actions[:, 0, 3].clip(-1, 1)
            queue = [still] * steps
        step, rewards = late.step(actions), []
        for place in range(chunk):
            queue.append(actions[:, place].clip(-1, 1))
            expected = now.step(queue.pop(0)[:, None])
            rewards.append(expected.reward[:, 0])
            ahead = np.stack(queue, 1).reshape(rows, -1)
            np.testing.assert_array_equal(step.trace[QUEUE][:, place], ahead.astype(np.float32))
            np.testing.assert_array_equal(step.trace[STATE][:, place], expected.trace[STATE][:, 0])
        np.testing.assert_allclose(step.reward, np.stack(rewards, 1), atol=1e-12)
        np.testing.assert_array_equal(step.observation[QUEUE][:, -1], ahead.astype(np.float32))
        np.testing.assert_array_equal(step.observation[STATE], expected.observation[STATE])


def test_a_policy_there_does_what_it_does_under_a_simulated_delay():
    """`chunking.prefetch` delays in the policy what `DelayedWorld` delays in the world."""
    steps, rows, chunk = 2, 5, 4
    late, now = make_world("push_cube", rows, latency_steps=steps), make_world("push_cube", rows)
    drawn = np.random.default_rng(1).uniform(-1, 1, (6, rows, chunk, 2))

    class Says:
        """Predicts chunk + steps actions, of which those of `drawn` come `steps` late; an episode's first do not."""

        def __init__(self):
            self.at = 0
            self.spec = _spec(now, chunk, chunk + steps)

        def predict(self, observation, generator, *, deterministic=False):
            self.at += 1
            late = (0, steps) if self.at == 1 else (steps, 0)
            return torch.nn.functional.pad(torch.tensor(drawn[self.at - 1]), (0, 0, *late))

        def act(self, observation, generator, *, deterministic=False):
            raise AssertionError

        def reset(self, rows=None):
            self.at = 0

    acting = with_chunking(Says(), "prefetch", Delay(steps))
    late.reset(seeds=np.arange(rows))
    first_observation = now.reset(seeds=np.arange(rows))
    for decided in drawn[:5]:
        tensors = {key: torch.tensor(value) for key, value in first_observation.items() if key != "task"}
        one = now.step(acting.act(tensors, torch.Generator()).actions.numpy())
        other = late.step(decided)
        np.testing.assert_allclose(one.observation[STATE], other.observation[STATE], atol=1e-12)
        first_observation = one.observation


def _spec(world, chunk, prediction):
    return PolicySpec(dict(world.spec.observation), world.spec.action, 1, chunk, prediction, 0, world.spec.fps)


@pytest.mark.parametrize("name", ["push_cube_moving", "pick_place"])
def test_an_expert_sees_the_moment_at_which_its_decision_counts(name):
    steps, seeds = 3, np.arange(4)
    late, now = make_world(name, 4, latency_steps=steps), make_world(name, 4)
    section = compose([f"world={name}", f"world.options.latency_steps={steps}"]).world
    played = record(late, build_controller(section, late), seeds)
    expert = load_task(name).expert()
    expert.reset()
    observation = now.reset(seeds=seeds)
    still = np.zeros((4, 1, *now.spec.action.shape))
    still[..., 3:] = 1.0  # an open gripper, as the expert begins
    for _ in range(steps):
        observation = now.step(still).observation
    first = played.starts
    for place in range(8):
        action = np.clip(expert.act(observation), -1, 1)
        np.testing.assert_allclose(played.actions[first + place].numpy(), action, atol=1e-6)
        observation = now.step(action[:, None]).observation
        there = played.observation[STATE][played.frame_starts + steps + place + 1].numpy()
        np.testing.assert_allclose(there, observation[STATE][:, -1], atol=1e-6)
    assert played.success is not None and bool(played.success.all())


def test_a_recording_is_read_as_if_every_decision_had_been_made_late():
    steps = 3
    now, late = make_world("push_cube", 4), make_world("push_cube", 4, latency_steps=steps)
    recorded = record(now, load_task("push_cube").expert(), np.arange(4))
    read = delay_episodes(recorded, steps)
    assert read.lengths.tolist() == (recorded.lengths + steps).tolist()
    assert read.observation_fields[QUEUE] == late.spec.observation[QUEUE]
    # Played in the world with a delay, these decisions lead to what they say, but for what moves while robots wait.
    for episode in range(4):
        late.reset(seeds=[0, 1, 2, 3])
        begin, length = int(read.starts[episode]), int(read.lengths[episode])
        actions = np.repeat(read.actions[begin : begin + length].numpy()[None], 4, 0)
        step = late.step(actions)
        frames = slice(int(read.frame_starts[episode]) + 1, int(read.frame_starts[episode]) + 1 + length)
        for key, error in ((QUEUE, 1e-7), (STATE, 1e-3), (ENVIRONMENT_STATE, 1e-2)):
            np.testing.assert_allclose(step.trace[key][episode], read.observation[key][frames].numpy(), atol=error)
        assert step.success[episode]
        assert read.reward is not None
        np.testing.assert_allclose(step.reward[episode], read.reward[begin : begin + length].numpy(), atol=2e-3)
    assert delay_episodes(read, steps) is read and delay_episodes(recorded, 0) is recorded
    with pytest.raises(DataError, match="latency_steps=3, not 2"):
        delay_episodes(read, 2)


def test_a_gripper_that_waits_is_recorded_as_the_world_shows_it():
    steps = 2
    now, late = make_world("pick_place", 1), make_world("pick_place", 1, latency_steps=steps)
    recorded = record(now, load_task("pick_place").expert(), [0])
    read = delay_episodes(recorded, steps)
    observation = [late.reset(seeds=[0])[QUEUE][:, 0]]
    observation += [late.step(action[None, None].numpy()).observation[QUEUE][:, 0] for action in read.actions[:4]]
    np.testing.assert_allclose(read.observation[QUEUE][:5].numpy(), np.concatenate(observation), atol=1e-7)
    positions = delay_episodes(recorded, steps, "last").observation[QUEUE][1].numpy()
    # x, y, z are moves by their unit: kept, they would go on moving the arm.
    np.testing.assert_allclose(positions[:4], [0.0, 0.0, 0.0, recorded.actions[0, 3]])


class Plain:
    """A world that can neither be saved nor looked at."""

    def __init__(self, world):
        self.spec, self.batch_size = world.spec, world.batch_size
        self.reset, self.step, self.close = world.reset, world.step, world.close


def test_what_a_world_cannot_do_it_cannot_do_with_a_delay_either():
    world = make_world("push_cube", 2)
    late = with_latency(Plain(world), 2)
    assert not isinstance(late, Snapshots) and not can_render(late)
    check_world(lambda batch: with_latency(Plain(make_world("push_cube", batch)), 2), snapshots=False, renders=False)
    assert with_latency(world, 0) is world and isinstance(with_latency(world, 1), DelayedSnapshots)
    with pytest.raises(ConfigError, match="must be an integer from 0 to"):
        with_latency(world, -1)
    for wrong in ("half a second", 1.5, True):
        with pytest.raises(ConfigError, match="must be an integer from 0 to"):
            make_world("push_cube", 2, latency_steps=wrong)
    with pytest.raises(ConfigError, match="latency_hold is still: it must be zero"):
        with_latency(world, 1, "still")
    with pytest.raises(ConfigError, match="already has an action queue"):
        with_latency(with_latency(world, 1), 1)
    with pytest.raises(SpecError, match="not from a world with latency_steps=2"):
        world.reset()
        make_world("push_cube", 2, latency_steps=2).restore(world.snapshot())
