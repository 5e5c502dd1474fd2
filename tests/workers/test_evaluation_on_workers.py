"""Evaluations on workers equal those in one process byte for byte, whoever plays, dies or comes first."""

import json
import shutil
import threading
import time

import pytest
from tiny_runs import TINY

from robopolicy.building import workers
from robopolicy.cli import main
from robopolicy.core.pools import PoolSettings
from robopolicy.evaluation import success
from robopolicy.workers.local import LocalPool

pytestmark = pytest.mark.long

SMALL = [*TINY, "world.batch_size=8", "evaluate.episodes=24", "evaluate.videos=0"]


def outcomes(root, verb, name):
    """Return a run's result without its seconds."""

    def without(value):
        if isinstance(value, dict):
            return {key: without(each) for key, each in value.items() if key != "seconds"}
        return value

    return without(json.loads((root / verb / name / "0" / "result.json").read_text()))


def evaluate(root, name, *settings):
    policy = root / "train" / "reach_planar" / "0" / "checkpoint"
    return main(["evaluate", str(policy), *SMALL, f"run.root={root}", f"run.name={name}", *settings])


@pytest.fixture(scope="module")
def alone(root):
    assert evaluate(root, "alone") == 0
    return outcomes(root, "evaluate", "alone")


@pytest.mark.parametrize("count", [2, 3])
def test_equal_for_every_number_of_workers(root, alone, warm, count):
    assert evaluate(root, f"workers{count}", f"workers.count={count}") == 0
    assert outcomes(root, "evaluate", f"workers{count}") == alone


def test_equal_when_a_worker_is_killed(root, alone, warm):
    pool = warm(PoolSettings(2))
    pool.kill = True
    assert evaluate(root, "killed", "workers.count=2") == 0
    assert not pool.kill
    assert outcomes(root, "evaluate", "killed") == alone


def test_an_interrupted_evaluation_resumes_with_other_workers(root, alone, monkeypatch, capsys):
    pools, real = [], workers.open_pool

    class Interrupted(LocalPool):
        def map(self, function, items):
            pools.append(self)
            for place, result in enumerate(super().map(function, items)):
                yield result
                if place:
                    raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("robopolicy.workers.local.LocalPool", Interrupted)
        assert evaluate(root, "interrupted", "workers.count=2") == 130
    assert real is workers.open_pool and pools and not pools[0].processes
    played = (root / "evaluate" / "interrupted" / "0" / "waves.jsonl").read_text().splitlines()
    assert len(played) == 1 + 2
    capsys.readouterr()
    assert evaluate(root, "interrupted", "workers.count=3") == 0
    assert "Resuming: 16 episodes" in capsys.readouterr().out
    assert outcomes(root, "evaluate", "interrupted") == alone


def test_planning_chunking_and_cameras_are_rebuilt_in_the_worker(root, warm):
    model = root / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    settings = f"plan.model={model}", "plan.candidates=2", "evaluate.episodes=16"
    assert evaluate(root, "plan1", *settings) == 0
    assert evaluate(root, "plan2", *settings, "workers.count=2") == 0
    assert outcomes(root, "evaluate", "plan2") == outcomes(root, "evaluate", "plan1")


def test_what_needs_every_action_plays_in_this_process_and_says_so(root, warm, capsys, monkeypatch):
    settings = "evaluate.latency_steps=1", "evaluate.episodes=8"
    assert evaluate(root, "late1", *settings) == 0
    monkeypatch.setattr(success, "progress", success.progress)
    assert evaluate(root, "late2", *settings, "workers.count=2") == 0
    assert "played in this process" in " ".join(capsys.readouterr().out.split())
    assert outcomes(root, "evaluate", "late2") == outcomes(root, "evaluate", "late1")


def test_a_strangers_pool(root, alone):
    pytest.importorskip("outside_robotics", reason="install it with: pip install -e tests/outside")
    pool = "workers.pool=outside_robotics.pool:Executor"
    assert evaluate(root, "stranger", "workers.count=2", pool) == 0
    assert outcomes(root, "evaluate", "stranger") == alone


def test_rank_is_equal(root, warm):
    policy = root / "train" / "reach_planar" / "0" / "checkpoint"
    for count in (1, 2):
        common = [*TINY, "world.batch_size=8", f"workers.count={count}", f"run.root={root}"]
        model = f"rank.models=[{root / 'worldmodel' / 'reach_planar' / '0' / 'checkpoint'}]"
        ranked = f"rank.policies=[{policy}]", "rank.noise=[none,medium]", "rank.episodes=16", model
        assert main(["rank", *common, *ranked, f"run.name=rank{count}"]) == 0
    assert outcomes(root, "rank", "rank2") == outcomes(root, "rank", "rank1")


def test_all_episodes_of_a_ranking_are_sent_together(root, warm, monkeypatch):
    sent = []

    class Counted:
        def __init__(self, settings):
            self.pool = warm(settings)
            self.workers, self.put, self.close = self.pool.workers, self.pool.put, self.pool.close

        def map(self, function, items):
            sent.append(len(items))
            return self.pool.map(function, items)

    monkeypatch.setattr("robopolicy.workers.local.LocalPool", Counted)
    model = root / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    common = [*TINY, "world.batch_size=8", "workers.count=2", f"run.root={root}", "run.name=together"]
    settings = "rank.policies=[]", "rank.noise=[none,low,medium]", "rank.episodes=16", f"rank.models=[{model}]"
    assert main(["rank", *common, *settings]) == 0
    assert sent == [2 * 3 * 2]


def gate(root, verb, count):
    train, *copies = (root / "train" / "reach_planar" / name for name in ("0", "0-copy", "0-second"))
    for copy in copies:
        if not copy.exists():
            shutil.copytree(train, copy)
    model = root / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    common = [*TINY, "world.batch_size=8", f"workers.count={count}", f"run.root={root}", f"run.name={verb}{count}"]
    judged = [f"gate.models=[{model}]", "gate.num_states=16", "gate.evaluators=[model,world]"]
    policies = [str(each / "checkpoint") for each in (train, *copies)]
    given = [f"bakeoff.policies=[{','.join(policies)}]", "bakeoff.episodes=16"] if verb == "bakeoff" else policies[:2]
    assert main([verb, *common, *judged, *given]) in (0, 1)
    return outcomes(root, verb, f"{verb}{count}")


@pytest.mark.parametrize("verb", ["gate", "bakeoff"])
def test_evaluators_play_on_workers_with_equal_results(root, warm, verb):
    assert gate(root, verb, 2) == gate(root, verb, 1)


def test_a_progress_bar_advances_as_batches_arrive(root, warm, monkeypatch):
    steps, real = [], success.progress

    class Noted:
        def __init__(self, label, total):
            self.bar, self.total = real(label, total), total

        def __enter__(self):
            advance = self.bar.__enter__()
            return lambda count=1, note="": (steps.append((count, time.monotonic())), advance(count, note))

        def __exit__(self, *error):
            return self.bar.__exit__(*error)

    monkeypatch.setattr(success, "progress", Noted)
    assert evaluate(root, "bar", "workers.count=2") == 0
    assert [count for count, _ in steps if count] == [8] * 6
    assert threading.active_count() < 20
