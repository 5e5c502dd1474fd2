"""Budgets: which episode is asked for what, what it is paid, and who is better than what was asked."""

from dataclasses import replace

import pytest
import torch
from rl.made_rollouts import make_rollouts
from seeing_toys import token_policy
from test_retry import CONFIG, Advised

from robopolicy.core.errors import ConfigError
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.context import Context
from robopolicy.rl.experimental.budgets import Budgets, allowance, budget_groups, pay_by_budget
from robopolicy.training.collection import make_collector
from robopolicy.training.finetune import finetune

CONTEXT = Context(torch.Generator())
BUDGETS = replace(CONFIG, allocator="budgets", rewards=("budget",), advantage="budget_groups")


@pytest.mark.checks("rewards/budget", "advantage/budget_groups")
def test_rewards_and_advantages_of_two_budgets_by_hand():
    """Of 40 steps: budget 10, successes of 8 and 16; budget 20, a success of 18 and a failure of 30."""
    rollouts = make_rollouts([4, 8, 9, 15], [0] * 4, [1.0, 1.0, 1.0, 0.0])
    budget = torch.tensor([[10.0, 40.0], [10.0, 40.0], [20.0, 40.0], [20.0, 40.0]])
    rollouts = rollouts.with_extras(budget=budget[:, None].expand(4, 15, 2))
    paid = pay_by_budget(rollouts, CONTEXT, alpha=0.4, beta=1.0)
    assert paid.row_return.tolist() == pytest.approx([0.9239, 0.7490, 0.7071, 0.0], abs=1e-4)
    advantages = budget_groups(paid, CONTEXT, beta=1.0)[:, 0]
    assert advantages.tolist() == pytest.approx([0.8442, 0.3489, -0.0360, -2.0390], abs=1e-3)


@pytest.mark.checks("rewards/budget", "advantage/budget_groups", "HBPO")
def test_budgets_pay_the_figures_of_their_authors_code_and_every_budget_pays_for_success():
    """Of 4096 tokens: budget 512, right after 1024 and after 300; a long right answer, and a wrong one."""
    rollouts = make_rollouts([512, 150, 1100, 5], [0] * 4, [1.0, 1.0, 1.0, 0.0])
    horizon = torch.full((4,), 4096.0)
    budget = torch.stack([horizon * torch.tensor([0.125, 0.125, 0.5, 0.625]), horizon], -1)
    paid = pay_by_budget(rollouts.with_extras(budget=budget[:, None].expand(4, 1100, 2)), CONTEXT)
    # 4 cos(pi n / 8192) - |512 - 1024| / 4096; 4 cos(pi 512 / 8192); 4 cos(pi 2200 / 8192) - 152 / 4096
    assert paid.row_return.tolist() == pytest.approx([3.5705, 3.9231, 2.6218, 0.0], abs=2e-4)
    for fraction in Budgets().budgets:
        assert float(allowance(torch.tensor(fraction), torch.tensor(1.0), 4.0)) > 1


@pytest.mark.checks("allocator/budgets")
def test_every_group_is_divided_among_the_wordings_of_its_budgets():
    config = replace(BUDGETS, options={"budgets": {"budgets": (0.4, 1.0)}})
    world = Advised(6)
    policy = token_policy(world)
    policy.prepare_finetuning()
    collector = make_collector(world, policy, build_algorithm(config), config, 0, torch.Generator().manual_seed(0))
    rollouts = collector.collect(0)
    for group in rollouts.group.unique().tolist():
        assert rollouts.task[rollouts.group == group][:, 0].tolist() == [0, 1, 0]
    expected = torch.where(rollouts.task[..., None] == 0, torch.tensor([0.4 * 3, 3.0]), torch.tensor([3.0, 3.0]))
    torch.testing.assert_close(rollouts.extras["budget"], expected)


@pytest.mark.long
@pytest.mark.checks("HBPO")
def test_a_run_with_budgets_learns_and_one_without_wordings_is_refused():
    config = replace(BUDGETS, options={"budgets": {"budgets": (0.4, 1.0)}})
    world = Advised(6)
    policy = token_policy(world)
    policy.prepare_finetuning()
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    finetune(policy, None, world, config)
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    with pytest.raises(ConfigError, match=r"has 2 wordings for 4 budgets.*set world\.options\.phrasing=all"):
        finetune(policy, None, world, BUDGETS)
