"""`PushTWorld`: the original Push-T (Chi et al. 2023, as packaged in gym-pusht) as a world of its own.

A round pusher moves a T onto its outline from anywhere on the board; success is 95 % coverage. Starts, dynamics,
actions and images are gym-pusht's; `sims.tasks.push_t` is another, easier task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from robopolicy.core.episode_rows import EpisodeRows
from robopolicy.core.errors import CameraError, ConfigError, SpecError, did_you_mean
from robopolicy.core.history import shift_drawn_window
from robopolicy.core.randomness import numpy_generator
from robopolicy.core.registry import require_types
from robopolicy.core.spec import (
    ENVIRONMENT_STATE,
    IMAGE_PREFIX,
    STATE,
    Field,
    ImageSize,
    Observation,
    WorldSpec,
    image_fields,
    image_sizes,
    validate_actions,
)
from robopolicy.core.world import Controller, Rows, Snapshot, Step
from sims.suites.pusht_board import BOARD, CORNERS, GOAL, MARKS, Board, Painter, coverage, official_start, points_of

HORIZON, FPS = 300, 10.0
THRESHOLD = 0.95
CAMERA, IMAGE_SIZE = "top", (96, 96)
STATE_FIELD = Field((2,), unit="px", names=("agent_x", "agent_y"))
POSE_FIELD = Field((3,), unit="px, px, rad", names=("block_x", "block_y", "block_angle"))
ACTIONS = {
    "target": Field((2,), low=0.0, high=BOARD, unit="px", names=("target_x", "target_y")),
    "offset": Field((2,), low=-64.0, high=64.0, unit="px", names=("offset_x", "offset_y")),
}
OBSERVATIONS = (*MARKS, "state", "agent")


class PushTWorld:
    """The original Push-T, with snapshots and rendering.

    batch_size: rows B; seed: of the generator of episode seeds when `reset` is given none; history: H frames;
    observation: what `observation.environment_state` shows besides the agent's position in `observation.state`:
    "keypoints" (`POINTS`, [18]), "corners" (`CORNERS`, [16]), "state" (the T's x, y and angle from 0 to 2 pi), "agent"
    (nothing, for images); actions: "target", positions for the pusher as published, or "offset", relative to its
    present position; cameras, image_size: () or ("top",), 96 pixels by default; horizon: control steps;
    starts: see `official_start`; terminate_on_success: False continues an episode to its time limit; reward_scale: of
    the progress, which is the increase of min(coverage / 0.95, 1) less the mean distance of the T's corners from their
    goals in units of 100 px. Each step's `benchmark_score` is the published one, the largest min(coverage / 0.95, 1) of
    the episode. `reset` options: "state" [R, 5], numbers to start from. Raises ConfigError without the
    extra `pusht` and on an unknown observation or start, CameraError on an unknown camera.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        history: int = 1,
        observation: str = "keypoints",
        cameras: Sequence[str] = (),
        image_size: ImageSize | None = None,
        horizon: int = HORIZON,
        actions: str = "target",
        starts: str = "gym_pusht",
        terminate_on_success: bool = True,
        reward_scale: float = 2.0,
    ):
        arguments = {name: value for name, value in locals().items() if name != "batch_size"}
        require_types(PushTWorld, arguments, "world.options.")
        if observation not in OBSERVATIONS:
            raise ConfigError(f"world.options.observation={observation} must be one of {', '.join(OBSERVATIONS)}.")
        for camera in cameras:
            if camera != CAMERA:
                raise CameraError(f"Push-T has no camera '{camera}'.{did_you_mean(camera, [CAMERA])}", [CAMERA])
        if actions not in ACTIONS:
            raise ConfigError(f"world.options.actions={actions} must be one of {', '.join(ACTIONS)}.")
        official_start(0, starts)
        self._observation, self._starts = observation, starts
        self._scale, self._offsets = reward_scale, actions == "offset"
        self._sizes = image_sizes(cameras, image_size, dict.fromkeys(cameras, IMAGE_SIZE))
        fields = {STATE: STATE_FIELD}
        if observation in MARKS:
            count = len(MARKS[observation])
            names = tuple(f"point_{axis}{number}" for number in range(count) for axis in "xy")
            fields[ENVIRONMENT_STATE] = Field((2 * count,), unit="px", names=names)
        elif observation == "state":
            fields[ENVIRONMENT_STATE] = POSE_FIELD
        self._spec = WorldSpec(
            name="pusht",
            observation={**fields, **image_fields(self._sizes)},
            action=ACTIONS[actions],
            fps=FPS,
            horizon=horizon,
            history=history,
            rewards=("progress", "success"),
            instructions=("push the T onto its outline",),
            success=f"The T covers more than {THRESHOLD:.0%} of its outline.",
            terminate_on_success=terminate_on_success,
        )
        generator = numpy_generator(seed, "sims/pusht/episode_seeds")
        self._episodes = EpisodeRows(self._spec, batch_size, lambda count: generator.integers(0, 2**31, size=count))
        self._boards = [Board() for _ in range(batch_size)]
        self._painter: Painter | None = None

    @property
    def spec(self) -> WorldSpec:
        """Fields, ranges, rates and texts."""
        return self._spec

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return len(self._boards)

    @property
    def available_cameras(self) -> dict[str, str]:
        """Name -> description of the camera's view."""
        return {CAMERA: "the whole board, rendered at any size"}

    @staticmethod
    def expert(spec: WorldSpec) -> Controller:
        """Return the scripted expert; it reads every observation but "agent"."""
        from sims.suites.controllers.pusht import PushTOriginalExpert

        return PushTOriginalExpert(spec)

    # -- episodes ------------------------------------------------------------------------------------------------

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | np.ndarray | None = None, options: Mapping | None = None
    ) -> Observation:
        """Start new episodes in `rows`, the first time in every row. Returns all rows' observation [B, H, ...].

        options: see the class. Raises ConfigError on an unknown option, SpecError on invalid rows, seeds or states.
        """
        options = dict(options or {})
        given = options.pop("state", None)
        if options:
            raise ConfigError(f"Unknown reset option '{next(iter(options))}': Push-T has the option 'state'.")
        index, seeds = self._episodes.reset_rows(rows, seeds)
        starts = [official_start(int(seed), self._starts) for seed in seeds] if given is None else given
        numbers = np.array(starts, dtype=np.float64).reshape(-1, 5)
        if len(numbers) != len(index):
            raise SpecError(f"state has {len(numbers)} row(s), expected [{len(index)}, 5].")
        poses = np.array([self._boards[row].start(each) for row, each in zip(index, numbers, strict=True)])
        poses = poses.reshape(-1, 5)
        played = np.zeros((len(index), self._spec.horizon, 2))
        own = {"start": numbers, "actions": played, "pose": poses, "best": np.zeros(len(index))}
        images = {key: image[:, None] for key, image in self._images(poses).items()}
        self._episodes.start(index, {**self._observe(poses[:, None]), **images}, own=own)
        return self._episodes.observation()

    def step(self, actions: np.ndarray) -> Step:
        """Execute a chunk [B, C, 2] of actions, clipped to their bounds, in the rows that have not ended.

        Raises SpecError on a wrong shape or before the first reset, NonFiniteError on non-finite actions.
        """
        episodes, spec = self._episodes, self._spec
        arrays, index = episodes.arrays, episodes.running_index
        running = np.arange(self.batch_size)[index]
        actions = np.asarray(actions, dtype=np.float64)
        validate_actions(actions, spec.action, self.batch_size)
        if not len(running):
            return self._scored(episodes.idle(actions.shape[1]))
        actions = np.clip(actions[index], spec.action.low, spec.action.high)
        poses = np.stack(
            [self._boards[row].advance(each, self._offsets) for row, each in zip(running, actions, strict=True)]
        )
        path = np.concatenate([arrays["pose"][index, None], poses], axis=1)[..., 2:]
        covered = coverage(path)
        counts = arrays["steps"][index].copy()
        advanced = episodes.advance(index, covered[:, 1:] > THRESHOLD)
        for row, count, length, each in zip(running, counts, advanced.length, actions, strict=True):
            arrays["actions"][row, count : count + length] = each[:length]
        arrays["pose"][index] = poses[np.arange(len(running)), advanced.length - 1]
        best = np.where(advanced.live, covered[:, 1:], 0.0).max(axis=1)
        arrays["best"][index] = np.maximum(arrays["best"][index], best)
        progress = np.diff(self._potential(path, covered), axis=1) * advanced.live
        observed = self._observe(poses)
        trace = episodes.trace(index, observed, advanced.length)
        episodes.update_history(index, episodes.extended_history(index, observed), advanced.length)
        self._update_images(index, poses, advanced.length)
        rewards = {"progress": progress, "success": 1.0 * advanced.first}
        spread = {name: episodes.scatter(index, value) for name, value in rewards.items()}
        return self._scored(episodes.step(trace, spread, episodes.scatter(index, advanced.live)))

    def _scored(self, step: Step) -> Step:
        """Return the step with the published score of every episode so far: its largest min(coverage / 0.95, 1)."""
        return replace(step, benchmark_score=np.minimum(self._episodes.arrays["best"] / THRESHOLD, 1.0))

    def _potential(self, path: np.ndarray, covered: np.ndarray) -> np.ndarray:
        """Return the potential whose increase is the progress reward: poses [..., 3], coverage [...] -> [...]."""
        offset = points_of(path, CORNERS) - points_of(np.array(GOAL), CORNERS)
        distance = np.sqrt((offset**2).sum(axis=-1)).mean(axis=-1)
        return self._scale * (np.minimum(covered / THRESHOLD, 1.0) - distance / 100.0)

    def _observe(self, poses: np.ndarray) -> dict[str, np.ndarray]:
        """Turn poses [R, C, 5] into observation arrays [R, C, n]."""
        observed = {STATE: poses[..., :2].astype(np.float32)}
        if self._observation in MARKS:
            points = points_of(poses[..., 2:], MARKS[self._observation])
            observed[ENVIRONMENT_STATE] = points.reshape(*poses.shape[:2], -1).astype(np.float32)
        elif self._observation == "state":
            wrapped = np.concatenate([poses[..., 2:4], poses[..., 4:] % (2 * np.pi)], axis=-1)
            observed[ENVIRONMENT_STATE] = wrapped.astype(np.float32)
        return observed

    # -- snapshots and images ------------------------------------------------------------------------------------

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy the state [R, ...] of `rows`: their starts and actions, from which `restore` plays them again.

        Raises SpecError on invalid rows and before the first reset.
        """
        return Snapshot(self._episodes.snapshot(rows))

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` with `snapshot`, taken from this or an equal world; returns all rows' observation [B, H,
        ...]. Playing an episode again takes some 40 microseconds per control step.

        Raises SpecError when the snapshot does not match the rows and this world.
        """
        arrays = self._episodes.arrays
        for row in self._episodes.restore(snapshot, rows):
            self._boards[row].start(arrays["start"][row])
            self._boards[row].advance(arrays["actions"][row, : arrays["steps"][row]], self._offsets)
        return self._episodes.observation()

    def render(self, rows: Rows = None, camera: str | None = None, height: int = 240, width: int = 240) -> np.ndarray:
        """Return uint8 images [R, height, width, 3] of the board.

        Raises ConfigError on an unknown camera, SpecError on invalid rows and before the first reset.
        """
        if camera not in (None, CAMERA):
            raise ConfigError(f"Push-T has no camera '{camera}'.{did_you_mean(camera, [CAMERA])}")
        poses = self._episodes.arrays["pose"][self._episodes.index(rows)]
        return self._frames(poses, height, width)

    def _frames(self, poses: np.ndarray, height: int, width: int) -> np.ndarray:
        """Draw poses [R, 5] as uint8 [R, height, width, 3]."""
        self._painter = self._painter or Painter()
        images = [self._painter.image(pose, height, width) for pose in poses]
        return np.array(images, dtype=np.uint8).reshape(len(poses), height, width, 3)

    def _images(self, poses: np.ndarray) -> dict[str, np.ndarray]:
        """Draw poses [R, 5] for every observation camera; {} without cameras."""
        return {IMAGE_PREFIX + camera: self._frames(poses, *size) for camera, size in self._sizes.items()}

    def _update_images(self, index: slice | np.ndarray, poses: np.ndarray, length: np.ndarray) -> None:
        """Append the chunk's images, poses [R, C, 5] of which `length` [R] count, drawing only what is kept."""
        for camera, size in self._sizes.items():

            def draw(row: np.ndarray, step: np.ndarray, size: tuple[int, int] = size) -> np.ndarray:
                return self._frames(poses[row, step], *size)

            images = self._episodes.arrays[f"history/{IMAGE_PREFIX}{camera}"]
            images[index] = shift_drawn_window(images[index], length, draw)

    def close(self) -> None:
        """Release the drawing surface; closing twice is harmless."""
        self._painter = None
