"""What to do next on the way to an OGBench goal: one cube, button, drawer or window at a time. Positions in m."""

from dataclasses import dataclass

import numpy as np

NEAR = 0.03
"""Metres within which something is taken to be at its goal; OGBench's own success asks for 4 cm."""
CUBE = 0.04
"""Edge of a cube, m."""
OPEN = -0.16
"""Slide of the open drawer, m; 0 is closed."""
RIDE = 0.85
"""A cube in the drawer rides along with it; it is put deeper, where the drawer's front is not in the fingers' way."""
LOCKED = 0
"""State of a button while the drawer (button 0) or the window (button 1) cannot be moved."""
SPOTS = np.array([(x, y, CUBE / 2) for x in (0.425, 0.35, 0.5) for y in np.linspace(-0.25, 0.25, 6)])
"""Where a cube that is in the way is put down."""


@dataclass(frozen=True)
class Things:
    """Where things are, or shall be.

    blocks: [n, 3] centres; yaws: [n] of the blocks, rad; buttons: [m] states, 0 or 1; drawer, window: slides, m.
    """

    blocks: np.ndarray
    yaws: np.ndarray
    buttons: np.ndarray
    drawer: float = 0.0
    window: float = 0.0


@dataclass(frozen=True)
class Target:
    """One thing's target: task is "cube", "button", "drawer" or "window"; index: which cube or button; place: [3] and
    yaw (rad) of a cube; value: a button's state, or a slide in m.
    """

    task: str
    index: int = 0
    place: tuple[float, float, float] = (0.0, 0.0, 0.0)
    yaw: float = 0.0
    value: float = 0.0


def next_target(scene: str, seen: Things, goal: Things, columns: int = 1) -> Target | None:
    """Return what to bring where next, None where all is at its goal.

    scene: "cube", "scene" or "puzzle"; columns: buttons in a row of the puzzle.
    """
    if scene == "scene":
        return scene_target(seen, goal)
    return puzzle_target(seen, goal, columns) if scene == "puzzle" else cubes_target(seen, goal)


def scene_target(seen: Things, goal: Things) -> Target | None:
    """Return the next target of a scene: drawer, cube, window, then the buttons that lock drawer and window."""
    place = goal.blocks[0].copy()
    stored, inside = place[2] > CUBE, seen.blocks[0, 2] > CUBE and seen.blocks[0, 1] < -0.1
    if stored:
        place[1] += RIDE * (goal.drawer - seen.drawer)
    cube_off = bool(np.linalg.norm(seen.blocks[0] - place) > NEAR)
    drawer = OPEN if cube_off and (stored or inside) else goal.drawer
    # An open drawer is in the gripper's way to a cube beside it, so that is brought to its goal first.
    wait = cube_off and not (stored or inside) and drawer < seen.drawer
    if abs(seen.drawer - drawer) > NEAR and not wait:
        return press(0, seen) if seen.buttons[0] == LOCKED else Target("drawer", value=drawer)
    if cube_off:
        return cube(0, place, float(goal.yaws[0]))
    if abs(seen.window - goal.window) > NEAR:
        return press(1, seen) if seen.buttons[1] == LOCKED else Target("window", value=goal.window)
    off = np.flatnonzero(seen.buttons != goal.buttons)
    return press(int(off[0]), seen) if len(off) else None


def press(index: int, seen: Things) -> Target:
    """Return the target of toggling a button."""
    return Target("button", index, value=float(1 - seen.buttons[index]))


def cube(index: int, place: np.ndarray, yaw: float) -> Target:
    """Return the target of a cube; place: [3]."""
    return Target("cube", index, (float(place[0]), float(place[1]), float(place[2])), yaw)


def cubes_target(seen: Things, goal: Things) -> Target | None:
    """Return the next cube and its place: its goal where that is free and supported, else a spot out of the way."""
    blocks = seen.blocks
    off = np.linalg.norm(blocks - goal.blocks, axis=1) > NEAR
    movable = [index for index in np.flatnonzero(off) if not _above(blocks[index], np.delete(blocks, index, 0)).any()]
    for index in movable:
        others, place = np.delete(blocks, index, 0), goal.blocks[index]
        beside = np.linalg.norm(others[:, :2] - place[:2], axis=1) < 1.2 * CUBE
        under = beside & (others[:, 2] < place[2] - CUBE / 2)
        settled = ~np.delete(off, index)
        if not (beside & ~under).any() and np.sum(under & settled) >= round((place[2] - CUBE / 2) / CUBE):
            return cube(int(index), place, float(goal.yaws[index]))
    if not movable:
        return None
    taken = np.concatenate([blocks, goal.blocks])[:, :2]
    room = np.linalg.norm(SPOTS[:, None, :2] - taken, axis=-1).min(axis=1)
    # Of two cubes that stand on each other's goals, the higher one first.
    index = max(movable, key=lambda each: (blocks[each, 2], -each))
    return cube(int(index), SPOTS[int(np.argmax(room))], float(goal.yaws[index]))


def _above(block: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return which of `others` [n, 3] stand on `block` [3]."""
    aside = np.linalg.norm(others[:, :2] - block[:2], axis=1)
    return (aside < CUBE / 2) & (others[:, 2] > block[2] + CUBE / 2)


def puzzle_target(seen: Things, goal: Things, columns: int) -> Target | None:
    """Return the next button to press: the first of a solution of "Lights Out"."""
    chosen = lights_out(seen.buttons != goal.buttons, columns)
    return press(int(np.flatnonzero(chosen)[0]), seen) if chosen.any() else None


def lights_out(wrong: np.ndarray, columns: int) -> np.ndarray:
    """Return which buttons [m] bool to press so that exactly `wrong` [m] toggle; a press toggles its neighbours too.

    Presses commute and undo themselves, so this is a linear system over the field of two elements; where it has no
    solution, buttons that cannot be set right are left as they are.
    """
    count = len(wrong)
    row, column = np.divmod(np.arange(count), columns)
    effect = np.abs(row[:, None] - row) + np.abs(column[:, None] - column) <= 1
    system = np.concatenate([effect, np.asarray(wrong, dtype=bool)[:, None]], axis=1)
    pivots: list[int] = []
    for place in range(count):
        rank = len(pivots)
        candidates = np.flatnonzero(system[rank:, place])
        if not len(candidates):
            continue
        system[[rank, rank + candidates[0]]] = system[[rank + candidates[0], rank]]
        others = system[:, place].copy()
        others[rank] = False
        system[others] ^= system[rank]
        pivots.append(place)
    chosen = np.zeros(count, dtype=bool)
    chosen[pivots] = system[: len(pivots), -1]
    return chosen
