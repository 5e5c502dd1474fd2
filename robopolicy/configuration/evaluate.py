"""What is judged."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.holding import POSITIONS
from robopolicy.core.ranges import Count, Natural
from robopolicy.core.structured import REGISTRY


@dataclass(frozen=True)
class EvaluateSection:
    """Success over paired episodes, deterministic and stochastic."""

    policy: Path | None = None
    """Checkpoint."""
    base: Path | None = None
    """Checkpoint of a second policy on the same seeds; the difference is tested. Beside one that plans, the default is
    the same policy without planning.
    """
    instruction: str = ""
    """What the policy is told: empty for what the world asks for, wrong for another of its instructions, paraphrase for
    the same in other words, or any text.
    """
    controls: tuple[str, ...] | None = None
    """Judged besides, without noise: wrong_instruction (a policy that minds the language then fails), paraphrase; null
    for those that a world with several instructions has.
    """
    anchors: Path | None = None
    """A dataset of graded quality (collect.quality) of the same world: returns are also scored between what uniform
    actions earn there, 0, and the expert, 100.
    """
    episodes: Count = 200
    """How many in each mode."""
    videos: Natural = 8
    """How many are filmed, 0 for none."""
    latency_steps: Natural = 0
    """Control steps that a decision takes: what is seen at a step is acted on so many steps later."""
    chunking: str = field(default="synchronous", metadata={REGISTRY: "robopolicy.inference.chunkings:CHUNKINGS"})
    """What the robot does meanwhile: hold still (synchronous), or go on with its last plan and switch to the next
    (prefetch), average both (ensembling), choose the next one that is closest to it (bidirectional), or inpaint the
    next one around it (rtc, lerobot_rtc without the network's derivative, trained_rtc by a policy that has learned it:
    policy.prefix_steps). All but the first need a policy whose prediction_steps reach chunk + latency_steps. Or your
    own, module:function.
    """
    chunking_options: dict[str, Any] = field(default_factory=dict)
    """Its own settings, such as evaluate.chunking_options.max_guidance_weight=10."""
    hold: Literal["zero", "last"] = "zero"
    """How elements of the action hold still of which neither name nor unit says it: at zero (velocities, differences),
    or at their last value (positions).
    """
    positions: tuple[str, ...] = POSITIONS
    """Elements of the action that keep their last value, by name, whatever they are."""

    def __post_init__(self) -> None:
        if self.instruction and self.controls:
            raise ConfigError(
                "evaluate.controls are judged beside the world's own words, and evaluate.instruction says others: "
                "leave one of them out."
            )
