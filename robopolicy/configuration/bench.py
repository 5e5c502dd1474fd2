"""Which benchmark runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchSection:
    """Which benchmark, and on what; a setting that the benchmark does not read is refused."""

    name: str = "sims"
    """One of those above, or the dotted path of your own."""
    rounds: int = 13
    """Interleaved rounds of sims; of algorithms, 0 leaves out the time of an iteration."""
    tasks: tuple[str, ...] = ("push_cube", "pick_place")
    """Of algorithms, ranking, imagination and looking_ahead."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of all but sims."""
    methods: tuple[str, ...] = ()
    """What to run of the rows: recipes, methods (algorithms), checks (mechanisms), arms (edge_of_reach, imagination),
    plans (looking_ahead) or kinds of model (ranking); [] for all.
    """
    overrides: tuple[str, ...] = ()
    """Settings for every run, quoted: bench.overrides=['finetune.iterations=10']. What a method sets by itself
    outweighs them.
    """
