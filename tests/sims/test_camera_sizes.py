"""Cameras of any height and width, each of its own: as environments show them, as asked for, or as a policy reads."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from robopolicy.building.worlds import build_world
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.policy import to_tensors
from robopolicy.core.spec import DEFAULT_IMAGE_SIZE, STATE, Field, image_options, image_sizes
from robopolicy.evaluation.video import above
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from sims.registry import make_world
from sims.suites.gymnasium_suite import make_gymnasium_world

OWN = {"top": (48, 64), "wrist": (32, 32)}
TOP, WRIST, IMAGE = (f"observation.images.{name}" for name in ("top", "wrist", "image"))


class TwoCameras(gymnasium.Env):
    """A point whose place is seen by a wide camera, whose right edge is white, and by a square one."""

    metadata = {"render_modes": [], "render_fps": 10}  # noqa: RUF012
    action_space = spaces.Box(-1, 1, (2,))

    def __init__(self, lone=False):
        entries = {"pixels": (3, 12, 20)} if lone else {name: (*size, 3) for name, size in OWN.items()}
        self.shapes = entries
        images = {name: spaces.Box(0, 255, shape, np.uint8) for name, shape in entries.items()}
        self.observation_space = spaces.Dict({"agent_pos": spaces.Box(-9, 9, (2,)), **images})

    def look(self):
        images = {name: np.full(shape, 100, np.uint8) for name, shape in self.shapes.items()}
        for image in images.values():
            image[..., -1] = 250
        if "top" in images:
            images["top"][:, -8:] = 255
        return {"agent_pos": self.place, **images}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2)
        return self.look(), {}

    def step(self, action):
        self.place = self.place + 0.1 * action
        return self.look(), 0.0, False, False, {"is_success": False}


gymnasium.register("TwoCameras-v0", entry_point=TwoCameras, max_episode_steps=9)
NAME = "test_camera_sizes:TwoCameras-v0"


def shown(world):
    observation = world.reset(seeds=[0, 1])
    return {key: observation[key].shape[2:] for key in observation if "images" in key}


def a_policy(fields, history=1):
    config = DenoisingPolicyConfig(width=8, depth=1, sampling_steps=2, denoising_steps=4, history=history)
    return DenoisingPolicy(config, fields, Field((2,), low=-1.0, high=1.0), fps=10.0)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_an_environments_own_pictures_are_shown_as_they_are(workers):
    world = make_gymnasium_world(NAME, 2, cameras=("top", "wrist"), history=2, workers=workers)
    try:
        assert shown(world) == {TOP: (48, 64, 3), WRIST: (32, 32, 3)}
        step = world.step(np.zeros((2, 3, 2)))
        assert (step.observation[TOP][..., -8:, :] == 255).all()
        assert (step.observation[TOP][..., :-8, :] < 255).all()
        assert world.spec.observation[TOP].shape == (48, 64, 3)
    finally:
        world.close()


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (16, {TOP: (16, 16, 3), WRIST: (16, 16, 3)}),
        ([24, 32], {TOP: (24, 32, 3), WRIST: (24, 32, 3)}),
        ({"top": [24, 32]}, {TOP: (24, 32, 3), WRIST: (32, 32, 3)}),
        ({"top": [24, 32], "wrist": 8}, {TOP: (24, 32, 3), WRIST: (8, 8, 3)}),
    ],
)
def test_every_size_that_is_asked_for_is_shown(size, found):
    for name in (f"gymnasium:{NAME}", "tidy"):
        section = WorldSection(
            name=name, cameras=("top", "wrist") if "gym" in name else ("front", "wrist"), image_size=size
        )
        if name == "tidy" and isinstance(size, dict):
            section = replace(section, image_size={{"top": "front"}.get(key, key): each for key, each in size.items()})
        world = build_world(section, batch_size=2)
        expected = {key.replace("top", section.cameras[0]): shape for key, shape in found.items()}
        if name == "tidy" and size == {"top": [24, 32]}:
            expected[WRIST] = (*DEFAULT_IMAGE_SIZE, 3)
        assert shown(world) == expected
        world.close()


def test_a_policy_that_reads_two_sizes_is_shown_them():
    spec = make_gymnasium_world(NAME, 2, cameras=("top", "wrist")).spec
    policy = a_policy(spec.observation, history=2)
    world = build_world(WorldSection(name=f"gymnasium:{NAME}"), policy, batch_size=2)
    assert shown(world) == {TOP: (48, 64, 3), WRIST: (32, 32, 3)}
    assert policy.act(to_tensors(world.reset(seeds=[0, 1])), torch.Generator().manual_seed(0)).actions.shape[0] == 2
    fields = {STATE: Field((11,)), "observation.images.front": Field((20, 28, 3), "uint8", 0, 255)}
    seeing = a_policy(fields)
    with pytest.warns(
        RobopolicyWarning, match=r"world\.image_size is \[16, 16\] for 'top' and .*\[48, 64\] and \[32, 32\]: unset"
    ):
        build_world(WorldSection(name=f"gymnasium:{NAME}", image_size=16), policy, batch_size=2)
    with pytest.raises(ConfigError, match="no camera 'front'"):
        build_world(WorldSection(name=f"gymnasium:{NAME}"), seeing, batch_size=2)


def test_a_camera_beside_the_policys_is_filmed_in_its_own_size():
    fields = {TOP: Field((24, 32, 3), "uint8", 0, 255)}
    section = WorldSection(name=f"gymnasium:{NAME}", cameras=("wrist",))
    for given, wrist in ((None, 32), ({"wrist": 8}, 8)):
        world = build_world(replace(section, image_size=given), a_policy(fields), batch_size=2, filmed=True)
        assert shown(world) == {TOP: (24, 32, 3), WRIST: (wrist, wrist, 3)}
        world.close()


def test_lerobots_name_of_an_environments_only_picture_is_its_pixels():
    """LeRobot's own preprocessing calls a lone entry `pixels` observation.image, and so do its data sets."""
    policy = a_policy({STATE: Field((2,)), IMAGE: Field((12, 20, 3), "uint8", 0, 255)})
    world = build_world(
        WorldSection(name=f"gymnasium:{NAME}", options={"env_options": {"lone": True}}), policy, batch_size=2
    )
    observation = world.reset(seeds=[0, 1])
    assert observation[IMAGE].shape == (2, 1, 12, 20, 3) and (observation[IMAGE][..., -1, :] == 250).all()
    assert policy.act(to_tensors(observation), torch.Generator().manual_seed(0)).actions.shape[0] == 2
    assert shown(make_gymnasium_world(NAME, 2, cameras=("image",), env_options={"lone": True})) == {IMAGE: (12, 20, 3)}


@pytest.mark.parametrize("size", ["abc", [48], [48, 64, 3], 0, -3, 2.5, True, {"top": [1, 2, 3]}])
def test_what_is_no_size_is_refused_by_the_settings_name(size):
    with pytest.raises(ConfigError, match=r"write world\.image_size=64, world\.image_size=\[48,64\]"):
        WorldSection(cameras=("top",), image_size=size)


def test_a_size_of_a_camera_that_nobody_shows_is_refused():
    with pytest.raises(ConfigError, match=r"camera 'tpo', which is not in world\.cameras\. Did you mean 'top'"):
        make_world(f"gymnasium:{NAME}", 1, cameras=("top",), image_size={"tpo": 32})


def test_options_of_one_size_are_one_number_as_worlds_of_others_take_them():
    assert image_options({"a": (8, 8), "b": (8, 8)}) == {"cameras": ("a", "b"), "image_size": 8}
    assert image_options({"a": (8, 9)}) == {"cameras": ("a",), "image_size": (8, 9)}
    assert image_options({"a": (8, 8), "b": (9, 9)}) == {
        "cameras": ("a", "b"),
        "image_size": {"a": (8, 8), "b": (9, 9)},
    }
    assert image_options({}) == {}
    assert image_sizes(("a", "b"), None, {"a": (3, 4)}) == {"a": (3, 4), "b": DEFAULT_IMAGE_SIZE}


def test_films_of_real_and_imagined_cameras_of_several_widths_stand_above_each_other():
    images = {TOP: np.zeros((2, 3, 48, 96, 3), np.uint8), WRIST: np.zeros((2, 3, 32, 64, 3), np.uint8)}
    assert above(images, images, 10.0).frames.shape[0] == 3
