"""Benchmark of the recipes (default configurations): success rates before and after RL fine-tuning, over seeds.

A recipe is run like by a new user: collect demonstrations, pre-train by behaviour cloning, fine-tune by RL, with no
other setting. Every stage has its own run folder under runs/bench/recipes and is not repeated once it is done. A seed
repeats a run exactly only on the same machine with the same number of threads; elsewhere floating-point sums round
differently, and the policies differ. The table therefore shows the range over seeds, and every row records the machine,
packages and commit of its measurement. Runs with another number of threads (bench.overrides=['run.threads=1']) are
stored in the same folder and shown in their own row.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.rule import Rule

from robopolicy.benchmarks.rates import rate_text, short, spread_text
from robopolicy.benchmarks.runs import chosen_from
from robopolicy.configuration import Config, compose
from robopolicy.core.storage import read_json, write_json
from robopolicy.runs import output, run_name, run_path
from robopolicy.verbs import collect, finetune, train
from robopolicy.verbs.bench import Benchmark, Table

RECIPES = {
    "push_t": "diffusion, `make demo`",
    "pick_place": "diffusion, six-joint arm",
    "push_cube": "diffusion",
    "reach_planar": "diffusion",
    "pusht": "diffusion, the original Push-T from key points",
    "push_choice": "token VLA, four instructions",
    "push_cube_pixels": "diffusion, camera of 64 px",
    "push_t_pixels": "diffusion, camera of 64 px",
    "fetch_push": "diffusion, Gymnasium-Robotics",
}
"""Name of the recipe -> kind of policy, and what is special about the task, for the table."""

STAGES = {"collect": collect.run, "train": train.run, "finetune": finetune.run}


def rows(config: Config) -> list[tuple[str, int]]:
    """Return the selected rows: recipe and seed of each."""
    return [(recipe, seed) for recipe in chosen_from(config, RECIPES) for seed in config.bench.seeds]


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"recipes": {recipe: {name: row}}}: all results under `root`, after measuring the selected ones."""
    for recipe, seed in rows(config):
        run_config = settings_of(config, root, recipe, seed)
        path = row_path(root, recipe, run_config)
        if not path.exists():
            write_json(path, measure(recipe, run_config))
    measured = {
        recipe: {path.stem: read_json(path) for path in sorted((root / "rows" / recipe).glob("*.json"))}
        for recipe in RECIPES
    }
    return {"recipes": {recipe: recipe_rows for recipe, recipe_rows in measured.items() if recipe_rows}}


def settings_of(config: Config, root: Path, recipe: str, seed: int) -> Config:
    """Return the configuration of all stages of a recipe; run names contain the number of threads if it is not the
    default.
    """
    settings = [f"recipe={recipe}", f"run.root={root}", f"run.seed={seed}", *config.bench.overrides]
    base_config = compose(settings)
    other = _other_threads(base_config)
    return compose([*settings, f"run.name={run_name(base_config)}{other}"]) if other else base_config


def _other_threads(chosen: Config) -> str:
    """Return the suffix of run names if the number of threads is not the default."""
    return "" if chosen.run.threads == Config().run.threads else f"_threads_{chosen.run.threads}"


def row_path(root: Path, recipe: str, chosen: Config) -> Path:
    """Return the path of the results of a recipe: rows/<recipe>/<seed>.json, or <seed>_threads_<n>.json."""
    return root / "rows" / recipe / f"{chosen.run.seed}{_other_threads(chosen)}.json"


def measure(recipe: str, chosen: Config) -> dict[str, Any]:
    """Run the missing stages of a recipe, and return its row of results.

    base, tuned: success rates of the deterministic policies before and after fine-tuning, on the same episode seeds;
    seconds: wall time of every stage in this process, and of fine-tuning as recorded by its run; cpu_seconds: of every
    stage in this process; threads, commit, packages and so on: environment of the measurement.
    """
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}
    for name, stage in STAGES.items():
        output.print(Rule(f"[bold]{recipe}, seed {chosen.run.seed}, {name}", align="left"))
        start, cpu_start = time.perf_counter(), time.process_time()
        stage(chosen)
        seconds[name], cpu_seconds[name] = time.perf_counter() - start, time.process_time() - cpu_start
    folder = run_path(chosen, "finetune")
    result, setup = read_json(folder / "result.json"), read_json(folder / "versions.json")
    return {
        "base": short(result["base"]["deterministic"]),
        "tuned": short(result["tuned"]["deterministic"]),
        "difference": result["difference"],
        "iterations": result["iterations"],
        "env_steps": result["env_steps"],
        "reached_target": result["reached_target"],
        "seconds": seconds | {"finetune": result["seconds"]},
        "cpu_seconds": cpu_seconds,
        **{key: setup[key] for key in ("threads", "commit", "packages", "python", "platform", "processor_count")},
    }


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return two tables: success rates over seeds (mean, range), and of every seed with its Wilson interval.

    Minutes are of CPU time, or of wall time if a row was measured before that was recorded.
    """
    spread, each = [], []
    for recipe, recipe_rows in figures["recipes"].items():
        for threads in sorted({row["threads"] for row in recipe_rows.values()}, reverse=True):
            rows = [row for row in recipe_rows.values() if row["threads"] == threads]
            rates = [spread_text(row[when]["success_rate"] for row in rows) for when in ("base", "tuned")]
            minutes = np.median([row.get("cpu_seconds", row["seconds"])["finetune"] / 60 for row in rows])
            steps = np.mean([row["env_steps"] for row in rows])
            numbers = f"{steps / 1e3:,.0f}", f"{minutes:.0f}"
            spread.append([f"`{recipe}`", RECIPES[recipe], str(threads), str(len(rows)), *rates, *numbers])
        for name, row in recipe_rows.items():
            each.append(
                [
                    f"`{recipe}`, seed {name.split('_')[0]}",
                    *(rate_text(row[when]) for when in ("base", "tuned")),
                    str(row["base"]["episodes"]),
                    str(row["threads"]),
                    (row["commit"] or "")[:7],
                ]
            )
    header = ["recipe", "policy", "threads", "seeds", "base", "fine-tuned", "steps / 1e3", "minutes of fine-tuning"]
    title = "How much training varies: mean over seeds (lowest to highest)"
    single = ["run", "base", "fine-tuned", "episodes", "threads", "commit"]
    return [
        Table(title, header, spread),
        Table("How well each policy was measured: success over paired episodes [Wilson 95 %]", single, each),
    ]


BENCHMARK = Benchmark(
    "Which success do demonstrations, pre-training and fine-tuning reach, with only a recipe's name?",
    ("seeds", "only", "overrides"),
    benchmark,
    tables,
    rows=rows,
)
