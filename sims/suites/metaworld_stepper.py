"""Meta-World's own tasks, with the same numbers in a fraction of the time.

Resets, observations, rewards and success are Meta-World's own functions. They run with cheaper equivalents of the few
primitives that cost most: distances, tolerances, quaternions of matrices and look-ups by name. A control step computes
positions instead of a whole forward pass after its physics, since nothing else is read. All numbers are equal to
Meta-World's to the last bit (tested for every task). Runs inside worker processes: no torch.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import math
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import mujoco
import numpy as np

LONG_TAIL = math.sqrt(1.0 / 0.1 - 1.0)
"""Scale at which Meta-World's commonest sigmoid is 0.1 at its margin."""
DOWN = np.array([1.0, 0.0, 1.0, 0.0])
"""Orientation of the hand, as Meta-World sets it."""
FLOAT = np.dtype(np.float64)
ONE = np.float32(1.0)
INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION
OBJECT = "the task's object"
STARTS_KEPT = 1000
"""Largest number of stored states of a task, 1 kB each."""


@cache
def lean(task: type) -> type:
    """Return a subclass of a Meta-World task that computes the same with the cheaper primitives."""
    (base,) = task.__bases__
    namespace = with_cheaper(sys.modules[task.__module__])
    own = {name: rebuilt(member, namespace) for name, member in vars(task).items() if name[:2] != "__"}
    own = {name: member for name, member in own.items() if member is not None}
    shared: dict[str, Any] = {"bodies": {}, "sites": {}, "geoms": {}, "reach": {}, "starts": {}}
    # Functions of the task itself come before ours, and ours before those of its base.
    result = type(task.__name__, (task, lean_base(base)), {**own, **shared, "__module__": __name__})
    namespace[task.__name__] = result  # a task calls its static functions through its own name
    return result


@cache
def lean_base(base: type) -> type:
    """Return Meta-World's base class with the functions of `LeanSteps` before its own."""
    rewards = cheaper_rewards(sys.modules[base.__module__].reward_utils)
    return type(base.__name__, (LeanSteps, base), {"rewards": rewards, "__module__": __name__})


def with_cheaper(module: types.ModuleType) -> dict[str, Any]:
    """Return the global names of a module of Meta-World, with the cheaper primitives in place of those it uses."""
    names = vars(module)
    cheaper = {"np": cheaper_numpy(), "Rotation": MatrixRotation}
    if utilities := names.get("reward_utils"):
        cheaper["reward_utils"] = cheaper_rewards(utilities)
    if original := names.get("tolerance"):
        cheaper["tolerance"] = cheaper_tolerance(original)
    return {**names, **{name: value for name, value in cheaper.items() if name in names}}


def rebuilt(member: Any, namespace: dict[str, Any]) -> Any:
    """Return a function, static function or property that looks its global names up in `namespace`; None for others."""
    if isinstance(member, staticmethod):
        return staticmethod(rebuilt(member.__func__, namespace))
    if isinstance(member, property):
        return property(rebuilt(member.fget, namespace))
    if not isinstance(member, types.FunctionType):
        return None
    if "func" in member.__code__.co_freevars:  # Meta-World's check that a task is set; ours always is
        place = member.__code__.co_freevars.index("func")
        return rebuilt((member.__closure__ or ())[place].cell_contents, namespace)
    function = types.FunctionType(member.__code__, namespace, member.__name__, member.__defaults__, member.__closure__)
    function.__kwdefaults__ = member.__kwdefaults__
    return function


# -- cheaper primitives


@cache
def cheaper_numpy() -> types.ModuleType:
    """Return numpy with a cheaper norm of vectors."""
    linalg, copy = types.ModuleType("numpy.linalg"), types.ModuleType("numpy")
    vars(linalg).update(vars(np.linalg), norm=norm)
    vars(copy).update(vars(np), linalg=linalg)
    return copy


def norm(vector: Any, *arguments: Any, **options: Any) -> Any:
    """Return `numpy.linalg.norm`, computed as it does for a vector [n] of float64."""
    if arguments or options or type(vector) is not np.ndarray or vector.ndim != 1 or vector.dtype is not FLOAT:
        return np.linalg.norm(vector, *arguments, **options)
    return np.float64(length(vector.ravel()))


@cache
def cheaper_tolerance(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return Meta-World's `tolerance` without arrays, for a number and its commonest sigmoid."""

    def tolerance(
        x: Any, bounds: Any = (0.0, 0.0), margin: Any = 0.0, sigmoid: str = "gaussian", value_at_margin: float = 0.1
    ) -> Any:
        lower, upper = bounds
        usual = sigmoid == "long_tail" and value_at_margin == 0.1 and isinstance(x, float)
        if not usual or lower > upper or not margin > 0.0:
            return original(x, bounds, margin, sigmoid, value_at_margin)
        if lower <= x <= upper:
            return 1.0
        distance = float((lower - x if x < lower else x - upper) / margin)
        return 1.0 / ((distance * LONG_TAIL) ** 2 + 1.0)

    return tolerance


@cache
def cheaper_rewards(utilities: types.ModuleType) -> types.ModuleType:
    """Return Meta-World's reward utilities with the cheaper tolerance."""
    copy = types.ModuleType(utilities.__name__)
    vars(copy).update(vars(utilities))
    for name, member in vars(utilities).items():
        if isinstance(member, types.FunctionType):
            vars(copy)[name] = rebuilt(member, vars(copy))
    copy.tolerance = cheaper_tolerance(utilities.tolerance)
    return copy


class MatrixRotation:
    """The part of scipy's `Rotation` that Meta-World uses: quaternions of matrices."""

    def __init__(self, quaternion: np.ndarray):
        self._quaternion = quaternion

    @classmethod
    def from_matrix(cls, matrix: np.ndarray) -> "MatrixRotation":
        """Return the rotation of an orthogonal matrix [3, 3], computed in scipy's order from its largest element."""
        (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = matrix.tolist()
        trace = xx + yy + zz
        largest = max(xx, yy, zz, trace)
        if largest == xx:
            parts = (1 - trace + 2 * xx, yx + xy, zx + xz, zy - yz)
        elif largest == yy:
            parts = (yx + xy, 1 - trace + 2 * yy, zy + yz, xz - zx)
        elif largest == zz:
            parts = (zx + xz, zy + yz, 1 - trace + 2 * zz, yx - xy)
        else:
            parts = (zy - yz, xz - zx, yx - xy, 1 + trace)
        x, y, z, w = parts
        length = math.sqrt(x * x + y * y + z * z + w * w)
        return cls(np.array((x / length, y / length, z / length, w / length)))

    def as_quat(self) -> np.ndarray:
        """Return the quaternion x, y, z, w [4]."""
        return self._quaternion


class LeanSteps:
    """Functions of Meta-World's base class that are written anew.

    bodies, sites, geoms: name -> number, the same for all environments of a task; reach: geom -> distance from its
    centre where contacts end; starts: states of the hand at its start; rewards: Meta-World's utilities.
    """

    bodies: dict[str, int]
    sites: dict[str, int]
    geoms: dict[str, int]
    reach: dict[int, float]
    starts: dict[tuple, np.ndarray]
    rewards: types.ModuleType

    def _initialize_simulation(self: Any) -> tuple[mujoco.MjModel, mujoco.MjData]:
        model, data = super()._initialize_simulation()
        self.bodies.update({model.body(number).name: number for number in range(model.nbody)})
        self.sites.update({model.site(number).name: number for number in range(model.nsite)})
        self.geoms.update({model.geom(number).name: number for number in range(model.ngeom)})
        self.reach.update(enumerate((model.geom_rbound + model.geom_margin).tolist()))
        self.positions, self.site_positions = data.xpos, data.site_xpos
        return model, data

    def reset(self: Any, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with draws of the environment's own generator. Returns observation [39], info.

        Meta-World sets an episode up twice and keeps the second. Of the first only the draws count, so it is done
        without physics.
        """
        self.curr_path_length = 0
        self.drawing = True
        self.reset_model()
        self.drawing = False
        mujoco.mj_resetData(self.model, self.data)
        observation = self.reset_model()
        self._prev_obs = observation[:18].copy()
        observation[18:36] = self._prev_obs
        return observation, {}

    def _reset_hand(self: Any, steps: int = 50) -> None:
        """Move the hand to its start. Tasks change positions of bodies in the model, on which alone the result depends.

        Stored is the state before the last physics step, because positions are derived from that state.
        """
        if not self.drawing:
            model, data = self.model, self.data
            data.mocap_pos[0], data.mocap_quat[0] = self.hand_init_pos, DOWN
            data.ctrl[:] = -1.0, 1.0
            key = steps, np.asarray(self.hand_init_pos).tobytes(), model.body_pos.tobytes()
            if key in self.starts:
                mujoco.mj_setState(model, data, self.starts[key], INTEGRATION)
            else:
                mujoco.mj_step(model, data, nstep=steps * self.frame_skip - 1)
                if len(self.starts) == STARTS_KEPT:
                    self.starts.clear()
                self.starts[key] = np.empty(mujoco.mj_stateSize(model, INTEGRATION))
                mujoco.mj_getState(model, data, self.starts[key], INTEGRATION)
            mujoco.mj_step(model, data)
        self.init_tcp = self.tcp_center

    def step(self: Any, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Run a control step: action [4] float32 -> observation [39], reward, terminated, truncated, info.

        Raises ValueError after the last step of an episode.
        """
        if self.curr_path_length >= self.max_path_length:
            raise ValueError("You must reset the env manually once truncate==True")
        model, data = self.model, self.data
        hand = data.mocap_pos[0]
        hand += np.minimum(np.maximum(action[:3], -ONE), ONE) * self.action_scale
        np.minimum(np.maximum(hand, self.mocap_low, hand), self.mocap_high, hand)
        data.mocap_quat[0] = DOWN
        self.do_simulation((action[3], -action[3]), self.frame_skip)
        self.curr_path_length += 1
        mujoco.mj_kinematics(model, data)
        observation, bounds = self._get_obs(), self.sawyer_observation_space
        np.minimum(np.maximum(observation, bounds.low, observation), bounds.high, observation)
        reward, info = self.evaluate_state(observation, action)
        return observation, reward, False, self.curr_path_length == self.max_path_length, info

    def do_simulation(self: Any, ctrl: Any, n_frames: int) -> None:
        """Run physics steps with controls [2]."""
        control = self.data.ctrl
        control[0], control[1] = ctrl
        mujoco.mj_step(self.model, self.data, nstep=n_frames)

    def _get_curr_obs_combined_no_goal(self: Any) -> np.ndarray:
        places, bodies = self.positions, self.bodies
        apart = length(places[bodies["rightclaw"]] - places[bodies["leftclaw"]])
        observation = np.zeros(4 + self._obs_obj_max_len)
        observation[:3] = places[bodies["hand"]]
        observation[3] = min(max(apart / 0.1, 0.0), 1.0)
        positions, quaternions = self._get_pos_objects(), self._get_quat_objects()
        for thing in range(len(positions) // 3):
            start = 4 + 7 * thing
            observation[start : start + 3] = positions[3 * thing : 3 * thing + 3]
            observation[start + 3 : start + 7] = quaternions[4 * thing : 4 * thing + 4]
        return observation

    def _get_obs(self: Any) -> np.ndarray:
        current = self._get_curr_obs_combined_no_goal()
        observation = np.concatenate((current, self._prev_obs, self._get_pos_goal()))
        self._prev_obs = current
        return observation

    def _gripper_caging_reward(
        self: Any,
        action: np.ndarray,
        obj_pos: np.ndarray,
        obj_radius: float,
        pad_success_thresh: float,
        object_reach_radius: float,
        xz_thresh: float,
        desired_gripper_effort: float = 1.0,
        high_density: bool = False,
        medium_density: bool = False,
    ) -> float:
        tolerance, product = self.rewards.tolerance, self.rewards.hamacher_product
        start, tcp = self.obj_init_pos, self.tcp_center
        middle, first = float(obj_pos[1]), float(start[1])
        sides = []
        for name in ("leftpad", "rightpad"):
            pad = float(self.positions[self.bodies[name], 1])
            margin = abs(abs(pad - first) - pad_success_thresh)
            sides.append(tolerance(abs(pad - middle), (obj_radius, pad_success_thresh), margin, "long_tail"))
        margin = length(start[:3:2] - self.init_tcp[::2]) - xz_thresh
        level = tolerance(length(tcp[::2] - obj_pos[:3:2]), (0, xz_thresh), margin, "long_tail")
        caging = product(product(*sides), float(level))
        closed = min(max(0, action[-1]), desired_gripper_effort) / desired_gripper_effort
        reward = product(caging, closed if caging > 0.97 else 0.0)
        if high_density:
            reward = (reward + caging) / 2
        if medium_density:
            margin = abs(length(start - self.init_tcp) - object_reach_radius)
            reach = tolerance(length(obj_pos - tcp), (0, object_reach_radius), margin, "long_tail")
            reward = (reward + float(reach)) / 2
        return reward

    def get_body_com(self: Any, body_name: str) -> np.ndarray:
        """Return a view of a body's position [3]."""
        return self.positions[self.bodies[body_name]]

    def get_endeff_pos(self: Any) -> np.ndarray:
        """Return a view of the hand's position [3]."""
        return self.positions[self.bodies["hand"]]

    @property
    def tcp_center(self: Any) -> np.ndarray:
        """Return the point between the fingers [3]."""
        places, sites = self.site_positions, self.sites
        return (places[sites["rightEndEffector"]] + places[sites["leftEndEffector"]]) / 2.0

    def _get_site_pos(self: Any, site_name: str) -> np.ndarray:
        return self.site_positions[self.sites[site_name]].copy()

    @property
    def touching_main_object(self: Any) -> bool:
        """Return whether both pads press on the task's object."""
        if OBJECT not in self.geoms:
            self.geoms[OBJECT] = self._get_id_main_object()
        return self.touching_object(self.geoms[OBJECT])

    def touching_object(self: Any, object_geom_id: int) -> bool:
        """Return whether both pads press on a geom; forces are computed only where both touch it."""
        model, data = self.model, self.data
        pads = self.geoms["leftpad_geom"], self.geoms["rightpad_geom"]
        centers = data.geom_xpos
        for pad in pads:  # without an overlap of the spheres around them they cannot touch
            if length(centers[pad] - centers[object_geom_id]) > self.reach[pad] + self.reach[object_geom_id]:
                return False
        mujoco.mj_collision(model, data)
        if not all(contacts(data, pad, object_geom_id) for pad in pads):
            return False
        mujoco.mj_forward(model, data)
        force, rows = data.efc_force, data.contact.efc_address
        return all(sum(force[rows[pair]] for pair in contacts(data, pad, object_geom_id)) > 0 for pad in pads)


def length(vector: np.ndarray) -> float:
    """Return the length of a contiguous vector [n] of float64."""
    return math.sqrt(vector.dot(vector))


def contacts(data: mujoco.MjData, first: int, second: int) -> list[int]:
    """Return the numbers of the contacts between two geoms."""
    pairs = data.contact.geom.tolist()
    return [number for number, pair in enumerate(pairs) if first in pair and second in pair]
