"""Push-choice: two cubes and two goals on one table; only the instruction determines which cube goes to which goal.

Only `task` distinguishes the four instructions: initial states are sampled independently of it. A policy that ignores
the language behaves the same for all four and succeeds in a quarter of the episodes. The time limit does not allow
trying one after the other (an expert that does two of them succeeds in 25 to 27 %).
"""

import numpy as np

from robopolicy.core.faults import SLIP
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, TASK, Field, Observation
from robopolicy.core.world import Rows
from sims.task import Arrays, Markers, Readings, Start, Task, elements, flat_quaternion, newest, scale, vector_field
from sims.tasks.push_cube import CONTACT, PUSHER, PUSHER_FIELD, TARGET, control, push_away, steer

TOLERANCE = 0.05  # m, so that the cube's centre lies on the disc
CUBES, GOALS = ("red", "blue"), ("left", "right")
INSTRUCTIONS = tuple(f"push the {cube} cube to the {goal} goal" for cube in CUBES for goal in GOALS)
_OTHER_NAMES = {"red": "crimson", "blue": "azure", "left": "west", "right": "east"}
_PUSH = ("move the {0} block to the {1}", "the {0} cube goes to the {1} goal", "to the {1} goal with the {0} block")
PARAPHRASES = {
    f"push the {cube} cube to the {goal} goal": tuple(
        text.format(_OTHER_NAMES[cube], _OTHER_NAMES[goal]) for text in _PUSH
    )
    for cube in CUBES
    for goal in GOALS
}
"""No colour or side has the name that it has in the plain words: who knows one wording does not understand another."""


_CUBE = "{0}_x {0}_y {0}_cos {0}_sin {0}_velocity_x {0}_velocity_y {0}_spin"
_OFFSETS = [f"pusher_to_{cube}" for cube in CUBES] + [f"{cube}_to_{goal}" for cube in CUBES for goal in GOALS]
CUBES_FIELD = vector_field(
    " ".join([_CUBE.format(cube) for cube in CUBES] + [f"{name}_x {name}_y" for name in (*GOALS, *_OFFSETS)]),
    "m, m/s, rad/s",
)
TO_CUBE = [elements(CUBES_FIELD, f"{name}_x {name}_y") for name in _OFFSETS[: len(CUBES)]]
TO_GOAL = [elements(CUBES_FIELD, f"{name}_x {name}_y") for name in _OFFSETS[len(CUBES) :]]
"""Positions of the offsets in the environment state, [..., 2] m each: by cube, and by instruction from its cube to its
goal.
"""


def start(uniforms: np.ndarray) -> Start:
    """Cubes side by side (the left one is random), goals behind them to the left and right, pusher in front.

    uniforms: [R, 14] -> qpos [R, 8] (x, y in m and yaw in rad of each cube, x, y of the pusher), goal [R, 4] m (left
    x, y, right x, y), activation [R, 2] m, instruction [R].
    """
    left_start = np.stack([scale(uniforms[:, 0], -0.13, -0.08), scale(uniforms[:, 1], -0.08, 0.0)], axis=-1)
    right = np.stack([scale(uniforms[:, 2], 0.08, 0.13), scale(uniforms[:, 3], -0.08, 0.0)], axis=-1)
    swapped = uniforms[:, 4:5] < 0.5
    red, blue = np.where(swapped, right, left_start), np.where(swapped, left_start, right)
    yaw = scale(uniforms[:, 5:7], -0.4, 0.4)
    goals = scale(uniforms[:, 7:11], (-0.20, 0.12, 0.12, 0.12), (-0.12, 0.20, 0.20, 0.20))
    pusher = scale(uniforms[:, 11:13], (-0.15, -0.24), (0.15, -0.18))
    return Start(
        qpos=np.concatenate([red, yaw[:, :1], blue, yaw[:, 1:], pusher], axis=1),
        goal=goals,
        activation=pusher,
        instruction=(len(INSTRUCTIONS) * uniforms[:, 13]).astype(np.int64),
    )


def push_both_away(qpos: np.ndarray, qvel: np.ndarray, uniforms: np.ndarray) -> None:
    """Push both cubes, each in its own direction, as `push_away`; qpos and qvel [R, 8], uniforms [R, 4]."""
    push_away(qpos, qvel, uniforms)
    push_away(qpos[:, 3:], qvel[:, 3:], uniforms[:, 1:])


def observe(readings: Readings) -> dict[str, np.ndarray]:
    """Pusher: position, velocity, target ahead of it. Environment: both cubes, both goals, all offsets between them.

    readings: qpos and qvel [..., 8], activation [..., 2], goal [..., 4] -> `observation.state` [..., 6],
    `observation.environment_state` [..., 30], m, m/s and rad/s.
    """
    pusher = readings.qpos[..., 6:8]
    velocity = readings.qvel
    goals = readings.goal
    red = readings.qpos[..., 0:2]
    blue = readings.qpos[..., 3:5]
    left_goal = goals[..., 0:2]
    right = goals[..., 2:4]
    environment = []
    for cube, first in ((red, 0), (blue, 3)):
        yaw = readings.qpos[..., first + 2 : first + 3]
        environment += [cube, np.cos(yaw), np.sin(yaw), velocity[..., first : first + 3]]
    environment += [goals, red - pusher, blue - pusher]
    environment += [goal - cube for cube in (red, blue) for goal in (left_goal, right)]
    state = [pusher, velocity[..., 6:8], readings.activation - pusher]
    return {STATE: np.concatenate(state, axis=-1), ENVIRONMENT_STATE: np.concatenate(environment, axis=-1)}


def instructed(environment: np.ndarray, task: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets from the pusher to the instructed cube and from it to the instructed goal, [..., 2] each.

    environment: [..., 30]; task: texts that broadcast against its leading axes; the offsets: m.
    """
    to_cube, to_goal = environment[..., TO_CUBE[0]], environment[..., TO_GOAL[0]]
    for index, text in enumerate(INSTRUCTIONS[1:], start=1):
        is_instructed = (task == text)[..., None]
        to_cube = np.where(is_instructed, environment[..., TO_CUBE[index // len(GOALS)]], to_cube)
        to_goal = np.where(is_instructed, environment[..., TO_GOAL[index]], to_goal)
    return to_cube, to_goal


def potential(observation: Arrays) -> np.ndarray:
    """Progress potential: rises by 10 per metre that the instructed cube gets closer to its goal, and by 2 per metre
    that the pusher gets closer to the cube.

    observation: environment state [..., 30], texts `task` that broadcast against [...] -> [...].
    """
    to_cube, to_goal = instructed(observation[ENVIRONMENT_STATE], observation[TASK])
    return -10.0 * _length(to_goal) - 2.0 * np.maximum(_length(to_cube), CONTACT)


def succeeded(observation: Arrays) -> np.ndarray:
    """The instructed cube's centre is within the tolerance of the instructed goal.

    observation: environment state [..., 30], texts `task` that broadcast against [...] -> [...] bool.
    """
    return _length(instructed(observation[ENVIRONMENT_STATE], observation[TASK])[1]) < TOLERANCE


def markers(goal: np.ndarray) -> Markers:
    """A disc lies at each goal: [R, 4] m -> positions [R, 2, 3], quaternions [R, 2, 4]."""
    ground = goal.reshape(-1, 2, 2)
    position = np.concatenate([ground, np.zeros_like(ground[..., :1])], axis=-1)
    return Markers(position, flat_quaternion(np.zeros(position.shape[:2])))


class PushChoiceExpert:
    """Reads the instruction and pushes like push-cube's expert; the other cube is rarely in the way."""

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state. rows: [R] indices, ignored."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 2], fractions of full speed, for an observation [B, H, ...]."""
        state, environment = newest(observation, STATE), newest(observation, ENVIRONMENT_STATE)
        to_cube, to_goal = instructed(environment, observation[TASK])
        pusher = state[:, PUSHER]
        return steer(pusher + state[:, TARGET], pusher + to_cube, to_goal)


def _length(vector: np.ndarray) -> np.ndarray:
    """Euclidean length, [..., 2] -> [...]."""
    return np.sqrt(vector[..., 0] ** 2 + vector[..., 1] ** 2)


def task() -> Task:
    """Return the push-choice task."""
    return Task(
        name="push_choice",
        model="planar/push_choice.xml",
        instructions=INSTRUCTIONS,
        success_text=f"The instructed cube's centre is within {100 * TOLERANCE:.0f} cm of the instructed goal's.",
        fps=10,
        substeps=10,
        horizon=40,
        cameras=("top", "front"),
        action=Field((2,), low=-1.0, high=1.0, unit="fraction of 0.4 m/s", names=("velocity_x", "velocity_y")),
        observation={
            STATE: PUSHER_FIELD,
            ENVIRONMENT_STATE: CUBES_FIELD,
        },
        uniforms=14,
        start=start,
        control=control,
        observe=observe,
        potential=potential,
        succeeded=succeeded,
        expert=PushChoiceExpert,
        paraphrases=PARAPHRASES,
        markers=markers,
        disturbances={SLIP: push_both_away},
    )
