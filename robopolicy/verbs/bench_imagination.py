"""`bench imagination`: fine-tuning inside world models, judged for real; and when imagination fools a policy.

The first arms learn from broad data, the others from 5,000 steps of near-perfect demonstrations, where imagined and
real success part, with a remedy each; the model is refreshed around a policy that is kept near its base.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.configuration import Config, compose
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_json
from robopolicy.evaluation.curves import imagination_curves
from robopolicy.evaluation.report import Report, Section
from robopolicy.runs import print_table
from robopolicy.verbs import imagine
from robopolicy.verbs.bench_runs import (
    IMAGES_DIR,
    chosen_from,
    conclude,
    modelled,
    pooled,
    pretrained,
    rate_text,
    settings_of,
)

LONGER = ("finetune.target_success=0.98",)
"""Imagined steps are cheap, and some of what succeeds in imagination fails in earnest."""

NEAR = "finetune.auxiliaries=[bc]"
CAREFUL = (*LONGER, NEAR)
"""Kept near the base, as DiWA does: slower, and worth it where the model is wrong about what the base never did."""

FEWER = (
    "finetune.iterations=120",
    "finetune.evaluate_episodes=100",
    "finetune.evaluate_every=10",
    "imagine.watch=100",
)
"""One core imagines 500 to 900 images of 32 px a second; recipe reach_planar makes do with few of them."""

NARROW = ("worldmodel.noise=[0.2]", "worldmodel.transitions=5000")
FOOLED = (
    "imagine.gap=null",
    "finetune.rewards=[success_only]",
    "finetune.target_success=null",
    "finetune.iterations=30",
    "finetune.checkpoint_every=5",
)
"""What the success classifier believes is all that is paid (DiWA), and nobody intervenes."""

EXPERTS = "finetune.auxiliaries=[experts]"
"""Imitates recorded successes on the side."""


@dataclass(frozen=True)
class Arm:
    """model: name and settings of the world model; knows_base: whether it has seen the base policy; settings: of
    fine-tuning in it.
    """

    model: str
    described: tuple[str, ...] = ()
    knows_base: bool = True
    settings: tuple[str, ...] = ()


def narrow(*settings: str) -> Arm:
    """Return an arm in the model of narrow data."""
    return Arm("narrow", NARROW, False, (*FOOLED, *settings))


ARMS: dict[str, Arm] = {
    "ensemble": Arm("ensemble", settings=LONGER),
    "ensemble, near its base": Arm("ensemble", settings=CAREFUL),
    "rssm": Arm("rssm", ("worldmodel.kind=rssm",), settings=LONGER),
    "pixel_diffusion": Arm("pixel_diffusion", IMAGES_DIR["pixel_diffusion"], settings=(*LONGER, *FEWER)),
    "narrow": narrow(),
    "narrow, stopped": narrow("imagine.gap=0.2"),
    "narrow, near its base": narrow(NEAR),
    "narrow, experts beside": narrow(EXPERTS),
    "narrow, uncertainty costs": narrow("world.imagination.penalty=0.3"),
    "narrow, uncertainty ends": narrow("world.imagination.quantile=0.99"),
    "narrow, refreshed": narrow(NEAR, "imagine.refresh_every=5"),
}
"""Name -> what is done."""


def benchmark(config: Config) -> dict[str, Any]:
    """Run what is missing, print the tables, write benchmark.json and report.html, and return the figures."""
    names = chosen_from(config, ARMS)
    root = config.run.root / "bench" / "imagination"
    figures = {task: {name: measure(config, root, task, name) for name in names} for task in config.bench.tasks}
    subtitle = f"{len(config.bench.seeds)} seeds; real success of policies that were tuned in imagination alone"
    report = Report(title="Fine-tuning in imagination", subtitle=subtitle)
    for task, rows in figures.items():
        header, lines = table_of(rows)
        report.sections.append(Section(task, "Wilson 95 % intervals over all seeds.", header=header, rows=lines))
        print_table(task, header, lines)
        drawn = imagination_curves({name: row["records"] for name, row in rows.items()})
        caption = "Noise-free policy on the same starts, one line a seed of training."
        report.sections.append(Section(f"{task}: imagined beside real", caption, svg=drawn))
    conclude(config, root, report, figures)
    return figures


def measure(config: Config, root: Path, task: str, name: str) -> dict[str, Any]:
    """Return an arm's figures on a task; runs that have ended are not run again."""
    folders = [tuned_in_imagination(config, root, task, name, seed) for seed in config.bench.seeds]
    results = [read_json(folder / "result.json") for folder in folders]
    models = [read_json(Path(result["model"]).parent / "result.json") for result in results]
    return {
        "base": pooled([result["base"]["deterministic"] for result in results]),
        "tuned": pooled([result["tuned"]["deterministic"] for result in results]),
        "imagined": pooled([result["imagined"]["tuned, imagined"]["deterministic"] for result in results]),
        "each": [result["tuned"]["deterministic"]["success_rate"] for result in results],
        "env_steps": [result["env_steps"] for result in results],
        "seconds": [model["seconds"] + result["seconds"] for model, result in zip(models, results, strict=True)],
        "records": [
            [row for row in RunFolder(folder).metrics() if "deterministic_real_success" in row] for folder in folders
        ],
    }


def tuned_in_imagination(config: Config, root: Path, task: str, name: str, seed: int) -> Path:
    """Return the run folder of an arm, after training base and model and fine-tuning, where that is missing."""
    arm, label = ARMS[name], name.replace(", ", "_").replace(" ", "_")
    folder = root / task / "imagine" / label / str(seed)
    if not (folder / "result.json").exists():
        base = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
        seen = (*arm.described, f"worldmodel.policies=[{base}]") if arm.knows_base else arm.described
        model = modelled(config, root, task, arm.model, seed, seen) / "checkpoint"
        chosen = [f"finetune.policy={base}", f"imagine.model={model}"]
        if EXPERTS in arm.settings:
            chosen.append(f"finetune.experts=[{root / task / 'collect' / 'data' / str(seed) / 'dataset'}]")
        run = [*settings_of(config, root, task, seed), f"run.name={label}", *chosen, *arm.settings]
        imagine.run(compose(run))
    return folder


def table_of(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines."""
    header = ["arm", "base", "tuned, real", "each seed", "tuned, imagined", "imagined - real", "real steps", "minutes"]
    lines: list[Sequence[str]] = []
    for name, row in rows.items():
        each = " ".join(f"{value:.1%}" for value in row["each"])
        gap = row["imagined"]["success_rate"] - row["tuned"]["success_rate"]
        rates = [rate_text(row[key]) for key in ("base", "tuned")]
        figures = f"{100 * gap:+.1f}", f"{np.mean(row['env_steps']):,.0f}", f"{np.mean(row['seconds']) / 60:.1f}"
        lines.append([name, *rates, each, rate_text(row["imagined"]), *figures])
    return header, [list(line) for line in lines]
