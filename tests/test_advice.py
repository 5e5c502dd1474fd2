"""What is said where fine-tuning did not help."""

from types import SimpleNamespace
from typing import Any

import pytest

from robopolicy.configuration.finetune import FinetuneSection
from robopolicy.training.course import Ended
from robopolicy.training.finetune import FinetuneResult
from robopolicy.verbs import imagine
from robopolicy.verbs.finetune import print_advice


def judged(success_rate: float) -> Any:
    return SimpleNamespace(deterministic=SimpleNamespace(score=success_rate, reports_success=True))


@pytest.mark.parametrize(("tuned", "said"), [(0.2, True), (0.4, True), (0.9, False)])
def test_advice_comes_where_success_did_not_rise(tuned, said, capsys):
    print_advice({"base": judged(0.4), "tuned": judged(tuned)}, FinetuneSection())
    assert ("finetune.learning_rate=1e-4" in capsys.readouterr().out) is said


@pytest.mark.parametrize(
    ("discount", "horizon", "limit", "said"),
    [(0.99, 40, "cut", True), (0.99, 40, "end", False), (0.95, 40, "cut", False), (0.99, 120, "cut", False)],
)
def test_a_critic_that_looks_beyond_the_time_limit_is_named(discount, horizon, limit, said, capsys):
    section = FinetuneSection(discount=discount, time_limit=limit)
    print_advice({"base": judged(0.4), "tuned": judged(0.4)}, section, horizon)
    assert (
        "100 control steps ahead, further than an episode lasts (40): try finetune.discount=0.95 or "
        "finetune.time_limit=end first" in " ".join(capsys.readouterr().out.split())
    ) is said
    print_advice({"base": judged(0.4), "tuned": judged(0.9)}, section, horizon)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["grpo", "grape"])
def test_without_a_critic_none_is_named(algorithm, capsys):
    print_advice({"base": judged(0.4), "tuned": judged(0.2)}, FinetuneSection(algorithm=algorithm, discount=0.999), 40)
    said = capsys.readouterr().out
    assert "critic" not in said and "finetune.groups" in said


@pytest.mark.parametrize(("iterations", "said"), [(3, True), (4, False)])
def test_that_the_critic_alone_has_learned_is_said(iterations, said, capsys):
    print_advice({"base": judged(0.4), "tuned": judged(0.4)}, FinetuneSection(critic_warmup=3), 0, iterations)
    assert ("finetune.critic_warmup=3 takes all of 3 iterations" in " ".join(capsys.readouterr().out.split())) is said


def ended(why: Ended, **best: float) -> FinetuneResult:
    return FinetuneResult(20, 1000, why, {"iteration": 10, **best})


WATCHED = {
    "deterministic_success": 0.91,
    "deterministic_real_success": 0.695,
    "deterministic_real_low": 0.628,
    "deterministic_real_high": 0.755,
    "deterministic_gap": 0.215,
    "deterministic_score": 0.628,
}


def test_why_imagination_ended_is_said_with_what_was_kept():
    said = imagine.said_at_the_end(ended(Ended.PARTED, **WATCHED))
    assert said == (
        "Ended after 20 iterations: gap with no real gain. Kept is the policy of iteration 10: 69.5% [62.8%, 75.5%] "
        "for real, 91.0% in imagination (gap +21.5 points)."
    )
    assert "not watched for real" in imagine.said_at_the_end(ended(Ended.ITERATIONS, deterministic_success=0.9))
    returns = {"deterministic_success": 0.0, "deterministic_return": 0.0, "deterministic_real_return": -3.0}
    assert "return 0 in imagination, return -3 for real" in imagine.said_at_the_end(ended(Ended.PATIENCE, **returns))
    assert "last policy is kept" in imagine.said_at_the_end(FinetuneResult(3, 30, Ended.ITERATIONS, {}))


@pytest.mark.parametrize("why", list(Ended))
def test_advice_after_imagination_fits_why_it_ended(why, capsys):
    imagine.print_advice(ended(why, **WATCHED), {"base": judged(0.4), "tuned": judged(0.9)})
    assert not capsys.readouterr().out
    imagine.print_advice(ended(why, **WATCHED), {"base": judged(0.4), "tuned": judged(0.4)})
    said = " ".join(capsys.readouterr().out.split())
    fitting = {
        Ended.TARGET: "finetune.target_success",
        Ended.PARTED: "imagine.refresh_every",
        Ended.PATIENCE: "imagine.patience",
        Ended.ITERATIONS: "finetune.iterations",
    }
    assert fitting[why] in said and "did not rise" in said
    assert not [other for other in fitting.values() if other != fitting[why] and other in said]


def test_what_imagination_alone_chose_is_not_blamed_on_its_settings(capsys):
    unwatched = ended(Ended.TARGET, deterministic_success=0.99)
    imagine.print_advice(unwatched, {"base": judged(0.4), "tuned": judged(0.3)})
    assert "imagine.watch=200" in " ".join(capsys.readouterr().out.split())
