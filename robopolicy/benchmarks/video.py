"""The latent video model at 64 px: action following, the effect of memory and bootstrapping, and speed.

It is trained on episodes of the expert at graded noise and evaluated on longer ones, in which success comes late or
never. Two fixed cameras show all of push_cube; the wrist camera of pick_place loses sight of the cube and finds it
again. Ablations share autoencoder and readout with the model; only their dynamics are trained separately.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.benchmarks.runs import each_seed
from robopolicy.core.episodes import Episodes
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.data.record import record, record_until
from robopolicy.evaluation.image_quality import SSIM, UNITS
from robopolicy.evaluation.plots import open_loop_errors
from robopolicy.evaluation.report import Section, embedded_video
from robopolicy.evaluation.video import above, write_video
from robopolicy.evaluation.world_model import HORIZONS, follow, open_loop
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit, fit_stages
from robopolicy.verbs.bench import Benchmark, Table
from sims.engine import MujocoWorld
from sims.experts import NOISE_LEVELS, NoisyController
from sims.registry import load_task
from worldmodels.checkpoint import load_world_model, save_world_model
from worldmodels.configuration import VideoConfig
from worldmodels.initial_states import context_at
from worldmodels.video.model import VideoModel

WORLDS = 32
"""Rows of the simulators that record."""

MODEL = "model"
ABLATIONS: dict[str, dict[str, Any]] = {"no memory": {"memory": 0}, "no bootstrapping": {"bootstrap_fraction": 0.0}}
"""Name -> what it changes about the model."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurement.

    task, cameras: the simulated scene; ablations: names; recorded: control steps of data; fit: training steps of the
    dynamics, in proportion to the other stages as in the model; rate: learning rate; noise: noise levels of the data;
    judged: evaluation episodes, from step `begin` for at least `followed` steps, at the noise levels judged_noise, with
    a time limit of `length`; horizons: of the comparison; filmed: episodes in the video; timed: number of frames for
    the speed measurement.
    """

    task: str = "push_cube"
    cameras: tuple[str, ...] = ("top", "front")
    ablations: tuple[str, ...] = ("no bootstrapping",)
    recorded: int = 20_000
    fit: int = 1500
    rate: float = 1.5e-3
    noise: tuple[str, ...] = ("low", "medium", "high", "random")
    judged: int = 32
    begin: int = 24
    followed: int = 50
    judged_noise: tuple[str, ...] = ("high", "random")
    length: int = 160
    horizons: tuple[int, ...] = (*range(1, 51), 60, 70, 80, 90, 100)
    filmed: int = 6
    timed: int = 50
    model: VideoConfig = field(default_factory=VideoConfig)


SCALES = {
    "fixed_cameras": Scale(),
    "wrist_camera": Scale(
        task="pick_place", cameras=("wrist",), ablations=("no memory",), noise=("high", "random"), recorded=16_000
    ),
}


def collect(seed: int, scale: Scale) -> Episodes:
    """Return episodes of the expert at graded noise, an equal share of the control steps at each level."""
    parts = []
    for level in scale.noise:
        with _player(seed, scale, level, "recorded") as play:
            parts.append(record_until(scale.recorded / len(scale.noise), play))
    return Episodes.concatenate(parts)


def judged_episodes(seed: int, scale: Scale) -> Episodes:
    """Return the first episodes at every level of judged_noise that are long enough."""
    selections, count = [], -(-scale.judged // len(scale.judged_noise))
    for level in scale.judged_noise:
        long: list[Episodes] = []
        with _player(seed, scale, level, "judged", scale.length) as play:
            while sum(map(len, long)) < count:
                part = play(len(long))
                long.append(part.select(part.lengths >= scale.begin + scale.followed))
        selections.append(Episodes.concatenate(long).select(torch.arange(count)))
    return Episodes.concatenate(selections)


@contextmanager
def _player(
    seed: int, scale: Scale, level: str, name: str, horizon: int | None = None
) -> Iterator[Callable[[int], Episodes]]:
    """Give a function turn -> episodes of the expert at a level of noise; horizon: another time limit."""
    task = load_task(scale.task)
    world = MujocoWorld(
        replace(task, horizon=horizon or task.horizon), WORLDS, seed=seed, cameras=scale.cameras, image_size=64
    )
    actor = NoisyController(task.expert(), NOISE_LEVELS[level], derive_seed(seed, f"{name}/{level}"), world.spec.action)
    yield lambda turn: record(world, actor, episode_seeds(seed, f"{name}/{level}/{turn}", WORLDS))
    world.close()


def trained(seed: int, scale: Scale, episodes: Episodes, folder: Path) -> dict[str, VideoModel]:
    """Return the model and its ablations, read from `folder` or trained and stored there."""
    task = load_task(scale.task)
    world = MujocoWorld(task, 1, cameras=scale.cameras, image_size=64)
    spec, models = world.spec, {}
    world.close()
    settings = FitConfig(steps=scale.fit, learning_rate=scale.rate, checkpoint_every=500)
    for arm in (MODEL, *scale.ablations):
        run = RunFolder(folder / arm.replace(" ", "_"))
        if (run.checkpoint / "config.json").exists():
            models[arm] = load_world_model(run.checkpoint)
            continue
        config = replace(scale.model, **ABLATIONS.get(arm, {}))
        model = VideoModel.build(config, spec, episodes, derive_seed(seed, "video"))
        generators = Generators(seed)
        if arm == MODEL:
            fit_stages(model, episodes, settings, generators, run)
        else:
            model.autoencoder.load_state_dict(models[MODEL].autoencoder.state_dict())
            model.reader.load_state_dict(models[MODEL].reader.state_dict())
            part, _ = model.stages()["dynamics"]
            batches = part.batches(episodes, generators["dynamics batches"])
            fit(part, batches, settings, generators, run=run, label=f"dynamics, {arm}")
        save_world_model(model.eval(), run.checkpoint)
        models[arm] = model
    return models


@torch.no_grad()
def speed(model: VideoModel, episodes: Episodes, rows: int, frames: int) -> dict[str, float]:
    """Return generated frames per second (all cameras count as one frame), one by one and in chunks, with batch size
    `rows`.
    """
    begin = episodes.starts[:1].expand(rows)
    latent = model.initial(context_at(episodes, begin, model.context), np.arange(rows))
    actions = episodes.actions[begin[:, None] + torch.arange(frames)]
    rates = {}
    for name, steps in (("one by one", 1), ("in chunks", model.config.chunk)):
        latents, _ = model.generate(latent, actions[:, :steps])
        start, done = time.perf_counter(), 0
        while done < frames:
            part = actions[:, done : done + steps]
            latents, _ = model.generate(latents, part)
            done += part.shape[1]
        rates[name] = rows * frames / (time.perf_counter() - start)
    return rates


def averaged(figures: dict[str, dict[str, dict[str, float]]], ending: str) -> dict[str, dict[str, float]]:
    """Return horizon -> image metrics, averaged over cameras; ending: of their keys, SSIM or "" for PSNR."""
    means = {}
    for horizon, by_key in figures.items():
        rows = [
            value
            for key, value in by_key.items()
            if key.startswith(IMAGE_PREFIX) and (key.endswith(ending) if ending else not key.endswith(tuple(UNITS)))
        ]
        means[horizon] = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return means


def measure(seed: int, scale: Scale, folder: Path) -> dict[str, Any]:
    """Return PSNR and SSIM by horizon of the model, its ablations, shuffled actions and copying the first frame, and
    frames per second.
    """
    models = trained(seed, scale, collect(seed, scale), folder)
    held_out = judged_episodes(seed, scale)
    begin = held_out.starts + scale.begin
    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "speed": {}}
    for arm, model in models.items():
        generator = torch.Generator().manual_seed(derive_seed(seed, "judge"))
        errors = open_loop(model, held_out, generator, len(begin), scale.horizons, begin)
        figures[arm] = {"psnr": averaged(errors, ""), "ssim": averaged(errors, SSIM), "cameras": errors}
        sizes = {name: sum(value.numel() for value in part.parameters()) for name, part in model.named_children()}
        figures[arm] |= {"parameters": sizes, "ages": list(model.config.history_offsets)}
    model = models[MODEL]
    remaining = held_out.lengths - scale.begin
    figures["rows"] = {str(horizon): int((remaining >= horizon).sum()) for horizon in scale.horizons}
    for rows in (1, 16):
        figures["speed"][str(rows)] = speed(model, held_out, rows, scale.timed)
    longest = remaining.argsort(descending=True, stable=True)[: scale.filmed]
    frames = follow(model, held_out, begin[longest], min(max(scale.horizons), int(remaining[longest].min())))
    write_video(above(frames.real, frames.imagined, model.spec.fps), folder / "imagined.mp4")
    return figures


SHOWN = (*HORIZONS, 75, 100)
"""Horizons in the tables; all are in the figures."""


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return quality by horizon, and generated frames per second, means over the seeds."""
    runs, result_tables = list(figures["seeds"].values()), []
    for setting, first in runs[0].items():
        title, arms = setting.replace("_", " "), [name for name in first if name in (MODEL, *ABLATIONS)]
        columns = [*((arm, "model") for arm in arms), (MODEL, "shuffled"), (MODEL, "copy")]
        header = ["frames ahead", *arms, "told other actions", "first frame repeated"]
        for name, unit, digits in (("psnr", "PSNR in dB", 1), ("ssim", "SSIM", 3)):
            lines = []
            for horizon in (step for step in first[MODEL][name] if int(step) in SHOWN):
                means = [np.mean([run[setting][arm][name][horizon][source] for run in runs]) for arm, source in columns]
                lines.append([horizon, *(f"{mean:.{digits}f}" for mean in means)])
            result_tables.append(Table(f"{title}: {unit}, more is better, mean of {len(runs)} seeds", header, lines))
        speeds = [run[setting]["speed"] for run in runs]
        header = ["episodes at a time", "one by one", "in chunks"]
        lines = [
            [rows, *(f"{np.mean([speed[rows][mode] for speed in speeds]):.0f}" for mode in header[1:])]
            for rows in speeds[0]
        ]
        result_tables.append(Table(f"{title}: generated frames a second", header, lines))
    return result_tables


def sections(figures: Mapping[str, Any], root: Path) -> list[Section]:
    """Return plots of quality against the horizon for the first seed, and the videos of all."""
    plots = []
    for setting, first in next(iter(figures["seeds"].values())).items():
        cameras, title = first[MODEL]["cameras"], setting.replace("_", " ")
        keys = sorted(next(iter(cameras.values())))
        plots += [
            Section(f"{title}, following recorded actions: {key}", svg=open_loop_errors(cameras, key)) for key in keys
        ]
    for seed in figures["seeds"]:
        for folder in sorted({path.parent for path in (root / seed).rglob("imagined.mp4")}):
            plots += embedded_video(folder)
    return plots


BENCHMARK = Benchmark(
    "Do imagined images follow their actions over long horizons, and does memory help when the camera moves?",
    ("seeds",),
    each_seed(
        lambda seed, folder: {name: measure(seed, scale, folder / name) for name, scale in SCALES.items()},
    ),
    tables,
    sections,
    frozenset({"cameras", "parameters", "ages"}),
)
