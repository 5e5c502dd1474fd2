"""Evaluation during the next update: the same figures of each policy, a stop one iteration late, exact resuming."""

import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from bandit_toys import BanditWorld, ChainPolicy, mean_reward

from robopolicy.core.errors import ConfigError
from robopolicy.core.run import RunFolder
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.late_evaluation import LateEvaluation
from robopolicy.training.stopping import EndReason

pytestmark = pytest.mark.long

AT_ONCE = FinetuneConfig(
    algorithm="grpo",
    iterations=7,
    groups=8,
    group_size=8,
    epochs=2,
    minibatch=64,
    learning_rate=5e-3,
    checkpoint_every=2,
    evaluate_every=2,
)
LATE = replace(AT_ONCE, overlap_evaluation=True)


def evaluate(policy, deterministic: bool) -> dict[str, float]:
    reward = mean_reward(policy, deterministic)["reward"]
    return {"success": math.exp(reward), "return": reward}


def run(folder: Path, config: FinetuneConfig, judge=evaluate, confirm=None):
    policy = ChainPolicy()
    ended = finetune(policy, None, BanditWorld(64), config, RunFolder(folder), evaluate=judge, confirm=confirm)
    records = [
        {name: value for name, value in record.items() if not name.startswith("seconds")}
        for record in RunFolder(folder).metrics()
    ]
    weights = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.safetensors"))
        if "resume" not in path.parts
    }
    return ended, records, weights


def test_every_policy_gets_the_figures_that_it_gets_at_once(tmp_path: Path):
    ended, records, weights = run(tmp_path / "now", AT_ONCE)
    late_ended, late_records, late_weights = run(tmp_path / "late", LATE)
    assert [record["iteration"] for record in records] == list(range(8))
    assert sum("deterministic_success" in record for record in records) == 5  # 0, 2, 4, 6 and the last
    assert records == late_records and weights == late_weights and ended == late_ended
    assert ended.best["iteration"] > 0


def test_a_target_ends_the_run_one_iteration_later_with_the_policy_that_reached_it(tmp_path: Path):
    _, records, _ = run(tmp_path / "whole", AT_ONCE)
    reached = {record["iteration"]: record.get("deterministic_success", 0.0) for record in records}
    first = next(iteration for iteration in reached if reached[iteration] > reached[0])
    target = {"target_success": reached[first]}
    asked: list[int] = []

    def confirm(policy, iteration: int) -> dict[str, float]:
        asked.append(iteration)
        return evaluate(policy, True)

    ended, _, weights = run(tmp_path / "now", replace(AT_ONCE, **target), confirm=confirm)
    late, late_records, late_weights = run(tmp_path / "late", replace(LATE, **target), confirm=confirm)
    assert asked == [first, first]
    assert (ended.ended, ended.iterations) == (EndReason.TARGET, first)
    assert (late.ended, late.iterations) == (EndReason.TARGET, first + 1)
    assert late.best == ended.best and late_records[-1]["iteration"] == first + 1
    assert {name: weights[name] for name in weights if "checkpoint" in name} == {
        name: late_weights[name] for name in late_weights if "checkpoint" in name
    }


@pytest.mark.parametrize("at", range(1, 10))
def test_an_interrupted_run_resumes_with_the_policy_that_waited(tmp_path: Path, at: int):
    """The evaluation number `at` is interrupted, twice in an iteration: every place where a run can be."""
    expected = run(tmp_path / "whole", LATE)
    calls: list[bool] = []

    def interrupted(policy, deterministic: bool) -> dict[str, float]:
        calls.append(deterministic)
        if len(calls) == at:
            raise KeyboardInterrupt
        return evaluate(policy, deterministic)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", LATE, judge=interrupted)
    assert run(tmp_path / "broken", LATE) == expected


def test_a_waiting_policy_is_evaluated_when_fewer_iterations_follow(tmp_path: Path):
    def interrupted(policy, deterministic: bool) -> dict[str, float]:
        if (tmp_path / "broken/resume").exists():
            raise KeyboardInterrupt
        return evaluate(policy, deterministic)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", LATE, judge=interrupted)
    ended, records, _ = run(tmp_path / "broken", replace(LATE, iterations=2))
    assert ended.iterations == 2 and [record["iteration"] for record in records] == [0, 1, 2]
    assert "deterministic_success" in records[2]


def test_in_a_thread_the_policy_is_that_of_its_iteration_and_errors_come_out():
    policy, rates = ChainPolicy(), []

    def measure(waiting) -> dict[str, float]:
        time.sleep(0.05)
        rates.append(float(next(waiting.parameters()).detach().flatten()[0]))
        if len(rates) == 2:
            raise ValueError("broken")
        return {"rate": rates[-1]}

    late = LateEvaluation(policy, measure, parallel=True)
    before = float(next(policy.parameters()).detach().flatten()[0])
    late.hold(policy, {"iteration": 4.0})
    late.start()
    next(policy.parameters()).data.add_(1.0)  # the update
    assert late.figures() == {"rate": before} and late.tree() == {"row": {"iteration": 4.0}}
    late.hold(policy, {"iteration": 8.0})
    late.start()
    with pytest.raises(ValueError, match="broken"):
        late.figures()
    assert rates == [before, pytest.approx(before + 1)]
    late.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("evaluation")]


def test_refused_where_the_world_changes():
    with pytest.raises(ConfigError, match="overlap_evaluation=false"):
        finetune(
            *(ChainPolicy(), None, BanditWorld(64), LATE),
            evaluate=evaluate,
            after_checkpoint=lambda iteration, policy: False,
        )
