"""Prints speed side by side, measured interleaved in one process.

`bench sims`: our engine against pure physics, gymnasium's vector environments on the same scene, and Meta-World's own.
"""

import importlib

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.runs import publish

BENCHMARKS = {"sims": "robopolicy.benchmarks.sims:benchmark_sims"}


def run(config: Config) -> int:
    """Run one benchmark."""
    name = config.bench.name
    if name not in BENCHMARKS:
        raise ConfigError(f"There is no benchmark '{name}'.{did_you_mean(name, BENCHMARKS)}")
    module, function = BENCHMARKS[name].split(":")
    publish(config, getattr(importlib.import_module(module), function)(rounds=config.bench.rounds))
    return 0
