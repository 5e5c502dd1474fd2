"""Our steps of Meta-World's tasks compute Meta-World's numbers, bit by bit."""

import importlib
from importlib.util import find_spec

import numpy as np
import pytest
from gymnasium.utils import seeding

from robopolicy.testing.world import check_world
from sims.registry import make_world

QUICK = ("push-v3", "plate-slide-v3", "stick-push-v3")
"""One of several objects, one with a moved body, and one whose success depends on contact forces."""
STATE = ("qpos", "qvel", "qacc_warmstart", "ctrl", "mocap_pos", "mocap_quat", "xpos", "time")


TASKS = sorted(importlib.import_module("metaworld").ALL_V3_ENVIRONMENTS) if find_spec("metaworld") else []


@pytest.fixture
def metaworld():
    return pytest.importorskip("metaworld")


def own(task):
    """Return an environment of one of Meta-World's classes, which shows the goal and draws from its own generator."""
    environment = task()
    environment._partially_observable = False
    vars(environment).pop("sawyer_observation_space", None)
    environment._freeze_rand_vec, environment.seeded_rand_vec, environment._set_task_called = False, True, True
    return environment


def started(environment, seed):
    environment._np_random, _ = seeding.np_random(seed)
    return environment.reset()[0]


def assert_equal_state(ours, theirs):
    for name in STATE:
        assert np.array_equal(getattr(ours.data, name), getattr(theirs.data, name)), name
    assert np.array_equal(ours.model.body_pos, theirs.model.body_pos)
    assert np.array_equal(ours.model.site_pos, theirs.model.site_pos)


def compare(metaworld, task, steps):
    """Play the expert, random actions, and the expert again from a start that is stored by then."""
    from metaworld.policies import ENV_POLICY_MAP

    from sims.suites.metaworld_stepper import lean

    theirs, ours = own(metaworld.ALL_V3_ENVIRONMENTS[task]), own(lean(metaworld.ALL_V3_ENVIRONMENTS[task]))
    successes = 0
    for seed, by_expert in ((0, True), (1, False), (0, True)):
        observation = started(theirs, seed)
        assert np.array_equal(started(ours, seed), observation)
        assert_equal_state(ours, theirs)
        still = np.zeros(4, dtype=np.float32)
        assert ours.evaluate_state(observation, still) == theirs.evaluate_state(observation, still)
        expert, generator = ENV_POLICY_MAP[task](), np.random.default_rng(seed)
        for _ in range(steps):
            action = expert.get_action(observation) if by_expert else generator.normal(0.0, 0.7, 4)
            action = np.clip(action, -1.0, 1.0).astype(np.float32)
            observation, reward, *ends, info = theirs.step(action)
            result = ours.step(action)
            assert np.array_equal(result[0], observation) and result[1] == reward
            assert list(result[2:4]) == ends and result[4] == info
            successes += info["success"]
        assert_equal_state(ours, theirs)
    return successes


@pytest.mark.filterwarnings("ignore:Constant")
@pytest.mark.parametrize("task", QUICK)
def test_numbers_equal_meta_worlds(metaworld, task):
    assert compare(metaworld, task, 70)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Constant")
@pytest.mark.parametrize("task", TASKS)
def test_numbers_of_all_tasks_equal_meta_worlds(metaworld, task):
    compare(metaworld, task, 150)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_all_tasks_keep_every_promise(metaworld, task):
    check_world(lambda batch: make_world(f"metaworld/{task}", batch, horizon=8), batch_size=3, chunk=3)


def test_rows_share_graphics_and_images_show_the_present(metaworld):
    from sims.suites.metaworld_environment import DRAWINGS

    world = make_world("metaworld/push-v3", 2, cameras=["gripperPOV"], image_size=32, horizon=8)
    world.reset(seeds=[1, 2])
    step = world.step(np.full((2, 8, 4), 0.5))
    environment = world.pool._local._rows[1].environment
    drawing = DRAWINGS[type(environment.unwrapped)]
    assert list(drawing.renderers) == [(32, 32)]
    image = step.observation["observation.images.gripperPOV"][1, -1]

    theirs = own(metaworld.ALL_V3_ENVIRONMENTS["push-v3"])
    started(theirs, 2)
    for _ in range(8):
        theirs.step(np.full(4, 0.5, np.float32))
    renderer = drawing.renderers[32, 32]
    renderer.update_scene(theirs.data, "gripperPOV")
    renderer.scene.flags[0] = renderer.scene.flags[2] = 0
    assert np.array_equal(renderer.render(), image)
    world.close()
    assert not drawing.renderers


def test_the_first_image_depends_on_the_seed_alone(metaworld):
    world = make_world("metaworld/push-v3", 1, cameras=["corner2"], image_size=64, horizon=8)
    first = world.reset(seeds=[3])["observation.images.corner2"].copy()
    for seed in (4, 3):
        images = world.reset(seeds=[seed])["observation.images.corner2"]
        assert np.array_equal(images, first) == (seed == 3)
        world.step(np.full((1, 8, 4), 0.5))
    world.close()
