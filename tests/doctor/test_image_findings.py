"""Breaks of camera images are named: BGR, orientation, mixed-up, missing, black, flat and frozen cameras."""

from dataclasses import replace

import broken_data
import numpy as np
import pytest

from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.record import record
from robopolicy.doctor import Health, examine
from sims.registry import load_task, make_world

TOP, FRONT = IMAGE_PREFIX + "top", IMAGE_PREFIX + "front"


@pytest.fixture(scope="module")
def reach():
    world = make_world("reach_planar", 6, cameras=("top", "front"), image_size=32)
    yield world, record(world, load_task("reach_planar").expert(), np.arange(6))
    world.close()


def problems(episodes, world):
    return [finding for finding in examine(episodes, world) if finding.problem]


def with_top(data, change):
    return broken_data.with_frames(data, TOP, change)


def test_healthy_images_have_no_problem_even_from_a_video(reach, tmp_path):
    world, data = reach
    assert problems(data, world) == []
    assert problems(replace(data, seeds=None), world) == []
    write_dataset(data, tmp_path / "dataset", images="video")
    assert problems(read_dataset(tmp_path / "dataset"), world) == []


@pytest.mark.parametrize(
    ("change", "check", "text"),
    [
        (lambda images: images.flip(-1), "image channels", "'top': blue and red are swapped (BGR instead of RGB)"),
        (lambda images: images.flip(1), "image orientation", "'top': the image is upside down"),
        (lambda images: images.flip(2), "image orientation", "'top': the image is mirrored"),
        (lambda images: images.flip(1, 2), "image orientation", "'top': the image is rotated by 180"),
        (lambda images: images // 3, "images of 'top'", "differ from the world's"),
    ],
)
def test_changed_images_are_named(reach, change, check, text):
    world, data = reach
    findings = problems(with_top(data, change), world)
    assert [finding.check for finding in findings] == [check]
    assert text in findings[0].measured


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda images: images.float() / 255, "'top' contains numbers from 0 to 1 instead of bytes"),
        (lambda images: images.float() / 127.5 - 1, "'top' contains numbers from -1 to 1 instead of bytes"),
        (lambda images: (images.float() / 255 - 0.45) / 0.225, "normalised by mean and deviation?"),
    ],
)
def test_images_that_are_no_bytes_are_named(reach, change, text):
    world, data = reach
    findings = problems(with_top(data, change), world)
    assert any(finding.check == "image range" and text in finding.measured for finding in findings)


def test_bgr_is_seen_without_seeds(reach):
    world, data = reach
    findings = problems(replace(with_top(data, lambda images: images.flip(-1)), seeds=None), world)
    assert [finding.check for finding in findings] == ["image channels"]


def test_mixed_up_cameras_are_named(reach):
    world, data = reach
    images = {TOP: data.observation[FRONT], FRONT: data.observation[TOP]}
    findings = problems(replace(data, observation={**data.observation, **images}), world)
    assert [finding.check for finding in findings] == ["camera order", "camera order"]


def test_a_missing_camera_is_named_and_an_extra_one_mentioned(reach):
    world, data = reach
    fields = {key: field for key, field in data.observation_fields.items() if key != TOP}
    images = {key: value for key, value in data.observation.items() if key != TOP}
    findings = problems(replace(data, observation_fields=fields, observation=images), world)
    assert [finding.check for finding in findings] == ["missing camera"]
    assert "camera 'top', but the dataset lacks it (it has: front)" in findings[0].measured
    blind = make_world("reach_planar", 6)
    extra = [finding for finding in examine(data, blind) if "world.cameras=[top]" in finding.remedy]
    assert [finding.health for finding in extra] == [Health.UNKNOWN]
    blind.close()


def test_images_of_another_size_are_named(reach):
    _, data = reach
    world = make_world("reach_planar", 6, cameras=("top", "front"), image_size=16)
    findings = problems(data, world)
    assert {finding.check for finding in findings} == {TOP, FRONT}
    assert all("(32, 32, 3)" in finding.measured for finding in findings)
    world.close()


def blackened(images):
    images[len(images) // 2 :] = 0
    return images


def whitened(images):
    images[1] = 255
    return images


def grey(images):
    images[2] = 120
    return images


@pytest.mark.parametrize(("change", "what"), [(blackened, "black"), (whitened, "white"), (grey, "of one colour")])
def test_empty_images_are_counted(reach, change, what):
    world, data = reach
    findings = problems(with_top(data, change), world)
    assert [finding.check for finding in findings] == ["camera 'top'"]
    assert f"images are {what} (episodes 0, 1" in findings[0].measured


def test_a_camera_that_stands_still_is_named(reach):
    world, data = reach
    findings = problems(with_top(data, lambda images: images[:1].expand_as(images)), world)
    assert [finding.check for finding in findings] == ["camera 'top'"]
    assert "is frozen while the robot moves" in findings[0].measured


def test_a_camera_that_hangs_in_one_episode_is_named(reach):
    world, data = reach
    episode = int(data.lengths.argmax())
    start, length = int(data.frame_starts[episode]), int(data.lengths[episode])
    images = data.observation[TOP].clone()
    images[start + length // 3 : start + length + 1] = images[start + length // 3]
    findings = problems(replace(data, observation={**data.observation, TOP: images}), world)
    assert [finding.check for finding in findings] == ["camera 'top'"]
    assert findings[0].measured.endswith(f"(episodes {episode})")
