"""A Gaussian bandit over several steps and the smallest policy with a denoising chain, for tests of the trainer."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.policy import Decision, Scores
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import STATE, TASK, Field, PolicySpec, WorldSpec
from robopolicy.core.storage import write_folder_atomic
from robopolicy.core.tensors import load_tree, save_tree
from robopolicy.core.world import Snapshot, Step

FIELDS = {STATE: Field((2,))}
ACTION = Field((2,), low=-1.0, high=1.0)
TARGET = np.array([0.5, -0.5])


class BanditWorld:
    """Reward -|a - (context + target)|^2 a step; the context is drawn at reset; episodes last `horizon` steps."""

    def __init__(self, batch_size: int, horizon: int = 4, terminates: bool = False, with_task: bool = False):
        self.batch_size = batch_size
        self.terminates, self.with_task = terminates, with_task
        self.spec = WorldSpec("bandit", FIELDS, ACTION, 10.0, horizon, instructions=("go left", "go right"))
        self.context = np.zeros((batch_size, 2))
        self.time = np.zeros(batch_size, dtype=int)
        self.seeds_used: list[int] = []
        self.calls = 0

    def reset(self, rows=None, seeds=None, options=None) -> dict:
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.seeds_used += [int(seed) for seed in seeds]
        self.context[rows] = 0.4 * (uniforms(np.asarray(seeds), 2) - 0.5)
        self.time[rows] = 0
        return self.observe()

    def observe(self) -> dict:
        observation = {STATE: self.context[:, None].astype(np.float32)}
        if self.with_task:
            names = np.array(self.spec.instructions)
            observation[TASK] = names[(self.context[:, 0] > 0).astype(int)]
        return observation

    def step(self, actions: np.ndarray) -> Step:
        self.calls += 1
        index = self.time[:, None] + np.arange(actions.shape[1])
        valid = index < self.spec.horizon
        error = ((actions - self.context[:, None] - TARGET) ** 2).sum(-1)
        rewards = np.where(valid, -error, 0.0)
        self.time = np.minimum(self.time + actions.shape[1], self.spec.horizon)
        over = self.time >= self.spec.horizon
        success = over & (rewards.sum(-1) > -0.1 * valid.sum(-1))
        terminated = over if self.terminates else np.zeros_like(over)
        return Step(self.observe(), {}, {"reward": rewards}, valid, terminated, over & ~terminated, success)

    def close(self) -> None:
        pass


class SavesRows:
    """Adds snapshots of rows to a bandit."""

    def snapshot(self, rows=None) -> Snapshot:
        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        return Snapshot({"context": self.context[chosen].copy(), "time": self.time[chosen].copy()})

    def restore(self, snapshot: Snapshot, rows=None):
        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.context[chosen], self.time[chosen] = snapshot.arrays["context"], snapshot.arrays["time"]
        return self.observe()


class MortalWorld(BanditWorld):
    """A bandit whose process is killed at call number `kill_at` of `step`, 0 for never."""

    kill_at = 0

    def step(self, actions):
        if self.calls + 1 == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(actions)


def run_apart(train: Callable[[Path, int], None], folder: Path, kill_at: int) -> int:
    """Call a function of a test's module in a process of its own; return its exit status."""
    tests = Path(__file__).parents[1]
    paths = [str(Path(__file__).parent), str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    call = f"from {train.__module__} import {train.__name__} as train; train(Path({str(folder)!r}), {kill_at})"
    code = f"import torch; from pathlib import Path; torch.set_num_threads(1); {call}"
    return subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=False).returncode


class ChainPolicy(nn.Module):
    """x_{k+1} ~ N(x_k + f(context, x_k, k), std^2), K steps from normal noise; the chunk repeats the result."""

    def __init__(self, steps: int = 2, chunk: int = 1, std: float = 0.2, seed: int = 0):
        super().__init__()
        self.spec = PolicySpec(FIELDS, ACTION, 1, chunk, chunk, steps, 10.0)
        self.std = std
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(2 + 2 + steps, 32)
        self.second = nn.Linear(32, 2)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight.copy_(0.3 * torch.randn(layer.weight.shape, generator=generator))
                layer.bias.zero_()
        self.poison = False
        self.offset = 0.0
        self.chooses_steps = True

    def trainable_parameters(self):
        return iter(self.parameters())

    def _mean(self, observation: dict, x: Tensor, unit: int) -> Tensor:
        context = observation[STATE][:, -1].clamp(-1, 1)
        step = torch.zeros(len(x), self.spec.scored_steps)
        step[:, unit] = 1.0
        pull = self.second(torch.tanh(self.first(torch.cat([context, x, step], -1))))
        return (0.3 * x if unit == 0 else x) + pull

    @torch.no_grad()
    def act(self, observation: dict, generator: torch.Generator, *, deterministic: bool = False) -> Decision:
        x = torch.randn(len(observation[STATE]), 2, generator=generator)
        chain, logp = [x], []
        for unit in range(self.spec.scored_steps):
            mean = self._mean(observation, x, unit)
            noise = torch.zeros_like(mean) if deterministic else torch.randn(mean.shape, generator=generator)
            x = mean + self.std * noise
            chain.append(x)
            logp.append(self._logp(mean, x))
        if self.poison:
            x = x * torch.nan
        actions = x[:, None].expand(-1, self.spec.chunk, -1)
        stacked = torch.stack(logp, 1)
        return Decision(actions, {"chain": torch.stack(chain, 1)}, stacked, torch.ones_like(stacked, dtype=torch.bool))

    def log_prob(self, observation: dict, latents: dict) -> Scores:
        chain = latents["chain"]
        logp = [
            self._logp(self._mean(observation, chain[:, unit], unit), chain[:, unit + 1])
            for unit in range(self.spec.scored_steps)
        ]
        stacked = torch.stack(logp, 1) + self.offset
        if "chosen" in latents and self.chooses_steps:
            stacked = stacked.gather(1, latents["chosen"])
        return Scores(stacked, torch.zeros_like(stacked))

    def loss(self, batch: dict, generator: torch.Generator) -> dict[str, Tensor]:
        x = torch.randn(len(batch["actions"]), 2, generator=generator)
        for unit in range(self.spec.scored_steps):
            x = self._mean(batch["observation"], x, unit)
        return {"imitation": (x - batch["actions"][:, 0]).square().sum(-1)}

    def _logp(self, mean: Tensor, value: Tensor) -> Tensor:
        return torch.distributions.Normal(mean, self.std).log_prob(value).mean(-1)

    def reset(self, rows=None) -> None:
        pass

    def save(self, folder: Path) -> None:
        write_folder_atomic(folder, lambda inside: save_tree(inside, "model", dict(self.state_dict())))

    def load(self, folder: Path) -> "ChainPolicy":
        self.load_state_dict(load_tree(folder, "model"))
        return self


def mean_reward(policy: ChainPolicy, deterministic: bool) -> dict[str, float]:
    """Evaluate on fixed contexts: success is the share of rows whose squared error is below .1."""
    world = BanditWorld(128, horizon=1)
    generator = torch.Generator().manual_seed(5)
    observation = world.reset(seeds=np.arange(128))
    decision = policy.act({STATE: torch.tensor(observation[STATE])}, generator, deterministic=deterministic)
    reward = world.step(decision.actions.numpy()[:, :1]).rewards["reward"][:, 0]
    return {"success": float((reward > -0.1).mean()), "reward": float(reward.mean())}
