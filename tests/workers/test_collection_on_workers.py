"""Fine-tuning with shards ends in the same bytes for any number of workers, whoever dies, however often it stops."""

import json
import os
import signal
from pathlib import Path

import pytest
from tiny_runs import TINY

from robopolicy.cli import main
from robopolicy.workers.local import LocalPool

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TUNE = [
    *TINY[:2],
    *("finetune.shards=4", "finetune.num_envs=32", "finetune.rollout_length=3", "finetune.iterations=5"),
    *("finetune.epochs=1", "finetune.minibatch=64", "finetune.critic_width=16", "finetune.checkpoint_every=2"),
    *("finetune.evaluate_every=2", "finetune.evaluate_episodes=16", "finetune.videos=0", "world.batch_size=8"),
    "finetune.target_success=null",
]
GROUPS = ("finetune.algorithm=grpo", "finetune.groups=8", "finetune.group_size=4", "finetune.overprovision=0.5")
CASES = {"streams": (), "groups": GROUPS, "behind": ("finetune.staleness=1",)}
CASES["late"] = ("finetune.overlap_evaluation=true",)


def tuned(root: Path, name: str, *settings: str) -> int:
    policy = root / "train" / "reach_planar" / "0" / "checkpoint"
    return main(["finetune", str(policy), *TUNE, f"run.root={root}", f"run.name={name}", *settings])


def weights(root: Path, name: str) -> dict[str, bytes]:
    folder = root / "finetune" / name / "0"
    return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.rglob("*.safetensors"))}


def killer(kind: type[BaseException] | None, at: int) -> tuple[type, list[int]]:
    """Return a pool that kills a busy worker in collection number `at`, or raises, and the list of those killed."""
    killed: list[int] = []

    class Killer(LocalPool):
        maps = 0

        def map(self, function, items):
            Killer.maps += function.endswith("play_shard")
            for result in super().map(function, items):
                if Killer.maps == at and not killed:
                    busy = [worker.process.pid for worker in self._busy.values()]
                    if kind is not None:
                        killed.append(0)
                        raise kind
                    if busy:
                        killed.append(busy[0])
                        os.kill(busy[0], signal.SIGKILL)
                yield result

    return Killer, killed


@pytest.fixture(scope="module")
def expected(root):
    """Return the weights of a case's run in this process."""
    made: dict[str, dict[str, bytes]] = {}

    def of(case: str) -> dict[str, bytes]:
        if case not in made:
            assert tuned(root, case, *CASES[case]) == 0
            made[case] = weights(root, case)
            assert {"checkpoint/model.safetensors", "resume/trainer.safetensors"} <= made[case].keys()
        return made[case]

    return of


@pytest.mark.parametrize("count", [2, 4])
def test_equal_for_every_number_of_workers(root, expected, count):
    assert tuned(root, f"workers{count}", f"workers.count={count}") == 0
    assert weights(root, f"workers{count}") == expected("streams")
    lines = (root / "finetune" / f"workers{count}" / "0" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert all(record["bytes_sent"] > 0 and record["bytes_received"] > 0 for record in records[1:])
    alone = [json.loads(line) for line in (root / "finetune/streams/0/metrics.jsonl").read_text().splitlines()]
    for record, other in zip(records, alone, strict=True):
        assert {key: record[key] for key in other if "seconds" not in key} == {
            key: value for key, value in other.items() if "seconds" not in key
        }


@pytest.mark.parametrize("case", CASES)
def test_equal_after_the_death_of_a_worker(root, expected, case, monkeypatch):
    with monkeypatch.context() as patched:
        pool, killed = killer(None, 3)
        patched.setattr("robopolicy.workers.local.LocalPool", pool)
        assert tuned(root, f"{case}-killed", *CASES[case], "workers.count=2") == 0
    assert killed and weights(root, f"{case}-killed") == expected(case)


@pytest.mark.parametrize("case", CASES)
def test_equal_after_an_interruption(root, expected, case, monkeypatch):
    with monkeypatch.context() as patched:
        pool, killed = killer(KeyboardInterrupt, 4)
        patched.setattr("robopolicy.workers.local.LocalPool", pool)
        assert tuned(root, f"{case}-stopped", *CASES[case], "workers.count=2") == 130
    assert killed
    assert tuned(root, f"{case}-stopped", *CASES[case], "workers.count=3") == 0
    assert weights(root, f"{case}-stopped") == expected(case)


@pytest.mark.checks("Periodic-Async")
def test_no_group_is_lost_with_a_worker_that_dies_while_others_are_learned_from(root, monkeypatch):
    """Not equal in the last bits: gradients are summed in the order of arrival."""
    settings = (*GROUPS[:3], "finetune.overlap_update=true", "finetune.minibatch=4096")
    assert tuned(root, "overlap", *settings) == 0
    with monkeypatch.context() as patched:
        pool, killed = killer(None, 2)
        patched.setattr("robopolicy.workers.local.LocalPool", pool)
        assert tuned(root, "overlap-killed", *settings, "workers.count=2") == 0
    assert killed
    here, there = (
        [json.loads(line) for line in (root / "finetune" / name / "0" / "metrics.jsonl").read_text().splitlines()][1:]
        for name in ("overlap", "overlap-killed")
    )
    assert [record["episodes"] for record in there] == [32.0] * 5
    assert [record["env_steps"] for record in here[:2]] == [record["env_steps"] for record in there[:2]]
    assert here[1]["policy_loss"] == pytest.approx(there[1]["policy_loss"], rel=1e-3)


@pytest.mark.filterwarnings("default::robopolicy.core.errors.RobopolicyWarning")
def test_a_run_that_resumes_with_other_shards_says_so(root, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        pool, killed = killer(KeyboardInterrupt, 4)
        patched.setattr("robopolicy.workers.local.LocalPool", pool)
        assert tuned(root, "other", "workers.count=2") == 130
    assert killed
    assert tuned(root, "other", "finetune.shards=2") == 0
    assert "shards was 4, now 2" in " ".join(capsys.readouterr().err.split())
    described = json.loads((root / "finetune" / "other" / "0" / "versions.json").read_text())
    assert described["resumed_with"] == [{"shards": 2}]


@pytest.mark.filterwarnings("default::robopolicy.core.errors.RobopolicyWarning")
def test_more_workers_than_shards_are_idle_and_uneven_shards_are_refused(root, capsys):
    assert tuned(root, "uneven", "finetune.shards=5") == 2
    assert "finetune.num_envs=35" in " ".join(capsys.readouterr().err.split())
    assert tuned(root, "idle", "finetune.iterations=1", "finetune.shards=1", "workers.count=2") == 0
    assert "set finetune.shards=2" in " ".join(capsys.readouterr().err.split())
