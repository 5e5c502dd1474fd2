"""Gymnasium environments as people have them: odd in their spaces, their returns, or in how they speak."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

FREE = spaces.Box(-np.inf, np.inf, (2,))


def box(*shape, low=-np.inf, high=np.inf, dtype=np.float32):
    return spaces.Box(low, high, shape, dtype)


def byte(*shape):
    return box(*shape, low=0, high=255, dtype=np.uint8)


class Odd(gymnasium.Env):
    """A point that is pushed over a plane; what is odd is said by those derived from it."""

    metadata = {"render_modes": [], "render_fps": 10}  # noqa: RUF012
    max_episode_steps = 6
    observation_space = FREE
    action_space = spaces.Box(-1, 1, (2,))

    def seen(self):
        return self.place.astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.count = self.np_random.uniform(-1, 1, 2), 0
        return self.seen(), self.said()

    def paid(self):
        return -float(np.abs(self.place).sum())

    def said(self):
        return {"is_success": bool(np.abs(self.place).max() < 0.1)}

    def ended(self):
        return False

    def step(self, action):
        self.place, self.count = self.place + 0.1 * np.resize(np.asarray(action, np.float64), 2), self.count + 1
        return self.seen(), self.paid(), self.ended(), False, self.said()


def grey(place, shape, dtype=np.uint8, most=255.0):
    """A picture whose level is the place's first number, 0 to most."""
    level = most * (0.5 + 0.4 * np.tanh(place[0]))
    return np.full(shape, level).astype(dtype)


class Shows(Odd):
    """An observation of two numbers and the pictures of `entries`, name -> (space, most)."""

    entries = {}  # noqa: RUF012

    def __init__(self):
        shown = {name: space for name, (space, _) in self.entries.items()}
        self.observation_space = spaces.Dict({"qpos": FREE, **shown})

    def seen(self):
        shown = {name: grey(self.place, space.shape, space.dtype, most) for name, (space, most) in self.entries.items()}
        return {"qpos": self.place.astype(np.float32), **shown}


def shows(**entries):
    given = {name: each if isinstance(each, tuple) else (each, 255.0) for name, each in entries.items()}
    return type("Shown", (Shows,), {"entries": given})


class TwoOfOneName(Odd):
    """ManiSkill's layout: two cameras whose pictures are both called rgb, and depth."""

    observation_space = spaces.Dict(
        agent=spaces.Dict(qpos=FREE),
        sensor_data=spaces.Dict(
            base_camera=spaces.Dict(rgb=byte(12, 16, 3), depth=box(12, 16, 1, low=-9, high=9, dtype=np.int16)),
            hand_camera=spaces.Dict(rgb=byte(8, 8, 3)),
        ),
    )

    def seen(self):
        base = {"rgb": np.full((12, 16, 3), 60, np.uint8), "depth": np.ones((12, 16, 1), np.int16)}
        hand = {"rgb": np.full((8, 8, 3), 200, np.uint8)}
        return {
            "agent": {"qpos": self.place.astype(np.float32)},
            "sensor_data": {"base_camera": base, "hand_camera": hand},
        }


class CalledDefault(Odd):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Dict(default=byte(8, 8, 3), cam=spaces.Dict(default=byte(8, 8, 3)), qpos=FREE)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def seen(self):
        image = np.full((8, 8, 3), 30, np.uint8)
        return {"default": image, "cam": {"default": image + 30}, "qpos": self.place.astype(np.float32)}

    def render(self):
        return np.full((8, 8, 3), 222, np.uint8)


class Choices(Odd):
    """Entries that are chosen, nested in dictionaries and tuples."""

    observation_space = spaces.Dict(
        robot=spaces.Dict(pos=FREE, mode=spaces.Discrete(3, start=1)),
        flags=spaces.MultiBinary(4),
        dials=spaces.MultiDiscrete([2, 3]),
        pair=spaces.Tuple((box(), spaces.Discrete(2))),
    )

    def seen(self):
        return {
            "robot": {"pos": self.place.astype(np.float32), "mode": np.int64(3)},
            "flags": np.array([0, 1, 1, 0], np.int8),
            "dials": np.array([1, 2]),
            "pair": (np.float32(self.place[0]), 1),
        }


class NoNumbers(Odd):
    """Beside two numbers: texts, a sequence, a graph, more choices than one lists, nothing."""

    observation_space = spaces.Dict(
        qpos=FREE,
        instruction=spaces.Text(99),
        path=spaces.Sequence(box(2)),
        scene=spaces.Graph(box(2), None),
        cell=spaces.Discrete(100_000),
        nothing=box(0),
    )

    def seen(self):
        return {
            "qpos": self.place.astype(np.float32),
            "instruction": "bring it to the middle",
            "path": (np.zeros(2, np.float32),),
            "scene": None,
            "cell": 7,
            "nothing": np.zeros(0, np.float32),
        }


class Typed(Odd):
    """Numbers of all types and axes."""

    observation_space = spaces.Dict(
        half=box(2, low=-9, high=9, dtype=np.float16),
        whole=box(3, low=-99, high=99, dtype=np.int64),
        alone=box(),
        table=box(2, 2, dtype=np.float64),
        bodies=box(5, 4, 4),
        ram=byte(16),
        tiny=box(3, 3, low=0, high=9, dtype=np.uint8),
    )

    def seen(self):
        return {
            "half": self.place.astype(np.float16),
            "whole": [1, 2, 3],
            "alone": float(self.place[0]),
            "table": np.outer(self.place, [1.0, 2.0]),
            "bodies": np.tile(np.eye(4, dtype=np.float32), (5, 1, 1)),
            "ram": np.arange(16, dtype=np.uint8),
            "tiny": np.full((3, 3), 7, np.uint8),
        }


class Stacked(gymnasium.wrappers.FrameStackObservation):
    max_episode_steps = 6

    def __init__(self, pictures=False):
        super().__init__(shows(rgb=byte(16, 16, 3))() if pictures else Odd(), 4)


class StackOfColour(Odd):
    observation_space = spaces.Dict(qpos=FREE, rgb=byte(4, 16, 16, 3), gray=byte(4, 16, 16), maps=box(4, 16, 16))

    def seen(self):
        images = {"rgb": (4, 16, 16, 3), "gray": (4, 16, 16), "maps": (4, 16, 16)}
        return {
            "qpos": self.place.astype(np.float32),
            **{name: np.zeros(shape, self.observation_space[name].dtype) for name, shape in images.items()},
        }


class PictureAlone(Odd):
    observation_space = byte(16, 12, 3)

    def seen(self):
        return grey(self.place, (16, 12, 3))


class Tensors(Odd):
    """ManiSkill's answers: tensors with a leading 1."""

    observation_space = spaces.Dict(state=box(1, 2), rgb=byte(1, 8, 8, 3))

    def seen(self):
        return {"state": torch.tensor(self.place[None]), "rgb": torch.full((1, 8, 8, 3), 9, dtype=torch.uint8)}

    def paid(self):
        return torch.tensor([0.5])

    def ended(self):
        return torch.tensor([False])

    def said(self):
        return {"success": torch.tensor([self.count > 3])}


class Aliasing(Odd):
    """Every environment of the class hands out the same two arrays and writes into them later."""

    observation_space = spaces.Dict(qpos=FREE, rgb=byte(8, 8, 3))
    buffers = {"qpos": np.zeros(2, np.float32), "rgb": np.zeros((8, 8, 3), np.uint8)}  # noqa: RUF012

    def seen(self):
        self.buffers["qpos"][:] = self.place
        self.buffers["rgb"][:] = grey(self.place, (8, 8, 3))
        return self.buffers


class WritesIntoActions(Odd):
    def step(self, action):
        done = super().step(action)
        action[:] = 99.0
        return done


class RowOfActions(Odd):
    action_space = spaces.Box(-1, 1, (1, 2), np.float64)

    def step(self, action):
        assert action.shape == (1, 2) and action.dtype == np.float64
        return super().step(action)


def acts(space):
    return type("Acts", (Odd,), {"action_space": space})


class NamedActions(Odd):
    action_names = ("east", "north")
    action_space = spaces.Box(np.array([-1, 0.5], np.float32), np.array([np.inf, 0.5], np.float32))


def pays(value):
    return type("Pays", (Odd,), {"paid": lambda self: value})


def ends(value):
    return type("Ends", (Odd,), {"ended": lambda self: value})


class NoInfo(Odd):
    def said(self):
        return None

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {}


class NoOptions(Odd):
    def reset(self, seed=None):
        return super().reset(seed=seed)


class IgnoresSeeds(Odd):
    draws = np.random.default_rng(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.draws.uniform(-1, 1, 2)
        return self.seen(), {}


class AlwaysAlike(Odd):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.zeros(2)
        return self.seen(), {}


class OldReset(Odd):
    def reset(self):
        return super().reset(seed=0)[0]


class OldReturn(Odd):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class OldStep(Odd):
    def step(self, action):
        observation, paid, *_, info = super().step(action)
        return observation, paid, False, info


class Fails(Odd):
    def step(self, action):
        raise RuntimeError("the arm has no power")


class FailsAtFirst(Odd):
    def reset(self, *, seed=None, options=None):
        raise FileNotFoundError("scene.xml")


class CannotBeMade(Odd):
    def __init__(self):
        raise OSError("no licence")


def returns(observation, space=FREE):
    """An environment that hands out something else than its space declares."""
    kind = {"observation_space": space, "seen": lambda self: observation(self.place)}
    return type("Returns", (Odd,), kind)


class Infinite(Odd):
    observation_space = spaces.Dict(force=box(3), qpos=FREE)

    def seen(self):
        force = np.array([0.0, np.inf if self.count > 1 else 0.0, 0.0], np.float32)
        return {"force": force, "qpos": self.place.astype(np.float32)}

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return super().reset(seed=seed)


class BeyondItsBounds(Odd):
    observation_space = spaces.Box(-0.01, 0.01, (2,))


class Endless(Odd):
    max_episode_steps = None


class Rateless(Odd):
    metadata = {"render_modes": []}  # noqa: RUF012


class NoMetadata(Odd):
    metadata = None


class EndsItself(Odd):
    """A time limit of 3 inside the environment, below the world's."""

    def step(self, action):
        *done, _, info = super().step(action)
        return *done, self.count >= 3, info


class NoRenderMode(Odd):
    """Says that it draws, and takes no render mode."""

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 10}  # noqa: RUF012


class Draws(NoRenderMode):
    drawn = None

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return self.drawn


def draws(value):
    return type("Drawn", (Draws,), {"drawn": value})


class OwnTask(Odd):
    task = "go to the middle"


class TaskInInfo(Odd):
    def said(self):
        return {**super().said(), "task": f"go to corner {int(self.place[0] > 0) + 2 * int(self.place[1] > 0)}"}


class TaskObject(Odd):
    """dm_control's `task` is no text."""

    task = object()


class LeRobotsKeys(Odd):
    """LeRobot's own keys, flat as its datasets have them."""

    slash = "."
    keys = ("state", "environment_state", "images.top", "image")

    def __init__(self):
        pictures = byte(8, 8, 3)
        self.observation_space = spaces.Dict(
            {f"observation.{key}".replace(".", self.slash): pictures if "image" in key else FREE for key in self.keys}
        )

    def seen(self):
        return {
            key: np.full((8, 8, 3), 9, np.uint8) if "image" in key else self.place.astype(np.float32)
            for key in self.observation_space
        }


class Openpis(LeRobotsKeys):
    slash = "/"


class NamedTwice(Odd):
    element_names = ("x", "x")


class NamedByAText(Odd):
    action_names = "xy"


class NamedTooOften(Odd):
    element_names = ("x", "y", "z")
    action_names = ("a", "b", "c")


def says(info):
    return type("Says", (Odd,), {"said": lambda self: info})


def limited(steps):
    return type("Limited", (Odd,), {"max_episode_steps": steps})


def rated(rate):
    return type("Rated", (Odd,), {"metadata": {"render_modes": [], "render_fps": rate}})


class CannotBeClosed(Odd):
    def close(self):
        raise RuntimeError("the window is gone")


class Wrapped(gymnasium.wrappers.Autoreset):
    max_episode_steps = 6

    def __init__(self):
        super().__init__(Odd())


class Several(gymnasium.vector.SyncVectorEnv):
    pass


class GoalsOfTwoSizes(Odd):
    observation_space = spaces.Dict(observation=FREE, achieved_goal=FREE, desired_goal=box(3))

    def seen(self):
        place = self.place.astype(np.float32)
        return {"observation": place, "achieved_goal": place, "desired_goal": np.zeros(3, np.float32)}


def fails_to_pay(observation):
    return observation["nothing"]


class OneName(Odd):
    observation_space = spaces.Dict({"a.b": FREE, "a": spaces.Dict(b=FREE)})


class Strange(spaces.Space):
    def sample(self, mask=None, probability=None):
        return None
