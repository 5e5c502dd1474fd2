"""Improvers: build a candidate from the incumbent and a critic of recorded data, for the gated rounds of `rounds`."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.candidates import best_of
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.images import Images, cameras_in
from robopolicy.core.policy import Policy, TensorObservation, Trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.spec import TASK, PolicySpec
from robopolicy.core.world import World
from robopolicy.nn.optimisers import adamw, clip_gradients, require_finite, set_learning_rate
from robopolicy.nn.precision import tolerance_in
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.context import Context
from robopolicy.rl.critic import Critic
from robopolicy.rl.offline.agent import OfflineAgent, minimum_value_of
from robopolicy.rl.offline.decisions import ROWS, Decisions, observations_at
from robopolicy.rl.offline.interface import Interface
from robopolicy.rl.weights import episode_sizes
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import require_same_scores
from robopolicy.training.offline.configuration import BestOfConfig, ChainPpoConfig, WeightedImitationConfig
from robopolicy.training.update import Learner


@dataclass(frozen=True)
class Imagination:
    """Training in imagination: a world model of the log, its fine-tuning settings, and a factory of critics by seed.

    as_inside: maps a policy to the one that acts in that world with shared weights, for example without its encoder.
    """

    world: World
    settings: FinetuneConfig
    new_critic: Callable[[int], Critic]
    as_inside: Callable[[Policy], Policy] = lambda policy: policy


@dataclass(frozen=True)
class OfflineContext:
    """Inputs of an improver.

    critic: an agent fitted to `data`, whose observations and actions `interface` prepares; imagination: a world model,
    if there is one.
    """

    critic: OfflineAgent
    data: Decisions
    interface: Interface
    imagination: Imagination | None = None

    @property
    def episodes(self) -> Episodes:
        """The recorded episodes."""
        return self.data.episodes

    def recorded(self, rows: Tensor, spec: PolicySpec) -> dict[str, Any]:
        """Return the batch that `Trainable.loss` of a policy of `spec` takes for the recorded chunks `rows` [n]."""
        return self.episodes.windows(self.data.step[rows], spec.history, spec.prediction)

    @torch.no_grad()
    def values(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return min Q(s, a) and V(s) [N] of states [N, S] and flat chunks [N, C * A], as prepared for the critic."""
        return self.critic.action_values(state, action).amin(0), self.critic.value(state)


class Improver(Protocol):
    """Produces candidate policies."""

    def prepare(self, policy: Trainable) -> None:
        """Convert the first incumbent into the candidates' form without changing its behaviour.

        Raises ConfigError for a policy that this method cannot improve.
        """
        ...

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Change `policy` in place; return metrics for the log.

        step: factor of the learning rate, below 1 after candidates were refused; where: name of the round in errors.
        """
        ...


@runtime_checkable
class Wraps(Protocol):
    """An improver whose candidates belong to another class than the policy to improve."""

    def wrap(self, policy: Policy, lesson: OfflineContext, seed: int) -> Trainable:
        """Return a policy of that class that behaves like `policy`; the rounds start from it.

        Raises ConfigError for a policy that this method cannot improve.
        """
        ...


class ChainPpo:
    """Improver with the settings `ChainPpoConfig`, which describes the method.

    Deviations from RL-100: each optimiser step uses all steps with log-probabilities of a minibatch together, not one
    denoising step; neither learning rate nor clip width decays within a round.
    """

    def __init__(self, config: ChainPpoConfig):
        self.config = config

    def prepare(self, policy: Trainable) -> None:
        """Select the last denoising steps (or all tokens) for training; see `Improver`."""
        if not policy.spec.scored_steps:
            raise ConfigError(f"{type(policy).__name__} has no log-probabilities of its steps, which chain_ppo needs.")
        policy.prepare_finetuning(None)

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Sample chunks, compute their advantages and update the policy; see `Improver`."""
        config = self.config
        settings = FinetuneConfig(
            algorithm="ppo",
            epochs=config.epochs,
            minibatch=config.minibatch,
            learning_rate=config.learning_rate * step,
            clip=config.clip,
            target_kl=config.target_kl,
            iterations=config.iterations,
            ratio_tolerance=config.ratio_tolerance,
        )
        instructions = lesson.interface.instructions
        learner = Learner(policy, None, None, build_algorithm(settings), settings, instructions)
        figures: dict[str, float] = {}
        for iteration in range(config.iterations):
            rollouts = resample_decisions(policy, lesson, config.observations, generators, iteration)
            figures = {"advantage": float((rollouts.extras["q"] - rollouts.extras["v"]).mean())}
            tolerance = tolerance_in("fp32", config.ratio_tolerance, policy.spec.categorical)
            require_same_scores(rollouts, policy, iteration, instructions, tolerance, where)
            context = Context(iteration=iteration, iterations=config.iterations, generator=generators["minibatches"])
            figures |= learner.update(rollouts, context, generators["minibatches"], where)
        return figures


def resample_decisions(
    policy: Trainable, lesson: OfflineContext, count: int, generators: Generators, version: int = 0
) -> Rollouts:
    """Sample `count` chunks of the policy at recorded observations, as rollouts of one policy call [B, 1].

    Their extras contain `q`, min Q, and `v` [B, 1], and `advantage` [B, 1, K], their difference standardised over the
    batch. version: of the policy, as stored in rollouts.
    """
    data, episodes = lesson.data, lesson.episodes
    draws = generators["observations"]
    index = torch.randint(len(data), (count,), generator=draws, device=draws.device).to(episodes.device)
    spec = policy.spec
    observation = observations_at(episodes, data.frame[index], spec.history, list(spec.observation))
    # On-policy at recorded observations: one decision each, paid by the critic at once, so no rollout is needed.
    decision = policy.act(observation, generators["act"])
    state = data.transitions.state[index]
    q, v = lesson.values(state, lesson.interface.to_agent(decision.actions))
    raw = q - v
    advantage = (raw - raw.mean()) / (raw.std(unbiased=False) + 1e-6)
    rows = torch.arange(count, device=raw.device)
    zeros = torch.zeros(count, 1, dtype=torch.bool, device=raw.device)
    mask, stacked = decision.mask[:, None], _in_rows(observation)
    return Rollouts(
        observation={key: value for key, value in stacked.items() if key not in cameras_in(stacked)},
        next_observation={},
        latents={name: value[:, None] for name, value in decision.latents.items()},
        actions=decision.actions[:, None],
        logp_behaviour=decision.logp[:, None],
        mask=mask,
        rewards={},
        valid=torch.ones(count, 1, spec.chunk, dtype=torch.bool, device=raw.device),
        terminated=zeros,
        # Episodes of one decision that do not end the task; nothing bootstraps from them, as the advantage is given.
        truncated=~zeros,
        horizon_end=zeros,
        success=zeros,
        task=_tasks(observation, lesson.interface.instructions, raw.device)[:, None],
        policy_version=torch.full((count, 1), version, device=raw.device),
        episode=rows,
        group=rows,
        parent=torch.full_like(rows, -1),
        branch_decision=torch.full_like(rows, -1),
        images=Images.of(stacked),
    ).with_extras(
        advantage=torch.where(mask, advantage[:, None, None], 0.0),
        **episode_sizes(mask),
        q=q[:, None],
        v=v[:, None],
    )


class WeightedImitation:
    """Improver with the settings `WeightedImitationConfig`, which describes the method."""

    def __init__(self, config: WeightedImitationConfig):
        self.config = config

    def prepare(self, policy: Trainable) -> None:
        """Do nothing."""

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Imitate recorded chunks weighted by their advantage; see `Improver`."""
        config = self.config
        weight = imitation_weights(lesson, config.temperature, config.max_weight)
        batch = partial(lesson.recorded, spec=policy.spec)
        loss = imitate(policy, batch, len(lesson.data), config, step, generators, where, weight)
        return {"loss": loss, "largest_weight": float(weight.max())}


class BestOf:
    """Improver with the settings `BestOfConfig`, which describes the method."""

    def __init__(self, config: BestOfConfig):
        self.config = config
        self.base: Policy | None = None

    def prepare(self, policy: Trainable) -> None:
        """Store the initial policy if it is the proposer; see `Improver`."""
        if self.config.proposer == "base":
            self.base = copy.deepcopy(policy).requires_grad_(False)

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Sample several chunks and imitate the best; see `Improver`."""
        config = self.config
        data = lesson.data
        spec = policy.spec
        draws = generators["observations"]
        index = torch.randperm(len(data), generator=draws, device=draws.device)[: config.observations]
        frames = data.frame[index.to(lesson.episodes.device)]
        proposer = policy if self.base is None else self.base
        actions, gain = chosen_decisions(proposer, lesson, frames, config.candidates, generators)
        padding = spec.prediction - spec.chunk  # what lies behind the executed steps is not imitated
        target = torch.cat([actions, actions[:, -1:].expand(-1, padding, -1)], 1)
        executed_mask = torch.arange(spec.prediction, device=target.device) < spec.chunk

        def batch(rows: Tensor) -> dict[str, Any]:
            observation = observations_at(lesson.episodes, frames[rows], spec.history, list(spec.observation))
            return {
                "observation": observation,
                "actions": target[rows],
                "action_valid": executed_mask.expand(len(rows), -1),
            }

        loss = imitate(policy, batch, len(frames), config, step, generators, where)
        return {"loss": loss, "gain": gain}


@torch.no_grad()
def chosen_decisions(
    policy: Policy, lesson: OfflineContext, frames: Tensor, candidates: int, generators: Generators
) -> tuple[Tensor, float]:
    """Return the best sampled chunk [n, C, A] at each of the recorded `frames` [n], and its mean gain.

    The gain is the mean over frames of the best candidate's min Q minus the candidates' mean.
    """
    score = minimum_value_of(lesson.critic, lesson.interface)
    keys = list(dict.fromkeys((*policy.spec.observation, *lesson.interface.keys)))
    history = max(policy.spec.history, lesson.interface.history)
    actions: list[Tensor] = []
    gains: list[Tensor] = []
    for part in torch.split(frames, max(1, ROWS // candidates)):
        observation = observations_at(lesson.episodes, part, history, keys)
        decision, scores = best_of(policy, observation, generators["act"], candidates, score)
        actions.append(decision.actions)
        gains.append(scores.amax(1) - scores.mean(1))
    return torch.cat(actions), float(torch.cat(gains).mean())


class ImitationConfig(Protocol):
    """Settings of an improver that `imitate` and `train_policy` read."""

    @property
    def steps(self) -> int:
        """Number of updates."""
        ...

    @property
    def batch_size(self) -> int:
        """Batch rows per update."""
        ...

    @property
    def learning_rate(self) -> float:
        """Learning rate of the policy."""
        ...


def imitate(
    policy: Trainable,
    batch: Callable[[Tensor], dict[str, Any]],
    count: int,
    config: ImitationConfig,
    step: float,
    generators: Generators,
    where: str,
    weight: Tensor | None = None,
    also: Callable[[Tensor, dict[str, Any]], Tensor] | None = None,
) -> float:
    """Fit `policy` to random batches of `count` rows; return the mean loss.

    batch: rows [n] -> input of `policy.loss`; weight: [count] loss weights of the rows, None for 1; also: (rows [n],
    their batch) -> additional loss, []. Raises NonFiniteError naming the round, `where`.
    """

    def loss(rows: Tensor) -> Tensor:
        minibatch = batch(rows)
        row_losses = torch.stack(list(policy.loss(minibatch, generators["loss"]).values())).sum(0)
        imitation = row_losses.mean() if weight is None else (weight[rows] * row_losses).mean()
        return imitation if also is None else imitation + also(rows, minibatch)

    return train_policy(policy, loss, count, config, step, generators, where)


def train_policy(
    policy: Trainable,
    loss: Callable[[Tensor], Tensor],
    count: int,
    config: ImitationConfig,
    step: float,
    generators: Generators,
    where: str,
) -> float:
    """Take `config.steps` optimiser steps on `loss`, which maps rows [n] of `count` to []; return its mean.

    Only the policy's weights receive gradients. Raises NonFiniteError naming the round, `where`.
    """
    parameters = list(policy.trainable_parameters())
    # A fresh optimiser in every round: moments of a refused candidate must not outlive it.
    optimiser = adamw(parameters, config.learning_rate * step, 0.0)
    draws, losses = generators["batches"], list[Tensor]()
    for number in range(config.steps):
        rows = torch.randint(count, (config.batch_size,), generator=draws, device=draws.device)
        step_loss = loss(rows)
        require_finite("the loss", step_loss.detach(), where)
        optimiser.zero_grad(set_to_none=True)
        # The loss may run through critics and a frozen base, whose weights must collect no gradient.
        step_loss.backward(inputs=parameters)
        clip_gradients(parameters, 1.0, where)
        set_learning_rate(optimiser, config.learning_rate * step * (1 - number / config.steps))
        optimiser.step()
        losses.append(step_loss.detach())
    return float(torch.stack(losses).mean())


def imitation_weights(lesson: OfflineContext, temperature: float, cap: float) -> Tensor:
    """Return min(exp(temperature * A), cap), normalised to mean 1, of every recorded chunk [N]; A is standardised over
    them.
    """
    data = lesson.data.transitions
    q, v = lesson.values(data.state, data.action)
    advantage = q - v
    standard = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-6)
    weight = (temperature * standard).exp().clamp(max=cap)
    # Mean 1, so the learning rate means the same at every temperature.
    return weight / weight.mean()


def _in_rows(seen: TensorObservation) -> TensorObservation:
    """Reshape observations [B, H, ...] to one policy call per row, [B, 1, H, ...]."""
    return {key: value[:, None] for key, value in seen.items() if key != TASK and isinstance(value, Tensor)}


def _tasks(seen: Mapping[str, Any], instructions: tuple[str, ...], device: torch.device) -> Tensor:
    index_of_text = {text: place for place, text in enumerate(instructions)}
    return torch.tensor([index_of_text.get(text, 0) for text in seen[TASK]], device=device)


keep_former_names(
    __name__, {"Lesson": "OfflineContext", "decided_anew": "resample_decisions", "descend": "train_policy"}
)
