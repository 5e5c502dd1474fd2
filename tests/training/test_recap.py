"""RECAP: everything is imitated under an indicator of its advantage, and the policy acts under "positive"."""

import copy
from dataclasses import replace

import pytest
import torch
from offline_toys import ACTION, BEST, FIELDS, distance, imitated_policy, lesson
from torch import nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import TASK
from robopolicy.nn.configuration import FlowNoise
from robopolicy.policies import load_policy
from robopolicy.policies.advantage_conditioned import IMPROVEMENT, Improvement, condition_on_advantage
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind, TextEncoder
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.rl.offline.decisions import actions_at
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.offline.configuration import (
    FilteredImitationConfig,
    RecapConfig,
    WeightedImitationConfig,
)
from robopolicy.training.offline.improvers import WeightedImitation
from robopolicy.training.offline.recap import FilteredImitation, Recap, advantages, improvements
from robopolicy.training.offline.rounds import improve_in_rounds


@pytest.fixture(scope="module")
def imitated() -> DenoisingPolicy:
    return imitated_policy()


def observation(rows=6):
    states = torch.rand(rows, 1, 1, generator=torch.Generator().manual_seed(3))
    return {"observation.state": states, TASK: ["go"] * rows}


@pytest.mark.checks("RECAP")
def test_the_best_share_and_every_correction_are_positive():
    advantage = torch.tensor([0.1, -0.5, 0.4, 0.0, 0.3, -0.2, -0.1, 0.2, -0.3, -0.4])
    assert improvements(advantage, 0.3).nonzero().flatten().tolist() == [2, 4, 7]
    corrected = torch.zeros(10, dtype=torch.bool)
    corrected[1] = True
    assert improvements(advantage, 0.3, corrected).nonzero().flatten().tolist() == [1, 2, 4, 7]


@pytest.mark.checks("RECAP")
def test_advantages_by_what_was_paid_and_the_value_after_by_the_critic_or_beside_own_decisions(imitated):
    known = lesson()
    data = known.data.transitions
    paid = -(data.action - BEST).square()  # V is -BEST^2 everywhere, the decay that of the steps executed
    twice = data.decay < 0.85
    expected = paid[:, 0] + torch.where(twice, 0.9 * paid[:, 1], 0.0)
    expected = expected + data.decay * torch.where(data.terminated, 0.0, -(BEST**2)) + BEST**2

    def found(kind, decisions=8):
        return advantages(
            imitated, known, RecapConfig(advantage=kind, samples_per_observation=decisions), Generators(0)
        )

    assert torch.allclose(found("steps"), expected, atol=1e-5)
    assert torch.allclose(found("critic"), paid.mean(1) + BEST**2, atol=1e-5)
    own = actions_at(imitated, known.episodes, known.data.frame, Generators(0)["own"], samples=2)
    mean = -(own - BEST).square().mean((1, 2, 3))
    assert torch.allclose(found("own", 2), paid.mean(1) - mean, atol=1e-5)


CONFIGS = {
    "diffusion": DenoisingPolicyConfig(sampling_steps=4, width=16, denoising_steps=20, finetuned_steps=2),
    "flow": DenoisingPolicyConfig(kind=PolicyKind.FLOW, sampling_steps=4, width=16, finetuned_steps=2),
    "learned": DenoisingPolicyConfig(
        kind=PolicyKind.FLOW, flow_noise=FlowNoise.LEARNED, sampling_steps=4, width=16, finetuned_steps=2
    ),
    "words": DenoisingPolicyConfig(text_encoder=TextEncoder.WORDS, sampling_steps=4, width=16, finetuned_steps=2),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prepared", [False, True])
def test_preparing_changes_nothing_and_checkpoints_come_back_unasked(name, prepared, tmp_path):
    policy = DenoisingPolicy(CONFIGS[name], FIELDS, ACTION, fps=10.0, instructions=("go", "stay"))
    if prepared:
        policy.prepare_finetuning()
    before = policy.act(observation(), torch.Generator().manual_seed(0))
    improver = Recap(RecapConfig())
    improver.prepare(policy)
    after = policy.act(observation(), torch.Generator().manual_seed(0))
    assert torch.equal(before.actions, after.actions) and torch.equal(before.logp, after.logp)
    around = condition_on_advantage(policy)
    assert around is policy.network
    with torch.no_grad():
        around.labels.normal_(0, 0.01, generator=torch.Generator().manual_seed(0))
        around.guidance.fill_(1.5)
    changed = policy.act(observation(), torch.Generator().manual_seed(0)).actions
    assert not torch.equal(before.actions, changed)
    policy.save(tmp_path / "saved")
    again = load_policy(tmp_path / "saved")
    assert torch.equal(again.act(observation(), torch.Generator().manual_seed(0)).actions, changed)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_it_keeps_every_promise_of_what_can_be_fine_tuned(guidance):
    policy = DenoisingPolicy(CONFIGS["diffusion"], FIELDS, ACTION, fps=10.0)
    around = condition_on_advantage(policy)
    with torch.no_grad():
        around.labels.normal_(0, 0.01, generator=torch.Generator().manual_seed(0))
        around.guidance.fill_(guidance)
    assert check_policy(policy, load_policy).level is Level.TRAINS
    policy.prepare_finetuning(train_encoder=False)
    assert check_policy(policy, load_policy).level is Level.TRAINS
    assert around.labels.requires_grad  # else nothing that is told could be learned with a frozen encoder


@pytest.mark.checks("RECAP")
def test_guidance_goes_from_what_is_done_unasked_beyond_what_is_done_for_positive():
    policy = DenoisingPolicy(CONFIGS["diffusion"], FIELDS, ACTION, fps=10.0)
    around = condition_on_advantage(policy)
    with torch.no_grad():
        around.labels.normal_(0, 0.01, generator=torch.Generator().manual_seed(0))
    x, time = torch.randn(6, 4, 1, generator=torch.Generator().manual_seed(1)), torch.full((6,), 0.3)

    def predicted(improvement=None):
        told = {} if improvement is None else {IMPROVEMENT: torch.full((6,), int(improvement))}
        return around.denoise(x, time, around.encode({**observation(), **told}))

    none, negative, positive = map(predicted, Improvement)
    assert torch.equal(predicted(), positive)
    assert not torch.allclose(none, positive) and not torch.allclose(negative, positive)
    around.guidance.fill_(2.5)
    assert torch.allclose(predicted(), none + 2.5 * (positive - none), atol=1e-5)
    assert torch.equal(predicted(Improvement.POSITIVE), positive)  # what is learned is never guided
    steps = around.steps(policy.schedule.times, around.encode(observation()))
    several = steps.several(x[:, None].expand(-1, 4, -1, -1), None)
    for step in range(4):
        assert torch.allclose(steps.one(x, step), several[:, step], atol=1e-5)


@pytest.mark.long
def test_it_does_better_than_imitation_of_the_same_data(imitated, tmp_path):
    policy, plain = copy.deepcopy(imitated), copy.deepcopy(imitated)
    result = improve_in_rounds(
        policy, lesson(), Recap(RecapConfig(steps=100, learning_rate=2e-3)), None, 1, run=RunFolder(tmp_path)
    )
    assert result.records[0]["positive"] == pytest.approx(0.3, abs=0.01)
    same = WeightedImitation(WeightedImitationConfig(steps=100, learning_rate=2e-3, temperature=0.0))
    same.improve(plain, lesson(), Generators(0), 1.0, "round 1")
    assert distance(policy) < 0.7 * distance(plain)
    assert distance(load_policy(tmp_path / "checkpoint")) == pytest.approx(distance(policy), abs=1e-6)


@pytest.mark.checks("RECAP")
def test_the_indicator_is_hidden_from_a_share_of_what_is_learned(imitated, monkeypatch):
    policy, batches = copy.deepcopy(imitated), []
    improver, known = Recap(RecapConfig(steps=8, indicator_dropout=0.25)), lesson()
    improver.prepare(policy)
    learn = DenoisingPolicy.loss

    def listening(self, batch, generator):
        batches.append((batch["observation"][IMPROVEMENT], batch["actions"]))
        return learn(self, batch, generator)

    monkeypatch.setattr(DenoisingPolicy, "loss", listening)
    improver.improve(policy, known, Generators(0), 1.0, "round 1")
    told, actions = (torch.cat(each) for each in zip(*batches, strict=True))
    assert float((told == Improvement.NONE).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert float((told == Improvement.POSITIVE).float().mean()) == pytest.approx(0.75 * 0.3, abs=0.03)
    far = (actions - BEST).abs().mean((1, 2))
    assert far[told == Improvement.POSITIVE].max() < far[told == Improvement.NEGATIVE].mean()


def imitates(monkeypatch) -> list[torch.Tensor]:
    """The chunks that policies are shown from now on."""
    shown, learn = list[torch.Tensor](), DenoisingPolicy.loss

    def listening(self, batch, generator):
        shown.append(batch["actions"])
        return learn(self, batch, generator)

    monkeypatch.setattr(DenoisingPolicy, "loss", listening)
    return shown


@pytest.mark.checks("RECAP")
def test_filtered_imitation_is_shown_the_better_share_alone_and_learns_from_it(imitated, monkeypatch):
    known, policy, shown = lesson(), copy.deepcopy(imitated), imitates(monkeypatch)
    worth = -(known.data.transitions.action - BEST).square().mean(1)  # all states are alike: the advantage's order
    settings = FilteredImitationConfig(steps=100, learning_rate=2e-3, advantage="critic")
    figures = FilteredImitation(settings).improve(policy, known, Generators(0), 1.0, "round 1")
    assert figures["positive"] == pytest.approx(0.3, abs=0.01)
    values = -(torch.cat(shown)[:, : policy.spec.chunk] - BEST).square().mean((1, 2))
    assert values.min() >= torch.quantile(worth, 0.7) - 1e-6
    assert distance(policy) < 0.7 * distance(imitated)


def test_filtered_imitation_of_what_succeeded(imitated, monkeypatch):
    known, shown = lesson(), imitates(monkeypatch)
    settings = FilteredImitationConfig(steps=20, advantage="success")
    with pytest.raises(ConfigError, match="the data does not record it"):
        FilteredImitation(settings).improve(copy.deepcopy(imitated), known, Generators(0), 1.0, "round 1")
    episodes = known.episodes
    good = torch.arange(len(episodes)) % 4 == 0
    done = good[episodes.episode_of_step]
    data = replace(known.data, episodes=replace(episodes, step_success=done))
    FilteredImitation(settings).improve(
        copy.deepcopy(imitated), replace(known, data=data), Generators(0), 1.0, "round 1"
    )
    executed = set(episodes.actions[done, 0].tolist())
    assert {value for chunk in torch.cat(shown) for value in chunk.flatten().tolist()} <= executed
    nothing = replace(known.data, episodes=replace(episodes, step_success=torch.zeros_like(done)))
    with pytest.raises(ConfigError, match="no recorded action chunk"):
        FilteredImitation(settings).improve(
            copy.deepcopy(imitated), replace(known, data=nothing), Generators(0), 1.0, "round 1"
        )


def test_a_policy_that_cannot_be_told_is_refused():
    with pytest.raises(ConfigError, match=r"Linear \(not a DenoisingPolicy\)"):
        Recap(RecapConfig()).prepare(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="between 0 and 1"):
        RecapConfig(positive_fraction=1.0)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        FilteredImitationConfig(positive_fraction=1.0)
