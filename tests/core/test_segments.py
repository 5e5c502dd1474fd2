"""Quantiles of any number of entries, whole or by segment; what segments are for is tested with what uses them."""

import numpy as np
import pytest
import torch

from robopolicy.core import segments
from robopolicy.core.segments import MOST_OF_TORCH, Segments, quantile


def test_torch_still_refuses_what_quantile_is_for():
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(torch.zeros(1).expand(MOST_OF_TORCH + 1), 0.5)


def test_more_entries_than_torch_takes():
    values = torch.arange(MOST_OF_TORCH + 4, dtype=torch.float32).flip(
        0
    )  # a float holds these, spaced by two at the end
    assert quantile(values, 1.0) == values[0]
    assert quantile(values, 0.5) == pytest.approx((MOST_OF_TORCH + 3) / 2, rel=1e-7)


@pytest.mark.parametrize("count", [4, 5, 37, 1000])
@pytest.mark.parametrize("nearest", [False, True])
def test_beyond_the_limit_it_is_what_torch_says_below(monkeypatch: pytest.MonkeyPatch, count: int, nearest: bool):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).reshape(1, -1)
    shares = torch.linspace(0, 1, 101)
    expected = torch.quantile(values.flatten(), shares, interpolation="nearest" if nearest else "linear")
    assert torch.equal(quantile(values, shares, nearest=nearest), expected)
    monkeypatch.setattr(segments, "MOST_OF_TORCH", 3)
    assert torch.allclose(quantile(values, shares, nearest=nearest), expected, atol=1e-5)
    for place in (0, 20, 50, 99, 100):
        one = quantile(values, place / 100, nearest=nearest)
        assert one.shape == () and torch.allclose(one, expected[place], atol=1e-5)


def test_an_undefined_entry_makes_the_quantile_undefined_as_in_torch(monkeypatch: pytest.MonkeyPatch):
    values = torch.tensor([1.0, torch.nan, 3.0, 2.0, 5.0])
    assert quantile(values, 0.25).isnan()
    monkeypatch.setattr(segments, "MOST_OF_TORCH", 3)
    assert quantile(values, 0.25).isnan()
    assert quantile(values, torch.tensor([0.0, 0.5])).isnan().all()


def test_a_segment_may_have_more_entries_than_its_numbers_can_count():
    """Half precision counts to 2,048 as single precision does to 2 ** 24: places must not be rounded to either."""
    values = torch.rand(5001, generator=torch.Generator().manual_seed(0)).half()
    whole = Segments(torch.zeros(5001, dtype=torch.int64), 1)
    for share in (0.1, 0.5, 0.9):
        expected = np.quantile(values.double().numpy(), share)
        assert float(whole.quantile(values, share)) == pytest.approx(expected, abs=1e-3)
