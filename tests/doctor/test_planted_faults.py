"""Planted faults are found and named, by what a user runs on a dataset on disk; sound recordings raise no alarm."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from planted_faults import FAULTS

from robopolicy.core.spec import ENVIRONMENT_STATE
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.record import record
from robopolicy.doctor import check_statistics, examine
from sims.experts import NoisyController, noise_level
from sims.registry import make_expert, make_world

pytestmark = pytest.mark.long

SEEN = {"cameras": ("top", "front"), "image_size": 32}
WORLDS = {"seen_cube": ("push_cube", 4, SEEN), "pick_place": ("pick_place", 5, {})}
"""Name in the tests -> world, rows and options; others are called by their own name and have eight rows."""
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


class TowardsGoal:
    """A proportional controller of gymnasium's Fetch: from the gripper to the goal."""

    def reset(self, rows=None):
        pass

    def act(self, observation):
        goals = observation[ENVIRONMENT_STATE][:, -1]
        return np.pad(np.clip(8.0 * (goals[:, 3:] - goals[:, :3]), -1.0, 1.0), ((0, 0), (0, 1)))


def opened(name):
    if name.startswith("gymnasium:Fetch"):
        pytest.importorskip("gymnasium_robotics")
    world, rows, options = WORLDS.get(name, (name, 8, {}))
    return make_world(world, rows, **options)


def recorded(world, seed):
    """Return one episode a row, by the world's expert with a little noise."""
    expert = make_expert(world.spec.name, world.spec) or TowardsGoal()
    noisy = NoisyController(expert, noise_level("low"), seed, world.spec.action)
    return record(world, noisy, 1000 * seed + np.arange(world.batch_size))


@pytest.fixture(scope="module")
def recordings():
    """Return a function that gives a world and a recording of it, made once."""
    made = {}

    def recording(name, seed):
        if (name, seed) not in made:
            world = opened(name)
            made[name, seed] = world, recorded(world, seed)
        return made[name, seed]

    yield recording
    for world, _ in made.values():
        world.close()


def diagnosed(data, world, folder, damage: Callable = lambda folder: None):
    """Write a dataset, read it back and return the findings that `robopolicy doctor` prints."""
    write_dataset(data, folder, images="png")
    damage(folder)
    episodes = read_dataset(folder)
    return [*examine(episodes, world), *check_statistics(episodes, folder)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(recordings, tmp_path, name, seed):
    fault = FAULTS[name]
    world, data = recordings(fault.world, seed)
    findings = diagnosed(fault.plant(data), fault.disturb(world), tmp_path / "data", fault.damage)
    problems = [finding for finding in findings if finding.problem]
    named = [finding for finding in problems if finding.check == fault.check]
    assert any(re.search(fault.text, finding.measured) for finding in named), problems
    assert all(finding.remedy for finding in problems)


HEALTHY = [
    "push_t",
    "pick_place",
    "seen_cube",
    "reach_planar",
    "push_choice",
    pytest.param("gymnasium:FetchReach-v4", marks=pytest.mark.slow),
    pytest.param("stack", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_sound_recording_raises_no_alarm(recordings, tmp_path, name, seed):
    world, data = recordings(name, seed)
    findings = diagnosed(data, world, tmp_path / "data")
    assert [finding for finding in findings if finding.problem] == []
