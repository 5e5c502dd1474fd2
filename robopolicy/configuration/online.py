"""Learning in the world by critics."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, Positive
from robopolicy.core.structured import Tagged
from robopolicy.rl.offline.configuration import RlpdConfig
from robopolicy.rl.offline.registry import AGENTS
from robopolicy.training.online.configuration import OnlineConfig


@dataclass(frozen=True)
class OnlineAgentSection(Tagged):
    """What learns: critics and an actor."""

    kinds: ClassVar = AGENTS
    beside: ClassVar = True

    kind: str = "rlpd"
    """rlpd (SAC with ten normalised critics), cal_ql (for WSRL), any other of offline.agent, or your own."""
    config: Any = field(default_factory=RlpdConfig)


@dataclass(frozen=True)
class OnlineSection(OnlineConfig):
    """An agent that learns from its own decisions in the world, after recorded data or without any."""

    policy: Path | None = None
    """Checkpoint of the policy that is steered, or that plays the warm-up (default: what train wrote under the same
    name and seed); an agent's or a steered one goes on learning.
    """
    method: Literal["dsrl", "actions"] = "dsrl"
    """dsrl: the agent chooses the noise that the frozen policy denoises; actions: it acts itself."""
    dataset: Path | None = None
    """LeRobotDataset that an agent of actions learns from first, and draws `retain` from."""
    more: tuple[Path, ...] = ()
    """Further datasets of the same world."""
    pretrain: Natural = 4000
    """Updates on that data before the first step in the world, after which the agent itself plays the warm-up."""
    agent: OnlineAgentSection = field(default_factory=OnlineAgentSection)
    bound: Positive = 1.5
    """Of dsrl: largest noise that may be chosen, in standard deviations."""
    chunk: Count = 4
    """Of actions: control steps of a decision where there is no policy to say it."""
    num_envs: Count = 32
    """Rows that play in parallel; all begin a wave of episodes together."""
    evaluate_episodes: Count = 200
    """Episodes of every evaluation and of the judgement at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.pretrain, 0) < 0 or min(self.chunk, self.num_envs, self.evaluate_episodes) < 1:
            raise ConfigError("online: chunk, num_envs and evaluate_episodes are at least 1, pretrain at least 0.")
        if self.bound <= 0:
            raise ConfigError(f"online.bound={self.bound:g}: noise needs room, say 1.5.")
        if self.method == "dsrl" and (self.dataset is not None or self.more or self.retain):
            raise ConfigError(
                "online.method=dsrl learns from noise, which no dataset records: leave online.dataset and "
                "online.retain out, and let robopolicy offline DATASET offline.improve=dsrl learn from data first."
            )
        if (self.retain or self.more) and self.dataset is None:
            raise ConfigError("online.retain and online.more draw on recorded data: which? Set online.dataset=DATASET.")
