"""Normalisers: ranges, constants, round trips, bad data."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robopolicy.core.errors import DataError, NonFiniteError
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.nn.normalizer import Normalizer


def _samples(seed: int = 0) -> torch.Tensor:
    return torch.randn(200, 3, generator=torch.Generator().manual_seed(seed)) * torch.tensor([1.0, 20.0, 0.01]) + 5


def test_min_max_maps_the_data_onto_minus_one_to_one():
    values = _samples()
    normalized = Normalizer((3,)).fit(values)(values)
    assert torch.allclose(normalized.amin(0), -torch.ones(3), atol=1e-4)
    assert torch.allclose(normalized.amax(0), torch.ones(3), atol=1e-4)


def test_mean_std_whitens_every_dimension():
    values = _samples()
    normalized = Normalizer((3,), NormalizationMode.MEAN_STD).fit(values)(values)
    assert torch.allclose(normalized.mean(0), torch.zeros(3), atol=1e-3)
    assert torch.allclose(normalized.std(0, correction=0), torch.ones(3), atol=1e-3)


@pytest.mark.parametrize("mode", [NormalizationMode.MIN_MAX, NormalizationMode.MEAN_STD])
def test_constant_dimensions_are_centred_and_not_amplified(mode: NormalizationMode):
    values = torch.tensor([[1.0, 7.0], [3.0, 7.0]])
    normalizer = Normalizer((2,), mode).fit(values)
    assert torch.equal(normalizer(values)[:, 1], torch.zeros(2))
    assert normalizer(torch.tensor([2.0, 7.5]))[1].item() == pytest.approx(0.5)


def test_identity_changes_nothing():
    values = _samples()
    assert torch.equal(Normalizer((3,), NormalizationMode.IDENTITY).fit(values)(values), values)


@given(st.integers(0, 100), st.sampled_from(NormalizationMode))
def test_inverse_undoes_forward(seed: int, mode: NormalizationMode):
    values = _samples(seed)
    normalizer = Normalizer((3,), mode).fit(values)
    assert torch.allclose(normalizer.inverse(normalizer(values)), values, rtol=1e-5, atol=1e-5)


def test_the_fit_is_part_of_the_state():
    fitted, fresh = Normalizer((3,)).fit(_samples()), Normalizer((3,))
    fresh.load_state_dict(fitted.state_dict())
    assert torch.equal(fresh(_samples(1)), fitted(_samples(1)))


def test_bad_data_is_refused():
    with pytest.raises(DataError, match="at least one sample"):
        Normalizer((3,)).fit(torch.zeros(0, 3))
    with pytest.raises(DataError, match=r"values of shape \[5, 2\]"):
        Normalizer((3,)).fit(torch.zeros(5, 2))
    with pytest.raises(NonFiniteError):
        Normalizer((3,)).fit(torch.full((5, 3), float("nan")))
