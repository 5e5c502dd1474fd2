"""Evaluators that need no real episode: a world model, a critic fitted to the policy, a critic of the data.

The best choice depends on the data: `bakeoff` measures it on policies of known performance. No published result
justifies a default: averages of a critic's values (AM-Q) ordered 36 policies at Spearman .24 to .46, a world model at
.99.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.player import Player, PolicyActor
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import EpisodeGenerator, derive_seed
from robopolicy.core.returns import returns_to_go
from robopolicy.core.segments import quantile
from robopolicy.core.world import World
from robopolicy.evaluation.episode_batches import BatchPlayer
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy, require_success
from robopolicy.rl.offline.decisions import Decisions, actions_at, observations_at
from robopolicy.rl.offline.fqe import FittedQ, FqeConfig, fit_q
from robopolicy.rl.offline.interface import Interface


class ModelEvaluator:
    """Evaluator that plays a policy in a world model: success (or return) of one episode per seed.

    world: an imagined world, or the real one with `trials`, for a short online phase; seeds: [S] of its initial states;
    by: "success" or "return"; independent: whether the candidates were not trained in it; as_inside: a policy -> its
    form in that world, for example without its encoder; world_of: a policy -> the world with what it reads, None where
    `world` has that for all; players: a policy -> what plays it there on workers, None to play in this process.
    `env_steps` counts the control steps of trials; `classified` are the results whose success a classifier supplied.
    Raises ConfigError for success in a world that does not report it.
    """

    def __init__(
        self,
        world: World,
        seeds: Array,
        *,
        by: str = "success",
        as_inside: Callable[[Policy], Policy] = lambda policy: policy,
        independent: bool = True,
        trials: bool = False,
        seed: int = 0,
        players: Callable[[Policy], BatchPlayer | None] = lambda policy: None,
        world_of: Callable[[Policy], World] | None = None,
    ):
        if by not in ("success", "return"):
            raise ConfigError(f"by={by}: a model evaluates success or return.")
        if by == "success":
            require_success(world, "compare returns with gate.metric=return")
        self.world = world
        self.seeds = np.asarray(seeds)
        self.by = by
        self.independent = independent
        self.seed = seed
        self.as_inside = as_inside
        self.world_of = world_of or (lambda policy: world)
        self.players = players
        self.trials, self.env_steps = trials, 0
        self.classified: list[EvaluationResult] = []
        self.name = f"{by} in {'trials of' if trials else 'the'} {world.spec.name}"

    def values(self, policy: Policy) -> Array:
        """Return success (0 or 1) or return of each episode [S], with the same noise for every policy."""
        world, model_policy = self.world_of(policy), self.as_inside(policy)
        result = evaluate_policy(
            world,
            model_policy,
            self.seeds,
            generator_seed=self.seed,
            label=f"evaluator: {self.name}",
            players=self.players(policy),
        )
        self.env_steps += result.steps if self.trials else 0
        if result.classifier is not None:
            self.classified.append(result)
        return result.success.astype(np.float64) if self.by == "success" else result.returns


@dataclass(frozen=True)
class RecordedDecisions:
    """Input of evaluators on recorded data: action chunks, their critic interface, and the initial states to evaluate.

    bounds: the lowest and highest value that rewards allow; starts: [S] int64, first frames of episodes; ceiling: the
    highest credible mean value from the initial states (`highest_credible`), None for no limit.
    """

    decisions: Decisions
    interface: Interface
    bounds: tuple[float, float]
    starts: Tensor
    ceiling: float | None = None

    @property
    def episodes(self) -> Episodes:
        """The episodes that contain the observations."""
        return self.decisions.episodes

    @cached_property
    def start_states(self) -> Tensor:
        """Critic inputs at the initial states, [S, size]."""
        episodes, interface = self.episodes, self.interface
        return interface.state(observations_at(episodes, self.starts, interface.history, interface.keys))

    def flat(self, chunks: Tensor) -> Tensor:
        """Return chunks [n, m, C, A] in the world's units as critic inputs, [n, m, C * A]."""
        return self.interface.to_agent(chunks.flatten(0, 1)).reshape(*chunks.shape[:2], -1)


def episode_starts(episodes: Episodes, count: int) -> Tensor:
    """Return the first frames of at most `count` episodes, [S] int64, evenly spread over the data."""
    place = torch.linspace(0, len(episodes) - 1, min(count, len(episodes))).round().long()
    return episodes.frame_starts[place.to(episodes.device)]


def highest_credible(episodes: Episodes, discount: float) -> float:
    """Return the highest credible mean value over initial states: the 90 % quantile of the returns of recorded
    successes.

    A critic overestimates actions that were optimised against it, and no recorded episode corrects this. A policy
    valued above nearly all successes from all initial states is therefore not credible. Without recorded success the
    limit is the best episode's return. Returns are discounted from the start. An episode truncated by a time limit
    counts as if it continued as before, R / (1 - discount^L) for its L steps, if that is more. Raises DataError without
    rewards.
    """
    reward = episodes.reward
    if reward is None:
        raise DataError("The highest credible value is determined from rewards, and this dataset has none.")
    cpu_episodes = episodes.to("cpu")
    returns = returns_to_go(reward.cpu(), cpu_episodes, discount)[cpu_episodes.starts]
    if cpu_episodes.terminated is not None and discount < 1:
        going_on = torch.maximum(returns, returns / (1 - discount ** cpu_episodes.lengths.to(returns)))
        returns = torch.where(cpu_episodes.terminated, returns, going_on)
    if cpu_episodes.success is None or not bool(cpu_episodes.success.any()):
        return float(returns.max())
    return float(quantile(returns[cpu_episodes.success], 0.9))


class FqeEvaluator:
    """Evaluator that fits a critic to the policy (FQE) on data not used in training, and averages it over the initial
    states.

    deterministic: evaluate the policy without exploration noise, as it will be used. Every policy is fitted with the
    same random numbers. `clipped` stores for each call the fraction of targets outside the reward bounds: a fit above
    the alarm level has diverged and is not reliable. For a policy that leaves the data, a fit that has not diverged is
    optimistic as well: measured on push_cube, it accepted a policy that was worse by 12 points.
    """

    def __init__(
        self,
        data: RecordedDecisions,
        config: FqeConfig,
        *,
        deterministic: bool = True,
        independent: bool = True,
        seed: int = 0,
    ):
        self.data = data
        self.config = config
        self.independent = independent
        self.seed = seed
        self.deterministic = deterministic
        self.name, self.ceiling = "fitted Q evaluation", data.ceiling
        self.clipped: list[float] = []

    def values(self, policy: Policy) -> Array:
        """Return the policy's value from each initial state [S], in units of discounted reward."""
        data, config = self.data, self.config
        device = data.episodes.device
        generator = torch.Generator(device).manual_seed(derive_seed(self.seed, "fqe"))
        frames, index = torch.cat([data.decisions.next_frame, data.starts]).unique(return_inverse=True)
        chunks = actions_at(
            policy, data.episodes, frames, generator, samples=config.samples, deterministic=self.deterministic
        )
        actions = data.flat(chunks)
        next_index, now = index[: len(data.decisions)], index[len(data.decisions) :]
        fit = self._fit(actions[next_index], generator)
        self.clipped.append(fit.clipped)
        return fit.values(data.start_states, actions[now]).double().cpu().numpy()

    @property
    def diverged(self) -> bool:
        """Whether a fit has diverged."""
        return any(share > self.config.alarm for share in self.clipped)

    def _fit(self, drawn: Tensor, generator: torch.Generator) -> FittedQ:
        return fit_q(self.data.decisions.transitions, drawn, self.data.bounds, self.config, generator, "evaluator: FQE")


class ActionValues(Protocol):
    """A critic: every member's Q [M, N] of states [N, S] and flat action chunks [N, C * A]."""

    def action_values(self, state: Tensor, action: Tensor) -> Tensor:
        """Return every member's Q [M, N]; see the class."""
        ...


class CriticEvaluator:
    """Evaluator that averages Q of the policy's actions at recorded observations, or along imagined rollouts (AM-Q).

    critic: the minimum over its members is used. world, seeds, decisions: an imagined world to roll the policy out in,
    and the number of policy calls; None uses the recorded initial states only. deterministic: without exploration
    noise. Source: Uni-O4, arXiv:2311.03351 (AM-Q); RL-100.
    """

    def __init__(
        self,
        critic: ActionValues,
        data: RecordedDecisions,
        *,
        world: World | None = None,
        seeds: Array | None = None,
        decisions: int = 20,
        samples: int = 4,
        deterministic: bool = True,
        independent: bool = True,
        seed: int = 0,
    ):
        if (world is None) != (seeds is None):
            raise ConfigError("AM-Q along rollouts needs a world and seeds of its initial states.")
        self.critic = critic
        self.data = data
        self.world = world
        self.seeds = seeds
        self.decisions = decisions
        self.samples = samples
        self.independent = independent
        self.seed = seed
        self.deterministic = deterministic
        place = "recorded observations" if world is None else f"{decisions} policy calls in {world.spec.name}"
        self.name = f"a critic's values at {place}"
        self.ceiling = data.ceiling if world is None else None  # later in an episode values may be higher

    @torch.no_grad()
    def values(self, policy: Policy) -> Array:
        """Return the mean Q from each initial state [S]."""
        if self.world is not None and self.seeds is not None:
            return self._along(policy, self.world, np.asarray(self.seeds))
        data = self.data
        generator = torch.Generator(data.episodes.device).manual_seed(derive_seed(self.seed, "am-q"))
        chunks = actions_at(
            policy, data.episodes, data.starts, generator, samples=self.samples, deterministic=self.deterministic
        )
        actions = data.flat(chunks)
        states = data.start_states
        values = self.critic.action_values(states.repeat_interleave(self.samples, 0), actions.flatten(0, 1)).amin(0)
        return values.reshape(len(states), -1).mean(1).double().cpu().numpy()

    def _along(self, policy: Policy, world: World, seeds: Array) -> Array:
        """Return the mean Q over each row's policy calls until its episode ends, [S]."""
        device, values = self.data.episodes.device, np.zeros(len(seeds))
        for first in range(0, len(seeds), world.batch_size):
            part = seeds[first : first + world.batch_size]
            noise = EpisodeGenerator(derive_seed(self.seed, "am-q"), device)
            player = Player(world, PolicyActor(policy, noise, deterministic=self.deterministic))
            player.start_batch(part)
            total, count = np.zeros(world.batch_size), np.zeros(world.batch_size)
            for place, step in enumerate(player):
                state = self.data.interface.state(step.info.seen)
                action = self.data.interface.to_agent(step.info.decision.actions)
                value = self.critic.action_values(state, action).amin(0).double().cpu().numpy()
                total, count = total + np.where(step.running, value, 0.0), count + step.running
                if place + 1 >= self.decisions:
                    break
            values[first : first + len(part)] = (total / np.maximum(count, 1))[: len(part)]
        return values


keep_former_names(
    __name__,
    {
        "FittedJudge": "FqeEvaluator",
        "CriticJudge": "CriticEvaluator",
        "ModelReturn": "ModelEvaluator",
        "Recorded": "RecordedDecisions",
    },
)
