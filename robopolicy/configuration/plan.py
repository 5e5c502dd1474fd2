"""The `plan` section of the configuration: planning in a world model when a policy acts (best of N candidates)."""

from dataclasses import dataclass
from pathlib import Path

from robopolicy.core.ranges import Count
from worldmodels.configuration import PlanConfig


@dataclass(frozen=True)
class PlanSection(PlanConfig):
    """Planning in a world model: of several action chunks of the policy, execute the one with the best imagined return.

    The other settings, such as discount and uncertainty penalty, are inherited. finetune and imagine collect by it too:
    with plan.uncertainty below 0 imagined rollouts stay where the model knows (COPlanner). Which of the chunks was
    taken is not part of the policy's probabilities.
    """

    model: Path | None = None
    """Checkpoint of the world model, null for no planning."""
    candidates: Count = 8
    horizon: Count = 20
