"""Board of the original Push-T: gym-pusht's pymunk space, stepped without its Python overhead, and its coverage.

A control step is ten physics steps of 10 ms, as in `PushTEnv.step`, and gives bit for bit the same poses in a twentieth
of the time: contacts are not counted, and the coverage of many poses is computed at once (`coverage`). Units are the
board's pixels, 512 to a side, and radians.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError
from sims.suites.families import family_of

ENVIRONMENT = "gym_pusht/PushT-v0"
BOARD = 512.0
GOAL = (256.0, 256.0, np.pi / 4)
"""Goal pose of the T: x and y of the middle of its bar's upper edge, and its angle."""
RECTANGLES = ((-60.0, 60.0, 0.0, 30.0), (-15.0, 15.0, 30.0, 120.0))
"""The T's bar and stem in its own frame: x from, to, y from, to."""
AREA = sum((right - left) * (high - low) for left, right, low, high in RECTANGLES)
POINTS = np.array(
    [
        (9.2698, 90.0410),
        (-60.9835, -1.1867),
        (60.9128, -1.3934),
        (-0.2705, 25.5436),
        (-14.0649, 122.8159),
        (39.0027, 32.8574),
        (-39.9664, 32.7297),
        (-16.8243, 62.8632),
        (23.5415, -1.7003),
    ]
)
"""The nine key points of diffusion_policy's state-based Push-T in the T's frame, px: spread over the drawn T by
farthest-point sampling with its generator's seed 0. That environment appends a mask of visible points, here omitted."""
CORNERS = np.array([(x, y) for x0, x1, y0, y1 in RECTANGLES for x, y in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))])
"""The eight corners of gym-pusht's `environment_state`, in its order, px."""
MARKS = {"keypoints": POINTS, "corners": CORNERS}
STARTS = ("gym_pusht", "diffusion_policy")
STIFFNESS, DAMPING = 100.0, 20.0  # of the pusher's controller, 1/s^2 and 1/s
STEP_TIME, SUBSTEPS = 0.01, 10  # seconds of a physics step, physics steps of a control step


def points_of(poses: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Return points of the T on the board: poses [..., 3], marks [K, 2] in the T's frame -> [..., K, 2] px."""
    cosine, sine = np.cos(poses[..., 2, None]), np.sin(poses[..., 2, None])
    x, y = marks[:, 0], marks[:, 1]
    turned = np.stack([cosine * x - sine * y, sine * x + cosine * y], axis=-1)
    return turned + poses[..., None, :2]


def coverage(poses: np.ndarray) -> np.ndarray:
    """Return the share of the goal's area that the T covers.

    poses: [..., 3] x, y, angle -> [...] from 0 to 1, equal to gym-pusht's polygons within 1e-9.
    """
    poses = np.asarray(poses, dtype=np.float64)
    turn = poses[..., 2, None, None] - GOAL[2]
    dx, dy = poses[..., 0] - GOAL[0], poses[..., 1] - GOAL[1]
    cosine, sine = np.cos(GOAL[2]), np.sin(GOAL[2])
    # Corners [..., rectangle, corner] in the goal's frame, counter-clockwise.
    left, right, low, high = np.array(RECTANGLES).T[..., None]
    x, y = np.concatenate([left, right, right, left], 1), np.concatenate([low, low, high, high], 1)
    corner_x = (cosine * dx + sine * dy)[..., None, None] + np.cos(turn) * x - np.sin(turn) * y
    corner_y = (cosine * dy - sine * dx)[..., None, None] + np.sin(turn) * x + np.cos(turn) * y
    total = np.zeros(poses.shape[:-1])
    for rectangle in RECTANGLES:
        total += _area_inside(corner_x, corner_y, rectangle)
    return total / AREA


def _area_inside(x: np.ndarray, y: np.ndarray, rectangle: Sequence[float]) -> np.ndarray:
    """Return the area of polygons with counter-clockwise corners x, y [..., P, N] inside a rectangle, summed over P.

    Above each x lies the part of the polygon between its edges, so the area is the integral of the edges' heights,
    clamped to the rectangle, over the x inside it; parallel and coinciding edges need no special case.
    """
    left, right, low, high = rectangle
    dx, dy = np.roll(x, -1, axis=-1) - x, np.roll(y, -1, axis=-1) - y
    # Points along each edge, from 0 to 1, where it enters and leaves the strip in x, then that in y.
    begin, end = _crossings(x, dx, left, right, 0.0, 1.0)
    first, second = _crossings(y, dy, low, high, begin, end)
    heights = [np.clip(y + at * dy, low, high) for at in (begin, first, second, end)]
    lengths = (first - begin, second - first, end - second)
    mean = sum(length * (heights[i] + heights[i + 1]) / 2 for i, length in enumerate(lengths))
    return -(dx * (mean - low * (end - begin))).sum(axis=(-2, -1))


def _crossings(value: np.ndarray, slope: np.ndarray, low: float, high: float, begin: Any, end: Any) -> Any:
    """Return the t at which value + t slope enters and leaves [low, high], each within [begin, end]."""
    slope = np.where(slope == 0, np.finfo(float).tiny, slope)
    with np.errstate(over="ignore"):
        first, second = (low - value) / slope, (high - value) / slope
    return np.clip(np.minimum(first, second), begin, end), np.clip(np.maximum(first, second), begin, end)


def official_start(seed: int, starts: str) -> np.ndarray:
    """Return the numbers [5] from which an episode is started: agent x, y, block x, y, angle.

    starts: "gym_pusht" draws them as its `reset(seed)`, "diffusion_policy" as the environment of Chi et al. (2023) with
    that seed: its published test episodes have the seeds 100000 to 100049. Raises ConfigError on another name.
    """
    if starts not in STARTS:
        raise ConfigError(f"world.options.starts={starts} must be one of {', '.join(STARTS)}.")
    if starts == "diffusion_policy":
        old = np.random.RandomState(seed % 2**32)
        numbers = [old.randint(50, 450), old.randint(50, 450), old.randint(100, 400), old.randint(100, 400)]
        return np.array([*numbers, old.randn() * 2 * np.pi - np.pi])
    new = np.random.default_rng(seed)  # what gymnasium's np_random is
    numbers = [new.integers(*bounds) for bounds in ((50, 450), (50, 450), (100, 400), (100, 400))]
    return np.array([*numbers, new.uniform(-np.pi, np.pi)])


def load_pusht() -> Any:
    """Return gym-pusht's module of the environment. Raises ConfigError without the extra `pusht`."""
    family = family_of(ENVIRONMENT)
    assert family is not None
    family.register()
    return importlib.import_module("gym_pusht.envs.pusht")


class Board:
    """One episode of Push-T in gym-pusht's own space.

    The block slides without inertia, but contacts keep impulses from one physics step to the next, which pymunk cannot
    restore: a saved episode is its start and actions, and is played again.
    """

    def __init__(self) -> None:
        self._environment = load_pusht().PushTEnv()
        import pymunk  # pyright: ignore[reportMissingImports]
        from pymunk._chipmunk_cffi import lib  # pyright: ignore[reportMissingImports]

        self._library: Any = lib
        # pymunk calls Python at every contact once a function is set; an unused handler has the library's own, empty.
        self._spare: Any = pymunk.Space().add_collision_handler(0, 0)

    def start(self, numbers: np.ndarray) -> np.ndarray:
        """Start an episode from `official_start`'s numbers [5] and return its pose [5]: agent x, y, block x, y, angle.

        The block's pose differs from the numbers, because gym-pusht turns it about its centre of mass.
        """
        environment = self._environment
        environment.reset(seed=0, options={"reset_to_state": numbers})
        environment.collision_handeler._handler.postSolveFunc = self._spare._handler.postSolveFunc
        self._space: Any = environment.space._space
        self._agent, self._block = environment.agent._body, environment.block._body
        self._velocity = (0.0, 0.0)
        return self._pose(*environment.agent.position)

    def _pose(self, x: float, y: float) -> np.ndarray:
        block = self._environment.block
        return np.array([x, y, *block.position, block.angle])

    def advance(self, actions: np.ndarray, offsets: bool = False) -> np.ndarray:
        """Execute target positions [C, 2] and return the poses [C, 5] after each; angles are not wrapped.

        offsets: whether actions are offsets of the target from the pusher's position at the beginning of their step;
        the target is then clipped to the board.
        """
        step, set_velocity = self._library.cpSpaceStep, self._library.cpBodySetVelocity
        space, agent = self._space, self._agent
        place = self._library.cpBodyGetPosition(agent)
        (x, y), (speed_x, speed_y) = (place.x, place.y), self._velocity
        poses = np.empty((len(actions), 5))
        for number, (target_x, target_y) in enumerate(actions.tolist()):
            if offsets:
                target_x, target_y = (min(max(at + by, 0.0), BOARD) for at, by in ((x, target_x), (y, target_y)))
            for _ in range(SUBSTEPS):
                speed_x += (STIFFNESS * (target_x - x) + DAMPING * (0 - speed_x)) * STEP_TIME
                speed_y += (STIFFNESS * (target_y - y) + DAMPING * (0 - speed_y)) * STEP_TIME
                set_velocity(agent, (speed_x, speed_y))
                step(space, STEP_TIME)
                # A kinematic body: nothing but its velocity moves it.
                x, y = x + speed_x * STEP_TIME, y + speed_y * STEP_TIME
            poses[number] = self._pose(x, y)
        self._velocity = speed_x, speed_y
        return poses


class Painter:
    """Draws poses as gym-pusht does."""

    def __init__(self) -> None:
        self._environment = load_pusht().PushTEnv()
        self._environment.reset(seed=0)

    def image(self, pose: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return uint8 [height, width, 3] of a pose [5]."""
        environment = self._environment
        environment.agent.position = tuple(pose[:2])
        environment.block.angle = pose[4]  # about its centre of mass, so that its position comes after it
        environment.block.position = tuple(pose[2:4])
        for body in (environment.agent, environment.block):
            environment.space.reindex_shapes_for_body(body)
        return environment._get_img(environment._draw(), width, height)
