"""LIBERO's tasks as a gymnasium environment, stepped with our own controller on the model that LIBERO builds.

robosuite computes three full forward passes per physics step; here it is one. Motion and success equal those of
LIBERO's own environment (tested: positions within 1e-6, the same step of success), including its hidden state: the
first action moves relative to the arm's pose at the preceding reset; goal predicates read poses that are one physics
step old, observations and images those that are two steps old; a closing gripper is ramped. Runs inside worker
processes: no torch.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import weakref
from collections.abc import Mapping
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.registry import require_types
from sims.graphics import view_of
from sims.suites.libero_scene import (
    SCENES_KEPT,
    LiberoTask,
    Row,
    Settled,
    bounds_of,
    imported,
    initial_states,
    quiet,
    scene_of,
    tasks_of,
)
from sims.suites.operational_space import JACOBIAN, POSITION, ROTATION, STEP, TURN, turned

LEROBOT, OPENPI = PROTOCOLS = ("lerobot", "openpi")
LIGHT, ORIGINAL = LOOKS = ("light", "original")
CAMERAS = {"image": "agentview", "image2": "robot0_eye_in_hand"}
"""LeRobot's names of LIBERO's two cameras; their images are mirrored, as in the published datasets."""
STATES = 50
"""Number of official initial states of a task."""
STATE_PARTS = {"eef_pos": 3, "eef_axis_angle": 3, "gripper_qpos": 2}
INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION


def start_of(seed: int, tasks: int) -> tuple[int, int]:
    """Return the task, below `tasks`, and the initial state that an episode's seed selects.

    STATES * tasks consecutive seeds play every initial state of every task once. Tasks alternate, unless a suite has
    more of them than a process can hold.
    """
    if tasks <= SCENES_KEPT:
        return seed % tasks, seed // tasks % STATES
    return seed // STATES % tasks, seed % STATES


class LiberoEnvironment(gymnasium.Env):
    """One task of LIBERO, or all tasks of a suite, one of which every episode's seed selects.

    name: "libero_spatial" or "libero_spatial:3"; protocol: whose placement of the fixtures to use, "lerobot", "openpi",
    or None for one placement per task; fixtures: seed of that one placement; settle_steps: control steps that hold
    still before the first observation; sleep: whether MuJoCo skips resting bodies; look: "light" or "original", with
    the shadows, reflections, multisampling and texture sizes of LIBERO's own images; initial_state: of all episodes,
    default by seed; shaped: whether the reward is progress towards the goal (`Scene.progress`) instead of success;
    variation: factors of variation of the episodes, see `sims.variations`.

    Options of `reset`: task, initial_state. Raises ConfigError on an unknown name or value.
    """

    metadata = {"render_modes": [], "render_fps": 20}  # noqa: RUF012 (gymnasium's own convention)
    state_keys = tuple(STATE_PARTS)
    action_names = ("dx", "dy", "dz", "rx", "ry", "rz", "gripper")
    open_gripper = {6: -1.0}  # noqa: RUF012 (gymnasium's own convention)
    dt = 0.05
    model_arrays = ()
    """Arrays of the model that are part of a row's state: none, since rows share the model and place its fixtures."""

    def __init__(
        self,
        name: str,
        protocol: str | None = None,
        fixtures: int = 0,
        settle_steps: int = 10,
        sleep: bool = False,
        look: str = LIGHT,
        initial_state: int | None = None,
        shaped: bool = False,
        variation: Any = None,
    ):
        require_types(LiberoEnvironment, locals(), "world.options.")
        for label, value, known in (("protocol", protocol, (None, *PROTOCOLS)), ("look", look, LOOKS)):
            if value not in known:
                texts = [each for each in known if each]
                raise ConfigError(f"{label}={value} is none of {', '.join(texts)}.{did_you_mean(str(value), texts)}")
        if settle_steps < 0 or not 0 <= fixtures < 2**32:
            raise ConfigError("settle_steps and fixtures must be at least 0, and fixtures below 2^32.")
        if protocol and fixtures:
            raise ConfigError(
                f"fixtures={fixtures} places them alike in all episodes, but protocol={protocol} has placements of its "
                "own: unset one of them."
            )
        self._tasks = tasks_of(name)
        self.task_descriptions = tuple(dict.fromkeys(task.text for task in self._tasks))
        self._protocol, self._fixtures = protocol, fixtures
        self._settle, self._fixed_state = settle_steps, initial_state
        self._sleep, self._shaped = sleep, shaped
        self._objects, self._joints = observed_things(self._tasks)
        sizes = {**STATE_PARTS, **self._objects, **dict.fromkeys(self._joints, 1)}
        self.observation_space = spaces.Dict(
            [(part, spaces.Box(-np.inf, np.inf, (size,), np.float32)) for part, size in sizes.items()]  # in this order
        )
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        # The state of an episode; a snapshot holds these and MuJoCo's data.
        self.task, self.start = 0, 0
        self.episode = 0
        self._goal, self._fingers = np.zeros(12), np.zeros(2)
        self._first, self._lit = False, False
        self._variation = bounds_of(variation)
        self._row = Row(scene_of(self._tasks[0], sleep, self._variation))
        self.seen = np.zeros(self._row.model.nq)
        self.painter = LiberoPainter(self, look)

    # -- the scene of this episode

    @property
    def row(self) -> Row:
        """Data of the episode's task, in whose scene the fixtures of this episode stand."""
        task, row = self._tasks[self.task], self._row
        is_other = row.scene.physics_by_episode and row.seed != self.episode
        if row.scene.task != task or is_other:
            self._row = row = Row(scene_of(task, self._sleep, self._variation), self.episode)
        row.place(self._placement)
        return row

    @property
    def _placement(self) -> tuple[int, int]:
        """Seed and reset of the fixtures' placement, see `Scene.placement`."""
        if self._protocol == OPENPI:
            return 7, self.start
        return (1000 + self.start if self._protocol == LEROBOT else self._fixtures), 0

    @property
    def model(self) -> mujoco.MjModel:
        """The compiled model of the episode's task."""
        return self.row.model

    @property
    def data(self) -> mujoco.MjData:
        """This row's data, of the episode's task."""
        return self.row.data

    @property
    def task_description(self) -> str:
        """The instruction of the episode."""
        return self._tasks[self.task].text

    # -- episodes

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[dict, dict]:
        """Start an episode from an official initial state, and hold still for `settle_steps` control steps."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**31)) if seed is None else int(seed)
        task, start = start_of(number, len(self._tasks))
        self.episode = number
        request = dict(options or {})
        self.task = _below(request.get("task", task), len(self._tasks), "task")
        states = initial_states(self._tasks[self.task])
        state_index = request.get("initial_state", self._fixed_state)
        self.start = start % len(states) if state_index is None else _below(state_index, len(states), "initial_state")
        row = self.row
        starts = {} if row.scene.physics_by_episode else row.scene.settled
        key = (self.start, self._placement, self._settle)
        if key not in starts:
            starts[key] = self._settled(row, states[self.start])
        self._goal, self._fingers = starts[key].goal.copy(), starts[key].fingers.copy()
        self._first = not self._settle
        mujoco.mj_resetData(row.model, row.data)
        mujoco.mj_setState(row.model, row.data, starts[key].physics, INTEGRATION)
        if self._settle:
            observation = self._last_steps(row, -1.0)
        else:
            mujoco.mj_forward(row.model, row.data)
            self.seen, observation = row.data.qpos.copy(), self._observation(row)
        self._lit = any(predicate(row.data) for predicate in row.scene.sites.values())
        return observation, {"success": False}

    def _settled(self, row: Row, state: np.ndarray) -> Settled:
        """Return the state before the last two physics steps of settling.

        Every episode takes these two anew, because what MuJoCo derives from a state is one physics step old.
        """
        model, data = row.model, row.data
        mujoco.mj_resetData(model, data)
        data.time = state[0]
        data.qpos[:], data.qvel[:] = state[1 : 1 + model.nq], state[1 + model.nq : 1 + model.nq + model.nv]
        row.scene.place_objects(data.qpos, self.episode)
        self._goal, self._fingers = row.scene.rest[POSITION:JACOBIAN].copy(), np.zeros(2)
        self._first = True
        hold = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
        for steps_left in range(self._settle, 0, -1):
            self._first_steps(row, hold)
            if steps_left > 1:
                self._last_steps(row, hold[6])
        physics = np.zeros(mujoco.mj_stateSize(model, INTEGRATION))
        mujoco.mj_getState(model, data, physics, INTEGRATION)
        return Settled(physics, self._goal.copy(), self._fingers.copy())

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Run a control step; action: [7], motion (1: 5 cm), turn (1: 0.5 rad), and gripper (above 0 closes)."""
        row = self.row
        # LIBERO draws a stove as it was before this step.
        self._lit = any(predicate(row.data) for predicate in row.scene.sites.values())
        action = np.asarray(action, dtype=np.float64)
        self._first_steps(row, action)
        observation = self._last_steps(row, action[6])
        success = row.scene.success(row.data)
        reward = row.scene.progress(row.data) if self._shaped else float(success)
        return observation, reward, False, False, {"success": success}

    def _first_steps(self, row: Row, action: np.ndarray) -> None:
        """Set the goal of an action [7], and run the physics steps of a control step but the last two."""
        mujoco.mj_step1(row.model, row.data)
        if self._first:
            row.arm.state[:] = row.scene.rest
        else:
            row.arm.read()
        motion = np.clip(action[:6], -1.0, 1.0)
        self._goal[:3] = row.arm.state[POSITION:ROTATION] + STEP * motion[:3]
        if motion[3:].any():
            self._goal[3:] = turned(row.arm.state[ROTATION:JACOBIAN], TURN * motion[3:])
        row.act(self._goal, self._fingers, np.sign(action[6]), fresh=False)
        self._first = False
        self._advance(row, action[6], row.scene.substeps - 3)

    def _last_steps(self, row: Row, grip: float) -> dict[str, np.ndarray]:
        """Run the last two physics steps of a control step and return the observation.

        robosuite takes its samples between them: angles are one physics step old, poses and images two.
        """
        self.seen = row.data.qpos.copy()
        self._advance(row, grip, 1)
        observation = self._observation(row)
        self._advance(row, grip, 1)
        return observation

    def _advance(self, row: Row, grip: float, steps: int) -> None:
        """Run physics steps towards the present goal."""
        model, data = row.model, row.data
        close = float(np.sign(grip))
        for _ in range(steps):
            mujoco.mj_step1(model, data)
            row.act(self._goal, self._fingers, close)

    def _observation(self, row: Row) -> dict[str, np.ndarray]:
        """Return the robot's state in LeRobot's order, and poses and joints of the suite's objects, 0 where absent."""
        scene, data = row.scene, row.data
        xpos, xquat = data.xpos, data.xquat
        qpos = data.qpos
        entries = {
            "eef_pos": data.site_xpos[scene.site],
            "eef_axis_angle": axis_angle(xquat[scene.hand]),
            "gripper_qpos": qpos[scene.finger_qpos],
        }
        for name, body in scene.bodies.items():
            entries[f"{name}_pos"], entries[f"{name}_quat"] = xpos[body], xquat[body][[1, 2, 3, 0]]
        for name, place in scene.joints.items():
            entries[name] = qpos[place : place + 1]
        return {
            part: np.asarray(entries[part], dtype=np.float32) if part in entries else np.zeros(space.shape, np.float32)
            for part, space in self.observation_space.spaces.items()
        }

    def close(self) -> None:
        """Free graphics."""
        self.painter.close()


def _below(value: Any, count: int, name: str) -> int:
    if isinstance(value, int | np.integer) and 0 <= value < count:
        return int(value)
    raise ConfigError(f"{name}={value} must be a number from 0 to {count - 1}.")


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Return the rotation vector [3] of a quaternion w, x, y, z, as LIBERO's policies read it.

    Its angle lies between 0 and 2 pi: no shorter way is taken.
    """
    w = min(max(quaternion[0], -1.0), 1.0)
    length = np.sqrt(1.0 - w * w)
    return np.zeros(3) if np.isclose(length, 0.0) else quaternion[1:] * 2.0 * np.arccos(w) / length


def observed_things(tasks: tuple[LiberoTask, ...]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the poses of all objects and fixtures of these tasks (entry -> size), and the names of their joints."""
    objects = imported("libero.libero.envs.objects")
    names: dict[str, str] = {}
    for task in tasks:
        for group in ("fixtures", "objects"):
            for kind, members in task.problem[group].items():
                names.update(dict.fromkeys(members, kind))
    joints: list[str] = []
    sizes: dict[str, int] = {}
    with quiet():
        for name, kind in sorted(names.items()):
            if kind.lower() not in objects.OBJECTS_DICT:  # the table or floor
                continue
            thing = objects.get_object_fn(kind)(name=name)
            sizes |= {f"{name}_pos": 3, f"{name}_quat": 4}
            joints += [joint for joint in thing.joints if joint != f"{name}_joint0"]
    return sizes, tuple(dict.fromkeys(joints))


class LiberoPainter:
    """Images of an environment's scene. Rows that share a scene share its graphics contexts.

    names: LeRobot's two cameras, whose images are mirrored left to right as in the published datasets, and the model's
    own, upright; "default" is its view of the scene, upright.
    """

    def __init__(self, environment: LiberoEnvironment, look: str):
        self._environment, self._is_light = weakref.ref(environment), look == LIGHT
        self._visible = mujoco.MjvOption()
        self._visible.geomgroup[0] = 0  # collision shapes
        model = environment.model
        self.names = (*CAMERAS, "default", *(model.camera(index).name for index in range(model.ncam)))

    def image(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return uint8 [height, width, 3]; raises ConfigError on an unknown camera or without a graphics context."""
        if camera not in self.names:
            raise ConfigError(f"LIBERO has no camera '{camera}'.{did_you_mean(camera, self.names)}")
        environment = self._environment()
        assert environment is not None
        row = environment.row
        look, data = row.scene.drawn(self._is_light, environment.episode)
        drawn = look.model
        drawn.body_pos[:], drawn.body_quat[:] = row.model.body_pos, row.model.body_quat
        data.qpos[:] = environment.seen
        mujoco.mj_kinematics(drawn, data)
        mujoco.mj_comPos(drawn, data)  # lights and cameras may follow a centre of mass
        mujoco.mj_camlight(drawn, data)
        for site in row.scene.sites:
            drawn.site_rgba[site, 3] = float(environment._lit)
        view = view_of(drawn, CAMERAS.get(camera, "agentview" if camera == "default" else camera))
        image = row.scene.renderer(self._is_light, height, width).image(look, data, view, self._visible)
        return np.ascontiguousarray(image[:, ::-1]) if camera in CAMERAS else image

    def close(self) -> None:
        """Leave the contexts to the other rows of the scene; they are freed with it."""


def open_libero(name: str, env_options: Mapping[str, Any]) -> gymnasium.Env:
    """Create one environment of a task or suite; raises ConfigError on unknown names and options."""
    try:
        return LiberoEnvironment(name, **env_options)
    except TypeError as error:
        raise ConfigError(f"LIBERO does not take the options {dict(env_options)}: {error}.") from error
