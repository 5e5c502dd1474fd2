"""GRAPE by hand: what episodes are charged, how they are ranked, the gradient of a pair, and what is stored of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_rollouts import make_rollouts, make_scored
from torch.nn import functional

from robopolicy.core.errors import CheckpointError, ConfigError, DataError
from robopolicy.core.spec import STATE, TASK
from robopolicy.core.stages import Constraint, Stage
from robopolicy.rl.advantages.group import best_and_worst
from robopolicy.rl.coefficients import sides, tpo
from robopolicy.rl.context import Context
from robopolicy.rl.objective import policy_loss
from robopolicy.rl.preferences import Preferences, read_pairs, write_pairs
from robopolicy.rl.rewards import frames_of, guided_cost, named_stages, stage_costs, undone_costs
from robopolicy.rl.weights import episode_sizes, weigh_constantly

CONTEXT = Context(torch.Generator(), instructions=("go",))

FROM_FOUR = (
    Stage("near", lambda seen: seen["x"][..., 0] < 2, (Constraint(lambda seen: seen["x"][..., 0], threshold=1.0),)),
    Stage(
        "there",
        lambda seen: seen["x"][..., 0] < 1,
        (
            Constraint(lambda seen: seen["x"][..., 0], weight=2.0, over="last"),
            Constraint(lambda seen: np.abs(seen["x"][..., 1]), over="sum"),
        ),
    ),
)
"""Come within 2, then within 1; x[1] is how far it strayed."""


@pytest.mark.checks("GRAPE", "rewards/gcpg")
def test_what_is_charged_stage_by_stage():
    x = [
        [[4, 0], [3, 9], [1, 1], [0, 2]],  # the first ends in frame 2, mean 8/3; the second has frames 2 and 3
        [[4, 0], [3, 0], [3, 5], [9, 9]],  # never near: mean 10/3 of three frames; the second is charged in the last
        [[0, 1], [4, 4], [4, 4], [4, 4]],  # near and there at once
    ]
    counts = np.array([[True] * 4, [True, True, True, False], [True] * 4])
    costs = stage_costs(FROM_FOUR, {"x": np.array(x, dtype=float)}, counts)
    np.testing.assert_allclose(costs, [[8 / 3 - 1, 2 * 0 + 3], [10 / 3 - 1, 2 * 3 + 5], [0, 2 * 0 + 1]])


def test_frames_are_what_decisions_saw_and_what_came_of_the_last():
    rollouts = make_rollouts([2, 1], [0, 0], [0.0, 0.0])
    frames, counts = frames_of(rollouts, ("go",))
    before, after = rollouts.observation[STATE][:, :, 0].numpy(), rollouts.next_observation[STATE][:, :, 0].numpy()
    assert counts.tolist() == [[True, True, True], [True, True, False]]
    np.testing.assert_allclose(frames[STATE][0], [before[0, 0], before[0, 1], after[0, 1]], rtol=1e-6)
    np.testing.assert_allclose(frames[STATE][1, :2], [before[1, 0], after[1, 0]], rtol=1e-6)
    assert frames[TASK].tolist() == [["go"], ["go"]]


def test_the_way_that_is_left_to_where_the_farthest_came():
    gained, group = torch.tensor([4.0, 1.0, -1.0, -2.0, -3.0]), torch.tensor([0, 0, 0, 1, 1])
    assert undone_costs(gained, group, 1).tolist() == [[0.0], [3.0], [5.0], [0.0], [1.0]]
    halves = undone_costs(gained, group, 2).tolist()  # the last half is undone first; what was lost is the first's
    assert halves == [[0.0, 0.0], [1.0, 2.0], [3.0, 2.0], [0.0, 0.0], [1.0, 0.0]]
    with pytest.raises(ConfigError, match="parts=0"):
        undone_costs(gained, group, 0)


def ranked(returns=(0.0, 0.0, 0.0, 0.0), gained=(2.0, 1.0, 2.0, 0.5), success=(True, True, False, False), **changes):
    """Four episodes of one start: the likelihood is made by hand, the last decision pays what was gained."""
    rollouts = make_rollouts([2, 1, 2, 1], [0, 0, 0, 0], list(gained))
    likelihood = torch.tensor(
        [[[-1.0, -2.0], [0.0, -1.0]], [[-9.0, 0], [0, 0]], [[-1.0, 0], [-1, 0]], [[-2.0, 0], [0, 0]]]
    )
    won = rollouts.terminated & torch.tensor(success)[:, None]
    return replace(rollouts, logp_behaviour=likelihood, success=won, **changes)


@pytest.mark.checks("GRAPE", "rewards/gcpg")
def test_the_ranking_by_hand():
    rollouts = ranked()
    paid = guided_cost(rollouts, CONTEXT)
    cost = [0.0, 1.0, 0.0, 1.5]
    expected = [
        0.01 * own + np.exp(-left) + 5 * won
        for own, left, won in zip((-4, -9, -2, -2), cost, (1, 1, 0, 0), strict=True)
    ]
    np.testing.assert_allclose(paid.row_return.numpy(), expected, rtol=1e-6)
    assert set(paid.rewards) == {"own", "external", "success"}
    by_likelihood = guided_cost(rollouts, CONTEXT, own=1.0, external=0.0, success=0.0)
    assert by_likelihood.row_return.tolist() == [-4.0, -9.0, -2.0, -2.0]
    mask = rollouts.mask.clone()
    mask[0, :, 1] = False  # steps without noise were no choices
    by_choices = guided_cost(replace(rollouts, mask=mask), CONTEXT, own=1.0, external=0.0, success=0.0)
    assert by_choices.row_return.tolist() == [-1.0, -9.0, -2.0, -2.0]
    split = guided_cost(rollouts, CONTEXT, own=0.0, success=0.0, parts=2, weight=2.0, threshold=0.25)
    expected = [
        np.exp(-2 * sum(max(0, undone - 0.25) for undone in each)) for each in ([0, 0], [0, 1], [0, 0], [0.5, 1])
    ]
    np.testing.assert_allclose(split.row_return.numpy(), expected, rtol=1e-6)


@pytest.mark.checks("rewards/gcpg")
def test_stages_come_from_the_task_or_from_a_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    where = Stage(
        "low", lambda seen: seen[STATE][..., 0] < -9, (Constraint(lambda seen: seen[STATE][..., 0] ** 2, over="last"),)
    )
    rollouts = ranked()
    end = rollouts.next_observation[STATE][torch.arange(4), torch.tensor([1, 0, 1, 0]), 0, 0].double()
    expected = (-(end**2)).exp()
    alone = {"own": 0.0, "success": 0.0}
    ranked_rollouts = guided_cost(rollouts, replace(CONTEXT, stages=(where,)), stages="task", **alone)
    torch.testing.assert_close(ranked_rollouts.row_return.double(), expected, rtol=1e-5, atol=1e-7)
    (tmp_path / "my_stages.py").write_text(
        "from robopolicy.core.stages import Constraint, Stage\n"
        "def low():\n"
        "    cost = Constraint(lambda seen: seen['observation.state'][..., 0] ** 2, over='last')\n"
        "    return (Stage('low', lambda seen: seen['observation.state'][..., 0] < -9, (cost,)),)\n"
        "nothing = 3\n"
        "def flat():\n"
        "    cost = Constraint(lambda seen: 1.0)\n"
        "    return (Stage('flat', lambda seen: seen['observation.state'][..., 0] < -9, (cost,)),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    other = guided_cost(rollouts, CONTEXT, stages="my_stages:low", **alone)
    torch.testing.assert_close(other.row_return, ranked_rollouts.row_return)
    with pytest.raises(ConfigError, match="defines no stages"):
        guided_cost(rollouts, CONTEXT, stages="task")
    with pytest.raises(ConfigError, match="is neither a tuple of stages"):
        named_stages("my_stages:nothing")
    with pytest.raises(ConfigError, match="'flat: cost' returned shape"):
        guided_cost(rollouts, CONTEXT, stages="my_stages:flat")
    with pytest.raises(ConfigError, match="Did you mean 'progress'"):
        guided_cost(rollouts, CONTEXT, stages="progres")
    with pytest.raises(ConfigError, match="needs a reward other than success"):
        guided_cost(replace(rollouts, rewards={"success": rollouts.rewards["reward"]}), CONTEXT)
    with pytest.raises(ConfigError, match="over=most: "):
        Constraint(np.abs, over="most")  # type: ignore[arg-type]


@pytest.mark.checks("GRAPE", "advantage/best_and_worst")
@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (1, [1, -1, 0, 0, 0, 0, 0, 0, 0, 1, -1]),
        (2, [1, -1, 0, 0, 0, 0, 0, 0, 0, 1, -1]),
        (5, [1, -1, 0, 0, 0, 0, 0, 0, 0, 1, -1]),
    ],
)
def test_the_best_is_chosen_over_the_worst_and_ties_give_no_pair(pairs: int, expected: list[int]):
    group = [0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 4]
    returns = [3.0, 1.0, 2.0, 5.0, 5.0, 7.0, 1.0, 1.0, 1.0, 2.0, 1.0]
    advantage_values, keep = best_and_worst(make_rollouts([1] * 11, group, returns), CONTEXT, pairs=pairs)
    assert advantage_values[:, 0].tolist() == expected
    assert keep.tolist() == [value != 0 for value in expected]


def test_of_several_pairs_each_chosen_one_beats_everyone_rejected():
    returns = [1.0, 1.0, 1.0, 0.0, 4.0, 3.0]
    rollouts = make_rollouts([1] * 6, [0] * 6, returns)
    assert best_and_worst(rollouts, CONTEXT, pairs=2)[0][:, 0].tolist() == [-1.0, 0, 0, -1.0, 1.0, 1.0]
    assert best_and_worst(rollouts, CONTEXT, pairs=3)[0][:, 0].tolist() == [-1.0, 0, 0, -1.0, 1.0, 1.0]  # 1 against 1
    with pytest.raises(ConfigError, match="pairs=0"):
        best_and_worst(rollouts, CONTEXT, pairs=0)


def test_where_nobody_is_better_all_stay_with_nothing_to_learn():
    advantage_values, keep = best_and_worst(make_rollouts([2, 1], [0, 0], [1.0, 1.0]), CONTEXT)
    assert not advantage_values.any()
    assert keep.all()


SIDES = [1.0, -1.0, 1.0, -1.0, -1.0, 0.0]


def compared(seed: int, group=(0, 0, 1, 1, 1, 1), sides=SIDES, lengths=(2, 3, 1, 2, 2, 1)):
    """Scored episodes with a reference of its own: policy, behaviour and reference are three."""
    draws = torch.Generator().manual_seed(seed)
    rollouts = make_rollouts(list(lengths), list(group), list(sides), seed=seed)
    reference = rollouts.logp_behaviour + 0.5 * torch.randn(rollouts.mask.shape, generator=draws, dtype=torch.float64)
    rollouts = rollouts.with_extras(reference_logp=reference)
    logp = (reference + torch.randn(rollouts.mask.shape, generator=draws, dtype=torch.float64)).requires_grad_()
    advantage = torch.where(rollouts.mask, torch.tensor(sides)[:, None, None], 0.0)
    return rollouts, logp, make_scored(rollouts, logp.detach(), advantage)


@pytest.mark.checks("GRAPE", "OPA-DPO", "coefficient/tpo")
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(("seed", "anchor"), [(0, 0.0), (1, 0.0), (2, 1.0), (3, 0.4)])
def test_the_coefficient_is_the_gradient_of_the_papers_loss(reduction: str, seed: int, anchor: float):
    rollouts, logp, scored = compared(seed)
    coefficient, stats = tpo(scored, beta=0.3, reduction=reduction, anchor=anchor)
    weight = weigh_constantly(scored.mask, rollouts, length=1.0)
    gradient = torch.autograd.grad(policy_loss(logp, coefficient, weight), logp)[0]
    change = torch.where(rollouts.mask, logp - rollouts.extras["reference_logp"], 0.0).sum((1, 2))
    if reduction == "mean":
        change = change / rollouts.mask.sum((1, 2))
    pairs = [(0, 1), (2, 3), (2, 4)]
    loss = torch.stack([-functional.logsigmoid(0.3 * (change[won] - change[lost])) for won, lost in pairs]).mean()
    loss = loss - anchor * functional.logsigmoid(0.3 * change[[0, 2]]).mean()
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, logp)[0], atol=1e-9, rtol=1e-7)
    assert float(stats["pairs"]) == 3


@pytest.mark.checks("coefficient/tpo")
def test_equal_trajectories_give_no_gradient_and_neither_do_ties():
    rollouts, _, _ = compared(0, group=(0, 0), sides=(1.0, -1.0), lengths=(2, 2))
    features = torch.randn(1, 2, 2, 3, dtype=torch.float64).expand(2, -1, -1, -1)
    weights = torch.randn(3, dtype=torch.float64, requires_grad=True)
    logp = features @ weights
    rollouts = rollouts.with_extras(reference_logp=torch.zeros_like(logp))
    sides = torch.tensor([1.0, -1.0])[:, None, None].expand(logp.shape)
    coefficient, _ = tpo(make_scored(rollouts, logp.detach(), sides))
    assert coefficient.abs().min() > 0.01
    loss = policy_loss(logp, coefficient.double(), torch.ones_like(logp))
    assert torch.autograd.grad(loss, weights)[0].abs().max() < 1e-12
    tied, stats = tpo(make_scored(rollouts, logp.detach(), torch.zeros_like(logp.detach())))
    assert not tied.any()
    assert float(stats["pairs"]) == 0


def test_where_all_of_a_group_are_good_the_better_are_chosen():
    advantage = torch.tensor([3.0, 1.0, 2.0, -1.0, -2.0, 5.0])[:, None, None].expand(6, 2, 2)
    counted = torch.ones(6, 2, 2, dtype=torch.bool)
    assert sides(advantage, counted, torch.tensor([0, 0, 0, 1, 1, 2])).tolist() == [1, -1, 0, 1, -1, 0]
    counted[1] = False  # nothing of it counts
    assert sides(advantage, counted, torch.tensor([0, 0, 0, 1, 1, 2])).tolist() == [1, 0, -1, 1, -1, 0]


def test_what_branches_share_counts_on_neither_side():
    rollouts, logp, scored = compared(3, group=(0, 0), sides=(1.0, -1.0), lengths=(3, 3))
    shared = scored.advantage.clone()
    shared[:, 0] = 0.0  # as `shared_credit` leaves it: one chosen and one rejected leaf
    coefficient, _ = tpo(replace(scored, advantage=shared), beta=0.3)
    assert not coefficient[:, 0].any()
    change = (logp - rollouts.extras["reference_logp"])[:, 1:].sum((1, 2))
    expected = 0.3 * torch.sigmoid(-0.3 * (change[0] - change[1]))
    torch.testing.assert_close(coefficient[0, 1:], (2 * expected).expand(2, 2).detach())  # 2 episodes, 1 pair


@pytest.mark.parametrize("off", [1e3, -1e3, 1e30])
def test_long_chains_and_far_policies_stay_finite(off: float):
    count = 400
    rollouts = make_rollouts([20, 20], [0, 0], [1.0, -1.0], steps=count)
    rollouts = rollouts.with_extras(reference_logp=rollouts.logp_behaviour)
    sides = torch.tensor([1.0, -1.0])[:, None, None].expand(rollouts.mask.shape)
    logp = (rollouts.logp_behaviour + off * sides).float()
    coefficient, stats = tpo(make_scored(rollouts, logp, sides))
    assert coefficient.isfinite().all()
    assert all(bool(value.isfinite()) for value in stats.values()) or off == 1e30
    assert float(coefficient[0, 0, 0]) == pytest.approx(0.2 if off < 0 else 0.0)  # told apart: it has faded


def test_a_reduction_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"tpo.reduction=men is not known. Did you mean 'mean'"):
        tpo(compared(0)[2], reduction="men")


def judged(returns=(3.0, 1.0, 2.0, 5.0, 5.0, 0.5), group=(0, 0, 0, 1, 1, 1), seed: int = 0, version: int = 0):
    """Prepared rollouts: A = 1 in the best, -1 in the worst of a group."""
    rollouts = make_rollouts([2, 1, 2, 1, 2, 1], list(group), list(returns), seed=seed)
    rollouts = replace(rollouts, policy_version=torch.full(rollouts.shape, version))
    advantage, keep = best_and_worst(rollouts, CONTEXT)
    extras = {"advantage": advantage[..., None].expand(rollouts.mask.shape).clone()}
    extras |= episode_sizes(rollouts.mask & rollouts.alive[..., None])
    return rollouts.with_extras(**extras).take(keep.nonzero().squeeze(1))


def at(iteration: int, seed: int = 0) -> Context:
    return Context(torch.Generator().manual_seed(seed), iteration=iteration, iterations=9, instructions=("go",))


@pytest.mark.checks("GRAPE", "replay/preferences")
def test_older_pairs_come_back_whole_with_the_verdict_they_were_given():
    replay = Preferences(share=1.0)
    first = judged(seed=1)
    assert replay.mix(first, at(0)) is first
    today = judged(seed=2, version=1)
    mixed = replay.mix(today, at(1))
    assert len(mixed.group) == 8
    older = mixed.take(torch.arange(4, 8))
    assert torch.equal(older.logp_behaviour, first.logp_behaviour)
    assert older.policy_version.unique().tolist() == [0]
    assert older.extras["advantage"][:, 0, 0].tolist() == first.extras["advantage"][:, 0, 0].tolist()
    assert set(older.group.tolist()).isdisjoint(today.group.tolist())
    half = Preferences(share=0.5)
    half.mix(first, at(0))
    drawn = half.mix(today, at(1))
    assert len(drawn.group) == 6  # one group of two, whole
    assert sorted(drawn.extras["advantage"][4:, 0, 0].tolist()) == [-1.0, 1.0]
    alone = Preferences()
    alone.mix(first, at(0))
    assert alone.mix(today, at(1)) is today


def test_a_round_is_so_many_iterations():
    def beginnings(refresh: int) -> list[int]:
        return [number for number in range(6) if Preferences(refresh=refresh).reincarnates(at(number))]

    assert beginnings(1) == [0, 1, 2, 3, 4, 5]
    assert beginnings(3) == [0, 3]
    assert beginnings(0) == []
    with pytest.raises(ConfigError, match="megabytes=0"):
        Preferences(megabytes=0)
    with pytest.raises(ConfigError, match="has no effect with share=0"):
        Preferences(folder="anywhere", share=0)


@pytest.mark.checks("replay/preferences")
def test_what_is_kept_is_bounded_and_the_newest_stays():
    size = 4 * 2 * 1e-6 * 60  # of a row of these rollouts, roughly, in megabytes
    replay = Preferences(megabytes=8 * size, share=1.0)
    for number in range(6):
        replay.mix(judged(seed=number, version=number), at(number))
    versions = [iteration for iteration, _ in replay.kept]
    assert versions
    assert versions[-1] == 5
    assert len(versions) < 6
    tiny = Preferences(megabytes=1e-6)
    tiny.mix(judged(seed=0), at(0))
    assert len(tiny.kept[0][1].group) == 2  # one pair always stays


@pytest.mark.checks("replay/preferences")
def test_pairs_survive_the_disk(tmp_path: Path):
    replay = Preferences(share=1.0)
    for number in range(2):
        replay.mix(judged(seed=number, version=number), at(number))
    replay.store(tmp_path / "preferences", ("go",))
    pairs_read = read_pairs(tmp_path / "preferences").rollouts
    assert len(pairs_read.group) == 8
    assert sorted(pairs_read.group.unique().tolist()) == [0, 1, 2, 3]
    assert pairs_read.extras["preferred"][:, 0].tolist() == [1, -1, 1, -1, 1, -1, 1, -1]
    other = Preferences(share=1.0)
    other.restore(replay.tree())
    other.store(tmp_path / "again", ("go",))
    for name in ("preferences.json", "preferences.safetensors"):
        assert (tmp_path / "preferences" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    given = Preferences(share=9.0, folder=str(tmp_path / "preferences"))
    mixed = given.mix(judged(seed=7, version=2), at(2))
    assert len(mixed.group) == 4 + 8
    assert mixed.policy_version[4:].unique().tolist() == [-1]  # whatever other run they are from
    assert len(given.mix(judged(seed=8, version=3), at(3)).group) == 4 + 8 + 4


def test_pairs_that_do_not_fit_are_refused(tmp_path: Path):
    pairs = judged().with_extras(preferred=torch.tensor([1, -1, 1, -1])[:, None].expand(4, 2).clone())
    folder = tmp_path / "pairs"
    with pytest.raises(DataError, match="no pairs: episodes need the extra column 'preferred'"):
        write_pairs(folder, judged(), ("go",))
    with pytest.raises(DataError, match="2 groups have no preferred episode"):
        write_pairs(folder, pairs.with_extras(preferred=torch.ones(4, 2, dtype=torch.int64)), ("go",))
    with pytest.raises(CheckpointError, match="does not exist"):
        read_pairs(folder)
    write_pairs(folder, pairs, ("stay", "go"))
    stored = read_pairs(folder)
    with pytest.raises(DataError, match="does not have: stay"):
        stored.following(("go",))
    assert stored.following(("go", "stay")).task.unique().tolist() == [1]
    today = judged(seed=3)
    wide = replace(today, latents={"x": torch.zeros(4, 2, 5)})
    replay = Preferences(share=1.0, folder=str(folder))
    with pytest.raises(DataError, match=r"their latents 'x' is \[2\], but here it is \[5\]"):
        replay.mix(wide, replace(at(0), instructions=("go", "stay")))


def test_stored_pairs_are_neither_paid_nor_ranked_again():
    pairs = judged().with_extras(preferred=torch.tensor([-1, 1, 1, -1])[:, None].expand(4, 2).clone())
    assert guided_cost(pairs, CONTEXT) is pairs
    assert best_and_worst(pairs, CONTEXT)[0][:, 0].tolist() == [-1.0, 1.0, 1.0, -1.0]
