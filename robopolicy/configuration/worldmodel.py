"""Which world model is trained, and on what."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from robopolicy.core.structured import Tagged
from robopolicy.training.configuration import FitConfig
from worldmodels.configuration import EnsembleConfig
from worldmodels.registry import WORLD_MODELS


@dataclass(frozen=True)
class WorldModelSection(Tagged):
    """A world model, trained on datasets and fresh rollouts."""

    kinds: ClassVar = WORLD_MODELS

    kind: str = "ensemble"
    """ensemble and rssm (states, minutes), pixel_diffusion (a camera's next frame), video (all cameras, far ahead), or
    your own.
    """
    config: Any = field(default_factory=EnsembleConfig)
    data: tuple[Path, ...] = ()
    """LeRobotDatasets (default: what collect wrote under the same name and seed)."""
    policies: tuple[Path, ...] = ()
    """Checkpoints of policies that add rollouts."""
    transitions: int = 100_000
    """Control steps of data: what is missing is played by the expert at every level of noise and by policies, an equal
    share each.
    """
    styles: int = 0
    """In how many other looks the same training episodes are filmed as well (Sword), for models that see images."""
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(steps=1500, learning_rate=3e-3, weight_decay=1e-5, checkpoint_every=500)
    )
    noise: tuple[str, ...] = ("low", "medium", "high", "random")
    """Levels at which the expert adds rollouts, failures among them."""
    examine_rows: int = 512
    """Held-out episodes that the examination follows."""
    examine_steps: int = 20_000
    """Single steps on which it judges reward and success (a diffusion model of images takes minutes for the default).
    """
