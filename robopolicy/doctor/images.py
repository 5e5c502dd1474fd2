"""Checks of camera images: black, flat or frozen ones by themselves; BGR, flips, mixed-up cameras by the world.

Images are uint8, height x width x 3; differences are in steps of 255.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.finite_values import listed
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE
from robopolicy.core.world import World
from robopolicy.doctor.findings import Finding, Health

BLACK, FLAT, FROZEN = 10, 3.0, 6
"""Brightest value of a black image; spread of a flat one; largest change of a pixel in a frozen episode (codecs)."""
CLOSE = 4.0
"""Mean difference within which images are the same: a codec's loss, another renderer's rounding."""

IMAGES_DIR: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "blue and red are swapped (BGR for RGB)": lambda images: images[..., ::-1],
    "the image is upside down": lambda images: images[..., ::-1, :, :],
    "the image is mirrored left to right": lambda images: images[..., ::-1, :],
    "the image is turned by 180 degrees": lambda images: images[..., ::-1, ::-1, :],
    "blue and red are swapped and the image is upside down": lambda images: images[..., ::-1, :, ::-1],
}
"""What may be wrong with images [..., height, width, 3], and what undoes it."""


def image_check(text: str) -> str:
    """Return the finding's name for a text of IMAGES_DIR."""
    return "image channels" if text.startswith("blue") else "image orientation"


def check_cameras(episodes: Episodes) -> list[Finding]:
    """Look for black, flat and frozen images, camera by camera."""
    return [finding for camera in episodes.cameras for finding in _check_camera(episodes, camera)]


def check_images(episodes: Episodes, world: World) -> list[Finding]:
    """Compare first images of episodes with the world's at the same seeds, or on average where there are no seeds."""
    cameras = [camera for camera in world.spec.cameras if camera in episodes.cameras]
    if not cameras:
        return []
    rows = min(world.batch_size, len(episodes))
    chosen = np.linspace(0, len(episodes) - 1, rows).round().astype(int)
    seeded = episodes.seeds is not None
    seeds = None if episodes.seeds is None else np.resize(episodes.seeds[chosen].cpu().numpy(), world.batch_size)
    observation = world.reset(seeds=seeds)
    frames = episodes.frame_starts[chosen]

    def prepared(images: np.ndarray) -> np.ndarray:
        return images.astype(np.float32) if seeded else images.astype(np.float32).mean(0, keepdims=True)

    shown = {camera: prepared(observation[IMAGE_PREFIX + camera][:rows, -1]) for camera in cameras}
    findings = []
    for camera in cameras:
        recorded = prepared(episodes.observation[IMAGE_PREFIX + camera][frames].cpu().numpy())
        if recorded.shape == shown[camera].shape:
            findings.append(_compare(camera, recorded, shown, seeded))
    return findings


def _check_camera(episodes: Episodes, camera: str) -> list[Finding]:
    check = f"camera '{camera}'"
    images = episodes.observation[IMAGE_PREFIX + camera].cpu()
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
    for bad, what in ((black, "black"), (white, "white"), (flat, "of one colour")):
        if bad.any():
            where = listed([str(index) for index in owner[bad].unique().tolist()])
            text = f"{int(bad.sum())} of {int(final.sum())} images are {what} (episodes {where})"
            remedy = (
                "The camera was covered, unplugged or not exposed (or written as 0 to 1): leave these episodes out."
            )
            findings.append(Finding(check, Health.BAD, text, remedy))
    frozen = [str(index) for index in _frozen(episodes, images) if not (black | white | flat)[owner == index].any()]
    if frozen:
        text = f"the image stands still while the robot moves (episodes {listed(frozen)})"
        remedy = "The camera's stream hung, or one image was written again and again: record these episodes again."
        findings.append(Finding(check, Health.BAD, text, remedy))
    return findings or [Finding(check, Health.GOOD, "images change and show something")]


def _spread(images: Tensor) -> Tensor:
    """Return how much the pixels of each image [n, height, width, 3] differ within a channel, [n]."""
    flat = images.reshape(len(images), -1, 3)
    parts = [part.float().std(1, correction=0).amax(-1) for part in flat.split(256)]
    return torch.cat(parts)


def _frozen(episodes: Episodes, images: Tensor) -> list[int]:
    """Return the episodes in whose later half (or longer) no pixel changes although the state does."""
    keys = [key for key in (STATE, ENVIRONMENT_STATE) if key in episodes.observation]
    found = []
    for index in range(len(episodes)):
        first, length = int(episodes.frame_starts[index]), int(episodes.lengths[index])
        if length < 4:
            continue
        late = slice(first + length // 2, first + length)
        changed = (images[late].short() - images[first + length - 1].short()).abs().amax()
        moved = [
            (values[late].amax(0) - values[late].amin(0)) / values.std(0, correction=0).clamp(min=1e-6)
            for key in keys
            for values in (episodes.observation[key].cpu(),)
        ]
        if int(changed) <= FROZEN and (not moved or float(torch.cat(moved).max()) > 0.5):
            found.append(index)
    return found


def _compare(camera: str, recorded: np.ndarray, shown: Mapping[str, np.ndarray], seeded: bool) -> Finding:
    """Compare images [n, height, width, 3] of one camera with what the world's cameras show."""
    check, error = f"images of '{camera}'", _difference(recorded, shown[camera])
    how = "the same starts" if seeded else "average images"
    tried = {text: _difference(mend(recorded), shown[camera]) for text, mend in IMAGES_DIR.items()}
    tried |= {
        f"it shows what the world's camera '{other}' shows": _difference(recorded, images)
        for other, images in shown.items()
        if other != camera and images.shape == recorded.shape
    }
    best = min(tried, key=lambda text: tried[text])
    if tried[best] < 0.5 * error and error > (0.1 if seeded else CLOSE):
        alike = [text for text in tried if tried[text] < 1.3 * tried[best] + (0.2 if seeded else 1.0)]
        either = "" if len(alike) == 1 else "this data cannot tell which: "
        exact = "" if tried[best] < CLOSE else "most likely, not exactly: "
        amount = f"(difference {error:.1f} of 255, mended {tried[best]:.1f})"
        mixed = best.startswith("it shows")
        remedy = "Rename the cameras." if mixed else "Convert the images, or the camera's driver."
        name = "camera order" if mixed else image_check(best)
        return Finding(name, Health.BAD, f"'{camera}': {either}{exact}{' or '.join(alike)} {amount}", remedy)
    text = f"differ from the world's by {error:.1f} of 255 ({how})"
    if error < CLOSE:
        return Finding(check, Health.GOOD, text)
    if not seeded:
        return Finding(check, Health.UNKNOWN, f"{text}; without seeds they cannot be compared one by one")
    remedy = "Camera pose, light, cropping or the version of the scene differ: compare the images by eye."
    return Finding(check, Health.WARNING, text, remedy)


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).mean())
