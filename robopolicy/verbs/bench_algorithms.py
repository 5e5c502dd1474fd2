"""`bench algorithms`: fine-tuning methods on the same tasks, bases and seeds; success against environment steps.

Every method is the verb `finetune` with other settings, in its own run folder under root/bench/algorithms/<task>: a
benchmark that was interrupted goes on where it stopped, and each of its runs can be looked at by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.rule import Rule
from rich.table import Table

from robopolicy.configuration import Config, compose
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_json, write_atomic, write_json
from robopolicy.evaluation.curves import method_curves
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.report import Report, Section, render
from robopolicy.runs import output, publish
from robopolicy.verbs import collect, finetune, train


@dataclass(frozen=True)
class Method:
    """base: which pre-trained policy it starts from; settings: what it changes about fine-tuning."""

    base: str
    settings: tuple[str, ...] = ()


BASES: dict[str, tuple[str, ...]] = {
    "diffusion": (),
    "flow": ("policy.kind=flow",),
}
"""Pre-trained policies by name, with what they change about the recipe."""

GENTLE = (
    "finetune.iterations=60",
    "finetune.actor_rate=3e-4",
    "finetune.clip=0.05",
    "finetune.clip_base=0.05",
    "finetune.target_kl=0.03",
)
"""Small steps for methods without a critic: their advantages are noisier."""

METHODS: dict[str, Method] = {
    "PPO": Method("diffusion"),
    "flow PPO": Method("flow"),
    "GRPO": Method("diffusion", ("finetune.algorithm=grpo", *GENTLE)),
    "step GRPO": Method("diffusion", ("finetune.algorithm=step_grpo", *GENTLE)),
    "BranchGRPO": Method(
        "diffusion", ("finetune.algorithm=branch_grpo", "finetune.group_size=2", "finetune.branch_at=[2,5]", *GENTLE)
    ),
    "GRPO-Guard": Method(
        "diffusion", ("finetune.algorithm=grpo_guard", *GENTLE, "finetune.clip=0.012", "finetune.clip_base=0.012")
    ),
    "MC-GRPO": Method(
        "diffusion", ("finetune.algorithm=mc_grpo", "finetune.group_size=3", "finetune.groups=170", *GENTLE)
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
    method = METHODS[name]
    label = name.replace(" ", "_")
    results, curves = [], []
    for seed in config.bench.seeds:
        shared = [f"recipe={task}", f"run.root={root / task}", f"run.seed={seed}", *config.bench.overrides]
        data, base = (
            root / task / verb / label / str(seed) for verb, label in (("collect", "data"), ("train", method.base))
        )
        tuned = root / task / "finetune" / label / str(seed)
        if not (tuned / "result.json").exists():
            output.print(Rule(f"[bold]{task}, {name}, seed {seed}", align="left"))
            collect.run(compose([*shared, "run.name=data"]))
            pretrained = [*shared, f"run.name={method.base}", *BASES[method.base], f"train.data={data / 'dataset'}"]
            train.run(compose(pretrained))
            changed = [f"run.name={label}", f"finetune.policy={base / 'checkpoint'}", *method.settings]
            finetune.run(compose([*shared, *changed]))
        results.append(read_json(tuned / "result.json"))
        records = RunFolder(tuned).metrics()
        curves.append(
            [(row["env_steps"], row["deterministic_success"]) for row in records if "deterministic_success" in row]
        )
    return {
        "base": pooled([result["base"]["deterministic"] for result in results]),
        "tuned": pooled([result["tuned"]["deterministic"] for result in results]),
        "stochastic": pooled([result["tuned"]["stochastic"] for result in results]),
        "env_steps": [result["env_steps"] for result in results],
        "seconds": [result["seconds"] for result in results],
        "curves": curves,
    }


def pooled(measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the success rate over all seeds' episodes with its Wilson interval."""
    successes = sum(row["successes"] for row in measured)
    episodes = sum(row["episodes"] for row in measured)
    low, high = wilson(successes, episodes)
    return {"success_rate": successes / episodes, "low": low, "high": high, "episodes": episodes}


def table_of(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines: each method beside the base it started from."""
    header = ["method", "base", "fine-tuned", "stochastic", "steps / 1e3", "minutes", "beats its base"]
    lines = []
    for name, row in rows.items():
        better = row["tuned"]["low"] > row["base"]["high"]
        steps, seconds = (sum(row[key]) / len(row[key]) for key in ("env_steps", "seconds"))
        rates = [_rate(row[key]) for key in ("base", "tuned", "stochastic")]
        lines.append([name, *rates, f"{steps / 1e3:,.0f}", f"{seconds / 60:.1f}", "yes" if better else "no"])
    return header, lines


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print one task's table."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for line in lines:
        table.add_row(*line)
    output.print(table)


def _rate(rate: Mapping[str, float]) -> str:
    return f"{rate['success_rate']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}]"
