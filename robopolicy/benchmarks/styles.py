"""Sword's question: does a model trained on the same episodes in several looks read an unseen look better?

Pixel diffusion sees a robot's joints and a camera's image; where the cube is, the image alone tells. One model
learns from one look, another from the same episodes filmed in several, with as many training steps. Both are examined
on held-out episodes, in the look that both know and in looks that neither does. (A recurrent model, which draws
images from its latent alone, was tried: it is no match for repeating the first frame, in any look.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from robopolicy.benchmarks.rates import mean_text
from robopolicy.benchmarks.replay import TASK
from robopolicy.benchmarks.runs import each_seed, expert
from robopolicy.core.episodes import Episodes
from robopolicy.core.randomness import Generators, derive, episode_seeds
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, WorldSpec
from robopolicy.data.record import record
from robopolicy.data.restyle import restyled
from robopolicy.evaluation.world_model import one_step, open_loop
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from robopolicy.verbs.bench import Benchmark, Table
from sims.engine import MujocoWorld
from sims.registry import load_task
from worldmodels.pixel_diffusion.configuration import PixelDiffusionConfig
from worldmodels.pixel_diffusion.model import PixelDiffusionModel

CAMERA = "top"
UNSEEN = 1000
"""Looks from this number on are for the examination alone."""


@dataclass(frozen=True)
class Scale:
    """episodes, held_out: recorded; looks: besides the plain one, of the model that sees many; unseen: of the
    examination; pixels: a side; fit: training steps; horizon: steps that recorded actions are followed.
    """

    episodes: int = 400
    held_out: int = 50
    looks: int = 6
    unseen: int = 4
    pixels: int = 32
    fit: int = 1500
    horizon: int = 10
    model: PixelDiffusionConfig = field(
        default_factory=lambda: PixelDiffusionConfig(first_share=1.0, edm=replace(PixelDiffusionConfig().edm, steps=1))
    )


def measure(seed: int, scale: Scale) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by model and look, errors of reward and image and the score of the success head."""
    world = camera_world(scale, seed)
    played = [record(world, expert(world, noise, derive(seed, str(noise))), seeds(seed, noise)) for noise in (0.3, 1.0)]
    episodes = without_cube_state(Episodes.concatenate([part.select(range(scale.episodes // 2)) for part in played]))
    held = [part.select(range(scale.episodes // 2, (scale.episodes + scale.held_out) // 2)) for part in played]
    held_out = without_cube_state(Episodes.concatenate(held))
    looks = [restyled(camera_world(scale, seed, style), episodes) for style in range(1, scale.looks + 1)]
    unseen = [restyled(camera_world(scale, seed, style), held_out) for style in range(UNSEEN, UNSEEN + scale.unseen)]
    spec = replace(world.spec, observation=without_cube(world.spec))
    found = {}
    for name, training in {"one look": episodes, "many looks": Episodes.concatenate([episodes, *looks])}.items():
        model = PixelDiffusionModel.build(scale.model, spec, training, derive(seed, "model"))
        fit_stages(
            model, training, FitConfig(steps=scale.fit, learning_rate=1e-3, checkpoint_every=10**9), Generators(seed)
        )
        model.calibrate(training)
        model.eval()
        found[name] = {"the plain look": examine_look(model, held_out, scale)}
        found[name]["unseen looks"] = mean_of([examine_look(model, look, scale) for look in unseen])
    world.close()
    return found


def camera_world(scale: Scale, seed: int, style: int = 0) -> MujocoWorld:
    """Return push_cube filmed from above, in the look number `style`."""
    return MujocoWorld(load_task(TASK), 64, seed=seed, cameras=(CAMERA,), image_size=scale.pixels, style=style)


def seeds(seed: int, noise: float) -> np.ndarray:
    """Return episode seeds [512], the same for every look."""
    return episode_seeds(seed, f"styles/{noise}", 512)


def without_cube(spec: WorldSpec) -> dict[str, Any]:
    """Return the fields that a robot with a camera has."""
    return {key: field for key, field in spec.observation.items() if key != ENVIRONMENT_STATE}


def without_cube_state(episodes: Episodes) -> Episodes:
    """Return `episodes` without the cube's true place."""
    kept = {key: value for key, value in episodes.observation.items() if key != ENVIRONMENT_STATE}
    fields = {key: value for key, value in episodes.observation_fields.items() if key != ENVIRONMENT_STATE}
    return replace(episodes, observation=kept, observation_fields=fields)


def examine_look(model: PixelDiffusionModel, episodes: Episodes, scale: Scale) -> dict[str, float]:
    """Return the errors of reward and image of a model on episodes in one look, and the F1 of its success head."""
    single = one_step(model, episodes, torch.Generator().manual_seed(0), 4000)
    followed = open_loop(model, episodes, torch.Generator().manual_seed(0), 256, (scale.horizon,))[str(scale.horizon)]
    return {
        "reward_error": float(single["reward_error"]),
        "success_f1": float(single["success"]["f1"]),
        "image": followed[IMAGE_PREFIX + CAMERA]["model"],
        "image_copied": followed[IMAGE_PREFIX + CAMERA]["copy"],
    }


def mean_of(each: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of every figure."""
    return {name: sum(found[name] for found in each) / len(each) for name in each[0]}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return how well the known look and unseen ones are read."""
    digits = {"reward_error": 3, "success_f1": 2, "image": 2, "image_copied": 2}
    read = "error of the reward", "F1 of success"
    header = ["learned from, examined in", *read, "PSNR 10 steps ahead, dB", "first frame repeated, dB"]
    runs = list(figures["seeds"].values())
    lines = []
    for name, looks in runs[0].items():
        for look in looks:
            cells = [mean_text([run[name][look][key] for run in runs], count) for key, count in digits.items()]
            lines.append([f"{name}, {look}", *cells])
    return [Table("Mean (each seed); the reward's error is a share of its variance", header, lines)]


BENCHMARK = Benchmark(
    "Does a model that saw the same episodes in other looks read unseen looks better?",
    ("seeds",),
    each_seed(lambda seed, folder: measure(seed, Scale())),
    tables,
)
