"""Rewards and the averaging of losses, by hand."""

from dataclasses import replace

import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE
from robopolicy.rl import rewards, weights
from robopolicy.rl.advantages.group import grpo
from robopolicy.rl.context import Context
from robopolicy.rl.experimental import rewards as experimental_rewards

CONTEXT = Context(torch.Generator())


def acting(table: list[list[list[list[float]]]], lengths: list[int]):
    """Rollouts with these actions [B, T, C, A]."""
    return replace(make_rollouts(lengths, [0] * len(lengths), [0.0] * len(lengths)), actions=torch.tensor(table))


@pytest.mark.checks("rewards/effort")
def test_effort_is_the_mean_square_of_every_action():
    rollouts = acting([[[[1.0, 3.0], [0.0, 2.0]]], [[[2.0, 2.0], [4.0, 0.0]]]], [1, 1])
    valid = rollouts.valid.clone()
    valid[1, 0, 1] = False
    paid = rewards.effort(replace(rollouts, valid=valid), CONTEXT, cost=0.5)
    torch.testing.assert_close(paid.rewards["effort"], -0.5 * torch.tensor([[[5.0, 2.0]], [[4.0, 0.0]]]))
    assert paid.rewards["reward"] is rollouts.rewards["reward"]


@pytest.mark.checks("rewards/overlong", "DAPO")
def test_long_episodes_are_punished_softly():
    """Limit 10, margin 4, two control steps a chunk: 4, 6, 7, 8 and 10 steps cost 0, 0, .25, .5, 1, more the same."""
    rollouts = make_rollouts([2, 3, 4, 4, 5, 6], [0] * 6, [1.0] * 6)
    rollouts.valid[2, 3, 1] = False
    paid = experimental_rewards.overlong(rollouts, CONTEXT, limit=10, margin=4)
    assert paid.rewards["overlong"].sum((1, 2)).tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    assert float(paid.rewards["overlong"][3, 3, 1]) == -0.5 and float(paid.rewards["overlong"][2, 3, 0]) == -0.25
    assert paid.rewards["reward"] is rollouts.rewards["reward"]
    with pytest.raises(ConfigError, match="set a limit"):
        experimental_rewards.overlong(rollouts, CONTEXT, limit=4, margin=4)


@pytest.mark.checks("rewards/smooth")
def test_smooth_is_the_mean_square_of_every_change_inside_a_decision():
    rollouts = acting([[[[1.0, 3.0], [0.0, 5.0]], [[7.0, 7.0], [7.0, 8.0]]]], [2])
    paid = experimental_rewards.smooth(rollouts, CONTEXT, cost=0.5)
    torch.testing.assert_close(paid.rewards["smooth"], -0.5 * torch.tensor([[[0.0, 2.5], [0.0, 0.5]]]))


@pytest.mark.checks("rewards/pav")
def test_pav_pays_the_advantage_of_a_prover_that_tries_several_times():
    rollouts = make_rollouts([2, 1], [0, 0], [1.0, 0.0])
    q, v = torch.tensor([[0.5, 1.2], [0.1, 0.9]]), torch.tensor([[0.2, 0.5], [0.1, 0.0]])
    paid = experimental_rewards.progress_under_prover(rollouts.with_extras(q=q, v=v), CONTEXT, alpha=0.5, tries=3)
    # The best of 3 succeeds with 1 - (1 - p)^3; probabilities are cut to [0, 1]; the last row's second is padding.
    gain = [(1 - 0.5**3) - (1 - 0.8**3), 1 - (1 - 0.5**3), 0.0, 0.0]
    expected = torch.tensor(gain).reshape(2, 2) * 0.5
    torch.testing.assert_close(paid.rewards["prover"][..., 1], expected)
    assert not paid.rewards["prover"][..., 0].any()
    torch.testing.assert_close(paid.row_return, rollouts.row_return + expected.sum(1))


@pytest.mark.checks("rewards/partial_credit")
def test_milestones_are_paid_once_and_success_makes_up_to_one():
    rollouts = make_rollouts([3, 3, 2], [0, 0, 0], [0.0] * 3)
    progress = torch.tensor(
        [
            [[0.6, 0.6], [-1.0, 1.0], [1.0, 0.0]],  # sums .6, 1.2 | .2, 1.2 | 2.2, 2.2: one milestone, then another
            [[2.5, 0.0], [0.0, 0.0], [0.0, 2.0]],  # two at once; the third in the step that succeeds
            [[0.0, 0.5], [0.4, 0.0], [0.0, 0.0]],  # none
        ]
    )
    success = rollouts.success.clone()
    success[1, 2] = True
    worlds = {"progress": progress, "success": torch.full_like(progress, 7.0), "uncertainty": -0.1 * progress}
    rollouts = replace(rollouts, rewards=worlds, success=success)
    paid = experimental_rewards.partial_credit(rollouts, CONTEXT, milestones=(1.0, 2.0, 4.0), credit=0.6)
    expected = torch.tensor(
        [
            [[0.0, 0.2], [0.0, 0.0], [0.2, 0.0]],
            [[0.4, 0.0], [0.0, 0.0], [0.0, 0.6]],
            [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
        ]
    )
    torch.testing.assert_close(paid.rewards["success"], expected)
    assert set(paid.rewards) == {"success", "uncertainty"}
    assert paid.rewards["success"].sum((1, 2)).tolist() == pytest.approx([0.4, 1.0, 0.0])


@pytest.mark.checks("rewards/partial_credit")
def test_milestones_begin_anew_with_the_next_episode_of_a_stream():
    rollouts = make_rollouts([4], [0], [0.0])
    progress = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.5, 0.5], [0.0, 1.0]]])
    rollouts = replace(rollouts, rewards={"progress": progress}, whole=False)
    rollouts.terminated[:] = torch.tensor([[False, True, False, False]])
    rollouts.success[:] = torch.tensor([[False, True, False, False]])
    paid = experimental_rewards.partial_credit(rollouts, CONTEXT, milestones=(1.0, 2.0), credit=0.5)
    expected = torch.tensor([[[0.25, 0.0], [0.0, 0.75], [0.0, 0.25], [0.0, 0.25]]])
    torch.testing.assert_close(paid.rewards["success"], expected)


@pytest.mark.checks("weight/duration")
def test_duration_weighs_the_gradient_of_a_decision_by_its_time_over_the_mean():
    rollouts = make_rollouts([2, 1], [0, 0])
    valid = rollouts.valid.clone()
    valid[0, 1, 1] = False  # a decision of one control step; the others take two
    rollouts = replace(rollouts, valid=valid)
    episode_weights = experimental_rewards.weigh_by_duration(rollouts.mask, rollouts)
    # (duration / mean duration) / number of steps, where each of three decisions has two steps.
    expected = torch.tensor([[2.0, 1.0], [2.0, 0.0]]) / (5 / 3) / 6
    torch.testing.assert_close(episode_weights, expected[..., None].expand(2, 2, 2))
    assert float(episode_weights.sum()) == pytest.approx(1.0)


@pytest.mark.checks("weight/step_mean", "weight/episode_mean", "weight/decision_mean", "weight/constant")
def test_what_counts_alike_in_each_average():
    """Two episodes: two decisions of 3 and 1 steps, and one decision of 2 steps."""
    mask = torch.tensor([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [0, 0, 0]]], dtype=torch.bool)
    rollouts = make_rollouts([2, 1], [0, 0], steps=3)
    tables = {
        weights.weigh_steps: [[1 / 6, 1 / 6, 1 / 6, 1 / 6], [1 / 6, 1 / 6]],
        weights.weigh_episodes: [[1 / 8, 1 / 8, 1 / 8, 1 / 8], [1 / 4, 1 / 4]],
        experimental_rewards.weigh_decisions: [[1 / 12, 1 / 12, 1 / 12, 1 / 4], [1 / 4, 1 / 4]],
        weights.weigh_constantly: [[1 / 12, 1 / 12, 1 / 12, 1 / 12], [1 / 12, 1 / 12]],
    }
    for function, table in tables.items():
        episode_weights = function(mask, rollouts)
        assert episode_weights[mask].tolist() == pytest.approx([value for row in table for value in row]), (
            function.__name__
        )
        assert not episode_weights[~mask].any()
    assert weights.weigh_constantly(mask, rollouts, length=4.0)[mask].tolist() == pytest.approx([1 / 8] * 6)
    # In minibatches of single decisions every step knows the length of its whole episode.
    sizes = weights.episode_sizes(mask)
    assert {name: size[:, 0].tolist() for name, size in sizes.items()} == {
        "episode_steps": [4, 2],
        "episode_decisions": [2, 1],
    }
    decisions = replace(rollouts, mask=mask).with_extras(**sizes).flat()
    for function in (weights.weigh_episodes, experimental_rewards.weigh_decisions):
        expected = [value for row in tables[function] for value in row]
        assert function(decisions.mask, decisions)[decisions.mask].tolist() == pytest.approx(expected)


@pytest.mark.checks("rewards/information_gain")
def test_information_is_what_a_decision_adds_to_the_value():
    """Values are chances of success, within [0, 1]; nothing is paid in the last column of a stream that goes on."""
    rollouts = make_rollouts([3, 1], [0, 0], [1.0, 0.0])
    values = torch.tensor([[-0.3, 0.5, 1.4], [0.2, 0.7, 0.7]])
    paid = experimental_rewards.information_gain(rollouts.with_extras(v=values), CONTEXT)
    torch.testing.assert_close(paid.rewards["information"].sum(-1), torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]))
    assert paid.rewards["success"].sum(-1).tolist() == [[0, 0, 1], [0, 0, 0]]
    stream = replace(rollouts.take(torch.tensor([0])), whole=False).with_extras(v=values[:1])
    stream.terminated[:] = torch.tensor([[True, False, False]])
    paid = experimental_rewards.information_gain(stream, CONTEXT)
    torch.testing.assert_close(paid.rewards["information"].sum(-1), torch.tensor([[0.0, 0.5, 0.0]]))


def shaken(rollouts) -> torch.Tensor:
    return rollouts.actions.abs().amax((1, 2, 3)) > 5


@pytest.mark.checks("rewards/flawed")
@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ("cf......", [2.335, 0.898, *[-0.539] * 6]),
        ("cccccff.", [*[0.707] * 5, -0.707, -0.707, -2.121]),
    ],
)
def test_flawed_successes_are_paid_while_most_fail_and_charged_when_most_succeed(outcomes: str, expected: list[float]):
    rollouts = make_rollouts([2] * 8, [0] * 8, [0.0 if each == "." else 1.0 for each in outcomes])
    flaws = torch.tensor([each == "f" for each in outcomes])
    still = torch.zeros_like(rollouts.actions)
    still[:, 1, 0] = 6.0 * flaws[:, None]  # a jump between two decisions
    rollouts = replace(rollouts, actions=still)
    paid = experimental_rewards.flawed(rollouts, CONTEXT, most=5.0)
    assert grpo(paid, CONTEXT)[:, 0].tolist() == pytest.approx(expected, abs=1e-3)
    other = experimental_rewards.flawed(rollouts, CONTEXT, flaw=f"{__name__}:shaken")
    assert other.row_return.tolist() == paid.row_return.tolist()
    with pytest.raises(ConfigError, match=r"options.flawed.flaw=jerky is not known. Did you mean 'jerk'"):
        experimental_rewards.flawed(rollouts, CONTEXT, flaw="jerky")


@pytest.mark.checks("rewards/majority_label")
def test_a_majority_that_rises_and_stays_replaces_the_label():
    rising, flat = [0.375, 0.5, 0.5, 0.625], [0.375, 0.375, 0.5, 0.375]  # slopes .075 and .0125
    assert experimental_rewards.rises_to_majority(rising, ["a"] * 4, 0.05)
    assert not experimental_rewards.rises_to_majority(flat, ["a"] * 4, 0.05)
    assert not experimental_rewards.rises_to_majority(rising, ["a", "a", "a", "b"], 0.05), "not the one of before"
    assert not experimental_rewards.rises_to_majority(rising, ["a", "b", None, "a"], 0.05), "nor one of two"
    assert not experimental_rewards.rises_to_majority(rising, ["a", "a", "a", None], 0.05), "nor a tie"


@pytest.mark.checks("rewards/majority_label")
def test_success_is_then_to_end_where_the_majority_ends():
    """One start whose detector pays those that end elsewhere; their majority grows from two to four of five."""
    rollouts = make_rollouts([2] * 5, [0] * 5, [1.0, 0.0, 0.0, 0.0, 0.0])
    rollouts = rollouts.with_extras(start=torch.full(rollouts.shape, 7))
    memory: dict = {}
    for visit, count in enumerate((2, 3, 4)):
        ends = torch.arange(5.0) * 9
        ends[5 - count :] = -9.0
        seen = replace(rollouts, next_observation={STATE: ends[:, None, None, None].expand(5, 2, 1, 3)})
        context = Context(torch.Generator(), iteration=visit, iterations=4, memory=memory)
        paid = experimental_rewards.majority_label(seen, context, after=0.5)
        expected = [1, 0, 0, 0, 0] if visit < 2 else [0, 1, 1, 1, 1]
        assert paid.row_return.tolist() == paid.row_success.float().tolist() == expected
    memory.clear()
    assert experimental_rewards.majority_label(seen, context).row_return.tolist() == [1, 0, 0, 0, 0], (
        "one visit is none"
    )


@pytest.mark.checks("rewards/majority_label")
def test_answers_agree_on_what_has_not_varied_and_get_its_unit_once_it_does():
    """Nothing moves at first, and one field never does; then two of four objects end within a unit, then three."""
    rollouts = make_rollouts([1] * 4, [0] * 4, [1.0, 0.0, 0.0, 0.0])
    rollouts = rollouts.with_extras(start=torch.full(rollouts.shape, 7))
    memory: dict = {}
    for visit, ends in enumerate(([0.3] * 4, [0.3, 0.5, 0.51, 0.9], [0.3, 0.5, 0.51, 0.52])):
        final = torch.tensor([[end, 5.0 + 1e-9 * place] for place, end in enumerate(ends)], dtype=torch.float64)
        seen = replace(rollouts, next_observation={STATE: final[:, None, None]})
        experimental_rewards.majority_label(seen, Context(torch.Generator(), iteration=visit, memory=memory))
    assert [share for share, _ in memory["majority_label"]["visits"]["7"]] == [1.0, 0.5, 0.75]
    answers = [answer for _, answer in memory["majority_label"]["visits"]["7"]]
    assert answers[0] == [0, 0] and answers[1] == answers[2] != answers[0]


@pytest.mark.checks("rewards/majority_label")
def test_the_answer_can_be_where_the_object_ends_alone():
    """Three of four objects end at the same place, each at another speed."""
    rollouts = make_rollouts([1] * 4, [0] * 4, [1.0, 0.0, 0.0, 0.0])
    rollouts = rollouts.with_extras(start=torch.full(rollouts.shape, 7))
    final = torch.tensor([[0.0, 1.0], [4.0, 2.0], [4.0, 3.0], [4.0, 4.0]])
    seen = replace(rollouts, next_observation={STATE: final[:, None, None]})
    shares = []
    for elements in (None, {STATE: (0,)}):
        context = Context(torch.Generator(), memory={})
        experimental_rewards.majority_label(seen, context, resolution=0.5, elements=elements)
        shares.append(context.memory["majority_label"]["visits"]["7"][0][0])
    assert shares == [0.25, 0.75]
    with pytest.raises(ConfigError, match=rf"{STATE} has no elements \[2\]. Sizes: {STATE} 2"):
        experimental_rewards.majority_label(seen, Context(torch.Generator()), elements={STATE: (2,)})


@pytest.mark.checks("rewards/noisy_labels")
def test_outcomes_of_some_starts_are_inverted_for_all_their_episodes():
    rollouts = make_rollouts([2] * 200, [row // 2 for row in range(200)], [1.0, 0.0] * 100)
    starts = (torch.arange(200) // 2)[:, None].expand(rollouts.shape)
    context = Context(torch.Generator())
    noisy = experimental_rewards.noisy_labels(rollouts.with_extras(start=starts), context, rate=0.3)
    errs = noisy.row_success != rollouts.row_success
    assert torch.equal(errs[::2], errs[1::2]) and 15 < int(errs[::2].sum()) < 45, "30 of 100, both episodes alike"
    again = experimental_rewards.noisy_labels(rollouts.with_extras(start=starts.flip(0)), context, rate=0.3)
    assert torch.equal(again.row_success != rollouts.row_success, errs.flip(0)), "by the number of the start"
    right = experimental_rewards.noisy_labels(rollouts.with_extras(start=starts), context, rate=0.0)
    assert torch.equal(right.row_success, rollouts.row_success)


@pytest.mark.checks("rewards/majority_label")
def test_a_run_of_an_earlier_version_keeps_the_answers_that_it_has():
    """It had units, of 1e-6 where nothing varied, and measured from 0: 6.2 units of .5 are cell 6."""
    rollouts = make_rollouts([1] * 2, [0] * 2, [1.0, 0.0])
    rollouts = rollouts.with_extras(start=torch.full(rollouts.shape, 7))
    final = torch.tensor([[3.1, 5.0], [3.2, 5.0]])
    seen = replace(rollouts, next_observation={STATE: final[:, None, None]})
    memory: dict = {"majority_label": {"spread": [0.5, float(torch.tensor(0.0) + 1e-6)], "visits": {}}}
    experimental_rewards.majority_label(seen, Context(torch.Generator(), memory=memory))
    assert memory["majority_label"]["visits"]["7"] == [[1.0, [6, 0]]]


@pytest.mark.checks("rewards/as_demonstrated", "PivotRL")
def test_a_chunk_is_paid_where_it_leads_to_what_was_demonstrated():
    """Distances .1 .4 .6 and 2 to demonstrations of two initial states, 2 apart: a deviation of 1, one entry counts."""
    rollouts = make_rollouts([1] * 8, [0] * 4 + [1] * 4, [0.0] * 8)
    target = torch.tensor([0.0] * 4 + [2.0] * 4, dtype=torch.float64)
    vectors = torch.stack([target, torch.full_like(target, 5), torch.full_like(target, -5)], -1)
    after = torch.randn(8, 1, 1, 3)
    after[:, 0, 0, 0] = target + torch.tensor([0.1, -0.4, 0.6, 2.0] * 2)
    rollouts = replace(rollouts, next_observation={STATE: after}, rewards={"reward": torch.ones(8, 1, 2)})
    rollouts = rollouts.with_extras(demonstrated=vectors[:, None])
    paid = experimental_rewards.as_demonstrated(rollouts, CONTEXT)
    assert list(paid.rewards) == ["as_demonstrated"] and paid.row_return.tolist() == [1.0, 1.0, 0.0, 0.0] * 2
    assert float(paid.row_return[:4].var(unbiased=False)) == 0.25, "a pivot: there is something to learn"
    won = replace(rollouts, success=torch.tensor([False, False, False, True] * 2)[:, None])
    assert experimental_rewards.as_demonstrated(won, CONTEXT).row_return.tolist() == [1.0, 1.0, 0.0, 1.0] * 2
    unknown = rollouts.with_extras(demonstrated=torch.full((8, 1, 1), torch.nan))
    assert not experimental_rewards.as_demonstrated(unknown, CONTEXT).row_return.any()
    near = experimental_rewards.as_demonstrated(rollouts, CONTEXT, within=0.2)
    assert near.row_return.tolist() == [1.0, 0.0, 0.0, 0.0] * 2
