"""`Task`: the content of one file in sims/tasks; plain data and pure, vectorised functions, so that tasks contain no
loops.

Axes: R row, C control step, A action dimension, G goal parameter; "..." is any leading axes.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.spec import Field
from robopolicy.core.stages import Stage
from robopolicy.core.storage import resource
from robopolicy.core.world import Controller

Arrays = Mapping[str, np.ndarray]
"""Observation key -> [..., *field.shape], one frame, without the history axis."""


@dataclass(frozen=True)
class Start:
    """Initial states of R episodes.

    qpos: [R, nq]; goal: [R, G] parameters that are constant within the episode (may be [R, 0]; they describe a moving
    goal, see `Task.goal_at`); control: [R, nu], the control before the first action (default zeros); qvel: [R, nv] and
    activation: [R, na] (default zeros); instruction: [R] index into the task's instructions (default: sampled by the
    world). The world may replace the instruction, so nothing else of a start may depend on it.
    """

    qpos: np.ndarray
    goal: np.ndarray
    control: np.ndarray | None = None
    qvel: np.ndarray | None = None
    activation: np.ndarray | None = None
    instruction: np.ndarray | None = None


@dataclass(frozen=True)
class Readings:
    """Physics outputs at the end of control steps; float64, contiguous.

    qpos [..., nq], qvel [..., nv], activation [..., na]: the exact state. control [..., nu]: applied during the step.
    goal [..., G]: the episode's parameters, or the current goal (`Task.goal_at`). sensors: name -> [..., dim], as
    MuJoCo reports them: evaluated at the start of the last physics step, so one physics step older than qpos (exact
    right after a reset).
    """

    qpos: np.ndarray
    qvel: np.ndarray
    activation: np.ndarray
    control: np.ndarray
    goal: np.ndarray
    sensors: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Markers:
    """Poses of the mocap bodies that mark a goal: position [R, nmocap, 3], quaternion [R, nmocap, 4] (w first)."""

    position: np.ndarray
    quaternion: np.ndarray


@dataclass(frozen=True)
class Task:
    """Definition of one task. All functions are pure and work on any leading axes; they must not depend on the batching
    of rows.

    model: MJCF path, absolute, below assets/ (e.g. "planar/push_cube.xml"), or next to the module of `start`; fps:
    control steps per second; substeps: physics steps per control step (fps * substeps * timestep must be 1); horizon:
    control steps until the time limit; success_text: the criterion in words with its tolerances; cameras: names in the
    model, the default view first; action: bounds of one control step; observation: fields by LeRobot key, without
    images; uniforms: number of random numbers in [0, 1) per initial state; start: uniforms [R, n] -> Start; control:
    (actions [R, C, A] clipped to bounds, previous control [R, nu]) -> control [R, C, nu], where C steps must equal C
    calls with one step; observe: Readings -> float arrays by key; potential: observation -> [...], the progress reward
    is its increase (scale it so that an episode's return is 1 to 5); succeeded: observation -> bool [...]; markers:
    goal [R, G] -> Markers for rendering (None: nothing to mark); goal_at: for moving goals, (the episode's goal [R, G],
    seconds since its start [R, C]) -> the goal at each of these times [R, C, G'], which readings and markers then
    receive (None: a fixed goal); expert: builds the scripted expert, which receives observations [B, H, ...] and reads
    the newest frame; stages: stages of the task and the penalty of each, for rewards that rank episodes (rewards=[gcpg]
    with stages=task), none by default; paraphrases: instruction -> alternative wordings, which a world uses on request;
    held_out: instructions excluded from training; compositions: pairs of instructions that a world asks for one after
    the other on request (`sims.composed`). Functions and expert always receive the plain wording.
    open_gripper: value of the action element named gripper that opens it, None without a grasp; disturbances: how the
    state is disturbed, by name (`core.faults.Disturbable`): changes qpos [R, nq] and qvel [R, nv] in place, given
    uniforms [R, 4]; a goal that differs between episodes can move by itself.

    potential and succeeded read the observation alone, so the same functions can evaluate a learned world; it includes
    `task`, texts that broadcast against the leading axes.
    """

    name: str
    model: str
    instructions: tuple[str, ...]
    success_text: str
    fps: float
    substeps: int
    horizon: int
    cameras: tuple[str, ...]
    action: Field
    observation: Mapping[str, Field]
    uniforms: int
    start: Callable[[np.ndarray], Start]
    control: Callable[[np.ndarray, np.ndarray], np.ndarray]
    observe: Callable[[Readings], dict[str, np.ndarray]]
    potential: Callable[[Arrays], np.ndarray]
    succeeded: Callable[[Arrays], np.ndarray]
    expert: Callable[[], Controller]
    markers: Callable[[np.ndarray], Markers] | None = None
    goal_at: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    stages: tuple[Stage, ...] = ()
    paraphrases: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    held_out: tuple[str, ...] = ()
    compositions: tuple[tuple[str, str], ...] = ()
    open_gripper: float | None = None
    disturbances: Mapping[str, Callable[[np.ndarray, np.ndarray, np.ndarray], None]] = field(
        default_factory=dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], None]]
    )


def model_path(task: Task) -> Path:
    """Return the path of the task's MJCF; raises ConfigError naming the searched places when it is missing."""
    module_file = getattr(sys.modules.get(task.start.__module__), "__file__", None)
    places = [resource("assets", task.model), *([Path(module_file).parent / task.model] if module_file else [])]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        searched = ", ".join(dict.fromkeys(map(str, places)))
        raise ConfigError(f"Task '{task.name}' uses the model {task.model}, which does not exist: {searched}.")
    return path


def scale(uniforms: np.ndarray, low: Any, high: Any) -> np.ndarray:
    """Map uniforms in [0, 1) to [low, high).

    uniforms: [...]; low, high: numbers or arrays that broadcast against it; the result has their unit.
    """
    return np.asarray(low) + uniforms * (np.asarray(high) - np.asarray(low))


def newest(observation: Arrays, key: str) -> np.ndarray:
    """Return the newest frame of a history, [B, H, n] -> [B, n] float64."""
    return np.asarray(observation[key][:, -1], dtype=np.float64)


def flat_quaternion(yaw: np.ndarray) -> np.ndarray:
    """Rotation about the vertical axis, [...] rad -> quaternion [..., 4] (w first)."""
    zero = np.zeros_like(yaw)
    return np.stack([np.cos(yaw / 2), zero, zero, np.sin(yaw / 2)], axis=-1)


def vector_field(names: str, unit: str) -> Field:
    """A float32 observation vector without bounds; names: one per element, separated by blanks."""
    each = tuple(names.split())
    return Field((len(each),), unit=unit, names=each)


def elements(field: Field, names: str) -> slice:
    """Return the slice of the elements `names`, separated by blanks, in a vector field.

    Raises SpecError unless they are adjacent and in this order.
    """
    each = tuple(names.split())
    first = field.names.index(each[0]) if each and each[0] in field.names else 0
    place = slice(first, first + len(each))
    if not each or field.names[place] != each:
        raise SpecError(f"'{names}' are not adjacent in this order in {' '.join(field.names)}.")
    return place
