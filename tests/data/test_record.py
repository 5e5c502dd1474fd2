"""Recording: episodes depend on their seed alone, chunks equal single steps, failures are kept or dropped."""

import numpy as np
import pytest
import torch

from robopolicy.core.errors import DataError
from robopolicy.core.policy import Decision
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import STATE, TASK, Field, PolicySpec, WorldSpec
from robopolicy.core.world import Step
from robopolicy.data.record import record

FRONT = "observation.images.front"
SATURATES = pytest.mark.filterwarnings("ignore:Recording 'corridor'")
"""Its walker goes as fast as it may by asking for more."""


class Corridor:
    """A point at a seeded start walks to 1: success there, time limit 12; image: its position as a grey level."""

    def __init__(self, batch_size, camera=False):
        fields = {STATE: Field((2,))}
        if camera:
            fields[FRONT] = Field((2, 2, 3), "uint8", 0, 255)
        self.spec = WorldSpec("corridor", fields, Field((1,), low=-0.1, high=0.1), 10.0, 12, 2, ("progress", "success"))
        self.batch_size, self.camera = batch_size, camera
        self.position, self.time = np.zeros(batch_size), np.zeros(batch_size, int)
        self.previous = self._frame()

    def _frame(self):
        return np.stack([self.position, self.time], -1).astype(np.float32)

    def _observe(self):
        now = self._frame()
        observation = {STATE: np.stack([self.previous, now], 1), TASK: np.array(["walk"] * self.batch_size)}
        if self.camera:
            level = (self.position * 100).astype(np.uint8)
            observation[FRONT] = np.broadcast_to(level[:, None, None, None, None], (self.batch_size, 2, 2, 2, 3)).copy()
        return observation

    def reset(self, rows=None, seeds=None, options=None):
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.position[rows] = uniforms(np.asarray(seeds), 1)[:, 0]
        self.time[rows] = 0
        self.previous[rows] = self._frame()[rows]
        return self._observe()

    def step(self, actions):
        batch, chunk = actions.shape[:2]
        valid = np.zeros((batch, chunk), bool)
        gained, reached = np.zeros((batch, chunk)), np.zeros((batch, chunk))
        trace = np.zeros((batch, chunk, 2), np.float32)
        for index in range(chunk):
            live = (self.position < 1) & (self.time < 12)
            before, earlier = self._frame(), self.position.copy()
            self.previous = np.where(live[:, None], before, self.previous)
            self.position = np.where(live, self.position + np.clip(actions[:, index, 0], -0.1, 0.1), self.position)
            self.time = self.time + live
            valid[:, index], gained[:, index] = live, self.position - earlier
            reached[:, index] = live & (self.position >= 1)
            trace[:, index] = self._frame()
        done = self.position >= 1
        rewards = {"progress": gained, "success": reached}
        return Step(self._observe(), {STATE: trace}, rewards, valid, done, ~done & (self.time >= 12), done)

    def close(self):
        pass


class Walker:
    """Steps of 0.5 (clipped to 0.1), or a chunk of four of them as a policy."""

    def reset(self, rows=None):
        pass

    def act(self, observation):
        return np.full((len(observation[STATE]), 1), 0.5)


class ChunkWalker:
    spec = PolicySpec({STATE: Field((2,))}, Field((1,)), 2, 4, 4, 1, 10.0)

    def reset(self, rows=None):
        pass

    def act(self, observation, generator, *, deterministic=False):
        rows = len(observation[STATE])
        return Decision(torch.full((rows, 4, 1), 0.5), {}, torch.zeros(rows, 1), torch.ones(rows, 1, dtype=torch.bool))

    def log_prob(self, observation, latents): ...

    def save(self, folder): ...


def assert_same(left, right):
    assert left.tasks == right.tasks
    for name in ("actions", "lengths", "step_success", "terminated", "seeds"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    for key in left.observation:
        assert torch.equal(left.observation[key], right.observation[key]), key
    assert torch.equal(left.rewards["progress"], right.rewards["progress"])


@SATURATES
@pytest.mark.parametrize("camera", [False, True])
@pytest.mark.parametrize("batch_size", [3, 16])
def test_result_does_not_depend_on_batch_size_or_chunking(batch_size, camera):
    seeds = np.arange(10) + 100
    single = record(Corridor(1, camera), Walker(), seeds)
    assert_same(single, record(Corridor(batch_size, camera), Walker(), seeds))
    chunked = record(Corridor(batch_size, camera), ChunkWalker(), seeds, generator=torch.Generator())
    assert_same(single, chunked)
    assert single.seeds.tolist() == seeds.tolist()


@SATURATES
def test_frames_actions_and_flags_are_aligned():
    episodes = record(Corridor(4, camera=True), Walker(), np.arange(30))
    moves = episodes.transitions()
    assert torch.allclose(moves.next_state[:, 0] - moves.state[:, 0], moves.action[:, 0], atol=1e-6)
    assert torch.equal(moves.next_state[:, 1] - moves.state[:, 1], torch.ones(len(moves.action)))
    assert torch.equal(moves.success, moves.next_state[:, 0] >= 1)
    assert torch.equal(moves.terminated, moves.success)
    assert episodes.actions.max() == np.float32(0.1)
    assert torch.equal(episodes.observation[FRONT][:, 0, 0, 0], (episodes.observation[STATE][:, 0] * 100).byte())


class Dawdler(Walker):
    """Reaches the goal only from starts beyond 0.4."""

    def act(self, observation):
        return np.full((len(observation[STATE]), 1), 0.05)


@pytest.mark.parametrize("batch_size", [1, 5, 16])
def test_successes_only_keeps_the_first_successes_in_seed_order(batch_size):
    everything = record(Corridor(4), Dawdler(), np.arange(40))
    assert 0.2 < everything.success.float().mean() < 0.9
    kept = record(Corridor(batch_size), Dawdler(), np.arange(40), episodes=9, successes_only=True)
    assert_same(everything.select(everything.success).select(range(9)), kept)
    first = record(Corridor(batch_size), Dawdler(), np.arange(40), episodes=6)
    assert_same(everything.select(range(6)), first)


def test_seeds_that_run_out_are_an_error():
    with pytest.raises(DataError, match="of 30 requested episodes were obtained from 32 seeds"):
        record(Corridor(4), Dawdler(), np.arange(32), episodes=30, successes_only=True)
    with pytest.raises(DataError, match="pass the generator"):
        record(Corridor(4), ChunkWalker(), [1])
