"""Section for calibrating and scoring failure detectors."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from robopolicy.core.ranges import Count, Fraction, Natural
from robopolicy.core.structured import REGISTRY


@dataclass(frozen=True)
class DetectSection:
    """Failure detectors of a policy: calibrated on demonstrations and its own episodes, scored on others."""

    policy: Path | None = None
    """Checkpoint of the policy."""
    demonstrations: Path | None = None
    """LeRobotDataset that the policy was trained on (default: the output of collect with the same name and seed)."""
    detectors: tuple[str, ...] = field(
        default=("float", "nearest", "nearest_max", "fiper", "value", "progress", "clock"),
        metadata={REGISTRY: "robopolicy.failures:DETECTORS"},
    )
    """Detectors. float: optimal transport from demonstrations on the policy's embeddings (FLOAT). nearest and
    nearest_max: sum and maximum of the distances to the nearest demonstrated frame. fiper: novelty and undecided
    actions. value: a success head learned from the policy's episodes. progress: decisions without progress along
    demonstrations. clock: decisions so far, the yardstick. A custom one is given by its import path.
    """
    episodes: Count = 400
    """Episodes of the policy: half are scored; the successes of the others calibrate the thresholds, except those of
    the quarter that fiper and value learn from.
    """
    faults: tuple[str, ...] = ()
    """Planted faults on which the detectors are scored as well, as in world.options.faults; one that the world cannot
    have is left out with a note.
    """
    fault_episodes: Count = 100
    """Episodes per fault."""
    samples: Natural = 16
    """Action chunks sampled per decision, for detectors that read them."""
    false_alarms: Fraction = 0.05
    """Share of successful episodes that may cause an alarm."""
    threshold: Literal["constant", "band", "percentile"] = "constant"
    """Threshold: constant; band, one per decision (the mean of successful episodes plus deviations); or percentile, of
    their last indices, which is FLOAT's own and promises no rate.
    """
    output: Path | None = None
    """Folder for the calibrated detectors (default: detectors, next to the checkpoint)."""
