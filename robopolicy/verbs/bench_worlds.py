"""`bench trajectories`, `planning`, `styles`, `joint`, `video`: claims about world models, asked seed by seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.benchmarks import joint, planning, styles, trajectories, video
from robopolicy.configuration import Config
from robopolicy.core.storage import read_json, write_json
from robopolicy.evaluation.plots import open_loop_errors
from robopolicy.evaluation.report import Report, Section, film
from robopolicy.evaluation.world_model import HORIZONS
from robopolicy.runs import print_table
from robopolicy.verbs.bench_runs import conclude

Runs = Sequence[Mapping[str, Any]]


PRINTED = (*HORIZONS, 75, 100)
"""Horizons that tables show; all are in the figures."""


@dataclass(frozen=True)
class Experiment:
    """claim: what a paper says; measure: seed and a folder to keep models in -> figures; tables: figures of all seeds
    -> title, header, lines; images: figures of all seeds -> title, plot.
    """

    claim: str
    measure: Callable[[int, Path], dict[str, Any]]
    tables: Callable[[Runs], list[tuple[str, list[str], list[list[str]]]]]
    images: Callable[[Runs], list[tuple[str, str]]] = lambda runs: []


def trajectory_tables(runs: Runs) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return what guidance does, and what agents make of it."""
    length = min(len(found["error"]) for found in runs[0]["guidance"].values())
    shown = [step for step in (0, 7, 15, 30) if step < length]
    header = ["guidance", "log-likelihood of the target policy", *(f"error after {step + 1} steps" for step in shown)]
    lines = []
    for strength in runs[0]["guidance"]:
        found = [run["guidance"][strength] for run in runs]
        errors = [f"{np.mean([each['error'][step] for each in found]):.3f}" for step in shown]
        lines.append([strength, f"{np.mean([each['log_likelihood'] for each in found]):.3f}", *errors])
    ensemble = [f"{np.mean([run['ensemble']['error'][step] for run in runs]):.3f}" for step in shown]
    lines.append(["ensemble, step by step", "", *ensemble])
    agents = []
    for name in runs[0]["agents"]:
        found = [run["agents"][name] for run in runs]
        success = " ".join(f"{each['success']:.1%}" for each in found)
        returns = f"{np.mean([each['return'] for each in found]):.2f}" if "return" in found[0] else ""
        agents.append([name, f"{np.mean([each['success'] for each in found]):.1%}", success, returns])
    return [
        ("push_cube: on-policy, and true? Errors in standard deviations of the data.", header, lines),
        ("reach_planar: TD3+BC in the simulator", ["learns from", "success", "each seed", "mean return"], agents),
    ]


def planning_tables(runs: Runs) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return how true imagined rollouts are, and what exploring is worth."""
    header = ["decides", "error of imagined rollouts", "error of the model after exploring", "success exploring"]
    lines = []
    for name in runs[0]:
        cells = []
        for key in ("imagined_error", "model_error", "explored_success"):
            values = [run[name][key] for run in runs if key in run[name]]
            cells.append(f"{np.mean(values):.3f} ({' '.join(f'{value:.3f}' for value in values)})" if values else "")
        lines.append([name, *cells])
    title = "Mean (each seed), errors in standard deviations: imagined rollouts on push_cube, exploring on reach_planar"
    return [(title, header, lines)]


def style_tables(runs: Runs) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return how well the known look and unseen ones are read."""
    names = {"reward_error": ".3f", "success_f1": ".2f", "image": ".2f", "image_copied": ".2f"}
    read = "error of the reward", "F1 of success"
    header = ["learned from, examined in", *read, "PSNR 10 steps ahead, dB", "first frame repeated, dB"]
    lines = []
    for name in runs[0]:
        for look in runs[0][name]:
            each = [[run[name][look][key] for run in runs] for key in names]
            cells = [
                f"{np.mean(values):{form}} ({' '.join(f'{value:{form}}' for value in values)})"
                for values, form in zip(each, names.values(), strict=True)
            ]
            lines.append([f"{name}, {look}", *cells])
    return [("Mean (each seed); the reward's error is a share of its variance", header, lines)]


def joint_tables(runs: Runs) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the success of acting and planning."""
    lines = []
    for name in runs[0]:
        if isinstance(runs[0][name], Mapping):
            rates = [run[name] for run in runs]
            seeds = [f"{rate['success']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}]" for rate in rates]
            lines.append([name, f"{np.mean([rate['success'] for rate in rates]):.1%}", "  ".join(seeds)])
    return [("Success on reach_planar", ["learned from, and decides by", "mean", "each seed"], lines)]


def video_tables(runs: Runs) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return quality by horizon, and frames a second."""
    found = []
    for setting, figures in runs[0].items():
        title, arms = setting.replace("_", " "), [name for name in figures if name in (video.MODEL, *video.ABLATIONS)]
        header = ["steps ahead", *arms, "actions shuffled", "first frame"]
        cells = [*((arm, "model") for arm in arms), (video.MODEL, "shuffled"), (video.MODEL, "copy")]
        for name, unit in (("psnr", "PSNR (dB)"), ("ssim", "SSIM")):
            lines = []
            for horizon in (step for step in figures[video.MODEL][name] if int(step) in PRINTED):
                means = [np.mean([run[setting][arm][name][horizon][what] for run in runs]) for arm, what in cells]
                lines.append([horizon, *(f"{mean:.2f}" if name == "psnr" else f"{mean:.3f}" for mean in means)])
            found.append((f"{title}: {unit}, more is better", header, lines))
        speeds = [run[setting]["speed"] for run in runs]
        header = ["rows at a time", "one by one", "in chunks"]
        lines = [
            [rows, *(f"{np.mean([speed[rows][mode] for speed in speeds]):.1f}" for mode in header[1:])]
            for rows in speeds[0]
        ]
        found.append((f"{title}: generated frames a second, {figures['threads']} threads", header, lines))
    return found


def video_images(runs: Runs) -> list[tuple[str, str]]:
    """Return plots of quality against the horizon, of the first seed."""
    found = []
    for setting, figures in runs[0].items():
        cameras, title = figures[video.MODEL]["cameras"], setting.replace("_", " ")
        keys = sorted(next(iter(cameras.values())))
        found += [(f"{title}, following recorded actions: {key}", open_loop_errors(cameras, key)) for key in keys]
    return found


EXPERIMENTS = {
    "trajectories": Experiment(
        "Guided trajectories are more on-policy, truer than step-by-step rollouts, and good to learn from.",
        lambda seed, folder: trajectories.measure(seed, trajectories.Scale()),
        trajectory_tables,
    ),
    "planning": Experiment(
        "Cautious plans stay true in imagination, curious ones teach the model more.",
        lambda seed, folder: planning.measure(seed, planning.Scale()),
        planning_tables,
    ),
    "styles": Experiment(
        "A model that saw the same episodes in other looks reads unseen looks better.",
        lambda seed, folder: styles.measure(seed, styles.Scale()),
        style_tables,
    ),
    "joint": Experiment(
        "A model of actions, futures and values acts better with a look ahead; does it need to have seen failures?",
        lambda seed, folder: joint.measure(seed, joint.Scale()),
        joint_tables,
    ),
    "video": Experiment(
        "Imagined images follow their actions, far ahead, and memory helps a camera that moves.",
        lambda seed, folder: {name: video.measure(seed, scale, folder / name) for name, scale in video.SCALES.items()},
        video_tables,
        video_images,
    ),
}


def benchmark(config: Config) -> dict[str, Any]:
    """Run what is missing of one experiment, print its tables, write report.html, and return the figures."""
    name = config.bench.name
    experiment, root = EXPERIMENTS[name], config.run.root / "bench" / name
    runs = []
    for seed in config.bench.seeds:
        path = root / f"{seed}.json"
        if not path.exists():
            write_json(path, experiment.measure(seed, root / str(seed)))
        runs.append(read_json(path))
    report = Report(
        title=name.capitalize(), subtitle=f"{experiment.claim} {len(runs)} {'seed' if len(runs) == 1 else 'seeds'}."
    )
    for title, header, lines in experiment.tables(runs):
        report.sections.append(Section(title, header=header, rows=lines))
        print_table(title, header, lines)
    report.sections += [Section(title, svg=plot) for title, plot in experiment.images(runs)]
    for seed in config.bench.seeds:
        for folder in sorted({path.parent for path in (root / str(seed)).rglob("imagined.mp4")}):
            report.sections += film(folder)
    figures = {str(seed): run for seed, run in zip(config.bench.seeds, runs, strict=True)}
    conclude(config, root, report, figures)
    return figures
