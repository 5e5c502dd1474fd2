"""Tidy: three cubes, two trays and a drawer in front of the six-joint arm; only the instruction determines the goal.

Twelve instructions: each cube into either tray or the drawer, the red cube onto the blue one, the drawer open, the
drawer shut. Initial states are sampled independently of the instruction (the drawer starts half open, the order of
cubes and trays is random), so only `task` distinguishes them. Three instructions are held out of training: each of
their cubes and places occurs in others, their combination does not.
"""

from typing import NamedTuple

import numpy as np

from robopolicy.core.errors import SpecError, did_you_mean
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, TASK, Observation
from robopolicy.core.world import Rows
from sims import arm, grasping
from sims.grasping import CUBE_HALF, GRIPPER_HOLDS, HELD_WITHIN, RELEASED, START_HEIGHT, length
from sims.task import Arrays, Readings, Start, Task, elements, flat_quaternion, newest, scale, vector_field

CUBES, TRAYS = ("red", "green", "blue"), ("white", "black")
PLACES = (*(f"{tray} tray" for tray in TRAYS), "drawer")
STACK = "stack the red cube on the blue cube"
OPEN = "open the drawer"
CLOSE = "close the drawer"
INSTRUCTIONS = (*(f"put the {cube} cube in the {place}" for cube in CUBES for place in PLACES), STACK, OPEN, CLOSE)
_THING = (0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 3, 3)
_PLACE = (0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 5)
"""Per instruction: index of the object to move (3: the handle), and its target; see `instructed`."""
HELD_OUT = (
    "put the red cube in the black tray",
    "put the green cube in the drawer",
    "put the blue cube in the white tray",
)
_PUT = ("place the {0} cube into the {1}", "move the {0} block to the {1}", "the {0} cube goes into the {1}")
COMPOSITIONS = (
    ("put the red cube in the drawer", "put the blue cube in the black tray"),
    (OPEN, "put the blue cube in the drawer"),
    ("put the green cube in the black tray", CLOSE),
    (CLOSE, "put the green cube in the white tray"),
    ("put the blue cube in the black tray", "put the red cube in the white tray"),
    ("put the red cube in the white tray", OPEN),
)
"""Pairs that a world with instructions=composed asks for in this order: their parts are trained, no pair is."""
PARAPHRASES = {
    **{
        f"put the {cube} cube in the {place}": tuple(text.format(cube, place) for text in _PUT)
        for cube in CUBES
        for place in PLACES
    },
    STACK: (
        "place the red cube on top of the blue cube",
        "pile the red block on the blue one",
        "the red cube goes onto the blue cube",
    ),
    OPEN: ("pull the drawer out", "pull the drawer open", "slide the drawer out"),
    CLOSE: ("push the drawer in", "shut the drawer", "slide the drawer shut"),
}

TIP_LOW, TIP_HIGH = np.array([0.11, -0.145, 0.014]), np.array([0.285, 0.145, 0.095])
"""Box that tip targets are clipped to, m: wider than in the other tasks, every point is within reach."""

DRAWER_FRONT = 0.302
"""x of the inner side of the closed drawer's front, and of the cabinet's face, m."""
HANDLE = np.array([DRAWER_FRONT - 0.015, 0.0, 0.019])  # m, of a shut drawer
OPENED, SHUT = 0.10, 0.01  # m that the drawer is out: more is open, less is shut
TRAVEL = 0.11  # m
REST_IN_TRAY, REST_IN_DRAWER = 0.003 + CUBE_HALF, 0.005 + CUBE_HALF  # m, height of a cube's centre at rest there
INSIDE = 0.022  # m from the middle of a tray along each axis: a cube that lies flat in it is nearer
ON_TOP = 0.018  # m

_CUBE = (
    "{0}_x {0}_y {0}_z {0}_r11 {0}_r21 {0}_r31 {0}_r12 {0}_r22 {0}_r32 {0}_velocity_x {0}_velocity_y {0}_velocity_z "
    "{0}_spin_x {0}_spin_y {0}_spin_z tip_to_{0}_x tip_to_{0}_y tip_to_{0}_z"
)
SCENE_FIELD = vector_field(
    " ".join(
        [_CUBE.format(cube) for cube in CUBES]
        + [f"{tray}_x {tray}_y tip_to_{tray}_x tip_to_{tray}_y tip_to_{tray}_z" for tray in TRAYS]
        + ["drawer_opening drawer_speed tip_to_handle_x tip_to_handle_y tip_to_handle_z"]
    ),
    "m, 1, m/s, rad/s",
)


def _vectors(pattern: str, names: tuple[str, ...]) -> list[slice]:
    return [elements(SCENE_FIELD, " ".join(f"{pattern.format(name)}_{axis}" for axis in "xyz")) for name in names]


_POSITION, _VELOCITY, _TO_CUBE = (_vectors(text, CUBES) for text in ("{}", "{}_velocity", "tip_to_{}"))
_TRAY = [elements(SCENE_FIELD, f"{tray}_x {tray}_y") for tray in TRAYS]
_OPENING = elements(SCENE_FIELD, "drawer_opening")
_TO_HANDLE = _vectors("tip_to_{}", ("handle",))[0]


class Scene(NamedTuple):
    """Object to move and its target, on any leading axes; see `instructed`.

    thing: [..., 3] the centre of the cube or the drawer's handle, m; to_thing: [..., 3] from the tip, m; to_goal: [...,
    3] from the object to its target, m; velocity: [..., 3] of the cube, m/s (0 for the handle); stacks, in_drawer,
    handles: [...] bool, the kind of the instruction (none of them: into a tray); opening: [...] m.
    """

    thing: np.ndarray
    to_thing: np.ndarray
    to_goal: np.ndarray
    velocity: np.ndarray
    stacks: np.ndarray
    in_drawer: np.ndarray
    handles: np.ndarray
    opening: np.ndarray


def start(uniforms: np.ndarray) -> Start:
    """Three cubes in a row near the arm, both trays and the half open drawer behind them, tip above the middle.

    uniforms: [R, 21] -> qpos [R, 32] (six joints in rad, the drawer's opening and the trays' x, y in m, each cube's
    position in m and quaternion), goal [R, 0], control [R, 6] rad.
    """
    count = len(uniforms)
    tip = scale(uniforms[:, 0:3], [0.16, -0.05, 0.085], [0.21, 0.05, 0.095])
    near = scale(uniforms[:, 3:6], [0.12, 0.11, 0.12], [0.15, 0.133, 0.15])
    lateral = scale(uniforms[:, 6:9], [-0.14, -0.018, 0.10], [-0.10, 0.018, 0.14])
    places = np.stack([near, lateral, np.full_like(near, START_HEIGHT)], axis=-1)
    # Ranks of three random numbers: which cube lies where, each of the six orders equally likely.
    order = np.argsort(uniforms[:, 9:12], axis=1)
    cubes = np.take_along_axis(places, order[..., None], axis=1)
    quaternions = flat_quaternion(scale(uniforms[:, 12:15], -0.3, 0.3))
    poses = np.concatenate([cubes, quaternions], axis=-1).reshape(count, 21)
    depth = scale(uniforms[:, 15:17], 0.215, 0.24)
    side = scale(uniforms[:, 17:19], [-0.135, 0.115], [-0.115, 0.135])
    side = np.where(uniforms[:, 19:20] < 0.5, side, side[:, ::-1])
    trays = np.stack([depth, side], axis=-1).reshape(count, 4)
    opening = scale(uniforms[:, 20:21], 0.065, 0.075)
    joints = arm.resting_joints(tip)
    return Start(np.concatenate([joints, opening, trays, poses], axis=1), np.empty((count, 0)), joints)


def observe(readings: Readings) -> dict[str, np.ndarray]:
    """The arm's own state; pose, velocity and offset from the tip of every cube; positions and offsets of trays and
    drawer. No goal.

    readings: qpos [..., 32], qvel [..., 29], control [..., 6] -> `observation.state` [..., 19],
    `observation.environment_state` [..., 69].
    """
    qpos = readings.qpos
    qvel = readings.qvel
    tip = arm.tip_position(readings.qpos)
    environment = []
    for index in range(len(CUBES)):
        pose, velocity = qpos[..., 11 + 7 * index :][..., :7], qvel[..., 11 + 6 * index :][..., :6]
        position = pose[..., :3]
        environment += [position, grasping.rotation_columns(pose[..., 3:]), velocity, position - tip]
    for index in range(len(TRAYS)):
        tray = qpos[..., 7 + 2 * index :][..., :2]
        resting_place = np.concatenate([tray, np.full_like(tray[..., :1], REST_IN_TRAY)], axis=-1)
        environment += [tray, resting_place - tip]
    opening = qpos[..., 6:7]
    environment += [opening, qvel[..., 6:7], HANDLE - opening * [1.0, 0.0, 0.0] - tip]
    return {STATE: arm.proprioception(readings), ENVIRONMENT_STATE: np.concatenate(environment, axis=-1)}


def instructed(observation: Arrays) -> Scene:
    """Return the instructed object and its target.

    observation: state [..., 19], environment state [..., 69], texts `task` that broadcast against the leading axes.
    Raises SpecError for a text that is none of the twelve.
    """
    environment = observation[ENVIRONMENT_STATE]
    goal = np.broadcast_to(_goals(np.asarray(observation[TASK])), environment.shape[:-1])
    opening = environment[..., _OPENING][..., 0]
    flat, forward = np.zeros_like(opening), np.array([1.0, 0.0, 0.0])
    handle = HANDLE - opening[..., None] * forward
    # Four things: the cubes and the handle. Six places: the trays, the middle of what is seen of the drawer, on top of
    # the blue cube, and where the handle of an open and of a shut drawer is (with 2 mm to the end of its travel).
    things = np.stack([*(environment[..., cube] for cube in _POSITION), handle], axis=-2)
    ways = np.stack([environment[..., way] for way in (*_TO_CUBE, _TO_HANDLE)], axis=-2)
    velocities = np.stack([*(environment[..., cube] for cube in _VELOCITY), np.zeros_like(handle)], axis=-2)
    trays = [np.concatenate([environment[..., tray], (flat + REST_IN_TRAY)[..., None]], axis=-1) for tray in _TRAY]
    drawer = np.stack([DRAWER_FRONT - opening / 2, flat, flat + REST_IN_DRAWER], axis=-1)
    on_top = environment[..., _POSITION[CUBES.index("blue")]] + [0.0, 0.0, 2 * CUBE_HALF]
    ends = [np.broadcast_to(HANDLE - out * forward, handle.shape) for out in (TRAVEL - 0.002, 0.0)]
    places = np.stack([*trays, drawer, on_top, *ends], axis=-2)

    def chosen(values: np.ndarray, table: tuple[int, ...]) -> np.ndarray:
        return np.take_along_axis(values, np.array(table)[goal][..., None, None], axis=-2)[..., 0, :]

    thing = chosen(things, _THING)
    return Scene(
        thing,
        chosen(ways, _THING),
        chosen(places, _PLACE) - thing,
        chosen(velocities, _THING),
        goal == INSTRUCTIONS.index(STACK),
        np.array(_PLACE)[goal] == PLACES.index("drawer"),
        goal >= INSTRUCTIONS.index(OPEN),
        opening,
    )


def _goals(task: np.ndarray) -> np.ndarray:
    """Return the instruction index of each text, [...] str -> [...] int. Raises SpecError for another text."""
    index_of_text = {text: index for index, text in enumerate(INSTRUCTIONS)}
    texts = [str(text) for text in task.ravel()]
    for text in texts:
        if text not in index_of_text:
            raise SpecError(f"'{text}' is not an instruction of 'tidy'.{did_you_mean(text, INSTRUCTIONS)}")
    return np.array([index_of_text[text] for text in texts], dtype=np.int64).reshape(task.shape)


def potential(observation: Arrays) -> np.ndarray:
    """Reach and grasp; then lift, carry and release the cube, or move the drawer.

    observation: state [..., 19], environment state [..., 69], texts `task` that broadcast -> [...] in 0 to 4.5.
    """
    scene, gripper = instructed(observation), arm.parts(observation[STATE])["gripper"]
    reach = np.maximum(length(scene.to_thing) - HELD_WITHIN, 0.0)
    near = 1.0 - np.tanh(reach / 0.1)
    closed = np.clip(1.0 - np.abs(gripper - GRIPPER_HOLDS) / (arm.GRIPPER_OPEN - GRIPPER_HOLDS), 0.0, 1.0)
    grasped = np.clip(1.0 - reach / 0.02, 0.0, 1.0) * closed
    distance, distance_across = length(scene.to_goal), length(scene.to_goal[..., :2])
    # Over its place a cube need not be high any more, and at rest there the hand may go.
    lift_progress = np.clip((scene.thing[..., 2] - CUBE_HALF) / 0.03, 0.0, 1.0)
    lift_progress = np.maximum(
        lift_progress, np.clip((0.05 - distance_across) / 0.03, 0.0, 1.0) * (scene.thing[..., 2] > CUBE_HALF + 0.002)
    )
    carrying = lift_progress * (1.0 - np.tanh(distance / 0.1))
    placement = np.clip((0.045 - distance) / 0.02, 0.0, 1.0)
    release = np.clip((gripper - GRIPPER_HOLDS) / (RELEASED - GRIPPER_HOLDS), 0.0, 1.0)
    cube = lift_progress + 2.0 * carrying + 0.5 * np.maximum(grasped, placement) + 0.5 * np.maximum(near, placement)
    drawer = 3.5 * (1.0 - np.minimum(distance / TRAVEL, 1.0)) + 0.5 * grasped + 0.5 * near
    return np.where(scene.handles, drawer, cube + 0.5 * placement * release)


def succeeded(observation: Arrays) -> np.ndarray:
    """The instructed cube rests at its target and the jaws are open, or the drawer is at its target.

    observation: state [..., 19], environment state [..., 69], texts `task` that broadcast -> [...] bool.
    """
    scene, gripper = instructed(observation), arm.parts(observation[STATE])["gripper"]
    x, y, z = (np.abs(scene.to_goal[..., axis]) for axis in range(3))
    in_tray = (x < INSIDE) & (y < INSIDE)
    on_top = length(scene.to_goal[..., :2]) < ON_TOP
    behind_front = scene.thing[..., 0] - (DRAWER_FRONT - scene.opening)
    in_drawer = (behind_front > 0.0) & (behind_front < 0.117) & (y < INSIDE)
    in_place = np.where(scene.stacks, on_top, np.where(scene.in_drawer, in_drawer, in_tray))
    rests = in_place & (z < 0.008) & (length(scene.velocity) < 0.05) & (gripper > RELEASED)
    drawer_done = np.where(np.asarray(observation[TASK]) == OPEN, scene.opening > OPENED, scene.opening < SHUT)
    return np.where(scene.handles, drawer_done, rests)


class TidyExpert:
    """Reads the instruction and the current observation only, so it recovers from any disturbance."""

    # m, of the tip, of the tip, horizontally
    carry_height = 0.088
    travel_height = 0.075
    precision = 0.006
    opening = 0.579  # gripper action: wide enough for a cube, too narrow to touch the next one

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state. rows: [R] indices, ignored."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 4], tip moves and gripper, for an observation [B, H, ...]."""
        newest_frames = {STATE: newest(observation, STATE), ENVIRONMENT_STATE: newest(observation, ENVIRONMENT_STATE)}
        scene, hand = instructed({**newest_frames, TASK: observation[TASK]}), arm.parts(newest_frames[STATE])
        tip = hand["tip"]
        to_thing = scene.to_thing
        to_goal = scene.to_goal
        between = (
            (np.abs(to_thing[:, 0]) < 0.015)
            & (to_thing[:, 1] > -0.014)
            & (to_thing[:, 1] < 0.018)
            & (np.abs(to_thing[:, 2]) < 0.015)
        )
        distance_across = length(to_goal[:, :2])
        clearance = np.where(scene.stacks, 0.001, 0.010)  # m above its place at which a cube is let go
        down = to_goal[:, 2] > -(clearance + 0.004)
        at_goal = ~scene.handles & (distance_across < 1.5 * self.precision) & down
        is_held = between & (hand["gripper"] < GRIPPER_HOLDS + 0.06) & ~at_goal
        # Where the tip is to go, later lines overruling earlier ones: approach; wait while the jaws close; carry or
        # pull; wait while they open.
        target = self._approach(tip, tip + to_thing)
        target = np.where(between[:, None], hand["tip_target"], target)
        target = np.where(is_held[:, None], self._carry(tip, to_goal, clearance), target)
        pulled = tip + to_goal * [1.0, 0.0, 0.0]
        pulled[:, 2] = hand["tip_target"][:, 2]
        target = np.where((is_held & scene.handles)[:, None], pulled, target)
        target = np.where(at_goal[:, None], hand["tip_target"], target)
        move = np.clip((target - hand["tip_target"]) / arm.TIP_STEP, -1.0, 1.0)
        gripper = np.where(between & ~at_goal, -1.0, self.opening)
        return np.concatenate([move, gripper[:, None]], axis=1)

    def _approach(self, tip: np.ndarray, thing: np.ndarray) -> np.ndarray:
        """Rise before a long move, hover over the object with clearance for the fixed jaw, descend; all [B, 3] m."""
        target = thing - np.array([0.0, 0.008, 0.0])
        distance_across = length(target[:, :2] - tip[:, :2])
        target[:, 2] = np.where(
            distance_across > 0.008, np.maximum(target[:, 2] + 0.055, self.travel_height), target[:, 2]
        )
        low = (distance_across > 0.025) & (tip[:, 2] < 0.06)
        target[:, :2] = np.where(low[:, None], tip[:, :2], target[:, :2])
        return target

    def _carry(self, tip: np.ndarray, to_goal: np.ndarray, clearance: np.ndarray) -> np.ndarray:
        """Move up, across once the cube clears the others, then down: tip targets [B, 3] m."""
        target = tip + to_goal
        above = length(to_goal[:, :2]) < self.precision
        clear = tip[:, 2] > self.travel_height
        target[:, :2] = np.where((clear | above)[:, None], target[:, :2], tip[:, :2])
        target[:, 2] = np.where(above, target[:, 2] + clearance - 0.001, self.carry_height)
        return target


def task() -> Task:
    """Return the tidying task."""
    return Task(
        name="tidy",
        model="arm/tidy.xml",
        instructions=INSTRUCTIONS,
        success_text=(
            "The instructed cube lies flat in the instructed tray or drawer, or on the instructed cube within "
            f"{100 * ON_TOP:.1f} cm, slower than 5 cm/s and let go; or the drawer is more than {100 * OPENED:.0f} cm "
            f"out (open), less than {100 * SHUT:.0f} cm (closed)."
        ),
        fps=10,
        substeps=10,
        horizon=70,
        cameras=("front", "top", "wrist"),
        action=arm.ACTION,
        open_gripper=1.0,
        observation={STATE: arm.STATE_FIELD, ENVIRONMENT_STATE: SCENE_FIELD},
        uniforms=21,
        start=start,
        control=lambda actions, previous: arm.control(actions, previous, TIP_LOW, TIP_HIGH),
        observe=observe,
        potential=potential,
        succeeded=succeeded,
        expert=TidyExpert,
        paraphrases=PARAPHRASES,
        held_out=HELD_OUT,
        compositions=COMPOSITIONS,
    )
