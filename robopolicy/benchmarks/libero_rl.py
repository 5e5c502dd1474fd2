"""DSRL on libero_object from few demonstrations, judged as LIBERO judges, and with its objects swapped (LIBERO-PRO).

Runs the stages of recipe=libero with 10 to 40 demonstrations of our planner for the ten tasks together: imitation of
states and instructions, then DSRL (arXiv:2506.15799). Base and tuned policy play the same episodes, with exact physics
and LIBERO's time limit of 280 control steps. A policy taught by our planner is not comparable with published tables.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.benchmarks.rates import mean_text, rate_text, short, spread_text
from robopolicy.benchmarks.runs import chosen_from
from robopolicy.configuration import Config, compose
from robopolicy.core.storage import read_json
from robopolicy.runs import RESULT, is_complete, output
from robopolicy.verbs import collect, evaluate, online, train
from robopolicy.verbs.bench import Benchmark, Table

ARMS = {f"demonstrations_{count}": count for count in (10, 20, 40)}
SUITES = {
    "libero_object": 200,
    "libero_object_swap": 50,
}
"""Suite -> episodes. swap: objects at each other's places (LIBERO-PRO). Its suites with other words are refused, since
critics know their instructions by name, and those with other objects do not fit the state.
"""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"arms": {arm: {seed: figures}}}, after running what is missing under `root`."""
    names = chosen_from(config, ARMS)
    seeds = config.bench.seeds
    return {"arms": {name: {str(seed): measure(config, root, name, seed) for seed in seeds} for name in names}}


def measure(config: Config, root: Path, name: str, seed: int) -> dict[str, Any]:
    """Return base and tuned policy of one arm and seed, per suite."""
    shared = "recipe=libero", f"run.root={root}", f"run.seed={seed}", f"run.threads={config.run.threads}"
    shared = *shared, f"run.name={name}", *config.bench.overrides
    folders = {verb: root / verb / name / str(seed) for verb in ("collect", "train", "online")}
    output.print(Rule(f"[bold]{ARMS[name]} demonstrations, seed {seed}", align="left"))
    if not is_complete(folders["collect"]):
        collect.run(compose([*shared, f"collect.episodes={ARMS[name]}"]))
    if not is_complete(folders["train"]):
        train.run(compose([*shared, f"train.data={folders['collect'] / 'dataset'}"]))
    base, tuned = (folders[verb] / "checkpoint" for verb in ("train", "online"))
    if not is_complete(folders["online"]):
        _, *settings = compose(["recipe=libero"]).pipeline.stages["tuned"]
        world = [each for each in settings if each.startswith("world.")]
        online.run(compose([*shared, *world, f"online.policy={base}"]))
    learning = read_json(folders["online"] / RESULT)
    suites = {suite: _evaluated(shared, root, suite, seed, name, base, tuned) for suite in SUITES}
    return {"suites": suites, "env_steps": learning["env_steps"], "seconds": learning["seconds"]}


def _evaluated(
    shared: tuple[str, ...], root: Path, suite: str, seed: int, name: str, base: Path, tuned: Path
) -> dict[str, Any]:
    """Return the success of base and tuned policy in a suite, with and without noise."""
    run = f"{name}_{suite}"
    folder = root / "evaluate" / run / str(seed)
    if not is_complete(folder):
        policies = f"evaluate.policy={tuned}", f"evaluate.base={base}"
        played = f"world.name=libero/{suite}", f"evaluate.episodes={SUITES[suite]}", "evaluate.videos=0"
        evaluate.run(compose([*shared, *policies, *played, f"run.name={run}"]))
    result = read_json(folder / RESULT)
    return {
        arm: {mode: short(result[key][mode]) for mode in ("deterministic", "stochastic")}
        for arm, key in (("base", "base"), ("tuned", "policy"))
    }


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one line per number of demonstrations, suite and mode."""
    header = ["demonstrations", "suite", "mode", "base", "tuned", "base, each seed [Wilson 95 %]", "tuned, each seed"]
    header += ["thousand steps", "minutes"]
    lines = []
    for name, seeds in figures["arms"].items():
        rows = list(seeds.values())
        for suite in SUITES:
            for mode in ("deterministic", "stochastic"):
                rates = {arm: [row["suites"][suite][arm][mode] for row in rows] for arm in ("base", "tuned")}
                cells = [spread_text(each["success_rate"] for each in rates[arm]) for arm in rates]
                cells += [", ".join(map(rate_text, rates[arm])) for arm in rates]
                lines.append([f"{ARMS[name]}", suite, mode, *cells, *_cost(rows)])
    return [
        Table(
            "Success in LIBERO's libero_object, and with its objects at each other's places (LIBERO-PRO)", header, lines
        )
    ]


def _cost(rows: list[Mapping[str, Any]]) -> list[str]:
    steps, minutes = (row["env_steps"] / 1e3 for row in rows), (row["seconds"] / 60 for row in rows)
    return [mean_text(steps, 0), mean_text(minutes, 1)]


BENCHMARK = Benchmark(
    "Does RL help on LIBERO, from few demonstrations, and does it hold where the scene is another?",
    ("seeds", "only", "overrides"),
    benchmark,
    tables,
)
