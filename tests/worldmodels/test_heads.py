"""Heads by hand: thresholds that balance, contrast that pulls apart, values that are discounted sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from point_world import recorded
from torch import nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.core.returns import returns_to_go
from robopolicy.core.structured import to_plain
from robopolicy.evaluation.world_model import precision_recall
from robopolicy.nn.blocks import Members
from worldmodels.configuration import EnsembleConfig
from worldmodels.heads.latent import LatentHeads
from worldmodels.heads.outputs import calibrated_threshold, potential_explains_rewards, quantiles_of
from worldmodels.heads.success import ContrastiveHead, LogisticHead, contrastive_loss, make_success_head
from worldmodels.registry import saved_configuration


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 200), st.floats(0.05, 0.9), st.integers(0, 100))
def test_at_the_threshold_precision_is_recall(count, share, seed):
    draws = torch.Generator().manual_seed(seed)
    logit = torch.randn(count, generator=draws)
    label = torch.rand(count, generator=draws) < share
    if not label.any():
        assert calibrated_threshold(logit, label) == torch.inf
        return
    is_success = logit > calibrated_threshold(logit, label)
    assert abs(int(is_success.sum()) - int(label.sum())) <= 1
    figures = precision_recall(is_success, label)
    assert figures["precision"] == pytest.approx(figures["recall"], abs=1.01 / int(label.sum()))


def test_the_contrastive_loss_by_loops():
    draws = torch.Generator().manual_seed(0)
    embedding, label = torch.randn(6, 3, generator=draws), torch.tensor([0, 1, 1, 0, 1, 0]).bool()
    unit = embedding / embedding.norm(dim=1, keepdim=True)
    expected = []
    for i in range(6):
        others = sum(torch.exp(unit[i] @ unit[k] / 0.5) for k in range(6) if k != i)
        partners = [j for j in range(6) if j != i and label[j] == label[i]]
        expected.append(-sum(torch.log(torch.exp(unit[i] @ unit[j] / 0.5) / others) for j in partners) / len(partners))
    assert torch.allclose(contrastive_loss(embedding, label), torch.stack(expected), atol=1e-6)
    alone = contrastive_loss(embedding[:2], torch.tensor([True, False]))
    assert torch.equal(alone, torch.zeros(2))


def test_success_is_learned_and_embeddings_part():
    draws = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = ContrastiveHead(2, 32)
    optimiser = torch.optim.Adam(head.parameters(), 3e-3)
    for _ in range(300):
        x = torch.randn(256, 2, generator=draws)
        optimiser.zero_grad()
        head.loss(x, x.norm(dim=1) < 0.6).mean().backward()
        optimiser.step()
    x = torch.randn(4000, 2, generator=draws)
    label = x.norm(dim=1) < 0.6
    with torch.no_grad():
        logit = head(x)
        assert precision_recall(logit > calibrated_threshold(logit, label), label)["f1"] > 0.9
        assert head(x.reshape(40, 100, 2)).shape == (40, 100)


class Wide(nn.Linear):
    def __init__(self, inputs, width, depth):
        super().__init__(inputs, 1)

    def loss(self, inputs, label):
        return functional.binary_cross_entropy_with_logits(self(inputs)[:, 0], label.float(), reduction="none")


class Mute(nn.Linear):
    def __init__(self, inputs, width, depth):
        super().__init__(inputs, 1)


def test_what_is_no_success_head_is_refused():
    for name, text in (
        (f"{__name__}:Wide", r"logits \(2, 3, 1\).*must be \(2, 3\)"),
        (f"{__name__}:Mute", "method loss"),
        ("contrastif", "Did you mean 'contrastive'"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_success_head(name, 4, 8, 2)


def test_a_checkpoint_from_before_there_was_a_choice_has_the_default_head():
    plain = {key: value for key, value in to_plain(EnsembleConfig(width=16)).items() if key != "success_head"}
    assert saved_configuration(EnsembleConfig, {"config": plain}) == EnsembleConfig(width=16)
    assert list(LogisticHead(4, 8).state_dict()) == list(Members(1, 4, 8, 2, 1).state_dict())


def test_the_logistic_head_is_one_perceptron_with_the_cross_entropy():
    torch.manual_seed(0)
    head = LogisticHead(4, 8)
    torch.manual_seed(0)
    perceptron = Members(1, 4, 8, 2, 1)
    inputs, label = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1]).bool()
    logit = perceptron(inputs[None])[0, :, 0]
    assert torch.equal(head(inputs), logit)
    expected = torch.where(label, functional.softplus(-logit), functional.softplus(logit))
    assert torch.allclose(head.loss(inputs, label), expected)


def test_returns_are_discounted_sums_within_episodes():
    episodes = recorded(20)
    reward = torch.arange(episodes.step_count).float()
    returns = returns_to_go(reward, episodes, 0.9)
    for episode in range(20):
        first, length = int(episodes.starts[episode]), int(episodes.lengths[episode])
        for place in range(length):
            expected = sum(0.9 ** (s - place) * float(reward[first + s]) for s in range(place, length))
            assert float(returns[first + place]) == pytest.approx(expected, rel=1e-5)


def test_quantiles_span_the_values():
    quantiles = quantiles_of(torch.arange(1001.0))
    assert (
        len(quantiles) == 101
        and float(quantiles[0]) == 0.0
        and float(quantiles[50]) == 500.0
        and float(quantiles[-1]) == 1000.0
    )


def test_a_potential_is_believed_when_it_explains_about_as_much():
    reward = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    good, worse, useless = reward + 0.1, reward * 0.75, torch.zeros(1000)
    assert potential_explains_rewards(worse, reward, good)
    assert not potential_explains_rewards(useless, reward, good)
    assert potential_explains_rewards(useless, reward, useless)


@torch.no_grad()
def test_what_latent_heads_pay_for_a_potential_sums_to_nothing_in_circles():
    torch.manual_seed(0)
    heads = LatentHeads(4, 1, 2, elements=3, actions=2, guessed=3)
    heads.keep_scales(torch.tensor([2.0, 5.0, 1.0]), torch.tensor([0.3]))
    states = 0.5 * torch.randn(6, 3)
    round_trip = torch.cat([states, states[:1]])
    inputs = heads.inputs(torch.randn(6, 4), round_trip[:-1], round_trip[1:])
    heads.choose_reward(inputs, heads.increase(inputs))
    assert heads.pays_potential
    earned = heads.rewards(inputs) + 0.3  # a mean of 0.3 deviations is added back to standardised rewards
    assert earned.abs().max() > 0.05
    assert float(earned.sum()) == pytest.approx(0, abs=1e-5)
    heads.choose_reward(inputs, torch.zeros(6))
    assert not heads.pays_potential
    assert LatentHeads(4, 1, 2, elements=0, actions=2, guessed=3).potential is None
