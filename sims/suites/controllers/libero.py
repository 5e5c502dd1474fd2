"""Scripted expert of LIBERO's worlds: one planner for all tasks, which sees what the observation holds and no more.

A row's scene is laid out in a simulation of its own: objects, fixtures and their joints as observed, the arm by inverse
kinematics from the pose of its hand. No physics runs in it.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import copy
from dataclasses import dataclass

import mujoco
import numpy as np

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, TASK, Observation, WorldSpec
from robopolicy.core.world import Rows
from sims.suites.controllers.libero_geometry import about
from sims.suites.controllers.libero_planner import Actions, Planner, Region, Task
from sims.suites.gymnasium_suite import SEED_LIMIT
from sims.suites.libero_environment import STATE_PARTS, start_of
from sims.suites.libero_scene import SCENES_KEPT, LiberoTask, Scene, scene_of, tasks_of

PREDICATES = {"open": "is_open", "close": "is_close", "turnon": "turn_on", "turnoff": "turn_off"}
SAMPLES = 2001
"""Number of positions of a joint at which a predicate is asked for the range in which it holds."""


def planned_task(scene: Scene) -> Task:
    """Return the planner's view of a scene; its model is a copy, in which fixtures may be placed."""
    model, inner = copy.deepcopy(scene.model), scene._builder
    owners = {**inner.fixtures_dict, **inner.objects_dict}

    def jointed(names: list[str] | None) -> tuple[int, ...]:
        """Return the ids of those of the named joints that hinge or slide."""
        found = [model.joint(name).id for name in names or ()]
        return tuple(joint for joint in found if model.jnt_type[joint] != mujoco.mjtJoint.mjJNT_FREE)

    regions = {}
    for name, site in inner.object_sites_dict.items():
        number = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_SITE, name)
        if number >= 0:
            parent = site.parent_name if site.parent_name in scene.bodies else None
            regions[name] = Region(number, np.array(site.size, dtype=np.float64), parent, jointed(site.joints))
    ranges = {}
    for owner in owners.values():
        for joint in jointed(owner.joints):
            values = np.linspace(model.jnt_range[joint, 0], model.jnt_range[joint, 1], SAMPLES)
            for predicate, method in PREDICATES.items():
                true = values[[_says(owner, method, value) for value in values]]
                if len(true):
                    ranges[predicate, joint] = (float(true.min()), float(true.max()))
    joints = {name: jointed(owner.joints) for name, owner in owners.items()}
    goals = tuple((str(state[0]).lower(), *state[1:]) for state in inner.parsed_problem["goal_state"])
    return Task(model, goals, scene.bodies, regions, joints, ranges, scene.posture)


def _says(owner: object, method: str, value: float) -> bool:
    """Return an object's own verdict on a joint's position, False where it knows no such predicate."""
    try:
        return bool(getattr(owner, method)(value))
    except (AttributeError, KeyError, NotImplementedError):
        return False


class Layout:
    """A simulation of a task in which observations are laid out; one for all rows that play the task."""

    def __init__(self, task: LiberoTask):
        scene = scene_of(task, sleep=False)
        self.task, self._scene = planned_task(scene), scene
        self._fixtures = {name: scene.bodies[name] for name in scene._builder.fixtures_dict if name in scene.bodies}
        model = self.task.model
        data = mujoco.MjData(model)
        mujoco.mj_kinematics(model, data)
        hand, site = data.xmat[scene.hand].reshape(3, 3), data.site_xmat[scene.site].reshape(3, 3)
        self._site_in_hand = hand.T @ site

    def planner(self) -> Planner:
        """Return the planner of a new episode, whose arm is in its first posture."""
        data = mujoco.MjData(self.task.model)
        data.qpos[self._scene.arm.qpos] = self.task.home
        return Planner(self.task, data)

    def lay(self, planner: Planner, seen: dict[str, np.ndarray]) -> None:
        """Write observed entries (name -> [size]) into the planner's data."""
        scene = self._scene
        model, data = self.task.model, planner.data
        for name, body in scene.bodies.items():
            place = np.concatenate([seen[f"{name}_pos"], seen[f"{name}_quat"][[3, 0, 1, 2]]])
            if name in self._fixtures:
                model.body_pos[body], model.body_quat[body] = place[:3], place[3:]
            else:
                address = model.jnt_qposadr[model.body_jntadr[body]]
                data.qpos[address : address + 7] = place
        for name, address in scene.joints.items():
            data.qpos[address] = seen[name][0]
        data.qpos[scene.finger_qpos] = seen["gripper_qpos"]
        turn = seen["eef_axis_angle"]
        angle = float(np.linalg.norm(turn))
        hand = about(turn / angle, angle) if angle else np.eye(3)
        arm = planner.nearest(seen["eef_pos"], hand @ self._site_in_hand, data.qpos[scene.arm.qpos])
        data.qpos[scene.arm.qpos] = arm
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_makeM(model, data)


@dataclass
class _Row:
    """State of an episode: what lays its scene out, its planner, and the planner's actions once it has begun."""

    layout: Layout
    planner: Planner
    actions: Actions | None = None


class LiberoExpert:
    """Expert of a task or suite, "libero_goal:3" or "libero_goal". A suite's tasks follow from the
    instruction, or where several tasks have the same from the episodes' seeds, see `begin`.

    Raises ConfigError when the world does not show the poses of all objects.
    """

    def __init__(self, name: str, spec: WorldSpec):
        self._tasks = tasks_of(name)
        self._names = [each for key in (STATE, ENVIRONMENT_STATE) for each in spec.observation[key].names or ()]
        missing = [part for part in STATE_PARTS if f"{part}[0]" not in self._names]
        if missing or not any(each.endswith("_pos[0]") and not each.startswith("eef") for each in self._names):
            raise ConfigError(f"The expert of '{spec.name}' needs the state of the arm and the poses of all objects.")
        self._layouts: dict[int, Layout] = {}
        self._rows: dict[int, _Row] = {}
        self._seeds: dict[int, int] = {}

    def reset(self, rows: Rows = None) -> None:
        """Forget the episodes of `rows` [R], None for all."""
        for row in list(self._rows) if rows is None else np.asarray(rows).tolist():
            self._rows.pop(row, None)

    def begin(self, seeds: np.ndarray, rows: Rows = None) -> None:
        """Start episodes with these seeds [R] in `rows` [R], None for all."""
        for row, seed in zip(range(len(seeds)) if rows is None else np.asarray(rows).tolist(), seeds, strict=True):
            self._rows.pop(row, None)
            self._seeds[row] = int(seed)

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 7] for the newest observation of every row."""
        numbers = np.concatenate([observation[STATE][:, -1], observation[ENVIRONMENT_STATE][:, -1]], axis=1)
        return np.stack([self._one(row, flat, observation) for row, flat in enumerate(numbers.astype(np.float64))])

    def _one(self, index: int, flat: np.ndarray, observation: Observation) -> np.ndarray:
        if index not in self._rows:
            number = self._task_of(index, observation)
            layout = self._layout_of(number)
            self._rows[index] = _Row(layout, layout.planner())
        row = self._rows[index]
        row.layout.lay(row.planner, self._entries(flat))
        if row.actions is None:
            row.actions = row.planner.actions()
        return next(row.actions)

    def _layout_of(self, number: int) -> Layout:
        """Return the layout of a task; the oldest that no row needs is dropped when there are too many."""
        if number not in self._layouts:
            used = {id(row.layout) for row in self._rows.values()}
            free = [each for each, layout in self._layouts.items() if id(layout) not in used]
            if len(self._layouts) >= SCENES_KEPT and free:
                del self._layouts[free[0]]
            self._layouts[number] = Layout(self._tasks[number])
        return self._layouts[number]

    def _entries(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return an observation [D] by entry."""
        entries: dict[str, list[float]] = {}
        for name, value in zip(self._names, flat, strict=True):
            entries.setdefault(name.partition("[")[0], []).append(value)
        return {name: np.array(values) for name, values in entries.items()}

    def _task_of(self, row: int, observation: Observation) -> int:
        """Return the number of the task that a row plays."""
        if len(self._tasks) == 1:
            return 0
        text = str(observation[TASK][row]) if TASK in observation else ""
        fitting = [number for number, task in enumerate(self._tasks) if task.text == text]
        if len(fitting) == 1:
            return fitting[0]
        if row not in self._seeds:
            raise ConfigError(
                f"Which task of LIBERO row {row} plays is not known: call the expert's begin(seeds), or use a world of "
                "one task, such as libero/libero_goal:3."
            )
        return start_of(self._seeds[row] % SEED_LIMIT, len(self._tasks))[0]
