"""The `bench` section of the configuration: which benchmark (experiment) runs, on which tasks and seeds."""

from dataclasses import dataclass
from typing import Annotated

from robopolicy.core.ranges import Filled, Natural, Seed


@dataclass(frozen=True)
class BenchSection:
    """Which benchmark, and on what; a setting that the benchmark does not read is refused."""

    name: str = "sims"
    """One of those that the help of bench lists, or the dotted path of your own."""
    rounds: Natural = 13
    """For sims, collection, inference and precision, rounds of timing in which those compared take turns; for
    algorithms and precision, 0 skips timing an iteration.
    """
    tasks: Annotated[tuple[str, ...], Filled()] = ("push_cube", "pick_place")
    """Tasks, read by algorithms, collection, inference, precision, sight, delay, ranking, imagination,
    test_time_planning, offline, online, gate and rl100.
    """
    seeds: Annotated[tuple[Seed, ...], Filled()] = (0, 1, 2)
    """Random seeds, one run for each; read by all benchmarks but sims."""
    only: tuple[str, ...] = ()
    """Which rows of the results to run: recipes, methods (algorithms), policies (collection, inference), chunkings
    (delay), ablations (mechanisms), ways (precision), experimental arms (edge_of_reach, imagination, online, language,
    sight), plans (test_time_planning), kinds of model (ranking) or parts (gate: candidates, rounds; offline: ways,
    agents, deployment, corrections); [] for all.
    """
    overrides: tuple[str, ...] = ()
    """Settings for every run, quoted: bench.overrides=['finetune.iterations=10']. What a method sets itself takes
    precedence.
    """
