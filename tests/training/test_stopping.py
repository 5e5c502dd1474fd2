"""A run that imagines goes on while real success rises, and says truly why it ended."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from bandit_toys import FIELDS, BanditWorld, ChainPolicy

from robopolicy.core.errors import ConfigError
from robopolicy.core.run import RunFolder
from robopolicy.evaluation.intervals import wilson
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.stopping import EndReason, StoppingRule, StoppingSettings

CONFIG = FinetuneConfig(
    rollout_length=3, epochs=2, minibatch=32, discount=0.9, evaluate_every=1, checkpoint_every=1, critic_warmup=0
)
WATCHED = StoppingSettings(patience=2)


def seen(real: float, imagined: float, gap: float = 0.2, episodes: int = 200) -> dict[str, float]:
    """What an evaluation in both worlds says."""
    (real_low, real_high), (low, high) = (wilson(round(rate * episodes), episodes) for rate in (real, imagined))
    parted = float(imagined - real > gap and low > real_high)
    watched = {"real_success": real, "real_low": real_low, "real_high": real_high, "score": real_low, "achieved": real}
    return {"success": imagined, "low": low, "high": high, "gap": imagined - real, "parted": parted, **watched}


def follow(
    *pairs: tuple[float, float], stopping: StoppingSettings = WATCHED, target: float | None = None
) -> StoppingRule:
    course = StoppingRule(stopping, target)
    for real, imagined in pairs:
        assert course.ended is None
        course.observe({f"deterministic_{name}": value for name, value in seen(real, imagined).items()})
    return course


def tune(pairs, config=CONFIG, folder=None, stopping=WATCHED, crash_at: int | None = None, confirm=None):
    """Fine-tune the bandit, told what `pairs` of real and imagined success say at iterations 0, 1, ..."""
    policy, asked = ChainPolicy(), RunFolder(folder).metrics() if folder is not None and folder.exists() else []
    turn = len([record for record in asked if "deterministic_success" in record])

    def evaluate(candidate, deterministic: bool) -> dict[str, float]:
        nonlocal turn
        if not deterministic:
            return {"success": 0.0}
        if turn == crash_at:
            raise KeyboardInterrupt
        turn += 1
        return seen(*pairs[turn - 1])

    torch.manual_seed(0)
    config = replace(config, iterations=len(pairs) - 1)
    run, critic = None if folder is None else RunFolder(folder), state_critic(FIELDS, 1, width=8)
    world = BanditWorld(16, horizon=5)
    return policy, finetune(
        policy, critic, world, config, run, evaluate=evaluate, confirm=confirm, seed=4, stopping=stopping
    )


def test_a_real_gain_is_kept_where_imagination_gains_more(tmp_path: Path):
    _, result = tune([(0.415, 0.43), (0.695, 0.91), (0.64, 0.93), (0.6, 0.95), (0.9, 0.9)], folder=tmp_path)
    assert result.best["iteration"] == 1 and result.best["deterministic_real_success"] == 0.695
    assert result.best["deterministic_gap"] == pytest.approx(0.215)
    assert result.ended is EndReason.DIVERGED and result.iterations == 3


def test_a_run_goes_on_beyond_a_gap_while_real_success_rises():
    _, result = tune([(0.415, 0.43), (0.6, 0.91), (0.7, 0.93), (0.8, 0.95), (0.9, 0.96)])
    assert result.ended is EndReason.ITERATIONS and result.iterations == 4
    assert result.best["deterministic_real_success"] == 0.9


def test_what_is_imagined_alone_is_not_the_best_and_reaches_no_target():
    config = replace(CONFIG, target_success=0.9)
    _, result = tune([(0.5, 0.5), (0.6, 0.6), (0.4, 0.99)], config)
    assert not result.reached_target and result.best["iteration"] == 1
    _, result = tune([(0.5, 0.5), (0.95, 0.9), (0.4, 0.99)], config)
    assert result.reached_target and result.ended is EndReason.TARGET and result.iterations == 1


def test_a_target_that_fresh_episodes_do_not_confirm_ends_nothing(tmp_path: Path):
    """The first evaluation above a target may be the luckiest: what ended the run is then kept, not the luckiest."""
    asked, fresh = [], iter([0.7, 0.92])

    def confirm(policy, iteration: int) -> dict[str, float]:
        asked.append(iteration)
        return {"success": next(fresh)}

    pairs = [(0.5, 0.5), (0.97, 0.97), (0.6, 0.6), (0.91, 0.91), (0.99, 0.99)]
    _, result = tune(pairs, replace(CONFIG, target_success=0.9), tmp_path, confirm=confirm)
    assert asked == [1, 3] and result.reached_target and result.iterations == 3
    assert result.best["iteration"] == 3 and result.best["confirmed_success"] == 0.92
    logged = {record["iteration"]: record for record in RunFolder(tmp_path).metrics()}
    assert logged[1]["confirmed_success"] == 0.7 and "confirmed_success" not in logged[2]


def test_why_a_run_ended_is_told_apart():
    assert follow((0.5, 0.5), (0.5, 0.55), (0.45, 0.5)).ended is EndReason.PATIENCE
    assert follow((0.5, 0.5), (0.5, 0.9)).ended is None
    assert follow((0.5, 0.5), (0.5, 0.9), (0.45, 0.9)).ended is EndReason.DIVERGED
    assert follow((0.7, 0.7), (0.4, 0.9)).ended is None, "one fall is waited for"
    assert follow((0.5, 0.5), (0.97, 0.97), target=0.95).ended is EndReason.TARGET
    endless = StoppingSettings(patience=0)
    assert follow((0.5, 0.5), (0.5, 0.5), (0.5, 0.5), (0.5, 0.5), stopping=endless).ended is None


def test_what_fell_and_climbs_again_is_waited_for():
    """Seen on push_cube: real success 39, 30, 11.5, 35, 30, and 96 % four evaluations later."""
    three = StoppingSettings(patience=3)
    fell = [(0.39, 0.415), (0.3, 0.265), (0.115, 0.125)]
    assert follow(*fell, (0.12, 0.13), stopping=three).ended is EndReason.PATIENCE
    climbed = follow(*fell, (0.35, 0.36), (0.3, 0.33), stopping=three)
    assert climbed.ended is None and climbed.stale == 1
    assert climbed.best == follow((0.39, 0.415)).best, "what climbs is not yet the best"
    unsure = [(0.39, 0.4), (0.36, 0.4), (0.38, 0.4)]
    assert follow(*unsure).ended is EndReason.PATIENCE, "two points of 200 episodes are chance"


def test_a_gap_alone_ends_nothing():
    """Seen on push_cube from images: a gap of 25 points while real success fell, and 94 % three evaluations later."""
    gap = [(0.265, 0.33), (0.25, 0.375), (0.635, 0.735), (0.63, 0.77), (0.53, 0.78)]
    four = StoppingSettings(patience=4)
    assert follow(*gap, (0.845, 0.885), (0.875, 0.95), stopping=four).ended is None
    assert follow(*gap, (0.5, 0.8), (0.5, 0.8), stopping=four).ended is EndReason.DIVERGED


@pytest.mark.parametrize("crash_at", [2, 3, 4])
def test_a_run_that_was_broken_off_beyond_a_gap_ends_in_the_same_place(tmp_path: Path, crash_at: int):
    pairs = [(0.3, 0.3), (0.4, 0.8), (0.5, 0.9), (0.45, 0.9), (0.5, 0.95)]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    told = tune(pairs, folder=whole)[1]
    with pytest.raises(KeyboardInterrupt):
        tune(pairs, folder=broken, crash_at=crash_at)
    again = tune(pairs, folder=broken)[1]
    assert (told.ended, told.best, told.iterations) == (again.ended, again.best, again.iterations)
    assert told.ended is EndReason.DIVERGED and told.iterations == 4
    for file in ("checkpoint/model.safetensors", "last/model.safetensors", "resume/trainer.json"):
        assert (whole / file).read_bytes() == (broken / file).read_bytes(), file


def test_a_run_that_nobody_watches_elsewhere_ends_when_the_best_policy_has_stood_for_so_long(tmp_path):
    """The best policy so far is what is kept, and a run that was killed counts on."""
    policy, asked, rates = ChainPolicy(), [], (0.3, 0.5, 0.4, 0.6, 0.6, 0.5, 0.9)

    def evaluate(candidate, deterministic: bool, crash_at: int | None = None) -> dict[str, float]:
        if deterministic:
            if len(asked) == crash_at:
                raise KeyboardInterrupt
            asked.append(copy.deepcopy(candidate.state_dict()))
        return {"success": rates[len(asked) - 1]}

    def run(**settings):
        return finetune(
            policy,
            state_critic(FIELDS, 1, width=8),
            BanditWorld(16, horizon=5),
            replace(CONFIG, iterations=6, patience=2),
            RunFolder(tmp_path),
            evaluate=partial(evaluate, **settings),
        )

    with pytest.raises(KeyboardInterrupt):
        run(crash_at=5)
    course_result = run()
    assert (course_result.ended, course_result.iterations, course_result.best["iteration"]) == (
        EndReason.PATIENCE,
        5,
        3,
    )
    assert all(torch.equal(value, asked[3][name]) for name, value in policy.state_dict().items())
    for wrong in ({"patience": -1}, {"patience": 2, "evaluate_every": 0}):
        with pytest.raises(ConfigError, match="counts evaluations"):
            replace(CONFIG, **wrong)


def test_a_watched_run_has_no_patience_with_what_is_not_real():
    for unreal in ({"deterministic_success": 0.0}, {"deterministic_success": 0.0, "deterministic_score": 1.0}):
        course = StoppingRule(StoppingSettings(patience=2))
        for _ in range(5):
            course.observe(unreal)
        assert course.ended is None
