"""Section for training, examining and applying a success classifier."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Range
from robopolicy.core.structured import Tagged
from robopolicy.success.configuration import CLASSIFIERS, EncoderConfig
from robopolicy.training.configuration import FitConfig


@dataclass(frozen=True)
class SuccessSection(Tagged):
    """A success classifier, trained on labelled frames or episodes and calibrated on held-out episodes."""

    kinds: ClassVar = CLASSIFIERS

    kind: str = "encoder"
    """Classifier: encoder (small convolutions, trained as a whole), features (a frozen vision model from a folder), or
    a custom one by its import path.
    """
    config: Any = field(default_factory=EncoderConfig)
    dataset: Path | None = None
    """LeRobotDataset with labels (default: the output of collect with the same name and seed)."""
    extra_datasets: tuple[Path, ...] = ()
    """Further datasets with the same labels, such as episodes of a policy that fails."""
    positives: tuple[Path, ...] = ()
    """Datasets in which every frame shows success."""
    negatives: tuple[Path, ...] = ()
    """Datasets in which no frame shows success."""
    rename: dict[str, str] = field(default_factory=dict)
    """Mapping of names of dataset columns, as in train.rename, so that cameras have the names of the world."""
    labels: str = "frames"
    """Labels: frames (next.success of every step), episodes (success of the episode), the name of a
    column of 0 and 1 such as next.reward, or a CSV file with the columns episode, success and, optionally, first_frame
    and last_frame.
    """
    success_frames: Count = 5
    """Number of frames per successful episode that show success: the first ones with labels of frames, as success may
    be lost later, the last ones with labels of episodes.
    """
    instruction: str = ""
    """Instruction whose episodes are used, also for the relabelled copy; required if the datasets have several, because
    the classifier reads none.
    """
    inputs: tuple[str, ...] = ()
    """Cameras or observation keys that the classifier reads; [] for all cameras or, without any, all vectors."""
    hold: Count = 2
    """Number of consecutive frames that must exceed the threshold before success counts."""
    max_false_accepts: Annotated[float, Range(0.0, 0.5, including=False)] = 0.05
    """Fraction of failed episodes that may count as successful; the threshold is chosen for it with 95 % confidence."""
    calibration: Literal["temperature", "isotonic"] = "temperature"
    """Calibration of probabilities on held-out episodes."""
    holdout: Annotated[float, Range(0.0, 0.9, including=False)] = 0.4
    """Fraction of the episodes that training does not use; half of them choose the threshold, half test it."""
    batch_size: Count = 64
    """Number of frames per training step, half of them successes."""
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(steps=400, weight_decay=1e-4, warmup=20, checkpoint_every=200)
    )
    classifier: Path | None = None
    """Checkpoint of a classifier that is tested on all episodes of the dataset instead of training one."""
    relabelled: Path | None = None
    """With a classifier: folder for a copy of the dataset whose success, and reward for success, the classifier sets;
    labels are then not needed.
    """

    def __post_init__(self) -> None:
        if self.relabelled is not None and self.classifier is None:
            raise ConfigError("success.relabelled needs a trained classifier: set success.classifier=PATH.")
