"""`MujocoWorld`: a batch of one task's episodes on a physics engine, MuJoCo's native rollout threads by default.

One call of `step` advances the running rows by one chunk; observations, rewards, success and episode ends are
vectorised over rows and chunk steps. No Python runs per world per step (only rendering, when requested, is per frame).

The solver's warm start and MuJoCo's automatic reset are disabled. Then (qpos, qvel, activation, control) is the
complete state, a chunk of C steps equals C chunks of one step bitwise, and a diverged row is reported instead of
silently reset.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np

from robopolicy.core.episode_rows import EpisodeRows, require_sizes
from robopolicy.core.errors import CameraError, ConfigError, NonFiniteError, SpecError, did_you_mean
from robopolicy.core.faults import MOVED_GOAL
from robopolicy.core.history import shift_drawn_window
from robopolicy.core.machine import usable_threads
from robopolicy.core.randomness import numpy_generator, uniforms
from robopolicy.core.registry import require_types
from robopolicy.core.spec import (
    IMAGE_PREFIX,
    TASK,
    ImageSize,
    Observation,
    WorldSpec,
    image_fields,
    image_sizes,
    validate_actions,
)
from robopolicy.core.stages import Stage
from robopolicy.core.world import Rows, Snapshot, Step
from sims.composed import outcome_of
from sims.graphics import FREE_CAMERA
from sims.instructions import COMPOSED, PLAIN, TRAINING, instruction_set
from sims.physics.protocol import Physics, PhysicsOfModels, make_physics, state_layout
from sims.render import FrameRenderer, restyle
from sims.task import Markers, Readings, Task, model_path
from sims.variations.protocol import OPTION, Variation

REWARDS = ("progress", "success")


def load_model(task: Task, substeps: int | None = None) -> mujoco.MjModel:
    """Compile the task's MJCF and check the engine's requirements.

    substeps: physics steps per control step, None for the task's own; the timestep then follows from it. Raises
    ConfigError when the file does not exist, or unless the task's fps x substeps x timestep is one second.
    """
    model = mujoco.MjModel.from_xml_path(str(model_path(task)))
    # Somebody else's scene need not say so itself: without warm starts the saved state is the whole state, and without
    # automatic resets a diverged row is noticed.
    for flag in (mujoco.mjtDisableBit.mjDSBL_WARMSTART, mujoco.mjtDisableBit.mjDSBL_AUTORESET):
        model.opt.disableflags |= flag.value
    if abs(task.fps * task.substeps * model.opt.timestep - 1.0) > 1e-9:
        raise ConfigError(
            f"Task '{task.name}': {task.fps} control steps/s x {task.substeps} substeps x {model.opt.timestep} s "
            "must be one second: set the timestep to 1 / (fps x substeps)."
        )
    if substeps not in (None, task.substeps):
        model.opt.timestep = 1.0 / (task.fps * substeps)
    return model


class MujocoWorld:
    """World with snapshots and rendering for a `Task`.

    batch_size: rows B; seed: of the generator of episode seeds when `reset` is given none; history: H frames; cameras:
    cameras whose images are part of the observation; image_size: their size, see `core.spec.image_sizes`; threads:
    native threads, default one per usable core; terminate_on_success: False continues an episode to its time limit;
    style: 0 for the scene's own materials and lights, other numbers for variations of them (see `render`), with the
    same physics; variation: factors of variation of the episodes, see `sims.variations`; instructions, phrasing,
    plain_share: subset of the task's instructions, their wording, and how often it is the plain one (see
    `instruction_set`); physics, physics_options: engine that advances the
    state and its own options, see `sims.physics.protocol`; substeps: physics steps per control step, None for the
    task's own: fewer are cheaper and less accurate; horizon: control steps after which an episode is truncated, None
    for the task's own. `reset` options: "uniforms" [R, task.uniforms], random numbers of the initial state instead of
    those from a seed; "task" [R], indices of the
    spec's instructions, -1 for the one from the seed. Raises CameraError on an unknown camera, ConfigError on sizes
    below 1, and the errors of `load_model`, `state_layout` and `wording`.
    """

    def __init__(
        self,
        task: Task,
        batch_size: int,
        *,
        seed: int = 0,
        history: int = 1,
        cameras: Sequence[str] = (),
        image_size: ImageSize | None = None,
        threads: int | None = None,
        terminate_on_success: bool = True,
        style: int = 0,
        variation: Mapping[str, Any] | None = None,
        instructions: str = TRAINING,
        phrasing: str = PLAIN,
        plain_share: float | None = None,
        physics: str = "native",
        physics_options: Mapping[str, Any] | None = None,
        substeps: int | None = None,
        horizon: int | None = None,
    ):
        arguments = {name: value for name, value in locals().items() if name != "batch_size"}
        require_types(MujocoWorld, arguments, "world.options.")
        self.substeps = task.substeps if substeps is None else substeps
        if horizon is None:  # two instructions in a row have the time of both
            horizon = task.horizon * (2 if instructions == COMPOSED else 1)
        require_sizes(batch_size=batch_size, history=history, substeps=self.substeps, horizon=horizon)
        for camera in cameras:
            if camera not in task.cameras:
                nearest = did_you_mean(camera, task.cameras)
                raise CameraError(f"Task '{task.name}' has no camera '{camera}'.{nearest}", task.cameras)
        self.task, self._wording = task, instruction_set(task, instructions, phrasing, plain_share)
        self.model = load_model(task, self.substeps)
        if style:
            restyle(self.model, style)
        self._variation = Variation(variation, self.model, task.name, batch_size)
        self._layout = state_layout(self.model)
        self._batch_size, self._history = batch_size, history
        self._sizes = image_sizes(cameras, image_size)
        self._spec = WorldSpec(
            name=task.name,
            observation={**task.observation, **image_fields(self._sizes)},
            action=task.action,
            fps=task.fps,
            horizon=horizon,
            history=history,
            rewards=REWARDS,
            instructions=self._wording.texts,
            paraphrases=task.paraphrases,
            success=task.success_text,
            terminate_on_success=terminate_on_success,
        )
        generator = numpy_generator(seed, f"sims/{task.name}/episode_seeds")
        self._episodes = EpisodeRows(self._spec, batch_size, lambda count: generator.integers(0, 2**62, size=count))
        self.threads = min(threads if threads is not None else usable_threads(), batch_size)
        self._physics_name = physics
        self._physics: Physics | None = make_physics(
            physics, self.model, batch_size, self.threads, physics_options or {}
        )
        self._sensors = {
            self.model.sensor(index).name: slice(
                self.model.sensor_adr[index], self.model.sensor_adr[index] + self.model.sensor_dim[index]
            )
            for index in range(self.model.nsensor)
        }
        self._renderer = FrameRenderer(self.model)
        self._require_models()

    @property
    def spec(self) -> WorldSpec:
        """Fields, ranges, rates and texts."""
        return self._spec

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the task, in order; empty when the task defines none."""
        return self.task.stages

    @property
    def open_gripper(self) -> dict[int, float]:
        """Action element -> value that opens the gripper; empty for tasks without a grasp."""
        value = self.task.open_gripper
        return {} if value is None else {self.task.action.names.index("gripper"): value}

    @property
    def disturbances(self) -> tuple[str, ...]:
        """Names of what `disturb` can do: the task's own disturbances, and moved_goal if goals differ."""
        goals = self.task.start(np.array([[0.25], [0.75]]) * np.ones(self.task.uniforms)).goal
        moves = bool((goals[0] != goals[1]).any())
        return tuple(dict.fromkeys((*self.task.disturbances, *([MOVED_GOAL] if moves else []))))

    def disturb(self, name: str, rows: np.ndarray, keys: np.ndarray) -> None:
        """Disturb the state of the rows [R] by random numbers with these keys [R]; see `core.faults.Disturbable`.

        moved_goal, unless it is the task's own, sets the goal of another episode.
        """
        arrays, layout = self._episodes.arrays, self._layout
        change = self.task.disturbances.get(name)
        if change is None:
            arrays["goal"][rows] = self.task.start(uniforms(keys, self.task.uniforms)).goal
            return
        state = arrays["state"][rows]
        change(state[:, layout.qpos], state[:, layout.qvel], uniforms(keys, 4))
        arrays["state"][rows] = state

    @property
    def available_cameras(self) -> dict[str, str]:
        """Name -> description of the camera's view."""
        return dict.fromkeys(self.task.cameras, "rendered at any size")

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self._batch_size

    # -- episodes ------------------------------------------------------------------------------------------------

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | np.ndarray | None = None, options: Mapping | None = None
    ) -> Observation:
        """Start new episodes in `rows`, the first time in every row. Returns all rows' observation [B, H, ...].

        options: see the class. Raises ConfigError on an unknown option, SpecError on invalid rows, seeds or option
        values.
        """
        options = dict(options or {})
        numbers, instruction = options.pop("uniforms", None), options.pop("task", None)
        if options:
            option = next(iter(options))
            raise ConfigError(f"Unknown reset option '{option}'.{did_you_mean(option, ['uniforms', 'task'])}")
        index, seeds = self._episodes.reset_rows(rows, seeds)
        # Two numbers behind the task's own, so that those stay what they are without instructions.
        task_draws, wording_draws = np.split(uniforms(seeds, self.task.uniforms + 2), [self.task.uniforms], axis=1)
        numbers = np.asarray(task_draws if numbers is None else numbers, dtype=np.float64)
        if numbers.shape != (len(index), self.task.uniforms):
            raise SpecError(f"uniforms have shape {numbers.shape}, expected [{len(index)}, {self.task.uniforms}].")
        self._start(index, seeds, numbers, wording_draws, instruction)
        return self._episodes.observation()

    def _instructed(self, asked: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """Return the requested instructions [R], with the sampled ones where they are -1. Raises SpecError on other
        values.
        """
        if asked.shape != drawn.shape or asked.dtype.kind not in "iu":
            raise SpecError(f"task has shape {list(asked.shape)} and dtype {asked.dtype}: pass one index per row, [R].")
        if asked.min(initial=0) < -1 or asked.max(initial=0) >= len(self._spec.instructions):
            raise SpecError(
                f"task={asked.tolist()} is out of range: '{self.task.name}' has {len(self._spec.instructions)} "
                "instructions, numbered from 0."
            )
        return np.where(asked < 0, drawn, asked)

    def _start(
        self,
        index: np.ndarray,
        seeds: np.ndarray,
        numbers: np.ndarray,
        spoken: np.ndarray,
        asked: np.ndarray | Sequence[int] | None,
    ) -> None:
        """Start rows `index` [R] from random numbers [R, task.uniforms] and, for the instruction, [R, 2].

        seeds: [R], for the variation; asked: instructions [R], -1 for the sampled ones.
        """
        model = self.model
        layout = self._layout
        count = len(numbers)
        start = self.task.start(numbers)
        state = np.zeros((count, layout.size))
        state[:, layout.qpos] = start.qpos
        self._variation.place(state[:, layout.qpos], seeds)
        if start.qvel is not None:
            state[:, layout.qvel] = start.qvel
        if start.activation is not None:
            state[:, layout.activation] = start.activation
        control = np.zeros((count, model.nu)) if start.control is None else np.array(start.control, dtype=np.float64)
        goal = np.array(start.goal, dtype=np.float64).reshape(count, -1)
        instruction = self._wording.drawn(start.instruction, spoken)
        if asked is not None:
            instruction = self._instructed(np.asarray(asked), instruction)
        sensors = np.zeros((count, 1, model.nsensordata))
        if model.nsensordata:  # the first physics step evaluates its sensors at the state it starts from
            _, sensors = self._simulate(state, control[:, None], 1, seeds)
        observed = self._observe(state[:, None], control[:, None], goal, sensors)
        images = {key: image[:, None] for key, image in self._images(state, goal, seeds).items()}
        own_arrays = {"state": state, "control": control, "goal": goal}
        if self._variation:
            own_arrays[OPTION] = seeds
        if self._wording.then is not None:
            own_arrays["reached"] = np.zeros(count, dtype=bool)
        self._episodes.start(index, {**observed, **images}, instruction=instruction, own=own_arrays)

    def step(self, actions: np.ndarray) -> Step:
        """Run a chunk [B, C, A] in the rows that have not ended; never resets.

        Raises SpecError on a wrong shape or before the first reset, NonFiniteError on non-finite actions or diverged
        physics.
        """
        index = self._episodes.running_index
        actions = np.asarray(actions, dtype=np.float64)
        validate_actions(actions, self.task.action, self._batch_size)
        actions = actions[index]
        if not len(actions):
            return self._episodes.idle(actions.shape[1])
        return self._advance(index, np.clip(actions, self.task.action.low, self.task.action.high))

    def _advance(self, index: slice | np.ndarray, actions: np.ndarray) -> Step:
        """Simulate the rows `index` for a chunk [R, C, A], R >= 1, and write the results into the world's arrays."""
        episodes = self._episodes
        task = self.task
        arrays = self._episodes.arrays
        before, goal = arrays["state"][index], arrays["goal"][index]
        control = task.control(actions, arrays["control"][index])
        seeds = self._seeds(index)
        states, sensors = self._simulate(before, control, self.substeps, seeds)
        self._check(np.arange(self._batch_size)[index], before, states)
        observed = self._observe(states, control, goal, sensors)

        path = episodes.extended_history(index, observed)
        # Potentials [R, C + 1]: the frame before the chunk, then the chunk's own; their differences are the rewards.
        newest = {key: np.ascontiguousarray(value[:, self._history - 1 :]) for key, value in path.items()}
        texts = arrays["instruction"][index]
        reached: np.ndarray | None = None
        if self._wording.then is None:
            instructed = {TASK: self._wording.meant(texts)[:, None]}
            gain = np.diff(task.potential(newest | instructed).astype(np.float64), axis=1)
            success = task.succeeded(observed | instructed)
        else:
            parts = self._wording.meant(texts), self._wording.meant_second(texts)
            gain, success, reached = outcome_of(task, newest, *parts, arrays["reached"][index])
        advanced = episodes.advance(index, success)

        rewards = {"progress": gain * advanced.live, "success": advanced.first.astype(np.float64)}
        trace = episodes.trace(index, observed, advanced.length)
        images = self._image_history(index, states, goal, seeds, advanced.length)
        episodes.update_history(index, path, advanced.length)
        for key, value in images.items():
            arrays[f"history/{key}"][index] = value
        final = (np.arange(len(states)), advanced.length - 1)
        arrays["state"][index] = states[final]
        arrays["control"][index] = control[final]
        if reached is not None:
            arrays["reached"][index] = reached[final]
        spread = {name: episodes.scatter(index, value) for name, value in rewards.items()}
        return episodes.step(trace, spread, episodes.scatter(index, advanced.live))

    # -- physics and observation ---------------------------------------------------------------------------------

    def _require_models(self) -> None:
        """Raise ConfigError when episodes vary in their physics and the engine has one model for all rows."""
        if self._variation.physics_by_episode and not isinstance(self._physics, PhysicsOfModels):
            self.close()
            raise ConfigError(
                f"world.options.physics={self._physics_name} simulates all episodes with one model: give each physical "
                f"factor of world.options.{OPTION} one value instead of a range, or use world.options.physics=native."
            )

    def _seeds(self, index: slice | np.ndarray) -> np.ndarray:
        """Return the seeds [R] of the variation of the rows `index`; zeros without one."""
        if self._variation:
            return self._episodes.arrays[OPTION][index]
        return np.zeros(self._batch_size, dtype=np.int64)[index]

    def _simulate(
        self, state: np.ndarray, control: np.ndarray, every: int, seeds: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Advance [R, nstate] by controls [R, C, nu] of `every` physics steps each; returns states [R, C, nstate],
        sensors [R, C, nsensordata].

        seeds: [R], of the variation.
        Raises ConfigError when the world is closed, SpecError when the physics engine returns other shapes.
        """
        if self._physics is None:
            raise ConfigError("This world is closed: create a new one.")
        if self._variation.physics_by_episode and isinstance(self._physics, PhysicsOfModels):
            states, sensors = self._physics.advance_each(self._variation.models(seeds), state, control, every)
        else:
            states, sensors = self._physics.advance(state, control, every)
        rows = control.shape[:2]
        expected = (*rows, self._layout.size), (*rows, self.model.nsensordata)
        if (states.shape, sensors.shape) != expected:
            raise SpecError(
                f"physics={self._physics_name} returned states {list(states.shape)} and sensors {list(sensors.shape)}, "
                f"expected {list(expected[0])} and {list(expected[1])}."
            )
        return states, sensors

    def _check(self, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Raise an error if the physics stopped a row (MuJoCo then repeats the last state, so its clock is late) or
        returned a non-finite number.

        rows: [R] their indices in the batch; before: [R, nstate]; after: [R, C, nstate]. Raises NonFiniteError.
        """
        elapsed = after[:, -1, 0] - before[:, 0]
        # Half a control step of tolerance: the clock is a sum of rounded timesteps.
        diverged_rows = ~np.isfinite(after).all(axis=(1, 2)) | ~(elapsed > (after.shape[1] - 0.5) / self.task.fps)
        if diverged_rows.any():
            raise NonFiniteError(
                f"The physics of '{self.task.name}' diverged in row(s) {rows[diverged_rows][:5].tolist()}: reset them; "
                f"if it happens again, use a smaller timestep or softer actuators."
            )

    def _observe(
        self, states: np.ndarray, control: np.ndarray, goal: np.ndarray, sensors: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Turn states [R, C, nstate] and sensors [R, C, nsensordata] into observation arrays [R, C, n].

        control: [R, C, nu]; goal: [R, G]. Raises SpecError when the task omits a field or returns another shape.
        """
        layout = self._layout
        readings = Readings(
            qpos=np.ascontiguousarray(states[..., layout.qpos]),
            qvel=np.ascontiguousarray(states[..., layout.qvel]),
            activation=np.ascontiguousarray(states[..., layout.activation]),
            control=control,
            goal=self._goals(goal, states),
            sensors={name: np.ascontiguousarray(sensors[..., part]) for name, part in self._sensors.items()},
        )
        observed = self.task.observe(readings)
        for key, field in self.task.observation.items():
            if key not in observed or observed[key].shape != (*states.shape[:2], *field.shape):
                got = observed[key].shape if key in observed else "nothing"
                raise SpecError(f"Task '{self.task.name}' returned {got} for '{key}', expected [..., *{field.shape}].")
        return {key: observed[key].astype(field.dtype) for key, field in self.task.observation.items()}

    def _goals(self, goal: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Return the current goals of episodes, from goal parameters [R, G] and states [R, C, nstate]: [R, C, G']."""
        if self.task.goal_at is None:
            return np.repeat(goal[:, None], states.shape[1], axis=1)
        return self.task.goal_at(goal, states[..., 0])  # MuJoCo's time; an episode begins at 0

    def _images(self, states: np.ndarray, goal: np.ndarray, seeds: np.ndarray) -> dict[str, np.ndarray]:
        """Render every observation camera for states [R, nstate], goals [R, G] and seeds of the variation [R]; returns
        {} without cameras.
        """
        return {
            IMAGE_PREFIX + camera: self._frames(states, goal, seeds, camera, *size)
            for camera, size in self._sizes.items()
        }

    def _image_history(
        self,
        index: slice | np.ndarray,
        states: np.ndarray,
        goal: np.ndarray,
        seeds: np.ndarray,
        length: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Return the images [R, H, ...] after `length` [R] steps of a chunk, rendering only frames in the history."""
        histories: dict[str, np.ndarray] = {}
        for camera, size in self._sizes.items():

            def draw(
                row: np.ndarray, step: np.ndarray, camera: str = camera, size: tuple[int, int] = size
            ) -> np.ndarray:
                return self._frames(states[row, step], goal[row], seeds[row], camera, *size)

            key = IMAGE_PREFIX + camera
            histories[key] = shift_drawn_window(self._episodes.arrays[f"history/{key}"][index], length, draw)
        return histories

    def _frames(
        self, states: np.ndarray, goal: np.ndarray, seeds: np.ndarray, camera: str, height: int, width: int
    ) -> np.ndarray:
        qpos = states[:, self._layout.qpos]
        markers: Markers | None = None
        if self.task.markers:
            markers = self.task.markers(self._goals(goal, states[:, None])[:, 0])
        return self._renderer.frames(qpos, markers, camera, height, width, self._variation.looks(seeds))

    # -- snapshots and images ----------------------------------------------------------------------------------

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy the full state [R, ...] of `rows`: physics, control, goal, counters, flags and history.

        Raises SpecError on invalid rows and before the first reset.
        """
        return Snapshot(self._episodes.snapshot(rows))

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` with `snapshot`, taken from this or an equal world; returns all rows' observation [B, H,
        ...].

        Raises SpecError when the snapshot does not match the rows and this world.
        """
        self._episodes.restore(snapshot, rows)
        return self._episodes.observation()

    def render(self, rows: Rows = None, camera: str | None = None, height: int = 240, width: int = 240) -> np.ndarray:
        """Return uint8 images [R, height, width, 3]; camera None: the task's first, else MuJoCo's own view.

        Raises ConfigError on an unknown camera, SpecError on invalid rows and before the first reset.
        """
        arrays, index = self._episodes.arrays, self._episodes.index(rows)
        if camera is None:
            camera = self.task.cameras[0] if self.task.cameras else FREE_CAMERA
        elif camera not in self.task.cameras:
            raise ConfigError(
                f"Task '{self.task.name}' has no camera '{camera}'.{did_you_mean(camera, self.task.cameras)}"
            )
        return self._frames(arrays["state"][index], arrays["goal"][index], self._seeds(index), camera, height, width)

    def close(self) -> None:
        """Free threads and render contexts; closing twice is harmless."""
        if self._physics is not None:
            self._physics.close()
            self._physics = None
        self._renderer.close()
