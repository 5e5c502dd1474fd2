"""What can be chosen about fine-tuning a policy of LeRobot's, and what lies beside its checkpoint; nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.ranges import Count, NonNegative, Pixels, Positive
from robopolicy.core.storage import read_object, reading, recover_folder
from robopolicy.nn.configuration import FlowNoise
from robopolicy.policies.configuration import Reach

LEAST_STD = 1e-3
"""However much an act learns, exploration keeps this standard deviation, in normalised actions."""


class Tuned(Enum):
    """Which weights learn: expert, those that denoise, with everything that reads the observation frozen; all of them;
    or lerobot, those that the checkpoint's own config leaves free.
    """

    EXPERT = "expert"
    ALL = "all"
    LEROBOT = "lerobot"


@dataclass(frozen=True)
class LeRobotTuning:
    """How a policy of LeRobot's explores and learns; the numbers are in its normalised actions."""

    tuned: Tuned = Tuned.EXPERT
    """expert (what reads the observation is frozen and computed once a decision), all, or lerobot (what the
    checkpoint's own config leaves free).
    """
    flow_noise: FlowNoise = FlowNoise.CONSTANT
    """Noise of a flow's steps while exploring: constant, or sde (Flow-GRPO's: steps stay as noisy as learned)."""
    flow_noise_level: NonNegative = 0.1
    """Its scale."""
    eta: NonNegative = 1.0
    """Of a diffusion's steps while exploring: 1 is DDPM's noise, 0 none but the least one."""
    least_noise: NonNegative = 0.1
    """Floor of each step's standard deviation, in exploring and in log-probabilities; of a constant noise no floor."""
    noisy_steps: Count | None = None
    """So many random steps of each decision are noisy and scored, null for all."""
    std: Positive = 0.1
    """Of act, which has no noise of its own: the standard deviation that each action element begins to explore with."""
    learn_std: bool = True
    """Whether it learns; what it has come to is kept beside the checkpoint, and goes on from there."""
    temperature: Positive = 1.0
    """Of pi0_fast, which says tokens: what its logits are divided by while exploring."""
    keep_prefix: bool = True
    """Whether decisions keep what a frozen encoder made of their observation; otherwise it is read again for scores."""
    checkpointing: bool = False
    """Whether scores keep no activations but compute them again: less memory, a third more time."""

    def __post_init__(self) -> None:
        if self.flow_noise is FlowNoise.LEARNED:
            raise ConfigError("flow_noise=learned needs a network with a noise head, and LeRobot's have none.")
        if min(self.flow_noise_level, self.least_noise) < 0:
            raise ConfigError("flow_noise_level and least_noise cannot be negative.")
        if self.std < LEAST_STD:
            raise ConfigError(
                f"std is {self.std:g}: with next to no noise decisions have no probability of use; it is at least "
                f"{LEAST_STD:g}."
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature is {self.temperature:g}: it is positive, and 1 is what was learned.")


@dataclass(frozen=True)
class LeRobotStart:
    """A policy that LeRobot trained or made, to be trained further: its network, processors and statistics stay."""

    builds: ClassVar[str] = "robopolicy.policies.lerobot.acting:FromLeRobot"

    path: Path | None = None
    """Its folder, with config.json, model.safetensors and processors."""
    tuned: Tuned = Tuned.LEROBOT
    """What learns: lerobot (what its own config leaves free), expert, or all."""
    levels_per_sample: Count = 1
    """Noise levels at which each sample is denoised, with its observation read once."""

    began_elsewhere: ClassVar[bool] = True

    def reach(self) -> Reach:
        """See `SaysReach`; raises ConfigError without a folder, CheckpointError where that is none of LeRobot's."""
        path = recover_folder(folder_of(self)) / "config.json"
        with reading(path, failure=CheckpointError):
            return _reach_in(read_object(path))


def folder_of(start: LeRobotStart) -> Path:
    """Return the folder of the policy to be trained further; raises ConfigError without one."""
    if start.path is None:
        raise ConfigError("Which policy of LeRobot's? Set policy.path=FOLDER, one with a config.json.")
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
    """What a LeRobot checkpoint does not say about the world it acts in; read from `robopolicy.json`.

    features: LeRobot's feature -> our observation key, where the two differ (`{"observation.images.top":
    "observation.images.front"}`); image_sizes: LeRobot's feature -> [height, width] of the world's images, which are
    then resized to what the policy was trained on; names: LeRobot's feature, or "action" -> what its elements are
    called, in their order; units: likewise -> their unit, such as "rad"; fps: control rate it was trained at, 0 for
    unknown; instructions: texts it was trained with; world: {name: push_t, options: {}}, the world that it is meant
    for, where none is named; renamed: names of columns and elements in its data -> those by which it reads them;
    tuning: how it explores and learns; base: {steps, train_encoder} where its first denoising steps are those of a
    frozen base that lies beside it; log_std: logarithms of the standard deviations [A] that act explores with, where
    they were learned.
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
