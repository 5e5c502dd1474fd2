"""Models beside the policy: what they learn is right, their advantages equal slow references, and they resume."""

import copy
from types import SimpleNamespace

import pytest
import torch
from made_rollouts import make_rollouts
from torch import nn

from robopolicy.core.policy import Decision, Scores
from robopolicy.core.spec import STATE, Field
from robopolicy.rl.advantages.gae import finished_returns
from robopolicy.rl.advantages.step import process_rloo
from robopolicy.rl.context import Context, Tools
from robopolicy.rl.experimental.rewards import progress_under_prover
from robopolicy.rl.experimental.side_models import Oprl, Progress, QEnsemble
from robopolicy.rl.side_models import Prime, succeeds_later


class LinearPolicy(nn.Module):
    """log p of unit k is a linear function of the observation and the unit's number x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.spec = SimpleNamespace(chunk=2, action=Field((1,)), cameras=())

    def act(self, observation, generator):
        return Decision(torch.randn(len(observation[STATE]), 2, 1, generator=generator))


def tools(policy: LinearPolicy) -> Tools:
    def score(policy, rollouts, where):
        state, x = rollouts.observation[STATE][:, :, 0][where], rollouts.latents["x"][where]
        inputs = torch.cat([state[:, None].expand(-1, x.shape[1], -1), x[..., None]], -1)
        logp = inputs @ policy.weight
        return Scores(logp, torch.zeros_like(logp))

    def observe(rollouts, where):
        return {STATE: rollouts.observation[STATE][where]}

    return Tools(policy, LinearPolicy(), None, {STATE: Field((3,))}, 1, ("",), observe, score)


def context() -> Context:
    return Context(torch.Generator().manual_seed(0), discount=0.9)


def outcomes(count: int = 256, seed: int = 0):
    """An episode succeeds if its numbers x are positive on the whole."""
    rollouts = make_rollouts([3] * count, [row // 4 for row in range(count)], [0.0] * count, seed=seed)
    won = rollouts.latents["x"].sum((1, 2)) > 0
    rollouts.success[:, -1] = won
    rollouts.rewards["reward"][:, -1, 1] = won.float()
    return rollouts


@pytest.mark.parametrize("kind", [Prime, Oprl])
def test_implicit_rewards_find_the_units_that_matter(kind):
    model = kind(tools(LinearPolicy()), beta=1.0, rate=0.05, epochs=10)
    rollouts = model.annotate(outcomes(), context())
    process, x = rollouts.extras["process"], rollouts.latents["x"].flatten()
    assert float(torch.corrcoef(torch.stack([process.flatten(), x]))[0, 1]) > 0.9
    assert float(rollouts.extras["process_accuracy"][0, 0]) > 0.9


@pytest.mark.checks("advantage/process_rloo")
def test_prime_advantages_equal_a_slow_reference():
    rollouts = make_rollouts([2, 3, 1, 2], [0, 0, 0, 1], [1.0, 0.0, 1.0, 1.0])
    draws = torch.Generator().manual_seed(0)
    rollouts.mask[1, 0, 1] = False  # without noise
    process = torch.randn(rollouts.mask.shape, generator=draws) * rollouts.mask
    advantages = process_rloo(rollouts.with_extras(process=process), context(), whiten=False)
    for row in range(4):
        others = [other for other in range(4) if other != row and rollouts.group[other] == rollouts.group[row]]
        expected = torch.zeros(rollouts.mask.shape[1:])
        if others:
            mean = [process[other][rollouts.mask[other]].mean() for other in others]
            base = torch.stack(mean).mean()
            won = float(rollouts.row_success[row]) - rollouts.row_success[others].float().mean()
            flat, alive = process[row].flatten(), rollouts.mask[row].flatten()
            for unit in range(len(flat)):
                if alive[unit]:
                    rest = sum(flat[later] - base for later in range(unit, len(flat)) if alive[later])
                    expected.view(-1)[unit] = rest + won
        torch.testing.assert_close(advantages[row], expected, atol=1e-5, rtol=1e-5)
    whitened = process_rloo(rollouts.with_extras(process=process), context())
    counts = rollouts.mask & (rollouts.group == 0)[:, None, None]
    assert float(whitened[counts].mean()) == pytest.approx(0, abs=1e-6) and not whitened[~counts].any()
    assert float(whitened[counts].std(unbiased=False)) == pytest.approx(1, abs=1e-5)
    failed = make_rollouts([1, 2], [0, 0], [-1.0, -2.0])  # dense rewards differ, and both failed
    assert not process_rloo(failed.with_extras(process=torch.rand(failed.mask.shape)), context()).any()


@pytest.mark.long
def test_progress_sums_to_the_outcome_and_points_at_what_made_it():
    rollouts = outcomes()
    rollouts.observation[STATE][..., 0] = torch.linspace(-1, 1, 256)[:, None, None]
    rollouts.next_observation[STATE][:] = rollouts.observation[STATE]
    decided = torch.arange(256) % 2 == 0
    rollouts.next_observation[STATE][:, 1, 0, 1] = torch.where(decided, 3.0, -3.0)
    rollouts.success[:, -1] = decided
    model = Progress(tools(LinearPolicy()), epochs=200, rate=3e-3)
    reward = model.annotate(rollouts, context()).rewards["progress"].sum(-1)
    error = (reward.sum(1) - decided.float()).abs().mean()
    assert float(error) < 0.1
    gap = reward[decided].mean(0) - reward[~decided].mean(0)
    assert float(gap[1]) > 0.6


@pytest.mark.long
@pytest.mark.parametrize("target", ["monte_carlo", pytest.param("td", marks=pytest.mark.slow)])
def test_action_values_tell_good_actions_from_bad_ones(target: str):
    rollouts = make_rollouts([1] * 512, list(range(512)), [0.0] * 512)
    won = rollouts.actions[:, 0].mean((1, 2)) > 0
    rollouts.success[:, 0], rollouts.rewards["reward"][:, 0, 1] = won, won.float()
    model = QEnsemble(tools(LinearPolicy()), target=target, epochs=60, minibatch=128)
    annotated_rollouts = model.annotate(rollouts, context())
    q, v = annotated_rollouts.extras["q"][:, 0], annotated_rollouts.extras["v"][:, 0]
    assert float(q[won].mean() - q[~won].mean()) > 0.6
    assert float((v - 0.5).abs().mean()) < 0.25
    paid = progress_under_prover(annotated_rollouts, context(), tries=1, alpha=1.0).rewards["prover"].sum(-1)[:, 0]
    torch.testing.assert_close(paid, q.clamp(0, 1) - v.clamp(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [Prime, Progress, QEnsemble])
def test_models_resume_bitwise(kind):
    first, second = (kind(tools(LinearPolicy())) for _ in range(2))
    first.annotate(outcomes(32), context())
    second.restore(copy.deepcopy(first.tree()))
    names = {Prime: "process", QEnsemble: "q"}
    a, b = (model.annotate(outcomes(32, seed=1), context()) for model in (first, second))
    if kind is Progress:
        assert torch.equal(a.rewards["progress"], b.rewards["progress"])
    else:
        assert torch.equal(a.extras[names[kind]], b.extras[names[kind]])


@pytest.mark.checks("advantage/egae")
def test_returns_are_known_only_where_the_episode_ended_in_the_window():
    rollouts = make_rollouts([4], [0], [0.0])
    rollouts.terminated[:] = torch.tensor([[False, True, False, False]])
    rewards, decay = torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.full((1, 4), 0.5)
    returns, known = finished_returns(rollouts, rewards, decay)
    assert known.tolist() == [[True, True, False, False]]
    assert returns[0, :2].tolist() == [2.0, 2.0]


def test_success_counts_for_what_came_before_it_in_the_same_episode():
    rollouts = make_rollouts([4], [0], [0.0])
    rollouts.terminated[:] = torch.tensor([[False, True, False, True]])
    rollouts.success[:] = torch.tensor([[False, True, False, False]])
    assert succeeds_later(rollouts).tolist() == [[True, True, False, False]]
