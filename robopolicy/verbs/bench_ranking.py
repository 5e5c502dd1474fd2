"""`bench ranking`: do world models order policies as the simulator does? Independently trained policies, every model.

No two policies share demonstrations, weights or seeds, nor does a world model share any with them: it learns from
demonstrations, disturbed experts and one policy of its own seed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robopolicy.configuration import Config, compose
from robopolicy.core.storage import read_json
from robopolicy.evaluation.curves import ranking_panels
from robopolicy.evaluation.report import Report, Section, agreement, ranking_plot
from robopolicy.runs import print_table
from robopolicy.verbs import rank
from robopolicy.verbs.bench_runs import (
    IMAGES_DIR,
    Changes,
    Variant,
    chosen_from,
    conclude,
    modelled,
    pretrained,
    run_variant,
    settings_of,
)

FIRST_SEED = 100
"""Of the policies; world models take theirs from bench.seeds."""

POLICIES: dict[str, tuple[str, float | None]] = {
    "novice": ("novice", None),
    "few": ("few", None),
    "flow": ("flow", None),
    "base": ("diffusion", None),
    "many": ("many", None),
    "tuned_50": ("diffusion", 0.5),
    "tuned_60": ("flow", 0.6),
    "tuned_70": ("diffusion", 0.7),
    "tuned_80": ("flow", 0.8),
    "tuned_90": ("diffusion", 0.9),
}
"""Name -> what it was pre-trained as, and the success at which its fine-tuning stopped, if there was any."""

MODELS = {
    "ensemble": Changes(("worldmodel.kind=ensemble",), {"pick_place": ("worldmodel.fit.steps=12000",)}),
    "rssm": Changes(("worldmodel.kind=rssm",)),
    **{kind: Changes(settings) for kind, settings in IMAGES_DIR.items()},
}
"""By kind. State models take minutes, those of images longer. Telling policies a few points apart takes a truer model
than improving one: on pick_place more than twice the recipe's training.
"""

SHORTER = {"video": ("rank.episodes=64",)}
"""Where as many episodes of every policy as the recipe says would take hours."""


def benchmark(config: Config) -> dict[str, Any]:
    """Train what is missing, rank, print the tables, write benchmark.json and report.html, and return the figures."""
    kinds = chosen_from(config, MODELS)
    root = config.run.root / "bench" / "ranking"
    figures = {task: measure(config, root, task, kinds) for task in config.bench.tasks}
    subtitle = f"{len(POLICIES)} independently trained policies on the same starts"
    report = Report(title="Ranking policies in imagination", subtitle=subtitle)
    report.sections.append(
        Section("Every model", "A point a policy, a colour a seed.", svg=ranking_panels(points(figures)))
    )
    for task, models in figures.items():
        header, lines = agreement(models)
        report.sections.append(Section(task, "In brackets the bootstrap over policies.", header=header, rows=lines))
        for name, found in models.items():
            title = f"{task}: {name} against the simulator"
            report.sections.append(Section(title, svg=ranking_plot(found["policies"])))
        print_table(task, header, lines)
    conclude(config, root, report, figures)
    return figures


def points(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, list[list[tuple[float, float]]]]:
    """Return what `ranking_panels` draws, of task -> "<kind> <seed>" -> ranking."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for task, models in figures.items():
        for name, ranking in models.items():
            kind = name.rsplit(" ", 1)[0]
            policies = [(row["real"], row["model"]) for row in ranking["policies"]]
            found.setdefault(f"{task}, {kind.replace('_', ' ')}", []).append(policies)
    return found


def measure(config: Config, root: Path, task: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the rankings of a task by model; what has been trained or ranked is not done again."""
    policies = [
        trained_policy(config, root, task, name, FIRST_SEED + index) / "checkpoint"
        for index, name in enumerate(POLICIES)
    ]
    found: dict[str, Any] = {}
    for seed in config.bench.seeds:
        for kind in kinds:
            result = root / task / "rank" / kind / str(seed) / "result.json"
            if not result.exists():
                model = trained_model(config, root, task, kind, seed) / "checkpoint"
                chosen = f"rank.policies=[{','.join(map(str, policies))}]", f"rank.models=[{model}]", "rank.noise=[]"
                changed = f"run.name={kind}", *chosen, *SHORTER.get(kind, ())
                rank.run(compose([*settings_of(config, root, task, seed), *changed]))
            found[f"{kind} {seed}"] = read_json(result)["models"][kind]
    return found


def trained_policy(config: Config, root: Path, task: str, name: str, seed: int) -> Path:
    """Return the run folder of one of `POLICIES`."""
    base, target = POLICIES[name]
    if target is None:
        return pretrained(config, root, task, base, seed)
    settings = f"finetune.target_success={target}", "finetune.evaluate_every=1", "finetune.videos=0"
    run_variant(config, root, task, name, Variant(base, settings), seed)
    return root / task / "finetune" / name / str(seed)


def trained_model(config: Config, root: Path, task: str, kind: str, seed: int) -> Path:
    """Return the run folder of a world model, trained on data of its own."""
    base = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
    return modelled(config, root, task, kind, seed, (*MODELS[kind].of(task), f"worldmodel.policies=[{base}]"))
