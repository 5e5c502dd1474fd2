"""Builds what is needed for planning: world models, and policies that plan in them."""

from pathlib import Path
from typing import cast

import numpy as np
import torch

from robopolicy.building.policies import model_for, reads_latent_of, require_readable
from robopolicy.configuration.sections.worldmodel import PlanSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import origin_of, remember_origin, remember_renaming, renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World
from robopolicy.data.lerobot_media import IMAGE_FORMATS
from robopolicy.inference.plan import load_plan
from robopolicy.training.acting import Acting
from worldmodels import load_world_model
from worldmodels.configuration import CANDIDATES, PlanConfig
from worldmodels.env import ImaginedWorld
from worldmodels.goals import Goal, comparable_fields_of
from worldmodels.mpc import ModelPredictivePolicy
from worldmodels.planning import PlannedPolicy
from worldmodels.protocol import Cacheable, DecoderFree, EncodesForPolicy, LearnedModel, WorldModel


def load_imagining(folder: Path, device: torch.device | str = "cpu") -> LearnedModel:
    """Load a world model for imagination, with the block cache that `robopolicy optimize` stored next to it.

    A cache plan for other weights, or one that does not fit the model, is ignored with a warning; one measured on
    another device is used with a warning. Raises as `load_world_model` and `load_plan` do.
    """
    model, plan = load_world_model(folder, device), load_plan(folder)
    if plan is None or (cache := plan.cache) is None or not isinstance(model, Cacheable):
        return model
    with_cache = lambda: cast(LearnedModel, model.with_caching(cache))  # noqa: E731
    return plan.applied(cast(LearnedModel, model), with_cache, folder, torch.device(device))


def with_planning(
    section: PlanSection, policy: Policy, device: torch.device | str = "cpu", remembers: bool = True
) -> Policy:
    """Return `policy` with planning as the section says if it names a world model, else unchanged.

    remembers: whether a plan starts from the rest of the last one in its row.
    """
    if section.model is None:
        return policy
    model, settings = load_imagining(section.model, device), narrowed(PlanConfig, section)
    planned_policy: Policy = (
        PlannedPolicy(policy, planning_model(policy, model), settings)
        if settings.kind == CANDIDATES
        else predictive(model, settings, policy, remembers)
    )
    remember_origin(planned_policy, origin_of(policy))
    remember_renaming(planned_policy, renaming_of(policy))
    return planned_policy


def planning_model(policy: Policy, model: WorldModel) -> WorldModel:
    """Return `model` with what `policy` reads, which goes on acting in imagination; raises ConfigError where it cannot
    be had.
    """
    require_readable(policy, model)
    seen = model_for(policy, model)
    inputs = policy.spec.observation
    if isinstance(policy, EncodesForPolicy) and isinstance(model, DecoderFree) and reads_latent_of(policy, model):
        inputs = policy.inner.spec.observation
    if missing_keys := [key for key in inputs if key not in seen.spec.observation]:
        raise ConfigError(
            f"The policy reads {', '.join(missing_keys)}, which the planning world model of '{model.spec.name}' does "
            "not imagine: plan in a model that does, or optimise the actions themselves, plan.kind=cem."
        )
    return seen


def planner_alone(section: PlanSection, device: torch.device | str = "cpu") -> Policy:
    """Return a planner without a policy, for the world in which its model was trained.

    Raises ConfigError when the section names no world model, or a kind of planning that chooses among a policy's
    chunks.
    """
    if section.model is None or section.kind == CANDIDATES:
        raise ConfigError("Planning without a policy needs plan.model=CHECKPOINT and plan.kind=cem, icem or mppi.")
    model = load_imagining(section.model, device)
    settings = narrowed(PlanConfig, section)
    planner = predictive(model, settings)
    remember_origin(planner, origin_of(model))
    return planner


def predictive(
    model: LearnedModel, settings: PlanConfig, policy: Policy | None = None, remembers: bool = True
) -> ModelPredictivePolicy:
    """Return a planner of action sequences; an objective is given the vectors that are read off a latent as well."""
    seen = model_for(None, model) if settings.objective else model
    return ModelPredictivePolicy(seen, settings, policy, load_goal(settings, model), remembers)


def load_goal(config: PlanConfig, model: WorldModel) -> Goal | None:
    """Return the goal that plan.goal describes, None for none; pictures are resized to those of the model's cameras.

    Raises ConfigError when a file is no PNG or JPEG, or a field or its elements do not fit the model.
    """
    if not config.goal:
        return None
    comparable_fields = comparable_fields_of(model)
    fields: dict[str, torch.Tensor] = {}
    for key, value in config.goal.items():
        if isinstance(value, str):
            size = (
                comparable_fields[key].shape[:2]
                if key in comparable_fields and comparable_fields[key].is_image
                else None
            )
            fields[key] = read_picture(Path(value), size)[None]
        elif isinstance(value, list) and all(each is None or isinstance(each, int | float) for each in value):
            fields[key] = torch.tensor([[float("nan") if each is None else float(each) for each in value]])
        else:
            raise ConfigError(
                f"plan.goal: '{key}' is {value}, but must be the path of a picture, or a list of numbers and null."
            )
    return Goal(model, fields)


def read_picture(path: Path, size: tuple[int, ...] | None) -> torch.Tensor:
    """Return a picture as uint8 [height, width, 3], resized to `size` (height, width) if given; raises ConfigError when
    it is no PNG or JPEG.
    """
    from PIL import Image

    try:
        with Image.open(path, formats=IMAGE_FORMATS) as picture:
            image = picture.convert("RGB")
            resized = image if size is None else image.resize((size[1], size[0]), Image.Resampling.BOX)
            return torch.from_numpy(np.array(resized))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigError(f"plan.goal: {path} could not be read as a PNG or JPEG: {error}") from error


def planned_acting(
    section: PlanSection, world: World, imagined: Path | None = None, device: torch.device | str = "cpu"
) -> Acting | None:
    """Return a function that adds planning to the policy being fine-tuned in `world`; None without plan.model.

    imagined: checkpoint of the world model that `world` runs in; if it is also the planning model, both share one
    model, which is updated together. Raises ConfigError for a model without a decoder: policies in it read its latent.
    """
    if section.model is None:
        return None
    if section.kind != CANDIDATES:
        raise ConfigError(
            f"plan.kind={section.kind} chooses actions by itself, which have no probability under the policy: only "
            "plan.kind=candidates can collect for fine-tuning."
        )
    same_model = imagined is not None and imagined.resolve() == section.model.resolve()
    world_model = world.model if isinstance(world, ImaginedWorld) and same_model else None
    model = load_imagining(section.model, device) if world_model is None else world_model
    if isinstance(model, DecoderFree):
        raise ConfigError(
            f"plan.model={section.model} outputs only a latent: planning needs a model that decodes observations."
        )
    settings = narrowed(PlanConfig, section)
    return lambda policy: PlannedPolicy(policy, planning_model(policy, model), settings)
