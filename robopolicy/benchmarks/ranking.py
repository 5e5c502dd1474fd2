"""Ranking of policies by world models compared with the simulator, for independently trained policies and every model.

No two policies share demonstrations, weights or seeds. World models share no data with them either: they are trained on
demonstrations, noisy experts and one policy of their own seed. A second set is harder: clones, and experts that are
noisy, aim beside the goal or are too slow. Policies may also be ranked in scenes that the models have not seen.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.benchmarks.rates import mean_text
from robopolicy.benchmarks.runs import (
    IMAGE_MODELS,
    Changes,
    Variant,
    chosen_from,
    modelled,
    pretrained,
    run_variant,
    settings_of,
)
from robopolicy.building.worlds import build_noisy_expert, build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import derive_seed, episode_seeds
from robopolicy.core.spec import ENVIRONMENT_STATE
from robopolicy.core.storage import read_json, write_json
from robopolicy.data.record import record
from robopolicy.evaluation.few_trials import savings_rows
from robopolicy.evaluation.plots import ranking_panels
from robopolicy.evaluation.report import Section, ranking_plot
from robopolicy.evaluation.world_model import element_errors
from robopolicy.runs import is_complete
from robopolicy.verbs import rank
from robopolicy.verbs.bench import Benchmark, Table
from worldmodels.checkpoint import load_world_model
from worldmodels.initial_states import context_at

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
    "latent_ensemble": Changes(
        (
            "worldmodel.kind=latent_ensemble",
            "world.cameras=[top]",
            "world.image_size=64",
            "worldmodel.transitions=20000",
            "worldmodel.fit.steps=2000",
            "worldmodel.config.ensemble.members=3",
        ),
        {
            "push_cube": ("worldmodel.transitions=60000", "worldmodel.fit.steps=5000"),
            "pick_place": ("world.cameras=[front,wrist]",),
            "push_t": ("worldmodel.transitions=80000", "worldmodel.fit.steps=6000"),
        },
    ),
    **{kind: Changes(settings) for kind, settings in IMAGE_MODELS.items()},
}
"""By kind. State models take minutes, those of images longer. Telling policies a few points apart takes a truer model
than improving one: on pick_place more than twice the recipe's training. Transitions beyond the demonstrations, which
are some 49,000 on push_t, are those of noisy experts, play and a policy.
"""

RANKED = {
    "latent_ensemble": Changes(("world.imagination.success=state",), {"push_t": ("world.imagination.debounce=3",)}),
    "video": Changes(("rank.episodes=64",)),
}
"""Settings of `rank` by kind: policies of states act on the readout of latents, and its distance to the goal decides.
On push_t it must do so for three steps: an error of its turn crosses the threshold by chance. On push_cube that would
fail policies that push the cube through the goal, as those do that learned by RL: a first step in it is success. With
video, as many episodes of every policy as the recipe says would take hours.
"""

CLONES = "novice", "few", "base", "many"
"""POLICIES that are ranked among the experts with faults."""

VECTORS = "ensemble", "rssm", "latent_ensemble"
"""Kinds whose error of the objects' places is measured: they predict or read them."""
HELD_OUT = 192
"""Episodes for it: a third at each of three noise levels."""
HORIZONS = (1, 5, 10, 20, 50)
PLACE = re.compile(rf"^{re.escape(ENVIRONMENT_STATE)} (?P<object>(?!goal)(?!.*_(to|in)_)\w+)_[xyz], mm$")
"""Labels of coordinates of objects, not of goals, nor as seen from elsewhere."""

FAULTS = {
    "push_cube": ("0.6", "0.9", "1.3", "aim=0.033", "aim=0.042", "aim=0.05", "speed=0.3", "speed=0.25"),
    "push_t": ("0.15", "0.3", "0.6", "aim=0.025", "aim=0.03", "aim=0.05", "speed=0.5", "speed=0.35"),
    "pick_place": ("0.3", "0.5", "0.7", "aim=0.02", "aim=0.03", "aim=0.04", "speed=0.5", "speed=0.3"),
}
"""Task -> what its experts have: noise, another goal (m), part of their speed. It costs them 0 to 80 % of success."""


@dataclass(frozen=True)
class Arm:
    """A kind of world model and what is ranked in it. faulty: CLONES and experts with FAULTS instead of POLICIES;
    settings: of `rank`.
    """

    kind: str
    faulty: bool = False
    settings: tuple[str, ...] = ()


PHYSICAL = "rank.variations=[size,mass,friction]"
SCENE = "rank.variations=[colour,light,camera,texture,size,mass,friction]"

ARMS = {
    **{kind: Arm(kind) for kind in MODELS},
    "ensemble, faults": Arm("ensemble", faulty=True),
    "latent_ensemble, faults": Arm("latent_ensemble", faulty=True),
    "ensemble, other scenes": Arm("ensemble", settings=(PHYSICAL,)),
    "latent_ensemble, other scenes": Arm("latent_ensemble", settings=(SCENE,)),
}
"""What bench.only names; arms of one kind share its models."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {arm: {seed: ranking}}}, "errors": {task: {kind: {seed: `errors_of`}}}}, after training
    and ranking what is missing.
    """
    arms = chosen_from(config, ARMS)
    tasks = {task: measure(config, root, task, arms) for task in config.bench.tasks}
    kinds = [kind for kind in VECTORS if any(ARMS[arm].kind == kind for arm in arms)]
    seeds = config.bench.seeds
    errors = {
        task: {kind: {str(seed): errors_of(config, root, task, kind, seed) for seed in seeds} for kind in kinds}
        for task in config.bench.tasks
    }
    return {"tasks": tasks, "errors": errors}


def measure(config: Config, root: Path, task: str, arms: tuple[str, ...]) -> dict[str, Any]:
    """Return the rankings of a task by arm and seed of model; finished training and rankings are not repeated."""
    rankings: dict[str, Any] = {name: {} for name in arms}
    for seed in config.bench.seeds:
        for name in arms:
            arm, label = ARMS[name], name.replace(", ", "_").replace(" ", "_")
            if arm.faulty and task not in FAULTS:
                raise ConfigError(f"bench.only: '{name}' has no faults for {task}; tasks: {', '.join(FAULTS)}.")
            result = root / task / "rank" / label / str(seed) / "result.json"
            if not is_complete(result.parent):
                policies = [
                    trained_policy(config, root, task, policy, FIRST_SEED + index) / "checkpoint"
                    for index, policy in enumerate(POLICIES)
                    if policy in CLONES or not arm.faulty
                ]
                model = trained_model(config, root, task, arm.kind, seed) / "checkpoint"
                experts = ",".join(f'"{fault}"' for fault in (("none", *FAULTS[task]) if arm.faulty else ()))
                arguments = f"rank.policies=[{','.join(map(str, policies))}]", f"rank.models=[{model}]"
                overrides = f"run.name={label}", *arguments, f"rank.noise=[{experts}]"
                overrides = *overrides, *RANKED.get(arm.kind, Changes()).of(task)
                rank.run(compose([*settings_of(config, root, task, seed), *overrides, *arm.settings]))
            rankings[name][str(seed)] = read_json(result)["models"][arm.kind]
    return rankings


def trained_policy(config: Config, root: Path, task: str, name: str, seed: int) -> Path:
    """Return the run folder of one of `POLICIES`."""
    base, target = POLICIES[name]
    if target is None:
        return pretrained(config, root, task, base, seed)
    settings = f"finetune.target_success={target}", "finetune.evaluate_every=1", "finetune.videos=0"
    run_variant(config, root, task, name, Variant(base, settings), seed)
    return root / task / "finetune" / name / str(seed)


def trained_model(config: Config, root: Path, task: str, kind: str, seed: int) -> Path:
    """Return the run folder of a world model, trained on separate data."""
    base = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
    return modelled(config, root, task, kind, seed, (*MODELS[kind].of(task), f"worldmodel.policies=[{base}]"))


def errors_of(config: Config, root: Path, task: str, kind: str, seed: int) -> dict[str, Any]:
    """Return object -> horizon -> {"model", "copy"}: root mean squared errors of its place, mm, in HELD_OUT episodes of
    experts with noise, the same for all kinds; and the minutes of training, and imagined steps per CPU second.
    """
    path = root / task / "errors" / kind / f"{seed}.json"
    if not path.is_file():
        folder = trained_model(config, root, task, kind, seed)
        model = load_world_model(folder / "checkpoint")
        settings = compose([*settings_of(config, root, task, seed), *MODELS[kind].of(task)])
        world = build_world(settings.world, None, batch_size=64, seed=seed)
        parts = []
        for level in ("low", "medium", "high"):
            actor = build_noisy_expert(settings.world, world, level, derive_seed(seed, f"errors/{level}"))
            parts.append(record(world, actor, episode_seeds(seed, f"errors/{level}", HELD_OUT // 3)))
        world.close()
        errors = element_errors(model, Episodes.concatenate(parts), HELD_OUT, HORIZONS)
        clock, steps = time.process_time(), 20
        latent = model.initial(context_at(parts[0], parts[0].starts, model.context), np.arange(len(parts[0])))
        for _ in range(steps):
            latent, _ = model.imagine(latent, torch.zeros(len(parts[0]), *world.spec.action.shape))
        speed = steps * len(parts[0]) / (time.process_time() - clock)
        minutes = read_json(folder / "result.json")["seconds"] / 60
        write_json(path, {"objects": places(errors), "minutes": minutes, "steps_per_second": speed})
    return read_json(path)


def places(errors: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return object -> horizon -> distances, from the errors of its coordinates, see `element_errors`."""
    squares: dict[str, dict[str, dict[str, float]]] = {}
    for label, horizons in errors.items():
        if match := PLACE.match(label):
            total = squares.setdefault(match["object"], {})
            for horizon, pair in horizons.items():
                row = total.setdefault(horizon, dict.fromkeys(pair, 0.0))
                row.update({side: row[side] + value**2 for side, value in pair.items()})
    return {
        name: {horizon: {side: value**0.5 for side, value in pair.items()} for horizon, pair in horizons.items()}
        for name, horizons in squares.items()
    }


SHOWN = {"pearson": "Pearson", "spearman": "Spearman", "mmrv": "MMRV", "bias": "imagined - real"}
"""Statistics in the table; all are in the figures."""


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per task: the mean over seeds of the model, every seed, and the bootstrap interval of the first
    one.
    """
    result_tables = [error_table(task, kinds) for task, kinds in figures.get("errors", {}).items() if kinds]
    for task, kinds in figures["tasks"].items():
        lines = []
        for kind, seeds in kinds.items():
            each = list(seeds.values())
            labels = each[0].get("variations", {})
            scenes = {"": each, **{f", {label}": [seed["variations"][label] for seed in each] for label in labels}}
            for label, results in scenes.items():
                rows = [result["statistics"] for result in results]
                lines.append([kind.replace("_", " ") + label, *(cell([row[name] for row in rows]) for name in SHOWN)])
        title = (
            f"{task}: mean over seeds of the model (each); square brackets: bootstrap over policies of the first seed"
        )
        result_tables.append(Table(title, ["world model", *SHOWN.values()], lines))
        for kind, seeds in kinds.items():
            if rows := mean_savings(seeds):
                title = f"{task}: rates from few trials, alone and with {kind.replace('_', ' ')}, mean over seeds"
                result_tables.append(Table(title, *savings_rows(rows)))
    return result_tables


def error_table(task: str, kinds: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the errors of the objects' places by kind of model, means over seeds, beside objects that stay."""
    lines: list[list[str]] = []
    for kind, seeds in kinds.items():
        runs = list(seeds.values())
        for name in runs[0]["objects"]:
            rows = [run["objects"][name] for run in runs]
            means = {side: [_mean_at(rows, str(horizon), side) for horizon in HORIZONS] for side in ("model", "copy")}
            if not any(line[0] == f"{name} that stays" for line in lines):
                lines.append([f"{name} that stays", *means["copy"], "", ""])
            minutes, speed = (
                sum(row[figure] for row in runs) / len(runs) for figure in ("minutes", "steps_per_second")
            )
            lines.append([f"{name}, {kind.replace('_', ' ')}", *means["model"], f"{minutes:.1f}", f"{speed:,.0f}"])
    header = [
        "object",
        *(f"{horizon} step{'s' * (horizon > 1)}" for horizon in HORIZONS),
        "minutes of training",
        "steps per CPU second",
    ]
    return Table(f"{task}: error of the imagined place, mm, mean over seeds", header, lines)


def _mean_at(rows: Sequence[Mapping[str, Mapping[str, float]]], horizon: str, which: str) -> str:
    values = [row[horizon][which] for row in rows if horizon in row]
    return f"{sum(values) / len(values):.1f}" if values else ""


def mean_savings(seeds: Mapping[str, Any]) -> list[dict[str, float | None]]:
    """Return the mean over seeds of each number of few trials, see `evaluation.few_trials.savings`; [] without.

    A mean is over the seeds where the figure is defined, None without any.
    """
    each = [ranking["savings"] for ranking in seeds.values() if ranking.get("savings")]
    return [{name: defined_mean([row[name] for row in rows]) for name in rows[0]} for rows in zip(*each, strict=True)]


def defined_mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def cell(estimates: Sequence[Mapping[str, Any]]) -> str:
    """Return a statistic of every seed, with the first one's bootstrap interval over policies."""
    if any(estimate["value"] is None for estimate in estimates):
        return "undefined"
    interval = estimates[0]["interval_over_policies"]
    values = [estimate["value"] for estimate in estimates]
    text = mean_text(values, 3) if len(values) > 1 else f"{values[0]:.3f}"
    return text if interval is None else f"{text} [{interval[0]:.2f}, {interval[1]:.2f}]"


def picture(figures: Mapping[str, Any]) -> Section:
    """Return the plot of every model."""
    panels = {
        f"{task}, {kind.replace('_', ' ')}": [
            [(row["real"], row["model"]) for row in ranking["policies"]] for ranking in seeds.values()
        ]
        for task, kinds in figures["tasks"].items()
        for kind, seeds in kinds.items()
    }
    title = "Success in the model against success in the simulator"
    return Section(title, "A point a policy, a colour a seed.", svg=ranking_panels(panels))


def sections(figures: Mapping[str, Any], root: Path) -> list[Section]:
    """Return a plot of every model, and one with names for each seed of it."""
    plots = [
        Section(
            f"{task}, {kind.replace('_', ' ')}, seed {seed}, against the simulator",
            svg=ranking_plot(ranking["policies"]),
        )
        for task, kinds in figures["tasks"].items()
        for kind, seeds in kinds.items()
        for seed, ranking in seeds.items()
    ]
    return [picture(figures), *plots]


BENCHMARK = Benchmark(
    f"Do world models rank {len(POLICIES)} independently trained policies like the simulator, from the same "
    "initial states?",
    ("tasks", "seeds", "only", "overrides"),
    benchmark,
    tables,
    sections,
    frozenset({"real_interval", "model_interval", "interval_over_episodes", "warnings", "path"}),
    picture,
)
