"""Prints figures side by side: `bench sims` measures speed, `bench algorithms` how methods learn.

sims: our engine against pure physics, gymnasium's vector environments on the same scene, and Meta-World's own,
interleaved in one process. algorithms: success against environment steps on the same tasks, bases and seeds.
"""

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.runs import publish

BENCHMARKS = ("sims", "algorithms")


def run(config: Config) -> int:
    """Run one benchmark."""
    name = config.bench.name
    if name not in BENCHMARKS:
        raise ConfigError(f"There is no benchmark '{name}'.{did_you_mean(name, BENCHMARKS)}")
    if name == "algorithms":
        from robopolicy.verbs.bench_algorithms import benchmark

        benchmark(config)
    else:
        from robopolicy.benchmarks.sims import benchmark_sims

        publish(config, benchmark_sims(rounds=config.bench.rounds))
    return 0
