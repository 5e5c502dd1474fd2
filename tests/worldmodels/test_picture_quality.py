import pickle

import numpy as np
import pytest
import torch
import torchvision

from robopolicy.evaluation.image_quality import ALEXNET, LPIPS, SSIM, compare, perceptual, psnr, ssim, unit_of


def images(side: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 256, (2, side, side - 1, 3), dtype=torch.uint8, generator=generator)
    second = (first.float() * 0.7 + 20 * torch.rand(first.shape, generator=generator)).to(torch.uint8)
    return first, second


@pytest.fixture
def at_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    perceptual.cache_clear()
    (tmp_path / "checkpoints").mkdir()
    yield tmp_path / "checkpoints" / ALEXNET
    perceptual.cache_clear()


def test_structural_similarity_by_a_slow_reference():
    first, second = images()
    assert torch.allclose(ssim(first, first), torch.ones(2)) and torch.equal(psnr(first, first), torch.full((2,), 80.0))
    place = np.arange(11) - 5.0
    window = np.exp(-(place[:, None] ** 2 + place[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for channel in range(3):
        for top in range(4):
            for left in range(3):
                part = np.s_[0, top : top + 11, left : left + 11, channel]
                a, b = (value[part].numpy() / 255 for value in (first, second))
                mean_a, mean_b = (window * a).sum(), (window * b).sum()
                spread_a, spread_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
                shared = (window * (a - mean_a) * (b - mean_b)).sum()
                above = (2 * mean_a * mean_b + 1e-4) * (2 * shared + 9e-4)
                values.append(above / ((mean_a**2 + mean_b**2 + 1e-4) * (spread_a + spread_b + 9e-4)))
    assert float(ssim(first, second)[0]) == pytest.approx(np.mean(values), abs=1e-4)


def test_without_weights_there_is_no_lpips_and_nothing_is_fetched(at_hand):
    assert perceptual() is None
    assert set(compare(*images())) == {"", SSIM}


@pytest.mark.long
def test_lpips_where_weights_are_at_hand(at_hand):
    torch.manual_seed(0)
    torch.save(torchvision.models.alexnet(weights=None).state_dict(), at_hand)
    first, second = images(48)
    alike, different, nearly = (compare(first, other)[LPIPS] for other in (first, second, (first // 8) * 8))
    assert alike == 0 and 0 < nearly < different


def test_weights_that_are_more_than_weights_are_refused(at_hand):
    torch.save({"features": print}, at_hand)
    with pytest.raises(pickle.UnpicklingError, match="Weights only"):
        perceptual()


def test_figures_are_told_by_their_keys():
    assert unit_of("image.top").startswith("PSNR")
    assert unit_of("image.top" + SSIM).startswith("SSIM") and unit_of("image.top" + LPIPS).startswith("LPIPS")
