"""Policies that act: how they are judged, on which engine they run, which is fastest, and how a new one is deployed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.holding import POSITIONS
from robopolicy.core.ranges import Count, Natural, NonNegative, Share
from robopolicy.core.structured import REGISTRY
from robopolicy.inference.configuration import InferenceConfig


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
    chunking: str = field(default="synchronous", metadata={REGISTRY: "robopolicy.inference.configuration:CHUNKINGS"})
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


AUTO = "auto"


@dataclass(frozen=True)
class InferenceSection(InferenceConfig):
    """Who computes the decisions of a policy that acts."""

    engine: str = AUTO
    """auto: what robopolicy optimize has stored beside the checkpoint, else reference. reference computes as training
    does; lean the same (to 1e-5) without what acting does not need; compiled is lean in machine code (it needs a C++
    compiler), on a GPU one CUDA graph a decision. Your own is named by its dotted path.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == AUTO and (self.sampler or self.precision != "fp32"):
            raise ConfigError(
                "inference.sampler and inference.precision belong to an engine: set inference.engine=lean."
            )


@dataclass(frozen=True)
class OptimizeSection:
    """Ways of computing a policy's decisions, timed and compared with the reference; the fastest is kept beside it."""

    policy: Path | None = None
    """Checkpoint."""
    data: tuple[Path, ...] = ()
    """Datasets at whose observations it decides, [] for episodes that it plays itself."""
    episodes: Count = 20
    """Of those that it plays."""
    observations: Count = 256
    """At which errors are measured and block caches calibrated."""
    batch: Count = 1
    """Rows that decide at once when the policy is used: 1 for a robot, more for a server or a simulation."""
    rounds: Count = 30
    """Decisions that are timed, of all ways in turns."""
    engines: tuple[str, ...] = ("lean", "compiled")
    """Those to try; one that cannot run here is left out, and said."""
    error: NonNegative = 0.0
    """Largest error of actions that is allowed, the root mean square over the standard deviation of the policy's own
    actions; 0 for exact engines alone. Above 0 fewer steps, block caches and bf16 are tried as well: .05 is a start.
    """
    steps: tuple[Count, ...] = (1, 2, 3, 5, 10, 20)
    """Numbers of steps to try, where the policy takes more."""
    schedulers: tuple[str, ...] = ("uniform", "shared", "bac")
    """Block cache schedulers to try; [] for none."""
    budgets: tuple[Count, ...] = (5, 10, 20)
    """Evaluations of a block in a chain, where the policy takes more steps."""
    orders: tuple[Natural, ...] = (0, 1)
    """What a block cache answers in between: 0 what was computed last, 1 or 2 an extrapolation (TaylorSeer)."""
    evaluate_episodes: Natural = 0
    """Episodes that judge reference and choice on the same starts, 0 for none."""

    def __post_init__(self) -> None:
        if min(self.episodes, self.observations - 1, self.batch, self.rounds, *self.steps, *self.budgets) < 1:
            raise ConfigError(
                "optimize: episodes, batch, rounds, steps and budgets are at least 1, and observations at least 2."
            )
        if not self.orders or min(self.orders) < 0:
            raise ConfigError("optimize.orders names 0 or more, such as [0]; schedulers=[] is for no block caches.")
        if self.error < 0 or self.evaluate_episodes < 0 or not self.engines:
            raise ConfigError("optimize: error and evaluate_episodes are at least 0, and there is an engine to try.")


@dataclass(frozen=True)
class DeploySection:
    """A deployment in which success must not fall below a floor."""

    policy: Path | None = None
    """Checkpoint of the new policy (default: what finetune wrote under the same name and seed)."""
    base: Path | None = None
    """Checkpoint of the known one (default: what train wrote under the same name and seed)."""
    coin: Literal["step", "episode"] = "step"
    """Who acts is drawn at every decision (StepMix), or once an episode (EpsMix)."""
    drop: Share = 0.2
    """Share of the base's success that may be lost: the floor is (1 - drop) times it."""
    known: Count = 200
    """Episodes of the base that are played first, so that its success is known."""
    episodes: Count = 500
    """Length of the deployment."""
    wave: Count = 20
    """Episodes after which the share of the new policy is chosen anew."""
    confidence: Share = 0.95
    """Of the one-sided bound that has to exceed the floor."""

    def __post_init__(self) -> None:
        if not 0 <= self.drop <= 1 or not 0.5 <= self.confidence < 1:
            raise ConfigError(
                f"deploy.drop={self.drop} is a share of the base's success, deploy.confidence={self.confidence} is in "
                "[0.5, 1)."
            )
        if min(self.known, self.wave) < 1 or self.episodes < 20:
            raise ConfigError("deploy: known and wave are at least 1, episodes at least 20.")
