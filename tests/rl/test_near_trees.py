"""BranchGRPO (arXiv:2509.06040): several splits of one chain, fused returns, and what no gradient is taken through."""

from dataclasses import replace

import pytest
import torch
from made_rollouts import make_rollouts
from torch import Tensor

from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import Rollouts
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.rl.advantages.tree import (
    branch_grpo,
    fused_values,
    owners,
    subtree_values,
    unpruned_chain_steps,
    unpruned_leaf_steps,
)
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.context import Context
from robopolicy.rl.episodes import Branching, EpisodePlayer, groups_of
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import decisions_at
from robopolicy.training.finetune import finetune
from robopolicy.training.update import Learner
from sims.registry import make_world

STEPS = 4


def context() -> Context:
    return Context(torch.Generator())


def policy_for(world) -> DenoisingPolicy:
    spec = world.spec
    config = DenoisingPolicyConfig(width=16, depth=1, sampling_steps=6)
    policy = DenoisingPolicy(config, spec.observation, spec.action, fps=spec.fps)
    policy.prepare_finetuning(STEPS)
    return policy


def player_for(branching: Branching, rows: int = 8) -> EpisodePlayer:
    world = make_world("reach_planar", rows)
    return EpisodePlayer(world, policy_for(world), branching)


def play(branching: Branching, groups: int = 2) -> tuple[Rollouts, DenoisingPolicy]:
    player = player_for(branching)
    assert isinstance(player.policy, DenoisingPolicy)
    return player.play(groups_of(range(groups), 1), torch.Generator().manual_seed(0)), player.policy


@pytest.mark.checks("BranchGRPO")
@pytest.mark.parametrize(("steps", "width"), [((0, 2), 2), ((2, 0, 3), 2), ((1, 3), 3)])
def test_one_chain_splits_at_several_steps_into_a_tree(steps: tuple[int, ...], width: int):
    branching = Branching((1,), width, steps)
    rollouts, policy = play(branching)
    assert branching.leaves == width ** len(steps)
    assert rollouts.group.bincount().tolist() == [branching.leaves] * 2
    chain, kept = rollouts.latents["chain"], rollouts.branch_sampling_step
    assert kept is not None
    for row in (rollouts.parent >= 0).nonzero().flatten().tolist():
        parent, step = int(rollouts.parent[row]), int(kept[row])
        assert step in steps
        assert int(rollouts.branch_decision[row]) == 1
        assert torch.equal(chain[row, 0], chain[parent, 0])
        assert torch.equal(chain[row, 1, : step + 1], chain[parent, 1, : step + 1])
        assert not torch.equal(chain[row, 1, step + 1], chain[parent, 1, step + 1])
        assert rollouts.mask[row, 1].tolist() == [False] * step + [True] * (STEPS - step)
        if rollouts.parent[parent] >= 0:  # who branched off in this decision splits only further down the chain
            assert step > int(kept[parent])
    # At every step after a split there are `width` times as many nodes, all of the same number of leaves.
    owner = owners(rollouts).reshape(rollouts.mask.shape)[:, 1]
    for step in range(STEPS):
        nodes = owner[rollouts.group == 0, step].unique(return_counts=True)[1]
        splits = sum(split <= step for split in steps)
        assert nodes.tolist() == [branching.leaves // width**splits] * width**splits
    # What is shared is scored once, and everything as it was drawn.
    assert int(rollouts.mask[rollouts.group == 0][:, 1].sum()) == sum(
        width ** sum(split <= step for split in steps) for step in range(STEPS)
    )
    whole = rollouts.alive & rollouts.valid.all(-1)
    scored = policy.log_prob(*decisions_at(rollouts, whole, ("",))).logp.detach()
    difference = (scored - rollouts.logp_behaviour[whole]).abs()
    assert float(difference.max()) < 1e-5


@pytest.mark.checks("BranchGRPO")
def test_a_tree_inside_a_chain_survives_being_suspended():
    """As many groups are complete as were asked for; the others, some of them in mid-split, go on from a checkpoint."""
    player = player_for(Branching((1,), 2, (0, 2)), rows=3)
    draws = torch.Generator().manual_seed(0)
    first = player.play(groups_of(range(3), 1), draws, groups=1)
    player.suspend()
    assert any(waiting.steps == 1 and waiting.branch_step >= 0 for waiting in player.waiting)
    again = player_for(Branching((1,), 2, (0, 2)), rows=3)
    again.restore(player.tree())
    rest = again.play([], draws)
    assert (len(first.group), len(rest.group)) == (4, 8)
    chain, kept = rest.latents["chain"], rest.branch_sampling_step
    assert kept is not None
    for row in (rest.parent >= 0).nonzero().flatten().tolist():
        parent, step = int(rest.parent[row]), int(kept[row])
        assert torch.equal(chain[row, 1, : step + 1], chain[parent, 1, : step + 1])


@pytest.mark.checks("BranchGRPO")
def test_splits_are_written_as_a_number_or_a_list_and_wrong_ones_are_told():
    assert compose(["finetune.branch_sampling_step=[0,2]"]).finetune.branch_sampling_step == (0, 2)
    assert compose(["finetune.branch_sampling_step=2"]).finetune.branch_sampling_step == 2
    assert compose([]).finetune.branch_sampling_step is None
    for wrong in ((), (1, 1)):
        with pytest.raises(ConfigError, match="branch_sampling_step"):
            Branching((1,), 2, wrong)
    with pytest.raises(ConfigError, match="choose one of them"):
        player_for(Branching((1,), 2, (0, STEPS)))


def tree_of_four() -> Rollouts:
    """One decision of two steps: a root splits before the first into A and B, and these before the second.

    Rows are the leaves A1, A2, B1, B2, where A1 goes on from the root and B1 from B.
    """
    rollouts = make_rollouts(
        [1] * 4, [0] * 4, [1.0, 0.0, 0.5, 2.0], parent=[-1, 0, 0, 2], branch_decision=[-1, 0, 0, 0]
    )
    rollouts.logp_behaviour[:, 0] = torch.tensor([[0.1, 0.3], [0.1, -0.2], [-0.4, -0.5], [-0.4, 0.6]])
    rollouts.mask[1, 0, 0] = rollouts.mask[3, 0, 0] = False
    return replace(rollouts, branch_sampling_step=torch.tensor([0, 1, 0, 1]))


@pytest.mark.checks("advantage/branch_grpo", "BranchGRPO")
@pytest.mark.parametrize(
    ("beta", "fused", "advantage"),
    [
        (0.0, [0.5, 0.5, 1.25, 1.25], [[-0.707107, 0.146385], [-0.707107, -1.024695]]),
        (1.0, [0.622459, 0.622459, 1.62539, 1.62539], [[-0.707107, 0.146385], [-0.707107, -1.024695]]),
    ],
)
def test_fused_returns_and_advantages_are_those_of_the_authors_code(beta: float, fused: list, advantage: list):
    """Figures of the authors' published code at commit 19fbb9f, whose deviation is the sample's and not the whole's."""
    rollouts = tree_of_four()
    values = fused_values(rollouts, beta) if beta else subtree_values(rollouts)[0]
    torch.testing.assert_close(values[:, 0], torch.tensor(fused))
    assert values[:, 1].tolist() == [1.0, 0.0, 0.5, 2.0]
    advantages = branch_grpo(rollouts, context(), beta=beta)
    assert isinstance(advantages, Tensor)
    expected = torch.tensor(advantage) * torch.tensor([2.0, 4 / 3]).sqrt()
    torch.testing.assert_close(advantages[:2, 0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.checks("advantage/branch_grpo", "BranchGRPO")
def test_fusion_by_hand_where_episodes_split_between_decisions():
    """Row 1 leaves row 0 before decision 1, row 2 leaves row 1 before decision 2; row 3 is a root of its own."""
    rollouts = make_rollouts(
        [3] * 4, [0] * 4, [1.0, 2.0, 4.0, 8.0], parent=[-1, 0, 1, -1], branch_decision=[-1, 1, 2, -1]
    )
    logp = torch.zeros(4, 3, 2, dtype=torch.float64)
    logp[0, 1], logp[1, 1] = torch.tensor([0.25, 0.25]), torch.tensor([-0.75, 0.25])  # .5 and -.5 of whole decisions
    logp[1, 2], logp[2, 2] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
    values = fused_values(replace(rollouts, logp_behaviour=logp), 2.0)
    inner = torch.tensor([2.0, 0.0]).softmax(0) @ torch.tensor([2.0, 4.0])
    outer = torch.tensor([1.0, -1.0]).softmax(0) @ torch.stack([torch.tensor(1.0), inner])
    expected = torch.tensor([[0.0, 1, 1], [0, 0, 2], [0, 0, 4], [8, 8, 8]])
    expected[:3, 0], expected[1:3, 1] = outer, inner
    torch.testing.assert_close(values, expected)


def leaves_of_eight() -> Rollouts:
    """Two roots of one start, each split before decision 0 and both of these before decision 1: rows 0-3 and 4-7."""
    returns = [3.0, 1.0, 7.0, 5.0, 2.0, 8.0, 4.0, 6.0]
    parent = [-1, 0, 0, 2, -1, 4, 4, 6]
    return make_rollouts([4] * 8, [0] * 8, returns, parent=parent, branch_decision=[-1, 1, 0, 1, -1, 1, 0, 1])


@pytest.mark.checks("advantage/branch_grpo", "BranchGRPO")
@pytest.mark.parametrize(
    ("width", "share", "best"),
    [
        ("branch", 0.5, [0, 2, 5, 7]),
        ("extremes", 0.5, [1, 2, 4, 5]),
        ("extremes", 0.3, [1, 5]),
        ("extremes", 0.7, [0, 1, 2, 4, 5]),
        ("all", 0.5, list(range(8))),
    ],
)
def test_width_pruning_keeps_the_chosen_leaves_beyond_their_last_split(width: str, share: float, best: list[int]):
    kept = unpruned_leaf_steps(leaves_of_eight(), width, share)
    assert kept[:, :2].all()  # what comes before, and the decision with which leaves part
    for row in range(8):
        assert kept[row, 2:].unique().tolist() == [row in best]


@pytest.mark.checks("advantage/branch_grpo", "BranchGRPO")
def test_width_pruning_leaves_alone_what_is_no_tree_and_counts_from_where_a_leaf_parts():
    separate = make_rollouts([3] * 4, [0] * 4, [1.0, 2.0, 3.0, 4.0])
    assert unpruned_leaf_steps(separate, "extremes").all()
    # Row 1 leaves row 0 before decision 2 of four; row 2 has no siblings. Inside the chain the split step counts.
    mixed = make_rollouts([4] * 3, [0] * 3, [1.0, 2.0, 3.0], parent=[-1, 0, -1], branch_decision=[-1, 2, -1])
    expected = torch.ones(3, 4, dtype=torch.bool)
    expected[0, 3] = False
    assert torch.equal(unpruned_leaf_steps(mixed, "branch")[..., 0], expected)
    inside = unpruned_leaf_steps(replace(mixed, branch_sampling_step=torch.tensor([0, 1, 0])), "branch").flatten(1)
    assert inside[0].tolist() == [True] * 6 + [False] * 2
    assert inside[1:].all()
    with pytest.raises(ConfigError, match=r"branch_grpo\.width=extreme is not known.*extremes"):
        unpruned_leaf_steps(separate, "extreme")


@pytest.mark.checks("advantage/branch_grpo", "BranchGRPO")
def test_depth_pruning_slides_its_window_towards_the_last_split():
    rollouts = make_rollouts([2, 1], [0, 0], steps=6)
    windows = [unpruned_chain_steps(rollouts, 2, shift)[0, 0].tolist() for shift in range(6)]
    by_hand = [[4, 5], [3, 4], [2, 3], [1, 2], [1, 2], [1, 2]]
    assert windows == [[step not in window for step in range(6)] for window in by_hand]
    split = replace(rollouts, branch_sampling_step=torch.tensor([0, 3]))
    assert unpruned_chain_steps(split, 2, 9)[1, 0].tolist() == [True] * 4 + [False] * 2
    assert unpruned_chain_steps(rollouts, 0, 3).all()
    with pytest.raises(ConfigError, match=r"branch_grpo\.depth=3 is too large: of 6 steps at most the last 2"):
        unpruned_chain_steps(split, 3, 0)


@pytest.mark.checks("advantage/branch_grpo", "BranchGRPO")
def test_what_is_pruned_counts_in_values_but_is_not_learned_from():
    rollouts = leaves_of_eight()
    whole = branch_grpo(rollouts, context())
    options = {"branch_grpo": {"width": "extremes", "share": 0.5, "beta": 0.0, "depth": 1, "slide": 10}}
    algorithm = build_algorithm(AlgorithmConfig(algorithm="branch_grpo", options=options))
    prepared = algorithm.prepare(rollouts, replace(context(), iteration=15))
    assert isinstance(whole, Tensor)
    kept = unpruned_leaf_steps(rollouts, "extremes", 0.5) & torch.tensor([True, False])
    torch.testing.assert_close(prepared.extras["advantage"], torch.where(kept, whole[..., None], 0.0))
    assert torch.equal(prepared.mask, rollouts.mask & kept)
    assert torch.equal(prepared.played, kept.any(-1))
    assert prepared.extras["episode_steps"][:, 0].tolist() == [2, 4, 4, 2, 4, 4, 2, 2]


SETTINGS = FinetuneConfig(
    algorithm="branch_grpo", iterations=1, groups=2, group_size=1, branch_at=(0, 1), epochs=1, minibatch=64,
    learning_rate=1e-3, actor_warmup=1, target_kl=None, evaluate_every=0,
)  # fmt: skip


@pytest.mark.checks("BranchGRPO")
def test_the_learner_scores_neither_pruned_decisions_nor_pruned_steps(monkeypatch: pytest.MonkeyPatch):
    options = {"branch_grpo": {"width": "branch", "depth": 2}}

    def tuned(**changes) -> tuple[DenoisingPolicy, list[tuple[int, ...]]]:
        world = make_world("reach_planar", 8)
        policy, scored = policy_for(world), []
        plain = policy.log_prob

        def spy(observation, latents):
            scores = plain(observation, latents)
            if scores.logp.requires_grad:
                scored.append((*scores.logp.shape, *latents.get("chosen", torch.zeros(1, 0))[0].tolist()))
            return scores

        policy.log_prob = spy  # type: ignore[method-assign]
        finetune(policy, None, world, replace(SETTINGS, **changes), seed=0)
        return policy, scored

    whole = sum(each[0] for each in tuned(options={"branch_grpo": {"width": "all"}})[1])
    policy, scored = tuned(options=options)
    assert {each[1:] for each in scored} == {(2, 0, 1)}  # the first two of four steps
    assert sum(each[0] for each in scored) < 0.8 * whole
    monkeypatch.setattr(Learner, "_live", lambda self, source: None)
    monkeypatch.setattr(Learner, "_most_noisy", lambda self, source: STEPS)
    again, slowly = tuned(options=options)
    assert {each[1:] for each in slowly} == {(STEPS,)}
    for ours, theirs in zip(policy.parameters(), again.parameters(), strict=True):
        # Adam enlarges what another number of rows rounds differently.
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.checks("advantage/branch_grpo", "BranchGRPO")
def test_the_preset_fuses_by_probability_and_prunes_leaves():
    algorithm = build_algorithm(AlgorithmConfig(algorithm="branch_grpo"))
    rollouts = leaves_of_eight()
    advantages, kept = algorithm.advantage(rollouts, context())
    expected = branch_grpo(rollouts, context(), beta=1.0)
    assert isinstance(expected, Tensor)
    assert torch.equal(advantages, expected)
    assert torch.equal(kept, unpruned_leaf_steps(rollouts, "extremes", 0.5))
