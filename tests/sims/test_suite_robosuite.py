"""robosuite through the same protocol: the mapping on a stand-in for the package, and the package where installed."""

import sys

import numpy as np
import pytest
from robosuite_toy import Environment, module

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.testing.world import check_world
from sims.registry import make_expert, make_world
from sims.suites.controllers.robosuite import JOBS
from sims.suites.robosuite_environment import RobosuiteEnvironment


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
        ("PickPlaceSingle", {}, "use PickPlaceCan, PickPlaceMilk"),
        ("NutAssemblySingle", {}, "use NutAssemblySquare or"),
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


@pytest.mark.long
def test_lift_keeps_every_promise(installed):
    check_world(lambda batch: make_world("robosuite/Lift", batch, history=2, horizon=6), chunk=3)


ONE_ARM = (
    *("Lift", "Stack", "Door", "NutAssembly", "NutAssemblySquare", "NutAssemblyRound", "ToolHang"),
    *("PickPlace", "PickPlaceCan", "PickPlaceMilk", "PickPlaceBread", "PickPlaceCereal"),
)
TWO_ARMS = ("TwoArmLift", "TwoArmHandover", "TwoArmTransport")


@pytest.mark.long
@pytest.mark.parametrize("task", [*ONE_ARM, *TWO_ARMS])
def test_motion_rewards_and_observations_equal_robosuites_own_for_100_steps(installed, task):
    """Both start from the same seed; where the state is equal, rewards are within 1e-9."""
    theirs, ours = (RobosuiteEnvironment(task, fast=fast) for fast in (False, True))
    assert theirs._stepper is None and ours._stepper is not None
    near = 1e-6 if task in ONE_ARM else 1e-5  # contacts double a difference every few steps
    for seed in (3, 4):
        generator = np.random.default_rng(seed)
        pair = [environment.reset(seed=seed)[0] for environment in (theirs, ours)]
        assert all(np.array_equal(pair[0][key], pair[1][key]) for key in pair[0])
        for number in range(100):
            action = np.clip(generator.normal(0.0, 0.7, ours.action_space.shape), -1.2, 1.2)
            action[3:6] *= number % 3 > 0
            action[6::7] = np.sign(np.sin(number / 9))
            (seen, reward, *_, info), (our_seen, our_reward, *_, our_info) = (
                each.step(action) for each in (theirs, ours)
            )
            off = np.abs(theirs.data.qpos - ours.data.qpos).max()
            assert off < near and info == our_info
            assert abs(reward - our_reward) < (1e-9 if off < 1e-12 else near)
            assert all(np.allclose(seen[key], our_seen[key], atol=1e3 * near) for key in seen)
            if number < 10:
                assert off < 1e-12 and all(np.allclose(seen[key], our_seen[key], atol=1e-6) for key in seen)


@pytest.mark.long
def test_success_comes_in_the_same_step(installed):
    """The actions of an expert that watches robosuite's own environment solve the task in ours."""
    worlds = [make_world("robosuite/PickPlaceCan", 1, env_options={"fast": fast}) for fast in (False, True)]
    expert = make_expert("robosuite/PickPlaceCan", worlds[0].spec)
    observation, _ = (world.reset(seeds=[0]) for world in worlds)
    for _ in range(200):
        action = expert.act(observation)[:, None]
        theirs, ours = (world.step(action) for world in worlds)
        observation = theirs.observation
        assert np.array_equal(theirs.success, ours.success)
        if theirs.ended.all():
            break
    assert ours.success.all()


def test_other_robots_and_controllers_keep_robosuites_own_step(installed):
    for options in ({"robots": "IIWA"}, {"controller": "OSC_POSITION"}, {"gripper_types": "RethinkGripper"}):
        assert RobosuiteEnvironment("Lift", **options)._stepper is None
    assert RobosuiteEnvironment("Lift", control_freq=10)._stepper is not None


def test_a_snapshot_continues_bit_by_bit_also_from_the_first_observation(installed):
    world = make_world("robosuite/Lift", 2)
    world.reset(seeds=[0, 1])
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (2, 3, 7))
    for _ in range(2):  # the first action is relative to an older pose
        snapshot = world.snapshot()
        first = world.step(actions)
        world.reset(seeds=[5, 6])
        world.step(actions)
        world.restore(snapshot)
        second = world.step(actions)
        for key in (STATE, ENVIRONMENT_STATE):
            assert np.array_equal(first.observation[key], second.observation[key])
    world.close()


def test_robomimics_observation(installed):
    spec = make_world("robosuite/PickPlaceCan", 1, env_options={"keys": "robomimic"}).spec
    robot, objects = spec.observation[STATE].names, spec.observation[ENVIRONMENT_STATE].names
    assert [name.partition("[")[0] for name in (robot[0], robot[3], robot[7])] == [
        *("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"),
    ]
    assert len(robot) == 9 and len(objects) == 14 and all(name.startswith("Can_") for name in objects)


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task == "Lift" else pytest.mark.long) for task in JOBS]
)
def test_the_expert_succeeds(installed, task):
    world = make_world(f"robosuite/{task}", 4)
    observation, expert = world.reset(seeds=np.arange(4)), make_expert(f"robosuite/{task}", world.spec)
    total, solved = 0.0, np.zeros(4, bool)
    for _ in range(200):
        step = world.step(expert.act(observation)[:, None])
        observation, total = step.observation, total + sum(step.rewards.values()).sum()
        solved |= step.success
        if solved.all():
            break
    assert solved.sum() >= 3 and 4 < total <= 12
    world.close()
