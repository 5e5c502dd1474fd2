"""Sections for policies that act: evaluation, inference engine, engine selection, and staged rollout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from robopolicy.client.element_kinds import POSITIONS
from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Fraction, Natural, NonNegative
from robopolicy.core.structured import REGISTRY
from robopolicy.inference.configuration import ExportFormat, InferenceConfig


@dataclass(frozen=True)
class EvaluateSection:
    """Success over paired episodes, deterministic and stochastic."""

    RENAMED: ClassVar[Mapping[str, str]] = {"anchors": "reference_dataset"}

    policy: Path | None = None
    """Checkpoint of the policy."""
    base: Path | None = None
    """Checkpoint of a second policy, evaluated on the same seeds; the difference in success is tested. If the policy
    plans, the default is the same policy without planning.
    """
    instruction: str = ""
    """Instruction given to the policy: empty for the world's own, `wrong` for another of its instructions, `paraphrase`
    for the same in other words, or any text.
    """
    controls: tuple[str, ...] | None = None
    """Additional evaluations without noise under another instruction: wrong_instruction (a policy that conditions on
    language then fails), paraphrase; null for all that the world supports.
    """
    reference_dataset: Path | None = None
    """Dataset of the same world, recorded with collect.quality. It adds a normalised return: 0 for uniform random
    actions, 100 for the expert.
    """
    specification: str = ""
    """Formula of signal temporal logic, such as G[0,8](abs(cube_y) < 0.4) & F(cube_x > 0.2): the share of episodes that
    fulfil it and its mean robustness are reported too. Elements of the observed vectors by name; times in seconds.
    """
    variations: Any = None
    """Factors of variation of a MuJoCo task under which the policy is also evaluated, one at a time, with the same
    initial states: [colour,mass], or with values, {mass: [0.5, 2], colour: 1}. Their difference in success is tested.
    """
    sessions: Natural = 0
    """Number of sessions of long service, each of which changes one of `variations` more, drawn from run.seed; 0 tries
    one at a time.
    """
    episodes: Count = 200
    """Number of episodes per mode (deterministic and stochastic)."""
    videos: Natural = 8
    """Number of episodes recorded as video, 0 for none."""
    latency_steps: Natural = 0
    """Inference latency in control steps: an action chunk computed from an observation is executed this many steps
    later.
    """
    chunking: str = field(default="synchronous", metadata={REGISTRY: "robopolicy.inference.configuration:CHUNKINGS"})
    """Robot behaviour during inference. synchronous holds still. prefetch continues the last chunk and then switches to
    the next one; ensembling averages both; bidirectional chooses the next chunk that is closest to the last. rtc
    inpaints the next chunk around it, lerobot_rtc does so without the network's derivative, trained_rtc with a policy
    trained for it (policy.prefix_steps). All but synchronous need a policy whose prediction_steps reach chunk +
    latency_steps. A custom one is given as module:function.
    """
    chunking_options: dict[str, Any] = field(default_factory=dict)
    """Options of the chunking method, such as evaluate.chunking_options.max_guidance_weight=10."""
    hold: Literal["zero", "last"] = "zero"
    """Holding value of action elements whose name and unit do not imply one: zero (velocities, differences) or their
    last value (positions).
    """
    positions: tuple[str, ...] = POSITIONS
    """Names of action elements that keep their last value while holding still, regardless of unit."""

    def __post_init__(self) -> None:
        if self.instruction and self.controls:
            raise ConfigError(
                "evaluate.controls compares with the world's own instructions, but evaluate.instruction replaces "
                "them: set only one of them."
            )


AUTO = "auto"


@dataclass(frozen=True)
class InferenceSection(InferenceConfig):
    """Inference engine of a policy that acts."""

    engine: str = AUTO
    """Inference engine. auto: the choice that robopolicy optimize stored with the checkpoint, else reference. reference
    computes as in training; lean computes the same (to 1e-5) without what only training needs; compiled is lean
    compiled to machine code (it needs a C++ compiler), on a GPU one CUDA graph per policy call. A custom engine is
    given by its import path.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == AUTO and (self.sampler or self.precision != "fp32"):
            raise ConfigError("inference.sampler and inference.precision need an engine: set inference.engine=lean.")


@dataclass(frozen=True)
class ExportSection:
    """A policy as one program that runs without robopolicy."""

    policy: Path | None = None
    """Checkpoint of the policy."""
    format: ExportFormat = ExportFormat.ONNX
    """onnx (any ONNX runtime; extra `export`) or torchscript (torch alone, in Python or C++)."""
    instruction: str = ""
    """Instruction of a policy that reads one: it becomes part of the program. Empty for the policy's only one."""
    batch_size: Count = 1
    """Rows per call of a program with an instruction; other programs take any number of rows."""
    output: Path | None = None
    """File to write, with a .json and a .md of the same name; null for the checkpoint's name with .onnx or .pt."""


@dataclass(frozen=True)
class OptimizeSection:
    """Inference methods, timed and compared with the reference; the fastest is stored next to the checkpoint."""

    RENAMED: ClassVar[Mapping[str, str]] = {"error": "max_action_error", "batch": "batch_size"}

    policy: Path | None = None
    """Checkpoint of the policy."""
    data: tuple[Path, ...] = ()
    """Datasets whose observations are used for policy calls; [] plays episodes instead."""
    episodes: Count = 20
    """Number of episodes to play when data=[]."""
    observations: Count = 256
    """Number of observations at which errors are measured and block caches are calibrated."""
    batch_size: Count = 1
    """Batch size of policy calls in use: 1 for a robot, more for a server or a simulation."""
    rounds: Count = 30
    """Number of timed policy calls per engine; the engines take turns."""
    engines: tuple[str, ...] = ("lean", "compiled")
    """Engines to try; one that cannot run on this device is skipped and reported."""
    max_action_error: NonNegative = 0.0
    """Maximum action error: root mean square divided by the standard deviation of the policy's own actions. 0 allows
    exact engines only. Above 0, fewer steps, block caches and bf16 are also tried; .05 is a good start.
    """
    steps: tuple[Count, ...] = (1, 2, 3, 5, 10, 20)
    """Numbers of denoising steps to try, if the policy takes more."""
    schedulers: tuple[str, ...] = ("uniform", "shared", "bac")
    """Block cache schedulers to try, [] for none."""
    budgets: tuple[Count, ...] = (5, 10, 20)
    """Numbers of evaluations of each block per denoising chain to try, if the policy takes more steps."""
    orders: tuple[Natural, ...] = (0, 1)
    """Output of a cached block between evaluations: 0 reuses the last one, 1 or 2 extrapolates it (order of
    TaylorSeer).
    """
    evaluate_episodes: Natural = 0
    """Number of episodes, with the same initial states, that evaluate the reference and the chosen engine; 0 for
    none.
    """

    def __post_init__(self) -> None:
        if min(self.episodes, self.observations - 1, self.batch_size, self.rounds, *self.steps, *self.budgets) < 1:
            raise ConfigError(
                "optimize: episodes, batch_size, rounds, steps and budgets must be at least 1, and observations at "
                "least 2."
            )
        if not self.orders or min(self.orders) < 0:
            raise ConfigError(
                "optimize.orders must contain integers of at least 0, such as [0]; schedulers=[] disables block caches."
            )
        if self.max_action_error < 0 or self.evaluate_episodes < 0 or not self.engines:
            raise ConfigError(
                "optimize: max_action_error and evaluate_episodes must be at least 0, and at least one engine is "
                "needed."
            )


@dataclass(frozen=True)
class DeploySection:
    """A staged rollout of a new policy in which success must not fall below a lower bound."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "drop": "max_success_drop",
        "known": "base_episodes",
        "wave": "update_every",
        "coin": "mix_per",
    }

    policy: Path | None = None
    """Checkpoint of the new policy (default: the output of finetune with the same name and seed)."""
    base: Path | None = None
    """Checkpoint of the current policy (default: the output of train with the same name and seed)."""
    mix_per: Literal["step", "episode"] = "step"
    """step: the base acts first in an episode and then the new policy (StepMix); episode: one of them throughout
    (EpsMix).
    """
    max_success_drop: Fraction = 0.2
    """Fraction of the base policy's success that may be lost: the minimum success is (1 - drop) times it."""
    base_episodes: Count = 200
    """Number of base policy episodes played first, to estimate its success."""
    episodes: Count = 500
    """Number of episodes of the deployment."""
    update_every: Count = 20
    """Number of episodes between updates of the new policy's probability."""
    confidence: Fraction = 0.95
    """Confidence level of the one-sided bound that must exceed the minimum success."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_success_drop <= 1 or not 0.5 <= self.confidence < 1:
            raise ConfigError(
                f"deploy.max_success_drop={self.max_success_drop} must be a fraction of the base's success in [0, 1), "
                f"and "
                f"deploy.confidence={self.confidence} must be in [0.5, 1)."
            )
        if min(self.base_episodes, self.update_every) < 1 or self.episodes < 20:
            raise ConfigError("deploy: base_episodes and update_every must be at least 1, and episodes at least 20.")
