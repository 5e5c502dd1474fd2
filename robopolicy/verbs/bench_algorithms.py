"""`bench algorithms`: fine-tuning methods on the same tasks, bases and seeds; success against environment steps."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from robopolicy.build import build_world, choose_device, open_policy
from robopolicy.configuration import Config, compose
from robopolicy.core.progress import progress
from robopolicy.core.run import RunFolder
from robopolicy.core.structured import narrowed
from robopolicy.evaluation.curves import method_curves
from robopolicy.evaluation.report import Report, Section
from robopolicy.runs import print_table
from robopolicy.training.finetune import FinetuneConfig, finetune
from robopolicy.verbs.bench_runs import Variant, chosen_from, conclude, pooled, rate_text, run_variant

GENTLE = (
    "finetune.iterations=60",
    "finetune.learning_rate=3e-4",
    "finetune.clip=0.05",
    "finetune.clip_base=0.05",
    "finetune.target_kl=0.03",
)
"""Small steps for methods without a critic: their advantages are noisier."""

METHODS: dict[str, Variant] = {
    "PPO": Variant("diffusion"),
    "flow PPO": Variant("flow"),
    "GRPO": Variant("diffusion", ("finetune.algorithm=grpo", *GENTLE)),
    "step GRPO": Variant("diffusion", ("finetune.algorithm=step_grpo", *GENTLE)),
    "BranchGRPO": Variant(
        "diffusion", ("finetune.algorithm=branch_grpo", "finetune.group_size=2", "finetune.branch_at=[2,5]", *GENTLE)
    ),
    "GRPO-Guard": Variant(
        "diffusion", ("finetune.algorithm=grpo_guard", *GENTLE, "finetune.clip=0.003", "finetune.clip_base=0.003")
    ),
    "MC-GRPO": Variant(
        "diffusion", ("finetune.algorithm=mc_grpo", "finetune.group_size=3", "finetune.groups=170", *GENTLE)
    ),
    "token GRPO": Variant(
        "token",
        (
            "finetune.algorithm=step_grpo",
            "finetune.iterations=120",
            "finetune.groups=32",
            "finetune.learning_rate=1.5e-4",
            "finetune.epochs=2",
            "finetune.minibatch=1024",
            "finetune.target_kl=0.2",
            "finetune.ratio_tolerance=1e-4",
            "finetune.finetuned_steps=null",
        ),
    ),
}
"""Rows of the benchmark; group methods play 512 episodes an iteration, with tokens 256."""


def benchmark(config: Config) -> dict[str, Any]:
    """Run what is missing, print the table, write benchmark.json and report.html, and return the figures."""
    names = chosen_from(config, METHODS)
    root = config.run.root / "bench" / "algorithms"
    figures = {task: {name: measure(config, root, task, name) for name in names} for task in config.bench.tasks}
    report = Report(title="Algorithms", subtitle=f"{len(config.bench.seeds)} seeds, success over paired episodes")
    curves = {task: {name: row["curves"] for name, row in rows.items()} for task, rows in figures.items()}
    bases = {task: rows[names[0]]["base"]["success_rate"] for task, rows in figures.items()}
    svg = method_curves(curves, bases)
    report.sections.append(Section("Learning", "Mean of the seeds, band from the lowest to the highest.", svg=svg))
    for task, rows in figures.items():
        header, lines = table_of(rows)
        report.sections.append(Section(f"{task}: after fine-tuning", header=header, rows=lines))
        print_table(task, header, lines)
    if config.bench.rounds and {"GRPO", "BranchGRPO"} <= set(names):
        times = {task: time_per_iteration(config, root, task) for task in config.bench.tasks}
        header = ["at equal leaves", "collect, s", "update, s", "iteration / GRPO's"]
        for task, found in times.items():
            lines = [
                [name, f"{row['collect']:.2f}", f"{row['update']:.2f}", f"{row['share_of_grpo']:.2f}"]
                for name, row in found.items()
            ]
            report.sections.append(Section(f"{task}: time of an iteration", header=header, rows=lines))
            print_table(f"{task}: time of an iteration", header, lines)
            figures[task] = {**figures[task], "iteration": found}
    conclude(config, root, report, figures)
    return figures


EQUAL_LEAVES = {
    "GRPO, 8 episodes a start": ("finetune.algorithm=grpo", "finetune.group_size=8"),
    "BranchGRPO, 2 roots x 4 leaves": (
        "finetune.algorithm=branch_grpo",
        "finetune.group_size=2",
        "finetune.branch_at=[2,5]",
    ),
    "BranchGRPO, split inside the chain": (
        "finetune.algorithm=branch_grpo",
        "finetune.group_size=2",
        "finetune.branch_at=[2,5]",
        "finetune.branch_sampling_step=2",
    ),
}


def time_per_iteration(config: Config, root: Path, task: str, rounds: int = 5) -> dict[str, dict[str, float]]:
    """Return seconds of an iteration (median over the rounds) at equal leaves, the methods taking turns in one process.

    Every turn starts from the same base policy and plays one iteration to warm up and one that counts. No epoch is
    stopped early: all learn from everything that they collected.
    """
    base = root / task / "train" / "diffusion" / str(config.bench.seeds[0]) / "checkpoint"
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in EQUAL_LEAVES}
    with progress("BranchGRPO beside GRPO", rounds * len(EQUAL_LEAVES)) as advance, TemporaryDirectory() as folder:
        for turn in range(rounds):
            for name, settings in EQUAL_LEAVES.items():
                quick = ("finetune.iterations=2", "finetune.evaluate_every=0", "finetune.target_kl=null")
                chosen = compose([f"recipe={task}", *GENTLE, *settings, *quick])
                device = choose_device(chosen.run)
                policy = open_policy(base, device)
                policy.prepare_finetuning(chosen.finetune.finetuned_steps)
                world = build_world(chosen.world, policy, batch_size=chosen.finetune.num_envs, device=device)
                run = RunFolder(Path(folder) / f"{turn} {name}")
                finetune(policy, None, world, narrowed(FinetuneConfig, chosen.finetune), run, seed=turn)
                world.close()
                last = run.metrics()[-1]
                seconds[name].append((last["seconds_collect"], last["seconds_update"]))
                advance()
    medians = {name: np.median(np.array(found), axis=0) for name, found in seconds.items()}
    whole = medians[next(iter(medians))].sum()
    return {
        name: {"collect": float(found[0]), "update": float(found[1]), "share_of_grpo": float(found.sum() / whole)}
        for name, found in medians.items()
    }


def measure(config: Config, root: Path, task: str, name: str) -> dict[str, Any]:
    """Return a method's figures on a task, pooled over the seeds; runs that have ended are not run again."""
    label = name.replace(" ", "_")
    runs = [run_variant(config, root, task, label, METHODS[name], seed) for seed in config.bench.seeds]
    results = [run.result for run in runs]
    return {
        "base": pooled([result["base"]["deterministic"] for result in results]),
        "tuned": pooled([result["tuned"]["deterministic"] for result in results]),
        "stochastic": pooled([result["tuned"]["stochastic"] for result in results]),
        "env_steps": [result["env_steps"] for result in results],
        "seconds": [result["seconds"] for result in results],
        "curves": [
            [(row["env_steps"], row["deterministic_success"]) for row in run.records if "deterministic_success" in row]
            for run in runs
        ],
    }


def table_of(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines: each method beside the base it started from."""
    header = ["method", "base", "fine-tuned", "stochastic", "steps / 1e3", "minutes", "beats its base"]
    lines = []
    for name, row in rows.items():
        better = row["tuned"]["low"] > row["base"]["high"]
        steps, seconds = (sum(row[key]) / len(row[key]) for key in ("env_steps", "seconds"))
        rates = [rate_text(row[key]) for key in ("base", "tuned", "stochastic")]
        lines.append([name, *rates, f"{steps / 1e3:,.0f}", f"{seconds / 60:.1f}", "yes" if better else "no"])
    return header, lines
