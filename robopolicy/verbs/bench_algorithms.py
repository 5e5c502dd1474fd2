"""`bench algorithms`: fine-tuning methods on the same tasks, bases and seeds; success against environment steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.storage import write_atomic, write_json
from robopolicy.evaluation.curves import method_curves
from robopolicy.evaluation.report import Report, Section, render
from robopolicy.runs import output, publish
from robopolicy.verbs.bench_runs import Variant, pooled, print_table, rate_text, run_variant

GENTLE = (
    "finetune.iterations=60",
    "finetune.actor_rate=3e-4",
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
        "diffusion", ("finetune.algorithm=grpo_guard", *GENTLE, "finetune.clip=0.012", "finetune.clip_base=0.012")
    ),
    "MC-GRPO": Variant(
        "diffusion", ("finetune.algorithm=mc_grpo", "finetune.group_size=3", "finetune.groups=170", *GENTLE)
    ),
    "token GRPO": Variant(
        "token",
        (
            "finetune.algorithm=step_grpo",
            "finetune.iterations=120",
            "finetune.actor_rate=5e-4",
            "finetune.epochs=2",
            "finetune.minibatch=512",
            "finetune.target_kl=0.2",
            "finetune.ratio_tolerance=1e-4",
        ),
    ),
}
"""Rows of the benchmark; group methods play 512 episodes an iteration."""


def benchmark(config: Config) -> dict[str, Any]:
    """Run what is missing, print the table, write benchmark.json and report.html, and return the figures."""
    names = config.bench.methods or tuple(METHODS)
    for name in names:
        if name not in METHODS:
            raise ConfigError(
                f"There is no method '{name}'.{did_you_mean(name, METHODS)} There are {', '.join(METHODS)}."
            )
    root = config.run.root / "bench" / "algorithms"
    figures = {task: {name: measure(config, root, task, name) for name in names} for task in config.bench.tasks}
    report = Report(title="Algorithms", subtitle=f"{len(config.bench.seeds)} seeds, success over paired episodes")
    for task, rows in figures.items():
        header, lines = table_of(rows)
        curves = {name: row["curves"] for name, row in rows.items()}
        base = rows[names[0]]["base"]["success_rate"]
        svg = method_curves(curves, base)
        report.sections.append(Section(task, "Mean of the seeds, band from the lowest to the highest.", svg=svg))
        report.sections.append(Section(f"{task}: after fine-tuning", header=header, rows=lines))
        print_table(task, header, lines)
    write_atomic(root / "report.html", render(report))
    write_json(root / "benchmark.json", figures)
    publish(config, figures)
    output.print(f"Report: {root / 'report.html'}")
    return figures


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
