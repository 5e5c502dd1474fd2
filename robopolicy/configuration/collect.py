"""What demonstrations are recorded."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Filled, NoiseLevel
from robopolicy.data.configuration import CorrectConfig


@dataclass(frozen=True)
class CollectSection:
    """Demonstrations, by the scripted expert, a controller of yours or a policy."""

    episodes: Count = 200
    """How many, over all levels of noise."""
    quality: Literal["", "random", "expert", "medium", "replay", "mixed", "play"] = ""
    """Of graded quality, with noise that is found for this task (`noise` is not read); "" for none. random: uniform
    actions; expert: success of 95 % or more; medium: 30 to 50 %; replay: from random on to medium; mixed: expert and
    medium in turn; play: no goal in mind.
    """
    trial_episodes: Count = 128
    """Of graded quality: episodes at every level of noise that is tried."""
    anchor_episodes: Count = 128
    """Of graded quality: episodes of uniform actions, and of the expert, between which scores are normalised; figures
    to be shown want 100 or more.
    """
    noise: Annotated[tuple[NoiseLevel, ...], Filled()] = ("low",)
    """Levels of disturbance, each for an equal share of the episodes: none, low, medium, high, random, or the standard
    deviation of noise on every action as a share of half its range.
    """
    controller: str = ""
    """Dotted path package.module:factory of your own controller, empty for the expert."""
    policy: Path | None = None
    """Checkpoint of a policy that plays instead."""
    deterministic: bool = False
    """Of a policy: without exploration noise."""
    label_policy: str = ""
    """Who says in every step what it would have done there, which `train` then learns in the place of what was done:
    expert (or collect.controller), without the noise with which it acts, or the checkpoint of a policy. "" for nobody.
    """
    label_steps: Count = 8
    """Of the expert: control steps that it says ahead, by playing on in a copy of the world; as many as the policy's
    prediction_steps, or more. 1 where the world has no snapshots.
    """
    successes_only: bool = False
    """Drop failures; world models need them."""
    chains: bool = False
    """Record with every decision of a denoising policy (collect.policy) its chain and log-densities, which
    gate.judges=[importance] weighs.
    """
    correct: CorrectConfig = field(default_factory=CorrectConfig)
    images: Literal["png", "video"] = "png"
    """How images are stored: png, exact, or video, small."""

    def __post_init__(self):
        if min(self.trial_episodes, self.anchor_episodes) < 2:
            raise ConfigError("collect.trial_episodes and collect.anchor_episodes are at least 2.")
        if self.chains and (self.policy is None or self.quality or self.successes_only):
            raise ConfigError(
                "collect.chains=true records how a policy decides, all of its episodes: set collect.policy=CHECKPOINT, "
                "and neither collect.quality nor collect.successes_only."
            )
        if self.label_policy and (self.quality or self.chains or self.correct.wanted):
            raise ConfigError(
                "collect.label_policy labels what collect.noise or collect.policy do: leave out collect.quality, "
                "collect.chains and collect.correct."
            )
        if self.deterministic and self.policy is None:
            raise ConfigError("collect.deterministic is for a policy: set collect.policy=CHECKPOINT.")
        if self.correct.wanted and (self.policy is None or self.quality or self.chains or self.successes_only):
            raise ConfigError(
                "collect.correct.patience and budget let an expert take over from a policy: set "
                "collect.policy=CHECKPOINT, and none of collect.quality, collect.chains and collect.successes_only."
            )
        if self.quality and self.successes_only:
            raise ConfigError(
                f"collect.quality={self.quality} is a share of successes: collect.successes_only=true would change it."
            )
