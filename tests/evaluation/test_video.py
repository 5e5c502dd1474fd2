import subprocess
from dataclasses import replace

import numpy as np
import pytest
from evaluation_toys import LineController, LinePolicy, LineWorld
from imageio_ffmpeg import get_ffmpeg_exe
from PIL import Image

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.spec import TASK
from robopolicy.evaluation import video
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.evaluation.video import (
    FAILURE,
    MUTED,
    SUCCESS,
    above,
    beside,
    gif_bytes,
    record_grid,
    write_video,
)

SEEDS = np.arange(100, 106)


def shows(frame, colour):
    return bool((frame == colour).all(-1).any())


def test_grid_films_every_control_step_and_holds_the_end():
    world, policy = LineWorld(3), LinePolicy(speed=0.03)
    clip = record_grid(world, policy, SEEDS, columns=3, size=32, label="base", hold_seconds=0.5)
    result = evaluate_policy(LineWorld(3), policy, SEEDS)
    assert clip.success.tolist() == result.success.tolist()
    assert clip.success.any() and not clip.success.all()
    assert len(clip.frames) == 1 + result.lengths.max() + 5
    assert clip.seconds == pytest.approx(len(clip.frames) / 10)
    assert np.array_equal(clip.frames[-1], clip.frames[-6])
    assert shows(clip.frames[-1], SUCCESS) and shows(clip.frames[-1], FAILURE)
    assert not shows(clip.frames[0], SUCCESS) and not shows(clip.frames[0], FAILURE)


def test_what_was_asked_for_stands_below_an_episode_where_there_is_a_choice():
    class Told(LineWorld):
        """Asks one row for something else than the other."""

        told = ("go to zero", "go to zero from wherever you are, and stop there")

        def reset(self, *given, **options):
            return {**super().reset(*given, **options), TASK: np.array(self.told)}

    world = Told(2)
    plain = record_grid(world, LinePolicy(speed=0.2), SEEDS[:2], size=64, hold_seconds=0)
    world.spec = replace(world.spec, instructions=Told.told)
    clip = record_grid(world, LinePolicy(speed=0.2), SEEDS[:2], size=64, hold_seconds=0)
    lines = video._caption(video._Cell([], Told.told[1], True), True, 64).split("\n")
    assert " ".join(lines) == f"✓ {Told.told[1]}" and len(lines) > 3
    assert all(video._font(12).getlength(line) <= 64 + 2 * video.BORDER for line in lines)
    assert clip.frames.shape[1] == plain.frames.shape[1] + video.LINE * (len(lines) - 1)
    below, half = video.GAP + 64 + 2 * video.BORDER, clip.frames.shape[2] // 2
    first = clip.frames[0, below:]
    assert shows(first[:, :half], MUTED) and shows(first[:, half:], MUTED), "asked before it is done"
    assert (first[video.CAPTION + video.LINE :, :half] == video.BACKGROUND).all(), "a shorter one takes fewer lines"
    assert not shows(plain.frames[0, below:], MUTED)
    assert shows(clip.frames[-1, below:], SUCCESS)


def test_policy_decides_once_per_chunk_while_filmed():
    world, policy = LineWorld(2), LinePolicy(speed=0.0, chunk=4)
    decisions = []
    act = policy.act
    policy.act = lambda *args, **options: decisions.append(1) or act(*args, **options)
    clip = record_grid(world, policy, SEEDS[:2], size=16, hold_seconds=0)
    assert len(decisions) == 3
    assert world.chunk_lengths == [1] * 12
    assert len(clip.frames) == 13


def test_every_skips_frames_but_keeps_real_time_and_the_last_frame():
    full = record_grid(LineWorld(2), LinePolicy(speed=0.0), SEEDS[:2], size=16, hold_seconds=0)
    half = record_grid(LineWorld(2), LinePolicy(speed=0.0), SEEDS[:2], size=16, hold_seconds=0, every=2)
    assert (len(full.frames), len(half.frames), half.fps) == (13, 7, 5.0)
    odd = record_grid(LineWorld(2, horizon=11), LinePolicy(speed=0.0), SEEDS[:2], size=16, hold_seconds=0, every=2)
    assert len(odd.frames) == 7
    assert shows(odd.frames[-1], FAILURE)


def test_recorded_images_stand_above_imagined_ones():
    real = {
        f"observation.images.{name}": np.full((2, 3, 8, 8, 3), shade, np.uint8)
        for name, shade in (("a", 50), ("b", 90))
    }
    imagined = {key: value + 100 for key, value in real.items()}
    clip = above(real, imagined, 10, size=24)
    assert len(clip.frames) == 3 and clip.seconds == pytest.approx(0.3)
    middle = clip.frames[1].shape[1] // 4
    values = [int(value) for value in clip.frames[1][:, middle, 0] if value in (50, 90, 150, 190)]
    assert values == [50] * 24 + [150] * 24 + [90] * 24 + [190] * 24


def test_two_policies_beside_each_other():
    slow = record_grid(LineWorld(2), LinePolicy(speed=0.02), SEEDS[:2], size=24, label="base")
    fast = record_grid(LineWorld(2), LineController(speed=0.2), SEEDS[:2], size=24, label="tuned")
    both = beside(slow, fast)
    assert len(both.frames) == max(len(slow.frames), len(fast.frames))
    assert np.array_equal(both.frames[-1][:, -fast.frames.shape[2] :], fast.frames[-1])
    assert both.success.tolist() == [*slow.success, *fast.success]
    with pytest.raises(DataError, match="cannot be joined"):
        beside(slow, record_grid(LineWorld(2), LinePolicy(), SEEDS[:2], size=24, every=2))


def test_mp4_decodes_to_the_same_frames(tmp_path):
    clip = record_grid(LineWorld(2), LinePolicy(speed=0.03), SEEDS[:2], size=33)
    write_video(clip, tmp_path / "clip.mp4")
    height, width = clip.frames.shape[1:3]
    decode = ["-i", str(tmp_path / "clip.mp4"), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run([get_ffmpeg_exe(), "-v", "error", *decode], capture_output=True, check=True).stdout
    frames = np.frombuffer(raw, dtype=np.uint8).reshape(-1, height + height % 2, width + width % 2, 3)
    assert len(frames) == len(clip.frames)
    error = np.abs(frames[:, :height, :width].astype(int) - clip.frames).mean()
    assert error < 6


def test_gif_lasts_as_long_as_the_clip(tmp_path):
    clip = record_grid(LineWorld(2), LinePolicy(speed=0.03), SEEDS[:2], size=32)
    write_video(clip, tmp_path / "clip.gif")
    with Image.open(tmp_path / "clip.gif") as image:
        durations = []
        for index in range(image.n_frames):
            image.seek(index)
            durations.append(image.info["duration"])
        last = np.asarray(image.convert("RGB")).astype(int)
    assert sum(durations) / 1000 == pytest.approx(clip.seconds, abs=0.02)
    assert np.abs(last - clip.frames[-1]).mean() < 6
    assert gif_bytes(clip, width=20) != gif_bytes(clip)


def test_bad_requests_are_clear(tmp_path):
    blind = type("Blind", (), {name: value for name, value in vars(LineWorld).items() if name != "render"})
    with pytest.raises(ConfigError, match="cannot be rendered"):
        record_grid(blind(2), LinePolicy(), SEEDS[:2])
    with pytest.raises(ConfigError, match="needs seeds"):
        record_grid(LineWorld(2), LinePolicy(), [])
    clip = record_grid(LineWorld(2), LinePolicy(), SEEDS[:2], size=16)
    with pytest.raises(ConfigError, match="mp4"):
        write_video(clip, tmp_path / "clip.avi")
