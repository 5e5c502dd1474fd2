"""Expert of the original Push-T: plans a few pushes ahead, walks round the T to the first, pushes, and plans again.

gym-pusht's T has no inertia and no friction, so a pusher that stays at one point of its edge moves it by a constant
twist in its own frame: along the edge's normal, turning by lever over squared radius of gyration. A push is therefore
an exact arc, and a beam search over contacts and lengths is cheap. Units are pixels, control steps and radians; poses
[..., 3] are x and y of the centre of mass and the angle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation, WorldSpec
from robopolicy.core.world import Rows
from sims.suites.pusht_board import BOARD, CORNERS, GOAL, MARKS, RECTANGLES
from sims.task import newest

RADIUS = 15.0  # px, the pusher's
CENTRE = np.array([0.0, 45.0])  # px, centre of mass in the T's frame, as gym-pusht sets it
GYRATION = 3000.0  # px^2, moment of inertia over mass, as gym-pusht sets it
SPREAD = 44.0  # px, root mean square distance of the T's area from its middle: pixels per radian of angle error


def compose(pose: np.ndarray, twist: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return the pose [..., 3] after moving by a twist [..., 3], per pixel in the T's frame, for `length` [...]."""
    turn = twist[..., 2] * length
    # Integrals of cosine and sine along the arc; sinc(x) is sin(pi x) / (pi x).
    half = turn / 2
    reach = length * np.sinc(half / np.pi)
    cosine, sine = reach * np.cos(pose[..., 2] + half), reach * np.sin(pose[..., 2] + half)
    x = pose[..., 0] + cosine * twist[..., 0] - sine * twist[..., 1]
    y = pose[..., 1] + sine * twist[..., 0] + cosine * twist[..., 1]
    return np.stack(np.broadcast_arrays(x, y, pose[..., 2] + turn), axis=-1)


def error_of(pose: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Return the error [..., 3] of poses in their own frame, px: what is left to move and, times SPREAD, to turn."""
    dx, dy = goal[..., 0] - pose[..., 0], goal[..., 1] - pose[..., 1]
    cosine, sine = np.cos(pose[..., 2]), np.sin(pose[..., 2])
    turn = (goal[..., 2] - pose[..., 2] + np.pi) % (2 * np.pi) - np.pi
    return np.stack([cosine * dx + sine * dy, cosine * dy - sine * dx, SPREAD * turn], axis=-1)


def best_length(pose: np.ndarray, twist: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Return the length [...] >= 0 of a push that brings a pose closest to the goal, by three Gauss-Newton steps."""
    scaled = twist * np.array([1.0, 1.0, SPREAD])
    length = np.zeros(np.broadcast_shapes(pose.shape[:-1], twist.shape[:-1]))
    for _ in range(3):
        left = (error_of(compose(pose, twist, length), goal) * scaled).sum(-1) / (scaled**2).sum(-1)
        length = np.clip(length + left, 0.0, 400.0)
    return length


def contacts() -> tuple[np.ndarray, np.ndarray]:
    """Return points on the T's edge [N, 2] and the outward normals there [N, 2], in the T's frame."""
    rows: list[tuple[float, float, float, float]] = []
    rows += [(x, 0.0, 0, -1) for x in np.linspace(-54, 54, 15)]
    rows += [(60.0 * side, y, side, 0) for side in (-1, 1) for y in np.linspace(5, 25, 4)]
    rows += [(side * x, 30.0, 0, 1) for side in (-1, 1) for x in np.linspace(34, 54, 4)]
    rows += [(15.0 * side, y, side, 0) for side in (-1, 1) for y in np.linspace(49, 114, 9)]
    rows += [(x, 120.0, 0, 1) for x in np.linspace(-10, 10, 4)]
    table = np.array(rows)
    return table[:, :2], table[:, 2:]


def twists_of(points: np.ndarray, normals: np.ndarray) -> np.ndarray:
    """Return the twists [N, 3], per pixel of push, of pushes at edge points [N, 2] against their normals [N, 2]."""
    lever = points - CENTRE
    moment = -(lever[:, 0] * normals[:, 1] - lever[:, 1] * normals[:, 0])
    share = 1 / (1 + moment**2 / GYRATION)
    return np.concatenate([-normals * share[:, None], (moment / GYRATION * share)[:, None]], axis=1)


class Paths:
    """Shortest paths of the pusher around the T to places beside it, in the T's frame, through nodes near its corners.

    goals: places [N, 2] to which paths lead.
    """

    clearance, margin = RADIUS + 1.5, RADIUS + 9.0

    def __init__(self, goals: np.ndarray) -> None:
        m = self.margin
        outer = [(side * (60 + m), y) for side in (-1, 1) for y in (-m, 30 + m)]
        inner = [(side * (15 + m), y) for side in (-1, 1) for y in (30 + m, 120 + m)]
        self.nodes, self.goals = np.array(outer + inner), goals
        self._between = self._straight(self.nodes[:, None], self.nodes[None])
        self._last = self._straight(self.nodes[:, None], goals[None])
        self._known: dict[bytes, np.ndarray] = {}

    def _left(self, inside: np.ndarray) -> np.ndarray:
        """Return the lengths [8, N] of paths from every node to every goal through nodes `inside` [8] the board."""
        if inside.tobytes() not in self._known:
            between = np.where(inside[:, None] & inside, self._between, np.inf)
            for middle in range(len(between)):  # Floyd and Warshall
                between = np.minimum(between, between[:, middle, None] + between[None, middle])
            self._known[inside.tobytes()] = (between[:, :, None] + self._last[None]).min(axis=1)
        return self._known[inside.tobytes()]

    def _straight(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return distances [...] from `start` to `end` [..., 2], infinite where the T is in the way of the pusher."""
        start, end = np.broadcast_arrays(start, end)
        way = end - start
        length = np.sqrt((way**2).sum(axis=-1))
        way = np.where(np.abs(way) < 1e-9, 1e-9, way)
        for left, right, low, high in RECTANGLES:
            first = (np.array([left, low]) - self.clearance - start) / way
            second = (np.array([right, high]) + self.clearance - start) / way
            enter, leave = np.minimum(first, second).max(-1), np.maximum(first, second).min(-1)
            length = np.where((enter < leave) & (leave > 0) & (enter < 1), np.inf, length)
        return length

    def lengths(self, start: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """Return the lengths [N] of paths from `start` [2] to every goal through nodes `inside` [8] the board."""
        through = self._out(start)[:, None] + self._left(inside)
        return np.minimum(self._straight(start, self.goals), through.min(axis=0))

    def next(self, start: np.ndarray, goal: int, inside: np.ndarray) -> np.ndarray:
        """Return the end [2] of the first straight line on the way from `start` [2] to the goal of this number."""
        if np.isfinite(self._straight(start, self.goals[goal])):
            return self.goals[goal]
        return self.nodes[(self._out(start) + self._left(inside)[:, goal]).argmin()]

    def _out(self, start: np.ndarray) -> np.ndarray:
        """Return the distances [8] to the nodes in sight; to all of them where the T is too close to see any."""
        out = self._straight(start, self.nodes)
        return out if np.isfinite(out).any() else np.sqrt(((self.nodes - start) ** 2).sum(axis=-1))


@dataclass
class Plan:
    """The current push: contact's number, pose at which the push ends, pose at which it was planned, whether the
    pusher has reached the contact.
    """

    contact: int
    end: np.ndarray
    planned_at: np.ndarray
    pushing: bool = False


class PushTOriginalExpert:
    """Scripted expert of `PushTWorld`. It remembers one planned push per row; everything else follows from the
    observation.

    Raises ConfigError when the T's pose is not part of the observation.
    """

    beam, depth = 40, 3
    stand_off = 7.0  # px between pusher and edge where a push begins
    walk_lead, push_lead = 60.0, 40.0  # px that targets are ahead: five times as many px per second of steady speed

    def __init__(self, spec: WorldSpec) -> None:
        field = spec.observation.get(ENVIRONMENT_STATE)
        if field is None:
            raise ConfigError(
                "The expert of Push-T reads the T's pose: set world.options.observation=keypoints, corners or state."
            )
        marks = [each for each in MARKS.values() if 2 * len(each) == field.size]
        self._marks = marks[0] if marks else None
        self._goal = np.array([*(np.array(GOAL[:2]) + rotated(CENTRE, GOAL[2])), GOAL[2]])
        points, normals = contacts()
        self._twists, self._normals = twists_of(points, normals), normals
        self._centres = points + RADIUS * normals
        self._begins = points + (RADIUS + self.stand_off) * normals
        self._paths = Paths(self._begins)
        self._walks = np.stack([self._paths.lengths(begin, np.ones(8, bool)) for begin in self._begins])
        self._relative = np.min(spec.action.low) < 0
        self._plans: dict[int, Plan] = {}

    def reset(self, rows: Rows = None) -> None:
        """Discard the plans of `rows` [R], None for all."""
        for row in list(self._plans) if rows is None else np.asarray(rows).tolist():
            self._plans.pop(row, None)

    def act(self, observation: Observation) -> np.ndarray:
        """Return target positions, or offsets [B, 2] px, for an observation [B, H, ...]."""
        agents, poses = newest(observation, STATE), self._poses(newest(observation, ENVIRONMENT_STATE))
        places = rotated(agents - poses[:, :2], -poses[:, 2]) + CENTRE  # of the pusher in the T's frame
        rows = range(len(agents))
        plans = [self._plans.get(row) or self._plan(poses[row], places[row]) for row in rows]
        lengths = self._lengths(plans, poses)
        for row in rows:
            if self._done(plans[row], poses[row], places[row], lengths[row]):
                plans[row] = self._plan(poses[row], places[row])
                lengths[row] = self._lengths(plans[row : row + 1], poses[row : row + 1])[0]
        self._plans = dict(zip(rows, plans, strict=True))
        contacts = [plan.contact for plan in plans]
        ahead = compose(poses, self._twists[contacts], np.minimum(lengths, self.push_lead))
        targets = ahead[:, :2] + rotated(self._centres[contacts] - CENTRE, ahead[:, 2])
        for row, plan in enumerate(plans):
            plan.pushing = self._arrived(plan, places[row])
            if not plan.pushing:
                targets[row] = poses[row, :2] + rotated(
                    self._walk(poses[row], places[row], plan.contact) - CENTRE, poses[row, 2]
                )
        targets = np.clip(targets, 0.0, BOARD)
        return targets - agents if self._relative else targets

    def _poses(self, shown: np.ndarray) -> np.ndarray:
        """Return the poses [B, 3] of Ts shown as marks [B, 2 K] or as x, y and angle [B, 3]."""
        if self._marks is None:
            return np.concatenate([shown[:, :2] + rotated(CENTRE, shown[:, 2]), shown[:, 2:]], axis=1)
        points = shown.reshape(len(shown), -1, 2)
        middle = points.mean(axis=1)
        own, seen = self._marks - self._marks.mean(axis=0), points - middle[:, None]
        cross = (own[:, 0] * seen[..., 1] - own[:, 1] * seen[..., 0]).sum(axis=1)
        angle = np.arctan2(cross, (own * seen).sum(axis=(1, 2)))
        return np.concatenate([middle + rotated(CENTRE - self._marks.mean(axis=0), angle), angle[:, None]], axis=1)

    def _lengths(self, plans: Sequence[Plan], poses: np.ndarray) -> np.ndarray:
        """Return the remaining length [B] of each plan's push, px."""
        ends = np.array([plan.end for plan in plans])
        return best_length(poses, self._twists[[plan.contact for plan in plans]], ends)

    def _done(self, plan: Plan, pose: np.ndarray, place: np.ndarray, length: float) -> bool:
        """Return whether a plan's push is finished, has lost its contact, or began at another pose of the T."""
        if plan.pushing:
            return length < 0.3 or not self._arrived(plan, place)
        return length < 0.3 or bool(np.linalg.norm(error_of(plan.planned_at, pose)) > 2.0)

    def _arrived(self, plan: Plan, place: np.ndarray) -> bool:
        """Return whether the pusher is at the contact, which it may leave a little while it pushes."""
        gap, beside = self._offsets(plan.contact, place)
        return beside < (9.0 if plan.pushing else 4.0) and -4.0 < gap < self.stand_off + 3.0

    def _offsets(self, contact: int, place: np.ndarray) -> tuple[float, float]:
        """Return the pusher's gap from the edge at a contact and its distance beside it, px."""
        offset, normal = place - self._centres[contact], self._normals[contact]
        gap = float(offset @ normal)
        return gap, float(np.linalg.norm(offset - gap * normal))

    def _inside(self, pose: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Return whether points [K, 2] in the frame of a T at `pose` [3] are on the board, [K] bool."""
        board = pose[:2] + rotated(points - CENTRE, pose[2])
        return np.asarray(((board >= 0) & (board <= BOARD)).all(axis=-1))

    def _walk(self, pose: np.ndarray, place: np.ndarray, contact: int) -> np.ndarray:
        """Return a target [2] on the way from `place` to where a push begins, in the T's frame."""
        away = self._away(place)
        if away is not None:
            return place + 25.0 * away
        way = self._paths.next(place, contact, self._inside(pose, self._paths.nodes)) - place
        return place + way * min(1.0, self.walk_lead / max(float(np.linalg.norm(way)), 1e-9))

    def _away(self, place: np.ndarray) -> np.ndarray | None:
        """Return the direction away from the T [2] where the pusher is too close to walk, else None."""
        boxes = np.array(RECTANGLES)
        offsets = place - np.clip(place, boxes[:, ::2], boxes[:, 1::2])
        distances = np.linalg.norm(offsets, axis=-1)
        nearest = distances.argmin()
        if distances[nearest] > self._paths.clearance + 1e-6:
            return None
        return offsets[nearest] / max(distances[nearest], 1e-6)

    def _plan(self, pose: np.ndarray, place: np.ndarray) -> Plan:
        """Return the first push of the best sequence found."""
        walks = np.minimum(self._paths.lengths(place, self._inside(pose, self._paths.nodes)), 1e4)
        walks = walks + 1e4 * ~self._inside(pose, self._begins)  # only if there is nothing else
        poses, costs = pose[None], np.zeros(1)
        at, first = np.array([-1]), np.array([-1])
        first_end, best = pose[None], (-1, pose)
        best_cost = np.inf
        for depth in range(self.depth):
            length = best_length(poses[:, None], self._twists, self._goal)[..., None]  # [K, N, 1]
            if depth < self.depth - 1:
                fixed = np.broadcast_to(np.array([6.0, 15.0, 35.0, 70.0]), (*length.shape[:2], 4))
                length = np.concatenate([length * np.array([0.4, 0.7, 1.0]), fixed], axis=-1)
            ends = compose(poses[:, None, None], self._twists[:, None], length)
            walk = np.where(at[:, None] < 0, walks, self._walks[at])
            cost = costs[:, None, None] + self._steps(walk)[..., None] + length / 10.0
            left = np.linalg.norm(error_of(ends, self._goal), axis=-1)
            total = np.where(length > 0.3, cost + self._worth(left), np.inf)
            # Leaving the board is checked only for pushes that are good otherwise.
            cheapest = np.argpartition(total, 4 * self.beam, axis=None)[: 4 * self.beam]
            places = np.unravel_index(cheapest, total.shape)
            beyond = self._outside(ends[places], places[1])
            order = np.argsort(total[places] + beyond)[: self.beam]
            parent, contact, length_index = (indices[order] for indices in places)
            poses = ends[parent, contact, length_index]
            costs = cost[parent, contact, length_index] + beyond[order]
            at = contact
            first = np.where(first[parent] < 0, contact, first[parent])
            first_end = poses if depth == 0 else first_end[parent]
            lowest = total[parent[0], contact[0], length_index[0]] + beyond[order[0]]
            if lowest < best_cost:
                best_cost, best = lowest, (int(first[0]), first_end[0])
        return Plan(best[0], best[1], pose)

    @staticmethod
    def _steps(walk: np.ndarray) -> np.ndarray:
        """Return control steps of walks [...] px, with the time to turn round."""
        return np.where(walk < 3.0, 0.0, 4.0 + walk / 20.0)

    @staticmethod
    def _worth(left: np.ndarray) -> np.ndarray:
        """Return the cost, in control steps, of the error [...] px that is left after the last push."""
        return 8.0 * np.minimum(left, 4.0) + 1.0 * left

    def _outside(self, ends: np.ndarray, contact: np.ndarray) -> np.ndarray:
        """Return the cost [G] of ends of pushes [G, 3] at contacts [G] with the T or the pusher outside the board."""
        corners = np.broadcast_to(CORNERS, (len(ends), *CORNERS.shape))
        places = np.concatenate([corners, self._centres[contact][:, None]], axis=1) - CENTRE
        points = ends[:, None, :2] + rotated(places, ends[:, None, 2])
        beyond = np.maximum(np.maximum(8.0 - points, points - (BOARD - 8.0)), 0.0).max(axis=(-2, -1))
        return 2.0 * beyond


def rotated(vector: np.ndarray, angle: np.ndarray | float) -> np.ndarray:
    """Rotate vectors [..., 2] by an angle [...] -> [..., 2]."""
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.stack(
        [cosine * vector[..., 0] - sine * vector[..., 1], sine * vector[..., 0] + cosine * vector[..., 1]], axis=-1
    )
