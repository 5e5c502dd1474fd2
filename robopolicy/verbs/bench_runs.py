"""What benchmarks of fine-tuning share: data, pre-training and fine-tuning of one variant, each in a run folder.

A benchmark that was interrupted goes on where it stopped, and each of its runs can be looked at by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.configuration import Config, compose
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_json
from robopolicy.evaluation.intervals import wilson
from robopolicy.runs import output
from robopolicy.verbs import collect, finetune, train

TOKEN = (
    "policy.kind=token",
    "policy.token.bins=17",
    "policy.token.depth=3",
    "train.batch_size=128",
    "train.fit.learning_rate=1e-3",
)


@dataclass(frozen=True)
class Base:
    """A pre-trained policy: what it changes about the recipe, and about the recipe of some tasks, data included."""

    settings: tuple[str, ...] = ()
    tasks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


BASES = {
    "diffusion": Base(),
    "flow": Base(("policy.kind=flow",)),
    "token": Base((*TOKEN, "train.fit.steps=600"), {"pick_place": ("collect.episodes=150", "train.fit.steps=1500")}),
    "novice": Base(("train.fit.steps=60",)),
    "token_novice": Base((*TOKEN, "train.fit.steps=150")),
}
"""By name; novices: stopped while success is rare; tokens need more than the dozen demonstrations of pick_place."""

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


def run_variant(config: Config, root: Path, task: str, label: str, variant: Variant, seed: int) -> Outcome:
    """Do what has not been done yet under root/task, and return what came of it."""
    shared = [f"recipe={task}", f"run.root={root / task}", f"run.seed={seed}", *config.bench.overrides]
    if variant.base in TUNED_BASES:
        run_variant(config, root, task, variant.base, Variant("diffusion", TUNED_BASES[variant.base]), seed)
    tuned_base = variant.base in TUNED_BASES
    settings = () if tuned_base else (*BASES[variant.base].settings, *BASES[variant.base].tasks.get(task, ()))
    own = [setting for setting in settings if setting.startswith("collect.")]
    recording = f"data_{variant.base}" if own else "data"
    data = root / task / "collect" / recording / str(seed)
    base = root / task / ("finetune" if tuned_base else "train") / variant.base / str(seed)
    tuned = root / task / "finetune" / label / str(seed)
    if not (tuned / "result.json").exists():
        output.print(Rule(f"[bold]{task}, {label}, seed {seed}", align="left"))
        collect.run(compose([*shared, f"run.name={recording}", *own]))
        if not (base / "result.json").exists():
            pretrained = [f"run.name={variant.base}", *settings, f"train.data={data / 'dataset'}"]
            train.run(compose([*shared, *pretrained]))
        changed = [f"run.name={label}", f"finetune.policy={base / 'checkpoint'}", *variant.settings]
        finetune.run(compose([*shared, *changed]))
    return Outcome(read_json(tuned / "result.json"), RunFolder(tuned).metrics())


def pooled(measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the success rate over all seeds' episodes with its Wilson interval."""
    successes = sum(row["successes"] for row in measured)
    episodes = sum(row["episodes"] for row in measured)
    low, high = wilson(successes, episodes)
    return {"success_rate": successes / episodes, "low": low, "high": high, "episodes": episodes}


def rate_text(rate: Mapping[str, float]) -> str:
    """Return a rate with its interval."""
    return f"{rate['success_rate']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}]"
