"""Builds worlds and their non-learning parts: experts and other controllers, and critics of the world's state.

A world is a vectorised environment: a simulator, recorded demonstrations, or a learned world model ("imagination").
"""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.building.planning import load_imagining
from robopolicy.building.policies import adapt_policy_to_world, model_for, require_readable
from robopolicy.configuration import Config
from robopolicy.configuration.sections.learn import CRITIC_DEPTH, FinetuneSection
from robopolicy.configuration.sections.run import DEMONSTRATIONS, WORLD_MODEL, ImaginationSection, WorldSection
from robopolicy.core.delayed import episodes_for_model, latency_in, steps_ahead, with_latency_of, without_latency
from robopolicy.core.episodes import Episodes, require_recorded
from robopolicy.core.errors import (
    CameraError,
    ConfigError,
    RobopolicyError,
    RobopolicyNote,
    RobopolicyWarning,
    SpecError,
)
from robopolicy.core.faulty import with_faults_of, without_faults
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.origin import WorldOrigin, origin_of, prefix_errors, renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import derive_seed
from robopolicy.core.returns import SUCCESS
from robopolicy.core.scheduled import KINDS, SCHEDULES_OPTION
from robopolicy.core.spec import (
    DEFAULT_IMAGE_SIZE,
    IMAGE_PREFIX,
    LATENCY,
    QUEUE,
    TASK,
    Field,
    WorldSpec,
    cameras_of,
    image_options,
    image_sizes,
    image_sizes_of,
    images_of,
    require_consistent_fields,
    require_fit,
)
from robopolicy.core.world import Controller, Snapshots, World
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.data.lookahead import LookaheadController
from robopolicy.policies.abilities import MapsFeatures
from robopolicy.rl.critic import Critic, state_critic
from robopolicy.success.classifier import require_input, shared_classifier
from robopolicy.success.world import with_classifier
from robopolicy.training.schedules import load_critic, schedule_by
from sims.controllers import load_controller
from sims.experts import Noise, NoisyController, noise_level
from sims.names import suite_of
from sims.play import PLAY, FaultyController, PlayingController, fault_of
from sims.recorded import DemonstratedWorld
from sims.registry import load_task, make_expert, make_saved_world, make_world
from worldmodels.env import ImaginedWorld, StateCriterion, Truncation
from worldmodels.initial_states import keyframes, recorded_starts
from worldmodels.protocol import Context, LearnedModel, Starts, WorldModel, fields_read
from worldmodels.readout import HasReadout


def build_world(
    section: WorldSection,
    policy: Policy | None = None,
    *,
    batch_size: int | None = None,
    episodes: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    filmed: bool = False,
) -> World:
    """Return the world that `section` names, with the history length, cameras and image size that `policy` needs.

    It has `batch_size` parallel environments (default the section's), but not more than `episodes`. filmed: add the
    section's own cameras to the policy's, for recordings. "worldmodel" needs `world.model`, a checkpoint. Unless the
    section says otherwise, its episodes start in initial states of the simulator it was trained on, so equal seeds give
    equal initial states in both. That simulator is `world.simulator`, by default the one named in the checkpoint.
    Raises SpecError when `policy` does not fit the world.
    """
    with prefix_errors(policy):
        world = _made_world(section, policy, batch_size, episodes, seed, device, filmed)
        if (critic := section.options.get(SCHEDULES_OPTION, KINDS[0])) not in KINDS:
            schedule_by(world, load_critic(Path(critic), world.spec, device), best=True)
        if policy is not None:
            _require_fit(policy, world)
    if policy is not None and QUEUE in world.spec.observation and QUEUE not in policy.spec.observation:
        warnings.warn(
            f"'{world.spec.name}' has inference latency, but this policy does not read the action queue ({QUEUE}) "
            "and ignores the latency. Train it with the same world.options.latency_steps.",
            RobopolicyWarning,
            stacklevel=2,
        )
    return world


def _require_fit(policy: Policy, world: World) -> None:
    """Raise SpecError with a remedy when a policy does not fit the world; the world is then closed."""
    try:
        require_fit(adapt_policy_to_world(world, policy).spec, world.spec)
    except RobopolicyError as error:
        world.close()
        if isinstance(error, SpecError) and (advice := _mapping_for(policy, world.spec)):
            raise SpecError(f"{error} {advice}") from error
        raise


def _made_world(
    section: WorldSection,
    policy: Policy | None,
    batch_size: int | None,
    episodes: int | None,
    seed: int,
    device: torch.device | str,
    filmed: bool,
) -> World:
    rows = min(batch_size or section.batch_size, episodes or sys.maxsize)
    history = 1 if policy is None else policy.spec.history
    if section.name == DEMONSTRATIONS and section.cameras and policy is not None:
        section = replace(section, cameras=tuple(dict.fromkeys((*section.cameras, *policy.spec.cameras))))
    if section.name in (WORLD_MODEL, DEMONSTRATIONS):
        if section.success is not None:
            raise ConfigError(
                f"world.success does not apply to world.name={section.name}, whose success comes from its files: "
                "relabel the data with robopolicy success DATASET success.classifier=PATH success.relabelled=FOLDER, "
                "and use or train on that."
            )
        return world_from_files(section, rows, history, seed, device, policy)
    options: dict[str, Any] = {"seed": seed, "history": history, **section.options}
    camera_options = _shown(section, policy, filmed)
    if section.success is not None:
        return _classified_world(section, rows, options, camera_options, device)
    try:
        world = make_world(section.name, rows, **{**options, **camera_options})
    except CameraError as error:
        if policy is None or not policy.spec.cameras:
            raise
        blind = make_world(section.name, 1, **options, cameras=error.known[:1])  # where there is nothing else to see
        blind.close()
        policy_sizes = image_sizes_of(policy.spec.observation)
        sizes = {camera: policy_sizes.get(camera, DEFAULT_IMAGE_SIZE) for camera in error.known}  # it can show any
        if advice := _mapping_for(policy, blind.spec.with_cameras(sizes)):
            raise SpecError(f"{error} {advice}") from error
        raise
    if not world.spec.reports_success:
        warnings.warn(
            f"'{section.name}' does not report which episodes succeed, so returns are compared instead. To define "
            "success: world.options.success=package.module:function, \"world.options.success='return >= NUMBER'\" "
            "(with both quotes; the return of a whole episode), world.options.success=terminated, or "
            "world.options.success_key=NAME.",
            RobopolicyWarning,
            stacklevel=3,
        )
    return world


def _classified_world(
    section: WorldSection,
    rows: int,
    options: dict[str, Any],
    camera_options: dict[str, Any],
    device: torch.device | str,
) -> World:
    """Return the world with the success of the classifier at section.success, which may read further cameras.

    The world does not end episodes at its own success, if it has an option for that; a note says so if it has none.
    """
    assert section.success is not None
    classifier = shared_classifier(section.success, device)
    shown = tuple(camera_options.get("cameras", ()))
    added = {camera: size for camera, size in classifier.image_sizes.items() if camera not in shown}
    if added:
        cameras, size = (*shown, *added), camera_options.get("image_size")
        given: dict[str, Any] = {} if size is None else size if isinstance(size, dict) else dict.fromkeys(shown, size)
        camera_options = image_options(image_sizes(cameras, {**given, **added}))
    try:
        try:
            world = make_world(section.name, rows, **{**options, **camera_options, "terminate_on_success": False})
        except CameraError:
            raise
        except ConfigError as error:
            if "terminate_on_success" not in str(error):
                raise
            world = make_world(section.name, rows, **{**options, **camera_options})
            warnings.warn(
                f"'{section.name}' ends episodes at its own success as well: it has no option terminate_on_success.",
                RobopolicyNote,
                stacklevel=4,
            )
    except CameraError as error:
        missing = [camera for camera in classifier.image_sizes if camera not in error.known]
        if not missing:
            raise
        require_input(IMAGE_PREFIX + missing[0], {IMAGE_PREFIX + camera: None for camera in error.known})
        raise
    if SUCCESS not in world.spec.rewards and not section.success_reward:
        warnings.warn(
            f"The reward of '{section.name}' has no term for success ({', '.join(world.spec.rewards)}), so the "
            "classifier's success is not rewarded: a policy that learns needs world.success_reward=true, which makes "
            "it the only reward.",
            RobopolicyNote,
            stacklevel=4,
        )
    try:
        return with_classifier(
            world,
            classifier,
            section.success,
            hidden=tuple(added),
            terminate=bool(section.options.get("terminate_on_success", True)),
            only_reward=section.success_reward,
        )
    except RobopolicyError:
        world.close()
        raise


def _shown(section: WorldSection, policy: Policy | None, filmed: bool) -> dict[str, Any]:
    """Return the cameras and image_size options of a world: the policy's cameras in its sizes, plus the section's
    cameras if there is no policy or a video is recorded.

    Raises ConfigError when world.image_size is invalid or names an unknown camera; warns when the policy reads another
    size.
    """
    policy_sizes = {} if policy is None else image_sizes_of(policy.spec.observation)
    requested_cameras = section.cameras if policy is None or filmed else ()
    image_size: Any = section.image_size
    if policy is not None:
        world_sizes = image_sizes(dict.fromkeys((*policy_sizes, *section.cameras)), image_size, policy_sizes)
        other = [
            f"{list(world_sizes[camera])} for '{camera}'"
            for camera, size in policy_sizes.items()
            if world_sizes[camera] != size
        ]
        if other:
            warnings.warn(
                f"world.image_size is {' and '.join(other)}, but the policy is given the size that it reads, "
                f"{' and '.join(str(list(size)) for size in policy_sizes.values())}: unset world.image_size.",
                RobopolicyNote,
                stacklevel=4,
            )
    sizes = {
        **(image_size if isinstance(image_size, dict) else dict.fromkeys(requested_cameras, image_size)),
        **policy_sizes,
    }
    cameras = tuple(dict.fromkeys((*policy_sizes, *requested_cameras)))
    set_sizes = {
        camera: size for camera, size in sizes.items() if size is not None and (camera in cameras or not policy)
    }
    if not cameras:  # a suite's environment may show some by itself
        return (
            {"image_size": image_size} if policy is None and image_size is not None and suite_of(section.name) else {}
        )
    if set(set_sizes) == set(cameras):
        return image_options(image_sizes(cameras, set_sizes))
    return {"cameras": cameras, **({"image_size": set_sizes} if set_sizes else {})}


def _mapping_for(policy: Policy, spec: WorldSpec) -> str:
    """Return the renaming or resizing advice for a LeRobot policy whose feature names or sizes differ from the world's,
    else "".
    """
    return policy.mapping_for(spec) if isinstance(policy, MapsFeatures) else ""


def world_from_files(
    section: WorldSection,
    rows: int,
    history: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
    policy: Policy | None = None,
) -> World:
    """Return a world based on files: a world model's imagination with what `policy` reads, or recorded demonstrations
    with fields renamed as for `policy`.

    Raises ConfigError when the file is not named, or when cameras or sizes are requested that it does not have.
    """
    if section.name == WORLD_MODEL:
        return _imagined_world(section, rows, history, seed, device, policy)
    return _demonstrated_world(section, rows, history, seed, renaming_of(policy) or {})


def _require_images(section: WorldSection, fields: Mapping[str, Field], what: str) -> None:
    """Raise ConfigError when other images than `fields` are requested from a world that cannot render."""
    available_sizes = image_sizes_of(fields)
    if section.cameras and set(section.cameras) != set(available_sizes):
        raise ConfigError(
            f"world.cameras is [{', '.join(section.cameras)}], but {what} has "
            f"{', '.join(available_sizes) or 'no camera'}: unset world.cameras."
        )
    if image_sizes(available_sizes, section.image_size, available_sizes) != available_sizes:
        sizes = ", ".join(f"{camera} in {list(size)}" for camera, size in available_sizes.items())
        raise ConfigError(f"world.image_size is {section.image_size}, but {what} has {sizes}: unset world.image_size.")


def _demonstrated_world(section: WorldSection, rows: int, history: int, seed: int, rename: Mapping[str, str]) -> World:
    if section.data is None:
        raise ConfigError(
            "No demonstrations are given. Set world.data=FOLDER, a LeRobotDataset such as `robopolicy collect` writes."
        )
    options, names = without_faults(without_latency(section.options)), ("tolerance", "patches")
    if unknown := next((each for each in options if each not in names), None):
        raise ConfigError(
            f"world.options.{unknown} does not apply to world={DEMONSTRATIONS}, which replays recorded episodes: it "
            f"has only {' and '.join(names)}, and in any world latency and faults."
        )
    episodes = read_dataset(section.data, cameras=section.cameras or None, rename=rename)
    _require_images(section, episodes.observation_fields, str(section.data))
    world = DemonstratedWorld(
        episodes.observation_fields,
        episodes.action_field,
        episodes.fps,
        {key: value.numpy() for key, value in episodes.observation.items()},
        episodes.actions.numpy(),
        episodes.lengths.numpy(),
        episodes.tasks,
        rows,
        history=history,
        seed=seed,
        **options,
    )
    return with_latency_of(section.options, with_faults_of(section.options, world))


def _imagined_world(
    section: WorldSection, rows: int, history: int, seed: int, device: torch.device | str, policy: Policy | None
) -> World:
    if section.model is None:
        raise ConfigError("No world model is given. Set world.model=runs/worldmodel/push_cube/0/checkpoint.")
    model = load_imagining(section.model, device)
    _require_images(section, {**fields_read(model), **model.spec.observation}, f"the world model {section.model}")
    _require_imagined_latency(section.options, model)
    imagination = section.imagination
    if imagination.initial_states == "simulator":
        starts = simulator_starts(section, model, rows)
    else:
        data = section.model.parent / "dataset" if section.data is None else section.data
        if not data.exists():
            raise ConfigError(
                f"world.imagination.initial_states={imagination.initial_states} starts from recorded steps, but "
                f"{data} does not "
                "exist: set world.data=FOLDER."
            )
        episodes = recorded_for(model, data)
        start_steps = keyframes(episodes) if imagination.initial_states == "keyframes" else None
        starts = recorded_starts(episodes, model.context, start_steps)
    criterion = state_criterion(section, model) if imagination.success == "state" else None
    require_readable(policy, model)
    world = ImaginedWorld(
        model_for(policy, model, () if criterion is None else criterion.keys),
        starts,
        rows,
        history=history,
        truncation=Truncation(imagination.max_steps, uncertainty_limit(imagination, model)),
        penalty=imagination.uncertainty_penalty,
        debounce=imagination.debounce,
        seed=seed,
        criterion=criterion,
        noises=imagination.noises,
    )
    return with_faults_of(section.options, world)


def recorded_for(model: LearnedModel, data: Path) -> Episodes:
    """Return the recorded episodes of a dataset, with the fields that the model reads.

    Raises ConfigError when the dataset and the model do not fit.
    """
    fields = fields_read(model)
    dataset = read_dataset(data, cameras=cameras_of(fields), rename=renaming_of(model))
    episodes = episodes_for_model(fields, origin_of(model), dataset)
    require_recorded(data, episodes, fields, model.spec.action, "world model")
    return episodes


def state_criterion(section: WorldSection, model: LearnedModel) -> StateCriterion:
    """Return the criterion of success of the task that `model` imitates, on the vectors that it imagines or reads off
    its latent.

    Raises ConfigError when the world is no task with a criterion of its own, or a vector is missing.
    """
    name = section.simulator or (origin_of(model) or WorldOrigin(model.spec.name)).name
    remedy = "unset world.imagination.success, and the model predicts success."
    try:
        task = load_task(name)
    except ConfigError as error:
        raise ConfigError(f"world.imagination.success=state needs a task's criterion of success: {remedy}") from error
    readable = model.readable if isinstance(model, HasReadout) else model.spec.observation
    missing_keys = [key for key in task.observation if key not in readable]
    if missing_keys:
        raise ConfigError(
            f"world.imagination.success=state reads {', '.join(missing_keys)}, which the world model of "
            f"'{model.spec.name}' neither imagines nor reads off its latent: {remedy}"
        )
    return StateCriterion(task.succeeded, tuple(task.observation), getattr(model, "success_bonus", 0.0))


def _require_imagined_latency(options: Mapping[str, Any], model: WorldModel) -> None:
    """Raise ConfigError when the configured inference latency differs from the one that the model was trained with."""
    steps, _ = latency_in(options)
    model_latency = steps_ahead(fields_read(model), model.spec.action)
    if steps not in (0, model_latency):
        raise ConfigError(
            f"{LATENCY} is {steps}, but this world model was trained with a latency of {model_latency} control "
            f"steps: train it on data with a latency of {steps}, which `robopolicy worldmodel` records with the same "
            f"{LATENCY}."
        )


def simulator_starts(section: WorldSection, model: WorldModel, rows: int) -> Starts:
    """Return a sampler of initial observations for a world model: seeds -> initial observations of the simulator that
    it imitates.
    """
    fields = fields_read(model)
    options = {**without_faults(section.options), **images_of(fields)}
    if section.simulator:
        simulator = make_world(section.simulator, rows, **options)
    else:
        origin = origin_of(model) or WorldOrigin(model.spec.name)
        simulator = make_saved_world(origin, section.model or Path(), rows, **options)
    world_fields = simulator.spec.observation
    pairs = {f"'{key}'": (field, world_fields[key]) for key, field in fields.items() if key in world_fields}
    sides = ("for the world model", f"in the simulator '{simulator.spec.name}' of its initial states")
    require_consistent_fields({**pairs, "the action": (model.spec.action, simulator.spec.action)}, sides)

    def starts(seeds: np.ndarray) -> Context:
        indices = np.arange(len(seeds))
        observation = simulator.reset(seeds=np.resize(seeds, simulator.batch_size))
        return Context({key: observation[key][indices, -1:] for key in fields}, observation[TASK][indices])

    return starts


def uncertainty_limit(section: ImaginationSection, model: LearnedModel) -> float | None:
    """Return the uncertainty at which imagined rollouts are truncated, in the model's units; None for no limit.

    It is the smaller of the absolute limit and the quantile's.
    """
    limits = [] if section.max_uncertainty is None else [section.max_uncertainty]
    if section.uncertainty_quantile is not None:
        quantiles = model.uncertainty_quantiles
        limits.append(float(quantiles[round(section.uncertainty_quantile * (len(quantiles) - 1))]))
    return min(limits, default=None)


EXPERT = "expert"
"""Value used instead of a teacher's checkpoint for the world's own expert, or collect.controller."""


def build_controller(section: WorldSection, world: World, dotted_path: str = "") -> Controller:
    """Return the controller at `dotted_path`, else the scripted expert of the world's task.

    With inference latency it plans this many steps ahead, for which the world needs snapshots; see
    `LookaheadController`.
    """
    return build_lookahead(section, world, 1, dotted_path)


def build_lookahead(
    section: WorldSection, world: World, steps: int, dotted_path: str = ""
) -> Controller | LookaheadController:
    """Return a controller that gives its next `steps` actions from the present state of `world`, which `section` names.

    Without snapshots this is the controller itself, which gives one step. The simulated future continues after success
    if the world supports that: a policy with latency needs the actions that would follow.
    """
    controller = _controller(section, world.spec, dotted_path)
    decides_ahead = QUEUE in world.spec.observation
    if not decides_ahead and (steps == 1 or not isinstance(world, Snapshots)):
        return controller
    options = {"history": world.spec.history, **without_latency(section.options)}
    like = replace(section.with_own_success, cameras=(), options=options)
    try:
        lookahead_world = build_world(
            replace(like, options={**options, "terminate_on_success": False}), batch_size=world.batch_size
        )
    except ConfigError:  # a world without that option
        lookahead_world = build_world(like, batch_size=world.batch_size)
    return LookaheadController(controller, world, lookahead_world, steps)


def _controller(section: WorldSection, spec: WorldSpec, dotted_path: str) -> Controller:
    if dotted_path:
        return load_controller(dotted_path, spec)
    name = section.simulator or section.name
    expert = make_expert(name, spec)
    if expert is not None:
        return expert
    raise ConfigError(
        f"The world '{name}' has no scripted expert: use your own with collect.controller=package.module:name, or do "
        "without one: collect.policy=CHECKPOINT, teach.teacher=CHECKPOINT, worldmodel.noise=[], rank.noise=[]."
    )


def build_noisy_expert(
    section: WorldSection, world: World, level: str, seed: int, dotted_path: str = ""
) -> NoisyController | PlayingController | FaultyController:
    """Return the world's expert (or the controller at `dotted_path`) with action noise, given by name or number, at
    play, or with a fault, given as aim=METRES or speed=FRACTION.
    """
    if level == PLAY:
        return PlayingController(build_controller(section, world, dotted_path), seed, world.spec)
    if fault := fault_of(level):
        return FaultyController(build_controller(section, world, dotted_path), fault, seed, world.spec)
    try:
        noise = Noise(gaussian=float(level))
    except ValueError:
        noise = noise_level(level)
    return NoisyController(build_controller(section, world, dotted_path), noise, seed, world.spec.action)


def collection_world(section: WorldSection, finetune: FinetuneSection) -> WorldSection:
    """Return the world in which fine-tuning collects: `section` with finetune.world_options, which only simulators
    have.
    """
    if section.name in (WORLD_MODEL, DEMONSTRATIONS):
        return section
    return replace(section, options={**section.options, **finetune.world_options})


def build_collection_world(config: Config, policy: Policy, device: torch.device | str = "cpu") -> World:
    """Build the world in which fine-tuning collects, with the rows of one shard."""
    section = collection_world(config.world, config.finetune)
    return build_world(section, policy, batch_size=config.finetune.shard_envs, device=device)


def build_critic(world: World, section: FinetuneSection, seed: int) -> Critic:
    """Return a critic (value function) on the world's state, with weights initialised from `seed`.

    It is privileged (asymmetric actor-critic): it reads the simulator's state even if the policy reads only images.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "critic weights"))
        spec = world.spec
        sizes = section.critic_width, CRITIC_DEPTH, spec.instructions, section.critic_activation
        return state_critic(spec.observation, spec.history, *sizes)


keep_former_names(__name__, {"made_of_files": "world_from_files", "build_foresight": "build_lookahead"})
