"""The verb `route`: chooses by initial state which of several policies acts."""

import json

import numpy as np
import pytest

from robopolicy.cli import main
from robopolicy.rl.in_context_value import InContextValue
from robopolicy.verbs.route import routed


class Told(InContextValue):
    """Predicts the mean of a policy's results where the first number of a start has the sign of its first result."""

    def predict(self, context, successes, episodes, starts):
        sign = np.sign(context[0, 0]) * (1 if successes[0] else -1)
        return np.where(np.sign(starts[:, 0]) == sign, 0.9, 0.1)


@pytest.mark.checks("V0")
def test_every_start_goes_to_the_policy_that_is_predicted_best_there():
    """A succeeds where the start is positive, B elsewhere; the fourth start is one where both fail."""
    starts = {"context": np.array([[1.0], [-1.0]]), "evaluated": np.array([[2.0], [-2.0], [3.0], [-3.0]])}
    outcomes = {
        "context": np.array([[True, False], [False, True]]),
        "evaluated": np.array([[True, False, True, False], [False, True, False, False]]),
    }
    result = routed(Told(1), outcomes, starts, np.zeros(2), ["A", "B"])
    counts = {each["name"]: each["success"]["count"] for each in result["routes"]}
    assert counts == {"A": 2, "B": 1, "router": 3, "best in hindsight": 3}
    assert [each["routed"] for each in result["routes"]] == [2, 2, None, None]
    assert result["alone"] == "A" and result["difference"]["difference"] == pytest.approx(0.25)
    assert result["brier"]["model"] == pytest.approx((7 * 0.01 + 0.81) / 8)
    assert result["brier"]["mean"] == pytest.approx(0.25)
    dear = routed(Told(1), outcomes, starts, np.array([0.9, 0.0]), ["A", "B"])
    assert [each["routed"] for each in dear["routes"][:2]] == [0, 4] and dear["alone"] == "B"
    assert dear["routes"][3]["cost"] == pytest.approx(0.45), "hindsight pays for A only where it gains"


def test_costs_are_given_for_all_policies_or_none(capsys):
    assert main(["route", "world=reach_planar"]) != 0
    assert "at least 2 policies" in capsys.readouterr().err
    assert main(["route", "world=reach_planar", "route.policies=[a,b]", "route.costs=[0.1]"]) != 0
    assert "route.costs has 1 numbers for 2 policies" in capsys.readouterr().err


@pytest.mark.long
def test_two_policies_are_routed_and_the_value_model_is_taken_again(tmp_path, monkeypatch):
    monkeypatch.setattr("robopolicy.verbs.route.STARTS", 48)
    settings = ["world=reach_planar", f"run.root={tmp_path}", "run.threads=1", "world.batch_size=16"]
    small = ["policy.width=32", "policy.depth=1", "policy.sampling_steps=2", "train.evaluate_episodes=0"]
    assert main(["collect", *settings, "collect.episodes=4"]) == 0
    data = [f"train.data={tmp_path / 'collect' / 'reach_planar' / '0' / 'dataset'}"]
    paths = []
    for name in ("first", "second"):
        assert main(["train", *settings, *small, "train.fit.steps=5", *data, f"run.name={name}"]) == 0
        paths.append(str(tmp_path / "train" / name / "0" / "checkpoint"))
    asked = [f"route.policies=[{','.join(paths)}]", "route.context=8", "route.episodes=16"]
    assert main(["route", *settings, *asked]) == 0
    folder = tmp_path / "route" / "reach_planar" / "0"
    result = json.loads((folder / "result.json").read_text())
    assert sum(each["routed"] or 0 for each in result["routes"]) == 16
    assert "Choice between policies" in (folder / "report.html").read_text()
    again = [*settings, *asked, f"route.model={folder / 'checkpoint'}", "run.name=again"]
    assert main(["route", *again]) == 0
    other = json.loads((tmp_path / "route" / "again" / "0" / "result.json").read_text())
    assert other["routes"] == result["routes"] and other["brier"] == result["brier"]
