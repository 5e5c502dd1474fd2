"""Questions that a token policy answers in its own tokens: rewards by hand, the gradient, and that answers improve."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.core.errors import ConfigError
from robopolicy.core.extras import Extras
from robopolicy.core.policy import Scores
from robopolicy.core.spec import STATE, Field
from robopolicy.rl.context import AuxiliaryInputs, Context
from robopolicy.rl.experimental.questions import (
    Changes,
    bins_of,
    draw_answers,
    predict_changes,
    question_loss,
    self_verification,
    verdict_reward,
)


class Says:
    """Answers by logits of its own: the same for every chunk, shifted by the chunk's only feature at token 0."""

    def __init__(self, places: int = 1, vocabulary: int = 3):
        self.logits = torch.zeros(places, vocabulary, dtype=torch.float64, requires_grad=True)

    def answer_log_probs(self, observation, latents, answers):
        rows, places = answers.shape
        logits = self.logits[:places].expand(rows, -1, -1).clone()
        logits[..., 0] = logits[..., 0] + latents["x"][:, None]
        logits[:, 1:, 2] = logits[:, 1:, 2] + answers[:, :-1]  # after a token i, token 2 is likelier by i
        return logits.log_softmax(-1)


def inputs_of(policy, extras: dict, feature: torch.Tensor, seed: int = 0) -> AuxiliaryInputs:
    count = len(feature)
    logp = torch.zeros(count, 1, dtype=torch.float64)
    return AuxiliaryInputs(
        observation={STATE: torch.zeros(count, 1, 2), "task": [""] * count},
        latents={"x": feature},
        mask=torch.ones(count, 1, dtype=torch.bool),
        scores=Scores(logp, logp, {"log_probabilities": torch.zeros(count, 1, 3)}),
        policy=policy,
        context=Context(torch.Generator().manual_seed(seed)),
        extras=Extras.of(extras),
    )


@pytest.mark.checks("auxiliaries/self_verification", "RISE")
def test_verdicts_are_paid_as_in_the_paper():
    """Tokens 0 failure, 2 success, 1 none; right 1, wrong -.5, none -1."""
    verdicts = torch.tensor([[0, 1, 2]])
    assert verdict_reward(verdicts, torch.tensor([[True]]), 3).tolist() == [[-0.5, -1.0, 1.0]]
    assert verdict_reward(verdicts, torch.tensor([[False]]), 3).tolist() == [[1.0, -1.0, -0.5]]


@pytest.mark.checks("auxiliaries/self_verification", "auxiliaries/predict_changes", "RISE", "CodeRL+")
def test_answers_are_drawn_token_by_token_from_the_policy():
    policy = Says(places=2)
    draws = torch.rand((60000, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    answers = draw_answers(policy, {}, {"x": torch.zeros(len(draws), dtype=torch.float64)}, draws)
    assert answers[:, 0].bincount().div(len(draws)).tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    for first in range(3):
        share = (answers[answers[:, 0] == first, 1] == 2).double().mean()
        expected = torch.tensor([0.0, 0.0, float(first)]).softmax(0)[2]
        assert float(share) == pytest.approx(float(expected), abs=0.015)


@pytest.mark.checks("auxiliaries/self_verification", "RISE", "SPARK")
def test_the_loss_is_that_of_a_group_of_answers_to_each_question():
    """Two of eight chunks end episodes, and an eighth of eight is asked: one of them."""
    policy, feature = Says(), torch.arange(8, dtype=torch.float64) / 8
    outcome = torch.tensor([-1, -1, 1, -1, -1, 0, -1, -1])
    inputs = inputs_of(policy, {"outcome": outcome}, feature)
    loss = self_verification(inputs, weight=0.5, answers=6)
    (gradient,) = torch.autograd.grad(loss, policy.logits)
    # The same draws again: which chunk is asked first, then its answers.
    draws = torch.Generator().manual_seed(0)
    order, numbers = torch.rand(8, generator=draws), torch.rand((8, 6, 1), generator=draws)
    row = 2 if order[2] < order[5] else 5
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    logp = (logits + torch.tensor([float(feature[row]), 0.0, 0.0])).log_softmax(-1)
    tokens = (logp.exp().cumsum(-1) <= numbers[row]).sum(-1)
    paid = {0: (-0.5, -1.0, 1.0), 1: (1.0, -1.0, -0.5)}[int(outcome[row] == 0)]
    reward = torch.tensor([paid[int(token)] for token in tokens])
    assert reward.std() > 0
    advantage = (reward - reward.mean()) / (reward.std(unbiased=False) + 1e-6)
    expected = torch.autograd.grad(-0.5 * (advantage * logp[tokens]).mean(), logits)[0]
    torch.testing.assert_close(gradient[0], expected, atol=1e-6, rtol=1e-5)
    assert inputs.context.figures["verdict_accuracy"] == pytest.approx(float((reward == 1).double().mean()))
    nothing = inputs_of(policy, {"outcome": torch.full((8,), -1)}, feature)
    assert float(self_verification(replace(nothing, scores=replace(nothing.scores)))) == 0.0


@pytest.mark.checks("auxiliaries/self_verification", "auxiliaries/predict_changes", "RISE", "CodeRL+")
def test_a_token_of_an_answer_weighs_as_much_as_one_of_a_chunk():
    """Mean over all tokens: answers of 2 tokens about chunks of 5 have 2 / 5 of the loss of a mean over answers."""
    policy, feature = Says(places=2), torch.zeros(3, dtype=torch.float64)
    inputs = replace(inputs_of(policy, {}, feature), mask=torch.arange(6).expand(3, -1) < 5)
    asked, options = torch.ones(3, dtype=torch.bool), {"length": 2, "share": 1.0, "answers": 4}
    loss = question_loss(inputs, asked, lambda tokens, chunks: (tokens[..., 1] == 0).double(), **options)
    draws = torch.Generator().manual_seed(0)
    numbers = (torch.rand(3, generator=draws), torch.rand((3, 4, 2), generator=draws))[1].reshape(12, 2)
    first = (torch.full((3,), 1 / 3).cumsum(-1) <= numbers[:, :1]).sum(-1)
    second_logp = torch.stack([torch.tensor([0.0, 0.0, float(token)]).log_softmax(-1) for token in first])
    second = (second_logp.exp().cumsum(-1) <= numbers[:, 1:]).sum(-1)
    reward = (second == 0).double().reshape(3, 4)
    assert reward.std() > 0
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, unbiased=False, keepdim=True) + 1e-6)
    logp = (second_logp[torch.arange(12), second] + torch.tensor(1 / 3).log()).double().reshape(3, 4) / 2
    assert float(loss.detach()) == pytest.approx(-2 / 5 * float((advantage * logp).mean()), rel=1e-5)


@pytest.mark.checks("models/changes", "CodeRL+")
def test_changes_fall_into_bins_of_half_a_deviation():
    """s' - s (.2, -.4), spread (.1, .2): 2 and -2 deviations are the last and the first of nine bins."""
    change, spread = torch.tensor([[0.2, -0.4], [0.0, 0.06], [9.0, -0.04]]), torch.tensor([0.1, 0.2])
    assert bins_of(change, spread, 9).tolist() == [[8, 0], [4, 5], [8, 4]]
    fields = {STATE: Field((3,), names=("x", "y", "z"))}
    model = Changes(SimpleNamespace(fields=fields), elements=("z", "x"))
    rollouts = make_rollouts([3, 2], [0, 0])
    bins = model.annotate(rollouts, Context(torch.Generator())).extras["change"]
    moved = (rollouts.next_observation[STATE] - rollouts.observation[STATE])[:, :, -1, [2, 0]]
    spread = moved[rollouts.alive].std(0, unbiased=False)
    assert torch.equal(bins, bins_of(moved, spread, 9))
    later = model.annotate(make_rollouts([3, 2], [0, 0], seed=1), Context(torch.Generator()))
    assert torch.equal(model.tree()["spread"], spread) and later.extras["change"].shape == (2, 3, 2)
    other = Changes(SimpleNamespace(fields=fields), elements=("z", "x"))
    other.restore(model.tree())
    assert torch.equal(other.spread, spread)


@pytest.mark.checks("models/changes", "CodeRL+")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set options.changes.elements"),
        ({"elements": ("w",)}, "no element"),
        ({"elements": ("x",), "levels": 4}, "odd"),
    ],
)
def test_what_is_predicted_must_be_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Changes(SimpleNamespace(fields={STATE: Field((1,), names=("x",))}), **options)


@pytest.mark.checks("auxiliaries/predict_changes", "CodeRL+")
def test_only_exact_predictions_are_paid_and_they_become_likelier():
    """Both elements fall into bin 1, whatever the chunk: by chance one answer of nine is right."""
    policy, feature = Says(places=2), torch.zeros(40, dtype=torch.float64)
    change = torch.ones(40, 2, dtype=torch.int64)
    optimiser, accuracy = torch.optim.Adam([policy.logits], lr=0.2), []
    for step in range(60):
        inputs = inputs_of(policy, {"change": change}, feature, seed=step)
        optimiser.zero_grad()
        predict_changes(inputs, share=0.4).backward()
        optimiser.step()
        accuracy.append(inputs.context.figures["change_accuracy"])
    assert accuracy[0] == pytest.approx(1 / 9, abs=0.08) and accuracy[-1] > 0.9
    wrong = change.clone()
    wrong[:, 1] = 2
    inputs = inputs_of(policy, {"change": wrong}, feature)
    predict_changes(inputs)
    assert inputs.context.figures["change_accuracy"] < 0.1, "one right element of two is not paid"
    predict_changes(inputs, exact=False)
    assert 0.4 < inputs.context.figures["change_accuracy"] < 0.6, "or with its half"
