"""Action tokens: round trips within half a step, fixed lengths, and what leaving out frequencies does."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.fft import idct

from robopolicy.core.errors import ConfigError
from robopolicy.nn.configuration import ActionTokens
from robopolicy.nn.tokens import BinTokenizer, FrequencyTokenizer, make_action_tokenizer

SEEDS = st.integers(0, 2**31)


def _chunk(seed: int, chunk: int, size: int, spread: float = 1.0) -> torch.Tensor:
    return spread * (2 * torch.rand(5, chunk, size, generator=torch.Generator().manual_seed(seed)) - 1)


@given(SEEDS, st.integers(1, 6), st.integers(1, 4), st.integers(2, 300))
def test_bins_round_trip_within_half_a_step(seed: int, chunk: int, size: int, bins: int):
    tokenizer = BinTokenizer(chunk, size, bins)
    actions = _chunk(seed, chunk, size)
    tokens = tokenizer.encode(actions)
    assert tokens.shape == (5, tokenizer.length) == (5, chunk * size)
    assert tokens.min() >= 0 and tokens.max() < tokenizer.vocabulary
    assert (tokenizer.decode(tokens) - actions).abs().max() <= 1 / (bins - 1) + 1e-6
    assert torch.equal(tokenizer.encode(tokenizer.decode(tokens)), tokens)


@given(SEEDS, st.integers(1, 8), st.integers(1, 4), st.floats(1.0, 50.0))
def test_frequencies_round_trip_within_the_norm_of_half_a_step(seed: int, chunk: int, size: int, resolution: float):
    tokenizer = FrequencyTokenizer(chunk, size, resolution)
    actions = _chunk(seed, chunk, size)
    tokens = tokenizer.encode(actions)
    assert tokens.shape == (5, chunk * size)
    assert tokens.min() >= 0 and tokens.max() < tokenizer.vocabulary
    error = (tokenizer.decode(tokens) - actions).norm(dim=1).max()
    assert error <= math.sqrt(chunk) * 0.5 / resolution + 1e-5


@given(SEEDS, st.integers(1, 4))
def test_every_token_decodes_to_an_action_in_range(seed: int, size: int):
    tokenizer = FrequencyTokenizer(6, size, 10.0)
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, tokenizer.vocabulary, (7, tokenizer.length), generator=draws)
    assert tokenizer.decode(tokens).abs().max() <= 1


def test_extremes_are_said_exactly_and_excess_is_clipped():
    extremes = torch.tensor([[[1.0, -1.0], [0.0, 3.0]]])
    assert torch.equal(BinTokenizer(2, 2, 33).decode(BinTokenizer(2, 2, 33).encode(extremes)), extremes.clamp(-1, 1))
    constant = torch.full((1, 4, 1), 5.0)
    tokens = FrequencyTokenizer(4, 1, 10.0).encode(constant)
    assert tokens.tolist() == [[40, 20, 20, 20]]


def test_tokens_are_the_rounded_cosine_transform_lowest_frequency_first():
    """Against scipy's inverse: one token alone is one cosine."""
    tokenizer = FrequencyTokenizer(8, 2, 10.0)
    tokens = torch.full((1, 16), tokenizer.largest)
    tokens[0, 2 * 3 + 1] += 7
    coefficients = torch.zeros(8).index_fill(0, torch.tensor(3), 0.7).double().numpy()
    decoded = tokenizer.decode(tokens)[0]
    assert not decoded[:, 0].any()
    assert torch.allclose(decoded[:, 1], torch.tensor(idct(coefficients, norm="ortho")).float(), atol=1e-6)


def test_fewer_frequencies_make_shorter_smoother_chunks():
    time = torch.linspace(0, 1, 8)[None, :, None]
    smooth, rough = 0.8 * torch.cos(2 * time), _chunk(0, 8, 1)
    short = FrequencyTokenizer(8, 1, 20.0, frequencies=3)
    assert short.length == 3
    assert (short.decode(short.encode(smooth)) - smooth).abs().max() < 0.1
    assert (short.decode(short.encode(rough)) - rough).abs().max() > 0.3


@pytest.mark.parametrize(
    "wrong", [{"bins": 1}, {"kind": "frequencies", "frequencies": 5}, {"kind": "frequencies", "resolution": 0.0}]
)
def test_impossible_vocabularies_are_refused(wrong: dict):
    choice = {"kind": "bins", "bins": 9, "resolution": 10.0, "frequencies": 0, **wrong}
    with pytest.raises(ConfigError, match="token"):
        make_action_tokenizer(ActionTokens(choice.pop("kind")), 4, 2, **choice)
