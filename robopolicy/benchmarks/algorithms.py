"""Fine-tuning methods on the same tasks, base policies and seeds: success against environment steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from robopolicy.benchmarks.rates import pooled, rate_text, short, spread_text
from robopolicy.benchmarks.runs import FORMER_PPO, Variant, chosen_from, few_iterations, run_variant
from robopolicy.configuration import Config, compose
from robopolicy.core.progress import progress
from robopolicy.evaluation.plots import method_curves
from robopolicy.evaluation.report import Section
from robopolicy.verbs.bench import Benchmark, Table

GENTLE = (
    "finetune.iterations=60",
    "finetune.learning_rate=3e-4",
    "finetune.clip=0.05",
    "finetune.clip_base=0.05",
    "finetune.target_kl=0.03",
)
"""Small steps for methods without a critic: their advantages are noisier."""

TREE = (
    "finetune.algorithm=branch_grpo",
    "finetune.group_size=2",
    "finetune.branch_at=[2,5]",
    "finetune.minibatch=1024",
)
"""Eight leaves a start; half of the decisions are pruned, so half as many in a minibatch make as many steps."""

GRAPE = (
    "finetune.algorithm=grape",
    "finetune.options.best_and_worst.pairs=4",
    "finetune.options.tpo.reduction=mean",
    "finetune.options.tpo.beta=400",
    "finetune.minibatch_episodes=128",
    "finetune.epochs=6",
)
"""Every episode is in a pair; beta is what holds the policy near the reference."""

TOKEN_GRPO = (
    "finetune.algorithm=step_grpo",
    "finetune.groups=32",
    "finetune.learning_rate=1.5e-4",
    "finetune.epochs=2",
    "finetune.minibatch=1024",
    "finetune.target_kl=0.2",
    "finetune.finetuned_steps=null",
)
"""Of token policies."""

METHODS: dict[str, Variant] = {
    "PPO": Variant("diffusion"),
    "flow PPO": Variant("flow"),
    "GRPO": Variant("diffusion", ("finetune.algorithm=grpo", *GENTLE)),
    "step GRPO": Variant("diffusion", ("finetune.algorithm=step_grpo", *GENTLE)),
    "BranchGRPO": Variant("diffusion", (*TREE, *GENTLE)),
    "GRPO-Guard": Variant(
        "diffusion", ("finetune.algorithm=grpo_guard", *GENTLE, "finetune.clip=0.003", "finetune.clip_base=0.003")
    ),
    "MC-GRPO": Variant(
        "diffusion", ("finetune.algorithm=mc_grpo", "finetune.group_size=3", "finetune.groups=170", *GENTLE)
    ),
    "GRAPE": Variant("diffusion", (*GRAPE, *GENTLE)),
    "token GRPO": Variant("token", (*TOKEN_GRPO, "finetune.iterations=120")),
}
"""Rows of the tables. Methods that compare groups play 512 episodes an iteration, with tokens 256."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {method: results}}, "iteration": {task: {method: seconds}}}, running what is missing.

    "iteration" compares the time of BranchGRPO and GRPO with the same number of leaves, where both are measured and
    bench.rounds is not 0.
    """
    names = chosen_from(config, METHODS)
    tasks = {task: {name: measure(config, root, task, name) for name in names} for task in config.bench.tasks}
    if not config.bench.rounds or not {"GRPO", "BranchGRPO"} <= set(names):
        return {"tasks": tasks}
    return {"tasks": tasks, "iteration": {task: time_per_iteration(config, root, task) for task in tasks}}


def measure(config: Config, root: Path, task: str, name: str) -> dict[str, Any]:
    """Return the results of a method on a task, pooled and per seed; finished runs are not repeated.

    base, tuned, stochastic: success over the episodes of all seeds: base and fine-tuned policy without exploration
    noise, and the fine-tuned policy with noise; each: per seed, base and tuned; curves: seed -> [(environment steps,
    success)].
    """
    label = name.replace(" ", "_")
    runs = [run_variant(config, root, task, label, METHODS[name], seed) for seed in config.bench.seeds]
    results = [run.result for run in runs]
    return {
        "base": pooled([result["base"]["deterministic"] for result in results]),
        "tuned": pooled([result["tuned"]["deterministic"] for result in results]),
        "stochastic": pooled([result["tuned"]["stochastic"] for result in results]),
        "each": [{when: short(result[when]["deterministic"]) for when in ("base", "tuned")} for result in results],
        "env_steps": [result["env_steps"] for result in results],
        "seconds": [result["seconds"] for result in results],
        "curves": [
            [(row["env_steps"], row["deterministic_success"]) for row in run.records if "deterministic_success" in row]
            for run in runs
        ],
    }


EQUAL_LEAVES = {
    "GRPO, 8 episodes a start": ("finetune.algorithm=grpo", "finetune.group_size=8"),
    "BranchGRPO, 2 roots x 4 leaves": TREE,
    "BranchGRPO, one step pruned too": (*TREE, "finetune.options.branch_grpo.depth=1"),
    "BranchGRPO, nothing pruned": (*TREE, "finetune.minibatch=2048", "finetune.options.branch_grpo.width=all"),
    "BranchGRPO, split inside the chain": (*TREE, "finetune.branch_sampling_step=2"),
    "BranchGRPO, three splits of a chain": (
        *TREE,
        "finetune.group_size=1",
        "finetune.branch_at=[2]",
        "finetune.branch_sampling_step=[0,1,2]",
    ),
}


def time_per_iteration(config: Config, root: Path, task: str, rounds: int = 5) -> dict[str, dict[str, float]]:
    """Return seconds per iteration (median over rounds) with the same number of leaves; methods alternate in one
    process.

    Every measurement starts from the same base policy and runs a warm-up iteration before the measured one. Early
    stopping is off, so all methods train on all collected data.
    """
    base = root / task / "train" / "diffusion" / str(config.bench.seeds[0]) / "checkpoint"
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in EQUAL_LEAVES}
    with progress("BranchGRPO beside GRPO", rounds * len(EQUAL_LEAVES)) as advance, TemporaryDirectory() as folder:
        for turn in range(rounds):
            for name, settings in EQUAL_LEAVES.items():
                quick = ("finetune.iterations=2", "finetune.evaluate_every=0", "finetune.target_kl=null")
                run_config = compose([f"recipe={task}", *FORMER_PPO.get(task, ()), *GENTLE, *settings, *quick])
                last = few_iterations(run_config, base, Path(folder) / f"{turn} {name}", turn)
                seconds[name].append((last["seconds_collect"], last["seconds_update"]))
                advance()
    medians = {name: np.median(np.array(samples), axis=0) for name, samples in seconds.items()}
    reference_seconds = medians[next(iter(medians))].sum()
    return {
        name: {
            "collect": float(medians_of_name[0]),
            "update": float(medians_of_name[1]),
            "share_of_grpo": float(medians_of_name.sum() / reference_seconds),
        }
        for name, medians_of_name in medians.items()
    }


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per task, each method next to its base policy, and the time per iteration."""
    result_tables = [table_of(task, rows) for task, rows in figures["tasks"].items()]
    for task, rows in figures.get("iteration", {}).items():
        lines = [
            [name, f"{row['collect']:.2f}", f"{row['update']:.2f}", f"{row['share_of_grpo']:.2f}"]
            for name, row in rows.items()
        ]
        header = ["at equal leaves", "collect, s", "update, s", "iteration / GRPO's"]
        result_tables.append(Table(f"{task}: time of an iteration (median over rounds, taking turns)", header, lines))
    return result_tables


def table_of(task: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of one task."""
    header = ["method", "base", "fine-tuned", "each seed, fine-tuned", "with noise", "steps / 1e3", "minutes"]
    lines = []
    for name, row in rows.items():
        steps, seconds = (sum(row[key]) / len(row[key]) for key in ("env_steps", "seconds"))
        spreads = [spread_text(each[when]["success_rate"] for each in row["each"]) for when in ("base", "tuned")]
        each = ", ".join(rate_text(each["tuned"]) for each in row["each"])
        lines.append([name, *spreads, each, rate_text(row["stochastic"]), f"{steps / 1e3:,.0f}", f"{seconds / 60:.1f}"])
    return Table(f"{task}: mean over seeds (range), each seed with its Wilson 95 % interval", header, lines)


def picture(figures: Mapping[str, Any]) -> Section:
    """Return the plot of the learning curves."""
    curves: dict[str, dict[str, Sequence[Any]]] = {
        task: {name: row["curves"] for name, row in rows.items()} for task, rows in figures["tasks"].items()
    }
    bases = {task: next(iter(rows.values()))["base"]["success_rate"] for task, rows in figures["tasks"].items()}
    caption = "Mean of the seeds, band from the lowest to the highest."
    return Section("Success against environment steps", caption, svg=method_curves(curves, bases))


BENCHMARK = Benchmark(
    "Which success do fine-tuning methods reach from the same base policies, for how many environment steps?",
    ("tasks", "seeds", "only", "rounds", "overrides"),
    benchmark,
    tables,
    lambda figures, folder: [picture(figures)],
    picture=picture,
)
