"""What an iteration of fine-tuning costs in other precisions, or with fewer scored steps, and what success it leaves.

Success after as many iterations, over seeds; and seconds of an iteration, wall and CPU, the ways taking turns in one
process. A way is worth its seconds where success stays within what fp32 itself spreads over seeds.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from robopolicy.benchmarks.rates import rate_text, short, spread_text
from robopolicy.benchmarks.runs import (
    Variant,
    chosen_from,
    each_row,
    few_iterations,
    pretrained,
    run_variant,
    settings_of,
)
from robopolicy.configuration import Config, compose
from robopolicy.core.progress import progress
from robopolicy.verbs.bench import Benchmark, Table

ITERATIONS = {"push_cube": 20, "pick_place": 20, "push_t": 30}
"""Of fine-tuning, by task; 20 elsewhere."""
TIMED = 3
"""Iterations of a turn, the first of which also allocates."""

WAYS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("finetune.precision=bf16",),
    "bf16 backward": ("finetune.precision=bf16_backward",),
    "two scored steps": ("finetune.scored_steps=2",),
    "bf16 and two scored steps": ("finetune.precision=bf16", "finetune.scored_steps=2"),
}
"""Row of the results -> settings of fine-tuning; the first is what the others are compared with."""
FIRST = next(iter(WAYS))


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {way: {seed: rates}}}, "seconds": {task: {way: turns}}}, after doing what is missing.

    The second part is measured anew every time, unless bench.rounds is 0.
    """
    ways = chosen_from(config, WAYS)
    tasks = each_row(config, root, ways, measure)
    rounds = config.bench.rounds
    return {"tasks": tasks, "seconds": {task: taking_turns(config, root, task, ways) for task in tasks if rounds}}


def measure(config: Config, root: Path, task: str, way: str, seed: int) -> dict[str, Any]:
    """Return base and tuned policy's success after the task's iterations."""
    count = ITERATIONS.get(task, 20)
    equal = f"finetune.iterations={count}", "finetune.target_success=null", "finetune.videos=0"
    variant = Variant("diffusion", (*equal, *WAYS[way]))
    result = run_variant(config, root, task, way.replace(" ", "_"), variant, seed).result
    return {
        **{when: short(result[when]["deterministic"]) for when in ("base", "tuned")},
        "tuned_with_noise": short(result["tuned"]["stochastic"]),
        "iterations": result["iterations"],
        "seconds": result["seconds"],
    }


def taking_turns(config: Config, root: Path, task: str, ways: tuple[str, ...]) -> dict[str, dict[str, list[float]]]:
    """Return by way the seconds of an iteration in every turn, {"wall": [rounds], "cpu": [rounds]}.

    Every turn starts from the same base, and no epoch is stopped early: all learn from everything that they collected.
    """
    found: dict[str, dict[str, list[float]]] = {way: {"wall": [], "cpu": []} for way in ways}
    seed = config.bench.seeds[0]
    base = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
    quick = f"finetune.iterations={TIMED}", "finetune.evaluate_every=0", "finetune.critic_warmup=0"
    shared = [*settings_of(config, root, task, seed), *quick, "finetune.target_kl=null"]
    with progress(f"{task}: taking turns", config.bench.rounds * len(ways)) as advance, TemporaryDirectory() as folder:
        for turn in range(config.bench.rounds):
            for way in ways:
                chosen = compose([*shared, *WAYS[way]])
                _, wall, cpu = few_iterations(chosen, base, Path(folder) / f"{turn} {way}", turn)
                found[way]["wall"].append(wall / TIMED)
                found[way]["cpu"].append(cpu / TIMED)
                advance()
    return found


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return a table a task: success, and how many times as fast an iteration is as fp32's."""
    header = ["way", "base", "after as many iterations", "each seed", "with noise"]
    header += ["times as fast, CPU: least (median)", "wall", "CPU seconds an iteration"]
    found: list[Table] = []
    for task, ways in figures["tasks"].items():
        turns = figures.get("seconds", {}).get(task, {})
        lines: list[list[str]] = []
        for way, seeds in ways.items():
            rows = list(seeds.values())
            rates = [spread_text(row[when]["success_rate"] for row in rows) for when in ("base", "tuned")]
            noisy = spread_text(row["tuned_with_noise"]["success_rate"] for row in rows)
            times = ["", "", ""]
            if way in turns and FIRST in turns:
                times = [_ratio(turns, way, "cpu"), _ratio(turns, way, "wall"), f"{min(turns[way]['cpu']):.2f}"]
            lines.append([way, *rates, ", ".join(rate_text(row["tuned"]) for row in rows), noisy, *times])
        iterations = next(iter(next(iter(ways.values())).values()))["iterations"]
        title = f"{task}, {iterations} iterations: mean over seeds (range), each seed [Wilson 95 %]"
        found.append(Table(title, header, lines))
    return found


def _ratio(turns: Mapping[str, Mapping[str, list[float]]], way: str, clock: str) -> str:
    """Return how many times as fast a way is as the first, by the least and by the median of all turns."""
    ordered = [sorted(turns[each][clock]) for each in (FIRST, way)]
    least, median = (ordered[0][place] / ordered[1][place] for place in (0, len(ordered[0]) // 2))
    return f"{least:.2f} ({median:.2f})"


BENCHMARK = Benchmark(
    "What do other precisions and fewer scored steps save in fine-tuning, and is success what it was?",
    ("tasks", "seeds", "only", "rounds", "overrides"),
    benchmark,
    tables,
)
