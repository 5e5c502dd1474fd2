"""The verb `analyze`: says whether random play, or a policy's, leads to a task's reward."""

import json

import pytest

from robopolicy.cli import main
from robopolicy.configuration.sections.tools import AnalyzeSection
from robopolicy.verbs.analyze import attempts, judged


def outcome(rate, lucky=0):
    """Results of one attempt as `figures` gives them."""
    success = {"rate": rate, "count": int(100 * rate), "total": 100}
    return {"k": 1, "rollouts": 16, "steps": 500, "success": success, "random_success": {"count": lucky}}


def test_attempts_go_from_the_shortest_horizon_on():
    pairs = attempts(AnalyzeSection(rollouts=256, depth=2), 9)
    assert pairs == [(1, 16), (1, 64), (2, 16), (1, 256), (2, 64), (2, 256)]
    assert attempts(AnalyzeSection(rollouts=1, depth=2), 2) == [(1, 1), (2, 1)]


def test_the_verdict_tells_what_was_found_what_is_slow_and_what_is_hopeless():
    assert "likely to learn" in judged([outcome(0.6, 3)], 2.3, 4.0, 0.5)
    assert "will be slow" in judged([outcome(0.2, 3)], None, 4.0, 0.5)
    assert "Random play never succeeded" in judged([outcome(0.0)], None, 4.0, 0.5)


@pytest.mark.long
def test_a_task_is_analyzed_from_random_play_and_from_a_policy(tmp_path):
    settings = ["world=reach_planar", f"run.root={tmp_path}", "run.threads=1", "world.batch_size=32"]
    quick = ["analyze.depth=1", "analyze.episodes=16", "analyze.hold=8"]
    assert main(["analyze", *settings, *quick, "analyze.rollouts=16"]) == 0
    folder = tmp_path / "analyze" / "reach_planar" / "0"
    result = json.loads((folder / "result.json").read_text())
    assert [each["rollouts"] for each in result["horizons"]] == [1, 4, 16] and result["candidates"] == 9
    assert result["effective_horizon"] is None and "Effective horizon" in (folder / "report.html").read_text()
    small = ["policy.width=32", "policy.depth=1", "policy.sampling_steps=2", "train.evaluate_episodes=0"]
    assert main(["collect", *settings, "collect.episodes=4"]) == 0
    assert main(["train", *settings, *small, "train.fit.steps=10"]) == 0
    checkpoint = tmp_path / "train" / "reach_planar" / "0" / "checkpoint"
    sampled = ["analyze.candidates=4", "analyze.rollouts=1", "analyze.target=0", "run.overwrite=true"]
    assert main(["analyze", str(checkpoint), *settings, *quick, *sampled]) == 0
    result = json.loads((folder / "result.json").read_text())
    assert result["candidates"] == 4 and result["effective_horizon"] == 1.0  # 1 + log_4(1), the first that is tried
