"""Checks of camera images: black, flat or frozen ones by themselves; BGR, flips, mixed-up cameras, delays by the world.

Images are uint8, height x width x 3; differences are in steps of 255. Whether images are as late as the state that they
belong to is found by filming the world step by step, compared at every delay. Axes: E episode, T frame.
"""

import itertools
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.finite_values import join_names
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE
from robopolicy.core.world import World
from robopolicy.doctor.findings import Finding, Health

BLACK = 10
"""Maximum brightness of a black image."""
FLAT = 3.0
"""Maximum spread of a flat image."""
FROZEN = 6
"""Maximum change of a pixel in a frozen episode (codecs)."""
STANDS_STILL = "the image is frozen while the robot moves"
STILL = 4
"""Number of consecutive equal images that indicates a frozen camera stream, if the robot moves."""
TWIN = 0.5
"""Mean difference below which two cameras count as the same; codecs change equal images equally."""
NEGATIVE = 0.03
"""Tolerance around a slope of -1, against the world's images, for a negative image."""
CLOSE = 4.0
"""Mean difference within which images count as equal: codec loss, rounding of another renderer."""

IMAGES_DIR: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "blue and red are swapped (BGR instead of RGB)": lambda images: images[..., ::-1],
    "the image is upside down": lambda images: images[..., ::-1, :, :],
    "the image is mirrored horizontally": lambda images: images[..., ::-1, :],
    "the image is rotated by 180 degrees": lambda images: images[..., ::-1, ::-1, :],
    "blue and red are swapped and the image is upside down": lambda images: images[..., ::-1, :, ::-1],
}
"""Possible errors of images [..., height, width, 3], and the function that undoes each."""


def image_check(text: str) -> str:
    """Return the finding's name for an entry of IMAGES_DIR."""
    return "image channels" if text.startswith("blue") else "image orientation"


def check_cameras(episodes: Episodes) -> list[Finding]:
    """Check each camera for black, flat and frozen images and invalid ranges, and all cameras for duplicates."""
    findings = [finding for camera in episodes.cameras for finding in _check_camera(episodes, camera)]
    return [*findings, *_check_twins(episodes)]


def check_images(episodes: Episodes, world: World) -> list[Finding]:
    """Compare first images of episodes with the world's at the same seeds, or their averages if there are no seeds."""
    cameras = [camera for camera in world.spec.cameras if camera in episodes.cameras]
    if not cameras:
        return []
    rows = min(world.batch_size, len(episodes))
    indices = np.linspace(0, len(episodes) - 1, rows).round().astype(int)
    seeded = episodes.seeds is not None
    seeds = None if episodes.seeds is None else np.resize(episodes.seeds[indices].cpu().numpy(), world.batch_size)
    observation = world.reset(seeds=seeds)
    frames = episodes.frame_starts[indices]

    def prepared(images: np.ndarray) -> np.ndarray:
        return images.astype(np.float32) if seeded else images.astype(np.float32).mean(0, keepdims=True)

    world_images = {camera: prepared(observation[IMAGE_PREFIX + camera][:rows, -1]) for camera in cameras}
    findings = []
    for camera in cameras:
        data_images = prepared(episodes.observation[IMAGE_PREFIX + camera][frames].cpu().numpy())
        if data_images.shape == world_images[camera].shape:
            findings.append(_compare(camera, data_images, world_images, seeded))
    return findings


def standing_still(camera: str, episodes: list[str]) -> list[Finding]:
    """Return the finding that a camera was frozen in `episodes`; none if the list is empty."""
    text = f"{STANDS_STILL} (episodes {join_names(episodes)})"
    remedy = "The camera stream froze, or one image was written repeatedly: record these episodes again."
    return [Finding(f"camera '{camera}'", Health.BAD, text, remedy)] if episodes else []


def _check_twins(episodes: Episodes) -> list[Finding]:
    """Check for pairs of cameras with the same images."""
    stride = max(1, episodes.step_count // 64)
    samples = {
        camera: episodes.observation[IMAGE_PREFIX + camera][::stride].cpu().numpy() for camera in episodes.cameras
    }
    twins = [
        f"'{first}' and '{second}'"
        for first, second in itertools.combinations(samples, 2)
        if samples[first].shape == samples[second].shape
        and _difference(samples[first].astype(np.float32), samples[second].astype(np.float32)) < TWIN
    ]
    remedy = "One camera was recorded twice, or both names refer to one device: record again with both cameras."
    return [Finding("camera order", Health.BAD, f"{pair} show the same images", remedy) for pair in twins]


def _check_range(camera: str, images: Tensor) -> list[Finding]:
    """Check for images [n, height, width, 3] that are not bytes from 0 to 255 but normalised network inputs."""
    low, high = float(images.min()), float(images.max())
    remedy = "Store bytes from 0 to 255: multiply by 255 (or undo the normalisation) before converting to uint8."
    if images.dtype != torch.uint8 and high <= 1.0 and low >= -1.0:
        text = f"'{camera}' contains numbers from {'-1' if low < 0 else '0'} to 1 instead of bytes from 0 to 255"
        return [Finding("image range", Health.BAD, text, remedy)]
    if images.dtype != torch.uint8 and low < -1e-3:
        text = (
            f"'{camera}' contains numbers from {low:.3g} to {high:.3g} (normalised by mean and deviation?) instead "
            "of bytes"
        )
        return [Finding("image range", Health.BAD, text, remedy)]
    if high == 1.0:
        text = f"'{camera}' contains only 0 and 1: images from 0 to 1 were converted to bytes without the factor 255"
        return [Finding("image range", Health.BAD, text, remedy)]
    return []


def _check_camera(episodes: Episodes, camera: str) -> list[Finding]:
    check = f"camera '{camera}'"
    images = episodes.observation[IMAGE_PREFIX + camera].cpu()
    if scaled := _check_range(camera, images):
        return scaled
    final = torch.ones(len(images), dtype=torch.bool)
    if episodes.final_known is not None:
        final[(episodes.frame_starts + episodes.lengths).cpu()[~episodes.final_known.cpu()]] = False
    pixels = images.reshape(len(images), -1)
    bright, dark = pixels.amax(1), pixels.amin(1)
    spread = _spread(images)
    black, white = final & (bright <= BLACK), final & (dark >= 255 - BLACK)
    flat = final & (spread < FLAT) & ~black & ~white
    owner = torch.repeat_interleave(torch.arange(len(episodes)), episodes.lengths.cpu() + 1)
    findings = []
    for mask, description in ((black, "black"), (white, "white"), (flat, "of one colour")):
        if mask.any():
            episodes_text = join_names([str(index) for index in owner[mask].unique().tolist()])
            text = f"{int(mask.sum())} of {int(final.sum())} images are {description} (episodes {episodes_text})"
            remedy = (
                "The camera was covered, unplugged or not exposed (or images were written as 0 to 1): exclude "
                "these episodes."
            )
            findings.append(Finding(check, Health.BAD, text, remedy))
    frozen = [str(index) for index in _frozen(episodes, images) if not (black | white | flat)[owner == index].any()]
    findings += standing_still(camera, frozen)
    return findings or [Finding(check, Health.GOOD, "images change and are not blank")]


def _spread(images: Tensor) -> Tensor:
    """Return the standard deviation of each image's pixels [n, height, width, 3], the largest over channels, [n]."""
    flat = images.reshape(len(images), -1, 3)
    parts = [part.float().std(1, correction=0).amax(-1) for part in flat.split(256)]
    return torch.cat(parts)


def _frozen(episodes: Episodes, images: Tensor) -> list[int]:
    """Return the episodes in which no pixel changes for STILL or more frames although the state changes.

    A stream that is frozen only at the start of an episode is delayed, which the image-timing check reports.
    """
    keys = [key for key in (STATE, ENVIRONMENT_STATE) if key in episodes.observation]
    states = [episodes.observation[key].cpu() for key in keys]
    state = torch.cat([values / values.std(0, correction=0).clamp(min=1e-6) for values in states], 1) if keys else None
    frozen_episodes = []
    for index in range(len(episodes)):
        first, length = int(episodes.frame_starts[index]), int(episodes.lengths[index])
        for begin, end in still_runs(images[first : first + length]):
            if begin == 0 and end < length:
                continue
            run = slice(first + begin, first + end)
            state_change = 1.0 if state is None else float((state[run].amax(0) - state[run].amin(0)).max())
            if (
                state_change > 0.5
                and index not in frozen_episodes
                and (state is not None or end - begin >= length // 2)
            ):
                frozen_episodes.append(index)
    return frozen_episodes


def still_runs(images: Tensor) -> list[tuple[int, int]]:
    """Return the runs (first frame, one after the last) of STILL or more images [n, ...] equal to their first."""
    runs, begin = [], 0
    for frame in range(1, len(images) + 1):
        ends = frame == len(images)
        if ends or int((images[frame].short() - images[begin].short()).abs().amax()) > FROZEN:
            if frame - begin >= STILL:
                runs.append((begin, frame))
            begin = frame
    return runs


def _compare(camera: str, recorded: np.ndarray, shown: Mapping[str, np.ndarray], seeded: bool) -> Finding:
    """Compare images [n, height, width, 3] of one camera with the images of the world's cameras."""
    check, error = f"images of '{camera}'", _difference(recorded, shown[camera])
    basis = "same initial states" if seeded else "average images"
    errors = {text: _difference(mend(recorded), shown[camera]) for text, mend in IMAGES_DIR.items()}
    errors |= {
        f"it shows the view of the world's camera '{other}'": _difference(recorded, images)
        for other, images in shown.items()
        if other != camera and images.shape == recorded.shape
    }
    best = min(errors, key=lambda text: errors[text])
    if errors[best] < 0.5 * error and error > (0.1 if seeded else CLOSE):
        candidates = [text for text in errors if errors[text] < 1.3 * errors[best] + (0.2 if seeded else 1.0)]
        either = "" if len(candidates) == 1 else "not distinguishable with this data: "
        exact = "" if errors[best] < CLOSE else "most likely, but not exactly: "
        amount = f"(difference {error:.1f} of 255, after the fix {errors[best]:.1f})"
        mixed = best.startswith("it shows")
        remedy = "Rename the cameras." if mixed else "Convert the images, or fix the camera's driver."
        name = "camera order" if mixed else image_check(best)
        return Finding(name, Health.BAD, f"'{camera}': {either}{exact}{' or '.join(candidates)} {amount}", remedy)
    text = f"differ from the world's by {error:.1f} of 255 ({basis})"
    if error < CLOSE:
        return Finding(check, Health.GOOD, text)
    slope, offset, residual = _line(shown[camera], recorded)
    if residual < max(CLOSE, 0.1 * error) and abs(slope + 1) < NEGATIVE:
        text = f"'{camera}' is a negative (255 minus the world's values): bytes were multiplied by 255 and overflowed"
        remedy = "Multiply only images from 0 to 1 by 255; leave bytes unchanged."
        return Finding("image range", Health.BAD, text, remedy)
    if residual < 0.25 * error and slope > 0:
        text = f"{text}: brightness and contrast differ: {slope:.2g} times the world's values {offset:+.0f}"
    if not seeded:
        return Finding(check, Health.UNKNOWN, f"{text}; without seeds they cannot be compared image by image")
    remedy = "Camera pose, light, cropping or the version of the scene differ: compare the images visually."
    return Finding(check, Health.WARNING, text, remedy)


def _line(shown: np.ndarray, recorded: np.ndarray) -> tuple[float, float, float]:
    """Fit recorded = slope shown + offset over all values; return slope, offset and the remaining mean difference."""
    x, y = shown.reshape(-1), recorded.reshape(-1)
    centred = x - x.mean()
    slope = float((centred * y).mean() / max(float((centred**2).mean()), 1e-9))
    offset = float(y.mean() - slope * x.mean())
    return slope, offset, float(np.abs(slope * x + offset - y).mean())


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).mean())


FRAMES, LATEST = 20, 8
"""Number of frames rendered per episode, and maximum number of frames that images may lag or lead."""
MOVING, OFF = 20, 5.0
"""Change of a pixel, in steps of 255, that counts as motion, and mean difference there that needs an explanation."""
ENOUGH = 8
"""Minimum number of comparable images, over all episodes, at a delay."""
EXPLAINED = 0.5
"""Maximum fraction of that difference that remains after correcting a delay."""


def check_image_timing(episodes: Episodes, world: World, known_faults: Collection[Finding] = ()) -> list[Finding]:
    """Replay recorded actions step by step and find cameras whose images lag, lead or freeze relative to the states.

    The replay must follow the recording, otherwise images differ for another reason. known_faults: findings on the
    images; frozen cameras are not checked for delays, cameras with other faults are skipped.
    """
    hanging = {item.check for item in known_faults if item.problem and item.measured.startswith(STANDS_STILL)}
    faulty = {item.check for item in known_faults if item.problem} - hanging
    cameras = [camera for camera in world.spec.cameras if camera in episodes.cameras]
    cameras = [camera for camera in cameras if f"camera '{camera}'" not in faulty]
    if not cameras or episodes.seeds is None:
        return []
    rows = min(world.batch_size, len(episodes))
    indices = np.linspace(0, len(episodes) - 1, rows).round().astype(int)
    world_images, lengths = _filmed(episodes, world, cameras, indices)
    findings = []
    for camera in cameras:
        data_images = episodes.observation[IMAGE_PREFIX + camera].cpu().numpy()
        time = np.minimum(np.arange(world_images[camera].shape[1]), lengths[:, None])
        frames = data_images[episodes.frame_starts.cpu().numpy()[indices][:, None] + time]
        if frames.shape == world_images[camera].shape:
            valid = np.arange(time.shape[1]) <= lengths[:, None]
            hangs = f"camera '{camera}'" in hanging
            timing = [] if hangs else _compare_delays(camera, frames.astype(np.float32), world_images[camera], valid)
            if not any(finding.problem for finding in timing):
                timing += standing_still(
                    camera, [str(indices[row]) for row in _hanging(frames, world_images[camera], lengths)]
                )
            findings += timing
    return findings


def _filmed(
    episodes: Episodes, world: World, cameras: list[str], chosen: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the rendered images of episodes `chosen`, [E, T, height, width, 3], and the number of valid frames [E]."""
    lengths = np.minimum(episodes.lengths.cpu().numpy()[chosen], FRAMES - 1)
    seeds = np.resize(np.asarray(episodes.seeds)[chosen], world.batch_size)
    starts, actions = episodes.starts.cpu().numpy()[chosen], episodes.actions.cpu().double().numpy()
    observation = world.reset(seeds=seeds)
    images_of_camera = {camera: [observation[IMAGE_PREFIX + camera][: len(chosen), -1].copy()] for camera in cameras}
    for step in range(int(lengths.max())):
        part = np.zeros((world.batch_size, 1, actions.shape[-1]))
        part[: len(chosen), 0] = actions[starts + np.minimum(step, lengths - 1)]
        observation = world.step(part).observation
        for camera in cameras:
            images_of_camera[camera].append(observation[IMAGE_PREFIX + camera][: len(chosen), -1].copy())
    return {camera: np.stack(images, 1).astype(np.float32) for camera, images in images_of_camera.items()}, lengths


def _hanging(recorded: np.ndarray, shown: np.ndarray, lengths: np.ndarray) -> list[int]:
    """Return the rows in which recorded images [E, T, ...] are frozen for some frames while the world's are not."""
    return [
        row
        for row, length in enumerate(lengths)
        if any(
            np.ptp(shown[row, begin:end], axis=0).max() > MOVING
            for begin, end in still_runs(torch.from_numpy(recorded[row, : length + 1]))
        )
    ]


def _compare_delays(camera: str, recorded: np.ndarray, shown: np.ndarray, known: np.ndarray) -> list[Finding]:
    """Compare images [E, T, height, width, 3] in regions of motion; known: [E, T] bool."""
    moving = (np.ptp(shown, axis=1).max(-1) > MOVING)[:, None, ..., None] & known[:, :, None, None, None]
    moving = np.broadcast_to(moving, shown.shape)
    if shown.shape[1] < 4 or not moving.any():
        return [Finding("image timing", Health.UNKNOWN, f"'{camera}' shows no motion")]
    time = np.arange(shown.shape[1])
    error: dict[int, tuple[float, float]] = {}
    for delay in range(-LATEST, LATEST + 1):
        # Of late images only those count that are not the first one again, of early ones those that the film reaches.
        comparable = (time > delay if delay > 0 else time < len(time) + delay) & known
        region = moving & comparable[..., None, None, None]
        if comparable.sum() >= ENOUGH and region.any():
            then = shown[:, np.clip(time - delay, 0, len(time) - 1)]
            shifted_error, plain_error = (float(np.abs(recorded - film)[region].mean()) for film in (then, shown))
            error[delay] = shifted_error, plain_error
    best = min(error, key=lambda delay: error[delay][0], default=0)
    if best == 0 or error[best][1] < OFF or error[best][0] > EXPLAINED * error[best][1]:
        return [Finding("image timing", Health.GOOD, f"the images of '{camera}' are synchronous with the state")]
    count, way = abs(best), "late" if best > 0 else "early"
    text = (
        f"'{camera}' is {count} {'frame' if count == 1 else 'frames'} {way} relative to the state (difference in "
        f"moving areas {error[best][1]:.1f} of 255, after the fix {error[best][0]:.1f})"
    )
    remedy = "Match images and states by capture time, or delay the states on the robot by the same amount."
    return [Finding("image timing", Health.BAD, text, remedy)]
