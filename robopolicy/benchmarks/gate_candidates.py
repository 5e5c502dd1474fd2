"""Candidates for testing the gate, built from a policy and its log: genuine ones and planted bad ones.

The planted ones cover typical failures of learning from a log: the wrong sign of the advantage, exploitation of critic
errors, observations or actions that differ from deployment, data that is too narrow, a world model that is too
optimistic, and perturbed weights. Whether a candidate is good or bad is measured, not assumed from its name.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.building.policies import choose_device
from robopolicy.building.worlds import build_critic, build_world
from robopolicy.configuration import Config
from robopolicy.core.episodes import Episodes
from robopolicy.core.policy import Trainable
from robopolicy.core.randomness import Generators, derive_seed
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.core.structured import narrowed
from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.agent import OfflineAgent
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.offline.configuration import (
    IMPROVERS,
    BestOfConfig,
    ChainPpoConfig,
    WeightedImitationConfig,
)
from robopolicy.training.offline.improvers import OfflineContext, imitate


@dataclass(frozen=True)
class Material:
    """Inputs from which candidates are built.

    config: the task's; base: the original policy; lesson: the training episodes, and a critic of them; model: name ->
    checkpoint of a world model (`MODELS`), trained if it is missing.
    """

    config: Config
    base: Trainable
    lesson: OfflineContext
    model: Callable[[str], Path]

    def draws(self, name: str) -> Generators:
        """Return the random generators of the candidate `name`; its seed reproduces it."""
        return Generators(derive_seed(self.config.run.seed, f"candidate/{name}"), choose_device(self.config.run))


Make = Callable[[Material, Trainable, Generators], Trainable]
"""(material, policy to begin with, which is left alone, random numbers) -> candidate."""


@dataclass(frozen=True)
class Candidate:
    """A candidate. family: the failure that it represents; planted: whether it is meant to be bad."""

    family: str
    make: Make
    planted: bool = False


class Opposite(OfflineAgent):
    """A critic with the opposite sign of another one."""

    def __init__(self, critic: OfflineAgent):
        super().__init__()
        self.critic = critic
        self.config = critic.config
        self.optimisers = {}

    def fit_statistics(self, state: Tensor) -> None:
        """As the other one, of states [N, S]."""
        self.critic.fit_statistics(state)

    def update(self, batch: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """As the other one."""
        return self.critic.update(batch, generator)

    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """As the other one, [N, A]."""
        return self.critic.act(state, generator)

    def value(self, state: Tensor) -> Tensor:
        """Minus that of the other one, [N]."""
        return -self.critic.value(state)

    def action_values(self, state: Tensor, action: Tensor) -> Tensor:
        """Minus those of the other one, [M, N]."""
        return -self.critic.action_values(state, action)


def improved(kind: str, settings: object, *, wrong: bool = False) -> Make:
    """Return a candidate builder that runs one round of an `offline` improver; wrong: with the negated critic."""

    def make(material: Material, policy: Trainable, generators: Generators) -> Trainable:
        candidate, lesson = copy.deepcopy(policy), material.lesson
        if kind == "chain_ppo":
            prepare(candidate, material.config)
        improver = IMPROVERS.builds(kind)(settings)
        for each in (candidate, copy.deepcopy(material.base)):  # best_of keeps the last one: the base proposes
            improver.prepare(each)
        target_lesson = replace(lesson, critic=Opposite(lesson.critic)) if wrong else lesson
        improver.improve(candidate, target_lesson, generators, 1.0, kind)
        return candidate

    return make


@dataclass(frozen=True)
class Imitation:
    """Inputs of `imitate`."""

    steps: int = 500
    batch_size: int = 256
    learning_rate: float = 1e-3


Choose = Callable[[Episodes, Generators], Episodes]
Change = Callable[[dict[str, Any], Episodes, Generators], dict[str, Any]]


def imitated(choose: Choose, change: Change | None = None, settings: Imitation = Imitation()) -> Make:
    """Return a candidate builder that imitates the log's episodes selected by `choose`, with batches changed by
    `change`.
    """

    def make(material: Material, policy: Trainable, generators: Generators) -> Trainable:
        candidate, spec = copy.deepcopy(policy), policy.spec
        episodes = choose(material.lesson.episodes, generators)

        def batch(rows: Tensor) -> dict[str, Any]:
            batch_windows = episodes.windows(rows, spec.history, spec.prediction)
            return batch_windows if change is None else change(batch_windows, episodes, generators)

        imitate(candidate, batch, episodes.step_count, settings, 1.0, generators, "imitation")
        return candidate

    return make


def every(episodes: Episodes, generators: Generators) -> Episodes:
    """Select all episodes."""
    return episodes


def outcomes(success: bool) -> Choose:
    """Return a selection of successful episodes only, or of failed ones."""

    def choose(episodes: Episodes, generators: Generators) -> Episodes:
        assert episodes.success is not None
        return episodes.select(episodes.success == success)

    return choose


def few(count: int) -> Choose:
    """Return a random selection of this many episodes."""

    def choose(episodes: Episodes, generators: Generators) -> Episodes:
        draws = generators["episodes"]
        order = torch.randperm(len(episodes), generator=draws, device=draws.device)
        return episodes.select(order[:count].to(episodes.device))

    return choose


def shifted(size: float) -> Change:
    """Return a change that shifts observation vectors by `size` standard deviations of the log."""

    def change(batch: dict[str, Any], episodes: Episodes, generators: Generators) -> dict[str, Any]:
        statistics, observation = episodes.statistics(), dict(batch["observation"])
        for key in episodes.observation:
            if not key.startswith(IMAGE_PREFIX):
                observation[key] = observation[key] + size * statistics[key]["std"]
        return {**batch, "observation": observation}

    return change


def acted(scale: float = 1.0, noise: float = 0.0) -> Change:
    """Return a change that scales actions and adds noise, in their standard deviations, within the recorded range."""

    def change(batch: dict[str, Any], episodes: Episodes, generators: Generators) -> dict[str, Any]:
        statistics = episodes.statistics()["action"]
        draws = generators["noise"]
        actions = batch["actions"]
        standard_noise = torch.randn(actions.shape, generator=draws, device=draws.device).to(actions.device)
        noisy_actions = scale * actions + noise * statistics["std"] * standard_noise
        return {**batch, "actions": noisy_actions.clamp(statistics["min"], statistics["max"])}

    return change


def tuned(model: str, iterations: int) -> Make:
    """Return a candidate builder that fine-tunes by PPO in a world model, as in the task's recipe, without real
    evaluation.
    """

    def make(material: Material, policy: Trainable, generators: Generators) -> Trainable:
        candidate = copy.deepcopy(policy)
        section = material.config.finetune
        seed = generators.seed
        device, imagined_section = generators.device, material.config.world.imagined_by(material.model(model))
        prepare(candidate, material.config)
        world = build_world(imagined_section, candidate, batch_size=section.num_envs, seed=seed, device=device)
        settings = replace(narrowed(FinetuneConfig, section), iterations=iterations, target_success=None)
        finetune(candidate, build_critic(world, section, seed).to(device), world, settings, seed=seed)
        world.close()
        return candidate

    return make


def prepare(policy: Trainable, config: Config) -> None:
    """Make as many denoising steps trainable as in the recipe."""
    policy.prepare_finetuning(config.finetune.finetuned_steps, train_encoder=config.finetune.train_encoder)


def between(name: str, share: float) -> Make:
    """Return a candidate builder that interpolates weights linearly between the policy and another candidate."""

    def make(material: Material, policy: Trainable, generators: Generators) -> Trainable:
        candidate = CANDIDATES[name].make(material, policy, material.draws(name))
        old, new = policy.state_dict(), candidate.state_dict()
        candidate.load_state_dict(
            {key: torch.lerp(old[key], value, share) if key in old and value.is_floating_point() else value
             for key, value in new.items()}
        )  # fmt: skip
        return candidate

    return make


def disturbed(size: float) -> Make:
    """Return a candidate builder that adds noise to every weight, in standard deviations of its tensor."""

    @torch.no_grad()
    def make(material: Material, policy: Trainable, generators: Generators) -> Trainable:
        candidate, draws = copy.deepcopy(policy), generators["weights"]
        for weight in candidate.trainable_parameters():
            noise = torch.randn(weight.shape, generator=draws, device=draws.device).to(weight.device)
            weight.add_(size * weight.std(unbiased=False) * noise)
        return candidate

    return make


def _best_of(**settings: Any) -> Make:
    return improved("best_of", BestOfConfig(**settings))


def _weighted(**settings: Any) -> Make:
    return improved("weighted_imitation", WeightedImitationConfig(**settings))


def _chain(**settings: Any) -> Make:
    return improved("chain_ppo", ChainPpoConfig(**settings))


LONG = {"steps": 1500, "learning_rate": 1e-3}
BIASED = "flattering"
"""The world model whose heads are wrong."""


def _family(family: str, makers: Mapping[str, Make], planted: bool = False) -> dict[str, Candidate]:
    return {name: Candidate(family, make, planted) for name, make in makers.items()}


HONEST: dict[str, Candidate] = {
    **_family(
        "best of several",
        {
            "best of 16": _best_of(),
            "best of 16, drawn again": _best_of(),
            "best of 16, 150 steps": _best_of(steps=150),
            "best of 16, small steps": _best_of(learning_rate=3e-4),
            "best of 32, 1000 steps": _best_of(candidates=32, observations=4096, steps=1000),
            "best of 4": _best_of(candidates=4),
            "best of 2": _best_of(candidates=2),
        },
    ),
    **_family(
        "weighted imitation",
        {
            "weights of temperature 0.3": _weighted(temperature=0.3),
            "weights of temperature 1": _weighted(),
            "weights of temperature 3": _weighted(temperature=3.0),
            "weights of temperature 1, longer": _weighted(**LONG),
            "weights of temperature 3, longer": _weighted(temperature=3.0, **LONG),
        },
    ),
    **_family(
        "imitation of successes",
        {
            "successes": imitated(outcomes(True)),
            "successes, longer": imitated(outcomes(True), settings=Imitation(1500)),
        },
    ),
    **_family("one step of chain PPO", {"chain PPO": _chain(), "chain PPO, small steps": _chain(learning_rate=3e-5)}),
    **_family(
        "PPO in another model",
        {f"PPO in another model, {count} iterations": tuned("other", count) for count in (4, 8, 16)},
    ),
    **_family(
        "on the way",
        {
            **{f"{share:.0%} of the way to best of 16": between("best of 16", share) for share in (0.25, 0.5, 0.75)},
            "50% of the way to PPO in another model": between("PPO in another model, 8 iterations", 0.5),
        },
    ),
}
PLANTED: dict[str, Candidate] = {
    **_family(
        "wrong sign",
        {
            "worst of 16": improved("best_of", BestOfConfig(), wrong=True),
            "worst of 16, 150 steps": improved("best_of", BestOfConfig(steps=150), wrong=True),
            "worst of 4": improved("best_of", BestOfConfig(candidates=4), wrong=True),
            "negated advantages": improved("weighted_imitation", WeightedImitationConfig(), wrong=True),
            "negated advantages, longer": improved(
                "weighted_imitation", WeightedImitationConfig(temperature=3.0, **LONG), wrong=True
            ),
        },
        True,
    ),
    **_family(
        "over-estimated critic",
        {
            "chain PPO, 3 iterations": _chain(iterations=3, target_kl=0.03),
            "chain PPO, 6 iterations": _chain(iterations=6),
            "chain PPO, 6 iterations, unbounded": _chain(iterations=6, clip=0.2, target_kl=None),
        },
        True,
    ),
    **_family(
        "distribution shift",
        {
            "observations moved by 0.25": imitated(every, shifted(0.25)),
            "observations moved by 1": imitated(every, shifted(1.0)),
            "actions with noise of 0.5": imitated(every, acted(noise=0.5)),
            "actions with noise of 1": imitated(every, acted(noise=1.0)),
            "actions times 0.5": imitated(every, acted(0.5)),
            "actions times 0.8": imitated(every, acted(0.8)),
            "actions times 1.5": imitated(every, acted(1.5)),
        },
        True,
    ),
    **_family(
        "narrow data",
        {
            "8 episodes": imitated(few(8)),
            "8 episodes, others": imitated(few(8)),
            "8 episodes, longer": imitated(few(8), settings=Imitation(1500)),
            "failures": imitated(outcomes(False)),
            "failures, longer": imitated(outcomes(False), settings=Imitation(1500)),
        },
        True,
    ),
    **_family(
        "a model that flatters",
        {
            "PPO in a model of successes, 8 iterations": tuned("successes", 8),
            "PPO in a model of successes, 16 iterations": tuned("successes", 16),
            "PPO in a model with wrong heads, 4 iterations": tuned(BIASED, 4),
            "PPO in a model with wrong heads, 8 iterations": tuned(BIASED, 8),
            "PPO in a model with wrong heads, 16 iterations": tuned(BIASED, 16),
        },
        True,
    ),
    **_family(
        "noise on the weights",
        {f"weights with noise of {size:g}": disturbed(size) for size in (0.02, 0.05, 0.1, 0.2, 0.4)},
        True,
    ),
}
CANDIDATES = {**HONEST, **PLANTED}
"""Name -> candidate, 53 of them."""

OFFERED = (
    "best of 16",
    "best of 16, drawn again",
    "weights of temperature 1, longer",
    "PPO in another model, 8 iterations",
    "worst of 16",
    "chain PPO, 6 iterations",
    "actions times 0.5",
    "failures, longer",
    "PPO in a model with wrong heads, 8 iterations",
    "weights with noise of 0.2",
)
"""What is offered in ten rounds, in random order."""


def flattering(episodes: Episodes, early: int = 8) -> Episodes:
    """Return the log with wrong labels for a model: speed is rewarded, success is labelled `early` steps too early."""
    assert episodes.success is not None and episodes.rewards is not None and episodes.reward is not None
    ends = (episodes.starts + episodes.lengths)[episodes.episode_of_step]
    steps = torch.arange(episodes.step_count, device=episodes.device)
    speed = episodes.actions.norm(dim=1)
    speed_reward = 3 * episodes.reward.abs().mean() * speed / speed.mean().clamp_min(1e-6)
    other_rewards = {
        name: value if name == "success" else torch.zeros_like(value) for name, value in episodes.rewards.items()
    }
    claimed_success = episodes.success[episodes.episode_of_step] & (steps >= ends - early)
    return replace(episodes, rewards={**other_rewards, "progress": speed_reward}, step_success=claimed_success)
