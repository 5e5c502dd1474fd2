"""Prints figures side by side: `bench sims` measures speed; `bench algorithms` and `mechanisms` how methods learn.

sims: our engine against pure physics, gymnasium's vector environments on the same scene, and Meta-World's own,
interleaved in one process. algorithms: success against environment steps on the same tasks, bases and seeds.
mechanisms: ten small experiments, each asking whether a paper's claim shows. edge_of_reach: values in a perfect model.
trajectories, planning: are guided trajectories true and good to learn from; do cautious plans stay true? joint:
planning with one model of actions, futures and values. video: pictures far ahead, with and without memory.
All but the first go on where they were interrupted.
"""

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.runs import publish

BENCHMARKS = ("sims", "algorithms", "mechanisms", "edge_of_reach", "trajectories", "planning", "joint", "video")


def run(config: Config) -> int:
    """Run one benchmark."""
    name = config.bench.name
    if name not in BENCHMARKS:
        raise ConfigError(f"There is no benchmark '{name}'.{did_you_mean(name, BENCHMARKS)}")
    if name == "algorithms":
        from robopolicy.verbs.bench_algorithms import benchmark

        benchmark(config)
    elif name == "mechanisms":
        from robopolicy.verbs import bench_mechanisms

        bench_mechanisms.benchmark(config)
    elif name == "edge_of_reach":
        from robopolicy.verbs import bench_edge

        bench_edge.benchmark(config)
    elif name in ("trajectories", "planning", "joint", "video"):
        from robopolicy.verbs import bench_worlds

        bench_worlds.benchmark(config)
    else:
        from robopolicy.benchmarks.sims import benchmark_sims

        publish(config, benchmark_sims(rounds=config.bench.rounds))
    return 0
