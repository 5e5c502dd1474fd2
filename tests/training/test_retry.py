"""Second attempts in collection: who plays what, under which words it is scored, and what is reported."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bandit_toys import BanditWorld, SavesRows
from rl.made_rollouts import make_rollouts
from seeing_toys import denoising_policy, token_policy

from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import HELPED_GROUPS, Rollouts
from robopolicy.core.spec import TASK
from robopolicy.core.world import Snapshot, Step
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.training.collection import make_collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.demonstrations import Demonstrations
from robopolicy.training.experience import episode_metrics, recompute_log_probs, with_proximal
from robopolicy.training.finetune import finetune
from robopolicy.training.needs import add_group_rates
from robopolicy.training.update import Learner

CONFIG = FinetuneConfig(
    algorithm="grpo",
    allocator="retry_wording",
    iterations=2,
    groups=4,
    group_size=3,
    num_initial_states=4,
    epochs=1,
    minibatch=64,
    evaluate_every=0,
)
PLAIN, HELP = "go", "go left first"


class Advised(BanditWorld):
    """Succeeds if and only if it is told how."""

    def __init__(self, batch_size: int):
        super().__init__(batch_size, 3, terminates=True)
        self.spec = replace(self.spec, instructions=(PLAIN, HELP), paraphrases={PLAIN: (HELP,)})
        self.task = np.zeros(batch_size, dtype=int)

    def reset(self, rows=None, seeds=None, options=None) -> dict:
        self.task[np.arange(self.batch_size) if rows is None else np.asarray(rows)] = options["task"]
        return super().reset(rows, seeds, options)

    def observe(self) -> dict:
        return {**super().observe(), TASK: np.array(self.spec.instructions)[self.task]}

    def step(self, actions: np.ndarray) -> Step:
        step = super().step(actions)
        return replace(step, success=step.terminated & (self.task == 1))


class SavedAdvice(SavesRows, Advised):
    """The same, with rows that can be saved."""


def collected(make, **options):
    config = replace(CONFIG, options={"retry_wording": options})
    world = Advised(6)
    policy = make(world)
    policy.prepare_finetuning()
    draws = torch.Generator().manual_seed(0)
    rollouts = make_collector(world, policy, build_algorithm(config), config, 0, draws).collect(0)
    return rollouts, policy, world.spec.instructions


@pytest.mark.checks("allocator/retry_wording", "Guide-GRPO")
@pytest.mark.parametrize("make", [denoising_policy, token_policy])
def test_failed_groups_play_again_in_other_words_and_learn_without_them(make):
    """Starts 0 and 2 hear the plain instruction and fail; 1 and 3 hear the help and succeed."""
    rollouts, policy, instructions = collected(make, together=False, forget=True)
    helped = rollouts.extras["helped"][:, 0]
    assert helped.tolist() == [False] * 12 + [True] * 6
    assert (
        rollouts.row_success[helped].all()
        and sorted(rollouts.extras["start"][helped][:, 0].tolist()) == [0] * 3 + [2] * 3
    )
    assert not rollouts.task[helped].any(), "they are scored under the plain instruction"
    assert set(rollouts.group[helped].tolist()).isdisjoint(rollouts.group[~helped].tolist())
    told = replace(rollouts, task=torch.where(helped[:, None], 1, rollouts.task))
    as_played = recompute_log_probs(told, policy, instructions)[0]
    torch.testing.assert_close(as_played, rollouts.logp_behaviour.float(), atol=1e-4, rtol=1e-4)
    plain = recompute_log_probs(rollouts, policy, instructions)[0]
    hears_words = make is token_policy  # the other one reads the state alone
    assert torch.allclose(plain[helped], as_played[helped], atol=1e-4) != hears_words, (
        "so the ratio does not begin at 1"
    )
    assert episode_metrics(rollouts.unaided)["success"] == 0.5, "success with help is not reported"


@pytest.mark.checks("NuRL")
def test_helped_episodes_may_be_compared_with_the_others_under_their_own_words():
    rollouts, policy, instructions = collected(token_policy, together=True, forget=False, count=2)
    helped = rollouts.extras["helped"][:, 0]
    assert int(helped.sum()) == 4 and bool((rollouts.task[helped] == 1).all())
    groups = [rollouts.group[rows].unique().tolist() for rows in (helped, ~helped)]
    assert set(groups[0]) <= set(groups[1]) and len(groups[1]) == 4
    scores = recompute_log_probs(rollouts, policy, instructions)[0]
    torch.testing.assert_close(scores, rollouts.logp_behaviour.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.checks("TriMPI/PolicyRollout")
def test_half_of_every_group_may_hear_more_and_all_are_scored_under_the_plain_words():
    """Starts 0 and 2 are asked in the plain words; 1 and 3 in the others, and are left as they are."""
    rollouts, policy, instructions = collected(token_policy, rate=1.0, together=True, forget=True, from_plain=True)
    helped, start = rollouts.extras["helped"][:, 0], rollouts.extras["start"][:, 0]
    assert helped.tolist() == [False] * 12 + [True] * 6 and rollouts.row_success[helped].all()
    assert sorted(start[helped].tolist()) == [0] * 3 + [2] * 3
    assert set(rollouts.group[helped].tolist()) == set(rollouts.group[~helped & (start % 2 == 0)].tolist())
    assert torch.equal(rollouts.task[:, 0], start % 2), "all of a group are learned from in its own words"
    told = replace(rollouts, task=torch.where(helped[:, None], 1, rollouts.task))
    as_played = recompute_log_probs(told, policy, instructions)[0]
    torch.testing.assert_close(as_played, rollouts.logp_behaviour.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.checks("ICPO", "NuRL")
@pytest.mark.parametrize(
    "changes",
    [
        {
            "coefficient": "icpo",
            "rewards": ("helped_bonus",),
            "selection": ("helped_successes",),
            "options": {"retry_wording": {"rate": 1.0, "count": 1, "together": True}},
        },
        {"selection": ("plain_rows",), "options": {"retry_wording": {"together": True, "forget": False}}},
    ],
)
def test_a_run_learns_from_helped_episodes(changes: dict):
    world = Advised(6)
    policy = token_policy(world)
    policy.prepare_finetuning()
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    finetune(policy, None, world, replace(CONFIG, **changes))
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.checks("allocator/retry_wording", "Guide-GRPO")
@pytest.mark.parametrize("words_of_their_own", [False, True])
def test_forgotten_help_has_no_proximal_policy_but_the_one_that_acted(words_of_their_own: bool):
    rollouts = make_rollouts([2, 2], [0, 0])
    rollouts = rollouts.with_extras(helped=torch.tensor([[False, False], [True, True]]))
    proximal = with_proximal(
        rollouts, torch.full_like(rollouts.logp_behaviour, -7.0), forgets_help=not words_of_their_own
    ).proximal
    assert bool((proximal[0] == -7).all())
    assert torch.equal(proximal[1], proximal[0] if words_of_their_own else rollouts.logp_behaviour[1])


@pytest.mark.checks("allocator/retry_wording", "Guide-GRPO")
def test_the_ratio_is_to_the_policy_with_help_also_where_the_proximal_one_is_an_average(
    monkeypatch: pytest.MonkeyPatch,
):
    """PPO-EWMA computes the proximal policy anew in every step, under the plain words."""
    batches: list[Rollouts] = []
    score = Learner._score

    def spy(self, batch, *arguments):
        batches.append(batch)
        return score(self, batch, *arguments)

    monkeypatch.setattr(Learner, "_score", spy)
    world = Advised(6)
    policy = token_policy(world)
    policy.prepare_finetuning()
    finetune(policy, None, world, replace(CONFIG, iterations=1, proximal_policy="average"))
    batch = batches[0]
    helped = batch.extras["helped"] & batch.alive
    assert bool(helped.any()) and batch.logp_proximal is not None
    torch.testing.assert_close(batch.proximal[helped].float(), batch.logp_behaviour[helped].float())


@pytest.mark.checks("allocator/retry_wording", "Guide-GRPO")
def test_the_ratio_is_to_the_policy_with_help_also_where_data_are_old(monkeypatch: pytest.MonkeyPatch):
    """Old data are clipped around the present policy; but under the plain words that would make the ratio 1."""
    updates: list[Rollouts] = []
    update = Learner.update

    def spy(self, rollouts, *arguments, **options):
        updates.append(rollouts)
        return update(self, rollouts, *arguments, **options)

    monkeypatch.setattr(Learner, "update", spy)
    world = Advised(6)
    policy = token_policy(world)
    policy.prepare_finetuning()
    finetune(policy, None, world, replace(CONFIG, policy_lag=1, learning_rate=1e-2))
    old = updates[1]
    helped = old.extras["helped"] & old.alive
    assert bool(helped.any()) and old.logp_proximal is not None and bool((old.policy_version[old.alive] == 0).all())
    assert torch.equal(old.proximal[helped], old.logp_behaviour[helped].to(old.proximal.dtype))
    others = old.alive & ~helped
    assert not torch.allclose(old.proximal[others], old.logp_behaviour[others].to(old.proximal.dtype))


def test_help_is_refused_where_groups_are_used_as_soon_as_they_are_complete():
    world = Advised(6)
    config = replace(CONFIG, overprovision=0.5)
    policy = token_policy(world)
    collector = make_collector(world, policy, build_algorithm(config), config, 0, torch.Generator())
    with pytest.raises(ConfigError, match="set overprovision=0"):
        collector.collect(0)


def test_help_in_other_words_is_refused_where_there_are_none():
    world = Advised(6)
    world.spec = replace(world.spec, paraphrases={})  # two instructions with a wording each
    with pytest.raises(ConfigError, match=r"retry_wording needs a world with another wording of an instruction"):
        finetune(token_policy(world), None, world, CONFIG)


@pytest.mark.checks("auxiliaries/kl_by_difficulty", "CLPO")
def test_a_problem_made_easier_stays_as_hard_as_it_was():
    """Group 0 fails in 3 of 4 episodes and its eased ones succeed; 1 has no episodes without help; 2 compares all."""
    groups = [0] * 4 + [HELPED_GROUPS] * 2 + [HELPED_GROUPS + 1] + [2] * 2
    rollouts = make_rollouts([1] * 9, groups, [1.0, 0, 0, 0, 1, 1, 1, 1, 0])

    def rates(rollouts: Rollouts) -> list[float]:
        return add_group_rates(rollouts, None).extras["group_rate"][:, 0].tolist()  # type: ignore[arg-type]

    assert rates(rollouts) == [0.25] * 4 + [1.0] * 3 + [0.5] * 2, "no help"
    helped = rollouts.with_extras(helped=torch.tensor([0, 0, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool)[:, None])
    assert rates(helped) == [0.25] * 6 + [1.0] + [0.5] * 2
    later = replace(helped, group=helped.group + HELPED_GROUPS)  # as of a second collector
    assert rates(later) == rates(helped)


@pytest.mark.checks("allocator/retry_by_difficulty", "CLPO")
def test_hard_groups_are_eased_and_others_vary():
    """Starts 0 and 2 fail and begin near the end of a demonstration; 1 and 3 count as middling and hear other words."""
    world = SavedAdvice(6)
    shown = [Snapshot({"context": np.zeros((1, 2)), "time": np.array([time])}) for time in range(3)]
    options = {"retry_by_difficulty": {"depth": 0.9, "rate": 1.0, "count": 2}}
    config = replace(CONFIG, allocator="retry_by_difficulty", options=options)
    policy, draws = token_policy(world), torch.Generator().manual_seed(0)
    policy.prepare_finetuning()
    demonstrations = Demonstrations(dict.fromkeys(range(4), shown))
    collector = make_collector(world, policy, build_algorithm(config), config, 0, draws, demonstrations)
    rollouts = collector.collect(0)
    helped, start = rollouts.extras["helped"][:, 0], rollouts.extras["start"][:, 0]
    assert helped.tolist() == [False] * 12 + [True] * 8
    eased = helped & (start % 2 == 0)
    assert rollouts.alive[eased].sum(1).tolist() == [1] * 4, "one chunk before the end"
    varied = helped & (start % 2 == 1)
    assert rollouts.alive[varied].sum(1).tolist() == [3] * 4 and not rollouts.task[varied].any(), "other words"
    assert set(rollouts.group[helped].tolist()).isdisjoint(rollouts.group[~helped].tolist())
