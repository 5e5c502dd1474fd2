"""robosuite through the same protocol: the mapping on a stand-in for the package, and the package where installed."""

import sys

import numpy as np
import pytest
from robosuite_toy import Environment, module

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.testing.world import check_world
from sims.registry import make_expert, make_world


@pytest.fixture
def toy(monkeypatch):
    toy_module = module()
    monkeypatch.setitem(sys.modules, "robosuite", toy_module)
    return toy_module


def forward(world, steps, speed=1.0):
    return world.step(np.full((world.batch_size, steps, 1), speed))


def test_the_stand_in_keeps_every_promise(toy):
    """Starts and noise come from the seed alone, and a snapshot holds what controllers remember."""
    check_world(lambda batch: make_world("robosuite/Lift", batch, history=2, horizon=8), chunk=3, renders=False)


def test_entries_have_names_under_lerobot_keys(toy):
    spec = make_world("robosuite/Stack", 1).spec
    assert spec.observation[STATE].names == ("robot0_joint_pos[0]", "robot0_joint_vel[0]")
    assert spec.observation[ENVIRONMENT_STATE].names == ("size[0]", "cube_pos[0]", "cube_pos[1]", "cube_pos[2]")
    assert spec.fps == 20 and spec.horizon == 400 and spec.reports_success
    assert spec.instructions == ("stack the red cube on the green cube",)
    few = make_world("robosuite/Lift", 1, env_options={"keys": ["cube_pos", "robot0_joint_pos"], "control_freq": 10})
    assert few.spec.observation[STATE].shape == (1,) and few.spec.observation[ENVIRONMENT_STATE].shape == (3,)
    assert few.spec.fps == 10


def test_success_is_the_tasks_own_check_and_the_reward_the_increase_of_its_level(toy):
    world = make_world("robosuite/Lift", 2, horizon=40, terminate_on_success=False, reward_scale=2.0)
    first = world.reset(seeds=[0, 1])[STATE][:, -1, 0]
    step = forward(world, 40)
    places = step.trace[STATE][:, :, 0]
    assert step.success.all() and (first < 0.3).all()
    assert np.allclose(step.rewards["progress"].sum(axis=1), 2.0 * (places[:, -1] - places[:, 0]), atol=1e-5)
    assert (np.argmax(step.rewards["success"], axis=1) == np.argmax(places > 0.3, axis=1)).all()
    raw = make_world("robosuite/Wipe", 1, horizon=3)
    raw.reset(seeds=[0])
    step = forward(raw, 3)
    assert np.allclose(step.rewards["reward"], step.trace[STATE][:, :, 0], atol=1e-5)


def test_numpys_global_generator_is_neither_read_nor_moved(toy):
    starts = []
    for seed in (1, 2):
        np.random.seed(seed)  # noqa: NPY002
        before = np.random.get_state()[1].copy()  # noqa: NPY002
        world = make_world("robosuite/Lift", 2)
        starts.append([world.reset(seeds=[5, 6]), forward(world, 3).observation])
        assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    for key in (STATE, ENVIRONMENT_STATE):
        assert all(np.array_equal(one[key], other[key]) for one, other in zip(*starts, strict=True))
    assert len(np.unique(starts[0][0][STATE])) > 2
    sizes = starts[0][0][ENVIRONMENT_STATE][..., 0]
    assert len(np.unique(sizes)) == 1  # drawn when the scene was built


def test_robots_and_controllers_reach_robosuite(toy):
    make_world("robosuite/TwoArmLift", 1)
    task, options = toy.made[-1]
    assert task == "TwoArmLift" and options["robots"] == ["Panda", "Panda"] and options["reward_shaping"]
    assert not options["hard_reset"] and options["ignore_done"] and "controller_configs" not in options
    make_world("robosuite/Lift", 1, env_options={"robots": "Sawyer", "controller": "OSC_POSITION"})
    configuration = toy.made[-1][1]["controller_configs"]
    assert configuration["of"] == "Sawyer" and configuration["body_parts"]["base"]["type"] == "JOINT_VELOCITY"
    assert configuration["body_parts"]["right"] == {"type": "OSC_POSITION", "gripper": {"type": "GRIP"}}
    make_world("robosuite/Lift", 1, env_options={"robots": ["Panda", "Sawyer"], "controller": "OSC_POSE"})
    assert [each["of"] for each in toy.made[-1][1]["controller_configs"]] == ["Panda", "Sawyer"]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("Lft", {}, "Did you mean 'Lift'"),
        ("Lift", {"env_options": {"controller": "OSC_POS"}}, "Did you mean 'OSC_POSE'"),
        ("Lift", {"env_options": {"keys": ["cube_po"]}}, "Did you mean 'cube_pos'"),
        ("Lift", {"env_options": {"horizon": 9}}, r"world\.options\.horizon"),
        ("Lift", {"worker": 1}, "Did you mean 'workers'"),
    ],
)
def test_what_is_unknown_is_told(toy, name, options, text):
    with pytest.raises(ConfigError, match=text):
        make_world(f"robosuite/{name}", 1, **options)


def test_a_missing_package_and_versions_that_do_not_fit_name_the_command(toy, monkeypatch):
    def fails(task, **options):
        raise TypeError("mj_fullM(): incompatible function arguments")

    toy.make = fails
    with pytest.raises(ConfigError, match=r"mj_fullM.*mujoco 3.*pip install 'robopolicy\[robosuite\]'"):
        make_world("robosuite/Lift", 1)
    monkeypatch.setitem(sys.modules, "robosuite", None)
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'robopolicy\[robosuite\]'"):
        make_world("robosuite/Lift", 1)


def test_the_expert_says_what_it_misses_and_other_tasks_have_none(toy):
    assert make_expert("robosuite/Stack", make_world("robosuite/Stack", 1).spec) is None
    with pytest.raises(ConfigError, match="robot0_eef_pos"):
        make_expert("robosuite/Lift", make_world("robosuite/Lift", 1).spec)


def test_closing_a_world_closes_robosuite(toy, monkeypatch):
    closed = []
    monkeypatch.setattr(Environment, "close", lambda self: closed.append(1))
    make_world("robosuite/Lift", 3).close()
    assert len(closed) == 3


@pytest.fixture
def installed():
    package = pytest.importorskip("robosuite")
    if package.__version__ < "1.5":
        pytest.skip("needs robosuite 1.5.1, in another environment than the extra libero with its 1.4.0")
    return package


def test_lift_keeps_every_promise(installed):
    check_world(lambda batch: make_world("robosuite/Lift", batch, history=2, horizon=6), chunk=3)


def test_the_expert_lifts(installed):
    world = make_world("robosuite/Lift", 3)
    observation, expert = world.reset(seeds=[0, 1, 2]), make_expert("robosuite/Lift", world.spec)
    total = 0.0
    for _ in range(150):
        step = world.step(expert.act(observation)[:, None])
        observation, total = step.observation, total + sum(step.rewards.values()).sum()
        if step.ended.all():
            break
    assert step.success.mean() >= 2 / 3 and 3 < total <= 9
    world.close()
