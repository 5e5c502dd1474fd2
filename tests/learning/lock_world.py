"""Combination locks: worlds of exact arithmetic in which what a mechanism is for can be seen within seconds.

At every step one of `options` is right, which one depends on the step and on the start's context. A wrong choice cannot
be made good again: the episode goes on to its end and fails. Longer locks are harder, so a pool of starts has all
difficulties.
"""

import numpy as np
import torch
from torch import nn

from robopolicy.core.policy import Decision, Scores
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import STATE, Field, PolicySpec, WorldSpec
from robopolicy.core.storage import write_folder_atomic
from robopolicy.core.tensors import save_tree
from robopolicy.core.world import Snapshot, Step

LONGEST = 8
CONTEXTS = 4
FIELDS = {STATE: Field((LONGEST + CONTEXTS + 2,))}
ACTION = Field((1,), low=-1.0, high=1.0)


class LockWorld:
    """Reward 1 at the end if every choice was right.

    lengths: of the locks, drawn with the start; weather: std of a second reward at the end that nobody can do anything
    about; partial: every right choice is paid by itself instead; spare: how many wrong choices are forgiven.
    """

    def __init__(
        self,
        batch_size: int,
        lengths: tuple[int, ...] = (4,),
        options: int = 3,
        weather: float = 0.0,
        partial: bool = False,
        spare: int = 0,
    ):
        self.batch_size, self.lengths, self.options = batch_size, lengths, options
        self.weather, self.partial, self.spare = weather, partial, spare
        self.luck = np.random.default_rng(0)
        self.spec = WorldSpec("lock", FIELDS, ACTION, 10.0, LONGEST)
        zero = np.zeros(batch_size, dtype=np.int64)
        self.arrays = {"time": zero, "context": zero.copy(), "length": zero.copy(), "wrong": zero.copy()}

    def reset(self, rows=None, seeds=None, options=None) -> dict:
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        drawn = uniforms(np.asarray(seeds), 2)
        self.arrays["time"][rows] = 0
        self.arrays["context"][rows] = (drawn[:, 0] * CONTEXTS).astype(np.int64)
        self.arrays["length"][rows] = np.array(self.lengths)[(drawn[:, 1] * len(self.lengths)).astype(np.int64)]
        self.arrays["wrong"][rows] = 0
        return self.observe()

    def observe(self) -> dict:
        state = np.zeros((self.batch_size, 1, LONGEST + CONTEXTS + 2), dtype=np.float32)
        every = np.arange(self.batch_size)
        state[every, 0, np.minimum(self.arrays["time"], LONGEST - 1)] = 1.0
        state[every, 0, LONGEST + self.arrays["context"]] = 1.0
        state[:, 0, -2] = self.arrays["wrong"] <= self.spare
        state[:, 0, -1] = self.arrays["length"] / LONGEST
        return {STATE: state}

    def step(self, actions: np.ndarray) -> Step:
        choice = np.round((actions[:, 0, 0] + 1) / 2 * (self.options - 1)).astype(np.int64)
        time, length = self.arrays["time"], self.arrays["length"]
        wanted = (3 * self.arrays["context"] + 2 * time + time // 2) % self.options
        valid = time < length
        right = choice == wanted
        if not self.partial:
            self.arrays["wrong"] = self.arrays["wrong"] + (valid & ~right)
        self.arrays["time"] = np.minimum(time + 1, length)
        over = self.arrays["time"] >= length
        won = self.arrays["wrong"] <= self.spare
        success = over & won
        paid = right & valid if self.partial else success & valid
        rewards = {"opened": paid.astype(np.float64)[:, None]}
        if self.weather:
            drawn = self.weather * self.luck.normal(size=self.batch_size)
            rewards["weather"] = np.where(over & valid, drawn, 0.0)[:, None]
        return Step(self.observe(), {}, rewards, valid[:, None], over & won, over & ~won, success)

    def snapshot(self, rows=None) -> Snapshot:
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        return Snapshot({name: array[rows].copy() for name, array in self.arrays.items()})

    def restore(self, snapshot: Snapshot, rows=None) -> dict:
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        for name, array in snapshot.arrays.items():
            self.arrays[name][rows] = array
        return self.observe()

    def close(self) -> None:
        pass


class ChoicePolicy(nn.Module):
    """One categorical unit a decision, from a two-layer network."""

    def __init__(self, options: int = 3, seed: int = 0):
        super().__init__()
        self.options = options
        self.spec = PolicySpec(FIELDS, ACTION, 1, 1, 1, 1, 10.0, categorical=True, steps_per_action=1)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(FIELDS[STATE].size, 32), nn.Tanh(), nn.Linear(32, options))
        with torch.no_grad():
            self.layers[2].weight.mul_(0.1)
            self.layers[2].bias.zero_()

    def trainable_parameters(self):
        return iter(self.parameters())

    def _scores(self, observation) -> torch.Tensor:
        return self.layers(observation[STATE][:, -1]).log_softmax(-1)

    @torch.no_grad()
    def act(self, observation, generator, *, deterministic=False) -> Decision:
        scores = self._scores(observation)
        token = scores.argmax(-1, keepdim=True)
        if not deterministic:
            token = torch.multinomial(scores.exp(), 1, generator=generator)
        actions = (2 * token.float() / (self.options - 1) - 1)[:, None]
        mask = torch.full(token.shape, not deterministic)
        return Decision(actions, {"token": token}, scores.gather(-1, token) * mask, mask)

    def log_prob(self, observation, latents) -> Scores:
        scores = self._scores(observation)
        entropy = -(scores.exp() * scores).sum(-1, keepdim=True)
        return Scores(scores.gather(-1, latents["token"]), entropy)

    def reset(self, rows=None) -> None:
        pass

    def save(self, folder) -> None:
        write_folder_atomic(folder, lambda inside: save_tree(inside, "model", dict(self.state_dict())))


def success_of(policy: ChoicePolicy, lengths: tuple[int, ...] = (4,), episodes: int = 256, spare: int = 0) -> float:
    """Share of sampled episodes in which the lock opens."""
    world = LockWorld(episodes, lengths, policy.options, spare=spare)
    observation, generator = world.reset(seeds=np.arange(episodes) + 10_000), torch.Generator().manual_seed(1)
    won = np.zeros(episodes, dtype=bool)
    for _ in range(LONGEST):
        tensors = {key: torch.as_tensor(value) for key, value in observation.items()}
        step = world.step(policy.act(tensors, generator).actions.numpy())
        observation, won = step.observation, won | step.success
    return float(won.mean())
