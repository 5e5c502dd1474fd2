"""What benchmarks of fine-tuning share: data, pre-training and fine-tuning of one variant, each in a run folder.

A benchmark that was interrupted goes on where it stopped, and each of its runs can be looked at by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.configuration import Config, compose
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_json, write_atomic, write_json
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.report import Report, render
from robopolicy.runs import output, publish
from robopolicy.verbs import collect, finetune, train, worldmodel

TOKEN = (
    "policy.kind=token",
    "policy.token.bins=17",
    "policy.token.depth=3",
    "train.batch_size=128",
    "train.fit.learning_rate=1e-3",
)


@dataclass(frozen=True)
class Changes:
    """Settings: what a pre-trained policy or a world model changes about every recipe, and about that of some tasks."""

    always: tuple[str, ...] = ()
    tasks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, task: str) -> tuple[str, ...]:
        """Return what is changed about the recipe of a task."""
        return *self.always, *self.tasks.get(task, ())


EXAMINED = "worldmodel.examine_rows=64", "worldmodel.examine_steps=1000"
IMAGES_DIR = {
    "pixel_diffusion": (
        "worldmodel.kind=pixel_diffusion",
        "world.cameras=[top]",
        "world.image_size=32",
        "worldmodel.pixel_diffusion.edm.steps=1",
        "worldmodel.pixel_diffusion.first_share=1.0",
        "worldmodel.pixel_diffusion.temperature=0.0",
        "worldmodel.pixel_diffusion.unroll=4",
        "worldmodel.fit.steps=2500",
        "worldmodel.fit.learning_rate=1e-3",
        "worldmodel.transitions=20000",
        *EXAMINED,
    ),
    "video": (
        "worldmodel.kind=video",
        "world.cameras=[top,front]",
        "worldmodel.fit.steps=1500",
        "worldmodel.fit.learning_rate=1.5e-3",
        "worldmodel.transitions=20000",
        *EXAMINED,
    ),
}
"""Settings of models that inside in images, each a quarter to half an hour of training. Where little is left to
chance, one step of diffusion (the expected image) is as true as three, twice as fast, and all that need be learned.
"""

FEWER = {
    "push_cube": ("collect.episodes=40",),
    "pick_place": ("collect.episodes=6",),
    "push_t": ("collect.episodes=300",),
}
MORE = {
    "push_cube": ("collect.episodes=500",),
    "pick_place": ("collect.episodes=25",),
    "push_t": ("collect.episodes=3000", "train.fit.steps=12000"),
}
"""Settings by task."""

BASES = {
    "diffusion": Changes(),
    "flow": Changes(("policy.kind=flow",)),
    "token": Changes((*TOKEN, "train.fit.steps=600"), {"pick_place": ("collect.episodes=150", "train.fit.steps=1500")}),
    "few": Changes((), FEWER),
    "many": Changes((), MORE),
    "novice": Changes(("train.fit.steps=60",)),
    "token_novice": Changes((*TOKEN, "train.fit.steps=150")),
}
"""By name; few and many: demonstrations; novices: stopped while success is rare. Tokens need more than the dozen
demonstrations of pick_place.
"""

TUNED_BASES: dict[str, tuple[str, ...]] = {
    "warm": ("finetune.target_success=0.7", "finetune.evaluate_every=1", "finetune.videos=0"),
}
"""Policies that have been fine-tuned (from the base `diffusion`) as far as this, to start from."""


@dataclass(frozen=True)
class Variant:
    """base: which pre-trained policy it starts from; settings: what it changes about fine-tuning."""

    base: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """result: what fine-tuning wrote about base and tuned policy; records: its metrics, one an iteration."""

    result: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]


def settings_of(config: Config, root: Path, task: str, seed: int) -> list[str]:
    """Return the settings that all runs of a benchmark on a task share."""
    return [f"recipe={task}", f"run.root={root / task}", f"run.seed={seed}", *config.bench.overrides]


def pretrained(config: Config, root: Path, task: str, name: str, seed: int) -> Path:
    """Return the run folder of a base under root/task, after recording and training what is missing."""
    settings = BASES[name].of(task)
    own = [setting for setting in settings if setting.startswith("collect.")]
    recording = f"data_{name}" if own else "data"
    base = root / task / "train" / name / str(seed)
    if not (base / "result.json").exists():
        shared = settings_of(config, root, task, seed)
        output.print(Rule(f"[bold]{task}, {name}, seed {seed}", align="left"))
        collect.run(compose([*shared, f"run.name={recording}", *own]))
        data = root / task / "collect" / recording / str(seed)
        train.run(compose([*shared, f"run.name={name}", *settings, f"train.data={data / 'dataset'}"]))
    return base


def modelled(config: Config, root: Path, task: str, label: str, seed: int, settings: Sequence[str]) -> Path:
    """Return the run folder of a world model under root/task that learns as `settings` say; with cameras from
    recordings of its own, without from those of policies.
    """
    folder = root / task / "worldmodel" / label / str(seed)
    if not (folder / "result.json").exists():
        shared = settings_of(config, root, task, seed)
        filmed = [setting for setting in settings if setting.startswith("world.")]
        output.print(Rule(f"[bold]{task}, world model {label}, seed {seed}", align="left"))
        data = f"data_{label}" if filmed else "data"
        collect.run(compose([*shared, *filmed, f"run.name={data}"]))
        recordings = root / task / "collect" / data / str(seed) / "dataset"
        worldmodel.run(compose([*shared, f"run.name={label}", f"worldmodel.data=[{recordings}]", *settings]))
    return folder


def run_variant(config: Config, root: Path, task: str, label: str, variant: Variant, seed: int) -> Outcome:
    """Do what has not been done yet under root/task, and return what came of it."""
    tuned = root / task / "finetune" / label / str(seed)
    if not (tuned / "result.json").exists():
        if variant.base in TUNED_BASES:
            run_variant(config, root, task, variant.base, Variant("diffusion", TUNED_BASES[variant.base]), seed)
            base = root / task / "finetune" / variant.base / str(seed)
        else:
            base = pretrained(config, root, task, variant.base, seed)
        output.print(Rule(f"[bold]{task}, {label}, seed {seed}", align="left"))
        changed = [f"run.name={label}", f"finetune.policy={base / 'checkpoint'}", *variant.settings]
        finetune.run(compose([*settings_of(config, root, task, seed), *changed]))
    return Outcome(read_json(tuned / "result.json"), RunFolder(tuned).metrics())


def chosen_from(config: Config, known: Mapping[str, Any]) -> tuple[str, ...]:
    """Return bench.methods, by default all that are `known`; ConfigError for one that is not."""
    for name in config.bench.methods:
        if name not in known:
            raise ConfigError(
                f"bench.methods: there is no '{name}'.{did_you_mean(name, known)} There are {', '.join(known)}."
            )
    return config.bench.methods or tuple(known)


def conclude(config: Config, root: Path, report: Report, figures: Mapping[str, Any]) -> None:
    """Write report.html and benchmark.json into `root`, and the figures to json=PATH when asked."""
    write_atomic(root / "report.html", render(report))
    write_json(root / "benchmark.json", figures)
    publish(config, figures)
    output.print(f"Report: {root / 'report.html'}")


def pooled(measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the success rate over all seeds' episodes with its Wilson interval."""
    successes = sum(row["successes"] for row in measured)
    episodes = sum(row["episodes"] for row in measured)
    low, high = wilson(successes, episodes)
    return {"success_rate": successes / episodes, "low": low, "high": high, "episodes": episodes}


def rate_text(rate: Mapping[str, float]) -> str:
    """Return a rate with its interval."""
    return f"{rate['success_rate']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}]"
