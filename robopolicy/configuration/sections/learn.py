"""Sections for policies that learn: architecture, pre-training, fine-tuning, DAgger, distillation, online learning."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, Positive
from robopolicy.core.structured import Tagged
from robopolicy.operators.configuration import AssistConfig
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.registry import POLICIES
from robopolicy.rl.offline.configuration import AGENTS, RlpdConfig
from robopolicy.training.configuration import (
    ONLINE_METHODS,
    DistillConfig,
    DsrlOnlineConfig,
    FinetuneConfig,
    OnlineConfig,
    PretrainConfig,
    TeachConfig,
)


@dataclass(frozen=True)
class PolicySection(Tagged):
    """The policy that `train` builds."""

    kinds: ClassVar = POLICIES
    beside: ClassVar = True

    kind: str = "diffusion"
    """Policy class: token is a language model over action tokens; joint and joint_video predict futures and values too;
    memory attends to its past; lerobot is a LeRobot checkpoint.
    """
    config: Any = field(default_factory=DenoisingPolicyConfig)


@dataclass(frozen=True)
class TrainSection(PretrainConfig):
    """Pre-training by regression on demonstrations."""

    RENAMED: ClassVar[Mapping[str, str]] = {"without": "exclude_episodes", "more": "extra_datasets"}

    data: Path | None = None
    """LeRobotDataset (default: the output of collect with the same name and seed)."""
    extra_datasets: tuple[Path, ...] = ()
    """Additional datasets of the same robot, such as corrections."""
    policy: Path | None = None
    """Checkpoint of a robopolicy policy to continue training, with more steps or other data. Its network and
    normalisers are kept, and policy.* is ignored. For a LeRobot policy use policy.kind=lerobot policy.path=FOLDER.
    """
    shares: dict[str, float] = field(default_factory=dict)
    """Shares of the samples by kind of step, {recover: 0.25, correct: 0.25}, of data that records who acted. Kinds:
    demonstration, autonomous (own, to success), recover, correct; those not named share the rest.
    """
    encoder: Path | None = None
    """World model whose latent the policy reads (for imagine)."""
    rename: dict[str, str] = field(default_factory=dict)
    """New names of dataset columns or elements: {motor_0: x}; kept in the checkpoint."""
    episodes: Natural | tuple[Natural, ...] = 0
    """Episodes of `data` to use: a list such as [0,2,5], or the number of first episodes; 0 for all."""
    exclude_episodes: tuple[Natural, ...] = ()
    """Indices of episodes of `data` to exclude, such as broken ones."""
    evaluate_episodes: Natural = 200
    """Number of episodes of the final evaluation, 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, share in self.shares.items():
            if not 0 <= share <= 1:
                raise ConfigError(f"train.shares.{name}={share} must be in [0, 1].")
        if sum(self.shares.values()) > 1 + 1e-9:
            raise ConfigError(f"train.shares={self.shares} are more than 1 together.")


CRITIC_DEPTH = 2
"""Hidden layers of the critic of fine-tuning."""


@dataclass(frozen=True)
class FinetuneSection(FinetuneConfig):
    """RL in the denoising chain or on the tokens of a pre-trained policy."""

    FIXED: ClassVar[Mapping[str, Any]] = {"critic_depth": CRITIC_DEPTH}
    RENAMED: ClassVar[Mapping[str, str]] = {
        "experts": "expert_datasets",
        "pairs": "preference_pairs",
        "units": "finetuned_steps",
        "worlds": "num_envs",
    }

    policy: Path | None = None
    """Checkpoint of the policy to fine-tune (default: the output of train with the same name and seed)."""
    teacher: Path | None = None
    """Checkpoint of the teacher policy for distillation."""
    teachers: dict[str, Path] = field(default_factory=dict[str, Path])
    """Teachers by pattern of the instruction, such as {push*: PATH}."""
    expert: str = ""
    """Import path of the controller whose states `hint` starts episodes from; empty for the task's expert."""
    expert_datasets: tuple[Path, ...] = ()
    """Datasets for auxiliaries=[experts]; default: collect's."""
    preference_pairs: Path | None = None
    """Folder of stored preference pairs (algorithm=grape writes them to preferences/) to learn from instead of playing
    episodes.
    """
    finetuned_steps: Count | None = None
    """Number of final denoising steps to fine-tune; null for policy.finetuned_steps, else half of them (LeRobot
    policies: all).
    """
    train_encoder: bool = True
    """Whether to train the observation encoders as well."""
    lora_rank: Natural = 0
    """Rank of LoRA adapters to train instead of the weights (token and LeRobot policies), 0 for none."""
    num_envs: Count = 256
    """Number of parallel environments for collection."""
    world_options: dict[str, Any] = field(default_factory=dict)
    """Options of the simulator during collection, besides world.options: {substeps: 5} makes physics cheaper.
    Evaluation and target_success use world.options alone, so success counts in the original simulator.
    """
    critic_width: Count = 256
    """Width of the critic's hidden layers."""
    evaluate_episodes: Count = 200
    """Episodes of each evaluation, also of the final one."""
    dry_run: bool = False
    """Only print the estimated memory and time. The time is computed from recorded iterations of
    the same run, if there are any. LeRobot policies of any size need only config.json and the processors for this;
    their weights are not read.
    """
    videos: Natural = 8
    """Episodes in the video of base and tuned policy, 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teachers and self.teacher is not None:
            raise ConfigError("finetune.teacher and finetune.teachers exclude each other: set only one of them.")
        if self.num_envs % self.shards:
            raise ConfigError(
                f"finetune.num_envs={self.num_envs} is not a multiple of finetune.shards={self.shards}: set "
                f"finetune.num_envs={self.shards * -(-self.num_envs // self.shards)}."
            )

    @property
    def teacher_paths(self) -> tuple[Path, ...]:
        """Checkpoints of all teachers."""
        return tuple(self.teachers.values()) if self.teacher is None else (self.teacher,)

    @property
    def shard_envs(self) -> int:
        """Number of parallel environments of one shard."""
        return self.num_envs // self.shards


@dataclass(frozen=True)
class TeachSection(TeachConfig):
    """A student trained with teacher labels in the states that it visits itself (DAgger)."""

    teacher: str = ""
    """Checkpoint of the teacher (default: the output of finetune with the same name and seed), or `expert` for the
    world's expert.
    """
    noise: str = "0.2"
    """Action noise of an expert teacher, as in collect.noise; a policy uses its own exploration noise."""
    evaluate_episodes: Natural = 200
    """Number of episodes of the final evaluation of teacher and student, 0 for none."""
    videos: Natural = 8
    """Number of evaluation episodes in the student's video, 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.evaluate_episodes, self.videos) < 0:
            raise ConfigError("teach.evaluate_episodes and teach.videos must be at least 0.")


@dataclass(frozen=True)
class DistillSection(DistillConfig):
    """Distillation of a denoising policy into one with few denoising steps."""

    policy: Path | None = None
    """Checkpoint of the teacher (default: the output of finetune with the same name and seed)."""
    data: tuple[Path, ...] = ()
    """Datasets whose observations the teacher is evaluated on; [] plays episodes instead."""
    episodes: Count = 200
    """Number of episodes to play when data=[], with exploration noise so that the student also learns from states off
    the teacher's path.
    """
    evaluate_episodes: Natural = 200
    """Number of episodes of the final evaluation of teacher and student, 0 if there is no world."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.episodes < 1 or self.evaluate_episodes < 0:
            raise ConfigError("distill: episodes must be at least 1, and evaluate_episodes at least 0.")


@dataclass(frozen=True)
class OnlineAgentSection(Tagged):
    """The online agent: critics and an actor."""

    kinds: ClassVar = AGENTS
    beside: ClassVar = True

    kind: str = "rlpd"
    """Agent: rlpd (SAC with ten layer-normalised critics), cal_ql (for WSRL), any other of offline.agent, or a custom
    one.
    """
    config: Any = field(default_factory=RlpdConfig)


@dataclass(frozen=True)
class OnlineMethodSection(Tagged):
    """The online method: what the agent chooses."""

    kinds: ClassVar = ONLINE_METHODS
    beside: ClassVar = True

    kind: str = "dsrl"
    """What the agent chooses: dsrl (the frozen policy's noise), actions, edit (changes of the frozen policy's chunks),
    or a custom method.
    """
    config: Any = field(default_factory=DsrlOnlineConfig)


@dataclass(frozen=True)
class OnlineSection(OnlineConfig):
    """Online RL of an agent in the world, with or without pre-training on recorded data."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "more": "extra_datasets",
        "pretrain": "pretrain_steps",
        "bound": "noise_bound",
    }

    policy: Path | None = None
    """Checkpoint of the policy to steer, or to play the warm-up (default: the output of train with the same name and
    seed). An agent or a steered policy continues learning.
    """
    method: OnlineMethodSection = field(default_factory=OnlineMethodSection)
    dataset: Path | None = None
    """LeRobotDataset on which an agent of method=actions or edit is pre-trained, and from which `offline_ratio` draws:
    demonstrations, a policy's log, or a log with interventions.
    """
    extra_datasets: tuple[Path, ...] = ()
    """Additional datasets of the same world."""
    pretrain_steps: Natural = 4000
    """Number of updates on recorded data before the first environment step; the agent itself then plays the warm-up."""
    agent: OnlineAgentSection = field(default_factory=OnlineAgentSection)
    assist: AssistConfig = field(default_factory=AssistConfig)
    noise_bound: Positive = 1.5
    """dsrl: largest noise that the agent may choose, in standard deviations."""
    chunk: Count = 4
    """actions: control steps per chunk if no policy defines it."""
    num_envs: Count = 32
    """Parallel environments; all start a batch of episodes together."""
    evaluate_episodes: Count = 200
    """Episodes of each evaluation, also of the final one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.pretrain_steps, 0) < 0 or min(self.chunk, self.num_envs, self.evaluate_episodes) < 1:
            raise ConfigError(
                "online: chunk, num_envs and evaluate_episodes must be at least 1, and pretrain_steps at least 0."
            )
        if self.noise_bound <= 0:
            raise ConfigError(
                f"online.noise_bound={self.noise_bound:g} must be above 0, for example 1.5: it limits the noise."
            )
        if self.method.kind == "dsrl" and (self.dataset is not None or self.extra_datasets or self.offline_ratio):
            raise ConfigError(
                "online.method=dsrl trains on noise, which no dataset records: unset online.dataset and "
                "online.offline_ratio, and first train on data with robopolicy offline DATASET offline.improve=dsrl."
            )
        if self.assist.rewind == "adaptive":
            raise ConfigError("online.assist.rewind=adaptive needs a detector: set a number of control steps.")
        if self.assist.wanted and self.method.kind == "dsrl":
            raise ConfigError(
                "online.assist: operators act in the world, and online.method=dsrl learns noise: use actions or edit."
            )
        if ((self.offline_ratio and not self.assist.wanted) or self.extra_datasets) and self.dataset is None:
            raise ConfigError(
                "online.offline_ratio and online.extra_datasets need recorded data: set online.dataset=DATASET."
            )
