"""What each mechanism is for, seen on worlds small enough to count: the method beside its ablation, over some seeds."""

from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
from lock_world import CONTEXTS, LONGEST, ChoicePolicy, LockWorld, success_of

from robopolicy.core.rollouts import Rollouts
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE
from robopolicy.rl.advantages import group as group_advantages
from robopolicy.rl.context import Context
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.update import Learner

pytestmark = pytest.mark.long

LOCK = FinetuneConfig(
    algorithm="grpo",
    iterations=30,
    groups=16,
    group_size=4,
    epochs=2,
    minibatch=256,
    learning_rate=1e-2,
    actor_warmup=1,
    clip=0.2,
    target_kl=None,
    evaluate_every=0,
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def successes(lengths: tuple[int, ...], seeds: int = 4, bias: float = 0.0, world: dict | None = None, **changes):
    """Success after fine-tuning, one figure a seed, and the environment steps of a run."""
    rates, steps = [], 0
    for seed in range(seeds):
        policy = ChoicePolicy(seed=seed)
        with torch.no_grad():
            policy.layers[2].bias[0] += bias
        made = LockWorld(64, lengths, **(world or {}))
        steps = finetune(policy, None, made, replace(LOCK, **changes), seed=seed).env_steps
        rates.append(success_of(policy, lengths))
    return np.array(rates), steps


def signals(folder: Path, lengths: tuple[int, ...], seeds: int = 4, **changes) -> tuple[float, float]:
    """Mean share of episodes that something can be learned from, over the run, and mean success after it."""
    shares, won = [], []
    for seed in range(seeds):
        policy, run = ChoicePolicy(seed=seed), RunFolder(folder / str(seed))
        finetune(policy, None, LockWorld(64, lengths), replace(LOCK, **changes), run, seed=seed)
        shares.append(np.mean([record["signal"] for record in run.metrics()[1:]]))
        won.append(success_of(policy, lengths))
    return float(np.mean(shares)), float(np.mean(won))


def test_mc_grpo_a_median_of_three_flips_fewer_signs_than_a_mean_of_two():
    draws = np.random.default_rng(0)
    returns = draws.exponential(size=(100_000, 3)) - 1.0  # their mean is 0: that of the start
    two = returns[:, :2]
    flipped_two = np.mean(np.sign(two - two.mean(1, keepdims=True)) != np.sign(two))
    kept = np.sort(returns, 1)[:, [0, 2]]
    flipped_three = np.mean(np.array([[-1.0, 1.0]]) != np.sign(kept))
    assert flipped_three < 0.6 * flipped_two


@pytest.mark.slow
def test_ngrpo_gets_a_policy_off_a_wrong_habit_that_grpo_never_leaves():
    """The first choice is nearly always the same wrong one, so nearly all groups are all-fail."""
    stuck = {"lengths": (4,), "bias": 4.0, "iterations": 100}
    plain, _ = successes(**stuck)
    virtual, _ = successes(**stuck, algorithm="ngrpo", options={"ngrpo": {"best": 1.0}})
    assert plain.max() < 0.05
    assert virtual.mean() > 0.3


def test_gdpo_learns_a_small_reward_beside_a_large_one_that_is_mere_luck():
    plain, _ = successes((3,), world={"weather": 5.0})
    separate, _ = successes((3,), world={"weather": 5.0}, advantage="gdpo")
    assert separate.min() > 0.9
    assert plain.mean() < 0.5


def test_gigpo_credits_steps_by_what_followed_the_same_state():
    """Every right choice is paid by itself: an episode's sum says little about any one of them."""
    plain, steps = successes((8,), world={"partial": True}, iterations=8)
    stepwise, same = successes((8,), world={"partial": True}, iterations=8, algorithm="gigpo")
    assert steps == same
    assert stepwise.mean() > plain.mean() + 0.05


@pytest.mark.slow
def test_mopps_proposes_starts_that_still_teach(tmp_path: Path):
    setting = {"lengths": tuple(range(1, 9)), "num_initial_states": 100, "groups": 8, "group_size": 6}
    uniform, _ = signals(tmp_path / "uniform", **setting)
    chosen, _ = signals(tmp_path / "mopps", **setting, sampler="mopps")
    assert chosen > 1.15 * uniform


@pytest.mark.slow
def test_knapsack_plays_more_where_outcomes_are_uncertain(tmp_path: Path):
    setting = {"lengths": (1, 2, 3, 4, 5), "num_initial_states": 200, "groups": 12, "iterations": 40}
    uniform, before = signals(tmp_path / "uniform", **setting)
    chosen, after = signals(tmp_path / "knapsack", **setting, allocator="knapsack")
    assert chosen > 1.1 * uniform
    assert after > before - 0.02


def test_spear_finds_the_way_back_to_rare_successes():
    setting = {"lengths": (5,), "iterations": 18, "seeds": 8}
    plain, _ = successes(**setting)
    imitating, _ = successes(**setting, algorithm="spear", options={"spear": {"weight": 1.0, "warmup": 0.0}})
    assert imitating.mean() > plain.mean() + 0.05


@pytest.mark.slow
def test_bapo_survives_steps_on_stale_data_that_break_ppo():
    """A run either learns the lock or falls for good, so a few seeds say little: of twelve, PPO fell in eleven."""
    stale = {"lengths": (4,), "iterations": 60, "policy_lag": 8, "epochs": 4, "learning_rate": 0.2, "seeds": 12}
    plain, _ = successes(**stale)
    adaptive, _ = successes(**stale, coefficient="bapo")
    assert plain.mean() < 0.4
    assert adaptive.mean() > plain.mean() + 0.2


@pytest.mark.slow
def test_tree_po_needs_fewer_steps_for_as_many_leaves():
    """Two roots of four leaves each beside eight separate episodes: the prefix of a tree is played once."""
    separate, steps = successes((4,), group_size=8, groups=8, iterations=40)
    tree = {"lengths": (4,), "group_size": 2, "groups": 8, "branch_at": (1, 3), "iterations": 40}
    leaves, fewer = successes(**tree, algorithm="branch_grpo", advantage="tree_po")
    assert fewer < 0.6 * steps
    assert separate.mean() > 0.95
    assert leaves.mean() > 0.9


def test_credit_for_what_leaves_share_is_the_mean_of_theirs(monkeypatch: pytest.MonkeyPatch):
    """Without it a shared beginning is judged by one of its leaves alone."""
    from robopolicy.rl.advantages import tree as trees

    tree = {"lengths": (4,), "group_size": 2, "groups": 8, "branch_at": (1, 3), "iterations": 25, "algorithm": "dapo"}
    tree |= {"selection": (), "seeds": 6}
    shared, _ = successes(**tree)
    monkeypatch.setattr(trees, "shared_credit", lambda rollouts, advantage: advantage)
    alone, _ = successes(**tree)
    assert shared.mean() > alone.mean() + 0.2


def true_advantages(rollouts: Rollouts, length: int, spare: int) -> np.ndarray:
    """Q - V of every choice under uniform choices among three, by counting, [B, T]."""

    def value(time: int, wrong: int) -> float:
        left = length - time
        if wrong > spare:
            return 0.0
        needed = range(max(0, left - (spare - wrong)), left + 1)
        return sum(comb(left, right) * (1 / 3) ** right * (2 / 3) ** (left - right) for right in needed)

    chosen = rollouts.latents["token"][..., 0].numpy()
    context = rollouts.observation[STATE][:, 0, 0, LONGEST : LONGEST + CONTEXTS].argmax(-1).numpy()
    advantages = np.zeros(chosen.shape)
    for row in range(len(chosen)):
        wrong = 0
        for time in range(length):
            missed = int(chosen[row, time] != (3 * context[row] + 2 * time + time // 2) % 3)
            advantages[row, time] = value(time + 1, wrong + missed) - value(time, wrong)
            wrong += missed
    return advantages


def test_prime_rewards_learned_from_outcomes_follow_the_true_advantages(monkeypatch: pytest.MonkeyPatch):
    """Locks that forgive three wrong choices of six: success alone says little about any one of them."""
    updates: list[Rollouts] = []
    monkeypatch.setattr(Learner, "update", lambda self, rollouts, *_, **__: updates.append(rollouts) or {})
    policy = ChoicePolicy()
    with torch.no_grad():
        policy.layers[2].weight.zero_()
    config = replace(LOCK, algorithm="prime", iterations=12, groups=32, group_size=8)
    config = replace(config, options={"prime": {"beta": 1.0, "rate": 1e-2}})
    finetune(policy, None, LockWorld(64, (6,), spare=3), config, seed=0)
    last = updates[-1]
    true = true_advantages(last, 6, 3).ravel()
    outcome = group_advantages.rloo(last, Context(torch.Generator())).numpy().ravel()
    process = last.extras["process"][..., 0].numpy().ravel()
    assert np.corrcoef(true, process)[0, 1] > 0.65
    assert np.corrcoef(true, outcome)[0, 1] < 0.5
