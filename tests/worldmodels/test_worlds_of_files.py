"""Worlds made of files, a world model's imagination and recordings: by name from Python, with only their own images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from point_world import SPEC, recorded

import robopolicy
from robopolicy.building.policies import load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration.sections.run import ImaginationSection, WorldSection
from robopolicy.core.errors import CameraError, ConfigError, SpecError
from robopolicy.core.player import Player, PolicyActor
from robopolicy.core.spec import STATE, Field
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from sims.registry import make_world as make_simulated
from worldmodels import save_world_model
from worldmodels.configuration import EnsembleConfig
from worldmodels.ensemble import EnsembleModel

TOP, WRIST = "observation.images.top", "observation.images.wrist"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An untrained model of states, and recordings with two cameras of unlike sizes."""
    root = tmp_path_factory.mktemp("files")
    episodes = recorded().select(range(4))
    save_world_model(
        EnsembleModel.build(EnsembleConfig(members=2, width=8, head_width=8), SPEC, episodes, 0), root / "model"
    )
    frames = len(episodes.observation[STATE])
    images = {
        TOP: torch.zeros(frames, 8, 12, 3, dtype=torch.uint8),
        WRIST: torch.ones(frames, 8, 8, 3, dtype=torch.uint8),
    }
    fields = {key: Field(tuple(image.shape[1:]), "uint8", 0, 255) for key, image in images.items()}
    dataset = replace(
        episodes,
        observation={**episodes.observation, **images},
        observation_fields={**episodes.observation_fields, **fields},
    )
    write_dataset(dataset, root / "data", images="png")
    return root


def saved_policy(folder, fields):
    config = DenoisingPolicyConfig(width=8, depth=1, sampling_steps=2, denoising_steps=4)
    DenoisingPolicy(config, fields, SPEC.action, fps=SPEC.fps).save(folder)
    return load_policy(folder)


def test_a_world_model_and_recordings_are_worlds_by_name(files):
    given = {"model": files / "model", "data": str(files / "data"), "imagination": {"initial_states": "data"}}
    world = robopolicy.make_world("worldmodel", 2, **given, history=2, seed=1)
    assert world.reset(seeds=[0, 1])[STATE].shape == (2, 2, 2)
    world = robopolicy.make_world("demonstrations", 2, data=files / "data")
    assert world.reset(seeds=[0, 1])[TOP].shape == (2, 1, 8, 12, 3)
    with pytest.raises(ConfigError, match=r"world\.modle.*Did you mean 'world\.?model'|Did you mean 'model'"):
        robopolicy.make_world("worldmodel", modle=files / "model")
    with pytest.raises(ConfigError, match=r"create it with robopolicy\.make_world"):
        make_simulated("worldmodel", 1)


def test_worlds_of_files_show_their_own_images_and_say_so_where_others_are_asked_for(files):
    imagined = WorldSection("worldmodel", model=files / "model", data=files / "data")
    imagined = replace(imagined, imagination=ImaginationSection(initial_states="data"))
    with pytest.raises(ConfigError, match=r"world\.cameras is \[wrist\], but the world model .*model has no camera"):
        build_world(replace(imagined, cameras=("wrist",)))
    told = WorldSection("demonstrations", data=files / "data")
    assert build_world(replace(told, cameras=("wrist",))).spec.cameras == ("wrist",)
    assert build_world(replace(told, image_size={"top": [8, 12], "wrist": 8})).spec.cameras == ("top", "wrist")
    with pytest.raises(ConfigError, match=r"world\.image_size is 32, but .*top in \[8, 12\], wrist in \[8, 8\]"):
        build_world(replace(told, image_size=32))
    # The simulator's cameras are not asked of the model that a verb opens beside it.
    assert WorldSection("push_cube", cameras=("top",), image_size=32).imagined_by(files / "model").cameras == ()


def test_of_several_policies_the_one_that_does_not_fit_is_named(files, tmp_path):
    told = WorldSection("demonstrations", data=files / "data")
    wide = Field((8, 12, 3), "uint8", 0, 255)
    fits = saved_policy(tmp_path / "fits", {STATE: SPEC.observation[STATE], TOP: wide})
    other = saved_policy(tmp_path / "other", {STATE: SPEC.observation[STATE], "observation.images.behind": wide})
    world = build_world(told, fits)
    with pytest.raises(SpecError, match=rf"^{tmp_path / 'other'}: The policy reads the camera 'behind'"):
        build_world(told, other)
    with pytest.raises(SpecError, match=rf"^{tmp_path / 'other'}: The policy reads the camera 'behind'"):
        Player(world, PolicyActor(other, torch.Generator()))
    with pytest.raises(CameraError, match=rf"^{tmp_path / 'other'}: .*has no camera 'behind'") as refused:
        build_world(WorldSection("push_t"), other)
    assert refused.value.known
    small = saved_policy(tmp_path / "small", {STATE: SPEC.observation[STATE], TOP: Field((6, 9, 3), "uint8", 0, 255)})
    with pytest.raises(SpecError, match=r"as \[6, 9, 3\], .*\[8, 12, 3\]\. .*world\.image_size=\{top: \[6,9\]\}"):
        build_world(told, small)
    assert np.isfinite(world.reset(seeds=np.arange(world.batch_size))[STATE]).all()


@pytest.mark.parametrize("option", ["variation", "trial_episodes"])
def test_recordings_refuse_options_of_simulators_in_a_sentence(files, option):
    section = WorldSection("demonstrations", data=files / "data", options={option: {"colour": 1}})
    with pytest.raises(ConfigError, match=f"options.{option} does not apply .* only tolerance and patches"):
        build_world(section, batch_size=2)
    kept = replace(section, options={"tolerance": 0.3, "patches": 0})
    assert build_world(kept, batch_size=2).batch_size == 2
