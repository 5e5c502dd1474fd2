"""Every world model at work on a device: learned in stages, calibrated, played in, planned in, saved."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_policies import FIT, SMALL, made, played, small
from random_world import IMAGES, STATES, recorded

from robopolicy.core.randomness import Generators
from robopolicy.core.spec import WorldSpec
from robopolicy.evaluation.world_model import examine
from robopolicy.training.fit import fit_stages
from robopolicy.training.offline.configuration import GuidedConfig
from robopolicy.training.offline.guided import GuidedGenerator
from worldmodels.checkpoint import load_world_model, save_world_model
from worldmodels.configuration import PlanConfig, ReadoutConfig, TrajectoryConfig
from worldmodels.encoding import EncodedPolicy, encode_episodes
from worldmodels.env import ImaginedWorld
from worldmodels.initial_states import recorded_starts
from worldmodels.planning import PlannedPolicy
from worldmodels.protocol import DecoderFree
from worldmodels.registry import WORLD_MODELS
from worldmodels.trajectory_diffusion import TrajectoryDiffusion

SMALL_MODEL = {
    **SMALL,
    "members": 2,
    "head_width": 16,
    "size": "tiny",
    "length": 4,
    "memory": 2,
    "stride": 2,
    "chunk": 3,
    "batch_size": 4,
    "view_batch_size": 4,
    "readout": ReadoutConfig(batch_size=8, imagined_steps=4, members=2),
    "precision": "float32",
}
SEES = {"latent_ensemble": IMAGES, "pixel_diffusion": IMAGES, "video": IMAGES}
"""What models see that cannot do with vectors."""
VARIANTS: dict[str, dict[str, tuple[dict[str, Any], WorldSpec]]] = {
    "ensemble": {"as it is": ({}, STATES), "sampled": ({"sample": True}, STATES)},
    "rssm": {"as it is": ({}, STATES), "images": ({}, IMAGES)},
}


def kinds() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield every registered kind: name, device -> what comes of it."""
    for kind in WORLD_MODELS:
        for name, given in VARIANTS.get(kind, {"as it is": ({}, SEES.get(kind, STATES))}).items():
            yield f"{kind}, {name}", lambda device, kind=kind, given=given: at_work(kind, device, *given)
    yield "trajectories", trajectories
    yield "guided", guided


def built(kind: str, device: str, changes: dict[str, Any], spec: WorldSpec) -> Any:
    """Return a small model that was fitted and calibrated on a device, on episodes of the CPU."""
    config = WORLD_MODELS.configuration(kind)
    known = small(config, SMALL_MODEL)
    episodes = recorded(spec)
    model = WORLD_MODELS.builds(kind).build(config(**{**known, **changes}), spec, episodes, 0).to(device)
    fit_stages(model, episodes, FIT, Generators(0, device))
    model.calibrate(episodes)
    return model.eval()


def at_work(kind: str, device: str, changes: dict[str, Any], spec: WorldSpec) -> dict[str, Any]:
    """Let a model learn, imagine, be examined, plan, and come back from a checkpoint."""
    model, episodes = built(kind, device, changes, spec), recorded(spec)
    world = ImaginedWorld(model, recorded_starts(episodes, model.context), 3, history=2)
    world.reset(seeds=[1, 2, 3])
    step = world.step(np.full((3, 2, 2), 0.5))
    kept = world.snapshot()
    world.restore(kept, [1, 0, 2])
    again = world.step(np.full((3, 2, 2), -0.5))
    outputs: dict[str, Any] = {"weights": list(model.state_dict().values())}
    for name, each in (("step", step), ("again", again)):
        assert each.uncertainty is not None
        outputs[name] = [torch.from_numpy(np.asarray(value)) for value in (each.reward, each.success, each.uncertainty)]
    outputs["examined"] = examine(model, episodes, Generators(0, device)["examine"], rows=4, steps=2)
    with tempfile.TemporaryDirectory() as folder:
        save_world_model(model, Path(folder) / "model")
        loaded = load_world_model(Path(folder) / "model", device)
    if isinstance(loaded, DecoderFree):
        return outputs | _behind(loaded, device, spec)
    policy = made("flow", device, {"observation_keys": tuple(STATES.observation)}, spec)
    planned = PlannedPolicy(policy, loaded, PlanConfig(candidates=2, rollouts=2, horizon=4, uncertainty=-0.1))
    return outputs | played(planned, device, spec) | {"scores": planned.last_scores}


def _behind(model: Any, device: str, spec: WorldSpec) -> dict[str, Any]:
    episodes = encode_episodes(model, recorded(spec))
    shown = replace(spec, observation=model.spec.observation)
    policy = made("flow", device, {}, shown)
    return {"encoded": episodes.observation, **played(EncodedPolicy(policy, model), device, spec)}


def trajectories(device: str) -> dict[str, Any]:
    """Let a model of whole trajectories learn and generate."""
    config = TrajectoryConfig(**small(TrajectoryConfig, SMALL_MODEL))
    episodes = recorded()
    model = TrajectoryDiffusion.build(config, STATES, episodes, 0).to(device)
    fit_stages(model, episodes, FIT, Generators(0, device))
    model.calibrate(episodes)
    generated = model.generate(3, torch.Generator(device).manual_seed(0))
    return {"weights": list(model.parameters()), "transitions": vars(model.transitions(generated))}


def guided(device: str) -> dict[str, Any]:
    """Let a policy guide what such a model draws."""
    spec = replace(STATES, instructions=STATES.instructions[:1])
    config = GuidedConfig(episodes=3, length=4, steps=2, width=16)
    policy, generators = made("flow", device, spec=spec), Generators(0, device)
    episodes = GuidedGenerator(policy, recorded(spec), config, generators, 0).draw(policy, generators["guided"])
    return {"lengths": episodes.lengths, "actions": episodes.actions, "observation": dict(episodes.observation)}
