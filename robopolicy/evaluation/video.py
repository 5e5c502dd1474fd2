"""Rollout videos: a grid of seeded episodes, each framed by its outcome, of one policy or two side by side.

The policy acts once per chunk, as in evaluation, and every control step becomes a frame, so videos play in real time.
The outcome is shown by colour and by a sign, for colour-blind viewers. In worlds with several instructions, each
episode's instruction is written below it.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.machine import usable_threads
from robopolicy.core.policy import Policy
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.core.storage import storage_errors, write_atomic
from robopolicy.core.world import Controller, Renders, Step, World
from robopolicy.evaluation.episode_batches import episode_batches, play_episode_batch

BACKGROUND = (22, 27, 34)
TEXT = (230, 234, 240)
MUTED = (140, 148, 160)
RUNNING = (74, 82, 94)
SUCCESS = (0, 166, 125)
FAILURE = (222, 99, 12)
BORDER = 3
GAP = 6
CAPTION = 18
LINE = 14
TITLE = 26


@dataclass(frozen=True)
class Clip:
    """A video in memory. frames: [T, height, width, 3] uint8; fps: frames per second; success: [n] bool per cell."""

    frames: np.ndarray
    fps: float
    success: np.ndarray

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.frames) / self.fps


@dataclass
class _Cell:
    """One episode of the video: its images, instruction, end and outcome."""

    images: list[np.ndarray]
    instruction: str = ""
    success: bool = False
    ended: bool = False


def record_grid(
    world: World,
    policy: Policy | Controller,
    seeds: Sequence[int] | np.ndarray,
    *,
    columns: int = 4,
    camera: str | None = None,
    size: int = 160,
    label: str = "",
    every: int = 1,
    hold_seconds: float = 1.0,
    deterministic: bool = True,
    generator_seed: int = 0,
    device: torch.device | str = "cpu",
) -> Clip:
    """Record one episode per seed as a grid with `columns` cells per row.

    size: cell height and width in pixels; label: title above the grid; every: keep each n-th control step (the video
    still plays in real time); hold_seconds: duration of the last frame. The rest is as in `evaluate_policy`; with its
    seeds the outcomes are the same. Raises ConfigError when the world cannot be rendered.
    """
    if not isinstance(world, Renders):
        raise ConfigError(f"The world '{world.spec.name}' cannot be rendered: record videos in a simulator.")
    seeds = np.asarray(seeds, dtype=np.int64)
    if len(seeds) == 0 or columns < 1 or every < 1 or size < 16:
        raise ConfigError("A video needs seeds, columns >= 1, every >= 1 and size >= 16 pixels.")
    cells = [_Cell([]) for _ in seeds]
    for index in episode_batches(seeds, world.batch_size):
        wave = play_episode_batch(
            world,
            policy,
            seeds[index],
            generator_seed,
            deterministic=deterministic,
            device=device,
            after_step=_film(world, [cells[i] for i in index], camera, size, every),
        )
        if len(world.spec.instructions) > 1:
            for place, instruction in zip(index, wave.instructions, strict=True):
                cells[place].instruction = instruction
    fps = world.spec.fps / every
    length = max(len(cell.images) for cell in cells)
    frames = [_compose(cells, time, columns, label) for time in range(length)]
    frames += [frames[-1]] * round(hold_seconds * fps)
    return Clip(np.stack(frames), fps, np.array([cell.success for cell in cells]))


def beside(left: Clip, right: Clip) -> Clip:
    """Put two clips next to each other (base | tuned); the shorter one repeats its last frame."""
    if left.fps != right.fps:
        raise DataError(f"Clips at {left.fps:g} and {right.fps:g} frames per second cannot be joined.")
    length = max(len(left.frames), len(right.frames))
    height = max(left.frames.shape[1], right.frames.shape[1])
    parts = []
    for clip in (left, right):
        time, padding = length - len(clip.frames), height - clip.frames.shape[1]
        extended = np.concatenate([clip.frames, np.repeat(clip.frames[-1:], time, axis=0)])
        parts.append(_pad(extended, bottom=padding, right=0))
    gap = np.full((length, height, 2 * GAP, 3), BACKGROUND, dtype=np.uint8)
    return Clip(
        np.concatenate([parts[0], gap, parts[1]], axis=2), left.fps, np.concatenate([left.success, right.success])
    )


def above(real: Mapping[str, np.ndarray], imagined: Mapping[str, np.ndarray], fps: float, size: int = 128) -> Clip:
    """Put recorded images above imagined ones, one pair of rows per camera and one column per episode.

    real, imagined: camera key -> [R, T, height, width, 3] uint8; size: width of a cell in pixels.
    """
    bands = []
    for key, images in real.items():
        name = key.removeprefix(IMAGE_PREFIX)
        for text, frames in ((f"{name}, real", images), (f"{name}, imagined", imagined[key])):
            factor = max(1, size // frames.shape[3])
            cells = frames.repeat(factor, 2).repeat(factor, 3)
            count, length, height, width, _ = cells.shape
            gapped = np.empty((count, length, height + GAP, width + GAP, 3), dtype=np.uint8)
            gapped[:] = BACKGROUND
            gapped[:, :, :height, GAP:] = cells
            bands.append(_titled(np.concatenate(list(gapped), axis=2), text))
    width = max(band.shape[2] for band in bands)
    frames = np.concatenate([_pad(band, bottom=0, right=width - band.shape[2]) for band in bands], axis=1)
    return Clip(frames, fps, np.zeros(0, dtype=bool))


def mp4_bytes(clip: Clip) -> bytes:
    """Encode as H.264 with 4:2:0 colour and the index in front, which plays in every browser."""
    import imageio.v2 as imageio

    _, height, width, _ = clip.frames.shape
    frames = _pad(clip.frames, bottom=height % 2, right=width % 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        options = {"codec": "libx264", "quality": 7, "macro_block_size": 2, "pixelformat": "yuv420p"}
        output = ["-movflags", "+faststart", "-threads", str(usable_threads())]
        with storage_errors(path):
            imageio.mimwrite(path, list(frames), fps=clip.fps, output_params=output, **options)
        return path.read_bytes()


def gif_bytes(clip: Clip, fps: float = 12.5, width: int | None = None) -> bytes:
    """Encode as a looping GIF of at most `fps` frames per second, scaled down to `width` pixels if given."""
    stride = max(1, round(clip.fps / fps))
    frames = clip.frames[::-1][::stride][::-1]  # counted from the end, so that the last frame is always shown
    images = [Image.fromarray(frame) for frame in frames]
    if width is not None and width < images[0].width:
        size = (width, round(images[0].height * width / images[0].width))
        images = [image.resize(size, Image.Resampling.LANCZOS) for image in images]
    sample = Image.fromarray(np.concatenate([np.asarray(image) for image in images[:: max(1, len(images) // 4)]]))
    palette = sample.quantize(256, method=Image.Quantize.MEDIANCUT)
    indexed = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    # GIF delays are hundredths of a second: round the times, not each delay, so that the clip keeps its length
    times = [10 * round(100 * index * stride / clip.fps) for index in range(len(images) + 1)]
    delays = [max(20, after - before) for before, after in pairwise(times)]
    buffer = BytesIO()
    indexed[0].save(buffer, "GIF", save_all=True, append_images=indexed[1:], duration=delays, loop=0)
    return buffer.getvalue()


def write_video(clip: Clip, path: Path) -> None:
    """Write `path` atomically as .mp4 or .gif, according to its suffix."""
    encoders = {".mp4": mp4_bytes, ".gif": gif_bytes}
    path = Path(path)
    if path.suffix not in encoders:
        raise ConfigError(f"Videos are written as .mp4 or .gif, not as '{path.suffix}'.")
    write_atomic(path, encoders[path.suffix](clip))


def _film(
    world: Renders, cells: list[_Cell], camera: str | None, size: int, every: int
) -> Callable[[Step | None], None]:
    """Return a callback that records a batch of episodes into `cells`; it is called after the reset and every control
    step.
    """
    steps = 0

    def after_step(step: Step | None) -> None:
        nonlocal steps
        live = [row for row, cell in enumerate(cells) if not cell.ended]
        if step is not None:
            steps += 1
            for row in live:
                cells[row].ended, cells[row].success = bool(step.ended[row]), bool(step.success[row])
        rows_to_render = [row for row in live if steps % every == 0 or cells[row].ended]
        if rows_to_render:
            images = world.render(rows_to_render, camera, size, size)
            for row, image in zip(rows_to_render, images, strict=True):
                cells[row].images.append(image)

    return after_step


def _compose(cells: list[_Cell], time: int, columns: int, label: str) -> np.ndarray:
    """Draw the grid at frame `time`."""
    size = cells[0].images[0].shape[0]
    columns = min(columns, len(cells))
    rows = -(-len(cells) // columns)
    lines = max(_caption(cell, True, size).count("\n") for cell in cells)
    pitch_x, pitch_y = size + 2 * BORDER + GAP, size + 2 * BORDER + CAPTION + lines * LINE + GAP
    top = TITLE if label else GAP
    canvas = Image.new("RGB", (columns * pitch_x + GAP, top + rows * pitch_y), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    solved = 0
    for index, cell in enumerate(cells):
        done = time >= len(cell.images) - 1
        solved += done and cell.success
        colour = RUNNING if not done else SUCCESS if cell.success else FAILURE
        x, upper = GAP + index % columns * pitch_x, top + index // columns * pitch_y
        draw.rectangle((x, upper, x + size + 2 * BORDER - 1, upper + size + 2 * BORDER - 1), fill=colour)
        canvas.paste(Image.fromarray(cell.images[min(time, len(cell.images) - 1)]), (x + BORDER, upper + BORDER))
        place = x + 1, upper + size + 2 * BORDER + 2
        draw.multiline_text(place, _caption(cell, done, size), colour if done else MUTED, _font(12), spacing=1)
    if label:
        draw.text((GAP, 5), label, TEXT, _font(14))
        count = f"{solved} of {len(cells)} solved"
        draw.text((canvas.width - GAP, 6), count, MUTED, _font(12), anchor="ra")
    return np.asarray(canvas)


def _caption(cell: _Cell, done: bool, width: int) -> str:
    """Return the caption lines below a cell of this width in pixels: outcome and instruction."""
    sign, word = ("✓", "success") if cell.success else ("✗", "failed")
    return _wrapped(f"{sign} {cell.instruction or word}" if done else cell.instruction, width + 2 * BORDER)


@cache
def _wrapped(text: str, width: int) -> str:
    lines = [""]
    for part in text.split(" "):
        longer = f"{lines[-1]} {part}".strip()
        lines = [*lines[:-1], longer] if _font(12).getlength(longer) <= width or not lines[-1] else [*lines, part]
    return "\n".join(lines)


def _pad(frames: np.ndarray, bottom: int, right: int) -> np.ndarray:
    if bottom == right == 0:
        return frames
    length, height, width, _ = frames.shape
    padded = np.full((length, height + bottom, width + right, 3), BACKGROUND, dtype=np.uint8)
    padded[:, :height, :width] = frames
    return padded


def _titled(frames: np.ndarray, text: str) -> np.ndarray:
    """Return frames [T, height, width, 3] with a line of text above them."""
    title = Image.new("RGB", (frames.shape[2], CAPTION), BACKGROUND)
    ImageDraw.Draw(title).text((GAP, 2), text, TEXT, _font(12))
    title_frames = np.broadcast_to(np.asarray(title), (len(frames), *np.asarray(title).shape))
    return np.concatenate([title_frames, frames], axis=1)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)
