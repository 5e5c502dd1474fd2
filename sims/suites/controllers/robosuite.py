"""Scripted expert of robosuite's tasks with one arm: pick a thing up and bring it to its place, no memory.

Every action follows from the newest observation: a policy can imitate it, and noise or a lost grasp is made good. All
computations are vectorised over rows. Lengths in m, angles in rad, actions [7] at 20 Hz: motion of the site between the
fingertips (1 is 5 cm), turn (1 is 0.5), fingers (1 closes).
"""

from dataclasses import dataclass

import numpy as np
from scipy.spatial.transform import Rotation

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation, WorldSpec
from robopolicy.core.world import Rows
from sims.suites.operational_space import STEP, TURN

HAND, FACING = "robot0_eef_pos", "robot0_eef_quat"
FINGERS = "robot0_gripper_qpos"
DOWNWARD = Rotation.from_matrix(np.diag([1.0, -1.0, -1.0]))
"""Orientation of a hand that points down and whose fingers close along y."""
GAIN, TURN_GAIN = 0.5, 0.4
"""Share of the remaining distance and turn that is covered per control step."""
ABOVE = 0.06
"""Height over the thing at which the hand travels to it."""
AIMED = 0.02
"""Distance to the axis of the grasp at which the hand sinks."""
REACHED, LOST = 0.015, 0.03
"""Distances from the grasp at which the hand closes, and at which it has lost the thing."""

WRIST = 1.8
"""Largest yaw of the hand, either way."""


@dataclass(frozen=True)
class Job:
    """What to do in a task.

    thing: name of its pose in the observation; grip: [3] where it is grasped, in its own frame; symmetry: smallest turn
    that gives the same grasp again, 0 for any; closed: distance of the fingers below which it is held; place: [2] where
    it belongs, None to lift it only; travel, release: heights of its origin at which it is carried and let go; beside:
    distance from its place at which it is lowered; aligned: smallest turn that gives the same fit again, 0 for any.
    """

    thing: str
    closed: float
    grip: tuple[float, float, float] = (0.0, 0.0, 0.0)
    symmetry: float = 0.0
    place: tuple[float, float] | None = None
    travel: float = 1.0
    release: float = 0.0
    beside: float = 0.02
    fits: tuple[float, ...] = ()


JOBS = {
    "Lift": Job("cube", closed=0.055, symmetry=np.pi / 2),
    # The walls of the bins end at a height of 0.9, the can is 8 cm high; the middle of its bin is hard to reach.
    "PickPlaceCan": Job(
        "Can", closed=0.06, grip=(0.0, 0.0, 0.01), place=(0.16, 0.35), travel=0.965, release=0.9, beside=0.03
    ),
    # The peg ends at a height of 0.95; the nut lets it through with 7 mm to spare on each side. A handle that points
    # away from the robot is out of reach.
    "NutAssemblySquare": Job(
        "SquareNut",
        closed=0.045,
        grip=(0.06, 0.0, 0.0),
        symmetry=np.pi,
        place=(0.23, 0.1),
        travel=0.985,
        release=0.945,
        beside=0.006,
        fits=(np.pi / 2, np.pi, -np.pi / 2),
    ),
}


class RobosuiteExpert:
    """Expert of a task in JOBS.

    Raises ConfigError when the world lacks an entry of robosuite's observation that it reads.
    """

    def __init__(self, task: str, spec: WorldSpec):
        self._job = JOBS[task]
        self._columns: dict[str, tuple[str, list[int]]] = {}
        for entry in (HAND, FACING, FINGERS, f"{self._job.thing}_pos", f"{self._job.thing}_quat"):
            key = STATE if entry.startswith("robot") else ENVIRONMENT_STATE
            names = spec.observation[key].names if key in spec.observation else ()
            columns = [index for index, name in enumerate(names) if name.startswith(f"{entry}[")]
            if not columns:
                raise ConfigError(f"The expert of {task} reads '{entry}', which '{spec.name}' does not output.")
            self._columns[entry] = (key, columns)

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state. rows: [R] indices, ignored."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 7]; observation: `observation.state` [B, H, n] and `observation.environment_state`."""
        hand, facing, fingers, thing, orientation = (
            observation[key][:, -1, columns].astype(np.float64) for key, columns in self._columns.values()
        )
        job, there = self._job, Rotation.from_quat(orientation)
        facing = Rotation.from_quat(facing)
        yaw, thing_yaw = _yaw(facing), _yaw(there)
        grip = thing + there.apply(job.grip)
        way = grip - hand
        aside = np.linalg.norm(way[:, :2], axis=1)
        gap = np.abs(fingers[:, 0] - fingers[:, -1])
        is_near = (aside < REACHED) & (np.abs(way[:, 2]) < REACHED)
        is_held = (np.linalg.norm(way, axis=1) < LOST) & (gap < job.closed)

        # To the thing: above it, down when the fingers are around its axis and turned right, then close.
        grasp_yaw = yaw + _nearest(thing_yaw - yaw, job.symmetry) if job.symmetry else np.zeros(len(yaw))
        is_aimed = (aside < AIMED) & (np.abs(_wrapped(grasp_yaw - yaw)) < 0.15)
        move = way + np.outer(~is_aimed * ABOVE, [0.0, 0.0, 1.0])
        target_yaw, close = grasp_yaw, is_near

        carried, carried_yaw, is_placed = self._carry(thing, thing_yaw, yaw)
        move = np.where(is_held[:, None], carried, move)
        target_yaw = np.where(is_held, carried_yaw, target_yaw)
        close = (close | is_held) & ~is_placed
        move = np.where(is_placed[:, None], np.outer(gap > job.closed, [0.0, 0.0, 0.1]), move)
        target_yaw = np.where(is_placed, yaw, target_yaw)

        turn = (Rotation.from_euler("z", target_yaw[:, None]) * DOWNWARD * facing.inv()).as_rotvec()
        actions = np.column_stack([GAIN * move / STEP, TURN_GAIN * turn / TURN, np.where(close, 1.0, -1.0)])
        return np.clip(actions, -1.0, 1.0)

    def _carry(
        self, thing: np.ndarray, thing_yaw: np.ndarray, yaw: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the motion [B, 3] of a held thing to its place, the hand's yaw [B], and whether it is there [B]."""
        job = self._job
        if job.place is None:
            return np.tile([0.0, 0.0, 0.1], (len(thing), 1)), yaw, np.zeros(len(thing), bool)
        way = np.array(job.place) - thing[:, :2]
        aside = np.linalg.norm(way, axis=1)
        off = self._to_fit(thing_yaw, yaw) if job.fits else np.zeros(len(yaw))
        fits = (aside < job.beside) & (np.abs(off) < 0.1)
        # On the way down it may be off by more than when it starts to sink.
        is_low = (thing[:, 2] < job.travel - 0.015) & (aside < 2 * job.beside)
        down = fits | is_low
        height = np.where(down, job.release - 0.02, job.travel)
        is_free = (thing[:, 2] > job.travel - 0.02) | down
        move = np.column_stack([way * is_free[:, None], height - thing[:, 2]])
        is_placed = (aside < 2 * job.beside) & (thing[:, 2] < job.release)
        return move, yaw + off if job.fits else np.zeros(len(yaw)), is_placed

    def _to_fit(self, thing_yaw: np.ndarray, yaw: np.ndarray) -> np.ndarray:
        """Return the smallest turns [B] after which things fit and the wrist is not at its limit."""
        turns = _wrapped(np.array(self._job.fits) - thing_yaw[:, None])
        cost = np.abs(turns) + 10.0 * (np.abs(yaw[:, None] + turns) > WRIST)
        return np.take_along_axis(turns, np.argmin(cost, axis=1)[:, None], axis=1)[:, 0]


def _yaw(rotation: Rotation) -> np.ndarray:
    """Return the angles [B] of the first axes in the horizontal plane."""
    x, y, _ = rotation.apply([1.0, 0.0, 0.0]).T
    return np.arctan2(y, x)


def _nearest(angle: np.ndarray, period: float) -> np.ndarray:
    """Return angles [B] up to multiples of a period, between plus and minus half of it."""
    return (angle + period / 2) % period - period / 2


def _wrapped(angle: np.ndarray) -> np.ndarray:
    return _nearest(angle, 2 * np.pi)
