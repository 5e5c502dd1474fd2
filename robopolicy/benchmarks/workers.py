"""Decisions per second of evaluation, collection and fine-tuning rollouts on workers, beside the same in this process.

An imitated policy of a recipe plays the same episodes in this process and on one and two workers, local ones and those
of a Ray cluster on this machine, from states and from cameras. Every pool takes turns with this process, after a batch
that starts its workers and is not counted, so their ratio is of the same minutes. Rates are of wall time, and of the
CPU time of all processes together, which other jobs on the machine disturb less. Outcomes must be equal. Rollouts for
fine-tuning are those of the recipe, divided into four shards on the workers and undivided in this process.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.rule import Rule

from robopolicy.benchmarks.runs import chosen_from
from robopolicy.building.policies import choose_device, load_policy, load_trainable
from robopolicy.building.shards import TuningWorkers, prepared
from robopolicy.building.workers import Workers
from robopolicy.building.worlds import build_collection_world
from robopolicy.configuration import Config, compose
from robopolicy.core.errors import DataError
from robopolicy.core.pools import Pool, PoolSettings, open_pool
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.structured import narrowed
from robopolicy.data.record import record_with
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.runs import is_complete, output, run_path
from robopolicy.training.collection import Collector, make_collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.needs import needs_images
from robopolicy.verbs import collect, evaluate, train
from robopolicy.verbs.bench import Benchmark, Table

KINDS = {"states": "push_t", "cameras": "push_t_pixels"}
"""What the policy observes -> its recipe."""
POOLS = {"local 1": ("local", 1), "local 2": ("local", 2), "ray 1": ("ray", 1), "ray 2": ("ray", 2)}
"""Name of a pool -> kind of pool, and number of workers."""
WORK = ("evaluation", "collection", "rollouts")
EPISODES, BATCH = 128, 32
SHARDS = 4
SMALL = ("collect.episodes=24", "train.fit.steps=100", "train.evaluate_episodes=0", "run.threads=1")


@dataclass(frozen=True)
class Played:
    """One measurement: decisions, and the seconds that they took by the clock and in all processes' CPU time."""

    decisions: int
    seconds: float
    cpu_seconds: float


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"kinds": {kind: {work: {pool: row}}}}; every pool of every kind is measured once."""
    kinds: dict[str, Any] = {}
    for kind, recipe in KINDS.items():
        run_config = imitated(config, root, kind, recipe)
        kinds[kind] = {}
        for name in chosen_from(config, POOLS):
            path = root / kind / f"{name.replace(' ', '_')}.json"
            if not path.exists():
                output.print(Rule(f"[bold]{kind}, {name}", align="left"))
                write_json(path, measured(run_config, *POOLS[name], config.bench.rounds))
            for work, row in read_json(path).items():
                kinds[kind].setdefault(work, {})[name] = row
    return {"kinds": kinds, "episodes": EPISODES, "batch": BATCH, "load": os.getloadavg()[0], "cores": os.cpu_count()}


def imitated(config: Config, root: Path, kind: str, recipe: str) -> Config:
    """Return the configuration in which the imitated policy of a recipe plays, after training it if it is missing."""
    settings = [f"recipe={recipe}", f"run.root={root / kind}", *SMALL, *config.bench.overrides]
    run_config = compose(settings)
    checkpoint = run_path(run_config, "train") / "checkpoint"
    if not is_complete(checkpoint.parent):
        collect.run(run_config)
        train.run(run_config)
    played = [f"evaluate.policy={checkpoint}", f"collect.policy={checkpoint}", "collect.noise=[none]"]
    sizes = [f"world.batch_size={BATCH}", f"evaluate.episodes={EPISODES}", f"collect.episodes={EPISODES}"]
    return compose([*settings, *sizes, *played])


def measured(config: Config, kind: str, count: int, rounds: int) -> dict[str, Any]:
    """Return the rates of every kind of work on a pool, and in this process in turns with it."""
    rows: dict[str, Any] = {}
    with open_pool(kind, PoolSettings(count)) as pool:
        for work in WORK:
            play = {"evaluation": evaluation_in, "collection": collection_in, "rollouts": rollouts_in}[work](config)
            start = time.perf_counter()
            play(Workers(config, pool), BATCH * count)  # starts the workers, which then import and build
            start_seconds = time.perf_counter() - start
            alone, elsewhere = list[Played](), list[Played]()
            outcomes: list[np.ndarray] = []
            for _ in range(rounds):
                for workers, rates in ((Workers(config, None), alone), (Workers(config, pool), elsewhere)):
                    rate, outcome = timed(play, workers)
                    rates.append(rate)
                    outcomes.append(outcome)
            if any(not np.array_equal(outcome, outcomes[0]) for outcome in outcomes):
                raise DataError(f"The {work} on {count} workers ({kind}) differs from that in this process.")
            rows[work] = {
                "in_process": summary(alone),
                "workers": summary(elsewhere),
                "seconds_until_ready": start_seconds,
                "ratio": ratio(alone, elsewhere, lambda each: each.seconds),
                "ratio_cpu": ratio(alone, elsewhere, lambda each: each.cpu_seconds),
            }
    return rows


Play = Callable[[Workers, int], tuple[int, np.ndarray]]
"""(workers, number of episodes) -> number of decisions, and what must be equal wherever it was played."""


def evaluation_in(config: Config) -> Play:
    """Return a function that evaluates the policy."""
    given = {"path": str(config.evaluate.policy), "planned": False, "told": ""}
    chunk = load_policy(Path(str(config.evaluate.policy))).spec.chunk
    world, policy, device = evaluate.in_worker(config, **given)

    def play(workers: Workers, episodes: int) -> tuple[int, np.ndarray]:
        seeds = episode_seeds(0, "bench/workers", episodes)
        players = workers.players("robopolicy.verbs.evaluate:in_worker", **given)
        lengths = evaluate_policy(world, policy, seeds, device=device, players=players, label="evaluation").lengths
        return int(np.ceil(lengths / chunk).sum()), lengths

    return play


def collection_in(config: Config) -> Play:
    """Return a function that records episodes of the policy."""
    recorder = collect.in_worker(config, index=0, level="")
    chunk = load_policy(Path(str(config.evaluate.policy))).spec.chunk

    def play(workers: Workers, episodes: int) -> tuple[int, np.ndarray]:
        recorders = workers.recorders("robopolicy.verbs.collect:in_worker", index=0, level="")
        recorded = record_with(recorder, episode_seeds(0, "bench/workers", episodes), recorders=recorders)
        return int(np.ceil(recorded.lengths.numpy() / chunk).sum()), recorded.lengths.numpy()

    return play


def rollouts_in(config: Config) -> Play:
    """Return a function that collects the rollouts of one iteration of the recipe's fine-tuning, and then of the next.

    Raises DataError if the first ones, of workers, differ from those of the same shards in this process.
    """
    collectors: dict[int, tuple[Collector, Iterator[int]]] = {}

    def play(workers: Workers, episodes: int) -> tuple[int, np.ndarray]:
        key = id(workers.pool)
        if key not in collectors:
            shards = 1 if workers.pool is None else SHARDS
            collectors[key] = collector_of(config, shards, workers), itertools.count()
            if workers.pool is not None:
                alone = collector_of(config, SHARDS, Workers(config, None)).collect(0)
                there = collectors[key][0].collect(next(collectors[key][1]))
                if not torch.equal(alone.reward, there.reward):
                    raise DataError("The rollouts of workers differ from those of the same shards in this process.")
        collector, numbers = collectors[key]
        return int(collector.collect(next(numbers)).alive.sum()), np.zeros(0)

    return play


def collector_of(config: Config, shards: int, workers: Workers) -> Collector:
    """Return the collector of a recipe's fine-tuning with this number of shards, on these workers."""
    path = Path(str(config.evaluate.policy))
    config = config.replaced(finetune=replace(config.finetune, shards=shards))
    device = choose_device(config.run)
    policy = prepared(config, load_trainable(path, config.lerobot, device)).eval()
    world = build_collection_world(config, load_policy(path, device), device)
    section = narrowed(FinetuneConfig, config.finetune)
    algorithm, draws = build_algorithm(section), torch.Generator(device).manual_seed(0)
    images = "plain" if needs_images(policy, None, algorithm, others=False) else "not"
    playing = TuningWorkers.of(replace(workers, config=config), path).collecting
    return make_collector(world, policy, algorithm, section, 0, draws, images=images, workers=playing)


def timed(play: Play, workers: Workers) -> tuple[Played, np.ndarray]:
    """Play all episodes; return decisions and seconds, and what must be equal."""
    began, cpu = time.perf_counter(), cpu_seconds(workers.pool)
    decisions, outcome = play(workers, EPISODES)
    seconds, cpu = time.perf_counter() - began, cpu_seconds(workers.pool) - cpu
    return Played(decisions, seconds, cpu), outcome


def cpu_seconds(pool: Pool | None) -> float:
    """Return the CPU time of this process and of the workers of a pool so far."""
    processes: Any = getattr(pool, "processes", ())
    total, tick = time.process_time(), os.sysconf("SC_CLK_TCK")
    for process in processes.values() if isinstance(processes, Mapping) else processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


def summary(rates: list[Played]) -> dict[str, float]:
    """Return the medians of decisions per second and per CPU second."""
    return {
        "decisions": rates[0].decisions,
        "per_second": float(np.median([each.decisions / each.seconds for each in rates])),
        "per_cpu_second": float(np.median([each.decisions / each.cpu_seconds for each in rates])),
    }


def ratio(alone: list[Played], elsewhere: list[Played], of: Callable[[Played], float]) -> float:
    """Return the median, over rounds, of how many times as fast the workers were."""
    return float(np.median([of(first) / of(second) for first, second in zip(alone, elsewhere, strict=True)]))


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per kind of work."""
    header = ["observations", "workers", "decisions/s", "in this process", "ratio", "ratio by CPU time", "s to start"]
    lines: dict[str, list[list[str]]] = {work: [] for work in WORK}
    for kind, by_work in figures["kinds"].items():
        for work, rows in by_work.items():
            for name, row in rows.items():
                rates = [f"{row[place]['per_second']:,.0f}" for place in ("workers", "in_process")]
                ratios = [f"{row[key]:.2f}" for key in ("ratio", "ratio_cpu")]
                lines[work].append([kind, name, *rates, *ratios, f"{row['seconds_until_ready']:.0f}"])
    busy = f"{figures['cores']} cores, load {figures['load']:.1f}"
    return [Table(f"{work.capitalize()} on workers ({busy})", header, lines[work]) for work in WORK]


BENCHMARK = Benchmark(
    "How many decisions per second do evaluation and collection make on workers?",
    ("rounds", "only", "overrides"),
    benchmark,
    tables,
)
