"""OGBench's own oracles as a controller: goal-directed, or playing as in the recording of OGBench's data sets.

On the way to a goal it is one cube, button, drawer or window at a time. Positions in m.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mujoco
import numpy as np

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.registry import load_dotted
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation, WorldSpec
from robopolicy.core.world import Rows
from sims.suites.ogbench_environment import GOAL, goal_entries, named, observed_entries, open_inner, split_name

NEAR = 0.03
"""Distance in metres within which an object counts as at its goal; OGBench's own success threshold is 4 cm."""
CUBE = 0.04
"""Edge of a cube, m."""
OPEN = -0.16
"""Slide position of the open drawer, m; 0 is closed."""
RIDE = 0.85
"""A cube in the drawer moves with it; it is placed deeper, so that the drawer's front does not block the fingers."""
LOCKED = 0
"""State of a button while the drawer (button 0) or the window (button 1) cannot be moved."""
SPOTS = np.array([(x, y, CUBE / 2) for x in (0.425, 0.35, 0.5) for y in np.linspace(-0.25, 0.25, 6)])
"""Spots for cubes that must be moved out of the way."""


@dataclass(frozen=True)
class Things:
    """Current or desired states of all objects.

    blocks: [n, 3] centres; yaws: [n] of the blocks, rad; buttons: [m] states, 0 or 1; drawer, window: slides, m.
    """

    blocks: np.ndarray
    yaws: np.ndarray
    buttons: np.ndarray
    drawer: float = 0.0
    window: float = 0.0


@dataclass(frozen=True)
class Target:
    """Target of one object: task is "cube", "button", "drawer" or "window"; index: which cube or button; place: [3] and
    yaw (rad) of a cube; value: a button's state, or a slide in m.
    """

    task: str
    index: int = 0
    place: tuple[float, float, float] = (0.0, 0.0, 0.0)
    yaw: float = 0.0
    value: float = 0.0


def next_target(scene: str, seen: Things, goal: Things, columns: int = 1) -> Target | None:
    """Return the next object to move and its target; None when all are at their goal.

    scene: "cube", "scene" or "puzzle"; columns: buttons per row of the puzzle.
    """
    if scene == "scene":
        return scene_target(seen, goal)
    return puzzle_target(seen, goal, columns) if scene == "puzzle" else cubes_target(seen, goal)


def scene_target(seen: Things, goal: Things) -> Target | None:
    """Return the next target of a scene: drawer, cube, window, then the buttons that lock drawer and window."""
    place = goal.blocks[0].copy()
    goal_in_drawer, cube_in_drawer = place[2] > CUBE, seen.blocks[0, 2] > CUBE and seen.blocks[0, 1] < -0.1
    if goal_in_drawer:
        place[1] += RIDE * (goal.drawer - seen.drawer)
    cube_off = bool(np.linalg.norm(seen.blocks[0] - place) > NEAR)
    drawer = OPEN if cube_off and (goal_in_drawer or cube_in_drawer) else goal.drawer
    # An open drawer is in the gripper's way to a cube beside it, so that is brought to its goal first.
    wait = cube_off and not (goal_in_drawer or cube_in_drawer) and drawer < seen.drawer
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
    """Return the next cube and its place: its goal if that is free and supported, else a temporary spot."""
    blocks = seen.blocks
    off = np.linalg.norm(blocks - goal.blocks, axis=1) > NEAR
    movable = [index for index in np.flatnonzero(off) if not _above(blocks[index], np.delete(blocks, index, 0)).any()]
    for index in movable:
        other_blocks, place = np.delete(blocks, index, 0), goal.blocks[index]
        at_place = np.linalg.norm(other_blocks[:, :2] - place[:2], axis=1) < 1.2 * CUBE
        under = at_place & (other_blocks[:, 2] < place[2] - CUBE / 2)
        is_settled = ~np.delete(off, index)
        if not (at_place & ~under).any() and np.sum(under & is_settled) >= round((place[2] - CUBE / 2) / CUBE):
            return cube(int(index), place, float(goal.yaws[index]))
    if not movable:
        return None
    occupied = np.concatenate([blocks, goal.blocks])[:, :2]
    room = np.linalg.norm(SPOTS[:, None, :2] - occupied, axis=-1).min(axis=1)
    # Of two cubes that stand on each other's goals, the higher one first.
    index = max(movable, key=lambda each: (blocks[each, 2], -each))
    return cube(int(index), SPOTS[int(np.argmax(room))], float(goal.yaws[index]))


def _above(block: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the `others` [n, 3] that stand on `block` [3]."""
    distance = np.linalg.norm(others[:, :2] - block[:2], axis=1)
    return (distance < CUBE / 2) & (others[:, 2] > block[2] + CUBE / 2)


def puzzle_target(seen: Things, goal: Things, columns: int) -> Target | None:
    """Return the next button to press: the first of a solution of "Lights Out"."""
    presses = lights_out(seen.buttons != goal.buttons, columns)
    return press(int(np.flatnonzero(presses)[0]), seen) if presses.any() else None


def lights_out(wrong: np.ndarray, columns: int) -> np.ndarray:
    """Return the buttons [m] bool to press so that exactly `wrong` [m] toggle; a press also toggles its neighbours.

    Presses commute and are self-inverse, so this is a linear system over GF(2). When it has no solution, buttons that
    cannot be corrected stay unchanged.
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
        rows_to_clear = system[:, place].copy()
        rows_to_clear[rank] = False
        system[rows_to_clear] ^= system[rank]
        pivots.append(place)
    presses = np.zeros(count, dtype=bool)
    presses[pivots] = system[: len(pivots), -1]
    return presses


CENTRE, LENGTH = np.array([0.425, 0.0, 0.0]), 10.0
"""Positions are observed as LENGTH * (position - CENTRE), in m."""
OPENING = 3.0
"""Scale factor of the observed gripper opening (0 to 1)."""
BUTTON = 120.0
"""Scale factors of the observed slides, m."""
DRAWER = 18.0
WINDOW = 15.0
FINGER = 0.8
"""Angle of the finger joint when the gripper is closed, rad."""
PLAN_NOISE, SMOOTHING = 0.1, 0.5
"""Noise on the plans of play, and the width over which it is smoothed, control steps: OGBench's defaults."""
NOISE, NOISE_SHAPE = 0.1, np.array([1.0, 1.0, 1.0, 3.0, 10.0])
"""An episode of noisy play samples a level uniformly up to NOISE; its actions' standard deviation is level * shape."""
STACKING = {"cube-double": (0.0, 0.25), "cube-triple": (0.05, 0.35), "cube-quadruple": (0.1, 0.5)}
STACKING |= {"cube-octuple": (0.0, 0.35)}
"""Range of an episode's chance that a cube is put onto another one, by the task's first words: OGBench's."""
CLEAR = {"cube": 0.16, "button": 0.16, "drawer": 0.18, "window": 0.28}
"""Height of the gripper, m, above which a reached target is finished; as in OGBench's oracles."""


class OGBenchOracles:
    """OGBench's scripted oracles. Every row has its own, with a generator seeded by its first observation, so an
    episode is the same in any row of any batch.

    name: of the world, without its prefix. Without a style: closed-loop (Markov) oracles bring one object after another
    to the goal. "play": plans with noise between targets sampled as in OGBench, regardless of the goal; "noisy": the
    closed-loop oracles with white noise on their actions. Raises ConfigError when the world lacks an observation that
    they read, or OGBench lacks the task.
    """

    def __init__(self, name: str, spec: WorldSpec):
        env_id, self._style = split_name(name)
        self._twin = OracleSimulation(env_id, spec)
        words = env_id.split("-")
        self._stacking = STACKING.get("-".join(words[:2]), (0.0, 0.0))
        self._rows: list[_Row | None] = []

    def reset(self, rows: Rows = None) -> None:
        """Discard the targets of `rows` [R], None for all."""
        for row in range(len(self._rows)) if rows is None else np.asarray(rows).tolist():
            if row < len(self._rows):
                self._rows[row] = None

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 5] for an observation whose state is [B, H, 19] and environment state [B, H, n]."""
        flats = np.concatenate([observation[STATE][:, -1], observation[ENVIRONMENT_STATE][:, -1]], axis=-1)
        self._rows += [None] * (len(flats) - len(self._rows))
        actions = np.zeros((len(flats), 5))
        for index, flat in enumerate(flats):
            row = self._rows[index]
            if row is None:
                generator = np.random.default_rng(zlib.crc32(flat.tobytes()))
                level = generator.uniform(0, NOISE) if self._style == "noisy" else 0.0
                row = self._rows[index] = _Row(generator, generator.uniform(*self._stacking), level)
            actions[index] = self._one(row, flat.astype(np.float64))
        return actions

    def _one(self, row: "_Row", flat: np.ndarray) -> np.ndarray:
        """Return the action [5] of one row with observation `flat` [D]."""
        twin = self._twin
        things = twin.lay(flat)
        if row.target is None or row.oracle.done or (not self._style and twin.left_behind(row.target, things)):
            row.target = twin.draw(row.generator, row.stacking) if self._style else twin.wanted(things, flat)
            if row.target is None:
                return np.zeros(5)
            twin.aim(row.target)
            with drawing(row.generator):
                row.oracle = twin.oracle(row.target, self._style)
                row.oracle.reset(None, twin.known(flat, row.time))
        twin.aim(row.target)
        action = np.asarray(row.oracle.select_action(None, twin.known(flat, row.time)))
        row.time += twin.step
        if row.level:
            action = action + row.generator.normal(0.0, row.level * NOISE_SHAPE)
        return np.clip(action, -1.0, 1.0)


@dataclass
class _Row:
    """State of an episode: its generator, stacking probability, noise level, target, and time in s."""

    generator: np.random.Generator
    stacking: float
    level: float
    target: Target | None = None
    oracle: Any = None
    time: float = 0.0


class OracleSimulation:
    """A separate OGBench simulation that is set to an observation, so that OGBench's oracles can be queried in it.

    No physics runs in it; positions of hands and handles follow from those of joints and objects. step: s of a control
    step. Raises ConfigError when `spec` does not list OGBench's entries in their order.
    """

    def __init__(self, env_id: str, spec: WorldSpec):
        self._inner: Any = open_inner(env_id, {})
        inner = self._inner
        self.step = float(inner.control_timestep())
        self._scene = env_id.partition("-")[0]
        self._entries = observed_entries(inner)
        self._size = sum(size for _, size in self._entries)
        self._goal, self._goal_entries = self._read_goal(spec)
        inner._mode = "data_collection"

    def _read_goal(self, spec: WorldSpec) -> tuple[Things | None, list[tuple[str, int]]]:
        """Return the goal of a single-task environment, else None, and the entries that contain the world's goal."""
        inner = self._inner
        names = [name for key in (STATE, ENVIRONMENT_STATE) if key in spec.observation for name in _names(spec, key)]
        goal_parts: list[tuple[str, int]] = []
        inner._use_oracle_rep = f"{GOAL}joint_pos[0]" not in names
        goal_parts = goal_entries(inner)
        expected = [f"{name}[{index}]" for name, size in (*self._entries, *goal_parts) for index in range(size)]
        if names != expected:
            raise ConfigError(
                "OGBench's oracles read the complete observation of its environment, in its order, but "
                f"'{spec.name}' outputs {', '.join(names[:3])}, ... ({len(names)} numbers instead of "
                f"{len(expected)})."
            )
        if goal_parts:
            return None, goal_parts
        cubes = getattr(inner, "_num_cubes", 0)
        places = inner.data.mocap_pos[inner._cube_target_mocap_ids].copy() if cubes else np.zeros((0, 3))
        buttons = np.asarray(getattr(inner, "_target_button_states", ()), dtype=int).copy()
        slides = [float(getattr(inner, name, 0.0)) for name in ("_target_drawer_pos", "_target_window_pos")]
        return Things(places, np.zeros(cubes), buttons, *slides), []

    def lay(self, flat: np.ndarray) -> Things:
        """Set arm and objects as observed, flat [D], and return the objects' states."""
        inner, data = self._inner, self._inner.data
        entries = named(self._entries, flat[: self._size])
        things = things_of(entries)
        data.qpos[inner._arm_joint_ids] = entries["joint_pos"]
        data.qpos[inner._gripper_opening_joint_id] = FINGER * entries["gripper_opening"][0] / OPENING
        for index, place in enumerate(things.blocks):
            data.joint(f"object_joint_{index}").qpos[:] = [*place, *entries[f"block_{index}_quat"]]
        for index, state in enumerate(things.buttons):
            data.joint(f"buttonbox_joint_{index}").qpos[0] = entries[f"button_{index}_pos"][0] / BUTTON
            inner._cur_button_states[index] = state
        if "drawer_pos" in entries:
            data.joint("drawer_slide").qpos[0], data.joint("window_slide").qpos[0] = things.drawer, things.window
        mujoco.mj_kinematics(inner.model, data)
        return things

    def known(self, flat: np.ndarray, time: float) -> dict[str, Any]:
        """Return the info dictionary that OGBench's environment would give its oracles; flat: [D] as observed; time: s
        since the start.
        """
        contact = named(self._entries, flat[: self._size])["gripper_contact"]
        return {**self._inner.compute_ob_info(), "proprio/gripper_contact": contact, "time": np.array([time])}

    def wanted(self, seen: Things, flat: np.ndarray) -> Target | None:
        """Return the next target on the way to the goal, None when the goal is reached; flat: [D] as observed."""
        goal = self._goal if self._goal is not None else things_of(self._shown_goal(flat))
        return next_target(self._scene, seen, goal, getattr(self._inner, "_num_cols", 1))

    def _shown_goal(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        goal_values = named(self._goal_entries, flat[self._size :])
        return {name.removeprefix(GOAL): value for name, value in goal_values.items()}

    def left_behind(self, target: Target, seen: Things) -> bool:
        """Whether a target is reached and the gripper is high above it, so that the next one may follow."""
        if self._inner.data.site_xpos[self._inner._pinch_site_id][2] < CLEAR[target.task]:
            return False
        if target.task == "cube":
            return float(np.linalg.norm(seen.blocks[target.index] - target.place)) < 0.02
        if target.task == "button":
            return seen.buttons[target.index] == target.value
        return abs((seen.drawer if target.task == "drawer" else seen.window) - target.value) < 0.01

    def draw(self, generator: np.random.Generator, stacking: float) -> Target:
        """Sample a target with OGBench's distribution for data sets; stacking: probability of a cube on another."""
        inner = self._inner
        inner._np_random = generator
        inner.set_new_target(return_info=False, p_stack=stacking)
        target = Target(str(inner._target_task))
        if target.task == "cube":
            index = int(inner._target_block)
            mocap = inner._cube_target_mocap_ids[index]
            x, y, z = inner.data.mocap_pos[mocap].tolist()
            w, *_, turn = inner.data.mocap_quat[mocap].tolist()
            return replace(target, index=index, place=(x, y, z), yaw=2 * float(np.arctan2(turn, w)))
        if target.task == "button":
            index = int(inner._target_button)
            return replace(target, index=index, value=float(inner._target_button_states[index]))
        return replace(target, value=float(getattr(inner, f"_target_{target.task}_pos")))

    def aim(self, target: Target) -> None:
        """Write a target into the fields that OGBench's environment uses."""
        inner, index = self._inner, target.index
        inner._target_task = target.task
        if target.task == "cube":
            inner._target_block, mocap = index, inner._cube_target_mocap_ids[index]
            inner.data.mocap_pos[mocap] = target.place
            inner.data.mocap_quat[mocap] = [np.cos(target.yaw / 2), 0.0, 0.0, np.sin(target.yaw / 2)]
        elif target.task == "button":
            inner._target_button, inner._target_button_states[index] = index, int(target.value)
        else:
            setattr(inner, f"_target_{target.task}_pos", target.value)
            axis = 1 if target.task == "drawer" else 0
            inner.model.site(f"{target.task}_handle_center_target").pos[axis] = target.value
        mujoco.mj_kinematics(inner.model, inner.data)

    def oracle(self, target: Target, style: str) -> Any:
        """Build OGBench's oracle for a target: a plan for "play", else a closed loop.

        With a goal, a plan without noise puts a cube into the drawer: the closed loop releases it only within 2 cm of
        its target, which the drawer's walls can prevent.
        """
        task = target.task
        goal_in_drawer = not style and self._scene == "scene" and task == "cube" and target.place[2] > CUBE
        kind = "plan" if style == "play" or goal_in_drawer else "markov"
        path = f"ogbench.manipspace.oracles.{kind}.{task}_{kind}:{task.title()}{kind.title()}Oracle"
        noise = PLAN_NOISE if style else 0.0
        options: dict[str, Any] = {"noise": noise, "noise_smoothing": SMOOTHING} if kind == "plan" else {}
        if task == "button" and self._scene == "puzzle":
            options["gripper_always_closed"] = True
        return load_dotted(path, "Oracle")(env=self._inner, **options)


def _names(spec: WorldSpec, key: str) -> tuple[str, ...]:
    return spec.observation[key].names or ()


def things_of(entries: Mapping[str, np.ndarray]) -> Things:
    """Read object states from entries [n] by name, of an observation or of either form of goal."""
    cubes = sum(name.startswith("block_") and name.endswith("_pos") for name in entries)
    blocks = [CENTRE + entries[f"block_{index}_pos"] / LENGTH for index in range(cubes)]
    yaws = [
        float(np.arctan2(entries[f"block_{index}_yaw_sin"][0], entries[f"block_{index}_yaw_cos"][0]))
        if f"block_{index}_yaw_sin" in entries
        else 0.0
        for index in range(cubes)
    ]
    states = [int(np.argmax(value)) for name, value in entries.items() if name.endswith("_state")]
    buttons = entries.get("button_states", np.array(states))
    slides = [float(entries[name][0]) / scale if name in entries else 0.0 for name, scale in SLIDES]
    return Things(np.reshape(blocks, (cubes, 3)), np.array(yaws), np.asarray(buttons).astype(int), *slides)


SLIDES = (("drawer_pos", DRAWER), ("window_pos", WINDOW))


@contextlib.contextmanager
def drawing(generator: np.random.Generator) -> Iterator[None]:
    """Make oracles use a separate generator instead of numpy's global one, which is restored afterwards."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(int(generator.integers(2**32)))  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


keep_former_names(__name__, {"Twin": "OracleSimulation"})
