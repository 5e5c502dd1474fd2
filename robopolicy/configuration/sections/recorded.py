"""Recorded data: collecting it, learning from it, judging policies on it, examining it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Filled, Natural, NoiseLevel, NonNegative, Share
from robopolicy.core.structured import Tagged
from robopolicy.data.configuration import ConvertConfig, CorrectConfig
from robopolicy.rl.offline.configuration import AGENTS, IqlConfig
from robopolicy.training.offline.configuration import IMPROVERS, BestOfConfig, CriticFitConfig, GuidedConfig


@dataclass(frozen=True)
class CollectSection:
    """Demonstrations, by the scripted expert, a controller of yours or a policy."""

    episodes: Count = 200
    """How many, over all levels of noise."""
    quality: Literal["", "random", "expert", "medium", "replay", "mixed", "play"] = ""
    """Of graded quality, with noise that is found for this task (`noise` is not read); "" for none. random: uniform
    actions; expert: success of 95 % or more; medium: 30 to 50 %; replay: from random on to medium; mixed: expert and
    medium in turn; play: no goal in mind.
    """
    trial_episodes: Count = 128
    """Of graded quality: episodes at every level of noise that is tried."""
    anchor_episodes: Count = 128
    """Of graded quality: episodes of uniform actions, and of the expert, between which scores are normalised; figures
    to be shown want 100 or more.
    """
    noise: Annotated[tuple[NoiseLevel, ...], Filled()] = ("low",)
    """Levels of disturbance, each for an equal share of the episodes: none, low, medium, high, random, or the standard
    deviation of noise on every action as a share of half its range.
    """
    controller: str = ""
    """Dotted path package.module:factory of your own controller, empty for the expert."""
    policy: Path | None = None
    """Checkpoint of a policy that plays instead."""
    deterministic: bool = False
    """Of a policy: without exploration noise."""
    label_policy: str = ""
    """Who says in every step what it would have done there, which `train` then learns in the place of what was done:
    expert (or collect.controller), without the noise with which it acts, or the checkpoint of a policy. "" for nobody.
    """
    label_steps: Count = 8
    """Of the expert: control steps that it says ahead, by playing on in a copy of the world; as many as the policy's
    prediction_steps, or more. 1 where the world has no snapshots.
    """
    successes_only: bool = False
    """Drop failures; world models need them."""
    chains: bool = False
    """Record with every decision of a denoising policy (collect.policy) its chain and log-densities, which
    gate.judges=[importance] weighs.
    """
    correct: CorrectConfig = field(default_factory=CorrectConfig)
    images: Literal["png", "video"] = "png"
    """How images are stored: png, exact, or video, small."""

    def __post_init__(self):
        if min(self.trial_episodes, self.anchor_episodes) < 2:
            raise ConfigError("collect.trial_episodes and collect.anchor_episodes are at least 2.")
        if self.chains and (self.policy is None or self.quality or self.successes_only):
            raise ConfigError(
                "collect.chains=true records how a policy decides, all of its episodes: set collect.policy=CHECKPOINT, "
                "and neither collect.quality nor collect.successes_only."
            )
        if self.label_policy and (self.quality or self.chains or self.correct.wanted):
            raise ConfigError(
                "collect.label_policy labels what collect.noise or collect.policy do: leave out collect.quality, "
                "collect.chains and collect.correct."
            )
        if self.deterministic and self.policy is None:
            raise ConfigError("collect.deterministic is for a policy: set collect.policy=CHECKPOINT.")
        if self.correct.wanted and (self.policy is None or self.quality or self.chains or self.successes_only):
            raise ConfigError(
                "collect.correct.patience and budget let an expert take over from a policy: set "
                "collect.policy=CHECKPOINT, and none of collect.quality, collect.chains and collect.successes_only."
            )
        if self.quality and self.successes_only:
            raise ConfigError(
                f"collect.quality={self.quality} is a share of successes: collect.successes_only=true would change it."
            )


@dataclass(frozen=True)
class ConvertSection(ConvertConfig):
    """A dataset of another format, and the LeRobotDataset that is made of it."""

    source: Path | None = None
    """What is converted: a file, a dataset's folder, or a folder of such files."""
    target: Path | None = None
    """Folder of the new dataset; without one, the map of columns is printed and nothing is written."""
    merge: tuple[Path, ...] = ()
    """Further sources of the same columns, whose episodes follow."""
    format: str = ""
    """Name of the format, or the dotted path package.module:Class of yours (default: recognised by the files)."""


@dataclass(frozen=True)
class AgentSection(Tagged):
    """Whose critic is fitted to the recorded decisions."""

    kinds: ClassVar = AGENTS
    beside: ClassVar = True

    kind: str = "iql"
    """iql, td3_bc, rebrac, cql, cal_ql, edac, prdc, or your own."""
    config: Any = field(default_factory=IqlConfig)


@dataclass(frozen=True)
class ImproveSection(Tagged):
    """How a candidate is made of the incumbent and that critic."""

    kinds: ClassVar = IMPROVERS
    beside: ClassVar = True

    kind: str = "best_of"
    """best_of (imitate the best of several decisions), idql (do it, and imitate nothing), weighted_imitation (AWR),
    chain_ppo (RL-100), diffusion_ql (go up Q through the chain, or its last step: DPG), adjoint_matching (tilt a flow:
    QAM), recap (told what is better), filtered_imitation (of that alone), dsrl (steer by the initial noise),
    imagined_ppo (PPO in offline.model, by the settings of finetune), or your own.
    """
    config: Any = field(default_factory=BestOfConfig)


@dataclass(frozen=True)
class OfflineSection:
    """A policy that learns from recorded data alone, through a gate."""

    dataset: Path | None = None
    """Folder of a LeRobotDataset (default: what collect wrote under the same name and seed)."""
    more: tuple[Path, ...] = ()
    """Further datasets of the same world, such as recorded episodes of the policy itself."""
    data: tuple[Literal["recorded", "imagined", "guided"], ...] = ("recorded",)
    """What critics learn from: recorded decisions; such as the policy makes in the imagination of offline.model (with
    offline.agent=edac RAVL); such as a diffusion model of the recorded ones draws, guided towards the policy.
    """
    model: Path | None = None
    """Checkpoint of the world model that imagines."""
    imagined: Natural = 512
    """Imagined episodes."""
    imagined_steps: Natural = 0
    """Cut them after so many control steps, and begin in recorded steps; 0 plays whole ones on the simulator's starts.
    """
    guided: GuidedConfig = field(default_factory=GuidedConfig)
    reward: str = ""
    """For data that records none: success (1 where the episode succeeds, else 0), head:CHECKPOINT (the same, by the
    success head of a world model), or the dotted path of a function (episodes) -> reward [N]; empty for the recorded.
    """
    without: tuple[Natural, ...] = ()
    """Episodes of `dataset` to leave out, by number, such as broken ones."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other names for columns and elements of the data, as train.rename (default: the policy's own)."""
    policy: Path | None = None
    """Checkpoint of the policy to improve (default: what train wrote under the same name and seed)."""
    agent: AgentSection = field(default_factory=AgentSection)
    critic: CriticFitConfig = field(default_factory=CriticFitConfig)
    improve: ImproveSection = field(default_factory=ImproveSection)
    rounds: Count = 3
    """Candidates, each made of the incumbent and put before the gate."""
    gated: bool = True
    """False accepts every candidate, which is what the gate is compared with."""
    evaluate_episodes: Natural = 200
    """Episodes in the world that judge base and result at the end, and choose nothing; 0 where there is no world."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.imagined < 1 or min(self.evaluate_episodes, self.imagined_steps) < 0:
            raise ConfigError(
                "offline: rounds and imagined are at least 1, evaluate_episodes and imagined_steps at least 0."
            )
        if "imagined" in self.data and self.model is None:
            raise ConfigError("offline.data names imagined: in which world model? Set offline.model=CHECKPOINT.")
        if not self.data:
            raise ConfigError("offline.data=[] leaves nothing to learn from.")


@dataclass(frozen=True)
class GateSection:
    """Judges who all must be sure that a candidate is better."""

    FIXED: ClassVar[Mapping[str, Any]] = {"largest_weight": 100.0}

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
    effective: NonNegative = 30.0
    """Of importance: effective number of episodes below which it refuses."""

    def __post_init__(self) -> None:
        if not self.judges:
            raise ConfigError("gate.judges=[] judges nothing: name fqe, model or critic.")
        if self.effective < 1:
            raise ConfigError("gate.effective is at least 1.")
        if self.starts < 2 or not 0 < self.holdout < 1 or self.steps < 1:
            raise ConfigError("gate: starts is at least 2, steps at least 1, holdout in (0, 1).")


@dataclass(frozen=True)
class BakeoffSection:
    """Judges (those that gate.judges names) scored on policies whose true value the world tells."""

    policies: tuple[Path, ...] = ()
    """Checkpoints, at least three: of independent trainings and steps, good ones and bad ones."""
    episodes: Count = 200
    """Episodes in the world that say what each is truly worth."""
    threshold: float = 0.0
    """A policy is truly better than another one where it is so by more than this."""

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.threshold < 0:
            raise ConfigError("bakeoff.episodes is at least 1, bakeoff.threshold at least 0.")


@dataclass(frozen=True)
class DoctorSection:
    """What to examine."""

    data: Path | None = None
    """A LeRobotDataset (default: what collect wrote under the same name and seed)."""
    policy: Path | None = None
    """Checkpoint (default: what train wrote under the same name and seed)."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other names for columns and elements of the data, as train.rename (default: the policy's own)."""
    episodes: Count | tuple[Natural, ...] = 20
    """How many demonstrations are replayed; a list, such as [0,2,5], examines these alone."""
    without: tuple[Natural, ...] = ()
    """Episodes of `data` to leave out, by number."""
