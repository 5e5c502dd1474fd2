"""Planning in a world model: try several decisions of a policy in imagination, and take the best.

Sources: COPlanner, Wang et al. 2023, arXiv:2310.07220 (uncertainty of several steps as a price in model rollouts and as
a bonus when exploring); Cosmos Policy (best of N candidates by the value of several imagined futures each).
Deviations from COPlanner's public code: episodes that end earn nothing after it, and what comes after the last imagined
step may be added as a value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.policy import Decision, Policy, Scores, TensorObservation, to_tensors
from robopolicy.core.spec import TASK, PolicySpec
from robopolicy.core.world import Rows
from worldmodels.env import ImaginedWorld
from worldmodels.protocol import Context, WorldModel

Value = Callable[[TensorObservation], Tensor]
"""What an observation is worth, [N]."""

AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda scores: scores.mean(-1),
    "lower_bound": lambda scores: scores.mean(-1) - scores.std(-1, correction=0),
    "median": lambda scores: scores.median(-1).values,
    "majority": lambda scores: majority_mean(scores),
}
"""How the scores [..., F] of several imagined futures become one."""


@dataclass(frozen=True)
class PlanConfig:
    """Looking ahead in a world model: of several decisions of a policy, take the one that the model thinks best of."""

    candidates: int = 5
    """Decisions tried for each row."""
    horizon: int = 10
    """Control steps imagined, whole chunks of the policy."""
    discount: float = 0.97
    """Of rewards and of uncertainty, a control step."""
    uncertainty: float = 0.0
    """What a unit of it adds: negative to stay where the model knows (conservative), positive to go where it does not
    (optimistic, for exploring).
    """
    futures: int = 1
    """How often each candidate is imagined."""
    aggregate: str = "mean"
    """How their scores become one: mean, lower_bound (mean minus deviation), median or majority."""

    def __post_init__(self):
        if min(self.candidates, self.horizon, self.futures) < 1 or not 0 < self.discount <= 1:
            raise ConfigError("Planning needs candidates, horizon and futures >= 1 and a discount in (0, 1].")
        if self.aggregate not in AGGREGATES:
            raise ConfigError(f"aggregate={self.aggregate} is not known.{did_you_mean(self.aggregate, AGGREGATES)}")


class PlannedPolicy(nn.Module):
    """A `Policy` that looks ahead: of several decisions of `policy` it takes the one that `model` thinks best of.

    value: adds what the last imagined observation is worth where the episode goes on. Decisions are those of `policy`,
    units and log-probabilities included, so whatever they are good for they stay good for. `last_scores` [B, N] are
    those of the latest decision, candidate 0 first: the policy's own noise-free choice if it was asked to be
    deterministic.
    """

    def __init__(self, policy: Policy, model: WorldModel, config: PlanConfig | None = None, value: Value | None = None):
        super().__init__()
        self.policy, self.model, self.config, self.value = policy, model, config or PlanConfig(), value
        self.last_scores = torch.zeros(0, 0)
        self._world: ImaginedWorld | None = None
        self._context = Context({})

    @property
    def spec(self) -> PolicySpec:
        """That of the policy, which besides needs to see what the model sees."""
        spec = self.policy.spec
        return replace(spec, observation={**spec.observation, **self.model.spec.observation})

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy."""
        self.policy.reset(rows)

    def save(self, folder: Path) -> None:
        """Save the policy; planning is not part of a checkpoint."""
        self.policy.save(folder)

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Score decisions under the policy; choosing among them is not scored."""
        return self.policy.log_prob(observation, latents)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide, imagine, choose."""
        count = self.config.candidates
        tried = self.policy.act(repeated(observation, count), generator, deterministic=False)
        rows = len(tried.actions) // count
        if deterministic:
            sure = self.policy.act(observation, generator, deterministic=True)
            first = torch.arange(rows, device=tried.actions.device) * count
            tried = Decision(
                tried.actions.index_copy(0, first, sure.actions),
                {name: value.index_copy(0, first, sure.latents[name]) for name, value in tried.latents.items()},
                tried.logp.index_copy(0, first, sure.logp),
                tried.mask.index_copy(0, first, sure.mask),
            )
        scores = self._imagine(repeated(observation, count * self.config.futures), tried.actions, generator)
        self.last_scores = AGGREGATES[self.config.aggregate](scores.reshape(rows, count, -1)).cpu()
        best = self.last_scores.argmax(1) + torch.arange(rows) * count
        best = best.to(tried.actions.device)
        latents = {name: value[best] for name, value in tried.latents.items()}
        return Decision(tried.actions[best], latents, tried.logp[best], tried.mask[best])

    def _imagine(self, observation: TensorObservation, first: Tensor, generator: torch.Generator) -> Tensor:
        """Return the score [rows * candidates * futures] of following the chunks `first`, then the policy."""
        config, futures = self.config, self.config.futures
        chunk = first.repeat_interleave(futures, 0)
        world = self._begin(observation, len(chunk))
        seeds = torch.randint(2**62, (len(chunk),), generator=generator, device=generator.device).cpu().numpy()
        seen = world.reset(seeds=seeds)
        total, factor, imagined = np.zeros(len(chunk)), 1.0, 0
        while True:
            step = world.step(chunk.double().cpu().numpy())
            decay = factor * config.discount ** np.arange(chunk.shape[1])
            assert step.uncertainty is not None
            earned = step.reward + config.uncertainty * step.uncertainty
            total += np.where(step.valid, earned * decay, 0.0).sum(1)
            imagined, factor = imagined + chunk.shape[1], factor * config.discount ** chunk.shape[1]
            seen = step.observation
            if imagined >= config.horizon or step.ended.all():
                break
            chunk = self.policy.act(to_tensors(seen, chunk.device), generator).actions
        if self.value is not None:
            beyond = self.value(to_tensors(seen, chunk.device)).cpu().numpy()
            total += np.where(step.terminated, 0.0, factor * beyond)
        return torch.from_numpy(total)

    def _begin(self, observation: TensorObservation, rows: int) -> ImaginedWorld:
        """Return a world of `rows` rows that begins where `observation` is."""
        missing = [key for key in self.model.spec.observation if key not in observation]
        if missing:
            raise ConfigError(f"The world model that plans sees {', '.join(missing)}, and what is observed lacks it.")
        frames = {key: _array(observation[key]) for key in self.model.spec.observation}
        task = np.array(observation[TASK]) if TASK in observation else None
        self._context = Context(frames, task)
        if self._world is None or self._world.batch_size != rows:
            history = self.policy.spec.history
            self._world = ImaginedWorld(self.model, lambda seeds: self._context, rows, history=history)
        return self._world


def repeated(observation: TensorObservation, times: int) -> TensorObservation:
    """Return every row of an observation `times` times in a row."""
    result: TensorObservation = {}
    for key, value in observation.items():
        if isinstance(value, Tensor):
            result[key] = value.repeat_interleave(times, 0)
        else:
            result[key] = [text for text in value for _ in range(times)]
    return result


def majority_mean(scores: Tensor) -> Tensor:
    """Return the mean of the majority of scores [..., F]: those on the side of their midrange that more are on."""
    middle = (scores.amin(-1, keepdim=True) + scores.amax(-1, keepdim=True)) / 2
    high = scores >= middle
    chosen = torch.where(2 * high.sum(-1, keepdim=True) >= scores.shape[-1], high, ~high)
    return (scores * chosen).sum(-1) / chosen.sum(-1)


def _array(value: Any) -> np.ndarray:
    return value.cpu().numpy()
