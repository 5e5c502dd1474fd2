"""run.threads bounds torch, the simulator, encoders and what is started later; 0 leaves them all cores."""

import os

import numpy as np
import pytest

import sims.physics.native
from robopolicy.building.policies import choose_device
from robopolicy.configuration.sections.run import RunSection
from robopolicy.core import machine
from robopolicy.core.machine import usable_threads
from robopolicy.evaluation import video
from robopolicy.evaluation.video import Clip, mp4_bytes
from sims.registry import make_world


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the tests a machine of 8 cores, and the process its bounds back afterwards."""
    monkeypatch.setattr(machine, "_bound", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name in ("OMP_NUM_THREADS", "LP_NUM_THREADS"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(("count", "usable", "pool"), [(1, 1, 0), (3, 3, 3), (0, 8, 8), (64, 8, 8)])
def test_the_simulator_gets_the_threads_of_the_run(monkeypatch: pytest.MonkeyPatch, count: int, usable: int, pool: int):
    given = []
    monkeypatch.setattr(sims.physics.native, "Rollout", lambda nthread: given.append(nthread))
    choose_device(RunSection(device="cpu", threads=count))
    assert usable_threads() == usable
    assert make_world("reach_planar", 16).threads == usable
    assert make_world("reach_planar", 16, threads=2).threads == 2  # world.options.threads
    assert given == [pool, 2]


@pytest.mark.threads
def test_torch_and_what_is_loaded_later_are_bounded():
    import torch

    choose_device(RunSection(device="cpu", threads=2))
    assert torch.get_num_threads() == 2
    assert (os.environ["OMP_NUM_THREADS"], os.environ["LP_NUM_THREADS"]) == ("2", "2")
    os.environ["OMP_NUM_THREADS"] = "1"
    choose_device(RunSection(device="cpu", threads=4))
    assert (os.environ["OMP_NUM_THREADS"], os.environ["LP_NUM_THREADS"]) == ("1", "4"), "what the user chose stays"


def test_encoders_of_video_are_bounded(monkeypatch: pytest.MonkeyPatch):
    import imageio.v2

    asked = {}
    monkeypatch.setattr(imageio.v2, "mimwrite", lambda path, frames, **given: (asked.update(given), path.touch()))
    monkeypatch.setattr(video, "usable_threads", lambda: 3)
    mp4_bytes(Clip(np.zeros((2, 16, 16, 3), np.uint8), 10, np.zeros(0, bool)))
    assert asked["output_params"][-2:] == ["-threads", "3"]
