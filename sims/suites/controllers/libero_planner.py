"""One planner for all tasks of LIBERO: it reads the scene's geometry and the goal's predicates, no task by name.

Places are found by how far a thing can sink into the height map of the rest; joints are moved along their own path.
Lengths in m, angles in rad, actions [7] at 20 Hz: motion of the site (1 is 5 cm), rotation (1 is 0.5), fingers.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import mujoco
import numpy as np

from sims.suites.controllers.libero_geometry import (
    CELL,
    NARROW,
    OPEN,
    TIP,
    Cloud,
    Grasp,
    HeightMap,
    about,
    downward,
    downward_grasps,
    frame,
    hand_hits,
    leaning_grasps,
    lower_side,
    rotation_vector,
    table_points,
    turned,
    way_around,
)

Actions = Iterator[np.ndarray]
RELEASE, CLOSE = -1.0, 1.0
HOLD = 0.0
UP = np.array([0.0, 0.0, 1.0])
ATTEMPTS = 6
"""Attempts per episode, all goals together."""
STEP_TIME = 0.05
"""Seconds of a control step."""
DAMPING, AMPLIFIED = 0.163, 5.0
"""Time constant of the arm's controller, s, and the most amplification of a slow motion."""
PRESS = 0.006
"""How far below its surface the fingers aim that press on a thing."""
SLIPPERY = 0.0
"""Score of a grasp below which a thing that stays on the table is rather dragged."""


@dataclass(frozen=True)
class Region:
    """A region of LIBERO: a site that a thing can be in or on.

    site: its id; size: [3] half edges; parent: the thing that it is part of, None for the table; joints: ids of the
    joints that move it.
    """

    site: int
    size: np.ndarray
    parent: str | None
    joints: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """What the planner knows about a task beyond the compiled model.

    goals: predicates, each with its name in lower case and its arguments; things: body id of each object and fixture
    by name; regions: by name; joints: ids of the joints of a fixture, by name; ranges: (low, high) in which (predicate,
    joint id) holds; home: [7] the arm's posture at the start.
    """

    model: mujoco.MjModel
    goals: tuple[tuple[str, ...], ...]
    things: Mapping[str, int]
    regions: Mapping[str, Region]
    joints: Mapping[str, tuple[int, ...]]
    ranges: Mapping[tuple[str, int], tuple[float, float]]
    home: np.ndarray

    @functools.cached_property
    def site(self) -> int:
        """Id of the site between the fingertips."""
        return int(self.model.site("gripper0_grip_site").id)

    @functools.cached_property
    def cloud(self) -> Cloud:
        """Points on objects and fixtures."""
        return Cloud(self.model, [int(self.model.body_rootid[body]) for body in self.things.values()])

    def joints_of(self, name: str) -> tuple[int, ...]:
        """Return the joints of a region or fixture."""
        return self.regions[name].joints if name in self.regions else self.joints[name]


def in_region(
    region: Region, centre: np.ndarray, rotation: np.ndarray, origins: np.ndarray, inside: bool
) -> np.ndarray:
    """Return for which `origins` [N, 3] a thing is inside or on a region, as LIBERO decides it but with a margin.

    centre, rotation: [3] and [3, 3] of the region's site.
    """
    if inside:
        half = np.abs(rotation @ region.size)
        low, high = centre - 0.9 * half, centre + 0.9 * half
        low[2] = centre[2] - half[2] - 0.008
        return np.all((origins > low) & (origins < high), axis=1)
    offset = (origins - centre) @ rotation.T
    lateral = np.all(np.abs(offset[:, :2]) < np.maximum(0.9 * region.size[:2], region.size[:2] - 0.01), axis=1)
    return lateral & (region.size[2] - 0.004 < offset[:, 2]) & (offset[:, 2] < region.size[2] + 0.095)


@dataclass(frozen=True)
class Spot:
    """Where to release a thing: yaw by which to turn it, its origin's [2] place and resting height, and the height of
    its origin at which the fingers open; the lower the `cost`, the better.
    """

    yaw: float
    place: np.ndarray
    rest: float
    release: float
    cost: float


@dataclass(frozen=True)
class Hold:
    """A hold on a joint's body: `pulls` says whether it is grasped, else closed fingers push; by: how much to move the
    joint from there; follows: share of a hinge's turn that the hand follows, as it can turn around a bar.
    """

    grasp: Grasp
    pulls: bool
    by: float
    follows: float = 1.0


class Planner:
    """Plans and acts for one episode; `actions` yields, and `data` must be up to date whenever it resumes."""

    def __init__(self, task: Task, data: mujoco.MjData):
        self.task, self.data = task, data
        self.model = task.model
        self._scratch = mujoco.MjData(task.model)
        self._cloud = task.cloud
        free = [self._root(name) for name, body in task.things.items() if self.model.body_dofnum[body] == 6]
        self._movable = np.isin(self._cloud.root, free)
        self._failed: list[Grasp] = []
        self._before = np.zeros(2)
        self._last: tuple[np.ndarray, np.ndarray] | None = None
        self._floor = 0.0
        self.log: list[str] = []

    # What is so

    @property
    def position(self) -> np.ndarray:
        """Position [3] of the grip site."""
        return self.data.site_xpos[self.task.site].copy()

    @property
    def rotation(self) -> np.ndarray:
        """Rotation [3, 3] of the grip site."""
        return self.data.site_xmat[self.task.site].reshape(3, 3).copy()

    def _root(self, name: str) -> int:
        return int(self.model.body_rootid[self.task.things[name]])

    def _origin(self, name: str) -> np.ndarray:
        return self.data.xpos[self.task.things[name]].copy()

    def _value(self, joint: int) -> float:
        return float(self.data.qpos[self.model.jnt_qposadr[joint]])

    def holds(self, goal: Sequence[str]) -> bool:
        """Return whether a goal's predicate holds, contacts left out."""
        name, first = goal[0], goal[1]
        if len(goal) == 2:
            ranges = [(self._value(j), *self.task.ranges[name, j]) for j in self._jointed(goal)]
            true = [low <= value <= high for value, low, high in ranges]
            return any(true) if name in ("open", "turnon") else all(true)
        origin = self._origin(first)
        if goal[2] in self.task.regions:
            return bool(self._fits(goal, origin[None])[0])
        below = self._origin(goal[2])
        return bool(below[2] <= origin[2] < below[2] + 0.1 and np.linalg.norm((origin - below)[:2]) < 0.028)

    def _jointed(self, goal: Sequence[str]) -> list[int]:
        return [joint for joint in self.task.joints_of(goal[1]) if (goal[0], joint) in self.task.ranges]

    def _support(self) -> float:
        """Return the height of the table: the lowest point of what can move near the arm, as fixtures may be sunk into
        the table and some initial states have a thing on the ground.
        """
        points = self._cloud.points(self.data)
        base = self.data.xpos[self.model.body("robot0_base").id, :2]
        near = self._movable & (np.linalg.norm(points[:, :2] - base, axis=1) < 1.0)
        return float(points[near if near.any() else self._movable, 2].min())

    # The order of goals

    def ordered(self) -> list[tuple[str, ...]]:
        """Return the goals in the order in which to reach them: open, then put, what carries others first, then close
        what something is put into.
        """
        regions, goals = self.task.regions, self.task.goals
        puts = [goal for goal in goals if len(goal) == 3]
        puts.sort(key=lambda goal: any(goal[2] == other[1] for other in puts))
        filled = {
            regions[goal[2]].joints or self.task.joints.get(regions[goal[2]].parent or "", ())
            for goal in puts
            if goal[0] == "in" and goal[2] in regions
        }
        moves = [goal for goal in goals if len(goal) == 2]
        late = [goal for goal in moves if goal[0] == "close" and self.task.joints_of(goal[1]) in filled]
        opened: list[tuple[str, ...]] = []
        for goal in puts:
            region = regions.get(goal[2])
            if goal[0] == "in" and region is not None and region.joints and not self.holds(goal):
                opened += [("open", goal[2])] if ("open", region.joints[0]) in self.task.ranges else []
        early = [goal for goal in moves if goal not in late]
        return list(dict.fromkeys(opened + early + puts + late))

    def actions(self) -> Actions:
        """Yield the actions [7] of an episode; the last ones stand still."""
        self._floor = self._support()
        for _ in range(ATTEMPTS):
            goals = self.ordered()
            left = [goal for goal in goals if goal in self.task.goals and not self.holds(goal)]
            if not left:
                break
            # Something to open is opened only for a put that is left.
            needed = [
                goal for goal in goals if goal in left or (goal[0] == "open" and any(g[2:] == goal[1:] for g in left))
            ]
            goal = next(goal for goal in needed if not self.holds(goal))
            self.log.append(" ".join(goal))
            yield from self.move(goal) if len(goal) == 2 else self.put(goal)
            if self.rotation[2, 2] > -0.8 or not self.holds(goal):
                yield from self.go_home()
        while True:
            yield self._action(np.zeros(3), np.zeros(3), HOLD)

    # Motion

    def _action(self, move: np.ndarray, turn: np.ndarray, grip: float) -> np.ndarray:
        """Return the action for the errors [3] of position and rotation.

        The arm's controller treats the two as uncoupled. Where they are not, as with a stretched arm, some motions
        barely start and hardly end: these are amplified and damped.
        """
        velocity = np.zeros(6)
        if self._last is not None:
            velocity[:3] = (self.position - self._last[0]) / STEP_TIME
            velocity[3:] = rotation_vector(self.rotation @ self._last[1].T) / STEP_TIME
        self._last = self.position, self.rotation
        gain = self._gain()
        move, turn = np.clip(move, -0.03, 0.03), np.clip(turn, -0.2, 0.2)
        error = gain @ np.concatenate([move, turn]) - DAMPING * (gain - np.eye(6)) @ velocity
        return np.concatenate([np.clip(error[:3] / 0.03, -1, 1), np.clip(error[3:] / 0.33, -0.6, 0.6), [grip]])

    def _gain(self) -> np.ndarray:
        """Return by how much [6, 6] an error must be amplified for the arm to respond alike in all directions, at most
        the square root of it.
        """
        model, data = self.model, self.data
        jacobian, mass = np.zeros((6, model.nv)), np.zeros((model.nv, model.nv))
        mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], self.task.site)
        mujoco.mj_fullM(model, data, mass)
        inverse = jacobian[:, :7] @ np.linalg.solve(mass[:7, :7], jacobian[:, :7].T)
        blocks = np.zeros((6, 6))
        for part in (slice(0, 3), slice(3, 6)):
            values, vectors = np.linalg.eigh(inverse[part, part])
            blocks[part, part] = vectors * np.sqrt(values) @ vectors.T
        values, vectors = np.linalg.eigh(blocks @ np.linalg.inv(inverse) @ blocks)
        root = vectors * np.clip(np.sqrt(values), 1.0, AMPLIFIED) @ vectors.T
        return blocks @ root @ np.linalg.inv(blocks)

    def servo(
        self,
        target: np.ndarray | Callable[[], np.ndarray],
        rotation: np.ndarray,
        grip: float,
        near: float = 0.006,
        steps: int = 80,
        stall: int = 8,
        turn: float = 0.08,
    ) -> Actions:
        """Yield actions that move the site to `target` [3] (or what it returns) until it is near or stands still."""
        best, idle = np.inf, 0
        for _ in range(steps):
            error = (target() if callable(target) else target) - self.position
            angle = rotation_vector(rotation @ self.rotation.T)
            distance = float(np.linalg.norm(error))
            if distance < near and np.linalg.norm(angle) < turn:
                return
            progress = distance + 0.1 * float(np.linalg.norm(angle))
            idle = 0 if progress < best - 0.0008 else idle + 1
            best = min(best, progress)
            if idle >= stall:
                return
            yield self._action(error, angle, grip)

    def fingers(self, grip: float, least: int = 3, most: int = 16) -> Actions:
        """Yield actions that open or close the fingers until they stand still."""
        still, last = 0, self.data.qpos[7:9].copy()
        for step in range(most):
            yield self._action(np.zeros(3), np.zeros(3), grip)
            still = still + 1 if np.abs(self.data.qpos[7:9] - last).max() < 0.0004 else 0
            last = self.data.qpos[7:9].copy()
            if step >= least and still >= 2:
                return

    def _half_close(self) -> Actions:
        """Yield actions that leave open fingers half closed; HOLD keeps them there."""
        for _ in range(4):
            yield self._action(np.zeros(3), np.zeros(3), CLOSE)

    def go_home(self) -> Actions:
        """Yield actions that bring the arm back to its first posture in terms of its joints, upwards first."""
        if self.rotation[2, 2] < -0.8:
            yield from self.servo(self.position + 0.08 * UP, self.rotation, RELEASE, near=0.02, turn=1)
        yield from self.go_joints(self.task.home, RELEASE)

    def go_joints(self, target: np.ndarray, grip: float, near: float = 0.12) -> Actions:
        """Yield actions that bring the arm's joints to `target` [7] on a straight line in joint space."""
        best, idle = np.inf, 0
        for _ in range(70):
            arm = self.data.qpos[:7]
            way = target - arm
            rest = float(np.abs(way).max())
            idle = 0 if rest < best - 0.005 else idle + 1
            best = min(best, rest)
            if rest < near or idle > 8:
                return
            position, rotation = self._forward(arm + way * min(1.0, 0.35 / rest))
            turn = rotation_vector(rotation @ self.rotation.T)
            yield self._action(position - self.position, turn, grip)

    def _forward(self, arm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the site's position and rotation for joint angles [7] of the arm."""
        self._scratch.qpos[:] = self.data.qpos
        self._scratch.qpos[:7] = arm
        mujoco.mj_kinematics(self.model, self._scratch)
        site = self.task.site
        return self._scratch.site_xpos[site].copy(), self._scratch.site_xmat[site].reshape(3, 3).copy()

    def reachable(
        self, position: np.ndarray, rotation: np.ndarray, start: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Return joint angles [7] that bring the site to a pose, None if none is found from `start` on."""
        arm = self._solved(position, rotation, self.data.qpos[:7] if start is None else start, 40, 0.005)
        at, facing = self._forward(arm)
        error = np.linalg.norm(position - at), np.linalg.norm(rotation_vector(rotation @ facing.T))
        return arm if error[0] < 0.006 and error[1] < 0.06 else None

    def nearest(self, position: np.ndarray, rotation: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Return joint angles [7] that bring the site close to a pose, found from the near angles `start` [7]."""
        return self._solved(position, rotation, start, 12, 0.0002, damping=1e-6, pull=0.05)

    def _solved(
        self,
        position: np.ndarray,
        rotation: np.ndarray,
        start: np.ndarray,
        steps: int,
        near: float,
        damping: float = 1e-3,
        pull: float = 0.3,
    ) -> np.ndarray:
        """Return joint angles [7] after some steps of inverse kinematics; pull: share of the way to the posture at home
        that the free joint goes in each, since the arm's controller pulls it there too.
        """
        arm = start.copy()
        low, high = self.model.jnt_range[:7].T + np.array([[0.05], [-0.05]])
        jacobian = np.zeros((6, self.model.nv))
        for _ in range(steps):
            at, facing = self._forward(arm)
            error = np.concatenate([position - at, rotation_vector(rotation @ facing.T)])
            if np.linalg.norm(error[:3]) < near and np.linalg.norm(error[3:]) < 10 * near:
                break
            mujoco.mj_comPos(self.model, self._scratch)
            mujoco.mj_jacSite(self.model, self._scratch, jacobian[:3], jacobian[3:], self.task.site)
            j = jacobian[:, :7]
            inverse = j.T @ np.linalg.inv(j @ j.T + damping * np.eye(6))
            step = inverse @ error + pull * (np.eye(7) - inverse @ j) @ (self.task.home - arm)
            arm = np.clip(arm + step * min(1.0, 0.4 / float(np.abs(step).max())), low, high)
        return arm

    def travel(self, target: np.ndarray, rotation: np.ndarray, grip: float, held: str | None = None) -> Actions:
        """Yield actions that move the site over everything on the way to above `target` [3]."""
        points, start = self._cloud.points(self.data), self.position
        lowest, radius = start[2] - TIP, 0.12
        is_other = np.ones(len(points), bool)
        if held is not None:
            thing = self._cloud.root == self._root(held)
            is_other = ~thing
            lowest = min(lowest, points[thing, 2].min())
            radius = max(radius, float(np.linalg.norm((points[thing] - start)[:, :2], axis=1).max()) + 0.02)
        way = (target - start)[:2]
        along = np.clip((points[is_other, :2] - start[:2]) @ way / max(float(way @ way), 1e-9), 0, 1)
        beside = np.linalg.norm(points[is_other, :2] - start[:2] - along[:, None] * way, axis=1)
        highest = points[is_other][beside < radius, 2].max(initial=self._floor)
        height = max(highest + (start[2] - lowest) + 0.015, target[2])
        if height > start[2] + 0.01:
            yield from self.servo(np.append(start[:2], height), self.rotation, grip, near=0.02, turn=1.0)
        height = max(height, float(self.position[2]) - 0.04)
        yield from self.servo(np.append(target[:2], height), rotation, grip, near=0.012)

    # Pick and place

    def put(self, goal: Sequence[str]) -> Actions:
        """Yield actions that pick the first thing of a goal up and put it where the goal wants it."""
        name = goal[1]
        grasp = self._choose(name)
        if goal[0] == "on" and goal[2] in self.task.regions and (grasp is None or grasp.score < SLIPPERY):
            places = self._places(goal)
            if self._fits(goal, np.append(places.mean(0), self._origin(name)[2])[None])[0]:
                yield from self.drag(name, places)
                return
        if grasp is None:
            self.log.append(f"no grasp of {name}")
            return
        start = self._origin(name)
        self._before = start[:2]
        back = -0.1 * grasp.rotation[:, 2]
        yield from self.travel(grasp.position + (back if back[2] < 0.099 else 0), grasp.rotation, RELEASE)
        if back[2] < 0.099:
            yield from self.servo(grasp.position + back, grasp.rotation, RELEASE, near=0.015)
        grip = RELEASE
        if grasp.opening < OPEN:
            yield from self._half_close()
            grip = HOLD
        yield from self.servo(grasp.position, grasp.rotation, grip, near=0.004)
        yield from self.fingers(CLOSE, least=8)
        yield from self.servo(
            self.position + (0.6 if back[2] > 0.099 else 1.0) * back, grasp.rotation, CLOSE, near=0.015
        )
        rise, gap = self._origin(name)[2] - start[2], self.data.qpos[7] - self.data.qpos[8]
        # What is held at its end, such as a pan, hangs down: its origin rises late.
        if rise < 0.03 and (gap < 0.004 or rise < 0.01):
            self.log.append(f"{name} slipped")
            self._failed.append(grasp)
            return
        spot = self._spot(goal)
        if spot is None:
            self.log.append(f"no spot for {name}")
            self._failed.append(grasp)
            yield from self.servo(self.position - 0.06 * UP, grasp.rotation, CLOSE)
            yield from self.fingers(RELEASE)
            return
        rotation = about(UP, spot.yaw) @ grasp.rotation
        offset = turned((self.position - self._origin(name))[None, :2], spot.yaw)[0]
        above = np.append(spot.place + offset, spot.release + self.position[2] - self._origin(name)[2])
        yield from self.travel(above, rotation, CLOSE, name)
        if np.linalg.norm(self._origin(name)[:2] + offset - self.position[:2]) > 0.06:
            self.log.append(f"{name} fell")
            self._failed.append(grasp)
            return
        spot = self._spot(goal, spot) or spot

        def over(height: float) -> Callable[[], np.ndarray]:
            """Return the site's target that has the thing's own origin over the spot."""
            return lambda: np.append(spot.place, height) + self.position - self._origin(name)

        yield from self.servo(over(max(spot.release + 0.03, 0)), rotation, CLOSE, near=0.005, steps=40)
        yield from self.servo(over(spot.release), rotation, CLOSE, near=0.003, stall=6)
        off = float(np.linalg.norm(self._origin(name)[:2] - spot.place))
        if off > 0.025:
            self.log.append(f"{name} is {off:.3f} beside its spot")
        yield from self.fingers(RELEASE, least=5)
        yield from self.servo(self.position + 0.1 * UP, self.rotation, RELEASE, near=0.03, turn=1.0)
        if not self.holds(goal) and goal[0] == "in":
            yield from self.topple(goal)
        if not self.holds(goal):
            self._failed.append(grasp)
            self.log.append(f"{name} did not stay")

    def topple(self, goal: Sequence[str]) -> Actions:
        """Yield actions that push over what stands in a region but is too tall for it, such as a bottle in a drawer."""
        region, origin = self.task.regions[goal[2]], self._origin(goal[1])
        centre = self.data.site_xpos[region.site].copy()
        half = np.abs(self.data.site_xmat[region.site].reshape(3, 3) @ region.size)
        if (np.abs(origin - centre)[:2] > half[:2]).any() or origin[2] < centre[2] + half[2]:
            return
        thing = self._cloud.points(self.data)[self._cloud.root == self._root(goal[1])]
        # It falls along the region's longer side, to where there is more room.
        way = np.zeros(3)
        longer = int(np.argmax(half[:2]))
        way[longer] = 1.0 if origin[longer] <= centre[longer] else -1.0
        behind = float((-(thing - origin) @ way).max()) + 0.035
        rotation = downward(np.pi / 2)
        start = np.append((origin - behind * way)[:2], thing[:, 2].max() - 0.012)
        yield from self.travel(start, rotation, CLOSE)
        yield from self.servo(start, rotation, CLOSE, near=0.01)
        yield from self.servo(start + (behind + 0.09) * way, rotation, CLOSE, near=0.02)
        yield from self.servo(self.position + 0.1 * UP, rotation, CLOSE, near=0.03)

    def drag(self, name: str, places: np.ndarray) -> Actions:
        """Yield actions that press closed fingers on a flat thing and drag its origin to one of `places` [N, 2]."""
        points, is_thing = self._cloud.points(self.data), self._cloud.root == self._root(name)
        thing, obstacles = points[is_thing], points[~is_thing]
        origin = self._origin(name)
        radius = float(np.linalg.norm((thing - origin)[:, :2], axis=1).max())
        low = obstacles[(obstacles[:, 2] > self._floor + 0.004) & (obstacles[:, 2] < thing[:, 2].max() + 0.02), :2]
        path = way_around(origin[:2], places, low, radius + 0.006)
        if path is None:
            path = np.stack([origin[:2], places.mean(0)])
        near = np.linalg.norm(thing[:, :2] - origin[:2], axis=1) < 0.02
        start = np.append(origin[:2], thing[near, 2].max(initial=origin[2]) + TIP)
        ends = [np.append(place, start[2]) for place in path[:: max(len(path) // 5, 1)]]

        def hits(yaw: float) -> float:
            """Return the number of points in the hand's way, plus a little for every turn."""
            return sum(int(hand_hits(obstacles, end, downward(yaw), 0.0).sum()) for end in ends) + abs(yaw - np.pi / 2)

        rotation = downward(min(np.linspace(0.0, np.pi, 9), key=hits))
        yield from self.travel(start, rotation, CLOSE)
        yield from self.servo(start - PRESS * UP, rotation, CLOSE, near=0.006, stall=4)
        for _ in range(90):
            place = self._origin(name)[:2]
            nearest = int(np.argmin(np.linalg.norm(path - place, axis=1)))
            rest = np.append(path[min(nearest + 2, len(path) - 1)] - place, 0.0)
            slipped = np.linalg.norm(self.position[:2] - place) > 0.045
            if slipped or np.linalg.norm(path[-1] - place) < 0.006:
                break
            ahead = rest * min(1.0, 0.014 / float(np.linalg.norm(rest)))
            move = ahead + (start[2] - PRESS - self.position[2]) * UP
            yield self._action(move, rotation_vector(rotation @ self.rotation.T), CLOSE)
        yield from self.servo(self.position + 0.1 * UP, rotation, CLOSE, near=0.03)

    def _choose(self, name: str) -> Grasp | None:
        """Return the best reachable grasp that is not near one that failed."""
        points = self._cloud.points(self.data)
        thing = self._cloud.root == self._root(name)
        best = None
        narrow = functools.partial(downward_grasps, opening=NARROW)
        for sample in (downward_grasps, narrow, leaning_grasps):
            for grasp in sample(points[thing], points[~thing], self._floor):
                failed = any(np.linalg.norm(grasp.position - other.position) < 0.012 for other in self._failed)
                if best is not None and grasp.score <= best.score:
                    break
                if not failed and self._within_reach(grasp):
                    best = grasp
                    break
            if best is not None and best.score > 0.06:
                break
        return best

    def _within_reach(self, grasp: Grasp) -> bool:
        """Return whether the arm reaches a grasp, and the pose above or behind it."""
        arm = self.reachable(grasp.position, grasp.rotation, self.task.home)
        back = grasp.position - 0.1 * grasp.rotation[:, 2]
        return arm is not None and self.reachable(back, grasp.rotation, arm) is not None

    def _spot(self, goal: Sequence[str], kept: Spot | None = None) -> Spot | None:
        """Return a spot to release the held thing of a goal; kept: a spot whose heights alone are computed anew."""
        points = self._cloud.points(self.data)
        is_thing = self._cloud.root == self._root(goal[1])
        thing, rest = points[is_thing], points[~is_thing]
        origin = self._origin(goal[1])
        places = self._places(goal)
        middle = places.mean(0)
        wanted = middle
        if any(other[0] == goal[0] and other[2:] == goal[2:] and other[1] != goal[1] for other in self.task.goals):
            # Another thing needs room in the same region.
            sides = middle + 0.5 * np.diag(np.ptp(places, axis=0) / 2)[np.argmax(np.ptp(places, axis=0))] * [[1], [-1]]
            wanted = sides[np.argmin(np.linalg.norm(sides - self._before, axis=1))]
        reach = np.ptp(places, axis=0).max() / 2 + np.abs(thing - origin)[:, :2].max() + 0.15
        near = rest[(np.abs(rest[:, :2] - middle) < reach).all(1)]
        site, closing = self.position - origin, self.rotation[:, 0]
        scene = HeightMap(near, middle - reach, middle + reach)
        spots = []
        for yaw in [0.0] if kept is not None else np.linspace(-np.pi / 2, np.pi / 2, 9):
            axis = np.arctan2(closing[1], closing[0]) + yaw
            if np.sin(axis) < -0.2:
                continue
            body = np.concatenate([turned((thing - origin)[:, :2], yaw), thing[:, 2:] - origin[2]], 1)
            body = lower_side(body)
            centre = turned(middle[None], -axis)[0]
            fingers = HeightMap(near, centre - 1.5 * reach, centre + 1.5 * reach, axis)
            floors = fingers.site_floor()
            where = places if kept is None else kept.place[None]
            under = where[:, None] + body[:, :2]
            rest, wide = ((scene.at(under, top) - body[:, 2]).max(1) for top in (scene.top, scene.around(CELL, CELL)))
            rest = np.maximum(rest, self._floor - body[:, 2].min())
            lowest = fingers.at(where + turned(site[None, :2], yaw)[0], floors) - site[2]
            release = np.maximum(rest + 0.004, lowest + 0.003)
            # A place with room around it is better, and one where the goal would not hold is for want of any other.
            misfit = 0.0 if kept is not None else 3.0 * ~self._fits(goal, np.column_stack([where, rest]))
            cost = 3 * np.linalg.norm(where - wanted, axis=1) + 5 * release + 0.03 * abs(yaw) + misfit
            cost = cost + 2 * np.clip(wide - rest, 0, 0.05)
            for index in np.argsort(cost)[:4]:
                numbers = (float(each[index]) for each in (rest, release, cost))
                spots.append(Spot(float(yaw), where[index], *numbers))
        for spot in sorted(spots, key=lambda spot: spot.cost)[:16]:
            rotation = about(UP, spot.yaw) @ self.rotation
            above = np.append(spot.place + turned(site[None, :2], spot.yaw)[0], spot.release + site[2])
            if rotation[2, 2] > -0.95:
                spot = replace(spot, release=spot.rest + 0.004)
                while hand_hits(near, above, rotation).any() and spot.release < spot.rest + 0.1:
                    spot, above = replace(spot, release=spot.release + 0.01), above + 0.01 * UP
            if kept is not None or self.reachable(above, rotation) is not None:
                return spot
        return None

    def _places(self, goal: Sequence[str]) -> np.ndarray:
        """Return candidate places [N, 2] for a thing's origin."""
        if goal[2] not in self.task.regions:
            return self._origin(goal[2])[None, :2]
        region = self.task.regions[goal[2]]
        centre, rotation = self.data.site_xpos[region.site], self.data.site_xmat[region.site].reshape(3, 3)
        half = np.abs(rotation @ region.size) if goal[0] == "in" else np.abs(rotation) @ region.size
        axes = [np.linspace(-h, h, 2 * max(int(h / 0.006), 1) + 1) for h in 0.85 * half[:2]]
        return centre[:2] + np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)

    def _fits(self, goal: Sequence[str], origins: np.ndarray) -> np.ndarray:
        """Return for which `origins` [N, 3] of a thing at rest a goal would hold, [N] bool."""
        if goal[2] not in self.task.regions:
            return np.ones(len(origins), bool)
        region = self.task.regions[goal[2]]
        mat = self.data.site_xmat[region.site].reshape(3, 3)
        return in_region(region, self.data.site_xpos[region.site], mat, origins, goal[0] == "in")

    # Joints

    def move(self, goal: Sequence[str]) -> Actions:
        """Yield actions that bring the joints of a goal into the range in which its predicate holds."""
        for joint in self._jointed(goal):
            low, high = self.task.ranges[goal[0], joint]
            value = self._value(joint)
            if low <= value <= high:
                continue
            beyond = min(0.7 * (high - low), 0.15)
            yield from self._turn(joint, low + beyond if value < low else high - beyond)

    def _turn(self, joint: int, target: float) -> Actions:
        """Yield actions that move one joint to `target`: pull at what sticks out, or push it."""
        contact = self._contact(joint, target)
        if contact is None:
            self.log.append(f"no way to move {self.model.joint(joint).name}")
            return
        grasp, pulls = contact.grasp, contact.pulls
        target = self._value(joint) + contact.by
        approach = grasp.rotation[:, 2]
        before = grasp.position - 0.08 * approach
        grip = RELEASE if pulls else CLOSE
        if approach[2] < -0.9:
            yield from self.travel(grasp.position, grasp.rotation, grip)
        elif approach[2] < -0.6:
            yield from self.travel(before, grasp.rotation, grip)
            yield from self.servo(before, grasp.rotation, grip, near=0.02)
        else:
            arm = self.reachable(before, grasp.rotation, self.task.home)
            if arm is not None:
                yield from self.go_joints(arm, grip)
            yield from self.servo(before, grasp.rotation, grip, near=0.01)
        if pulls and approach[2] > -0.9:
            yield from self._half_close()
            grip = HOLD
        yield from self.servo(grasp.position, grasp.rotation, grip, near=0.004)
        if pulls:
            yield from self.fingers(CLOSE, least=8)
        at, facing = self.position, self.rotation
        value = self._value(joint)
        near = 0.003 if self.model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE else 0.04
        idle, best = 0, np.inf
        for _ in range(90):
            rest = target - self._value(joint)
            if abs(rest) < near or rest * (target - value) < 0 or idle > 12:
                break
            idle = 0 if abs(rest) < best - 0.0005 else idle + 1
            best = min(best, abs(rest))
            speed = 0.02 if self.model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE else 0.12
            ahead = self._value(joint) + np.clip(rest + 0.5 * speed * np.sign(rest), -2 * speed, 2 * speed)
            position, rotation = self._along(joint, at, facing, ahead - value, contact.follows)
            yield self._action(position - self.position, rotation_vector(rotation @ self.rotation.T), CLOSE)
        if pulls:
            yield from self.fingers(RELEASE, least=4)
        yield from self.servo(self.position - 0.1 * self.rotation[:, 2], self.rotation, grip, near=0.02, turn=1.0)

    def _along(
        self, joint: int, at: np.ndarray, facing: np.ndarray, by: float, follows: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a pose that was carried along with a joint that moved `by`, turned by a share of it."""
        axis, anchor = self.data.xaxis[joint], self.data.xanchor[joint]
        if self.model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE:
            return at + by * axis, facing
        return anchor + about(axis, by) @ (at - anchor), about(axis, follows * by) @ facing

    def _contact(self, joint: int, target: float) -> Hold | None:
        """Return a hold that moves a joint to `target`, or a part of the way there; None if none is reached."""
        points, body = self._cloud.points(self.data), int(self.model.jnt_bodyid[joint])
        mine = self._cloud.body == body
        fixture = (self._cloud.root == self.model.body_rootid[body]) & ~mine
        axis, anchor = self.data.xaxis[joint].copy(), self.data.xanchor[joint].copy()
        slides = self.model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE
        by = target - self._value(joint)
        radius = np.linalg.norm(np.cross(points[mine] - anchor, axis), axis=1).max()
        if not slides and radius < 0.08 and abs(axis[2]) > 0.9:
            grasps = downward_grasps(points[mine], points[~mine], self._floor)
            holds = (Hold(grasp, True, by) for grasp in grasps)
            return next((hold for hold in holds if self._follows(joint, hold)), None)
        away = axis
        if not slides:
            far = points[mine][np.argmax(np.linalg.norm(np.cross(points[mine] - anchor, axis), axis=1))]
            away = np.cross(axis, far - anchor)
            away = away / np.linalg.norm(away)
        ahead, behind = ((sign * points[mine] @ away).max() - (sign * points[fixture] @ away).max() for sign in (1, -1))
        out = away if ahead > behind else -away
        pulls = bool(out @ away * by > 0)
        depth = points[mine] @ out
        slab = points[mine][depth > depth.max() - 0.016]
        centre = (slab.min(0) + slab.max(0)) / 2
        long = np.linalg.svd(slab - slab.mean(0), full_matrices=False)[2][0]
        front = centre + out * (depth.max() - centre @ out)
        table = table_points(centre, self._floor)
        obstacles, fixed = (np.concatenate([points[each], table]) for each in (~mine, ~mine & ~self._movable))
        grasps = []
        for tilt in np.radians(np.arange(0, 65 if pulls else 90, 5)):
            approach = -np.cos(tilt) * out - np.sin(tilt) * UP
            position = front + approach * (0.004 if pulls else -TIP)
            across = np.cross(approach, long)
            for closing in (across, -across) if pulls else (across, -across, long, -long):
                rotation = frame(approach, closing)
                hits = int(hand_hits(obstacles, position, rotation, NARROW if pulls else 0.0).sum())
                turn = np.linalg.norm(rotation_vector(rotation @ downward(np.pi / 2).T))
                cost = hits / 100 + (tilt if pulls else abs(tilt - 1.2)) + 0.1 * turn
                for share in ((1.0,) if slides else (1.0, 0.5, 0.25)) if pulls else (1.0, 0.7):
                    # What can move rides along in a drawer; upper drawers' handles stand in a hand's way at the end.
                    end = self._along(joint, position, rotation, share * by)
                    there = 0 if pulls else int(hand_hits(fixed, *end, 0.0).sum())
                    grasps.append((cost + there / 100 + 2 * (1 - share), share, Grasp(position, rotation, -hits)))
        for _, share, grasp in sorted(grasps, key=lambda each: each[0]):
            for follows in (1.0,) if slides else (1.0, 0.7, 0.4, 0.1):
                hold = Hold(grasp, pulls, share * by, follows)
                if self._follows(joint, hold):
                    return hold
        return None

    def _follows(self, joint: int, hold: Hold) -> bool:
        """Return whether the arm reaches a hold, and all of its way along the joint."""
        grasp = hold.grasp
        arm = self.reachable(grasp.position, grasp.rotation, self.task.home)
        for share in (0.5, 1.0):
            if arm is not None:
                pose = self._along(joint, grasp.position, grasp.rotation, share * hold.by, hold.follows)
                arm = self.reachable(*pose, arm)
        return arm is not None
