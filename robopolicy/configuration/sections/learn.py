"""Policies that learn: which is built, pre-training, fine-tuning, teaching, distilling, and learning online."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, Positive
from robopolicy.core.structured import Tagged
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.registry import POLICIES
from robopolicy.rl.offline.configuration import AGENTS, RlpdConfig
from robopolicy.training.configuration import DistillConfig, FinetuneConfig, OnlineConfig, PretrainConfig, TeachConfig


@dataclass(frozen=True)
class PolicySection(Tagged):
    """What `train` builds."""

    kinds: ClassVar = POLICIES
    beside: ClassVar = True

    kind: str = "diffusion"
    """diffusion, flow, token (a language model over action tokens), joint (it plans with itself), lerobot (a checkpoint
    of LeRobot's), or your own.
    """
    config: Any = field(default_factory=DenoisingPolicyConfig)


@dataclass(frozen=True)
class TrainSection(PretrainConfig):
    """Pre-training by regression on demonstrations."""

    data: Path | None = None
    """A LeRobotDataset (default: what collect wrote under the same name and seed)."""
    more: tuple[Path, ...] = ()
    """Further datasets of the same robot, such as corrections."""
    policy: Path | None = None
    """Checkpoint of a policy of ours to go on from, with more steps or other data, as a run of another name; it keeps
    its network and normalisers, and policy.* is not read. One of LeRobot's: policy.kind=lerobot policy.path=FOLDER.
    """
    encoder: Path | None = None
    """World model whose latent the policy shall read (for imagine)."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other names for columns and elements of the data, its own -> those to read it by: {image:
    observation.images.image, state: observation.state, actions: action, motor_0: x}. The checkpoint remembers them.
    """
    episodes: Natural | tuple[Natural, ...] = 0
    """Use these of `data`, [0,2,5], or the first so many, 0 for all."""
    without: tuple[Natural, ...] = ()
    """Episodes of `data` to leave out, by number, such as broken ones."""
    evaluate_episodes: Natural = 200
    """Episodes of the judgement at the end, 0 for none."""


CRITIC_DEPTH = 2
"""Hidden layers of the critic of fine-tuning."""


@dataclass(frozen=True)
class FinetuneSection(FinetuneConfig):
    """RL in the denoising chain or on the tokens of a pre-trained policy."""

    FIXED: ClassVar[Mapping[str, Any]] = {"critic_depth": CRITIC_DEPTH}

    policy: Path | None = None
    """Its checkpoint (default: what train wrote under the same name and seed)."""
    teacher: Path | None = None
    """Checkpoint of the policy that distillation learns from."""
    expert: str = ""
    """Dotted path of the controller whose states hints begin in, empty for the task's."""
    experts: tuple[Path, ...] = ()
    """Datasets for auxiliaries=[experts], else `collect`'s."""
    pairs: Path | None = None
    """Stored preferences (algorithm=grape writes them to preferences/) to learn from instead of playing."""
    finetuned_steps: Count | None = None
    """How many of the last denoising steps are tuned, null for policy.finetuned_steps, else half of them (of LeRobot's
    policies all).
    """
    train_encoder: bool = True
    """Whether the encoders of its observations learn as well."""
    lora_rank: Natural = 0
    """Tune adapters of this rank instead of the weights (token policies, LeRobot's), 0 for none."""
    num_envs: Count = 256
    """Rows collected in parallel."""
    critic_width: Count = 256
    """Width of the critic's layers."""
    evaluate_episodes: Count = 200
    """Episodes of every evaluation and of the judgement at the end."""
    dry_run: bool = False
    """Only print what it will take of memory and computation. Of LeRobot's policies no weights are read for that, nor
    needed: config.json and the processors are enough, however large the policy.
    """
    videos: Natural = 8
    """Episodes in the film of base and tuned policy, 0 for none."""


@dataclass(frozen=True)
class TeachSection(TeachConfig):
    """A student that is taught where it leads itself."""

    teacher: str = ""
    """Checkpoint (default: what finetune wrote under the same name and seed), or expert: the world's."""
    noise: str = "0.2"
    """Of the expert, as in collect.noise. A policy explores."""
    evaluate_episodes: Natural = 200
    """Episodes that judge both at the end, 0 for none."""
    videos: Natural = 8
    """Of them in the student's film, 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.evaluate_episodes, self.videos) < 0:
            raise ConfigError("teach.evaluate_episodes and teach.videos are 0 or more.")


@dataclass(frozen=True)
class DistillSection(DistillConfig):
    """A policy of few denoising steps that does what one of many does."""

    policy: Path | None = None
    """Checkpoint of the teacher (default: what finetune wrote under the same name and seed)."""
    data: tuple[Path, ...] = ()
    """Datasets at whose observations it is asked, [] for episodes that it plays itself."""
    episodes: Count = 200
    """Of those that it plays, with exploration noise, so that the student also sees where it may stray."""
    evaluate_episodes: Natural = 200
    """Episodes that judge teacher and student at the end, 0 where there is no world."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.episodes < 1 or self.evaluate_episodes < 0:
            raise ConfigError("distill: episodes is at least 1, evaluate_episodes at least 0.")


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
