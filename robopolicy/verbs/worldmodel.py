"""Trains a world model on recorded episodes and fresh rollouts that include failures, and evaluates it.

Data: worldmodel.data (default: the output of collect), then rollouts of the expert (or collect.controller) at every
level of worldmodel.noise, at play, and of worldmodel.policies, until there are worldmodel.transitions control steps.
worldmodel.include_base adds the policy that train saved. world=demonstrations allows no rollouts. All data is stored
next to the model. The report compares open-loop errors with shuffled actions and with copying the first frame, and
gives precision and recall of the learned success head, and the success of each recorded policy and expert beside that
in imagination. For models of images it includes a video of recorded and imagined episodes.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from robopolicy.building.behaviours import Behaviour, imagined_success, warnings_of
from robopolicy.building.origins import origin_of_section
from robopolicy.building.policies import load_policy
from robopolicy.building.worlds import build_noisy_expert, build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.run import DEMONSTRATIONS
from robopolicy.core.delayed import episodes_for_world
from robopolicy.core.episodes import Episodes, require_recorded, select_episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import prefix_errors, remember_origin, remember_renaming
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.regression import DividesBatches
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import IMAGE_PREFIX, WorldSpec, cameras_of, require_fit
from robopolicy.core.storage import recover_folder
from robopolicy.core.world import World
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.lerobot_reading import require_known
from robopolicy.data.record import record, record_until
from robopolicy.data.restyle import restyled
from robopolicy.evaluation.image_quality import unit_of
from robopolicy.evaluation.intervals import plus_minus
from robopolicy.evaluation.report import IMAGINED
from robopolicy.evaluation.tables import element_table
from robopolicy.evaluation.video import above, write_video
from robopolicy.evaluation.world_model import examine, follow, images_imagined
from robopolicy.runs import default_path, input_path, output, print_table, runs_of
from robopolicy.training.fit import fit_stages
from robopolicy.verbs.job import Job, say_replicas
from robopolicy.verbs.verb import Verb
from sims.play import PLAY, behaviour_name, can_play
from worldmodels.checkpoint import save_world_model
from worldmodels.protocol import LearnedModel, fields_read
from worldmodels.registry import WORLD_MODELS

VERB = Verb(
    summary="Train a world model on demonstrations and rollouts",
    sections=("run", "world", "collect", "worldmodel"),
    example="robopolicy worldmodel recipe=push_cube",
    targets=("worldmodel.data",),
    lists=("worldmodel.data",),
    world_from={"worldmodel.data": "collect/dataset"},
    resumes=True,
    replicas=True,
)

PLAY_FRACTION = 0.4
"""Of the missing steps, in which the expert plays for a model of latents."""

MOSTLY = 0.9
"""Fraction of successful recordings beyond which a model has too few failures to learn from."""

FILMED = 6
"""Number of episodes in the video."""


def run(config: Config) -> int:
    """Collect data, train, calibrate, evaluate and save the world model."""
    job = Job.open(config, "worldmodel", VERB.sections, "is already trained; run.overwrite=true trains again.")
    if job is None:
        return 0
    section = config.worldmodel
    folder, device = job.folder, job.device
    generators = Generators(config.run.seed, device)
    world = build_world(config.world, seed=config.run.seed)
    require_learnable_success(world.spec)
    episodes, behaviours = gather(config, world, generators["rollouts"])
    origin = origin_of_section(config.world)
    if not job.is_over:
        write_dataset(episodes, folder.path / "dataset", images="png", existing="replace", origin=origin)
    training, validation = episodes.split(0.1, torch.Generator().manual_seed(derive_seed(config.run.seed, "split")))
    training = in_other_styles(config, training)
    seed = derive_seed(config.run.seed, "world model weights")
    model = WORLD_MODELS.builds(section.kind).build(section.config, world.spec, training, seed).to(device)
    remember_origin(model, origin)
    remember_renaming(model, section.rename)
    imagined_success(config.world, model, (), 0, 0)  # raises now what would be raised after training
    note_unread_cameras(config, model)
    world.close()
    say_replicas(0, "batch", "", noise=not isinstance(model, DividesBatches))
    clock = folder.clock()
    fit_results = fit_stages(model, training, section.fit, generators, folder)
    if job.is_over:
        return 0
    seconds = clock.seconds
    model.calibrate(validation)
    rows, steps = section.validation_episodes, section.validation_steps
    success = episodes.success
    count = section.behaviour_episodes
    imagined = imagined_success(config.world, model, behaviours if count else (), count, config.run.seed)
    result = {
        "episodes": len(episodes),
        "success_rate": float(success.float().mean()) if success is not None else None,
        "losses": {name: value for each in fit_results for name, value in each.losses.items()},
        "seconds": seconds,
        "validation": examine(model, validation, generators["examine"], rows=rows, steps=steps),
        "behaviours": imagined,
    }
    save_world_model(model, folder.checkpoint)
    film(model, validation, folder)
    show(result["validation"])
    show_behaviours(imagined)
    job.finish(result, "World model")
    return 0


def require_learnable_success(spec: WorldSpec) -> None:
    """Raise ConfigError when success depends on a return of environment rewards that a world model does not learn."""
    if spec.least_return is not None and spec.rewards != ("reward",):
        raise ConfigError(
            f"'{spec.name}' defines success by the environment's own rewards ({spec.success}), but a world model "
            f"learns the world's rewards, {' and '.join(spec.rewards)}. Either use the environment's, "
            "world.options.reward=environment, or define success from observations, "
            "world.options.success=package.module:function."
        )


def note_unread_cameras(config: Config, model: LearnedModel) -> None:
    """Print which of the cameras that were asked for a model does not read, and one that does."""
    unread = [camera for camera in config.world.cameras if camera not in cameras_of(fields_read(model))]
    if unread:
        output.print(
            f"Note: worldmodel.kind={config.worldmodel.kind} does not read the images of {', '.join(unread)}, so "
            "policies of pixels cannot act in it: worldmodel.kind=latent_ensemble does.",
            soft_wrap=True,
        )


def gather(config: Config, world: World, generator: torch.Generator) -> tuple[Episodes, list[Behaviour]]:
    """Return recorded episodes and, if steps are missing, fresh rollouts in equal numbers from each source; and what
    acted in those rollouts.
    """
    section, seed = config.worldmodel, config.run.seed
    paths = section.data or (default_path(config, "collect", "dataset", None, "worldmodel.data"),)
    require_known(section.rename, paths)
    datasets = [read_dataset(path, cameras=config.world.cameras, rename=section.rename) for path in paths]
    datasets[0] = select_episodes(datasets[0], paths[0], "worldmodel", section.episodes, section.exclude_episodes)
    parts = [episodes_for_world(config.world.options, each) for each in datasets]
    for path, part in zip(paths, parts, strict=True):
        fields = {key: field for key, field in world.spec.observation.items() if key in part.observation_fields}
        require_recorded(path, part, fields, world.spec.action, "world")
    if config.world.name == DEMONSTRATIONS:  # where nothing new can be played
        return Episodes.concatenate(parts), []
    steps_missing = section.transitions - sum(part.step_count for part in parts)
    if steps_missing <= 0:
        recorded = Episodes.concatenate(parts)
        warn_of_successes(recorded, section.transitions)
        return recorded, []
    policies = section.policies
    if section.include_base:
        policies = tuple(dict.fromkeys((base_of(config), *policies)))
    actors: list[Any] = [load_policy(path, generator.device) for path in policies]
    names = runs_of(policies)
    for actor in actors:  # before any is played
        with prefix_errors(actor):
            require_fit(actor.spec, world.spec)
    past = max([world.spec.history, *(actor.spec.history for actor in actors)])
    remembering = replace(config.world, options={**config.world.options, "history": past})
    stage = world if past == world.spec.history else build_world(remembering, seed=seed)
    for level in section.noise:
        chance = derive_seed(seed, f"worldmodel/noise/{level}")
        actors.append(build_noisy_expert(config.world, stage, level, chance, config.collect.controller))

    def play(turn: int, index: int) -> Episodes:
        seeds = episode_seeds(seed, f"worldmodel/{index}/{turn}", stage.batch_size)
        return record(stage, actors[index], seeds, generator=generator)

    names += [behaviour_name(level) for level in section.noise]
    plays = play_fraction(config, world.spec)
    noisy_steps = round((1 - plays) * steps_missing) if actors else 0
    shares = [noisy_steps // max(1, len(actors))] * len(actors)
    if plays:
        seed_of_play = derive_seed(seed, f"worldmodel/noise/{PLAY}")
        actors.append(build_noisy_expert(config.world, stage, PLAY, seed_of_play, config.collect.controller))
        names.append(behaviour_name(PLAY))
        shares.append(steps_missing - noisy_steps)
    behaviours = [
        Behaviour(names[index], actors[index], record_until(share, partial(play, index=index)))
        for index, share in enumerate(shares)
        if share
    ]
    if stage is not world:
        stage.close()
    return Episodes.concatenate([*parts, *(each.episodes for each in behaviours)]), behaviours


def warn_of_successes(recorded: Episodes, transitions: int) -> None:
    """Warn when recordings nearly all succeed and leave no room for rollouts that fail."""
    rate = 0.0 if recorded.success is None else float(recorded.success.float().mean())
    if rate > MOSTLY:
        steps = recorded.step_count
        output.print(
            f"Warning: {rate:.0%} of the recorded episodes succeed, and their {steps} steps leave none of "
            f"worldmodel.transitions={transitions} to policies, noisy experts and play. A model that never saw a "
            f"failure flatters policies: set worldmodel.transitions={2 * steps}, or record failures."
        )


def play_fraction(config: Config, spec: WorldSpec) -> float:
    """Return the fraction of missing steps in which the expert plays; by default that of a model of latents, if there
    are noisy experts and the world names goals.
    """
    section = config.worldmodel
    if section.play is not None:
        return section.play
    return PLAY_FRACTION if section.kind == "latent_ensemble" and section.noise and can_play(spec) else 0.0


def base_of(config: Config) -> Path:
    """Return the checkpoint of `train` with the same name and seed; ConfigError when it does not exist."""
    path = input_path(config, "train") / "checkpoint"
    if not recover_folder(path).exists():
        raise ConfigError(
            f"{path} does not exist, and worldmodel.include_base=true needs its rollouts: create it with 'robopolicy "
            "train', or set worldmodel.include_base=false."
        )
    return path


def in_other_styles(config: Config, episodes: Episodes) -> Episodes:
    """Return `episodes` plus copies in other visual styles, if configured."""
    parts = [episodes]
    for style in range(1, config.worldmodel.visual_styles + 1):
        options = {**config.world.options, "style": style}
        world = build_world(replace(config.world, options=options), seed=config.run.seed)
        parts.append(restyled(world, episodes))
        world.close()
    return Episodes.concatenate(parts)


def film(model: LearnedModel, episodes: Episodes, folder: RunFolder) -> None:
    """Write imagined.mp4 if the model imagines images: the longest of `episodes`, real and imagined."""
    if not images_imagined(model):
        return
    longest = episodes.lengths.argsort(descending=True, stable=True)[:FILMED]
    rollout = follow(model, episodes, episodes.starts[longest], int(episodes.lengths[longest].max()))
    write_video(above(rollout.real, rollout.imagined, model.spec.fps), folder.path / f"{IMAGINED}.mp4")


def show_behaviours(figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Print recorded and imagined success by behaviour, and a warning for each that differs."""
    if figures:
        rows = [[name, f"{row['recorded']:.1%}", f"{row['imagined']:.1%}"] for name, row in figures.items()]
        print_table("Success of recorded behaviours", ["behaviour", "recorded", "imagined"], rows)
    for warning in warnings_of(figures):
        output.print(f"Warning: {warning}", markup=False, soft_wrap=True)


def show(validation: Mapping[str, Any]) -> None:
    """Print the metrics that show whether the model is reliable."""
    success = validation["success"]
    output.print(
        f"Reward error {plus_minus(validation['reward_error'], '.3f')} of the variance; success head precision "
        f"{plus_minus(success['precision'], '.2f')}, recall {plus_minus(success['recall'], '.2f')}"
    )
    if not success["positives"]:
        output.print(
            "No held-out step is a success, so the success head cannot be evaluated: add successful episodes "
            "(worldmodel.data=[DATASET])."
        )
    keys = sorted({key for figures in validation["open_loop"].values() for key in figures})
    for key in keys:
        unit = unit_of(key) if key.startswith(IMAGE_PREFIX) else "error in standard deviations, lower is better"
        lines = [
            [steps, *(f"{figures[key][name]:.3f}" for name in ("model", "shuffled", "copy"))]
            for steps, figures in validation["open_loop"].items()
        ]
        print_table(f"{key}: {unit}", ["steps ahead", "model", "actions shuffled", "first frame repeated"], lines)
    if errors := validation.get("elements"):
        print_table("Error after so many imagined steps (in brackets: first frame repeated)", *element_table(errors))
