"""LIBERO's tasks: names, texts, initial states, compiled models with their goal predicates, and fixture placements.

LIBERO's own classes build a scene's description and draw its fixtures; none of them runs while an episode is stepped.
A scene is built once per process and shared by all rows that play it (`scene_of`). Runs inside worker processes: no
torch.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import contextlib
import functools
import io
import logging
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
from PIL import Image

from robopolicy.core.errors import ConfigError, did_you_mean, require_extra
from sims.graphics import Look, LookRenderer, open_renderer
from sims.suites.operational_space import Arm, ArmIndices, consecutive

if TYPE_CHECKING:
    from sims.variations.protocol import Variation

NEEDED_MUJOCO = (3, 10)
"""LIBERO's package calls `mj_fullM` with the arguments that it has since this version of MuJoCo."""
ARENA = "64M"
"""Memory of a row's contacts and constraints; robosuite reserves 1.3 GB for each."""
TEXTURE_SIDE = 512
"""Longest side of a texture of the light look, in pixels. LIBERO has textures of up to 4,096: 1.3 GB per scene."""
SCENES_KEPT = 16
"""Number of scenes that a process keeps; suites with more tasks play all initial states of a task in a row."""
REWORDED = ("_lan", "_task")
"""Suites of LIBERO-PRO that change the instruction, in the BDDL file. In all others `task.language`, made of the file's
name, is the published prompt.
"""
Predicate = Callable[[mujoco.MjData], bool]
Progress = Callable[[mujoco.MjData], float]
REACH, CARRY = 0.1, 0.15
"""Distances in metres over which progress falls off, of the hand to what it has to move, and of that to its place."""
Bounds = tuple[tuple[str, tuple[float, float]], ...]
"""Factors of variation with their lowest and highest values, see `variation_bounds`."""
Pose = tuple[np.ndarray, np.ndarray]
"""Positions [F, 3] and orientations [F, 4] of fixtures."""


def imported(module: str) -> Any:
    """Import a module of LIBERO without its messages; raises ConfigError when the extra is missing or does not fit."""
    version = tuple(int(part) for part in mujoco.__version__.split(".")[:2])
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    with quiet():
        require_extra("libero", "libero")
        if version < NEEDED_MUJOCO:
            raise ConfigError(
                f"LIBERO needs mujoco 3.10 or newer, but {mujoco.__version__} is installed: pip install "
                "'robopolicy[libero]', in an environment of its own where another package needs an older one."
            )
        return require_extra(module, "libero")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep LIBERO's and robosuite's messages from being printed."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


# -- tasks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LiberoTask:
    """A task of a suite: its name, instruction, BDDL file, and `file` of its initial states."""

    suite: str
    index: int
    name: str
    text: str
    bddl: str

    @functools.cached_property
    def problem(self) -> Mapping[str, Any]:
        """The parsed BDDL file: objects, fixtures, regions, goal_state."""
        return imported("libero.libero.envs.bddl_utils").robosuite_parse_problem(self.bddl)


@functools.cache
def benchmark_of(suite: str) -> Any:
    """Return LIBERO's benchmark object of a suite; raises ConfigError on an unknown one."""
    suites = imported("libero.libero.benchmark").get_benchmark_dict()
    if suite not in suites:
        raise ConfigError(f"LIBERO has no suite '{suite}'.{did_you_mean(suite, suites)}")
    with quiet():
        return suites[suite]()


@functools.cache
def tasks_of(name: str) -> tuple[LiberoTask, ...]:
    """Return the tasks of "libero_spatial" (all), "libero_spatial:3" or "libero_spatial:NAME" (one).

    Raises ConfigError on an unknown suite or task, and when the package has no files of a task.
    """
    suite, colon, key = name.partition(":")
    benchmark = benchmark_of(suite)
    folder = Path(imported("libero.libero").get_libero_path("bddl_files"))
    tasks = []
    for index, task in enumerate(benchmark.get_task(index) for index in range(benchmark.n_tasks)):
        bddl = str(folder / task.problem_folder / task.bddl_file)
        text = task.language
        if suite.endswith(REWORDED) and Path(bddl).is_file():
            text = imported("libero.libero.envs.bddl_utils").get_problem_info(bddl)["language_instruction"]
        tasks.append(LiberoTask(suite, index, task.name, text, bddl))
    if colon:
        matches = [task for task in tasks if key in (str(task.index), task.name)]
        if not matches:
            nearest = did_you_mean(key, [task.name for task in tasks])
            raise ConfigError(
                f"'{suite}' has no task '{key}': use a number from 0 to {len(tasks) - 1}, or a name.{nearest}"
            )
        tasks = matches
    for task in tasks:
        if not Path(task.bddl).is_file():
            raise ConfigError(f"The installed package has no file of the task '{task.suite}:{task.index}' {task.name}.")
    return tuple(tasks)


@functools.lru_cache(maxsize=256)
def initial_states(task: LiberoTask) -> np.ndarray:
    """Return the official initial states [N, 1 + nq + nv]: time, positions, velocities.

    Raises ConfigError when the package has none.
    """
    try:
        with quiet():
            return np.asarray(benchmark_of(task.suite).get_task_init_states(task.index), dtype=np.float64)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The installed package has no initial states of the task '{task.suite}:{task.index}'."
        ) from error


def bounds_of(variation: Any) -> Bounds:
    """Return the factors of world.options.variation; raises ConfigError on wrong ones."""
    if variation is None:
        return ()
    from sims.variations.protocol import variation_bounds  # which imports torch

    return tuple(variation_bounds(variation).items())


def of_kind(variation: Bounds, kind: str) -> Bounds:
    """Return the factors that are "physical" or "visible", attributes of `Factor`."""
    if not variation:
        return ()
    from sims.variations.protocol import FACTORS  # which imports torch

    return tuple((name, bounds) for name, bounds in variation if getattr(FACTORS.load(name), kind))


# -- scenes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settled:
    """State of a scene before the last physics step of settling: MuJoCo's [N], the controller's goal [12], and the
    fingers' commands [2].
    """

    physics: np.ndarray
    goal: np.ndarray
    fingers: np.ndarray


class Scene:
    """A task's compiled model without textures, with what stepping, observing and judging it needs.

    model: shared by all rows, whose fixtures' poses are those of whoever called `place` last; arm: indices of the
    robot; rest: state of the arm after a reset [117], relative to which the first action moves; bodies: object or
    fixture -> body; joints: name -> address of its position; sites: site -> whether it glows, of stoves; settled: saved
    starts; renderers: open graphics contexts, by height, width and whether the look is light. Raises ConfigError on
    factors of `variation` that the scene cannot vary.
    """

    def __init__(self, task: LiberoTask, sleep: bool, variation: Bounds = ()):
        self.task, self._builder = task, _builder(task)
        inner = self._builder
        self.model: mujoco.MjModel = inner.sim.model._model
        self._physics = self._varied(self.model, of_kind(variation, "physical"))
        self._appearance = of_kind(variation, "visible")
        model, robot = self.model, inner.robots[0]
        names = mujoco.mj_name2id
        self.site = names(model, mujoco.mjtObj.mjOBJ_SITE, robot.gripper.important_sites["grip_site"])
        self.hand = names(model, mujoco.mjtObj.mjOBJ_BODY, robot.robot_model.eef_name)
        joints, fingers = (
            [names(model, mujoco.mjtObj.mjOBJ_JOINT, name) for name in listed]
            for listed in (robot.robot_joints, robot.gripper.joints)
        )
        actuators, finger_actuators = (
            [names(model, mujoco.mjtObj.mjOBJ_ACTUATOR, name) for name in listed]
            for listed in (robot.robot_model.actuators, robot.gripper.actuators)
        )
        self.arm = ArmIndices(model, self.site, joints, actuators, finger_actuators)
        self.finger_qpos = consecutive(model.jnt_qposadr[fingers])
        self.posture = np.array(robot.init_qpos, dtype=np.float64)
        self.substeps = int(inner.control_timestep / inner.model_timestep)
        self.rest = self._resting_arm()

        owners = {**inner.fixtures_dict, **inner.objects_dict}
        self.bodies = {name: names(model, mujoco.mjtObj.mjOBJ_BODY, each.root_body) for name, each in owners.items()}
        self.fixtures = np.array([self.bodies[name] for name in inner.fixtures_dict], dtype=np.int64)
        self.joints = {
            joint: int(model.jnt_qposadr[names(model, mujoco.mjtObj.mjOBJ_JOINT, joint)])
            for each in owners.values()
            for joint in each.joints
            if model.joint(joint).type != mujoco.mjtJoint.mjJNT_FREE
        }
        self.sites = self._glowing_sites()
        goal = [tuple(state) for state in inner.parsed_problem["goal_state"]]
        self.predicates = [self._predicate(state) for state in goal]
        self._progress = [self._progress_of(*parts) for parts in zip(goal, self.predicates, strict=True)]
        if sleep:
            self._let_sleep()
        self.settled: dict[tuple[object, ...], Settled] = {}
        self.renderers: dict[tuple[int, int, bool], LookRenderer] = {}
        self._drawn_models: dict[bool, tuple[Look, mujoco.MjData, Variation | None]] = {}
        if self._appearance:
            self.drawn(True, 0)  # so that an appearance that it cannot vary is refused here
        self._placed: object = None
        self._as_built = model.body_pos.copy(), model.body_quat.copy()
        self._drawn: dict[tuple[int, int], Pose] = {}

    def _varied(self, model: mujoco.MjModel, factors: Bounds) -> "Variation | None":
        """Return these factors of episodes that `model` simulates or draws, None without any."""
        if not factors:
            return None
        from sims.variations.protocol import Variation  # which imports torch

        return Variation(dict(factors), model, f"libero/{self.task.suite}:{self.task.index}", 1)

    @property
    def physics_by_episode(self) -> bool:
        """Whether episodes differ in their physics, so that every row has a model of its own."""
        return self._physics is not None and self._physics.physics_by_episode

    def place_objects(self, qpos: np.ndarray, seed: int) -> None:
        """Adapt an initial state qpos [nq], in place, to the episode with this seed."""
        if self._physics:
            self._physics.place(qpos[None], np.array([seed]))

    def model_of(self, seed: int) -> mujoco.MjModel:
        """Return the model of the episode with this seed."""
        return self._physics.models(np.array([seed]))[0] if self._physics else self.model

    def _resting_arm(self) -> np.ndarray:
        """Return the state of the arm that the controller reads when it is created, [117]."""
        row = Row(self)
        row.data.qpos[self.arm.qpos] = self.posture
        mujoco.mj_forward(self.model, row.data)
        row.arm.read()
        return row.arm.state

    def success(self, data: mujoco.MjData) -> bool:
        """Whether all goal predicates hold, as LIBERO's own `check_success`."""
        return all(predicate(data) for predicate in self.predicates)

    def progress(self, data: mujoco.MjData) -> float:
        """Return progress towards the goal from 0 to 1, the mean over its predicates; 1 where all hold.

        A predicate that holds counts 1, any other at most 0.75: a quarter for the hand at the object or joint that it
        is about, half for that near its place.
        """
        return sum(each(data) for each in self._progress) / len(self._progress)

    # -- fixtures

    def placement(self, seed: int, number: int = 0) -> Pose:
        """Return positions [F, 3] and orientations [F, 4] of the fixtures after LIBERO's own reset `number` (from 0) of
        a new environment behind `env.seed(seed)`.

        LIBERO draws them from numpy's global generator, whose state is put back.
        """
        if (seed, number) not in self._drawn:
            outer = np.random.get_state()  # noqa: NPY002 (LIBERO draws from it)
            try:
                np.random.seed(seed)  # noqa: NPY002
                # Later resets draw on, so all that anybody asks for are drawn at once.
                for each in range(max(number + 1, 50 if number else 1)):
                    self._drawn[seed, each] = self._redrawn(each)
            finally:
                np.random.set_state(outer)  # noqa: NPY002
        return self._drawn[seed, number]

    def _redrawn(self, number: int) -> Pose:
        """Draw the fixtures of LIBERO's reset `number` of one environment from numpy's global generator."""
        inner, model = self._builder, self.model
        model.body_pos[:], model.body_quat[:] = self._as_built
        initializers = inner.object_property_initializers
        # A hard reset appends every initializer once more, and all of them draw.
        inner.object_property_initializers = initializers * (number + 2)
        try:
            with quiet():
                while True:
                    try:
                        inner.sim.reset()
                        inner._reset_internal()
                        break
                    except Exception as error:
                        if type(error).__name__ != "RandomizationError":
                            raise
        finally:
            inner.object_property_initializers = initializers
            self._placed = None
        return model.body_pos[self.fixtures].copy(), model.body_quat[self.fixtures].copy()

    def place(self, key: object, pose: Pose) -> None:
        """Move the fixtures of the shared model to `pose`, positions [F, 3] and orientations [F, 4], unless they stand
        there; key: names the pose.
        """
        if self._placed != key:
            self.model.body_pos[self.fixtures], self.model.body_quat[self.fixtures] = pose
            self._placed = key

    # -- goals

    def _predicate(self, state: Sequence[str]) -> Predicate:
        """Compile a goal predicate of the BDDL file, such as ("on", "bowl", "plate")."""
        inner = self._builder
        kind, *names = state
        if kind in ("open", "close", "turnon", "turnoff"):
            site = inner.object_sites_dict.get(names[0])
            owner = inner.get_object(names[0] if site is None else site.parent_name)
            places = [self.joints[joint] for joint in (owner if site is None else site).joints]
            check = getattr(owner, {"open": "is_open", "close": "is_close", "turnon": "turn_on"}.get(kind, "turn_off"))
            over = any if kind in ("open", "turnon") else all
            return lambda data: over(check(data.qpos[place]) for place in places)
        if kind == "in" and names[1] in inner.object_sites_dict:
            return self._inside(self.bodies[names[0]], names[1])
        if kind == "on" and names[1] in inner.object_sites_dict:
            return self._above(names[0], names[1])
        if kind == "on":
            return self._stacked(names[0], names[1])
        raise ConfigError(f"The goal {state} of '{self.task.suite}:{self.task.index}' has an unknown predicate.")

    def _progress_of(self, state: Sequence[str], holds: Predicate) -> Progress:
        """Return progress towards one predicate, see `progress`."""
        inner, model = self._builder, self.model
        kind, *names = state
        region = inner.object_sites_dict.get(names[-1])
        if kind in ("open", "close", "turnon", "turnoff"):
            owner = inner.get_object(names[0] if region is None else region.parent_name)
            low, high = sorted(owner.object_properties["articulation"][f"default_{kind}_ranges"])
            joints = [model.joint(name) for name in (owner if region is None else region).joints]
            places = [int(joint.qposadr[0]) for joint in joints]
            moved = [int(joint.bodyid[0]) for joint in joints]
            travel = max(float(np.ptp(joint.range)) for joint in joints)
            over = min if kind in ("open", "turnon") else max  # one open drawer will do, but all must be shut

            def done(data: mujoco.MjData) -> float:
                gaps = [max(low - data.qpos[place], data.qpos[place] - high, 0.0) for place in places]
                return max(0.0, 1.0 - over(gaps) / travel)
        else:
            moved = [self.bodies[names[0]]]
            if region is None:
                other = self.bodies[names[1]]
                where: Callable[[mujoco.MjData], np.ndarray] = lambda data: data.xpos[other]  # noqa: E731
            else:
                site, _ = self._site(names[1])
                where = lambda data: data.site_xpos[site]  # noqa: E731

            def done(data: mujoco.MjData) -> float:
                return 1.0 - float(np.tanh(np.linalg.norm(data.xpos[moved[0]] - where(data)) / CARRY))

        def progress(data: mujoco.MjData) -> float:
            if holds(data):
                return 1.0
            reach = min(float(np.linalg.norm(data.site_xpos[self.site] - data.xpos[body])) for body in moved)
            return 0.25 * (1.0 - float(np.tanh(reach / REACH))) + 0.5 * done(data)

        return progress

    def _inside(self, body: int, name: str) -> Predicate:
        """In(object, region): its origin lies in the region's box, whose lower side is 1 cm deeper."""
        site, size = self._site(name)
        deeper = np.array([0.0, 0.0, 0.01])

        def holds(data: mujoco.MjData) -> bool:
            half, origin = np.abs(data.site_xmat[site].reshape(3, 3) @ size), data.site_xpos[site]
            inside = (data.xpos[body] > origin - half - deeper) & (data.xpos[body] < origin + half)
            return bool(inside.all())

        return holds

    def _above(self, name: str, region: str) -> Predicate:
        """On(object, region): its origin lies above the region, at most 10 cm, and it touches the region's owner."""
        body, (site, size) = self.bodies[name], self._site(region)
        parent = self._builder.object_sites_dict[region].parent_name
        touches = None if self._builder.get_object(parent) is None else self._touching(parent, name)

        def holds(data: mujoco.MjData) -> bool:
            way = data.site_xmat[site].reshape(3, 3) @ (data.xpos[body] - data.site_xpos[site])
            if not (size[2] - 0.005 < way[2] < size[2] + 0.10 and (np.abs(way[:2]) < size[:2]).all()):
                return False
            return touches is None or touches(data)

        return holds

    def _stacked(self, upper: str, lower: str) -> Predicate:
        """On(object, object): the upper is higher, they touch, and their origins are less than 3 cm apart."""
        above, below = self.bodies[upper], self.bodies[lower]
        touches = self._touching(lower, upper)

        def holds(data: mujoco.MjData) -> bool:
            way = data.xpos[above] - data.xpos[below]
            return bool(data.xpos[below][2] <= data.xpos[above][2] and np.linalg.norm(way[:2]) < 0.03) and touches(data)

        return holds

    def _touching(self, one: str, other: str) -> Predicate:
        masks = [np.zeros(self.model.ngeom, dtype=bool) for _ in range(2)]
        for mask, name in zip(masks, (one, other), strict=True):
            for geom in self._builder.get_object(name).contact_geoms:
                mask[mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_GEOM, geom)] = True
        first, second = masks

        def holds(data: mujoco.MjData) -> bool:
            geoms = data.contact.geom
            one, two = geoms[:, 0], geoms[:, 1]
            return bool(((first[one] & second[two]) | (second[one] & first[two])).any())

        return holds

    def _site(self, name: str) -> tuple[int, np.ndarray]:
        size = np.array(self._builder.object_sites_dict[name].size, dtype=np.float64)
        return mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_SITE, name), size

    # -- sleep and looks

    def _let_sleep(self) -> None:
        """Let MuJoCo put resting bodies to sleep, but never those of the goal: sleeping pairs have no contacts."""
        model, inner = self.model, self._builder
        model.opt.enableflags |= mujoco.mjtEnableBit.mjENBL_SLEEP
        for state in inner.parsed_problem["goal_state"]:
            for name in state[1:]:
                site = inner.object_sites_dict.get(name)
                body = self.bodies.get(name if site is None else site.parent_name)
                for part in range(model.nbody):
                    tree = model.body_treeid[part]
                    if body is not None and tree >= 0 and self._belongs(part, body):
                        model.tree_sleep_policy[tree] = mujoco.mjtSleepPolicy.mjSLEEP_NEVER

    def _belongs(self, part: int, body: int) -> bool:
        """Whether a body is `body` or below it."""
        while part not in (0, body):
            part = self.model.body_parentid[part]
        return part == body

    def _glowing_sites(self) -> dict[int, Predicate]:
        """Return the sites that show whether a stove is on, each with the predicate that says so."""
        sites = {}
        for name, fixture in self._builder.fixtures_dict.items():
            for site_name, _ in fixture.object_properties.get("vis_site_names", {}).values():
                site = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_SITE, site_name)
                sites[site] = self._predicate(("turnon", name))
        return sites

    def drawn(self, light: bool, seed: int) -> tuple[Look, mujoco.MjData]:
        """Return the look of the episode with this seed, whose model has textures, and the data into which the row that
        is drawn is written.

        light: with textures of at most `TEXTURE_SIDE` pixels, a third of the memory.
        """
        if light not in self._drawn_models:
            xml, images = with_small_textures(self._builder.full_xml) if light else (self._builder.full_xml, None)
            model = mujoco.MjModel.from_xml_string(xml, images)
            model.site_rgba[:] = self.model.site_rgba
            appearance = self._varied(model, self._appearance)
            self._drawn_models[light] = Look(model), mujoco.MjData(model), appearance
        look, data, appearance = self._drawn_models[light]
        looks = appearance.looks(np.array([seed])) if appearance else None
        return looks[0] if looks else look, data

    def renderer(self, light: bool, height: int, width: int) -> LookRenderer:
        """Return the graphics context for images of this size, opened if it is missing."""
        key = (height, width, light)
        if key not in self.renderers:
            model = self._drawn_models[light][0].model
            if light:
                model.vis.quality.offsamples = 0
            self.renderers[key] = LookRenderer(open_renderer(model, height, width, self), shadows=not light)
        return self.renderers[key]

    def close(self) -> None:
        """Free the graphics contexts."""
        for renderer in self.renderers.values():
            renderer.close()
        self.renderers.clear()


class Row:
    """MuJoCo's data of one row of a scene, and the arm in it.

    seed: of the episode, whose model is the row's own where episodes differ in their physics.
    """

    def __init__(self, scene: Scene, seed: int = 0):
        self.scene, self.seed = scene, seed
        self.model = scene.model_of(seed)
        self._placed: object = None
        self.data = mujoco.MjData(self.model)
        self.arm = Arm(scene.arm, self.data, scene.posture)

    def place(self, key: tuple[int, int]) -> None:
        """Let the fixtures stand where `Scene.placement` puts them for the seed and number in `key`."""
        scene = self.scene
        pose = scene.placement(*key)
        if self.model is scene.model:
            scene.place(key, pose)
        elif self._placed != key:
            self.model.body_pos[scene.fixtures], self.model.body_quat[scene.fixtures] = pose
            self._placed = key

    def act(self, goal: np.ndarray, fingers: np.ndarray, close: float, fresh: bool = True) -> None:
        """Write the controls towards `goal` [12] for `fingers` [2], see `Arm.act`, and run the second half of a physics
        step.
        """
        self.arm.act(goal, fingers, close, fresh)
        mujoco.mj_step2(self.model, self.data)


def _builder(task: LiberoTask) -> Any:
    """Return LIBERO's own environment of a task, whose model is compiled for physics alone."""
    wrapper = imported("libero.libero.envs.env_wrapper")
    kinds = imported("libero.libero.envs.bddl_base_domain").TASK_MAPPING
    with quiet():
        problem = imported("libero.libero.envs.bddl_utils").get_problem_info(task.bddl)["problem_name"]
        kind = kinds[problem]

        def initialize(self: Any, xml_string: str | None = None) -> None:
            self.full_xml = xml_string or self.model.get_xml()
            kind._initialize_sim(self, without_looks(self.full_xml))

        named = type(kind.__name__, (kind,), {"_initialize_sim": initialize})
        kinds[problem] = named
        try:
            built = wrapper.ControlEnv(
                bddl_file_name=task.bddl, use_camera_obs=False, has_offscreen_renderer=False, hard_reset=False
            )
        finally:
            kinds[problem] = kind
        inner = built.env
        inner.visualize(vis_settings=dict.fromkeys(inner._visualizations, False))
    return inner


def without_looks(xml: str) -> str:
    """Return a model's description without textures and meshes that are only seen, and with a small arena.

    What is only seen has no mass (robosuite infers inertia from geoms of group 0), so the physics stay the same. Its
    geoms stay too, as spheres, since robosuite looks them up by name.
    """
    root = ElementTree.fromstring(xml)
    for geom in root.iter("geom"):
        if geom.get("type") == "mesh" and geom.get("contype") == geom.get("conaffinity") == "0" != geom.get("group"):
            geom.attrib.pop("mesh")
            geom.attrib |= {"type": "sphere", "size": "0.001"}
    used = {geom.get("mesh") for geom in root.iter("geom")}
    for asset in root.iter("asset"):
        for texture in asset.findall("texture"):
            asset.remove(texture)
        for mesh in asset.findall("mesh"):
            if mesh.get("name") not in used:
                asset.remove(mesh)
        for material in asset.findall("material"):
            material.attrib.pop("texture", None)
    for size in root.findall("size"):
        size.attrib.clear()
        size.attrib["memory"] = ARENA
    return ElementTree.tostring(root, encoding="unicode")


def with_small_textures(xml: str) -> tuple[str, dict[str, bytes]]:
    """Return a model's description with smaller textures, and their files by name."""
    root = ElementTree.fromstring(xml)
    files: dict[str, bytes] = {}
    for texture in root.iter("texture"):
        source = texture.get("file")
        if source is None:
            continue
        with Image.open(source) as image:
            if max(image.size) <= TEXTURE_SIDE:
                continue
            small, png = image.convert("RGB"), io.BytesIO()
        small.thumbnail((TEXTURE_SIDE, TEXTURE_SIDE), Image.Resampling.BOX)
        small.save(png, "PNG")
        name = f"small/{len(files)}.png"
        texture.set("file", name)
        files[name] = png.getvalue()
    return ElementTree.tostring(root, encoding="unicode"), files


_scenes: dict[tuple[LiberoTask, bool, Bounds], Scene] = {}


def scene_of(task: LiberoTask, sleep: bool, variation: Bounds = ()) -> Scene:
    """Return this process's scene of a task; the one not used for longest is dropped when there are too many."""
    key = (task, sleep, variation)
    scene = _scenes.pop(key, None) or Scene(task, sleep, variation)
    _scenes[key] = scene  # the newest is the last
    while len(_scenes) > SCENES_KEPT:
        _scenes.pop(next(iter(_scenes)))
    return scene
