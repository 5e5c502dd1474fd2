"""Prints figures side by side: how fast simulators are, how methods learn, and what world models are good for.

- sims: our engine against pure physics, gymnasium's vector environments on the same scene, and Meta-World's own,
  interleaved in one process.
- algorithms: success against environment steps on the same tasks, bases and seeds.
- mechanisms: ten small experiments, each asking whether a paper's claim shows.

Of world models:

- ranking: do they order policies as the simulator does?
- imagination: fine-tuning inside them, judged for real, also on narrow data.
- edge_of_reach: values in a perfect model, and what cures them.
- trajectories: are guided ones true, and good to learn from?
- planning: do cautious plans stay true?
- styles: are unseen looks read better after other looks?
- joint: planning with one model of actions, futures and values.
- video: images far ahead, with and without memory.

All but the first go on where they were interrupted.
"""

import importlib

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.runs import publish

BENCHMARKS = {
    "sims": "",
    "algorithms": "bench_algorithms",
    "mechanisms": "bench_mechanisms",
    "edge_of_reach": "bench_edge",
    "trajectories": "bench_worlds",
    "planning": "bench_worlds",
    "joint": "bench_worlds",
    "styles": "bench_worlds",
    "video": "bench_worlds",
    "ranking": "bench_ranking",
    "imagination": "bench_imagination",
}
"""Name -> the module that has its `benchmark`; sims knows nothing of runs."""


def run(config: Config) -> int:
    """Run one benchmark."""
    name = config.bench.name
    if name not in BENCHMARKS:
        raise ConfigError(f"There is no benchmark '{name}'.{did_you_mean(name, BENCHMARKS)}")
    if name == "sims":
        from robopolicy.benchmarks.sims import benchmark_sims

        publish(config, benchmark_sims(rounds=config.bench.rounds))
    else:
        importlib.import_module(f"robopolicy.verbs.{BENCHMARKS[name]}").benchmark(config)
    return 0
