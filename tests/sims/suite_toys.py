"""A tiny third-party environment, importable in worker processes: a point that walks to a goal, without MuJoCo."""

import gymnasium
import numpy as np
from gymnasium import spaces


class PointEnvironment(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(
        self,
        render_mode=None,
        fall=None,
        fail_at=None,
        nan_at=None,
        success_name="is_success",
        cut=None,
        says_from=0,
        image=(10, 20, 3),
    ):
        self.render_mode, self.says_from, self.image = render_mode, says_from, tuple(image)
        self.fall, self.fail_at, self.nan_at, self.success_name, self.cut = fall, fail_at, nan_at, success_name, cut
        box = spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = spaces.Dict(
            {
                "achieved_goal": box,
                "agent_pos": spaces.Box(-np.inf, np.inf, (3,)),
                "desired_goal": box,
                "pixels": spaces.Box(0, 255, self.image, dtype=np.uint8),
            }
        )
        self.action_space = spaces.Box(-1, 1, (2,))

    def _observe(self):
        value = np.nan if self.nan_at is not None and self.count >= self.nan_at else float(self.count)
        return {
            "achieved_goal": self.position.copy(),
            "agent_pos": np.array([*self.position, value]),
            "desired_goal": self.goal,
            "pixels": np.full(self.image, int(100 + 50 * np.tanh(self.position[0])), dtype=np.uint8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.position = self.np_random.uniform(-0.2, 0.2, 2)
        self.goal = np.array((options or {}).get("goal", [1.0, 0.0]), dtype=np.float64)
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        if self.fail_at is not None and self.count >= self.fail_at:
            raise ArithmeticError("the point fell off its edge")
        self.position = self.position + 0.1 * action + self.np_random.normal(0, 1e-3, 2)
        near = bool(np.linalg.norm(self.position - self.goal) < 0.3)
        fallen = self.fall is not None and bool(self.position[1] < self.fall)
        cut = self.cut is not None and self.count >= self.cut
        info = {self.success_name: near} if fallen or cut or self.count >= self.says_from else {}
        return self._observe(), -0.5, fallen, cut, info

    def render(self):
        return self._observe()["pixels"]


class PressEnvironment(gymnasium.Env):
    """Discrete actions: not for us."""

    metadata = {"render_modes": [], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)


class PlainEnvironment(gymnasium.Env):
    """A flat observation, no images, no rate, no success."""

    metadata = {"render_modes": []}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (2, 2))
    action_space = spaces.Box(-2, 3, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.matrix = self.np_random.uniform(-1, 1, (2, 2))
        return self.matrix, {}

    def step(self, action):
        self.matrix = self.matrix + 0.01 * action[0]
        return self.matrix, float(action[0]), False, False, {}


def point_potential(observation):
    return -np.abs(observation["observation.state"][..., 0] - 1.0)


def one_number(observation):
    return np.zeros(3)


NOT_CALLABLE = 3

gymnasium.register("Point-v0", entry_point=PointEnvironment, max_episode_steps=12)
gymnasium.register("Press-v0", entry_point=PressEnvironment, max_episode_steps=12)
gymnasium.register("Plain-v0", entry_point=PlainEnvironment, max_episode_steps=5)
gymnasium.register("Endless-v0", entry_point=PointEnvironment)


class SilentEnvironment(gymnasium.Env):
    """Walks right and never says whether it has arrived; draws its start from numpy's global generator if asked to."""

    metadata = {"render_modes": [], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, unseeded=False):
        self.unseeded = unseeded

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.random.uniform() if self.unseeded else self.np_random.uniform()  # noqa: NPY002
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place += float(action[0])
        return np.array([self.place], np.float32), float(action[0]), False, False, {}


class NestedGoals(SilentEnvironment):
    """Goals in dictionaries, as Gymnasium-Robotics' FrankaKitchen has them."""

    observation_space = spaces.Dict(
        {
            "observation": spaces.Box(-np.inf, np.inf, (1,)),
            "achieved_goal": spaces.Dict({"kettle": spaces.Box(-9, 9, (2,)), "switch": spaces.Box(-9, 9, (1,))}),
            "desired_goal": spaces.Dict({"kettle": spaces.Box(-9, 9, (2,)), "switch": spaces.Box(-9, 9, (1,))}),
        }
    )

    def _seen(self):
        here, there = np.full(3, self.place, np.float32), np.full(3, 2.0, np.float32)
        goals = {"kettle": here[:2], "switch": here[2:]}, {"kettle": there[:2], "switch": there[2:]}
        return {"observation": here[:1], "achieved_goal": goals[0], "desired_goal": goals[1]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action):
        _, reward, *ends = super().step(action)
        return self._seen(), reward, *ends


def arrived(observation):
    """Success of SilentEnvironment: [n] by key -> whether it is beyond 2."""
    return observation["observation.state"][0] >= 2.0


def indexes_too_much(observation):
    """A success function written for many observations at once, which it is not given."""
    return observation["observation.state"][:, 0] >= 2.0


def says_two(observation):
    """A success function that says an array."""
    return observation["observation.state"] >= 2.0


class PaysEnvironment(gymnasium.Env):
    """Pays what `pay` says at each of its steps (the last number from then on), and ends where `ends` says."""

    metadata = {"render_modes": [], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, pay=(-1.0,), ends=None, cut=None, says=None):
        self.pay, self.ends, self.cut, self.says = tuple(pay), ends, cut, says

    def _seen(self):
        return np.array([self.start + self.count], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.start = 0, self.np_random.uniform()
        return self._seen(), {}

    def step(self, action):
        self.count += 1
        paid = self.pay[min(self.count, len(self.pay)) - 1]
        ended, cut = self.count == self.ends, self.count == self.cut
        return self._seen(), paid, ended, cut, {} if self.says is None else self.says(self.count, ended or cut)


class LooseEnvironment(gymnasium.Env):
    """Declares actions of -1 to 1 and takes places to 1.9, as ALOHA does: done where it was told to be."""

    metadata = {"render_modes": [], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Box(-1, 1, (2,))

    def _seen(self):
        return self.goal.astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = self.np_random.uniform(-1.9, 1.9, 2) * (1.0, 0.5)
        return self._seen(), {"is_success": False}

    def step(self, action):
        there = bool(np.abs(action - self.goal).max() < 0.01)
        return self._seen(), float(there), there, False, {"is_success": there}


class ToGoal:
    """Exact in LooseEnvironment."""

    def __init__(self, spec=None):
        self.spec = spec

    def reset(self, rows=None):
        pass

    def act(self, observation):
        return observation["observation.state"][:, -1].astype(np.float64)
