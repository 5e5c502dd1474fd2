"""Verbs about other verbs: benchmarks, pipelines, the demo, checks, explanations and reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.ranges import Count, Filled, Natural, Seed


@dataclass(frozen=True)
class BenchSection:
    """Which benchmark, and on what; a setting that the benchmark does not read is refused."""

    name: str = "sims"
    """One of those that the help of bench lists, or the dotted path of your own."""
    rounds: Natural = 13
    """For sims, collection and inference, rounds of timing in which those compared take turns; for algorithms, 0 skips
    timing an iteration.
    """
    tasks: Annotated[tuple[str, ...], Filled()] = ("push_cube", "pick_place")
    """Tasks, read by algorithms, collection, inference, sight, delay, ranking, imagination, test_time_planning,
    offline, online, gate and rl100.
    """
    seeds: Annotated[tuple[Seed, ...], Filled()] = (0, 1, 2)
    """Random seeds, one run for each; read by all benchmarks but sims."""
    only: tuple[str, ...] = ()
    """Which rows of the results to run: recipes, methods (algorithms), policies (collection, inference), chunkings
    (delay), ablations (mechanisms), experimental arms (edge_of_reach, imagination, online, language,
    sight), plans (test_time_planning), kinds of model (ranking) or parts (gate: candidates, rounds; offline: ways,
    agents, deployment, corrections); [] for all.
    """
    overrides: tuple[str, ...] = ()
    """Settings for every run, quoted: bench.overrides=['finetune.iterations=10']. What a method sets itself takes
    precedence.
    """


@dataclass(frozen=True)
class PipelineSection:
    """Verbs that build on each other, one after the other; recipe=rl100 is such a list."""

    recipe: str = "push_t"
    """Recipe of the task, which every stage begins with."""
    stages: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Name of a stage -> its verb, then its settings, in which {name} is the run folder of an earlier stage and {seed}
    run.seed: pipeline.stages={imitation: [train], one_step: [distill, 'distill.policy={imitation}/checkpoint']}.
    """
    overrides: tuple[str, ...] = ()
    """Settings of every stage, quoted: pipeline.overrides=['run.threads=1']; what a stage says itself weighs more."""
    changes: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Further settings of single stages, which weigh most: pipeline.changes.offline=['offline.rounds=5']."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.changes if name not in self.stages]
        if unknown:
            raise ConfigError(
                f"pipeline.changes.{unknown[0]}: there is no such stage.{did_you_mean(unknown[0], self.stages)}"
            )
        stages: Mapping[str, object] = self.stages
        for name, said in stages.items():
            if isinstance(said, str) or not said:
                raise ConfigError(f"pipeline.stages.{name} is a list: its verb, then its settings.")
            if not name.isidentifier() or name == "seed":
                raise ConfigError(f"pipeline.stages: '{name}' names a folder and stands in braces: letters, digits, _.")


@dataclass(frozen=True)
class DemoSection:
    """What the demo runs."""

    recipe: str = "push_t"
    """Name of the recipe."""
    episodes: Count = 200
    """Of its judgements."""


@dataclass(frozen=True)
class CheckSection:
    """What is checked against its contract."""

    target: str = ""
    """A checkpoint folder, a name, or the dotted path, package.module:Name, of a world, policy, world model or
    controller."""


@dataclass(frozen=True)
class AlgorithmsSection:
    """Which algorithm, or building block of algorithms, to explain."""

    name: str = ""
    """A preset (an algorithm such as grpo), a mechanism (one building block of it) or a paper (such as BAPO); `papers`
    for a table of those, empty for all presets and mechanisms.
    """


@dataclass(frozen=True)
class ReportSection:
    """What to report on."""

    run: Path | None = None
    """A run folder."""
