"""Test settings: offline, software rendering, one thread a worker."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MUJOCO_GL", "egl")

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep verbs from giving every worker as many threads as the machine has cores, for the rest of its life.

    A test marked `threads` gets those that it asks for.
    """
    if request.node.get_closest_marker("threads") is None:
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
