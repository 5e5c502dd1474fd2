"""Planning in a world model: imagine several policy chunks and execute the best.

Sources: COPlanner, Wang et al. 2023, arXiv:2310.07220 (uncertainty over several steps as a penalty in model rollouts
and as a bonus for exploration); Cosmos Policy (best of N candidates by the value of several imagined futures each).
Deviations from COPlanner's public code: episodes that end receive no further reward, and the value after the last
imagined step may be added.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.candidates import AGGREGATED, best_of, repeat_observation
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, TensorObservation, is_memoryless, to_tensors
from robopolicy.core.randomness import integers
from robopolicy.core.spec import TASK, PolicySpec, require_consistent_fields
from robopolicy.core.world import Rows
from worldmodels.configuration import PlanConfig
from worldmodels.env import ImaginedWorld
from worldmodels.protocol import Context, WorldModel, fields_read

Value = Callable[[TensorObservation], Tensor]
"""Value of an observation, [N]."""


class PlannedPolicy(nn.Module):
    """A `Policy` that plans: it executes the best of several chunks of `policy`, as predicted by `model`.

    value: estimates the value of the last imagined observation where the episode continues; it is added to the score.
    Chunks, latents and log-probabilities are those of `policy`, so `policy.log_prob` applies to them and ignores the
    selection. `last_scores` [B, N] are the scores of the latest policy call; candidate 0 is first, which is the
    noise-free chunk if `deterministic`. Raises ConfigError when the model is for another task than the policy.
    """

    def __init__(self, policy: Policy, model: WorldModel, config: PlanConfig | None = None, value: Value | None = None):
        super().__init__()
        require_same_task(policy, model)
        self.policy = policy
        self.model = model
        self.config = config or PlanConfig()
        self.value = value
        self.last_scores = torch.zeros(0, 0)
        self._world: ImaginedWorld | None = None
        self._context = Context({})

    @property
    def spec(self) -> PolicySpec:
        """Spec of the policy plus the model's inputs."""
        spec = self.policy.spec
        return replace(spec, observation={**spec.observation, **fields_read(self.model)})

    @property
    def inner(self) -> Policy:
        """The policy."""
        return self.policy

    def around(self, inner: Policy) -> "PlannedPolicy":
        """Return a planner with the same settings around another policy."""
        return PlannedPolicy(inner, self.model, self.config, self.value)

    @property
    def memoryless(self) -> bool:
        """Whether the wrapped policy has no memory, see `is_memoryless`."""
        return is_memoryless(self.policy)

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy. rows: indices [R] of the episodes to forget, None for all."""
        self.policy.reset(rows)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Sample chunks, imagine them, and select the best.

        Returns actions [B, C, A] of the policy, its latents [B, ...], and its logp and mask [B, K]. Raises ConfigError
        when the observation lacks a field that the model reads, and the errors of policy and model.
        """
        config = self.config

        def score(several: TensorObservation, actions: Tensor) -> Tensor:
            scores = self._imagine(repeat_observation(several, config.rollouts), actions, generator)
            return AGGREGATED[config.aggregate](scores.reshape(-1, config.candidates, config.rollouts))

        decision, self.last_scores = best_of(
            self.policy, observation, generator, config.candidates, score, deterministic=deterministic
        )
        return decision

    def _imagine(self, observation: TensorObservation, first: Tensor, generator: torch.Generator) -> Tensor:
        """Return the score [rows * candidates * rollouts] of executing chunks `first`, then following the policy."""
        config, rollouts = self.config, self.config.rollouts
        chunk = first.repeat_interleave(rollouts, 0)
        world = self._begin(observation, len(chunk))
        # Every rollout has a seed of its own: rollouts of one candidate differ by the model's noise.
        seeds = integers(2**62, (len(chunk),), generator).cpu().numpy()
        imagined_observation = world.reset(seeds=seeds)
        total = np.zeros(len(chunk))
        step_counts = np.zeros(len(chunk), dtype=np.int64)
        while True:
            step = world.step(chunk.double().cpu().numpy())
            assert step.uncertainty is not None
            # [rows, C] each; the discount's powers count the steps since now: `step_counts` [rows] come before.
            penalised = step.reward + config.uncertainty * step.uncertainty
            decay = config.discount ** (step_counts[:, None] + np.arange(chunk.shape[1]))
            total += np.where(step.valid, penalised * decay, 0.0).sum(1)
            step_counts += step.valid.sum(1)
            imagined_observation = step.observation
            if step_counts.max() >= config.horizon or step.ended.all():
                break
            # After its first chunk the policy itself goes on: the score of a candidate estimates the policy's Q.
            chunk = self.policy.act(to_tensors(imagined_observation, chunk.device), generator).actions
        if self.value is not None:
            beyond = self.value(to_tensors(imagined_observation, chunk.device)).cpu().numpy()
            # Nothing comes after the task's end. A row that a time limit cut is worth what its last frame is,
            # discounted by the steps that it took and by none of those that the others took after it.
            total += np.where(step.terminated, 0.0, config.discount**step_counts * beyond)
        return torch.from_numpy(total)

    def _begin(self, observation: TensorObservation, rows: int) -> ImaginedWorld:
        """Return an imagined world of `rows` rows that starts at `observation`."""
        self._context = context_of(self.model, observation)
        if self._world is None or self._world.batch_size != rows:
            history = self.policy.spec.history
            self._world = ImaginedWorld(self.model, lambda seeds: self._context, rows, history=history)
        return self._world


def context_of(model: WorldModel, observation: TensorObservation) -> Context:
    """Return the context in which `model` starts from an observation [B, H, ...].

    Raises ConfigError when the observation lacks a field that the model reads.
    """
    fields = fields_read(model)
    missing_fields = [key for key in fields if key not in observation]
    if missing_fields:
        raise ConfigError(f"The observation lacks {', '.join(missing_fields)}, which the planning world model reads.")
    frames = {key: value.cpu().numpy() for key in fields if isinstance(value := observation[key], Tensor)}
    return Context(frames, np.array(observation[TASK]) if TASK in observation else None)


def require_same_task(policy: Policy, model: WorldModel) -> None:
    """Raise ConfigError when policy and model define an action, or a field that both read, differently."""
    policy_spec, its = policy.spec, fields_read(model)
    shared_fields = {f"'{key}'": (field, its[key]) for key, field in policy_spec.observation.items() if key in its}
    pairs = {**shared_fields, "actions": (policy_spec.action, model.spec.action)}
    prefix = "The planning world model belongs to another task than the policy:"
    for label, (policy_field, model_field) in pairs.items():
        if policy_field.shape != model_field.shape:
            raise ConfigError(
                f"{prefix} its {label} has shape {list(model_field.shape)}, but the policy's has "
                f"{list(policy_field.shape)}. {_ELSEWHERE}"
            )
    sides = ("for the policy", "for the planning world model")
    rates = (policy_spec.fps, model.spec.fps)
    require_consistent_fields(pairs, sides, rates=rates, error=ConfigError, renamed=_ELSEWHERE, converted=_ELSEWHERE)


_ELSEWHERE = "Plan in a model of the world that the policy acts in."
