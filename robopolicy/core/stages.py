"""Stages of a task and what an episode is charged in each: cost functions of observations, nothing else.

A pick is a reach, then a grasp, then a carry; each has constraints of its own, and what breaks them costs. Episodes are
ranked by such costs (GRAPE, arXiv:2411.19309), where a language model wrote them from keypoints in the image. Here they
are written by hand: by a task, or by whoever names a function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError

Frames = Mapping[str, Array]
"""Observation key -> [..., *field.shape], vector fields of single frames; `task` -> texts that broadcast to [...]."""


@dataclass(frozen=True)
class Constraint:
    """What may be broken during a stage.

    cost: frames [..., *shape] by key -> [...], 0 where nothing is broken, in any unit; threshold: so much of it is
    free; weight: what the rest is multiplied by, per unit of the cost; over: what the frames of the stage add up to,
    their mean, their sum (which charges an episode that dawdles) or the last one alone (a goal of the stage). Raises
    ConfigError for anything else.
    """

    cost: Callable[[Frames], Array]
    weight: float = 1.0
    threshold: float = 0.0
    over: Literal["mean", "sum", "last"] = "mean"

    def __post_init__(self) -> None:
        if self.over not in ("mean", "sum", "last"):
            raise ConfigError(f"A constraint's cost is taken over its stage by mean, sum or last, not by {self.over}.")


@dataclass(frozen=True)
class Stage:
    """A part of a task. done: frames [..., *shape] by key -> [...] bool, it is over by this frame."""

    name: str
    done: Callable[[Frames], Array]
    constraints: tuple[Constraint, ...]


@runtime_checkable
class HasStages(Protocol):
    """A world whose task says what its stages are."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """In order; none where the task does not say."""
        ...
