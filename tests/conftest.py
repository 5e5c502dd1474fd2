"""Test settings: offline, software rendering, one thread a worker."""

import os
import re
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MUJOCO_GL", "egl")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell: commands would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["no_proxy"] = "localhost,127.0.0.1,::1"  # of helpers that ask by means of urllib or websockets alone

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tiny_runs import made_once, root  # noqa: F401  fixtures

# On a loaded machine a draw may take seconds; tests are not timed.
settings.register_profile("untimed", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("untimed")

SET_NUM_THREADS = torch.set_num_threads
LONG_AS_A_WHOLE = re.compile(r"^pytestmark = .*pytest\.mark\.(long|slow)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where long tests are left out, do not even import a file of them: LeRobot and transformers alone take seconds."""
    unwanted = "not long" in config.option.markexpr and collection_path.suffix == ".py"
    return True if unwanted and LONG_AS_A_WHOLE.search(collection_path.read_text()) else None


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep verbs from giving a worker as many threads as the machine has cores, for the rest of its life.

    For the session, because fixtures of modules run verbs too: with two workers of two threads each on two cores, every
    small operation waits for a thread that is not running.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda count: None)
        yield


@pytest.fixture(autouse=True)
def threads_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a test that is marked `threads` those that it asks for, and take them back."""
    if request.node.get_closest_marker("threads") is None:
        yield
        return
    monkeypatch.setattr(torch, "set_num_threads", SET_NUM_THREADS)
    yield
    SET_NUM_THREADS(1)
