"""Settings for fine-tuning LeRobot policies, and the contents of robopolicy.json next to their checkpoints; no heavy
imports.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.ranges import Count, NonNegative, Pixels, Positive
from robopolicy.core.storage import read_errors, read_object, recover_folder
from robopolicy.core.structured import FormerNames
from robopolicy.nn.configuration import FlowNoise
from robopolicy.policies.configuration import Reach

LEAST_STD = 1e-3
"""Lower bound of act's learned exploration std, in normalised actions."""


class TrainableWeights(Enum):
    """Trainable weights: expert, the denoising modules with all observation encoders frozen; all; or lerobot, as in the
    checkpoint's config.
    """

    EXPERT = "expert"
    ALL = "all"
    LEROBOT = "lerobot"


@dataclass(frozen=True)
class LeRobotTuning(FormerNames):
    """Exploration and training settings of a LeRobot policy; values are in its normalised actions."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "tuned": "trainable",
        "least_noise": "min_std",
        "std": "exploration_std",
        "keep_prefix": "cache_encoder_outputs",
        "checkpointing": "gradient_checkpointing",
    }

    trainable: TrainableWeights = TrainableWeights.EXPERT
    """Weights to train: expert (the observation encoder is frozen and runs once per policy call), all, or lerobot
    (those that the checkpoint's config leaves trainable).
    """
    flow_noise: FlowNoise = FlowNoise.CONSTANT
    """Exploration noise of a flow's steps: constant, or sde (Flow-GRPO's; it keeps the learned noise level of each
    step).
    """
    flow_noise_level: NonNegative = 0.1
    """Scale of the flow noise."""
    eta: NonNegative = 1.0
    """Exploration noise of a diffusion's steps: 1 for DDPM's noise, 0 for only the minimum (min_std)."""
    min_std: NonNegative = 0.1
    """Minimum standard deviation of each step, in exploration and log-probabilities; not applied to constant noise."""
    noisy_steps: Count | None = None
    """Number of random denoising steps per action chunk that have noise and a log-probability, null for all."""
    exploration_std: Positive = 0.1
    """act policies, which have no noise: initial standard deviation of exploration for each action element."""
    learn_std: bool = True
    """Whether exploration_std is trained (act); the trained value is saved with the checkpoint and used on resuming."""
    temperature: Positive = 1.0
    """pi0_fast, which generates tokens: sampling temperature of exploration, by which logits are divided."""
    cache_encoder_outputs: bool = True
    """Whether rollouts store the frozen encoder's output; otherwise observations are encoded again for
    log-probabilities.
    """
    gradient_checkpointing: bool = False
    """Whether log-probabilities use activation checkpointing: less memory, a third more time."""

    def __post_init__(self) -> None:
        if self.flow_noise is FlowNoise.LEARNED:
            raise ConfigError("flow_noise=learned needs a network with a noise head, and LeRobot's networks have none.")
        if min(self.flow_noise_level, self.min_std) < 0:
            raise ConfigError("flow_noise_level and min_std must not be negative.")
        if self.exploration_std < LEAST_STD:
            raise ConfigError(
                f"exploration_std={self.exploration_std:g} must be at least {LEAST_STD:g}: with less noise, "
                f"log-probabilities are not useful."
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature:g} must be positive; 1 is the trained distribution.")


@dataclass(frozen=True)
class LeRobotStart(FormerNames):
    """A LeRobot policy to train further; its network, processors and statistics are kept."""

    builds: ClassVar[str] = "robopolicy.policies.lerobot.acting:FromLeRobot"
    RENAMED: ClassVar[Mapping[str, str]] = {"tuned": "trainable"}

    path: Path | None = None
    """Folder of the LeRobot checkpoint, with config.json, model.safetensors and processors."""
    trainable: TrainableWeights = TrainableWeights.LEROBOT
    """Weights to train: lerobot (those that the checkpoint's config leaves trainable), expert, or all."""
    levels_per_sample: Count = 1
    """Number of noise levels at which each sample is denoised; its observation is encoded once."""

    is_pretrained: ClassVar[bool] = True

    def reach(self) -> Reach:
        """Implement `SaysReach.reach`; raises ConfigError without a folder, CheckpointError for another checkpoint."""
        path = recover_folder(folder_of(self)) / "config.json"
        with read_errors(path, failure=CheckpointError):
            return _reach_in(read_object(path))


def folder_of(start: LeRobotStart) -> Path:
    """Return the folder of the policy to train further; raises ConfigError if it is not set."""
    if start.path is None:
        raise ConfigError("No LeRobot policy is given. Set policy.path=FOLDER, a folder with a config.json.")
    return start.path


def _reach_in(found: Mapping[str, Any]) -> Reach:
    history = int(found.get("n_obs_steps", 1))
    chunk = int(found.get("n_action_steps") or found.get("action_chunk_size") or 1)
    if found.get("type") == "pi0_fast":  # which learns what it executes
        return Reach(history, chunk, chunk)
    beyond = int(found.get("horizon", chunk + history - 1)) - (history - 1)
    return Reach(history, chunk, int(found.get("chunk_size", beyond)))


@dataclass(frozen=True)
class LeRobotSettings:
    """World-related information that a LeRobot checkpoint lacks; read from `robopolicy.json`.

    features: LeRobot feature -> robopolicy observation key, if they differ (`{"observation.images.top":
    "observation.images.front"}`); image_sizes: LeRobot feature -> [height, width] of the world's images, which are
    resized to the policy's training size; names: LeRobot feature, or "action" -> names of its elements, in order;
    units: likewise -> unit, such as "rad"; fps: control rate in training, 0 for unknown; instructions: texts used in
    training; world: {name: push_t, options: {}}, the default world; renamed: names of columns and elements in its data
    -> names that it reads; tuning: exploration and training settings; base: {steps, train_encoder} if its first
    denoising steps are run by a frozen base stored next to it; log_std: logarithms of the standard deviations [A] that
    act explores with, if learned.
    """

    features: Mapping[str, str] = field(default_factory=dict)
    image_sizes: Mapping[str, tuple[Pixels, ...]] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    fps: NonNegative = 0.0
    instructions: tuple[str, ...] = ("",)
    world: Mapping[str, Any] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    tuning: LeRobotTuning = field(default_factory=LeRobotTuning)
    base: Mapping[str, Any] | None = None
    log_std: tuple[float, ...] | None = None


keep_former_names(__name__, {"Tuned": "TrainableWeights"})
