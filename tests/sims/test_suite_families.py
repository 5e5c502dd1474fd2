"""Packages whose ids are known: their extras, names and rewards, on stand-ins and on the packages where installed."""

import sys
import types
from functools import partial
from importlib.util import find_spec

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv
from suite_toys import PointEnvironment

from robopolicy.core.errors import ConfigError, RobopolicyWarning, require_extra
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.testing.world import check_world
from sims.registry import make_world, require_trusted
from sims.suites.gymnasium_suite import GymnasiumWorld, make_gymnasium_world


class Covering(gymnasium.Env):
    """As gym-pusht: five numbers, a reward that is a level, its last bits from outside the simulation."""

    metadata = {"render_modes": [], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (5,))
    action_space = spaces.Box(0, 512, (2,))
    last_bits = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level = float(self.np_random.uniform(0, 0.2))
        return np.full(5, self.level, np.float32), {"is_success": False}

    def step(self, action):
        self.level = min(1.0, self.level + float(action[0]) / 512 / 10)
        noisy = self.level + 1e-15 * self.last_bits.integers(-3, 4)
        done = self.level >= 0.95
        return np.full(5, self.level, np.float32), noisy, done, False, {"is_success": done}


@pytest.fixture
def pusht(monkeypatch):
    for name in ("gym_pusht", "gym_pusht.envs"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(gymnasium.registry, "gym_pusht/PushT-v0", None)
    gymnasium.registry.pop("gym_pusht/PushT-v0")
    gymnasium.register("gym_pusht/PushT-v0", entry_point=Covering, max_episode_steps=12)


def test_push_t_has_names_a_criterion_and_rewards_that_repeat(pusht):
    name = "gymnasium:gym_pusht/PushT-v0"
    check_world(lambda batch: make_world(name, batch), chunk=3, snapshots=False, renders=False)
    spec = make_world(name, 1).spec
    assert spec.observation[STATE].names == ("agent_x", "agent_y", "block_x", "block_y", "block_angle")
    assert "95 %" in spec.success and spec.rewards == ("progress", "success") and spec.horizon == 12
    own = make_world(name, 1, reward="environment", horizon=7, instruction="go", success_text="so").spec
    assert (own.rewards, own.horizon, own.instructions, own.success) == (("reward",), 7, ("go",), "so")


@pytest.mark.parametrize("key", ["is_success", "success", "succeed"])
def test_the_usual_keys_of_success_are_found(key):
    world = GymnasiumWorld("toy", partial(PointEnvironment, success_name=key), 1, horizon=3, instruction="go")
    assert world.spec.reports_success
    world.close()


def test_an_unsuitable_release_of_a_package_is_named_before_it_fails(pusht, monkeypatch):
    said = " mujoco 3.10 is installed, and pusht works with another."
    monkeypatch.setattr("sims.suites.gymnasium_suite.extra_conflict", lambda extra: said if extra == "pusht" else "")
    with pytest.warns(RobopolicyWarning, match="'gym_pusht/PushT-v0' may fail: mujoco 3.10 is installed"):
        make_world("gymnasium:gym_pusht/PushT-v0", 1).close()


def test_the_increase_of_a_level_never_pays_for_waiting(pusht):
    world = make_world("gymnasium:gym_pusht/PushT-v0", 2, reward_scale=3.0)
    world.reset(seeds=[0, 1])
    begun = world.step(np.full((2, 4, 2), 512.0))
    waited = world.step(np.zeros((2, 3, 2)))
    ended = world.step(np.full((2, 5, 2), 512.0))
    assert np.allclose(begun.rewards["progress"], [[0.0, 0.3, 0.3, 0.3]] * 2, atol=1e-8)
    assert (waited.rewards["progress"] == 0).all()
    assert np.allclose(ended.rewards["progress"][:, 0], 0.3, atol=1e-8)
    world.reset(seeds=[0, 1])
    assert (world.step(np.full((2, 1, 2), 512.0)).rewards["progress"] == 0).all()  # nothing of the episode before


def test_a_family_without_its_package_names_the_extra_and_is_no_foreign_code(monkeypatch):
    for package, extra, env_id in (
        ("gym_pusht.envs", "pusht", "gym_pusht/PushT-v0"),
        ("gym_aloha", "aloha", "gym_aloha/AlohaInsertion-v0"),
        ("shimmy", "dmcontrol", "dm_control/reacher-easy-v0"),
        ("gym_hil", "hil", "gym_hil/PandaPickCube-v0"),
        ("lerobot_env_so101", "so101", "lerobot_env_so101/SO101PickCube-v0"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(gymnasium.registry, env_id, None)
        gymnasium.registry.pop(env_id)
        with pytest.raises(ConfigError, match=rf"pip install 'robopolicy\[{extra}\]'"):
            make_world(f"gymnasium:{env_id}", 1)
        require_trusted(f"gymnasium:{env_id}", "a checkpoint", "")  # no error: its module is named here


@pytest.mark.parametrize("content", ["import a_library_of_it", "from os import what_it_had"])
def test_a_package_that_is_there_and_does_not_work_is_named(content, tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'half_installed' is installed but cannot be imported \(.*robopolicy\[it\]"):
        require_extra("half_installed", "it")


@pytest.mark.parametrize("success", ["return >= 5", "return so far >= 5"])
def test_the_return_that_decides_success_is_part_of_a_snapshot(success):
    world = make_gymnasium_world("InvertedPendulum-v5", 1, success=success, reward="environment", horizon=5)
    world.reset(seeds=[0])
    world.step(np.zeros((1, 3, 1)))
    saved = world.snapshot()
    world.reset(seeds=[1])
    world.restore(saved)
    assert not world.step(np.zeros((1, 1, 1))).success[0]
    assert world.step(np.zeros((1, 1, 1))).success[0]
    world.close()


class Draws(gymnasium.Env):
    """An environment inside another one, as FrankaKitchen has its robot, with a generator of its own."""


class HasAnotherInside(InvertedPendulumEnv):
    def __init__(self, **options):
        super().__init__(**options)
        self.inner = Draws()

    def reset(self, *, seed=None, options=None):
        self.inner._np_random = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        observation, *rest = super().step(action)
        return observation + self.inner.np_random.normal(0, 0.1, observation.shape), *rest


def test_generators_of_environments_inside_are_part_of_a_snapshot():
    world = GymnasiumWorld("toy", HasAnotherInside, 2, horizon=9, instruction="go")
    world.reset(seeds=[0, 1])
    saved = world.snapshot()
    first = world.step(np.zeros((2, 3, 1))).trace[STATE]
    world.restore(saved)
    assert np.array_equal(first, world.step(np.zeros((2, 3, 1))).trace[STATE])
    world.close()


class Named(PointEnvironment):
    state_keys = ("desired_goal",)


class Timed(PointEnvironment):
    """As dm_control in shimmy's clothes: the frame rate of its videos is not its rate of control."""

    _env = types.SimpleNamespace(control_timestep=lambda: 0.04)


def test_an_environment_may_say_what_is_its_own_and_how_long_a_step_is():
    named = GymnasiumWorld("toy", Named, 1, horizon=3, instruction="go").spec
    assert named.observation[STATE].names == ("desired_goal[0]", "desired_goal[1]")
    told = GymnasiumWorld("toy", Named, 1, horizon=3, instruction="go", state_keys=["agent_pos"]).spec
    assert told.observation[STATE].names == ("agent_pos[0]", "agent_pos[1]", "agent_pos[2]")
    assert named.fps == 10 and GymnasiumWorld("toy", Timed, 1, horizon=3, instruction="go").spec.fps == 25


class Hidden(gymnasium.Env):
    """As ALOHA: where things lie is in the image alone, and the robot always starts alike."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    render_mode = "rgb_array"
    observation_space = spaces.Dict(agent_pos=spaces.Box(-9, 9, (1,)), top=spaces.Box(0, 255, (4, 4, 3), np.uint8))
    action_space = spaces.Box(-1, 1, (1,))

    def _seen(self):
        return {"agent_pos": np.array([self.place], np.float32), "top": np.full((4, 4, 3), self.shade, np.uint8)}

    def render(self):
        return self._seen()["top"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.shade = 0.0, int(self.np_random.integers(255))
        return self._seen(), {"success": False}

    def step(self, action):
        self.place += float(action[0])
        return self._seen(), 0.0, False, False, {"success": False}


def test_starts_that_differ_in_images_alone_are_new_starts():
    def make(batch, **options):
        return GymnasiumWorld("toy", Hidden, batch, horizon=4, instruction="go", **options)

    check_world(lambda batch: make(batch, cameras=("top",), image_size=4), snapshots=False)
    with pytest.raises(AssertionError, match="new initial states"):
        check_world(make, snapshots=False)


@pytest.mark.skipif(find_spec("gym_pusht") is None, reason="gym-pusht is not installed")
def test_the_original_push_t_keeps_every_promise():
    check_world(lambda batch: make_world("gymnasium:gym_pusht/PushT-v0", batch, horizon=60), snapshots=False)


@pytest.mark.parametrize("task", ["TransferCube", "Insertion"])
def test_aloha_shows_joints_and_objects_and_draws_when_asked(task):
    pytest.importorskip("gym_aloha")
    import gym_aloha  # noqa: F401 (registers its environments)

    name = f"gym_aloha/Aloha{task}-v0"
    world, own = make_world(f"gymnasium:{name}", 1), gymnasium.make(name, obs_type="pixels_agent_pos").unwrapped
    start, (seen, _) = world.reset(seeds=[3]), own.reset(seed=3)
    assert np.array_equal(world.render(camera="top", height=480, width=640)[0], seen["pixels"]["top"])
    objects = own._env.physics.data.qpos[16:]
    assert np.allclose(start[STATE][0, -1], seen["agent_pos"]) and np.allclose(start[ENVIRONMENT_STATE][0, -1], objects)
    action = np.array([0, -0.9, 1.1, 0, -0.3, 0, 1.0] * 2)
    for _ in range(3):
        step, (seen, *_) = world.step(action[None, None]), own.step(action)
    assert np.allclose(step.trace[STATE][0, -1], seen["agent_pos"], atol=1e-6)
    spec, draws = world.spec, np.random.default_rng(0)
    far = world.step(draws.uniform(spec.action.low, spec.action.high, (1, 100, 14)))
    assert far.terminated[0] and not far.success[0], "a simulation that diverges ends the episode"
    assert spec.fps == 50 and world.repeats and spec.action.names[7] == "right_waist" and spec.horizon == 300
    assert spec.instructions == (
        "insert the peg into the socket" if task == "Insertion" else
        "pick up the cube with the right arm and transfer it to the left arm",
    )  # fmt: skip
    world.close()


@pytest.mark.parametrize(
    ("name", "gripper", "instruction"),
    [
        ("gym_hil/PandaPickCube-v0", (0.0, 2.0), "pick up the cube"),
        ("gym_hil/PandaPickCubeBase-v0", (-1.0, 1.0), "pick up the cube"),
        ("gym_hil/PandaArrangeBoxes-v0", (0.0, 2.0), "put every box on its target"),
        ("lerobot_env_so101/SO101PickCube-v0", (0.0, 1.0), "pick up the cube"),
        ("lerobot_env_so101/SO101PickPlace-v0", (0.0, 1.0), "put the cube on its goal"),
    ],
)
def test_gym_hil_and_so101_are_known(name, gripper, instruction):
    pytest.importorskip(name.partition("/")[0])
    world = make_world(f"gymnasium:{name}", 4)
    spec, first = world.spec, world.reset(seeds=range(4))
    assert first[ENVIRONMENT_STATE].std(axis=0).any() and world.repeats and spec.reports_success
    assert spec.action.names[-1] == "gripper" and (spec.action.low[-1], spec.action.high[-1]) == gripper
    assert spec.instructions == (instruction,) and spec.fps == 10 and "front" in world.available_cameras
    world.close()


def test_dm_control_has_its_own_rate_and_time_limit():
    pytest.importorskip("shimmy")
    pytest.importorskip("dm_control")
    world = make_world("gymnasium:dm_control/reacher-easy-v0", 2, success="return >= 1")
    assert world.spec.fps == 50 and world.spec.horizon == 1000 and world.repeats
    world.close()
