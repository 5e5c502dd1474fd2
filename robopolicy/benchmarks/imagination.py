"""Fine-tuning inside world models, evaluated in the simulator, including cases where imagination misleads the policy.

The first arm runs the verbs of a recipe; the second repeats it from the same base and model with one thread; further
arms change the model, or the BC weight toward the base. The others have a model of only 5,000 steps of nearly perfect
demonstrations, where imagined and real success diverge, with one remedy each; the last continues training its model
while a BC loss keeps the policy near its base. "pictures" is a pipeline of its own, from demonstrations on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.benchmarks.rates import pooled, rate_of, rate_text, spread_text
from robopolicy.benchmarks.runs import (
    IMAGE_MODELS,
    chosen_from,
    demonstrations,
    modelled,
    pipeline_overrides,
    pretrained,
    settings_of,
)
from robopolicy.configuration import Config, compose
from robopolicy.core.errors import ConfigError
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_json
from robopolicy.evaluation.plots import imagination_curves, imagined_beside_real
from robopolicy.evaluation.report import Section
from robopolicy.runs import is_complete
from robopolicy.verbs import imagine, pipeline
from robopolicy.verbs.bench import Benchmark, Table

LONGER = ("finetune.target_success=0.98",)
"""Tuned for longer than the recipe would in the simulator."""

NEAR = "imagine.bc_weight=0.05"
"""Kept near the base, as DiWA does: slower, and worth it where the model errs about what the base never did."""

FEWER = (
    "finetune.iterations=120",
    "finetune.evaluate_episodes=100",
    "finetune.evaluate_every=10",
    "imagine.real_eval_episodes=100",
)
"""One core imagines 500 to 900 images of 32 px a second; recipe reach_planar makes do with few of them."""

NARROW = ("worldmodel.noise=[0.2]", "worldmodel.transitions=5000")
FOOLED = (
    "imagine.select_by=imagined",
    "imagine.patience=0",
    "imagine.divergence_threshold=null",
    "finetune.rewards=[success_only]",
    "finetune.target_success=null",
    "finetune.iterations=30",
    "finetune.checkpoint_every=5",
)
"""The success classifier alone pays (as in DiWA), and what is real neither ends the run nor chooses the policy."""

PICTURES = {"push_cube": "imagine_pixels", "push_t": "imagine_pixels_push_t"}
"""Recipe of the pipeline by task, for a policy behind the encoder of a world model that sees the top camera."""

EXPERTS = "finetune.auxiliaries=[experts]"
"""Imitates recorded successes on the side."""


@dataclass(frozen=True)
class Arm:
    """A setting of fine-tuning in imagination.

    model: name of the world model; described: its settings; knows_base: whether it is also trained on rollouts of the
    base policy, None for the recipe's setting; settings: of fine-tuning; pipelines: recipe by task of a pipeline that
    does all of it instead.
    """

    model: str
    described: tuple[str, ...] = ()
    knows_base: bool | None = True
    settings: tuple[str, ...] = ()
    pipelines: Mapping[str, str] = field(default_factory=dict)


def narrow(*settings: str) -> Arm:
    """Return an arm with the model of narrow data."""
    return Arm("narrow", NARROW, False, (*FOOLED, *settings))


ARMS: dict[str, Arm] = {
    "ensemble": Arm("ensemble", knows_base=None),
    "ensemble, one thread": Arm("ensemble", knows_base=None, settings=("run.threads=1",)),
    "ensemble, near its base": Arm("ensemble", knows_base=None, settings=(NEAR,)),
    "rssm": Arm("rssm", ("worldmodel.kind=rssm",), settings=LONGER),
    "pictures": Arm("latent_ensemble", pipelines=PICTURES),
    "pixel_diffusion": Arm("pixel_diffusion", IMAGE_MODELS["pixel_diffusion"], settings=(*LONGER, *FEWER)),
    "narrow": narrow(),
    "narrow, watched": narrow("imagine.select_by=real", "imagine.patience=4", "imagine.divergence_threshold=0.2"),
    "narrow, near its base": narrow(NEAR),
    "narrow, experts beside": narrow(EXPERTS),
    "narrow, uncertainty costs": narrow("world.imagination.uncertainty_penalty=0.3"),
    "narrow, uncertainty ends": narrow("world.imagination.uncertainty_quantile=0.99"),
    "narrow, refreshed": narrow(NEAR, "imagine.refresh_every=5"),
}
"""Name -> what is done."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {arm: results}}}, running what is missing."""
    names = chosen_from(config, ARMS)
    return {"tasks": {task: {name: measure(config, root, task, name) for name in names} for task in config.bench.tasks}}


def measure(config: Config, root: Path, task: str, name: str) -> dict[str, Any]:
    """Return the results of an arm on a task; finished runs are not repeated."""
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
            [{key: row[key] for key in RECORDED} for row in RunFolder(folder).metrics() if RECORDED[-1] in row]
            for folder in folders
        ],
    }


def tuned_in_imagination(config: Config, root: Path, task: str, name: str, seed: int) -> Path:
    """Return the run folder of an arm; missing base, model and fine-tuning are run."""
    arm, label = ARMS[name], name.replace(", ", "_").replace(" ", "_")
    if arm.pipelines:
        if task not in arm.pipelines:
            raise ConfigError(f"bench.only: '{name}' has no recipe for {task}; tasks: {', '.join(arm.pipelines)}.")
        run = f"run.root={root / task}", f"run.name={label}", f"run.seed={seed}", f"run.threads={config.run.threads}"
        pipeline.run(compose([f"recipe={arm.pipelines[task]}", *run, pipeline_overrides(config.bench.overrides)]))
        return root / task / "pipeline" / label / str(seed) / "imagine" / "imagined" / str(seed)
    folder = root / task / "imagine" / label / str(seed)
    if not is_complete(folder):
        base = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
        shared_settings = settings_of(config, root, task, seed)
        knows_base = compose(shared_settings).worldmodel.include_base if arm.knows_base is None else arm.knows_base
        model_settings = (*arm.described, f"worldmodel.policies=[{base}]") if knows_base else arm.described
        model = modelled(config, root, task, arm.model, seed, model_settings) / "checkpoint"
        paths = [f"finetune.policy={base}", f"imagine.model={model}"]
        if EXPERTS in arm.settings:
            paths.append(f"finetune.expert_datasets=[{demonstrations(root, task, seed)}]")
        run = [*shared_settings, f"run.name={label}", *paths, *arm.settings]
        imagine.run(compose(run))
    return folder


RECORDED = ("iteration", "env_steps", "deterministic_success", "deterministic_real_success")
"""What is kept of every evaluation on the way."""


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per task."""
    return [table_of(task, rows) for task, rows in figures["tasks"].items()]


def table_of(task: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of a task: base and fine-tuned policy in the simulator, and the fine-tuned one in imagination.

    A Wilson interval over the episodes of all seeds treats them as one policy; the range over seeds is next to it.
    """
    header = ["fine-tuned in", "base", "tuned: mean over seeds (range)", "each seed", "tuned, imagined"]
    header += ["imagined - real", "real steps"]
    has_seconds = any("seconds" in row for row in rows.values())
    if has_seconds:
        header.append("minutes")
    lines: list[list[str]] = []
    for name, row in rows.items():
        count = row["tuned"]["episodes"] // len(row["each"])
        each = ", ".join(rate_text(rate_of(round(value * count), count)) for value in row["each"])
        gap = 100 * (row["imagined"]["success_rate"] - row["tuned"]["success_rate"])
        rates = [rate_text(row["base"]), spread_text(row["each"]), each, rate_text(row["imagined"])]
        lines.append([name.replace("_", " "), *rates, f"{gap:+.1f}", f"{np.mean(row['env_steps']):,.0f}"])
        if has_seconds:
            lines[-1].append(f"{np.mean(row['seconds']) / 60:.1f}" if "seconds" in row else "")
    return Table(
        f"{task}: base and imagined success pooled over seeds; in square brackets Wilson 95 % intervals", header, lines
    )


def picture(figures: Mapping[str, Any]) -> Section:
    """Return the plot of base and fine-tuned policies in simulator and imagination."""
    title = "Success of base and tuned policies in the simulator, and of the tuned ones in imagination"
    return Section(title, "A dot a seed.", svg=imagined_beside_real(figures["tasks"]))


def sections(figures: Mapping[str, Any], root: Path) -> list[Section]:
    """Return plots of simulator and imagination, after and during fine-tuning."""
    caption = "Noise-free policy on the same starts, one line a seed of training."
    curves = [
        Section(
            f"{task}: imagined beside real",
            caption,
            svg=imagination_curves({name: row["records"] for name, row in rows.items()}),
        )
        for task, rows in figures["tasks"].items()
    ]
    return [picture(figures), *curves]


BENCHMARK = Benchmark(
    "Does fine-tuning in imagination only increase success in the simulator, and what helps where the model is wrong?",
    ("tasks", "seeds", "only", "overrides"),
    benchmark,
    tables,
    sections,
    picture=picture,
)
