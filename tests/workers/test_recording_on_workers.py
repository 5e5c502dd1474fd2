"""Datasets recorded on workers equal those of one process file for file, for every kind of recording."""

import filecmp
from pathlib import Path

import pytest
from tiny_runs import TINY

from robopolicy.cli import main
from robopolicy.core.pools import PoolSettings

pytestmark = pytest.mark.long

KINDS = {
    "expert": ["collect.noise=[none,medium]", "collect.successes_only=true"],
    "policy": ["collect.policy=POLICY"],
    "labelled": ["collect.policy=POLICY", "collect.label_policy=expert", "collect.label_steps=4"],
    "chains": ["collect.policy=POLICY", "collect.chains=true"],
    "corrected": ["collect.policy=POLICY", "collect.correct.no_progress_steps=5", "collect.correct.rewind=3"],
    "graded": ["collect.quality=mixed", "collect.trial_episodes=16", "collect.reference_episodes=16"],
    "images": ["world.cameras=[top]", "world.image_size=16", "collect.images=png"],
}


def record(root: Path, kind: str, name: str, *settings: str) -> Path:
    policy = root / "train" / "reach_planar" / "0" / "checkpoint"
    given = [setting.replace("POLICY", str(policy)) for setting in KINDS[kind]]
    episodes = "collect.episodes=20" if kind != "images" else "collect.episodes=10"
    run = [f"run.root={root}", f"run.name={kind}-{name}", "world.batch_size=8", episodes]
    assert main(["collect", *TINY, *run, *given, *settings]) == 0
    (folder,) = root.glob(f"collect/{kind}-{name}*/0")
    return folder


def require_equal(first: Path, second: Path) -> None:
    """Fail unless the two folders have equal files, byte for byte."""
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(second)) for path in second.rglob("*") if path.is_file())
    assert names
    assert filecmp.cmpfiles(first, second, names, shallow=False)[1:] == ([], [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_does_not_depend_on_the_number_of_workers(root, warm, kind):
    alone = record(root, kind, "alone") / "dataset"
    require_equal(alone, record(root, kind, "two", "workers.count=2") / "dataset")
    if kind == "policy":
        require_equal(alone, record(root, kind, "three", "workers.count=3") / "dataset")


def test_a_killed_workers_episodes_are_recorded_again(root, warm):
    pool = warm(PoolSettings(2))
    pool.kill = True
    killed = record(root, "policy", "killed", "workers.count=2", "collect.episodes=40") / "dataset"
    assert not pool.kill
    require_equal(record(root, "policy", "undisturbed", "collect.episodes=40") / "dataset", killed)


@pytest.mark.filterwarnings("ignore:.*already recorded:robopolicy.core.errors.RobopolicyWarning")
def test_an_interrupted_recording_resumes_with_another_number_of_workers(root, warm, monkeypatch):
    class Interrupted:
        def __init__(self, settings):
            self.pool = warm(settings)
            self.workers, self.put, self.close = self.pool.workers, self.pool.put, self.pool.close

        def map(self, function, items):
            for place, result in enumerate(self.pool.map(function, items)):
                yield result
                if place:
                    raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("robopolicy.workers.local.LocalPool", Interrupted)
        with pytest.raises(AssertionError):
            record(root, "expert", "interrupted", "workers.count=2", "collect.episodes=40")
    folder = root / "collect" / "expert-interrupted" / "0"
    assert list((folder / "unfinished").rglob("*.npz"))
    resumed = record(root, "expert", "interrupted", "collect.episodes=40") / "dataset"
    require_equal(record(root, "expert", "whole", "collect.episodes=40") / "dataset", resumed)
