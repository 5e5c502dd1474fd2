"""Looking ahead in a world model."""

from dataclasses import dataclass
from pathlib import Path

from worldmodels.configuration import PlanConfig


@dataclass(frozen=True)
class PlanSection(PlanConfig):
    """A look ahead in a world model before every decision; of several, the one that it thinks best of is taken."""

    model: Path | None = None
    """Checkpoint of the world model, null for no planning."""
    candidates: int = 8
    horizon: int = 20
