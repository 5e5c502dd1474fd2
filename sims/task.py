"""`Task`: what one file in sims/tasks defines; plain data and pure, vectorised functions, so that no task owns a loop.

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
    """Where R episodes begin.

    qpos: [R, nq]; goal: [R, G] parameters that stay constant within the episode (may be [R, 0]; a goal that moves is
    described by them, see `Task.goal_at`); control: [R, nu], the
    control in force before the first action (default zeros); qvel: [R, nv] and activation: [R, na] (default zeros);
    instruction: [R] index into the task's instructions (default: the world draws one); the world may replace it, so
    nothing else of a start may depend on it.
    """

    qpos: np.ndarray
    goal: np.ndarray
    control: np.ndarray | None = None
    qvel: np.ndarray | None = None
    activation: np.ndarray | None = None
    instruction: np.ndarray | None = None


@dataclass(frozen=True)
class Readings:
    """What physics reports at the end of control steps; float64, contiguous.

    qpos [..., nq], qvel [..., nv], activation [..., na]: the state itself, exact. control [..., nu]: in force during
    the step. goal [..., G]: the episode's, or where it is by now (`Task.goal_at`). sensors: name -> [..., dim], as
    MuJoCo reports them: evaluated at the start of the last physics step, so one physics step older than qpos (right
    after a reset they are exact).
    """

    qpos: np.ndarray
    qvel: np.ndarray
    activation: np.ndarray
    control: np.ndarray
    goal: np.ndarray
    sensors: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Markers:
    """Poses of the mocap bodies that show a goal: position [R, nmocap, 3], quaternion [R, nmocap, 4] (w first)."""

    position: np.ndarray
    quaternion: np.ndarray


@dataclass(frozen=True)
class Task:
    """One task. All functions are pure and work on any leading axes; they must not depend on how rows are batched.

    model: MJCF path, absolute, below assets/ (e.g. "planar/push_cube.xml"), or beside the module of `start`; fps:
    control steps per second; substeps: physics steps per control step (fps * substeps * timestep must be 1); horizon:
    control steps until the time limit; success_text: the criterion in words with its tolerances; cameras: names in the
    model, the default view first; action: bounds of one control step; observation: fields by LeRobot key, without
    images; uniforms: how many random numbers in [0, 1) a start needs; start: uniforms [R, n] -> Start; control:
    (actions [R, C, A] clipped to bounds, previous control [R, nu]) -> control [R, C, nu], where C steps must equal C
    calls with one step; observe: Readings -> float arrays by key; potential: observation -> [...], the progress reward
    is its increase (scale it so that an episode collects 1 to 5); succeeded: observation -> bool [...]; markers: goal
    [R, G] -> Markers for rendering (None: nothing to show); goal_at: for goals that move, (the episode's goal [R, G],
    seconds since its beginning [R, C]) -> the goal at each of these times [R, C, G'], which then is what readings and
    markers are given (None: it stays); expert: makes the scripted expert, which sees observations
    [B, H, ...] and reads the newest frame; stages: what the task is made of and what is charged in each, for those who
    rank episodes (rewards=[gcpg] with stages=task), none by default; paraphrases: instruction -> other words for it,
    which a world gives where it is asked to; held_out: instructions that are not for training. Functions and expert are
    told the plain words always.

    potential and succeeded read the observation alone, so a learned world can be judged by the very same functions; it
    includes `task`, texts that broadcast against the leading axes.
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


def model_path(task: Task) -> Path:
    """Return where the task's MJCF is; raises ConfigError naming the places where it is not."""
    beside = getattr(sys.modules.get(task.start.__module__), "__file__", None)
    places = [resource("assets", task.model), *([Path(beside).parent / task.model] if beside else [])]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        tried = ", ".join(dict.fromkeys(map(str, places)))
        raise ConfigError(f"Task '{task.name}' names the model {task.model}, which does not exist: {tried}.")
    return found


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
    """Return where the elements `names`, separated by blanks, lie in a vector field.

    Raises SpecError unless they are neighbours in this order.
    """
    each = tuple(names.split())
    first = field.names.index(each[0]) if each and each[0] in field.names else 0
    found = slice(first, first + len(each))
    if not each or field.names[found] != each:
        raise SpecError(f"'{names}' are not neighbours in this order in {' '.join(field.names)}.")
    return found
