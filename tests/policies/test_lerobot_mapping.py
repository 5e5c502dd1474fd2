"""A LeRobot policy whose names or image sizes are not the world's: what it says, and that doing so works."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lerobot_policies import save, tiny_act

from robopolicy.building.worlds import build_world
from robopolicy.cli import main
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.policy import to_tensors
from robopolicy.core.spec import STATE
from robopolicy.policies.lerobot.acting import load_lerobot_policy
from robopolicy.testing.policy import Level, PolicyReport
from sims.registry import make_world

pytestmark = pytest.mark.long

CAMERA1 = "observation.images.camera1"
FRONT, TOP, LONE = "observation.images.front", "observation.images.top", "observation.image"


def policy_reading(images: dict[str, tuple[int, int]], folder: Path) -> Any:
    from lerobot.configs.types import FeatureType, PolicyFeature

    spec = make_world("push_cube", 1).spec
    inputs = {STATE: PolicyFeature(FeatureType.STATE, spec.observation[STATE].shape)}
    inputs |= {name: PolicyFeature(FeatureType.VISUAL, (3, *size)) for name, size in images.items()}
    return save(tiny_act(inputs, {"action": PolicyFeature(FeatureType.ACTION, spec.action.shape)}), folder)


@pytest.mark.parametrize(
    ("images", "written"),
    [
        ({LONE: (32, 32)}, {"features": {LONE: "observation.images.<camera of the world>"}}),
        ({CAMERA1: (32, 32)}, {"features": {CAMERA1: "observation.images.<camera of the world>"}}),
        (
            {CAMERA1: (32, 48), FRONT: (32, 48)},
            {"features": {CAMERA1: "observation.images.<camera of the world>"}},
        ),
    ],
)
def test_what_to_write_is_said_and_works(images, written, tmp_path):
    folder = policy_reading(images, tmp_path / "policy")
    section = WorldSection(name="push_cube")
    with pytest.raises(SpecError, match="If only names or sizes differ, write") as refused:
        build_world(section, load_lerobot_policy(folder), batch_size=2)
    (snippet,) = re.findall(r"write (\{.*\}) into robopolicy\.json", str(refused.value))
    assert json.loads(snippet) == written
    done = snippet.replace("<camera of the world>", "top")
    (folder / "robopolicy.json").write_text(done)
    policy = load_lerobot_policy(folder)
    world = build_world(section, policy, batch_size=2)
    observation = to_tensors(world.reset(seeds=[0, 1]))
    assert policy.act(observation, torch.Generator()).actions.shape[0] == 2
    world.close()


@pytest.mark.parametrize("images", [{FRONT: (32, 48)}, {FRONT: (32, 32), TOP: (48, 32)}])
def test_cameras_of_any_height_and_width_are_shown_as_they_are_read(images, tmp_path):
    policy = load_lerobot_policy(policy_reading(images, tmp_path / "policy"))
    world = build_world(WorldSection(name="push_cube"), policy, batch_size=2)
    observation = to_tensors(world.reset(seeds=[0, 1]))
    assert {name: tuple(observation[name].shape[2:4]) for name in images} == images
    assert policy.act(observation, torch.Generator()).actions.shape[0] == 2
    world.close()


def test_a_mapping_with_the_worlds_name_in_the_place_of_lerobots_is_said_with_file_and_key(tmp_path):
    folder = policy_reading({CAMERA1: (32, 32)}, tmp_path / "policy")
    settings = {"features": {CAMERA1: FRONT}, "image_sizes": {FRONT: [32, 32]}}
    (folder / "robopolicy.json").write_text(json.dumps(settings))
    message = rf"policy/robopolicy\.json: image_sizes has '{FRONT}'.* no such feature\. .*'{CAMERA1}'"
    with pytest.raises(ConfigError, match=message):
        load_lerobot_policy(folder)


def test_check_says_that_cameras_do_not_fit_and_that_the_rate_is_not_known(tmp_path, capsys, monkeypatch):
    def promises(policy: Any, *_: Any, **__: Any) -> PolicyReport:  # those of these policies are tested elsewhere
        return PolicyReport(Level.TRAINS, has_rate=bool(policy.spec.fps))

    monkeypatch.setattr("robopolicy.verbs.check.check_policy", promises)
    folder = policy_reading({CAMERA1: (32, 32)}, tmp_path / "policy")
    assert main(["check", str(folder), "world=push_cube"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "It does not fit push_cube: Task 'push_cube' has no camera 'camera1'." in output
    assert f'write {{"features": {{"{CAMERA1}": ' in output
    assert "drive" not in output.partition("Not ready for a robot")[0] and '"fps": N' in output
    assert main(["check", str(folder)]) == 0
    assert "To check whether it fits a world, add world=NAME." in capsys.readouterr().out
    settings = {"features": {CAMERA1: FRONT}, "fps": 10, "world": {"name": "push_cube", "options": {}}}
    (folder / "robopolicy.json").write_text(json.dumps(settings))
    assert main(["check", str(folder)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "It fits push_cube" in output and "serve, drive and rank it" in output and "Not" not in output


def test_a_vector_of_another_size_is_no_matter_of_names(tmp_path):
    folder = policy_reading({TOP: (32, 32)}, tmp_path / "policy")
    with pytest.raises(SpecError, match=r"observation\.state") as refused:
        build_world(WorldSection(name="pick_place"), load_lerobot_policy(folder), batch_size=1)
    assert "robopolicy.json" not in str(refused.value)
