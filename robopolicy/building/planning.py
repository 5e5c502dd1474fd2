"""Builds what looks ahead in a world model: the models, and policies that plan in them."""

from pathlib import Path
from typing import cast

import torch

from robopolicy.configuration.sections.worldmodel import PlanSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import origin_of, remember_origin, remember_renaming, renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World
from robopolicy.inference.plan import load_plan
from robopolicy.training.acting import Acting
from worldmodels import load_world_model
from worldmodels.configuration import PlanConfig
from worldmodels.env import ImaginedWorld
from worldmodels.planning import PlannedPolicy
from worldmodels.protocol import Cacheable, DecoderFree, LearnedModel


def load_imagining(folder: Path, device: torch.device | str = "cpu") -> LearnedModel:
    """Load a world model that is to imagine, remembering blocks as `robopolicy optimize` has stored beside it.

    A plan made for other weights, or that does not fit the model, is refused with a warning, and one measured elsewhere
    is used with one. Raises as `load_world_model` and `load_plan` do.
    """
    model, plan = load_world_model(folder, device), load_plan(folder)
    if plan is None or (cache := plan.cache) is None or not isinstance(model, Cacheable):
        return model
    planned = lambda: cast(LearnedModel, model.with_caching(cache))  # noqa: E731
    return plan.applied(cast(LearnedModel, model), planned, folder, torch.device(device))


def with_planning(section: PlanSection, policy: Policy, device: torch.device | str = "cpu") -> Policy:
    """Return `policy`, planning in a world model (best of N candidates) where the section names one."""
    if section.model is None:
        return policy
    planned = PlannedPolicy(policy, load_imagining(section.model, device), narrowed(PlanConfig, section))
    remember_origin(planned, origin_of(policy))
    remember_renaming(planned, renaming_of(policy))
    return planned


def planned_acting(
    section: PlanSection, world: World, imagined: Path | None = None, device: torch.device | str = "cpu"
) -> Acting | None:
    """Return who acts for a policy that is tuned in `world`: it, planning in a world model, None where none is named.

    imagined: the checkpoint in whose imagination `world` plays; if that plans as well, it is one model with the
    world's, refreshed with it. Raises ConfigError for a model without a decoder: policies in it read its latent.
    """
    if section.model is None:
        return None
    shared = imagined is not None and imagined.resolve() == section.model.resolve()
    own = world.model if isinstance(world, ImaginedWorld) and shared else None
    model = load_imagining(section.model, device) if own is None else own
    if isinstance(model, DecoderFree):
        raise ConfigError(f"plan.model={section.model} shows a latent: planning needs a model that shows observations.")
    settings = narrowed(PlanConfig, section)
    return lambda policy: PlannedPolicy(policy, model, settings)
