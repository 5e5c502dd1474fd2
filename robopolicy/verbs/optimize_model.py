"""`optimize` for world models: choose a block cache over denoising steps and store it next to the checkpoint."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from robopolicy.configuration import Config
from robopolicy.configuration.sections.act import OptimizeSection
from robopolicy.core.delayed import episodes_for_model
from robopolicy.core.episodes import Episodes, require_recorded
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import origin_of, renaming_of
from robopolicy.core.progress import progress
from robopolicy.core.randomness import derive_seed
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.tables import way_rows, ways_header
from robopolicy.inference.caching import CachePlan
from robopolicy.inference.calibration import calibrate_model
from robopolicy.inference.comparison import Timing
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.plan import InferencePlan, device_name, save_plan, weights_hash
from robopolicy.inference.schedules import plans_to_try
from robopolicy.runs import finish, open_fresh_run, output, print_table
from worldmodels.checkpoint import load_world_model
from worldmodels.initial_states import context_at
from worldmodels.protocol import Cacheable, ChunkModel, Latent, LearnedModel, fields_read

SECTIONS = ("run", "world", "optimize")
REFERENCE = "reference"
CHANGE = "change"
"""Unit of the errors: change between the imagined images and the initial one."""


@dataclass(frozen=True)
class Chains:
    """Initial latents of N chains and the recorded actions that they imagine: [N, T, A]."""

    latent: Latent
    actions: Tensor

    def first(self, count: int) -> "Chains":
        """Return the first `count` chains, repeating them when there are fewer."""
        rows = torch.arange(count) % len(self.actions)
        return Chains({name: value[rows] for name, value in self.latent.items()}, self.actions[rows])

    def imagined(self, model: ChunkModel) -> dict[str, Tensor]:
        """Return the images that a model imagines, camera key -> [N, T, height, width, 3]."""
        steps = model.generate(self.latent, self.actions)[1]
        keys = [key for key in steps[0].observation if key.startswith(IMAGE_PREFIX)]
        return {key: torch.stack([step.observation[key] for step in steps], 1).float() for key in keys}


def optimize_model(config: Config, path: Path, device: torch.device) -> int:
    """Calibrate, time and compare, choose and store; raises ConfigError for a model without cacheable steps."""
    section, model = config.optimize, load_world_model(path, device)
    if not isinstance(model, Cacheable) or not isinstance(model, ChunkModel):
        raise ConfigError(f"{path} contains a world model without denoising steps: there is nothing to optimize.")
    if section.evaluate_episodes:
        raise ConfigError(
            f"{path} contains a world model, which has no success rate of its own: leave "
            "optimize.evaluate_episodes=0, and compare policies in it with 'robopolicy rank'."
        )
    folder = open_fresh_run(config, "optimize", SECTIONS)
    episodes = _recorded(section, path, model)
    steps = model.chunk
    begin = _starts(episodes, section.observations, steps, config.run.seed)
    plans = plans_for(section, model, episodes, begin)
    models = {REFERENCE: model, **{name: model.with_caching(plan) for name, plan in plans.items()}}
    chains = _chains(model, episodes, begin, steps)
    chunk_models = cast(Mapping[str, ChunkModel], models)
    errors = errors_of(chunk_models, chains, _present(episodes, begin))
    times = _timed(chunk_models, chains.first(section.batch_size), section.rounds)
    fastest = min(
        (name for name in models if errors[name] <= section.max_action_error), key=lambda name: times[name].least
    )
    rows = {
        name: {
            "error": errors[name],
            **times[name].to_json(),
            "times_as_fast": times[REFERENCE].least / times[name].least,
            "block_share": plans[name].share if name in plans else 1.0,
        }
        for name in models
    }
    subject = f"{steps} imagined steps"
    print_table(subject, ways_header(CHANGE), way_rows(rows, fastest))
    plan = InferencePlan(
        InferenceConfig(),
        weights_hash(path),
        plans.get(fastest),
        device=device_name(device),
        batch=section.batch_size,
        measured=rows[fastest],
    )
    save_plan(path, plan)
    labels = {"measured": subject, "error_of": CHANGE}
    finish(config, folder, {"checkpoint": str(path), "chosen": fastest, "ways": rows, "left_out": {}, **labels})
    output.print(
        f"Chosen: {fastest}, {rows[fastest]['times_as_fast']:.1f}x faster than the reference; saved in "
        f"{path / 'inference.json'}."
    )
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0


def plans_for(section: OptimizeSection, model: Cacheable, episodes: Episodes, begin: Tensor) -> dict[str, CachePlan]:
    """Return the block caches to test, by name, calibrated from just before the actions `begin` [N]."""
    budgets = [budget for budget in section.budgets if 2 < budget < model.calls]
    if not budgets or not section.schedulers:
        output.print(
            f"This model calls its network {model.calls} times per denoising chain, which no block cache with "
            f"optimize.budgets={list(section.budgets)} can reduce."
        )
        return {}
    calibration = calibrate_model(model, episodes, begin, model.chunk)
    return plans_to_try(calibration, section.schedulers, budgets, section.orders)


def _recorded(section: OptimizeSection, path: Path, model: LearnedModel) -> Episodes:
    """Return the episodes whose actions are imagined: those given, or the model's training data."""
    folders = section.data or (path.parent / "dataset",)
    for folder in folders:
        if not folder.exists():
            raise ConfigError(f"{folder} does not exist: set recorded episodes with optimize.data=[FOLDER].")
    cameras = [key.removeprefix(IMAGE_PREFIX) for key in fields_read(model) if key.startswith(IMAGE_PREFIX)]
    datasets = [read_dataset(folder, cameras=cameras, rename=renaming_of(model)) for folder in folders]
    episodes = Episodes.concatenate(
        [episodes_for_model(fields_read(model), origin_of(model), part) for part in datasets]
    )
    require_recorded("the recorded data", episodes, fields_read(model), model.spec.action, "world model")
    return episodes


def _starts(episodes: Episodes, count: int, steps: int, seed: int) -> Tensor:
    """Return up to `count` recorded steps [N] that are followed by at least one chain length of recorded steps."""
    all_steps = torch.arange(episodes.step_count)
    remaining = (episodes.starts + episodes.lengths)[episodes.episode_of_step] - all_steps
    fitting = all_steps[remaining >= steps]
    if not len(fitting):
        raise ConfigError(f"No recorded episode is as long as an imagined chain, {steps} steps.")
    draws = torch.Generator().manual_seed(derive_seed(seed, "optimize"))
    return fitting[torch.randperm(len(fitting), generator=draws)[:count]]


def _chains(model: Cacheable, episodes: Episodes, begin: Tensor, steps: int) -> Chains:
    context = int(getattr(model, "context", 1))
    latent = model.initial(context_at(episodes, begin, context), begin.numpy())
    actions = episodes.actions[begin[:, None] + torch.arange(steps)]
    return Chains(latent, actions.to(next(iter(latent.values())).device))


def _present(episodes: Episodes, begin: Tensor) -> dict[str, Tensor]:
    """Return the initial images of the chains, camera key -> [N, height, width, 3]."""
    frames = begin + episodes.episode_of_step[begin]
    return {key: value[frames] for key, value in episodes.observation.items() if key.startswith(IMAGE_PREFIX)}


def errors_of(models: Mapping[str, ChunkModel], chains: Chains, present: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative image error of each model: RMS pixel difference from the reference, divided by the RMS change
    of the reference's images since the present image; 1 is as wrong as an image that does not change.
    """
    images_of: dict[str, dict[str, Tensor]] = {}
    with progress("Comparing", len(models)) as advance:
        for name, model in models.items():
            images_of[name] = chains.imagined(model)
            advance()
    reference_images = images_of[REFERENCE]
    change = sum(
        float((value - present[key][:, None].to(value)).square().sum()) for key, value in reference_images.items()
    )
    return {
        name: (
            sum(float((each[key] - reference_images[key]).square().sum()) for key in reference_images)
            / max(change, 1e-12)
        )
        ** 0.5
        for name, each in images_of.items()
    }


def _timed(models: Mapping[str, ChunkModel], chains: Chains, rounds: int) -> dict[str, Timing]:
    """Return the seconds per chunk by model, timed in turns; the first call of each is not counted."""
    seconds_of: dict[str, list[float]] = {name: [] for name in models}
    with progress("Timing", rounds) as advance:
        for turn in range(rounds + 1):
            for name, model in models.items():
                began = time.perf_counter()
                model.generate(chains.latent, chains.actions)
                if chains.actions.device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    seconds_of[name].append(time.perf_counter() - began)
            advance() if turn else None
    return {name: Timing(np.array(values)) for name, values in seconds_of.items()}
