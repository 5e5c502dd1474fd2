"""Push-cube: a round pusher moves a cube onto a goal disc on a table seen from above.

The table resists like a viscous film (joint damping), so the cube stops when it is not pushed: smooth, fast to simulate
and close to quasi-static pushing.
"""

import numpy as np

from robopolicy.core.faults import SLIP
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, Observation
from robopolicy.core.stages import Constraint, Stage
from robopolicy.core.world import Rows
from sims.task import Arrays, Markers, Readings, Start, Task, elements, flat_quaternion, newest, scale, vector_field

SPEED = 0.4  # m/s of the pusher at full action
TOLERANCE = 0.03  # m
PUSHED = 0.4  # m/s of a block that slips away; the table stops it within 2 cm
CONTACT = 0.065  # m from the cube's centre to the pusher's when they touch flat on

PUSHER_FIELD = vector_field("x y velocity_x velocity_y target_x target_y", "m, m/s")
CUBE_FIELD = vector_field(
    "cube_x cube_y cube_cos cube_sin cube_velocity_x cube_velocity_y cube_spin goal_x goal_y "
    "pusher_to_cube_x pusher_to_cube_y cube_to_goal_x cube_to_goal_y",
    "m, m/s, rad/s",
)
PUSHER, TARGET = elements(PUSHER_FIELD, "x y"), elements(PUSHER_FIELD, "target_x target_y")
CUBE = elements(CUBE_FIELD, "cube_x cube_y")
TO_CUBE = elements(CUBE_FIELD, "pusher_to_cube_x pusher_to_cube_y")
TO_GOAL = elements(CUBE_FIELD, "cube_to_goal_x cube_to_goal_y")


def start(uniforms: np.ndarray) -> Start:
    """Cube near the centre, goal 0.10 to 0.20 m from it, pusher anywhere around the cube.

    uniforms: [R, 7] -> qpos [R, 5] (x, y in m and yaw in rad of the cube, x, y of the pusher), goal [R, 2] m,
    activation [R, 2] m.
    """
    cube = scale(uniforms[:, 0:2], -0.12, 0.12)
    distance, angle = scale(uniforms[:, 2], 0.10, 0.20), scale(uniforms[:, 3], -np.pi, np.pi)
    offset = distance[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    # Where the goal would lie beyond 0.20 m along an axis, it is mirrored at the cube, which keeps its distance.
    goal = cube + np.where(np.abs(cube + offset) <= 0.20, offset, -offset)
    yaw = scale(uniforms[:, 4], -np.pi / 4, np.pi / 4)
    around, gap = scale(uniforms[:, 5], -np.pi, np.pi), scale(uniforms[:, 6], 0.09, 0.15)
    pusher = cube + gap[:, None] * np.stack([np.cos(around), np.sin(around)], axis=-1)
    return Start(qpos=np.concatenate([cube, yaw[:, None], pusher], axis=1), goal=goal, activation=pusher)


def control(actions: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """Actions are velocities of the pusher's target as fractions of full speed.

    actions: [R, C, 2]; previous: [R, 2], ignored -> [R, C, 2] m/s.
    """
    return SPEED * actions


def observe(readings: Readings) -> dict[str, np.ndarray]:
    """Pusher: position, velocity, target ahead of it. Environment: cube pose and velocity, goal, two offsets.

    readings: qpos and qvel [..., 5], activation and goal [..., 2] -> `observation.state` [..., 6],
    `observation.environment_state` [..., 13], m, m/s and rad/s.
    """
    cube = readings.qpos[..., 0:2]
    yaw = readings.qpos[..., 2:3]
    pusher = readings.qpos[..., 3:5]
    state = [pusher, readings.qvel[..., 3:5], readings.activation - pusher]
    environment = [
        cube,
        np.cos(yaw),
        np.sin(yaw),
        readings.qvel[..., 0:3],
        readings.goal,
        cube - pusher,
        readings.goal - cube,
    ]
    return {STATE: np.concatenate(state, axis=-1), ENVIRONMENT_STATE: np.concatenate(environment, axis=-1)}


def potential(observation: Arrays) -> np.ndarray:
    """Progress potential: rises by 10 per metre that the cube gets closer to the goal, and by 2 per metre that the
    pusher gets closer to the cube.

    observation: environment state [..., 13] -> [...].
    """
    environment = observation[ENVIRONMENT_STATE]
    return -10.0 * _length(environment[..., TO_GOAL]) - 2.0 * np.maximum(_length(environment[..., TO_CUBE]), CONTACT)


def succeeded(observation: Arrays) -> np.ndarray:
    """The cube's centre is within the tolerance of the goal: environment state [..., 13] -> [...] bool."""
    return _length(observation[ENVIRONMENT_STATE][..., TO_GOAL]) < TOLERANCE


def stages() -> tuple[Stage, ...]:
    """Reach the cube, then push it: the penalty of each is ten per metre remaining at its end.

    Until contact, the cube should stay in place: pushing it away from the goal also has a penalty of ten per metre.
    """
    reach = Constraint(lambda seen: 10.0 * _gap(seen), over="last")
    stray = Constraint(lambda seen: 10.0 * np.maximum(_to_goal(seen) - _to_goal(seen)[..., :1], 0.0), threshold=0.1)
    push = Constraint(lambda seen: 10.0 * np.maximum(_to_goal(seen) - TOLERANCE, 0.0), over="last")
    return (
        Stage("reach the cube", lambda seen: _gap(seen) < 0.01, (reach, stray)),
        Stage("push it to the goal", succeeded, (push,)),
    )


def _gap(observation: Arrays) -> np.ndarray:
    """Return the gap in metres between pusher and cube, [...]."""
    return np.maximum(_length(observation[ENVIRONMENT_STATE][..., TO_CUBE]) - CONTACT, 0.0)


def _to_goal(observation: Arrays) -> np.ndarray:
    """Return the distance in metres from the cube's centre to the goal, [...]."""
    return _length(observation[ENVIRONMENT_STATE][..., TO_GOAL])


def push_away(qpos: np.ndarray, qvel: np.ndarray, uniforms: np.ndarray) -> None:
    """Give the block, whose joints come first, a speed in any direction; qpos, qvel: [R, >= 5], uniforms [R, 4]."""
    angle = scale(uniforms[:, 0], -np.pi, np.pi)
    qvel[:, 0:2] = PUSHED * np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def markers(goal: np.ndarray) -> Markers:
    """The goal disc lies at the goal: [R, 2] m -> positions [R, 1, 3], quaternions [R, 1, 4]."""
    position = np.concatenate([goal, np.zeros_like(goal[:, :1])], axis=1)[:, None]
    return Markers(position, flat_quaternion(np.zeros(position.shape[:2])))


class PushCubeExpert:
    """Moves around the cube to the side opposite the goal, then pushes along the line to the goal."""

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state. rows: [R] indices, ignored."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 2], fractions of full speed, for an observation [B, H, ...]."""
        state, environment = newest(observation, STATE), newest(observation, ENVIRONMENT_STATE)
        target = state[:, PUSHER] + state[:, TARGET]
        return steer(target, environment[:, CUBE], environment[:, TO_GOAL])


def steer(target: np.ndarray, cube: np.ndarray, to_goal: np.ndarray) -> np.ndarray:
    """Return actions [B, 2] that move around the cube and push it along `to_goal`, all [B, 2]; target: the pusher's.

    target, cube and to_goal: m; actions: fractions of full speed.
    """
    # The pusher's target as seen from the cube, along and across the way to the goal.
    distance = _length(to_goal)[:, None]
    forward = to_goal / np.maximum(distance, 1e-6)
    sideways = np.stack([-forward[:, 1], forward[:, 0]], axis=-1)
    relative = target - cube
    along = (relative * forward).sum(axis=1, keepdims=True)
    across = (relative * sideways).sum(axis=1, keepdims=True)
    # Pushing: stay behind the centre, steering against the lateral error, and slow down near the goal.
    push = forward * np.minimum(0.6, 8.0 * distance + 0.15) - sideways * np.clip(12.0 * across, -0.5, 0.5)
    # Going round: head for a point behind the cube; while still beside or ahead of it, keep clear of its corners.
    clear = 0.10
    side = np.where(across >= 0, 1.0, -1.0)
    waypoint = (
        cube - forward * np.where(along > -0.02, 0.0, clear) + sideways * np.where(along > -0.02, side * clear, 0.0)
    )
    waypoint = np.where(
        (along > -0.02) & (np.abs(across) > 0.085), cube - forward * clear + sideways * side * 0.09, waypoint
    )
    approach = 6.0 * (waypoint - target)
    is_behind = (along < -0.05) & (np.abs(across) < 0.02)
    return np.clip(np.where(is_behind, push, approach), -1.0, 1.0)


def _length(vector: np.ndarray) -> np.ndarray:
    """Euclidean length, [..., 2] -> [...]."""
    return np.sqrt(vector[..., 0] ** 2 + vector[..., 1] ** 2)


def task() -> Task:
    """Return the push-cube task."""
    return Task(
        name="push_cube",
        model="planar/push_cube.xml",
        instructions=("push the cube onto the green disc",),
        success_text=f"The cube's centre is within {100 * TOLERANCE:.0f} cm of the goal's.",
        fps=10,
        substeps=10,
        horizon=80,
        cameras=("top", "front"),
        action=Field((2,), low=-1.0, high=1.0, unit="share of 0.4 m/s", names=("velocity_x", "velocity_y")),
        observation={
            STATE: PUSHER_FIELD,
            ENVIRONMENT_STATE: CUBE_FIELD,
        },
        uniforms=7,
        start=start,
        control=control,
        observe=observe,
        potential=potential,
        succeeded=succeeded,
        expert=PushCubeExpert,
        markers=markers,
        stages=stages(),
        disturbances={SLIP: push_away},
    )
