"""What compares a candidate with the incumbent, without playing either in the real world."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, NonNegative, Positive, Share


@dataclass(frozen=True)
class GateSection:
    """Judges who all must be sure that a candidate is better."""

    candidate: Path | None = None
    """Checkpoint of the policy that wants to replace another one."""
    incumbent: Path | None = None
    """Checkpoint of the one that it would replace."""
    data: tuple[Path, ...] = ()
    """Datasets that judges look at (default: what collect wrote under the same name and seed); give what training has
    not seen.
    """
    judges: tuple[Literal["model", "fqe", "critic", "importance", "world"], ...] = ("model",)
    """model: episodes in gate.models; fqe: a critic fitted to each policy on recorded data; critic: mean values of a
    critic of the recorded actions (AM-Q). The latter two are fooled where a policy does what the data has not.
    importance: logged episodes (collect.chains=true), weighed by how likely each policy was to decide so. world: trials
    in the world itself, whose steps are counted, for a short online phase.
    """
    models: tuple[Path, ...] = ()
    """Checkpoints of world models, one judge each (default: what worldmodel wrote under the same name and seed)."""
    by: Literal["success", "return"] = "success"
    """What models and importance judge by."""
    starts: Count = 256
    """Recorded observations (or imagined episodes, or trials) that both policies are scored from."""
    margin: float = 0.0
    """By how much the lower bound of the improvement must exceed zero, in the judge's units."""
    relative: float = 0.0
    """The same as a share of the incumbent's value (RL-100: 0.05)."""
    confidence: Share = 0.95
    """Of the bounds."""
    holdout: Share = 0.3
    """In offline: share of the recorded episodes that are kept for the judges, which training never sees."""
    discount: Share = 0.99
    """Of fqe and critic, per control step."""
    steps: Count = 2000
    """Of fqe and critic: updates of a fit."""
    width: Count = 128
    """Of fqe and critic: units of every layer."""
    per_decision: bool = True
    """Of importance: a reward is weighed by the decisions before it, not by those of the whole episode."""
    largest_weight: Positive = 100.0
    """Of importance: where weights are clipped."""
    effective: NonNegative = 30.0
    """Of importance: effective number of episodes below which it refuses."""

    def __post_init__(self) -> None:
        if not self.judges:
            raise ConfigError("gate.judges=[] judges nothing: name fqe, model or critic.")
        if self.largest_weight < 1 or self.effective < 1:
            raise ConfigError("gate.largest_weight and gate.effective are at least 1.")
        if self.starts < 2 or not 0 < self.holdout < 1 or self.steps < 1:
            raise ConfigError("gate: starts is at least 2, steps at least 1, holdout in (0, 1).")
