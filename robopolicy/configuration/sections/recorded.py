"""Sections for recorded data: collection, offline learning, offline evaluation, diagnosis."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Fraction, Natural, NoiseLevel, NonEmpty, NonNegative
from robopolicy.core.structured import Tagged
from robopolicy.data.configuration import ConvertConfig, CorrectConfig
from robopolicy.rl.offline.configuration import AGENTS, IqlConfig
from robopolicy.training.offline.configuration import IMPROVERS, BestOfConfig, CriticFitConfig, GuidedConfig


@dataclass(frozen=True)
class CollectSection:
    """Demonstrations by the scripted expert, a custom controller or a policy."""

    RENAMED: ClassVar[Mapping[str, str]] = {"anchor_episodes": "reference_episodes"}

    episodes: Count = 200
    """Number of episodes, over all noise levels."""
    quality: Literal["", "random", "expert", "medium", "replay", "mixed", "play"] = ""
    """Dataset quality level, with the noise found for this task (`noise` is then not read); "" for none. random:
    uniform actions; expert: success of at least 95 %; medium: 30 to 50 %; replay: from random to medium; mixed: expert
    and medium alternating; play: no particular goal.
    """
    trial_episodes: Count = 128
    """collect.quality: number of episodes per noise level that is tried."""
    reference_episodes: Count = 128
    """collect.quality: number of episodes with uniform actions, and with the expert, that set the scale of normalised
    scores; use at least 100 for published results.
    """
    noise: Annotated[tuple[NoiseLevel, ...], NonEmpty()] = ("low",)
    """Action noise levels, each for an equal fraction of the episodes: none, low, medium, high, random, a standard
    deviation as a fraction of half the action range, play, towards random goals, or a constant fault, quoted:
    collect.noise=["aim=0.04","speed=0.5"], 40 mm beside the goal, or at half speed.
    """
    controller: str = ""
    """Import path (package.module:factory) of a custom controller; empty for the expert."""
    policy: Path | None = None
    """Checkpoint of a policy that plays instead of a controller."""
    deterministic: bool = False
    """With collect.policy: play without exploration noise."""
    label_policy: str = ""
    """Source of action labels at every visited state, which `train` then learns instead of the executed actions: expert
    (or collect.controller) without its action noise, or the checkpoint of a policy. "" for no labels.
    """
    label_steps: Count = 8
    """Expert labels: number of control steps labelled ahead, by continuing in a copy of the world. Use at least the
    policy's prediction_steps; 1 if the world has no snapshots.
    """
    successes_only: bool = False
    """Drop failed episodes. Keep them for world models, which need failures."""
    chains: bool = False
    """Record the denoising chain and its log-densities at every call of a denoising policy (collect.policy);
    gate.evaluators=[importance] needs them.
    """
    correct: CorrectConfig = field(default_factory=CorrectConfig)
    images: Literal["png", "video"] = "png"
    """Image storage format: png (exact) or video (small)."""

    def __post_init__(self):
        if min(self.trial_episodes, self.reference_episodes) < 2:
            raise ConfigError("collect.trial_episodes and collect.reference_episodes must be at least 2.")
        if self.chains and (self.policy is None or self.quality or self.successes_only):
            raise ConfigError(
                "collect.chains=true records the denoising chains of a policy in all of its episodes: set "
                "collect.policy=CHECKPOINT, and neither collect.quality nor collect.successes_only."
            )
        if self.label_policy and (self.quality or self.chains or self.correct.wanted):
            raise ConfigError(
                "collect.label_policy labels episodes made with collect.noise or collect.policy: unset "
                "collect.quality, collect.chains and collect.correct."
            )
        if self.deterministic and self.policy is None:
            raise ConfigError("collect.deterministic applies to a policy: set collect.policy=CHECKPOINT.")
        if self.correct.wanted and (self.policy is None or self.quality or self.chains or self.successes_only):
            raise ConfigError(
                "With an alarm of collect.correct an operator takes over from a policy: set "
                "collect.policy=CHECKPOINT, and none of collect.quality, collect.chains and collect.successes_only."
            )
        if self.quality and self.successes_only:
            raise ConfigError(
                f"collect.quality={self.quality} is defined by a success rate, which collect.successes_only=true "
                "would change: set only one of them."
            )


@dataclass(frozen=True)
class ConvertSection(ConvertConfig):
    """Source dataset in another format, and the LeRobotDataset to create."""

    source: Path | None = None
    """Source: a file, a dataset folder, or a folder of such files."""
    target: Path | None = None
    """Folder of the new dataset; if unset, the column mapping is printed and nothing is written."""
    merge: tuple[Path, ...] = ()
    """Additional sources with the same columns, whose episodes are appended."""
    format: str = ""
    """Format name, or the import path package.module:Class of a custom one (default: detected from the files)."""


@dataclass(frozen=True)
class AgentSection(Tagged):
    """Critic that is fitted to the recorded action chunks."""

    kinds: ClassVar = AGENTS
    beside: ClassVar = True

    kind: str = "iql"
    """Offline RL agent: iql, td3_bc, rebrac, cql, cal_ql, edac, prdc, mdpo, or a custom one."""
    config: Any = field(default_factory=IqlConfig)


@dataclass(frozen=True)
class ImproveSection(Tagged):
    """Training method of a candidate, from the incumbent and the critic."""

    kinds: ClassVar = IMPROVERS
    beside: ClassVar = True

    kind: str = "best_of"
    """Policy improvement method: best_of (imitate the best of several sampled action chunks), idql (select it at
    inference, without imitation), weighted_imitation (AWR), chain_ppo (RL-100), diffusion_ql (ascend Q through the
    denoising chain or its last step: DPG), adjoint_matching (tilt a flow: QAM), recap (condition on the advantage),
    filtered_imitation (imitate high-advantage chunks only), dsrl (steer by the initial noise), latent_seek (move the
    noise while acting), imagined_ppo (PPO in offline.model, with the settings of finetune), or a custom one.
    """
    config: Any = field(default_factory=BestOfConfig)


@dataclass(frozen=True)
class OfflineSection:
    """Offline learning from recorded data, through a gate."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "without": "exclude_episodes",
        "more": "extra_datasets",
        "imagined": "imagined_episodes",
    }

    dataset: Path | None = None
    """Folder of a LeRobotDataset (default: the output of collect with the same name and seed)."""
    extra_datasets: tuple[Path, ...] = ()
    """Additional datasets of the same world, such as recorded episodes of the policy itself."""
    data: tuple[Literal["recorded", "imagined", "guided"], ...] = ("recorded",)
    """Training data of the critics. recorded: recorded action chunks; imagined: rollouts of the policy in the world
    model offline.model (with offline.agent=edac: RAVL); guided: samples of a diffusion model of the recorded data,
    guided towards the policy.
    """
    model: Path | None = None
    """Checkpoint of the world model for data=imagined."""
    imagined_episodes: Natural = 512
    """Number of imagined episodes."""
    imagined_steps: Natural = 0
    """Truncate imagined episodes after this many control steps and start them from recorded states; 0 plays complete
    episodes from the simulator's initial states.
    """
    guided: GuidedConfig = field(default_factory=GuidedConfig)
    reward: str = ""
    """Reward of data that has none: success (1 if the episode succeeds, else 0), head:CHECKPOINT (the same, predicted
    by the success head of a world model), or the import path of a function (episodes) -> reward [N]; empty for the
    recorded reward.
    """
    exclude_episodes: tuple[Natural, ...] = ()
    """Indices of episodes of `dataset` to exclude, such as broken ones."""
    rename: dict[str, str] = field(default_factory=dict)
    """Mapping of names of dataset columns and elements, as in train.rename (default: the policy's own)."""
    policy: Path | None = None
    """Checkpoint of the policy to improve (default: the output of train with the same name and seed)."""
    agent: AgentSection = field(default_factory=AgentSection)
    critic: CriticFitConfig = field(default_factory=CriticFitConfig)
    improve: ImproveSection = field(default_factory=ImproveSection)
    rounds: Count = 3
    """Number of candidates; each is trained from the incumbent and submitted to the gate."""
    gated: bool = True
    """Whether the gate decides about candidates; false accepts all of them, as a baseline for the gate."""
    evaluate_episodes: Natural = 200
    """Number of world episodes for the final evaluation of base and result, not used for selection. 0 if there is no
    world.
    """

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.imagined_episodes < 1 or min(self.evaluate_episodes, self.imagined_steps) < 0:
            raise ConfigError(
                "offline: rounds and imagined_episodes must be at least 1, evaluate_episodes and imagined_steps at "
                "least 0."
            )
        if "imagined" in self.data and self.model is None:
            raise ConfigError(
                "offline.data contains imagined, which needs a world model: set offline.model=CHECKPOINT."
            )
        if not self.data:
            raise ConfigError("offline.data=[] leaves no training data.")


@dataclass(frozen=True)
class GateSection:
    """Evaluators that must all confirm that a candidate is better."""

    FIXED: ClassVar[Mapping[str, Any]] = {"largest_weight": 100.0}
    RENAMED: ClassVar[Mapping[str, str]] = {
        "judges": "evaluators",
        "by": "metric",
        "starts": "num_states",
        "effective": "min_effective_episodes",
        "relative": "relative_margin",
    }

    candidate: Path | None = None
    """Checkpoint of the candidate policy."""
    incumbent: Path | None = None
    """Checkpoint of the incumbent policy that the candidate would replace."""
    data: tuple[Path, ...] = ()
    """Datasets for the evaluators (default: the output of collect with the same name and seed); use data held out from
    training.
    """
    evaluators: tuple[Literal["model", "fqe", "critic", "importance", "world"], ...] = ("model",)
    """Off-policy evaluators. model: episodes in gate.models; fqe: a critic fitted to each policy on recorded data;
    critic: mean values of a critic of the recorded actions (AM-Q); both are unreliable where a policy leaves the data.
    importance: logged episodes (collect.chains=true), weighted by their probability under each policy. world: trials in
    the real environment, for a short online phase; their steps are counted.
    """
    models: tuple[Path, ...] = ()
    """Checkpoints of world models, each one an evaluator (default: the output of worldmodel with the same name and
    seed).
    """
    metric: Literal["success", "return"] = "success"
    """Metric of the evaluators model and importance."""
    num_states: Count = 256
    """Number of recorded observations (or imagined episodes, or trials) from which both policies are evaluated."""
    margin: float = 0.0
    """Margin above zero that the lower bound of the improvement must exceed, in the evaluator's units."""
    relative_margin: float = 0.0
    """Margin above zero as a fraction of the incumbent's value (RL-100: 0.05)."""
    confidence: Fraction = 0.95
    """Confidence level of the bounds."""
    holdout: Fraction = 0.3
    """offline: fraction of the recorded episodes held out from training for the evaluators."""
    discount: Fraction = 0.99
    """fqe and critic: discount factor per control step."""
    steps: Count = 2000
    """fqe and critic: number of updates per fit."""
    width: Count = 128
    """fqe and critic: number of units per layer."""
    per_decision: bool = True
    """importance: weight each reward by the policy calls up to it only (per-decision importance sampling), not by those
    of the complete episode.
    """
    min_effective_episodes: NonNegative = 30.0
    """importance: minimum effective sample size in episodes; below it no estimate is returned."""

    def __post_init__(self) -> None:
        if not self.evaluators:
            raise ConfigError("gate.evaluators=[] contains no evaluator: use fqe, model or critic.")
        if self.min_effective_episodes < 1:
            raise ConfigError("gate.min_effective_episodes must be at least 1.")
        if self.num_states < 2 or not 0 < self.holdout < 1 or self.steps < 1:
            raise ConfigError("gate: num_states must be at least 2, steps at least 1, and holdout in (0, 1).")


@dataclass(frozen=True)
class BakeoffSection:
    """Comparison of the evaluators in gate.evaluators on policies whose true performance is measured in the world."""

    policies: tuple[Path, ...] = ()
    """Checkpoints of at least three policies, from independent trainings and training steps, both good and bad."""
    episodes: Count = 200
    """Number of world episodes that measure the true value of each policy."""
    threshold: float = 0.0
    """Difference in true value above which one policy counts as better than another."""

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.threshold < 0:
            raise ConfigError("bakeoff.episodes must be at least 1, and bakeoff.threshold at least 0.")


@dataclass(frozen=True)
class DoctorSection:
    """Data and policy to diagnose."""

    RENAMED: ClassVar[Mapping[str, str]] = {"without": "exclude_episodes"}

    data: Path | None = None
    """LeRobotDataset (default: the output of collect with the same name and seed)."""
    policy: Path | None = None
    """Checkpoint of the policy (default: the output of train with the same name and seed)."""
    rename: dict[str, str] = field(default_factory=dict)
    """Mapping of names of dataset columns and elements, as in train.rename (default: the policy's own)."""
    episodes: Count | tuple[Natural, ...] = 20
    """Number of demonstrations to replay; a list, such as [0,2,5], examines only these."""
    exclude_episodes: tuple[Natural, ...] = ()
    """Indices of episodes of `data` to exclude."""
