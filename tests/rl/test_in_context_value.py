"""The value model that reads a policy's results in its context: sets, padding, loss, routing; that it learns."""

import json

import numpy as np
import pytest
import torch

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.rl.experimental.seen_starts import ValueSampler, kernel_rates
from robopolicy.rl.in_context_value import (
    InContextValue,
    brier_score,
    load_value_model,
    routes,
    success_curves,
    train_value_model,
    value_loss,
)


def inputs(seed: int = 0, results: int = 5):
    draws = torch.Generator().manual_seed(seed)
    context = torch.randn((2, results, 3), generator=draws)
    episodes = torch.tensor([1.0, 2, 4, 8, 16]).expand(2, -1)
    successes = torch.binomial(episodes, torch.full_like(episodes, 0.5), generator=draws)
    return context, successes, episodes, torch.randn((2, 4, 3), generator=draws)


@pytest.mark.checks("sampler/value", "V0")
def test_results_are_a_set_and_initial_states_do_not_read_each_other():
    torch.manual_seed(0)
    model = InContextValue(3)
    context, successes, episodes, starts = inputs()
    logits = model(context, successes, episodes, starts)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(model(context[:, order], successes[:, order], episodes[:, order], starts), logits)
    torch.testing.assert_close(model(context, successes, episodes, starts[:, 1:3]), logits[:, 1:3])
    assert not torch.allclose(model(context, episodes - successes, episodes, starts), logits), "outcomes are read"


@pytest.mark.checks("sampler/value", "V0")
def test_results_of_no_episodes_are_padding_and_an_empty_context_has_a_prediction():
    torch.manual_seed(0)
    model = InContextValue(3)
    context, successes, episodes, starts = inputs()
    padded = [
        torch.cat([part, torch.full_like(part[:, :2], fill)], 1) for part, fill in ((context, 7.0), (successes, 0))
    ]
    mask = torch.cat([episodes, torch.zeros(2, 2)], 1)
    torch.testing.assert_close(model(*padded, mask, starts), model(context, successes, episodes, starts))
    nothing = model(context[:, :0], successes[:, :0], episodes[:, :0], starts)
    torch.testing.assert_close(model(context, successes, 0 * episodes, starts), nothing)
    assert nothing.isfinite().all()


@pytest.mark.checks("V0")
def test_the_loss_is_cross_entropy_and_pairs_by_hand():
    """Logits 1 0 -1 of rates 1 .25 0: pairs (1, 0) and (1, -1), margins 1 and 2: .3133 and .1269, mean .2201.

    Cross-entropies: .3133; log 2 = .6931; .3133: mean .4399. A quarter of pairs: .75 * .4399 + .25 * .2201 = .3850.
    """
    logits, rates = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[1.0, 0.25, 0.0]])
    assert float(value_loss(logits, rates)) == pytest.approx(0.3850, abs=1e-4)
    assert float(value_loss(logits, rates, pairs=0.0)) == pytest.approx(0.4399, abs=1e-4)
    assert float(value_loss(logits, rates, pairs=1.0)) == pytest.approx(0.2201, abs=1e-4)
    two = torch.cat([logits, logits]), torch.cat([rates, torch.ones_like(rates)])
    assert float(value_loss(*two, pairs=1.0)) == pytest.approx(0.2201, abs=1e-4), "pairs are of one policy"
    assert float(value_loss(logits, torch.ones_like(rates), pairs=1.0)) == 0.0


@pytest.mark.checks("V0")
def test_starts_go_to_the_policy_with_the_largest_success_minus_cost():
    success = np.array([[0.9, 0.5, 0.2], [0.8, 0.9, 0.2]])
    assert routes(success, np.zeros(2)).tolist() == [0, 1, 0]
    assert routes(success, np.array([0.2, 0.0])).tolist() == [1, 1, 1]
    assert routes(success, np.array([0.0, 0.5])).tolist() == [0, 0, 0]
    assert brier_score(np.array([0.5, 1.0]), np.array([1, 1])) == pytest.approx(0.125)


@pytest.mark.checks("V0")
def test_synthetic_policies_are_unlike_each_other():
    rates = success_curves(torch.randn((200, 4)), 64, torch.Generator().manual_seed(0))
    assert rates.shape == (64, 200) and bool(((rates >= 0) & (rates <= 1)).all())
    means, spread = rates.mean(1), rates.std(1)
    assert means.min() < 0.2 and means.max() > 0.8 and spread.median() > 0.15
    assert torch.corrcoef(rates).triu(1).abs().sum() / (64 * 63 / 2) < 0.5


@pytest.mark.checks("sampler/value", "V0")
def test_a_sampler_predicts_by_the_model_of_a_checkpoint(tmp_path):
    starts = np.random.default_rng(0).uniform(-1, 1, (40, 2))
    model = train_value_model(starts, np.random.default_rng(1).random((3, 40)) < 0.5, steps=3)
    model.save(tmp_path / "model")
    loaded = load_value_model(tmp_path / "model")
    results = starts[:8], np.arange(8.0) % 3, np.full(8, 4.0)
    expected = model.predict(*results, starts[8:])
    np.testing.assert_array_equal(loaded.predict(*results, starts[8:]), expected)
    sampler = ValueSampler(predictor="context", model=str(tmp_path / "model"))
    sampler.look = lambda index: starts[index]
    sampler.propose(10, 40, np.random.default_rng(0))
    sampler.seen |= dict(enumerate(starts.tolist()))
    sampler.observe(np.arange(8), results[1], results[2], np.zeros(8))
    np.testing.assert_allclose(sampler.predict(np.arange(8, 40)), expected, rtol=1e-6)
    other = ValueSampler(predictor="context", model=str(tmp_path / "model"))
    other.restore(json.loads(json.dumps(sampler.state())))
    np.testing.assert_array_equal(other.predict(np.arange(40)), sampler.predict(np.arange(40)))
    for options in ({"predictor": "context"}, {"predictor": "kernel", "model": str(tmp_path / "model")}):
        with pytest.raises(ConfigError, match="belong together"):
            ValueSampler(**options)
    with pytest.raises(ConfigError, match="of 2 numbers, but here they have 3"):
        model.predict(*results, np.zeros((4, 3)))
    (tmp_path / "model" / "config.json").write_text('{"kind": "diffusion"}')
    with pytest.raises(CheckpointError, match="not a value model"):
        load_value_model(tmp_path / "model")


@pytest.mark.long
@pytest.mark.checks("sampler/value", "V0")
def test_unknown_policies_are_predicted_better_than_by_a_kernel_or_their_mean():
    """Trained on synthetic policies alone; 40 others reach what lies within a distance of their own place."""
    starts = np.random.default_rng(0).uniform(-1, 1, (300, 3))
    model = train_value_model(starts, steps=400, seed=1)
    standard, draws, ones = starts / starts.std(0), np.random.default_rng(2), np.ones(64)
    scores = {"model": [], "kernel": [], "mean": []}
    for _ in range(40):
        distance = np.linalg.norm(starts[:, :2] - draws.uniform(-1, 1, 2), axis=1)
        won = draws.random(300) < 1 / (1 + np.exp(6 * (distance - draws.uniform(0.4, 1.4))))
        known, results, later = starts[:64], won[:64].astype(float), won[64:]
        kernel = kernel_rates(standard[:64], results, ones, standard[64:], 1.0)
        scores["model"].append(brier_score(model.predict(known, results, ones, starts[64:]), later))
        scores["kernel"].append(brier_score(kernel, later))
        scores["mean"].append(brier_score(np.full(len(later), results.mean()), later))
    model_score, kernel_score, mean_score = (np.mean(each) for each in scores.values())
    assert model_score < 0.93 * kernel_score < mean_score, {name: np.mean(each) for name, each in scores.items()}
