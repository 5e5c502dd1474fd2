"""Are images as late as the state that they belong to? The world is filmed step by step, and compared at every delay.

Axes: E episode, T frame.
"""

from collections.abc import Collection

import numpy as np
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.core.world import World
from robopolicy.doctor.findings import Finding, Health
from robopolicy.doctor.images import STANDS_STILL, standing_still, still_runs

FRAMES, LATEST = 20, 8
"""Frames of each episode that are filmed, and by how many images may be late or early."""
MOVING, OFF = 20, 5.0
"""Steps of 255 that a pixel changes by where something moves, and mean difference there that needs a reason."""
ENOUGH = 8
"""Images of all episodes together that must be comparable at a delay."""
EXPLAINED = 0.5
"""Share of that difference which a delay may leave."""


def check_image_timing(episodes: Episodes, world: World, known_faults: Collection[Finding] = ()) -> list[Finding]:
    """Play recorded actions step by step and find cameras whose images are late or early against the states, or hang.

    The replay must follow the recording, else the images differ for another reason. known_faults: of the images;
    cameras that hang are not looked at for delays, black ones and the like for nothing.
    """
    hanging = {item.check for item in known_faults if item.problem and item.measured.startswith(STANDS_STILL)}
    spoiled = {item.check for item in known_faults if item.problem} - hanging
    cameras = [camera for camera in world.spec.cameras if camera in episodes.cameras]
    cameras = [camera for camera in cameras if f"camera '{camera}'" not in spoiled]
    if not cameras or episodes.seeds is None:
        return []
    rows = min(world.batch_size, len(episodes))
    chosen = np.linspace(0, len(episodes) - 1, rows).round().astype(int)
    shown, lengths = _filmed(episodes, world, cameras, chosen)
    findings = []
    for camera in cameras:
        recorded = episodes.observation[IMAGE_PREFIX + camera].cpu().numpy()
        time = np.minimum(np.arange(shown[camera].shape[1]), lengths[:, None])
        frames = recorded[episodes.frame_starts.cpu().numpy()[chosen][:, None] + time]
        if frames.shape == shown[camera].shape:
            known = np.arange(time.shape[1]) <= lengths[:, None]
            hangs = f"camera '{camera}'" in hanging
            timing = [] if hangs else _compare(camera, frames.astype(np.float32), shown[camera], known)
            if not any(finding.problem for finding in timing):
                timing += standing_still(camera, [str(chosen[row]) for row in _hanging(frames, shown[camera], lengths)])
            findings += timing
    return findings


def _filmed(
    episodes: Episodes, world: World, cameras: list[str], chosen: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return what the cameras show of episodes `chosen`, [E, T, height, width, 3], and how many frames count, [E]."""
    lengths = np.minimum(episodes.lengths.cpu().numpy()[chosen], FRAMES - 1)
    seeds = np.resize(np.asarray(episodes.seeds)[chosen], world.batch_size)
    starts, actions = episodes.starts.cpu().numpy()[chosen], episodes.actions.cpu().double().numpy()
    observation = world.reset(seeds=seeds)
    taken = {camera: [observation[IMAGE_PREFIX + camera][: len(chosen), -1].copy()] for camera in cameras}
    for step in range(int(lengths.max())):
        part = np.zeros((world.batch_size, 1, actions.shape[-1]))
        part[: len(chosen), 0] = actions[starts + np.minimum(step, lengths - 1)]
        observation = world.step(part).observation
        for camera in cameras:
            taken[camera].append(observation[IMAGE_PREFIX + camera][: len(chosen), -1].copy())
    return {camera: np.stack(images, 1).astype(np.float32) for camera, images in taken.items()}, lengths


def _hanging(recorded: np.ndarray, shown: np.ndarray, lengths: np.ndarray) -> list[int]:
    """Return the rows in which recorded images [E, T, ...] stand still for some frames and the world's do not."""
    return [
        row
        for row, length in enumerate(lengths)
        if any(
            np.ptp(shown[row, begin:end], axis=0).max() > MOVING
            for begin, end in still_runs(torch.from_numpy(recorded[row, : length + 1]))
        )
    ]


def _compare(camera: str, recorded: np.ndarray, shown: np.ndarray, known: np.ndarray) -> list[Finding]:
    """Compare images [E, T, height, width, 3] where something moves; known: [E, T] bool."""
    moving = (np.ptp(shown, axis=1).max(-1) > MOVING)[:, None, ..., None] & known[:, :, None, None, None]
    moving = np.broadcast_to(moving, shown.shape)
    if shown.shape[1] < 4 or not moving.any():
        return [Finding("image timing", Health.UNKNOWN, f"'{camera}' sees nothing that moves")]
    time = np.arange(shown.shape[1])
    error: dict[int, tuple[float, float]] = {}
    for delay in range(-LATEST, LATEST + 1):
        # Of late images only those count that are not the first one again, of early ones those that the film reaches.
        inside = (time > delay if delay > 0 else time < len(time) + delay) & known
        where = moving & inside[..., None, None, None]
        if inside.sum() >= ENOUGH and where.any():
            then = shown[:, np.clip(time - delay, 0, len(time) - 1)]
            mended, plain = (float(np.abs(recorded - film)[where].mean()) for film in (then, shown))
            error[delay] = mended, plain
    best = min(error, key=lambda delay: error[delay][0], default=0)
    if best == 0 or error[best][1] < OFF or error[best][0] > EXPLAINED * error[best][1]:
        return [Finding("image timing", Health.GOOD, f"'{camera}' shows what moves when it moves")]
    count, way = abs(best), "late" if best > 0 else "early"
    text = (
        f"'{camera}' is {count} {'frame' if count == 1 else 'frames'} {way} against the state (difference where "
        f"something moves {error[best][1]:.1f} of 255, mended {error[best][0]:.1f})"
    )
    remedy = "Match images and states by the time they were taken at, or delay the states on the robot alike."
    return [Finding("image timing", Health.BAD, text, remedy)]
