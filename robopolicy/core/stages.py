"""Task stages with constraint costs, defined as functions of observations.

A pick consists of a reach, a grasp and a carry; each stage has its own constraints, and violations have a cost.
Episodes are ranked by such costs (GRAPE, arXiv:2411.19309), where a language model wrote them from image keypoints.
Here they are written by hand, in the task or in a user function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError

Frames = Mapping[str, Array]
"""Observation key -> [..., *field.shape], vector fields of single frames; `task` -> strings that broadcast to [...]."""


@dataclass(frozen=True)
class Constraint:
    """Constraint that may be violated during a stage.

    cost: frames [..., *shape] by key -> [...], 0 if satisfied, in any unit; threshold: cost that is tolerated; weight:
    multiplies the excess, per unit of the cost; over: aggregation over the frames of the stage: mean, sum (which
    penalises slow episodes) or last frame (a goal of the stage). Raises ConfigError for any other value.
    """

    cost: Callable[[Frames], Array]
    weight: float = 1.0
    threshold: float = 0.0
    over: Literal["mean", "sum", "last"] = "mean"

    def __post_init__(self) -> None:
        if self.over not in ("mean", "sum", "last"):
            raise ConfigError(
                f"over={self.over}: a constraint's cost is aggregated over its stage by mean, sum or last."
            )


@dataclass(frozen=True)
class Stage:
    """One stage of a task. done: frames [..., *shape] by key -> [...] bool, the stage is finished by this frame."""

    name: str
    done: Callable[[Frames], Array]
    constraints: tuple[Constraint, ...]


@runtime_checkable
class HasStages(Protocol):
    """A world whose task declares its stages."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages in order; empty if the task declares none."""
        ...
