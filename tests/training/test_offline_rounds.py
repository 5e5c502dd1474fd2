"""Candidates out of recorded data: what each improver learns, and what the gate's rounds keep, refuse and resume."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from offline_toys import ACTION, BEST, FIELDS, distance, imitated_policy, lesson

from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import TASK
from robopolicy.core.transitions import Transitions
from robopolicy.evaluation.gate import Gate
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.rl.offline.configuration import IqlConfig
from robopolicy.rl.offline.interface import Interface
from robopolicy.rl.offline.iql import Iql
from robopolicy.training.critics import BestOfPolicy, Redraw, fit_agent
from robopolicy.training.distill import distillable
from robopolicy.training.offline.configuration import (
    IMPROVERS,
    BestOfConfig,
    ChainPpoConfig,
    WeightedImitationConfig,
)
from robopolicy.training.offline.improvers import (
    BestOf,
    ChainPpo,
    WeightedImitation,
    chosen_decisions,
    imitation_weights,
    resample_decisions,
)
from robopolicy.training.offline.rounds import improve_in_rounds


@pytest.fixture(scope="module")
def imitated() -> DenoisingPolicy:
    return imitated_policy()


IMPROVE = {
    "best_of": (BestOf(BestOfConfig(candidates=8, observations=200, steps=120, learning_rate=2e-3)), 0.5),
    "weighted_imitation": (WeightedImitation(WeightedImitationConfig(steps=120, learning_rate=2e-3)), 0.8),
    "chain_ppo": (ChainPpo(ChainPpoConfig(iterations=6, observations=512, minibatch=256, learning_rate=2e-3)), 0.8),
}


ELSEWHERE = {
    *("diffusion_ql", "adjoint_matching", "recap", "filtered_imitation", "dsrl", "idql", "imagined_ppo"),
    "latent_seek",
}
"""Tried in files of their own: test_<name>.py, the filtered one beside recap, and tests/test_pipeline.py."""


def test_every_improver_is_tried():
    assert set(IMPROVE) | ELSEWHERE == set(IMPROVERS.ours)


@pytest.mark.long
@pytest.mark.parametrize("name", IMPROVE)
def test_a_candidate_does_what_the_critic_knows_to_be_better(imitated, name):
    improver, share = IMPROVE[name]
    candidate = copy.deepcopy(imitated)
    improver.prepare(candidate)
    figures = improver.improve(candidate, lesson(), Generators(0), 1.0, "round 1")
    assert distance(candidate) < share * distance(imitated)
    assert all(np.isfinite(value) for value in figures.values())


@pytest.mark.checks("IDQL")
def test_the_best_of_several_by_the_smallest_member_of_the_critic(imitated):
    known = lesson()
    frames = known.data.frame[:50]
    chosen, gain = chosen_decisions(imitated, known, frames, 8, Generators(0))
    several = torch.stack([chosen_decisions(imitated, known, frames, 1, Generators(seed))[0] for seed in range(8)])
    assert chosen.shape == (50, 2, 1) and gain > 0
    assert float((chosen - BEST).square().mean()) < 0.5 * float((several - BEST).square().mean())
    best = BestOfPolicy(copy.deepcopy(imitated), known.critic, known.interface, 8)
    assert distance(best) < 0.5 * distance(imitated)
    assert best.spec.scored_steps == imitated.spec.scored_steps and set(best.spec.observation) == set(FIELDS)
    with pytest.raises(ConfigError, match="distil the checkpoint of the wrapped policy"):
        distillable(best, 1)
    with pytest.raises(ConfigError, match="evaluates 1 control steps, the policy outputs 2"):
        BestOfPolicy(imitated, known.critic, Interface(FIELDS, ACTION, chunk=1))


def test_weights_are_the_exponential_of_standardised_advantages():
    known = lesson()
    data = known.data.transitions
    advantage = -(data.action - BEST).square().mean(1) + BEST**2
    standard = (advantage - advantage.mean()) / advantage.std(unbiased=False)
    expected = (2.0 * standard).exp().clamp(max=3.0)
    weights = imitation_weights(known, 2.0, 3.0)
    assert torch.allclose(weights, expected / expected.mean(), atol=1e-4)
    assert torch.allclose(imitation_weights(known, 0.0, 3.0), torch.ones(len(data)))


@pytest.mark.checks("RL-100")
def test_decisions_made_anew_are_paid_min_q_minus_v_standardised(imitated):
    policy = copy.deepcopy(imitated)
    policy.prepare_finetuning()
    known = lesson()
    rollouts = resample_decisions(policy, known, 64, Generators(0), version=3)
    assert rollouts.shape == (64, 1) and bool((rollouts.policy_version == 3).all())
    q = -(rollouts.actions[:, 0, :, 0] - BEST).square().mean(1)
    assert torch.allclose(rollouts.extras["q"][:, 0], q, atol=1e-5)
    raw = q + BEST**2
    standard = (raw - raw.mean()) / (raw.std(unbiased=False) + 1e-6)
    advantage = rollouts.extras["advantage"]
    assert torch.allclose(advantage, torch.where(rollouts.mask, standard[:, None, None], 0.0), atol=1e-4)


@dataclass
class Knowing:
    """A judge that knows the truth, or its opposite."""

    sign: float = 1.0
    name: str = "the truth"
    independent: bool = True

    def values(self, policy):
        observation = {"observation.state": torch.linspace(0, 1, 64)[:, None, None], TASK: [""] * 64}
        actions = policy.act(observation, torch.Generator().manual_seed(5)).actions
        return -self.sign * (actions - BEST).square().mean((1, 2)).double().numpy()


SMALL = BestOf(BestOfConfig(candidates=8, observations=100, steps=40, learning_rate=2e-3))


@pytest.mark.long
def test_refused_candidates_leave_nothing_behind_and_steps_become_smaller(imitated):
    policy = copy.deepcopy(imitated)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    result = improve_in_rounds(policy, lesson(), copy.deepcopy(SMALL), Gate([Knowing(-1.0)]), 3)
    assert result.accepted == 0 and [record["step_size"] for record in result.records] == [1.0, 0.5, 0.25]
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
    assert all(line.startswith("rejected round") and "worse" in line for line in result.lines)


@pytest.mark.long
def test_accepted_candidates_replace_the_incumbent_and_without_a_gate_all_do(imitated):
    policy, free = copy.deepcopy(imitated), copy.deepcopy(imitated)
    result = improve_in_rounds(policy, lesson(), copy.deepcopy(SMALL), Gate([Knowing()]), 2)
    assert result.accepted >= 1 and distance(policy) < distance(imitated)
    assert improve_in_rounds(free, lesson(), copy.deepcopy(SMALL), None, 2).accepted == 2


@pytest.mark.long
def test_a_run_that_was_cut_off_ends_in_the_same_place(imitated, tmp_path):
    whole, parts, again = (copy.deepcopy(imitated) for _ in range(3))
    improve_in_rounds(whole, lesson(), copy.deepcopy(SMALL), Gate([Knowing()]), 2, run=RunFolder(tmp_path / "whole"))
    run = RunFolder(tmp_path / "parts")
    improve_in_rounds(parts, lesson(), copy.deepcopy(SMALL), Gate([Knowing()]), 1, run=run)
    result = improve_in_rounds(again, lesson(), copy.deepcopy(SMALL), Gate([Knowing()]), 2, run=run)
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), again.parameters(), strict=True))
    assert [record["round"] for record in run.metrics()] == [1, 2] and len(result.records) == 2
    assert (run.path / "base" / "config.json").exists() and (run.checkpoint / "config.json").exists()


def test_a_critic_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr("robopolicy.training.critics.SAVE_EVERY", 5)
    data = lesson().data.transitions
    whole, parts, again = (Iql(IqlConfig(width=16, depth=1), 1, 2, 0) for _ in range(3))
    fit_agent(whole, data, 10, 32, Generators(0), run=RunFolder(tmp_path / "whole"))
    run = RunFolder(tmp_path / "parts")
    fit_agent(parts, data, 5, 32, Generators(0), run=run)
    figures = fit_agent(again, data, 10, 32, Generators(0), run=run)
    assert torch.equal(whole.critics.members.weights[0], again.critics.members.weights[0])
    assert [record["critic_step"] for record in run.metrics()] == [5, 10] and "critic_loss" in figures
    bad = replace(data, reward=torch.full_like(data.reward, torch.nan))
    with pytest.raises(Exception, match="transitions: reward"):
        fit_agent(whole, bad, 10, 32, Generators(0))


def test_data_that_follow_the_agent_are_drawn_again_and_a_cut_run_draws_the_same(tmp_path):
    """States are shifted by a weight of the agent, so that every draw shows from which weights it came."""
    data = lesson().data.transitions

    def following(agent: Iql, draws: list[tuple[int, float]]) -> Redraw:
        def draw(step: int) -> Transitions:
            weight = agent.critics.members.weights[0].detach().flatten()[0]
            draws.append((step, float(weight)))
            return replace(data, state=data.state + weight)

        return Redraw(4, draw)

    whole, parts, again, fixed = (Iql(IqlConfig(width=16, depth=1), 1, 2, 0) for _ in range(4))
    drawn: dict[str, list[tuple[int, float]]] = {"whole": [], "parts": [], "again": []}
    fit_agent(
        whole, data, 14, 32, Generators(0), run=RunFolder(tmp_path / "w"), redraw=following(whole, drawn["whole"])
    )
    assert [step for step, _ in drawn["whole"]] == [4, 8, 12] and len({weight for _, weight in drawn["whole"]}) == 3
    run, taken = RunFolder(tmp_path / "parts"), following(parts, drawn["parts"])

    def killed(step: int) -> Transitions:
        if step == 8:
            raise KeyboardInterrupt
        return taken.draw(step)

    with pytest.raises(KeyboardInterrupt):
        fit_agent(parts, data, 14, 32, Generators(0), run=run, redraw=Redraw(4, killed))
    fit_agent(again, data, 14, 32, Generators(0), run=run, redraw=following(again, drawn["again"]))
    assert drawn["parts"] + drawn["again"] == drawn["whole"]
    fit_agent(fixed, data, 14, 32, Generators(0))
    first = [agent.critics.members.weights[0] for agent in (whole, again, fixed)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
