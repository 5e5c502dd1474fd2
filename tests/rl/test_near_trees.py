"""BranchGRPO (arXiv:2509.06040): several splits of one chain, fused returns, and what no gradient is taken through."""

import pytest
import torch

from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import Rollouts
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.rl.advantages.tree import owners
from robopolicy.rl.episodes import EpisodePlayer
from robopolicy.rl.requests import Branching, groups_of
from robopolicy.training.experience import decisions_at
from sims.registry import make_world

STEPS = 4


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
