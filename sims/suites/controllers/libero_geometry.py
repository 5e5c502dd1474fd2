"""Geometry of scenes for a scripted gripper: collision geoms as points, height maps, grasps, collisions of the hand.

Lengths in m, angles in rad. The grip site's frame: x is the axis along which the fingers close, z points out of the
hand; a rotation is a matrix [3, 3] from that frame to the world.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import heapq
from dataclasses import dataclass

import mujoco
import numpy as np
from scipy.ndimage import maximum_filter

SPACING = 0.005
"""Distance of neighbouring points on a surface."""
CELL = 0.007
"""Edge of a cell of a height map; every cell that a surface covers holds a point of it."""
TIP = 0.012
"""Distance from the grip site to the fingertips."""
OPEN, OUTER = 0.0375, 0.068
"""Inner and outer distance of an open finger from the site along the closing axis."""
THICK = 0.012
"""Half the width of a finger."""
NARROW = 0.019
"""Inner distance of a finger that is half closed."""
PAD = 0.006
"""Half the width of a finger's middle, which has to touch what is held."""
PALM = 0.026
"""Distance of the palm above the site."""
PALM_LONG, PALM_WIDE = 0.108, 0.036
"""Half the palm's length and width."""
VOID = -10.0
"""Height of an empty cell."""


def box_surface(half: np.ndarray) -> np.ndarray:
    """Return points [N, 3] on the surface of a box with half edges `half` [3], at most SPACING apart."""
    axes = [np.linspace(-h, h, int(np.ceil(2 * h / SPACING)) + 1) for h in half]
    sides = []
    for axis in range(3):
        across = [values if index != axis else np.array([-half[axis], half[axis]]) for index, values in enumerate(axes)]
        sides.append(np.stack(np.meshgrid(*across, indexing="ij"), -1).reshape(-1, 3))
    return np.unique(np.concatenate(sides), axis=0)


class Cloud:
    """Points on the collision geoms of some bodies.

    model: compiled MuJoCo model; roots: body ids whose subtrees are sampled. `root`, `body` [N]: whose root and whose
    body a point is part of. A geom other than a box is sampled as its bounding box.
    """

    def __init__(self, model: mujoco.MjModel, roots: list[int]):
        points, geoms = [], []
        for geom in range(model.ngeom):
            root = model.body_rootid[model.geom_bodyid[geom]]
            if root in roots and (model.geom_contype[geom] or model.geom_conaffinity[geom]):
                local = model.geom_aabb[geom, :3] + box_surface(model.geom_aabb[geom, 3:])
                points.append(local)
                geoms.append(np.full(len(local), geom))
        self._geoms = [int(each[0]) for each in geoms]
        self._local = points
        self.body = model.geom_bodyid[np.concatenate(geoms)]
        self.root = model.body_rootid[self.body]

    def points(self, data: mujoco.MjData) -> np.ndarray:
        """Return all points [N, 3] in the world."""
        return np.concatenate(
            [
                local @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom]
                for geom, local in zip(self._geoms, self._local, strict=True)
            ]
        )


class HeightMap:
    """Highest point per cell of a grid that is turned by `yaw` about the vertical.

    low, high: [2] corners of the grid in its own (turned) axes; `top` [U, V].
    """

    def __init__(self, points: np.ndarray, low: np.ndarray, high: np.ndarray, yaw: float = 0.0):
        self.yaw, self.low = yaw, low
        shape = tuple(np.ceil((high - low) / CELL).astype(int) + 1)
        self.top = np.full(shape, VOID)
        cells = self.cells(points[:, :2])
        inside = ((cells >= 0) & (cells < shape)).all(1)
        np.maximum.at(self.top, tuple(cells[inside].T), points[inside, 2])

    def cells(self, places: np.ndarray) -> np.ndarray:
        """Return the cells [N, 2] of `places` [N, 2] in the world."""
        return np.floor((turned(places, -self.yaw) - self.low) / CELL).astype(int)

    def at(self, places: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        """Return the heights (or other `values` of cells) at `places` [..., 2], VOID outside."""
        cells = self.cells(places.reshape(-1, 2))
        inside = ((cells >= 0) & (cells < self.top.shape)).all(1)
        found = np.full(len(cells), VOID)
        found[inside] = (self.top if values is None else values)[tuple(cells[inside].T)]
        return found.reshape(places.shape[:-1])

    def around(self, half_u: float, half_v: float, shift: float = 0.0) -> np.ndarray:
        """Return the highest point [U, V] in a rectangle around each cell, moved by `shift` along u."""
        size = tuple(2 * int(np.ceil(half / CELL - 0.5)) + 1 for half in (half_u, half_v))
        filtered = maximum_filter(self.top, size=size, mode="constant", cval=VOID)
        cells = round(shift / CELL)
        if cells == 0:
            return filtered
        moved = np.full_like(filtered, VOID)
        if cells > 0:
            moved[:-cells] = filtered[cells:]
        else:
            moved[-cells:] = filtered[:cells]
        return moved

    def site_floor(self, opening: float = OPEN) -> np.ndarray:
        """Return the lowest height [U, V] of a downward hand's site above each cell, its closing axis along u."""
        # Cells are coarse: the inner edge is one of them farther out, and what is nearer is looked at later.
        middle, half = opening + (OUTER - OPEN + CELL) / 2, (OUTER - OPEN - CELL) / 2
        fingers = np.maximum(self.around(half, THICK, middle), self.around(half, THICK, -middle))
        return np.maximum(fingers + TIP + 0.002, self.around(PALM_LONG, PALM_WIDE) - PALM + 0.002)


def turned(places: np.ndarray, yaw: float) -> np.ndarray:
    """Return `places` [..., 2] turned by `yaw`."""
    cosine, sine = np.cos(yaw), np.sin(yaw)
    return places @ np.array([[cosine, sine], [-sine, cosine]])


def frame(approach: np.ndarray, closing: np.ndarray) -> np.ndarray:
    """Return the rotation of a hand that points along `approach` [3] and closes along `closing` [3]."""
    z = approach / np.linalg.norm(approach)
    x = closing - (closing @ z) * z
    x = x / np.linalg.norm(x)
    return np.stack([x, np.cross(z, x), z], 1)


def downward(yaw: float) -> np.ndarray:
    """Return the rotation [3, 3] of a downward hand whose closing axis has angle `yaw` to world x."""
    return frame(np.array([0.0, 0.0, -1.0]), np.array([np.cos(yaw), np.sin(yaw), 0.0]))


def rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Return axis times angle [3] of a rotation matrix."""
    quaternion, vector = np.zeros(4), np.zeros(3)
    mujoco.mju_mat2Quat(quaternion, np.ascontiguousarray(rotation).reshape(9))
    mujoco.mju_quat2Vel(vector, quaternion, 1.0)
    return vector


def about(axis: np.ndarray, angle: float) -> np.ndarray:
    """Return the rotation by `angle` about the unit vector `axis` [3]."""
    quaternion, matrix = np.zeros(4), np.zeros(9)
    mujoco.mju_axisAngle2Quat(quaternion, axis, angle)
    mujoco.mju_quat2Mat(matrix, quaternion)
    return matrix.reshape(3, 3)


def table_points(centre: np.ndarray, height: float) -> np.ndarray:
    """Return points [N, 3] of the table around `centre` [3]."""
    steps = np.arange(-0.25, 0.25, SPACING)
    return np.stack(np.meshgrid(steps, steps, [0.0]), -1).reshape(-1, 3) + np.append(centre[:2], height)


def hand_hits(points: np.ndarray, position: np.ndarray, rotation: np.ndarray, opening: float = OPEN) -> np.ndarray:
    """Return the `points` [N, 3] that a hand at this pose of its site would touch, as [N] bool.

    opening: inner distance of each finger from the site; 0 for closed fingers.
    """
    local = (points - position) @ rotation
    x, y = np.abs(local[:, :2]).T
    z = local[:, 2]
    fingers = (x >= opening) & (x < opening + OUTER - OPEN) & (y < THICK) & (z < TIP) & (z > -0.05)
    palm = (x < PALM_LONG) & (y < PALM_WIDE) & (z < -PALM) & (z > -0.10)
    wrist = (x < 0.06) & (y < 0.06) & (z <= -0.10) & (z > -0.30)
    return fingers | palm | wrist


@dataclass(frozen=True)
class Grasp:
    """Pose of the site in which to close the hand; the higher the `score`, the better; opening: of the fingers."""

    position: np.ndarray
    rotation: np.ndarray
    score: float
    opening: float = OPEN


def downward_grasps(
    thing: np.ndarray, others: np.ndarray, floor: float, yaws: int = 16, opening: float = OPEN
) -> list[Grasp]:
    """Return grasps of a thing from above, best first.

    thing, others: points [N, 3] of the thing and of everything else; floor: height of the table; yaws: directions of
    the closing axis that are tried; opening: of each finger.
    """
    centre = (thing[:, :2].min(0) + thing[:, :2].max(0)) / 2
    reach = np.linalg.norm(thing[:, :2] - centre, axis=1).max() + 0.13
    others = others[(np.abs(others[:, :2] - centre) < reach).all(1)]
    everything, grasps = np.concatenate([thing, others]), {}
    for yaw in np.linspace(0, np.pi, yaws, endpoint=False):
        middle = turned(centre[None], -yaw)[0]
        low, high = middle - reach, middle + reach
        scene, alone = HeightMap(everything, low, high, yaw), HeightMap(thing, low, high, yaw)
        inner = alone.around(opening - 0.002, PAD)
        height = np.maximum(np.maximum(scene.site_floor(opening), floor + TIP + 0.0005), inner - 0.035)
        depth = inner + TIP - height
        u, v = np.nonzero(depth > 0.008)
        places = low + (np.stack([u, v], 1) + 0.5) * CELL
        rough = 40 * np.minimum(depth[u, v], 0.02) - 12 * np.linalg.norm(places - middle, axis=1)
        # The hand's own closing axis stays within a right angle of world y, its direction at home.
        hand = yaw if yaw > 0 else np.pi
        local, turned_all = turned(thing[:, :2], -yaw), turned(everything[:, :2], -yaw)
        for index in np.argsort(-rough)[:25]:
            found = _settled(
                places[index], float(height[u[index], v[index]]), (local, thing), (turned_all, everything), opening
            )
            if found is None:
                continue
            place, site, width, depth_held = found
            score = (
                40 * min(depth_held, 0.02)
                - 12 * np.linalg.norm(place - middle)
                - 6 * width
                - 0.08 * abs(hand - np.pi / 2)
            )
            grasp = Grasp(np.append(turned(place[None], yaw)[0], site), downward(hand), float(score), opening)
            grasps[round(hand, 2), *np.round(grasp.position, 2)] = grasp
    return sorted(grasps.values(), key=lambda grasp: -grasp.score)


def leaning_grasps(thing: np.ndarray, others: np.ndarray, floor: float, lean: float = 0.6) -> list[Grasp]:
    """Return grasps with a hand that leans by `lean` to one of eight sides, best first.

    thing, others: points [N, 3] of the thing and of everything else; floor: height of the table.
    """
    centre = thing.mean(0)
    table = table_points(centre, floor)
    near = others[np.linalg.norm(others - centre, axis=1) < 0.35]
    grasps = []
    for side in np.linspace(0, 2 * np.pi, 8, endpoint=False):
        # Seen from the hand: its own up is the axis away from which things are high.
        base = about(np.array([-np.sin(side), np.cos(side), 0.0]), lean)
        for grasp in downward_grasps(thing @ base, np.concatenate([near, table]) @ base, VOID, yaws=8):
            grasps.append(Grasp(base @ grasp.position, base @ grasp.rotation, grasp.score - 0.1))
    return sorted(grasps, key=lambda grasp: -grasp.score)


def _settled(
    place: np.ndarray,
    height: float,
    thing: tuple[np.ndarray, np.ndarray],
    scene: tuple[np.ndarray, np.ndarray],
    opening: float,
) -> tuple[np.ndarray, float, float, float] | None:
    """Return a grasp's place [2] centred over what is between the fingers, its height, the width and the depth held.

    The depth is that of the outermost points on either side, which a cone has little of. None if nothing can be held.

    place: [2] in the hand's axes; thing, scene: points' places in the hand's axes [N, 2] and in the world [N, 3].
    """
    for _ in range(2):
        near = (np.abs(thing[0] - place) < (opening, PAD)).all(1) & (thing[1][:, 2] > height - TIP)
        if not near.any():
            return None
        along = thing[0][near, 0]
        width = float(np.ptp(along))
        place = np.array([(along.max() + along.min()) / 2, place[1]])
    across = np.abs(scene[0] - place)
    fingers = (across[:, 0] > opening) & (across[:, 0] < opening + OUTER - OPEN) & (across[:, 1] < THICK)
    height = max(height, float(scene[1][fingers, 2].max(initial=VOID)) + TIP + 0.002)
    near = (np.abs(thing[0] - place) < (opening, PAD)).all(1) & (thing[1][:, 2] > height - TIP)
    beside = thing[0][near, 1] - place[1]
    if beside.min(initial=0) > -PAD / 2 or beside.max(initial=0) < PAD / 2:
        return None
    along, heights = thing[0][near, 0], thing[1][near, 2] - (height - TIP)
    width = float(np.ptp(along))
    if width > 2 * opening - 0.003 or heights.max() < 0.008:
        return None
    sides = (heights[along > along.max() - 0.004].max(), heights[along < along.min() + 0.004].max())
    # What stands askew to the fingers, such as a rim, turns or slips out of them.
    left, right = along[beside < -PAD / 4], along[beside > PAD / 4]
    skew = abs(left.mean() - right.mean()) / PAD if len(left) and len(right) else 0.0
    return place, height, width, float(np.mean(sides)) - 0.006 * skew


def lower_side(body: np.ndarray) -> np.ndarray:
    """Return the lowest point [M, 3] per cell of points [N, 3]."""
    cells = np.floor(body[:, :2] / CELL).astype(int)
    order = np.lexsort((body[:, 2], cells[:, 1], cells[:, 0]))
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(cells[order], axis=0) != 0).any(1)
    return body[order[first]]


def way_around(start: np.ndarray, ends: np.ndarray, obstacles: np.ndarray, radius: float) -> np.ndarray | None:
    """Return a path [N, 2] of a disc from `start` [2] to the nearest of `ends` [M, 2] past `obstacles` [K, 2], or None.

    The path has a place every 1.5 cm or so; where the disc touches something already, it may leave.
    """
    step = 0.015
    low, high = np.minimum(start, ends.min(0)) - 0.2, np.maximum(start, ends.max(0)) + 0.2
    shape = tuple(np.ceil((high - low) / step).astype(int))
    centres = low + (np.moveaxis(np.indices(shape), 0, -1) + 0.5) * step
    near = obstacles[((obstacles > low - radius) & (obstacles < high + radius)).all(1)]
    clear = np.full(shape, np.inf)
    for point in np.unique(np.round(near / 0.005) * 0.005, axis=0):
        clear = np.minimum(clear, np.linalg.norm(centres - point, axis=-1))
    free = clear > min(radius, 0.98 * float(np.linalg.norm(near - start, axis=1).min(initial=np.inf)))
    first, *goals = (tuple(cell) for cell in np.floor((np.concatenate([start[None], ends]) - low) / step).astype(int))
    goals = [(goal, end) for goal, end in zip(goals, ends, strict=True) if clear[goal] > radius]
    cost, before = {first: 0.0}, {}
    queue = [(0.0, first)]
    while queue:
        so_far, cell = heapq.heappop(queue)
        for move in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            following = (cell[0] + move[0], cell[1] + move[1])
            if all(0 <= at < size for at, size in zip(following, shape, strict=True)) and free[following]:
                total = so_far + float(np.hypot(*move))
                if total < cost.get(following, np.inf):
                    cost[following], before[following] = total, cell
                    heapq.heappush(queue, (total, following))
    reached = [(cost[goal], index) for index, (goal, _) in enumerate(goals) if goal in cost]
    if not reached:
        return None
    cell, end = goals[min(reached)[1]]
    path = [end]
    while cell != first:
        cell = before[cell]
        path.append(centres[cell])
    return np.stack([*path[:-1], start][::-1] if len(path) > 1 else [start, end])
