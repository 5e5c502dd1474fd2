"""What is said where fine-tuning did not help."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robopolicy.configuration.sections.learn import FinetuneSection
from robopolicy.evaluation.success import EvaluationResult
from robopolicy.training.finetune import FinetuneResult
from robopolicy.training.offline.rounds import Rounds
from robopolicy.training.stopping import EndReason
from robopolicy.verbs import imagine, offline, online
from robopolicy.verbs.advice import Evidence, evident_cause, print_advice


def judged(success_rate: float) -> Any:
    return SimpleNamespace(deterministic=SimpleNamespace(score=success_rate, reports_success=True))


@pytest.mark.parametrize(("tuned", "said"), [(0.2, True), (0.4, True), (0.9, False)])
def test_advice_comes_where_success_did_not_rise(tuned, said, capsys):
    print_advice({"base": judged(0.4), "tuned": judged(tuned)}, FinetuneSection())
    assert ("finetune.learning_rate=1e-4" in capsys.readouterr().out) is said


@pytest.mark.parametrize(
    ("discount", "horizon", "limit", "said"),
    [
        (0.99, 40, "truncate", True),
        (0.99, 40, "terminate", False),
        (0.95, 40, "truncate", False),
        (0.99, 120, "truncate", False),
    ],
)
def test_a_critic_that_looks_beyond_the_time_limit_is_named(discount, horizon, limit, said, capsys):
    section = FinetuneSection(discount=discount, time_limit=limit)
    print_advice({"base": judged(0.4), "tuned": judged(0.4)}, section, horizon)
    assert (
        "100 control steps, longer than an episode (40): try finetune.discount=0.95 or "
        "finetune.time_limit=terminate first" in " ".join(capsys.readouterr().out.split())
    ) is said
    print_advice({"base": judged(0.4), "tuned": judged(0.9)}, section, horizon)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["grpo", "grape"])
def test_without_a_critic_none_is_named(algorithm, capsys):
    print_advice({"base": judged(0.4), "tuned": judged(0.2)}, FinetuneSection(algorithm=algorithm, discount=0.999), 40)
    output = capsys.readouterr().out
    assert "critic" not in output and "finetune.groups" in output


@pytest.mark.parametrize(("iterations", "said"), [(3, True), (4, False)])
def test_that_the_critic_alone_has_learned_is_said(iterations, said, capsys):
    print_advice({"base": judged(0.4), "tuned": judged(0.4)}, FinetuneSection(critic_warmup=3), 0, iterations)
    assert ("finetune.critic_warmup=3 takes all 3 iterations" in " ".join(capsys.readouterr().out.split())) is said


def recorded(count: int = 20, **columns: Any) -> list[dict[str, Any]]:
    """Metrics of so many iterations, of a run in which all went as it should; columns: what was otherwise."""
    usual = {"episodes": 64.0, "success": 0.4, "reward_per_decision": 0.2, "signal": 0.9, "kl": 0.02}
    usual |= {"return": 3.0, "clip_fraction": 0.1, "kl_stop": 0.0, "actor_steps": 8}
    rows = [{"iteration": 0, "deterministic_success": 0.4}]
    for number in range(count):
        row = {name: value(number) if callable(value) else value for name, value in {**usual, **columns}.items()}
        rows.append({"iteration": number + 1, **{name: value for name, value in row.items() if value is not None}})
    return rows


def outcome(rate: float, episodes: int = 200, reports: bool = True) -> Any:
    success = np.arange(episodes) < round(rate * episodes)
    returns = success.astype(float) - (0.5 if reports else 0.0)
    made = EvaluationResult(
        world="w",
        seeds=np.arange(episodes),
        success=success,
        returns=returns,
        lengths=np.full(episodes, 9),
        cut=np.zeros(episodes, bool),
        deterministic=True,
        seconds=1.0,
        steps=9 * episodes,
        reports_success=reports,
    )
    return SimpleNamespace(deterministic=made)


UNPAID = {"success": 0.0, "return": 0.0, "reward_per_decision": 0.0}
FELL = {"success": lambda at: 0.5 - 0.02 * at, "return": lambda at: 1.0 + at}
CASES = [
    ("nothing was paid", UNPAID, 0.0, 0.0, "All rewards were zero in 1280 episodes", "finetune.hint=guide"),
    ("two iterations, unpaid", {**UNPAID, "count": 2}, 0.0, 0.0, "All rewards were zero in 128 episodes",
     "robopolicy teach"),
    ("no episode ended", {**UNPAID, "success": None, "return": None, "episodes": 0.0}, 0.1, 0.1,
     "All rewards were zero in 20 iterations, and no episode ended", "finetune.rollout_length="),
    ("all alike", {"success": 0.0, "signal": 0.0}, 0.0, 0.0, "of each initial state had equal returns",
     "finetune.group_size="),
    ("a penalty a step", {"success": 0.0, "return": -40.0, "reward_per_decision": -1.0}, 0.0, 0.0,
     "had the same return, -40", "robopolicy train"),
    ("nothing to gain", {"success": 0.97}, 1.0, 0.995, "already succeeds in 100.0%", "world.options"),
    ("too large", {"kl": 0.4, "kl_stop": 1.0}, 0.4, 0.2, "Updates were too large: the KL divergence of an update "
     "reached 0.4", "finetune.learning_rate="),
    ("clipped", {"clip_fraction": 0.6}, 0.4, 0.2, "60% of the ratios were clipped", "finetune.clip="),
    ("another reward", FELL, 0.4, 0.1, "the return rose from 3 to 18 while success fell", "finetune.rewards="),
    ("hardly changed", {"kl": 2e-6}, 0.4, 0.4, "The policy hardly changed", "finetune.learning_rate="),
    ("too few", {"count": 7}, 0.4, 0.39, "7 iterations are too few", "finetune.iterations="),
    ("not significant", {}, 0.4, 0.39, "is not significant", "finetune.evaluate_episodes=800"),
    ("by heart", {}, 0.6, 0.2, "overfit", "finetune.num_envs="),
]  # fmt: skip


@pytest.mark.parametrize(("what", "columns", "base", "tuned", "cause", "way"), CASES, ids=[case[0] for case in CASES])
def test_advice_names_what_the_run_shows_and_nothing_else(what, columns, base, tuned, cause, way, capsys):
    evidence = Evidence.of(recorded(**columns))
    print_advice({"base": outcome(base), "tuned": outcome(tuned)}, FinetuneSection(), 0, evidence.iterations, evidence)
    output = " ".join(capsys.readouterr().out.split())
    assert cause in output and way in output, output
    others = {"All rewards were zero", "equal returns", "the same return", "already succeeds", "Updates were too large",
              "hardly changed", "too few", "not significant", "overfit", "updates that are too large"}  # fmt: skip
    assert not [other for other in others if other in output and other not in f"{cause} {way}" and what != "clipped"]


def test_rewards_are_options_of_outside_environments_alone():
    evidence = Evidence.of(recorded(**UNPAID))
    base = outcome(0.0).deterministic
    assert "world.options.reward" not in evident_cause(evidence, base, base, FinetuneSection(), world="push_cube")
    assert "world.options.reward=package.module:NAME" in evident_cause(
        evidence, base, base, FinetuneSection(), world="gymnasium:Maze-v0"
    )


def test_imagination_that_pays_nothing_is_named_whatever_ended_it(capsys):
    evidence = Evidence.of(recorded(**UNPAID))
    both = {"base": outcome(0.2), "tuned": outcome(0.2)}
    imagine.print_advice(ended(EndReason.PATIENCE, **WATCHED), both, FinetuneSection(), evidence)
    assert "All rewards were zero in 1280 imagined episodes" in capsys.readouterr().out
    section = FinetuneSection(target_success=0.9)
    imagine.print_advice(ended(EndReason.TARGET, **WATCHED), both, section, Evidence.of(recorded()))
    assert "not on new ones" in capsys.readouterr().out


def judgement(low: float, high: float, candidate: float = 1.0, **changes: Any) -> dict[str, Any]:
    usual = {"bootstrap": [low, high], "student": [low, high], "low": low, "starts": 64, "margin": 0.0, "ceiling": None}
    return {**usual, "candidate": candidate, **changes}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (judgement(-0.3, -0.1), "1 of 1 evaluations found a candidate significantly worse"),
        (judgement(0.1, 0.3, 9.0, ceiling=2.0), "above nearly all recorded successes"),
        (judgement(0.1, 0.3, margin=0.2), "not by the margin of 0.2"),
        (judgement(-0.1, 0.2), "gate.num_states=256"),
    ],
)
def test_refused_candidates_are_advised_by_what_the_judges_found(found, said):
    assert said in offline.why_refused(Rounds(0, ({"verdict": {"judgements": [found]}},)))


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        ([(0, 0.0), (100, 0.0)], "No evaluation episode succeeded"),
        ([(0, 1.0), (100, 0.99)], "Almost no improvement is possible"),
        ([(0, 0.4), (50, 0.8), (100, 0.3)], "dropped to 0.3"),
        ([(0, 0.4), (100, 0.4)], "train for more steps"),
    ],
)
def test_learning_online_that_gains_nothing_is_advised_by_its_curve(curve, said):
    assert said in online.why_no_gain(curve, True, "dsrl")


def ended(why: EndReason, **best: float) -> FinetuneResult:
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
    text = imagine.closing_message(ended(EndReason.DIVERGED, **WATCHED))
    assert text == (
        "Stopped after 20 iterations: real and imagined success diverge without real gain. Saved the policy of "
        "iteration 10: real success 69.5% [62.8%, 75.5%], 91.0% in imagination (gap +21.5 points)."
    )
    assert "not evaluated in the real environment" in imagine.closing_message(
        ended(EndReason.ITERATIONS, deterministic_success=0.9)
    )
    returns = {"deterministic_success": 0.0, "deterministic_return": 0.0, "deterministic_real_return": -3.0}
    assert "return 0 in imagination, return -3 in the real environment" in imagine.closing_message(
        ended(EndReason.PATIENCE, **returns)
    )
    assert "last policy is saved" in imagine.closing_message(FinetuneResult(3, 30, EndReason.ITERATIONS, {}))


@pytest.mark.parametrize("why", list(EndReason))
def test_advice_after_imagination_fits_why_it_ended(why, capsys):
    imagine.print_advice(ended(why, **WATCHED), {"base": judged(0.4), "tuned": judged(0.9)})
    assert not capsys.readouterr().out
    imagine.print_advice(ended(why, **WATCHED), {"base": judged(0.4), "tuned": judged(0.4)})
    output = " ".join(capsys.readouterr().out.split())
    fitting = {
        EndReason.TARGET: "finetune.target_success",
        EndReason.DIVERGED: "imagine.refresh_every",
        EndReason.PATIENCE: "imagine.patience",
        EndReason.ITERATIONS: "finetune.iterations",
    }
    assert fitting[why] in output and "did not increase" in output
    assert not [other for other in fitting.values() if other != fitting[why] and other in output]


@pytest.mark.parametrize("why", list(EndReason))
def test_advice_after_imitation_names_settings_that_it_reads(why, capsys):
    equal, evidence = {"base": judged(0.4), "tuned": judged(0.4)}, Evidence.of(recorded(**UNPAID))
    imagine.print_advice(ended(why, **WATCHED), equal, FinetuneSection(), evidence, imitates=True)
    output = " ".join(capsys.readouterr().out.split())
    fitting = {
        EndReason.TARGET: "finetune.target_success",
        EndReason.DIVERGED: "world.imagination.noises",
        EndReason.PATIENCE: "imagine.patience",
        EndReason.ITERATIONS: "imagine.rounds",
    }
    assert fitting[why] in output
    unread = "finetune.iterations", "learning_rate", "num_envs", "refresh_every", "bc_weight", "rewards were zero"
    assert not [name for name in unread if name in output]


def test_what_imagination_alone_chose_is_not_blamed_on_its_settings(capsys):
    unwatched = ended(EndReason.TARGET, deterministic_success=0.99)
    imagine.print_advice(unwatched, {"base": judged(0.4), "tuned": judged(0.3)})
    assert "imagine.real_eval_episodes=200" in " ".join(capsys.readouterr().out.split())


def test_a_model_that_misjudges_what_it_was_trained_on_is_named_where_success_did_not_rise(tmp_path, capsys):
    rows = {"expert, noise low": (1.0, 0.8), "expert, play": (0.34, 0.38)}
    figures = {name: {"recorded": real, "imagined": imagined} for name, (real, imagined) in rows.items()}
    stayed, rose = ({"base": judged(0.4), "tuned": judged(rate)} for rate in (0.4, 0.9))
    imagine.print_doubts(tmp_path / "checkpoint", stayed)
    (tmp_path / "result.json").write_text(json.dumps({"behaviours": figures}))
    imagine.print_doubts(tmp_path / "checkpoint", rose)
    assert not capsys.readouterr().out
    imagine.print_doubts(tmp_path / "checkpoint", stayed)
    said = " ".join(capsys.readouterr().out.split())
    assert "undercounts expert, noise low: 80%" in said and "play" not in said
    assert "the world model may be the cause" in said and "worldmodel.fit.steps" in said
    (tmp_path / "result.json").write_text(json.dumps({"behaviours": {"expert, play": figures["expert, play"]}}))
    imagine.print_doubts(tmp_path / "checkpoint", stayed)
    assert not capsys.readouterr().out
