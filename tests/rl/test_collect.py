"""Streams go on over episode ends, and what happened before a reset is kept."""

import numpy as np
import pytest
import torch

from robopolicy.core.errors import NonFiniteError, SpecError
from robopolicy.core.policy import Decision
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.spec import STATE, TASK, Field, PolicySpec, WorldSpec
from robopolicy.core.world import Step
from robopolicy.rl.collect import play, start_streams

ACTION = Field((1,))


class CountingWorld:
    """Shows (seed, steps so far); the action is how many steps the episode lasts, from the row's first action on."""

    def __init__(self, batch_size: int, task: str = "count"):
        self.batch_size = batch_size
        self.spec = WorldSpec("counting", {STATE: Field((2,))}, ACTION, 1.0, 5, instructions=("wait", "count"))
        self.state = np.zeros((batch_size, 2))
        self.stepped = 0
        self.task = task
        self.bad_reward = False

    def reset(self, rows=None, seeds=None, options=None):
        rows = np.arange(self.batch_size) if rows is None else rows
        self.state[rows] = np.stack([seeds, np.zeros(len(rows))], -1)
        return self.observe()

    def observe(self):
        return {STATE: self.state[:, None].astype(np.float32), TASK: np.array([self.task] * self.batch_size)}

    def step(self, actions):
        self.stepped += 1
        count = self.state[:, 1:2] + np.arange(1, actions.shape[1] + 1)
        length = 2 + np.arange(self.batch_size)[:, None]
        valid = count <= length
        self.state[:, 1] = np.minimum(self.state[:, 1] + actions.shape[1], length[:, 0])
        over = self.state[:, 1] >= length[:, 0]
        first = np.arange(self.batch_size) == 0
        reward = np.where(valid, np.nan if self.bad_reward else 1.0, 0.0)
        return Step(
            self.observe(), {}, {"a": reward, "b": 0 * reward}, valid, over & first, over & ~first, over & first
        )


class ConstantPolicy:
    """Acts with a constant; remembers which rows it was told to forget."""

    def __init__(self, value: float = 0.0, chunk: int = 2):
        self.spec = PolicySpec({STATE: Field((2,))}, ACTION, 1, chunk, chunk, 1, 1.0)
        self.value, self.forgot = value, []

    def act(self, observation, generator, *, deterministic=False):
        rows = len(observation[STATE])
        noise = torch.rand(rows, 1, generator=generator)
        actions = torch.full((rows, self.spec.chunk, 1), self.value)
        return Decision(actions, {"noise": noise}, noise.log(), torch.ones(rows, 1, dtype=torch.bool))

    def reset(self, rows=None):
        self.forgot.append(None if rows is None else rows.tolist())


def test_streams_go_on_over_resets_and_keep_what_came_before():
    world, policy = CountingWorld(3), ConstantPolicy()
    streams = start_streams(world, policy, 7)
    rollouts = play(world, policy, 4, torch.Generator().manual_seed(0), streams)
    seeds = episode_seeds(7, "collect", 11).astype(np.float32)
    assert rollouts.shape == (3, 4)
    # lengths 2, 3, 4 with chunks of 2: rows end every 1, 2, 2 decisions
    assert rollouts.ended.tolist() == [[True] * 4, [False, True] * 2, [False, True] * 2]
    assert rollouts.terminated.tolist() == [[True] * 4, [False] * 4, [False] * 4]
    assert rollouts.truncated.tolist() == [[False] * 4, [False, True] * 2, [False, True] * 2]
    assert not rollouts.horizon_end.any()
    assert rollouts.duration.tolist() == [[2] * 4, [2, 1] * 2, [2, 2] * 2]
    assert rollouts.next_observation[STATE][1, :, 0, 1].tolist() == [2, 3, 2, 3]
    assert rollouts.observation[STATE][1, :, 0, 1].tolist() == [0, 2, 0, 2]
    assert rollouts.extras["episode_return"].tolist() == [[2, 2, 2, 2], [2, 3, 2, 3], [2, 4, 2, 4]]
    assert rollouts.task.tolist() == [[1] * 4] * 3
    assert set(rollouts.rewards) == {"a", "b"}
    assert policy.forgot == [None, [0], [0, 1, 2], [0], [0, 1, 2]]
    assert streams.episodes == 3 + 4 + 2 + 2
    used = rollouts.observation[STATE][:, :, 0, 0]
    assert used[0].tolist() == seeds[[0, 3, 4, 7]].tolist()
    assert used[1].tolist() == seeds[[1, 1, 5, 5]].tolist()


def test_two_calls_equal_one():
    def collected(parts: list[int]):
        world, policy, generator = CountingWorld(3), ConstantPolicy(), torch.Generator().manual_seed(3)
        streams = start_streams(world, policy, 1)
        return [play(world, policy, part, generator, streams) for part in parts]

    (whole,), halves = collected([6]), collected([2, 4])
    for name in ("actions", "logp_behaviour", "valid", "ended"):
        torch.testing.assert_close(getattr(whole, name), torch.cat([getattr(half, name) for half in halves], 1))
    torch.testing.assert_close(whole.observation[STATE], torch.cat([half.observation[STATE] for half in halves], 1))


def test_a_bad_action_never_reaches_the_world():
    world, policy = CountingWorld(2), ConstantPolicy(float("nan"))
    with pytest.raises(NonFiniteError, match="actions"):
        play(world, policy, 1, torch.Generator(), start_streams(world, policy, 0))
    assert world.stepped == 0


def test_a_bad_reward_and_an_unknown_task_are_named():
    world, policy = CountingWorld(2), ConstantPolicy()
    world.bad_reward = True
    with pytest.raises(NonFiniteError, match="reward 'a'"):
        play(world, policy, 1, torch.Generator(), start_streams(world, policy, 0))
    world = CountingWorld(2, task="dance")
    with pytest.raises(SpecError, match="dance"):
        play(world, policy, 1, torch.Generator(), start_streams(world, policy, 0))
