"""Episodes that runs share through a folder, and rewards for agreement between wordings and inside groups."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.core.errors import ConfigError
from robopolicy.core.segments import Segments
from robopolicy.core.spec import STATE, Field, WorldSpec
from robopolicy.rl.context import Context
from robopolicy.rl.episodes import groups_of
from robopolicy.rl.experimental import outcomes
from robopolicy.rl.experimental.shared_replay import Shared
from robopolicy.training.collection.episodes import in_all_words

TEXTS = torch.tensor([0, 0, 1, 1])
FINAL = torch.tensor([[0.0], [0.0], [0.0], [1.0]])


@pytest.mark.checks("rewards/agreement", "PS-GRPO/Con-RAG")
def test_episodes_are_like_those_under_other_words():
    like = outcomes.likeness_to_others(FINAL, torch.zeros(4), TEXTS, 1.0)
    near = math.exp(-0.5)
    assert like.tolist() == pytest.approx([(1 + near) / 2, (1 + near) / 2, 1.0, near])
    assert not outcomes.likeness_to_others(FINAL, torch.zeros(4), torch.zeros(4), 1.0).any(), "no other words"
    assert outcomes.likeness_to_others(FINAL, torch.arange(4), TEXTS, 1.0).tolist() == [0.0] * 4, "no group"


@pytest.mark.checks("rewards/agreement")
def test_final_states_are_in_units_of_their_deviation():
    rollouts = make_rollouts([1, 2, 1, 2], [0] * 4, [1.0, 0.0, 0.0, 1.0])
    state = torch.zeros(4, 2, 1, 2)
    state[[0, 2], 0, 0, 0] = 3.0  # the last chunk of the first and the third is their first
    state[..., 1] = 7.0
    rollouts = replace(rollouts, next_observation={STATE: state}, task=TEXTS[:, None].expand(4, 2))
    final = outcomes.final_states(rollouts)
    assert final.tolist() == [[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]
    paid = outcomes.agreement(rollouts, Context(torch.Generator()), weight=0.5)
    expected = 0.5 * (1 + math.exp(-2.0)) / 2  # to the others of one kind 0, of the other 2 deviations
    assert (paid.row_return - rollouts.row_return).tolist() == pytest.approx([expected] * 4)


@pytest.mark.checks("rewards/agreement")
def test_the_episodes_of_a_group_rotate_through_the_wordings_of_its_goal():
    fields = {STATE: Field((1,))}
    spec = WorldSpec(
        "w", fields, Field((1,)), 10.0, 5, instructions=("red", "blue", "crimson", "rouge"),
        paraphrases={"red": ("crimson", "rouge")},
    )  # fmt: skip
    assert spec.wordings(2) == (0, 2, 3) and spec.wordings(1) == (1,)
    rotated = in_all_words(groups_of([5, 6], [4, 2], [2, 1]), spec)
    assert [request.task for request in rotated] == [2, 3, 0, 2, 1, 1]
    assert Counter(request.seed for request in rotated) == {5: 4, 6: 2}


@pytest.mark.checks("rewards/consensus", "URPA")
def test_consensus_is_paid_by_the_distance_to_the_groups_mean_where_the_group_agrees():
    reward = 0.5 * outcomes.consensus_reward(FINAL, Segments.of(torch.zeros(4)), 1.0)
    assert reward.tolist() == pytest.approx([0.3143] * 3 + [0.2448], abs=1e-4)


def prepared(returns: list[float], group: list[int], seed: int):
    rollouts = make_rollouts([2] * len(returns), group, returns, seed=seed)
    advantage = rollouts.row_return[:, None, None].expand(rollouts.mask.shape).clone()
    return rollouts.with_extras(advantage=advantage)


def at(iteration: int) -> Context:
    return Context(torch.Generator().manual_seed(0), iteration=iteration, figures={})


@pytest.mark.checks("replay/shared", "SAPO-swarm")
def test_runs_learn_from_each_others_groups_with_different_outcomes(tmp_path: Path):
    one, two = (Shared(folder=str(tmp_path), member=name, take=0.5, age=1) for name in ("one", "two"))
    own, foreign = prepared([1, 0, 1, 1], [0, 0, 1, 1], 1), prepared([0, 0, 0, 1, 1, 0], [4, 4, 5, 5, 6, 6], 2)
    assert len(two.mix(foreign, at(3)).group) == 6, "nobody else has written yet"
    first = at(3)
    mixed = one.mix(own, first)
    assert mixed.group.tolist()[:4] == [0, 0, 1, 1] and first.figures == {"shared_rows": 2.0}
    taken = mixed.take(torch.arange(4, 6))
    assert len(set(taken.group.tolist())) == 1 and taken.row_return.sort().values.tolist() == [0.0, 1.0]
    assert bool((taken.policy_version == -1).all()), "of another policy: its proximal log-probabilities are computed"
    assert sorted(taken.extras["advantage"][:, 0, 0].tolist()) == [0.0, 1.0]
    assert len(one.mix(own, at(5)).group) == 4, "too old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one@5", "two@3"]
    wider = replace(own, actions=torch.zeros(4, 2, 2, 3))
    with pytest.raises(ConfigError, match=r"another kind of policy: its actions have shape \[2, 1\]"):
        one.mix(wider, at(4))
    with pytest.raises(ConfigError, match=r"options\.shared\.member=NAME"):
        Shared(folder=str(tmp_path))
