"""The three denoisers: one call, broadcasting features, conditioning that works."""

import itertools

import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.nn.configuration import DenoiserKind
from robopolicy.nn.denoisers import Denoiser, make_denoiser

P, A, D = 8, 3, 5


def _make(kind: DenoiserKind) -> Denoiser:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_denoiser(kind, P, A, D, width=32, depth=2, heads=4)


def _inputs(*leading: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*leading, P, A, generator=generator)
    return x, torch.rand(*leading, generator=generator), torch.randn(*leading, D, generator=generator)


@pytest.mark.parametrize("kind", list(DenoiserKind))
def test_every_input_changes_the_prediction_and_receives_gradient(kind: DenoiserKind):
    denoiser = _make(kind)
    inputs = [value.requires_grad_() for value in _inputs(6)]
    prediction = denoiser(*inputs)
    assert prediction.shape == (6, P, A)
    for gradient in torch.autograd.grad(prediction.square().sum(), inputs):
        assert (gradient.reshape(6, -1).abs().sum(1) > 0).all()


@pytest.mark.parametrize("kind", list(DenoiserKind))
def test_rows_do_not_mix(kind: DenoiserKind):
    denoiser, (x, time, condition) = _make(kind), _inputs(6)
    whole = denoiser(x, time, condition)
    assert torch.allclose(whole[2:3], denoiser(x[2:3], time[2:3], condition[2:3]), atol=1e-5)


@pytest.mark.parametrize("kind", list(DenoiserKind))
def test_shared_features_equal_repeated_ones(kind: DenoiserKind):
    denoiser, (x, _, _) = _make(kind), _inputs(4, 3)
    _, times, _ = _inputs(3)
    _, _, conditions = _inputs(4)
    with torch.no_grad():
        shared = denoiser(x, times, conditions[:, None])
        for row, unit in itertools.product(range(4), range(3)):
            alone = denoiser(x[row, unit][None], times[unit][None], conditions[row][None])
            assert torch.allclose(shared[row, unit], alone[0], atol=1e-5)


@pytest.mark.parametrize("kind", list(DenoiserKind))
def test_chunk_steps_exchange_information(kind: DenoiserKind):
    denoiser, (x, time, condition) = _make(kind), _inputs(1)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(denoiser(x, time, condition)[0, 0].sum(), x)
    assert (gradient[0].abs().sum(-1) > 0).sum() > 3


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match="multiple of 4"):
        make_denoiser(DenoiserKind.UNET, 6, A, D, width=32, depth=3, heads=4)
    with pytest.raises(ConfigError, match="heads"):
        make_denoiser(DenoiserKind.TRANSFORMER, P, A, D, width=30, depth=2, heads=4)
    with pytest.raises(ConfigError, match="at least 1"):
        make_denoiser(DenoiserKind.MLP, P, A, D, width=32, depth=0, heads=4)


def test_the_unet_keeps_detail_through_its_skips():
    denoiser = _make(DenoiserKind.UNET)
    assert type(denoiser).__name__ == "UNetDenoiser"
    weight = denoiser.up[0].conv_in.conv1d.weight
    (gradient,) = torch.autograd.grad(denoiser(*_inputs(4)).square().sum(), weight)
    assert (gradient[:, weight.shape[1] // 2 :].abs().sum((0, 2)) > 0).all()
