"""Sections for benchmarks, pipelines, the demo, checks, explanations and reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.ranges import Count, Fraction, Natural, NonEmpty, NonNegative, Range, Seed


@dataclass(frozen=True)
class BenchSection:
    """Benchmark and its inputs; a setting that the benchmark does not read is refused."""

    RENAMED: ClassVar[Mapping[str, str]] = {"methods": "only"}

    name: str = "sims"
    """A benchmark listed by the help of bench, or the import path of a custom one."""
    rounds: Natural = 13
    """sims, libero, robosuite, metaworld, collection, inference, serving and workers: rounds of timing, in which the
    compared methods take turns; algorithms: 0 skips timing an iteration.
    """
    tasks: Annotated[tuple[str, ...], NonEmpty()] = ("push_cube", "pick_place")
    """Tasks to run; used by the benchmarks algorithms, collection, inference, sight, delay, ranking, imagination,
    test_time_planning, goals (push_cube, push_t), offline, online, corrections (pick_place, stack), detectors, gate and
    rl100.
    """
    seeds: Annotated[tuple[Seed, ...], NonEmpty()] = (0, 1, 2)
    """Random seeds, one run per seed; used by all benchmarks except sims, libero, libero_replay, robosuite and
    metaworld.
    """
    only: tuple[str, ...] = ()
    """Parts of the benchmark to run: recipes, methods (algorithms), policies (collection, inference), chunkings
    (delay), ablations (mechanisms), papers, experimental arms (corrections, edge_of_reach, goals, imagination,
    libero_rl, online, language, ranking, sight), agents (imagined_tasks), plans (test_time_planning), suites
    (libero_replay) or parts (gate: candidates, rounds; offline: ways, agents, deployment, corrections; gpu: physics,
    states, cameras, smolvla, world_models, inference); [] for all.
    """
    tiny: bool = False
    """gpu, dppo, goals: measure tiny sizes, as a trial of the script."""
    dppo: Path | None = None
    """dppo: folder of a checkout of https://github.com/irom-lab/dppo."""
    overrides: tuple[str, ...] = ()
    """Settings for every run, quoted: bench.overrides=['finetune.iterations=10']. Settings of a method take
    precedence.
    """


@dataclass(frozen=True)
class PipelineSection:
    """Verbs that build on each other, run in order; recipe=rl100 is such a list."""

    recipe: str = "push_t"
    """Recipe of the task, applied to every stage."""
    stages: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Mapping from stage name to its verb and settings, where {name} is the run folder of an earlier stage and {seed}
    is run.seed: pipeline.stages={imitation: [train], one_step: [distill, 'distill.policy={imitation}/checkpoint']}.
    """
    overrides: tuple[str, ...] = ()
    """Settings of every stage, quoted: pipeline.overrides=['run.threads=1']; settings of a stage take precedence."""
    changes: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Additional settings of single stages, with the highest precedence:
    pipeline.changes.offline=['offline.rounds=5'].
    """

    def __post_init__(self) -> None:
        unknown_stages = [name for name in self.changes if name not in self.stages]
        if unknown_stages:
            raise ConfigError(
                f"pipeline.changes.{unknown_stages[0]}: there is no such "
                f"stage.{did_you_mean(unknown_stages[0], self.stages)}"
            )
        stages: Mapping[str, object] = self.stages
        for name, stage in stages.items():
            if isinstance(stage, str) or not stage:
                raise ConfigError(f"pipeline.stages.{name} must be a list: its verb, then its settings.")
            if not name.isidentifier() or name == "seed":
                raise ConfigError(f"pipeline.stages: '{name}' is used as a folder name: use letters, digits and _.")


@dataclass(frozen=True)
class DemoSection:
    """Recipe and size of the demo."""

    recipe: str = "push_t"
    """Name of the recipe."""
    episodes: Count = 200
    """Number of episodes of each evaluation."""


@dataclass(frozen=True)
class ImprovementSection:
    """Policy to improve, its data, and the time budget."""

    policy: Path | None = None
    """Checkpoint of the policy to improve, robopolicy's or LeRobot's."""
    data: Path | None = None
    """LeRobotDataset with rewards or success; without a world, the policy is improved from it alone. Short form:
    data=LOG.
    """
    episodes: Count = 200
    """Number of episodes of each evaluation in the simulator."""
    minutes: NonNegative = 0.0
    """Time budget in minutes; it limits the iterations (or gated rounds) by their measured speed. 0 for no limit."""
    iterations: Natural = 0
    """Number of fine-tuning iterations (or gated rounds); 0 for the recipe's."""
    recipe: str = ""
    """Recipe of the stages; empty for the recipe with the name of the world, if it exists; `none` for no recipe."""
    overrides: tuple[str, ...] = ()
    """Additional settings of the stages, quoted: improve.overrides=['finetune.learning_rate=1e-4']. Each stage gets
    those of the sections that it reads.
    """
    plan_only: bool = False
    """Print the plan and run nothing but the short measurement."""


@dataclass(frozen=True)
class CheckSection:
    """Object to check against its contract."""

    target: str = ""
    """Checkpoint folder, name, or import path (package.module:Name) of a world, policy, world model or controller."""


@dataclass(frozen=True)
class AlgorithmsSection:
    """Algorithm or mechanism to explain."""

    name: str = ""
    """A preset (an algorithm such as grpo), a mechanism (a building block of one) or a paper (such as BAPO); `papers`
    for a table of papers; empty for all presets and mechanisms.
    """


@dataclass(frozen=True)
class ReportSection:
    """Run folder to report on."""

    run: Path | None = None
    """Run folder."""


@dataclass(frozen=True)
class WatchSection:
    """The live page of runs."""

    path: Path | None = None
    """Folder of runs, or one run (default: run.root)."""
    port: Annotated[int, Range(0, 65535)] = 8600
    """Port on this machine; 0 selects a free one."""


@dataclass(frozen=True)
class PushSection:
    """Folder to upload, and the repository on the Hugging Face hub that receives it."""

    folder: Path | None = None
    """Checkpoint, LeRobotDataset, or run folder, of which the checkpoint (or dataset) is uploaded."""
    repository: str = ""
    """Repository as USER/NAME; created if it does not exist."""
    private: bool = True
    """Visibility of a new repository: true only for you (or your organisation), false for everyone. A repository that
    exists keeps its own.
    """
    dry_run: bool = False
    """Write the card (README.md) into the folder and list the files, without uploading."""


@dataclass(frozen=True)
class SweepSection:
    """A verb that runs once for every combination of its settings' values, and the metric to compare."""

    command: tuple[str, ...] = ()
    """The verb and its settings, of which some have several values: finetune run.seed=0,1,2 finetune.clip=0.02,0.05."""
    metric: str = ""
    """Entry of result.json to compare, such as validation.reward_error; empty for the success rate, or the return, of
    the resulting policy.
    """
    name: str = ""
    """Name of the sweep's folder; empty for the verb and the name of its runs."""


@dataclass(frozen=True)
class RouteSection:
    """Choice between policies by initial state."""

    policies: tuple[Path, ...] = ()
    """Checkpoints of the policies."""
    costs: tuple[NonNegative, ...] = ()
    """Cost of an episode of each policy, in units of success: 0.05 means that 5 % more success are worth it. [] for
    none.
    """
    model: Path | None = None
    """Checkpoint of a value model for the same initial states (default: train one on synthetic policies)."""
    context: Count = 64
    """Episodes by which the value model knows a policy, from initial states that are not evaluated."""
    episodes: Count = 200
    """Initial states that are evaluated."""


@dataclass(frozen=True)
class AnalyzeSection:
    """Effective horizon of a task."""

    policy: Path | None = None
    """Checkpoint of a policy: its samples are tried in each state, as by online RL that starts from it. Default, RL
    from scratch: every combination of low, middle and high actions, with more than three dimensions one at a time.
    """
    candidates: Annotated[int, Range(2, 1000)] = 9
    """Action chunks sampled per state, with a policy."""
    hold: Count = 4
    """Control steps for which an action is held; a policy has its own chunks."""
    depth: Count = 3
    """Largest k: decisions that greedy play looks ahead."""
    rollouts: Count = 256
    """Maximum rollouts per decision; a sixteenth and a quarter of them are tried first."""
    episodes: Count = 200
    """Episodes in which greedy play is evaluated."""
    target: Fraction = 0.5
    """Success rate at which a task counts as solved."""
