"""Tiny runs of collect, train and worldmodel, made once for all tests that need what those leave behind."""

import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from robopolicy.cli import main

TINY = (
    "world=reach_planar",
    "run.threads=1",
    "policy.width=32",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "collect.episodes=24",
    "train.fit.steps=30",
    "train.evaluate_episodes=8",
    "worldmodel.transitions=600",
    "worldmodel.config.members=2",
    "worldmodel.config.width=32",
    "worldmodel.fit.steps=40",
)
"""Settings of the smallest runs that other verbs can work with."""


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The runs of collect, train and worldmodel with TINY, made by the worker that asks first; not to be written to."""
    shared = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent
    folder, done = shared / "tiny", shared / "tiny.done"
    with FileLock(shared / "tiny.lock"):
        if not done.exists():
            for verb in ("collect", "train", "worldmodel"):
                assert main([verb, *TINY, f"run.root={folder}"]) == 0, verb
            done.touch()
    return folder


@pytest.fixture(scope="module")
def root(made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs of a file's own, in which collect, train and worldmodel of reach_planar are done."""
    return Path(shutil.copytree(made_once, tmp_path_factory.mktemp("runs") / "runs"))
