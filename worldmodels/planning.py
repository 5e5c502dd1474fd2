"""Planning in a world model: try several decisions of a policy in imagination, and take the best.

Sources: COPlanner, Wang et al. 2023, arXiv:2310.07220 (uncertainty of several steps as a price in model rollouts and as
a bonus when exploring); Cosmos Policy (best of N candidates by the value of several imagined futures each).
Deviations from COPlanner's public code: episodes that end earn nothing after it, and what comes after the last imagined
step may be added as a value.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.candidates import AGGREGATED, best_of, repeated
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, TensorObservation, to_tensors
from robopolicy.core.randomness import integers
from robopolicy.core.spec import TASK, PolicySpec, require_alike
from robopolicy.core.world import Rows
from worldmodels.configuration import PlanConfig
from worldmodels.env import ImaginedWorld
from worldmodels.protocol import Context, WorldModel, fields_read

Value = Callable[[TensorObservation], Tensor]
"""What an observation is worth, [N]."""


class PlannedPolicy(nn.Module):
    """A `Policy` that looks ahead: of several decisions of `policy` it takes the one that `model` thinks best of.

    value: adds what the last imagined observation is worth where the episode goes on. Decisions are those of `policy`,
    latents and log-probabilities included, so that `policy.log_prob` scores them; choosing among them is not scored.
    `last_scores` [B, N] are those of the latest decision, candidate 0 first: the policy's own noise-free choice if it
    was asked to be deterministic. Raises ConfigError where the model is of another task than the policy.
    """

    def __init__(self, policy: Policy, model: WorldModel, config: PlanConfig | None = None, value: Value | None = None):
        super().__init__()
        _require_same_task(policy, model)
        self.policy = policy
        self.model = model
        self.config = config or PlanConfig()
        self.value = value
        self.last_scores = torch.zeros(0, 0)
        self._world: ImaginedWorld | None = None
        self._context = Context({})

    @property
    def spec(self) -> PolicySpec:
        """That of the policy, which also needs to see what the model sees."""
        spec = self.policy.spec
        return replace(spec, observation={**spec.observation, **fields_read(self.model)})

    @property
    def inner(self) -> Policy:
        """The policy."""
        return self.policy

    def around(self, inner: Policy) -> "PlannedPolicy":
        """Return what looks ahead as this one does, for another policy."""
        return PlannedPolicy(inner, self.model, self.config, self.value)

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy. rows: indices [R] of the episodes to forget, None for all."""
        self.policy.reset(rows)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide, imagine, choose.

        Returns actions [B, C, A] of the policy, its latents [B, ...], and its logp and mask [B, K]. Raises ConfigError
        where the observation lacks a field that the model sees, and what the policy and the model raise.
        """
        config = self.config

        def score(several: TensorObservation, actions: Tensor) -> Tensor:
            imagined = self._imagine(repeated(several, config.rollouts), actions, generator)
            return AGGREGATED[config.aggregate](imagined.reshape(-1, config.candidates, config.rollouts))

        decision, self.last_scores = best_of(
            self.policy, observation, generator, config.candidates, score, deterministic=deterministic
        )
        return decision

    def _imagine(self, observation: TensorObservation, first: Tensor, generator: torch.Generator) -> Tensor:
        """Return the score [rows * candidates * rollouts] of following the chunks `first`, then the policy."""
        config, rollouts = self.config, self.config.rollouts
        chunk = first.repeat_interleave(rollouts, 0)
        world = self._begin(observation, len(chunk))
        # Every rollout has a seed of its own: rollouts of one candidate differ by the model's noise.
        seeds = integers(2**62, (len(chunk),), generator).cpu().numpy()
        seen = world.reset(seeds=seeds)
        total = np.zeros(len(chunk))
        taken = np.zeros(len(chunk), dtype=np.int64)
        while True:
            step = world.step(chunk.double().cpu().numpy())
            assert step.uncertainty is not None
            # [rows, C] each; the discount's powers count the steps since now, of which `taken` [rows] are earlier.
            earned = step.reward + config.uncertainty * step.uncertainty
            decay = config.discount ** (taken[:, None] + np.arange(chunk.shape[1]))
            total += np.where(step.valid, earned * decay, 0.0).sum(1)
            taken += step.valid.sum(1)
            seen = step.observation
            if taken.max() >= config.horizon or step.ended.all():
                break
            # After its first chunk the policy itself goes on: the score of a candidate estimates the policy's Q.
            chunk = self.policy.act(to_tensors(seen, chunk.device), generator).actions
        if self.value is not None:
            beyond = self.value(to_tensors(seen, chunk.device)).cpu().numpy()
            # Nothing comes after the task's end. A row that a time limit cut is worth what its last frame is,
            # discounted by the steps that it took and by none of those that the others took after it.
            total += np.where(step.terminated, 0.0, config.discount**taken * beyond)
        return torch.from_numpy(total)

    def _begin(self, observation: TensorObservation, rows: int) -> ImaginedWorld:
        """Return a world of `rows` rows that begins where `observation` is."""
        fields = fields_read(self.model)
        missing = [key for key in fields if key not in observation]
        if missing:
            raise ConfigError(f"The world model that plans sees {', '.join(missing)}, and what is observed lacks it.")
        frames = {key: value.cpu().numpy() for key in fields if isinstance(value := observation[key], Tensor)}
        task = np.array(observation[TASK]) if TASK in observation else None
        self._context = Context(frames, task)
        if self._world is None or self._world.batch_size != rows:
            history = self.policy.spec.history
            self._world = ImaginedWorld(self.model, lambda seeds: self._context, rows, history=history)
        return self._world


def _require_same_task(policy: Policy, model: WorldModel) -> None:
    """Raise ConfigError where policy and model mean different things by an action, or by a field that both read."""
    own, its = policy.spec, fields_read(model)
    both = {f"'{key}'": (field, its[key]) for key, field in own.observation.items() if key in its}
    pairs = {**both, "actions": (own.action, model.spec.action)}
    begun = "The world model that plans is of another task than the policy:"
    for what, (mine, theirs) in pairs.items():
        if mine.shape != theirs.shape:
            raise ConfigError(
                f"{begun} by {what} it means {list(theirs.shape)}, the policy {list(mine.shape)}. {_ELSEWHERE}"
            )
    sides = ("to the policy", "to the world model that plans")
    rates = (own.fps, model.spec.fps)
    require_alike(pairs, sides, rates=rates, error=ConfigError, renamed=_ELSEWHERE, converted=_ELSEWHERE)


_ELSEWHERE = "Plan in a model of the world that the policy acts in."
