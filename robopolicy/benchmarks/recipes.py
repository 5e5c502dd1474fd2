"""What a newcomer gets: demonstrations, pre-training and fine-tuning with nothing but a recipe's name, seed by seed.

Every stage lies in a run folder of its own under runs/bench/recipes, as the verbs leave it, and is not run again. A
seed repeats a run exactly on one machine with one number of threads; elsewhere the last bits of sums differ, and with
them the policies. So the table shows the spread over seeds, and every row of figures says what it was measured with.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.rule import Rule

from robopolicy.benchmarks.rates import rate_text, short, spread_text
from robopolicy.benchmarks.runs import chosen_from
from robopolicy.configuration import Config, compose
from robopolicy.core.storage import read_json, write_json
from robopolicy.runs import output, run_path
from robopolicy.verbs import collect, finetune, train
from robopolicy.verbs.bench import Benchmark, Table

RECIPES = {
    "push_t": "diffusion, `make demo`",
    "pick_place": "diffusion, six-joint arm",
    "push_cube": "diffusion",
    "reach_planar": "diffusion",
    "push_choice": "token VLA, four instructions",
    "push_cube_pixels": "diffusion, camera of 64 px",
    "fetch_push": "diffusion, Gymnasium-Robotics",
}
"""Name -> what it is."""

STAGES = {"collect": collect.run, "train": train.run, "finetune": finetune.run}


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"recipes": {recipe: {seed: row}}}: every row under `root`, after adding those that are asked for."""
    for recipe in chosen_from(config, RECIPES):
        for seed in config.bench.seeds:
            path = row_path(root, recipe, seed)
            if not path.exists():
                write_json(path, measure(config, root, recipe, seed))
    rows = {
        recipe: {path.stem: read_json(path) for path in sorted((root / "rows" / recipe).glob("*.json"))}
        for recipe in RECIPES
    }
    return {"recipes": {recipe: found for recipe, found in rows.items() if found}}


def row_path(root: Path, recipe: str, seed: int) -> Path:
    """Return where the figures of a recipe and seed lie."""
    return root / "rows" / recipe / f"{seed}.json"


def measure(config: Config, root: Path, recipe: str, seed: int) -> dict[str, Any]:
    """Run what is missing of a recipe, and return its row.

    base, tuned: success of the noise-free policies on the same seeds; seconds: of every stage in this process, of
    fine-tuning as the run counted it; the rest says with what it was measured.
    """
    settings = [f"recipe={recipe}", f"run.root={root}", f"run.seed={seed}", *config.bench.overrides]
    chosen = compose(settings)
    seconds: dict[str, float] = {}
    for name, stage in STAGES.items():
        output.print(Rule(f"[bold]{recipe}, seed {seed}, {name}", align="left"))
        started = time.perf_counter()
        stage(chosen)
        seconds[name] = time.perf_counter() - started
    folder = run_path(chosen, "finetune")
    result, made = read_json(folder / "result.json"), read_json(folder / "versions.json")
    return {
        "base": short(result["base"]["deterministic"]),
        "tuned": short(result["tuned"]["deterministic"]),
        "difference": result["difference"],
        "iterations": result["iterations"],
        "env_steps": result["env_steps"],
        "reached_target": result["reached_target"],
        "seconds": seconds | {"finetune": result["seconds"]},
        "threads": torch.get_num_threads(),
        **{key: made[key] for key in ("commit", "packages", "python", "platform", "processor_count")},
    }


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the spread over seeds, and every seed with its Wilson interval."""
    spread, each = [], []
    for recipe, seeds in figures["recipes"].items():
        rows = list(seeds.values())
        rates = [spread_text(row[when]["success_rate"] for row in rows) for when in ("base", "tuned")]
        minutes = sorted(row["seconds"]["finetune"] / 60 for row in rows)
        steps = sum(row["env_steps"] for row in rows) / len(rows)
        taken = f"{minutes[0]:.0f} to {minutes[-1]:.0f}" if len(rows) > 1 else f"{minutes[0]:.0f}"
        spread.append([f"`{recipe}`", RECIPES[recipe], str(len(rows)), *rates, f"{steps / 1e3:,.0f}", taken])
        for seed, row in seeds.items():
            each.append(
                [
                    f"`{recipe}`, seed {seed}",
                    *(rate_text(row[when]) for when in ("base", "tuned")),
                    str(row["base"]["episodes"]),
                    str(row["threads"]),
                    (row["commit"] or "")[:7],
                ]
            )
    header = ["recipe", "policy", "seeds", "base", "fine-tuned", "steps / 1e3", "minutes of fine-tuning"]
    title = "How much training varies: mean over seeds (lowest to highest)"
    single = ["run", "base", "fine-tuned", "episodes", "threads", "commit"]
    return [
        Table(title, header, spread),
        Table("How well each policy was measured: success over paired episodes [Wilson 95 %]", single, each),
    ]


BENCHMARK = Benchmark(
    "What do demonstrations, pre-training and fine-tuning give, with nothing but a recipe's name?",
    ("seeds", "methods", "overrides"),
    benchmark,
    tables,
)
