"""The `worldmodel` section of the configuration: which world model is trained, on which data, how evaluated."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NoiseLevel
from robopolicy.core.registry import is_dotted
from robopolicy.core.structured import Tagged
from robopolicy.training.configuration import FitConfig
from worldmodels.configuration import EnsembleConfig
from worldmodels.heads.registry import SETTING, SUCCESS_HEADS
from worldmodels.registry import WORLD_MODELS


@dataclass(frozen=True)
class WorldModelSection(Tagged):
    """A world model (learned dynamics, reward and success), trained on datasets and on newly collected rollouts."""

    kinds: ClassVar = WORLD_MODELS

    kind: str = "ensemble"
    """ensemble and rssm (states, minutes), latent_ensemble (images, of which policies read features: train.encoder),
    pixel_diffusion (a camera's next frame), video (all cameras, far ahead), or your own.
    """
    config: Any = field(default_factory=EnsembleConfig)
    data: tuple[Path, ...] = ()
    """Folders of LeRobotDatasets (default: what collect wrote under the same name and seed)."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other names for columns and elements of the data, as train.rename."""
    policies: tuple[Path, ...] = ()
    """Checkpoints of policies that collect further rollouts."""
    include_base: bool = False
    """Lets the policy that train wrote under the same name and seed be one of them: fine-tuning in imagination begins
    where it goes.
    """
    transitions: Count = 100_000
    """Control steps of training data: what the datasets lack is collected in equal shares by the expert, at every level
    of noise, and by the policies.
    """
    visual_styles: Natural = 0
    """Number of other visual styles in which the training episodes are rendered as well (Sword), for image models."""
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(steps=1500, learning_rate=3e-3, weight_decay=1e-5, checkpoint_every=500)
    )
    noise: tuple[NoiseLevel, ...] = ("low", "medium", "high", "random")
    """Levels of action noise at which the expert collects rollouts, so that failures are among them."""
    validation_episodes: Count = 512
    """Held-out episodes that the evaluation of the trained model replays in imagination."""
    validation_steps: Count = 20_000
    """Single steps on which the evaluation compares predicted reward and success with the recorded ones (an image
    diffusion model takes minutes for the default).
    """

    def __post_init__(self) -> None:
        """Raise ConfigError for an empty validation, or a success head that is not there, before data is collected."""
        if self.validation_episodes < 1 or self.validation_steps < 2:
            raise ConfigError("validation_episodes must be at least 1, and validation_steps 2.")
        head = str(getattr(self.config, SETTING, ""))
        if is_dotted(head):
            SUCCESS_HEADS.load(head)
        elif head:
            SUCCESS_HEADS.path(head)
