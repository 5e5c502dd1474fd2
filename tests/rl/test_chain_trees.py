"""Trees inside decisions: branches keep a denoising chain up to a step and go on with noise of their own."""

import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import PolicyKind
from robopolicy.rl.advantages.tree import branch_grpo, owners, shared_credit, tree_po
from robopolicy.rl.context import Context
from robopolicy.rl.episodes import Branching, EpisodePlayer, groups_of
from robopolicy.training.experience import decisions_at
from sims.registry import make_world

UNITS = 4


def policy_for(world, **changes):
    config = DenoisingPolicyConfig(width=16, depth=1, sampling_steps=6, **changes)
    spec = world.spec
    policy = DenoisingPolicy(config, spec.observation, spec.action, fps=spec.fps)
    policy.prepare_finetuning(UNITS)
    return policy


def play(unit, at=(1,), width=3, kind=PolicyKind.DIFFUSION, groups=2, rows=8):
    world = make_world("reach_planar", rows)
    policy = policy_for(world, kind=kind)
    player = EpisodePlayer(world, policy, Branching(at, width, unit))
    return player.play(groups_of(range(groups), 1), torch.Generator().manual_seed(0)), policy


@pytest.mark.parametrize("kind", [PolicyKind.DIFFUSION, PolicyKind.FLOW])
@pytest.mark.parametrize("unit", [0, 1, 3])
def test_branches_keep_the_chain_up_to_the_unit(kind, unit):
    rollouts, _ = play(unit, kind=kind)
    chain = rollouts.latents["chain"]
    children = (rollouts.parent >= 0).nonzero().flatten().tolist()
    assert len(children) == 4
    for row in children:
        parent, step = int(rollouts.parent[row]), int(rollouts.branch_decision[row])
        assert torch.equal(chain[row, :step], chain[parent, :step])
        assert torch.equal(chain[row, step, : unit + 1], chain[parent, step, : unit + 1])
        assert not torch.equal(chain[row, step, unit + 1], chain[parent, step, unit + 1])
        assert not rollouts.mask[row, step, :unit].any()
        assert bool(rollouts.mask[row, step, unit] == rollouts.mask[parent, step, unit])


def test_what_was_kept_is_scored_like_the_parents():
    rollouts, policy = play(2)
    alive = rollouts.alive
    observation, latents = decisions_at(rollouts, alive, ("",))
    scored = policy.log_prob(observation, latents).logp.detach()
    cut = (~rollouts.valid).any(-1)[alive]  # scored again by the collector, not here
    difference = (scored - rollouts.logp_behaviour[alive])[~cut]
    assert float(difference.abs().max()) < 1e-5


def reference_branch_grpo(rollouts):
    """Walk every leaf's path unit by unit."""
    rows, steps, latents = rollouts.mask.shape

    def node(row, step, unit):
        while rollouts.parent[row] >= 0:
            at, kept = int(rollouts.branch_decision[row]), int(rollouts.branch_sampling_step[row])
            if (step, unit) >= (at, kept):
                break
            row = int(rollouts.parent[row])
        return row

    advantage = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    returns = rollouts.row_return.double()
    for step in range(steps):
        for unit in range(latents):
            for group in rollouts.group.unique().tolist():
                members = [row for row in range(rows) if rollouts.group[row] == group and rollouts.alive[row, step]]
                nodes = {}
                for row in members:
                    nodes.setdefault(node(row, step, unit), []).append(row)
                values = {owner: returns[leaves].mean() for owner, leaves in nodes.items()}
                spread = torch.stack(list(values.values())) if values else torch.zeros(0)
                if len(values) < 2 or spread.std(unbiased=False) <= 1e-6:
                    continue
                for owner, leaves in nodes.items():
                    for row in leaves:
                        scale = spread.std(unbiased=False) + 1e-8
                        advantage[row, step, unit] = (values[owner] - spread.mean()) / scale
    return advantage


@pytest.mark.checks("advantage/branch_grpo")
@pytest.mark.parametrize("unit", [1, 3])
def test_depthwise_advantages_equal_a_walk_over_the_tree(unit):
    rollouts, _ = play(unit, at=(0, 2), width=2, groups=3)
    advantages = branch_grpo(rollouts, Context(torch.Generator()))
    assert advantages.shape == rollouts.mask.shape
    alive_everywhere = rollouts.alive.all(0)  # the walk counts leaves that have ended differently
    expected = reference_branch_grpo(rollouts)
    assert torch.allclose(advantages.double()[:, alive_everywhere], expected[:, alive_everywhere], atol=1e-4)


def test_units_before_the_split_belong_to_the_parent():
    rollouts, _ = play(2, at=(1,), width=2, groups=1)
    owner = owners(rollouts).reshape(rollouts.mask.shape)
    child = int((rollouts.parent >= 0).nonzero()[0])
    parent = int(rollouts.parent[child])
    assert bool((owner[child, 0] == parent).all())
    assert owner[child, 1].tolist() == [parent, parent, child, child]
    assert tree_po(rollouts, Context(torch.Generator())).shape == rollouts.shape


def test_a_policy_that_cannot_go_on_or_a_unit_that_does_not_exist_is_told():
    world = make_world("reach_planar", 2)
    with pytest.raises(ConfigError, match="choose one of them"):
        EpisodePlayer(world, policy_for(world), Branching((1,), 2, UNITS))


@pytest.mark.parametrize("unit", [None, 2])
def test_what_leaves_share_gets_the_mean_of_their_advantages(unit):
    rollouts, _ = play(unit, at=(1, 2), width=2, groups=2)
    draws = torch.randn(rollouts.shape, generator=torch.Generator().manual_seed(0))
    shared_advantages = shared_credit(rollouts, draws)
    shared_advantages = (
        shared_advantages if shared_advantages.dim() == 3 else shared_advantages[..., None].expand(rollouts.mask.shape)
    )
    owner = owners(rollouts)
    owner = owner.reshape(rollouts.mask.shape) if unit else owner[..., None].expand(rollouts.mask.shape)
    for row in range(len(owner)):
        for step in range(owner.shape[1]):
            for place in range(owner.shape[2]):
                leaves = owner[:, step, place] == owner[row, step, place]
                torch.testing.assert_close(shared_advantages[row, step, place], draws[leaves, step].mean())
