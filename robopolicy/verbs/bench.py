"""Runs a benchmark and prints its tables: simulator speed, learning methods, world models, recorded data.

- sims: robopolicy's engine, pure physics, gymnasium's vector environments on the same scene, and Meta-World,
  interleaved in one process.
- libero: CPU time of a control step of LIBERO, in its own environment and in robopolicy's, with and without cameras.
- libero_replay: success in the same control step as in LIBERO's own environment, from the same actions.
- libero_rl: DSRL on libero_object from few demonstrations, also on suites of LIBERO-PRO.
- metaworld: the same of Meta-World, for 1, 16 and 64 rows, next to EnvPool where it is installed.
- robosuite: CPU time of a control step of robosuite's tasks, by robosuite and by robopolicy.
- recipes: demonstrations, pre-training and fine-tuning by recipe name, per seed.
- algorithms: success against environment steps on the same tasks, base policies and seeds.
- collection: speed and quality when collection does not wait for the longest episodes.
- dppo: DPPO's own code (bench.dppo=CHECKOUT) next to ours: processor time per step, success after equal steps.
- mechanisms: ten ablations, each testing a paper's claim.
- papers: one small experiment for each of the other papers (bench.only=[BNPO]).
- inference: milliseconds per policy call for every inference method, and its effect on success.
- vla: PPO on tiny SmolVLA and pi0 models of LeRobot's classes, pre-trained by imitation.
- full_size: policy calls per second and memory of full-size SmolVLA and pi0, compared with the estimate.
- gpu: physics, fine-tuning, a SmolVLA, world models and inference on a GPU next to the CPU, in eight minutes
  (bench.tiny=true for a trial).
- sight: camera students distilled from privileged teachers, compared with imitation and PPO on images.
- language: PPO, GRAPE and a teacher compared with imitation, for twelve instructions in one scene, with controls.
- delay: success against inference latency in control steps, for every method of handling it.
- serving: latency and throughput of a policy server with and without recording, taking turns.
- workers: policy calls per second on local and Ray workers, compared with one process.

World models:

- ranking: agreement with the simulator's ranking of policies.
- imagined_tasks: offline agents on tasks of which there are only imaginary rollouts (ImagineBench), with their bound.
- imagination: fine-tuning inside world models, evaluated in the simulator, also with narrow data.
- test_time_planning: planning without training.
- goals: planning towards goal pictures, next to LeWM's own code (package stable-worldmodel).
- edge_of_reach: values in a perfect model, and methods that bound them.
- trajectories: accuracy of guided trajectories, and their use as training data.
- coplanner: accuracy of cautious plans, and the benefit of exploring ones.
- joint: planning with one model of actions, futures and values.
- joint_video: the same from pictures, by a video model.
- video: long-horizon images, with and without memory.

Recorded data:

- rl100: imitation, gated offline rounds, online phase and one-step distillation, stage by stage.
- offline: each offline method on the policy's own log; staged rollout with a minimum success rate; operator
  corrections.
- online: learning within 100,000 environment steps, by critics or PPO, and the initial drop in success.
- corrections: recovery and correction, HG-DAgger and fresh demonstrations at equal steps of operators; eight robots
  that share one operator, round by round.
- detectors: failures that detectors notice, how early, and after which planted faults, next to a clock.
- gate: acceptance of good candidates and of bad ones built to deceive evaluators, and the same policy without a gate.

Removed benchmarks, with their results and the last commit of their code in robopolicy/benchmarks/README.md: precision,
styles.

`tables` writes the result tables of the READMEs and draws their plots, from assets/figures. All benchmarks except sims,
libero, robosuite and metaworld resume after an interruption. Several processes may measure different seeds
(bench.seeds) in one folder at once; the same command with all seeds then shows all results. Rows of recipes are
measured in N processes with workers.count=N. Select a custom benchmark by its import path,
bench.name=package.module:BENCHMARK.
"""

import dataclasses
import importlib.util
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from robopolicy.building.commands import run_commands
from robopolicy.building.workers import open_workers
from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError
from robopolicy.core.pools import Pool
from robopolicy.core.registry import Registry
from robopolicy.core.run import versions
from robopolicy.core.storage import remove_leftovers, write_atomic, write_json
from robopolicy.evaluation.report import Report, Section, render
from robopolicy.runs import lock_shared_folder, open_folder, output, print_table, publish
from robopolicy.verbs.verb import Verb, setting

VERB = Verb(
    summary="Run a benchmark: simulator speed, algorithms, mechanisms, world models",
    sections=("run", "workers", "bench"),
    example="robopolicy bench algorithms",
    targets=("bench.name",),
    resumes=True,
)

Figures = Mapping[str, Any]
"""Results of a benchmark, JSON-serialisable; assets/figures/<benchmark>.json contains what `json=PATH` wrote."""

PACKAGE = "robopolicy.benchmarks"
"""Package of the built-in benchmarks, excluded from wheels by pyproject.toml, and entry-point group of third-party
ones.
"""

BENCHMARKS = Registry(
    "benchmark",
    PACKAGE,
    {
        name: f"{PACKAGE}.{name}:BENCHMARK"
        for name in (
            "sims",
            "libero",
            "libero_replay",
            "libero_rl",
            "metaworld",
            "robosuite",
            "recipes",
            "algorithms",
            "collection",
            "dppo",
            "mechanisms",
            "papers",
            "vla",
            "full_size",
            "gpu",
            "sight",
            "language",
            "imagined_tasks",
            "ranking",
            "imagination",
            "test_time_planning",
            "goals",
            "edge_of_reach",
            "trajectories",
            "coplanner",
            "joint",
            "joint_video",
            "video",
            "offline",
            "online",
            "corrections",
            "detectors",
            "gate",
            "rl100",
            "inference",
            "delay",
            "serving",
            "workers",
            "tables",
        )
    },
)
"""Name -> import path of its `Benchmark`. Benchmarks import the verbs that they run, so they are looked up by path, not
imported here.
"""

CLOSED = dict.fromkeys(("precision", "styles"), "dd104cb")
"""Closed benchmarks -> the last commit that contains their code; results and tables stay published."""


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names its rows."""

    title: str
    header: list[str]
    lines: list[list[str]]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: a claim and how to measure it.

    claim: the question, in one sentence; reads: the `bench.` settings that it uses; measure: (configuration, folder of
    the benchmark) -> results, reusing what is already stored in the folder; tables: results -> tables, for terminal,
    report and READMEs; picture: published results -> the plot above those tables in the README, None for none;
    sections: (results, folder) -> plots and videos of the report; bulky: keys of the results that only the report
    needs, omitted from json=PATH; rows: configuration -> independent rows as (bench.only, seed), which other processes
    may measure at the same time, None if rows share parts.
    """

    claim: str
    reads: tuple[str, ...]
    measure: Callable[[Config, Path], Figures]
    tables: Callable[[Figures], list[Table]]
    sections: Callable[[Figures, Path], list[Section]] = lambda figures, root: []
    bulky: frozenset[str] = frozenset()
    picture: Callable[[Figures], Section] | None = None
    rows: Callable[[Config], Sequence[tuple[str, int]]] | None = None


def run(config: Config) -> int:
    """Run one benchmark: print its tables and write report.html and benchmark.json into runs/bench/<name>.

    Processes that measure different seeds may share the folder. benchmark.json and the report then show the seeds of
    the process that finished last; the same command with all seeds shows all. Results are written before the tables are
    built. Raises ConfigError as `named` does, when a given setting is not used by the benchmark, and when its tables
    are not `Table` objects.
    """
    name = config.bench.name
    benchmark = named(name)
    refuse_unread(config, benchmark)
    folder = config.run.root / "bench" / name.replace(":", "-")
    with open_workers(config) as workers:
        if workers.pool is not None:
            measure_rows(config, benchmark, workers.pool, folder)
    root = opened(config, benchmark, folder)
    figures = benchmark.measure(config, root)
    with lock_shared_folder(root):
        for summary in ("benchmark.json", "report.html"):
            remove_leftovers(root, summary)
        write_json(root / "benchmark.json", figures)
        setup = {"command": command_of(config), "versions": versions(), "threads": torch.get_num_threads()}
        publish(config, setup | without(figures, benchmark.bulky))
        report = Report(title=name.replace("_", " ").capitalize(), subtitle=benchmark.claim)
        report.sections += benchmark.sections(figures, root)
        for table in benchmark.tables(figures):
            require_table(name, table, root)
            report.sections.append(Section(table.title, header=table.header, rows=table.lines))
            print_table(table.title, table.header, table.lines)
        write_atomic(root / "report.html", render(report))
    output.print(f"Report: {root / 'report.html'}")
    return 0


def opened(config: Config, benchmark: Benchmark, folder: Path) -> Path:
    """Open the folder of a benchmark, or the part of it that this process measures: rows or seeds, if it has them."""
    if benchmark.rows is not None:
        parts = [f"rows/{only}-{seed}" for only, seed in benchmark.rows(config)]
        (folder / "rows").mkdir(parents=True, exist_ok=True)
        return open_folder(folder, parts, "measure other rows with bench.only=[NAME] or bench.seeds=[NUMBER]").path
    if "seeds" in benchmark.reads:
        seeds, advice = [str(seed) for seed in config.bench.seeds], "set other seeds with bench.seeds=[NUMBER]"
        return open_folder(folder, seeds, advice).path
    return open_folder(folder).path


def measure_rows(config: Config, benchmark: Benchmark, pool: Pool, folder: Path) -> None:
    """Measure every row in a process of its own, on the workers.

    Raises ConfigError if the benchmark has no independent rows, and after all others have ended if a row failed.
    """
    if benchmark.rows is None:
        raise ConfigError(f"The rows of '{config.bench.name}' share parts and run in one process: unset workers.count.")
    rows = list(benchmark.rows(config))
    place = [setting("run.root", config.run.root), f"run.plugins=[{','.join(config.run.plugins)}]"]
    commands, logs = [], [folder / "logs" / f"{only}-{seed}.txt" for only, seed in rows]
    for only, seed in rows:
        section = dataclasses.replace(config.bench, only=(only,), seeds=(seed,))
        commands.append([*shlex.split(command_of(config.replaced(bench=section)))[1:], *place])
    failed = []
    for index, status, _ in run_commands(pool, commands, logs, "rows"):
        only, seed = rows[index]
        state = f"failed with status {status}" if status else "measured"
        output.print(f"{only}, seed {seed}: {state}. Output: {logs[index]}", markup=False, soft_wrap=True)
        failed += [logs[index]] if status else []
    if failed:
        raise ConfigError(f"{len(failed)} of {len(rows)} rows failed; the first says why in {failed[0]}.")


def named(name: str) -> Benchmark:
    """Return the benchmark with this name or import path.

    Raises ConfigError when it does not exist, is closed, or is a built-in one that is missing because wheels leave them
    out.
    """
    if name in CLOSED:
        raise ConfigError(
            f"The benchmark '{name}' was removed: robopolicy/benchmarks/README.md has its results, and commit "
            f"{CLOSED[name]} of the repository its code."
        )
    if name in BENCHMARKS.ours and importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"The benchmark '{name}' is only in a checkout of robopolicy's repository, not in the installed "
            "package: clone the repository, and run the same command there."
        )
    benchmark = BENCHMARKS.load(name)
    if not isinstance(benchmark, Benchmark):
        raise ConfigError(
            f"bench.name={name} is {benchmark!r}, not a `Benchmark`: pass the import path of one, such as "
            "package.module:BENCHMARK."
        )
    return benchmark


def require_table(name: str, table: object, root: Path) -> None:
    """Raise ConfigError, naming the file with the results, unless `table` is a `Table` of text with as many cells per
    line as its header.

    name: name of the benchmark.
    """
    place = f"The results are in {root / 'benchmark.json'}."
    if not isinstance(table, Table):
        raise ConfigError(
            f"tables() of '{name}' returned {table!r:.80} instead of a robopolicy.verbs.bench.Table(title, header, "
            f"lines). {place}"
        )
    for line in (table.header, *table.lines):
        if len(line) != len(table.header) or not all(isinstance(cell, str) for cell in line):
            raise ConfigError(
                f"The table '{table.title}' of '{name}' has the line {line!r:.80}: a line must have "
                f"{len(table.header)} texts, one for each of {', '.join(map(str, table.header))}. {place}"
            )


def refuse_unread(config: Config, benchmark: Benchmark) -> None:
    """Raise ConfigError when a `bench.` setting is given that this benchmark does not use."""
    defaults = type(config.bench)()
    for item in dataclasses.fields(config.bench):
        is_changed = getattr(config.bench, item.name) != getattr(defaults, item.name)
        if is_changed and item.name not in ("name", *benchmark.reads):
            readable = ", ".join(f"bench.{key}" for key in benchmark.reads) or "no bench setting"
            raise ConfigError(
                f"The benchmark '{config.bench.name}' does not use bench.{item.name}; it uses {readable}."
            )


def command_of(config: Config) -> str:
    """Return the command line that reruns this benchmark with the same settings."""
    defaults, words = type(config.bench)(), ["robopolicy", "bench", config.bench.name]
    for item in dataclasses.fields(config.bench):
        value = getattr(config.bench, item.name)
        if item.name != "name" and value != getattr(defaults, item.name):
            words.append(setting(f"bench.{item.name}", value))
    return shlex.join(words)


def without(figures: Any, keys: frozenset[str]) -> Any:
    """Return nested `figures` without the entries under `keys`, at any depth."""
    if isinstance(figures, Mapping):
        return {key: without(value, keys) for key, value in figures.items() if key not in keys}
    if isinstance(figures, list):
        return [without(value, keys) for value in figures]
    return figures
