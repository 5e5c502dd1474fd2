"""Action tokens: chunks of normalised actions [N, C, A] to K integers in 0..V-1 and back; K is the same for all chunks.

Actions are expected in [-1, 1] (what lies outside is clipped to it).
"""

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.nn.configuration import ActionTokens


class BinTokenizer(nn.Module):
    """One of `bins` evenly spaced values per element (RT-2, arXiv:2307.15818; OpenVLA, arXiv:2406.09246).

    The values include -1 and 1, so that full speed can be said exactly; an odd number includes 0. Tokens are ordered by
    control step, then action dimension. Round trips err by at most 1 / (bins - 1). Raises ConfigError below two bins.
    """

    def __init__(self, chunk: int, action_size: int, bins: int):
        super().__init__()
        if bins < 2:
            raise ConfigError(f"token.bins is {bins}: give at least two.")
        self.action_size, self.vocabulary = action_size, bins
        self.length, self.steps_per_action = chunk * action_size, action_size

    def encode(self, actions: Tensor) -> Tensor:
        """Return tokens [N, K] int64 of actions [N, C, A]."""
        share = (actions.clamp(-1, 1) + 1) / 2
        return rearrange((share * (self.vocabulary - 1)).round().long(), "n c a -> n (c a)")

    def decode(self, tokens: Tensor) -> Tensor:
        """Return actions [N, C, A] of tokens [N, K]."""
        values = 2 * tokens.float() / (self.vocabulary - 1) - 1
        return rearrange(values, "n (c a) -> n c a", a=self.action_size)


class FrequencyTokenizer(nn.Module):
    """Rounded coefficients of the chunk's discrete cosine transform, lowest frequencies first (FAST, arXiv:2501.09747).

    A coefficient x of the orthonormal transform along time becomes round(x * resolution), as in FAST with its scale of
    10. Deviations: no byte-pair merges, so the number of tokens is fixed, K = frequencies * A; instead of by merging
    zeros, chunks become shorter by leaving out the highest frequencies (0 keeps all); the vocabulary covers every
    possible coefficient, so none is clipped. Actions decoded from unlikely tokens are clipped to [-1, 1].
    Raises ConfigError unless 0 <= frequencies <= chunk and resolution > 0.
    """

    transform: Tensor

    def __init__(self, chunk: int, action_size: int, resolution: float, frequencies: int = 0):
        super().__init__()
        kept = frequencies or chunk
        if not 1 <= kept <= chunk or resolution <= 0:
            raise ConfigError(
                f"token.frequencies is {frequencies} and token.resolution {resolution}: a chunk of {chunk} has 1 to "
                f"{chunk} frequencies (0: all), and the resolution is positive."
            )
        self.action_size, self.resolution = action_size, resolution
        # A coefficient of C numbers in [-1, 1] is at most sqrt(C): the transform keeps lengths.
        self.largest = math.ceil(resolution * math.sqrt(chunk))
        self.vocabulary = 2 * self.largest + 1
        self.length, self.steps_per_action = kept * action_size, 0
        from scipy.fft import dct  # who makes these tokens, pays for its import

        basis = torch.tensor(dct(torch.eye(chunk).double().numpy(), axis=0, norm="ortho"))[:kept]
        self.register_buffer("transform", basis.float(), persistent=False)

    def encode(self, actions: Tensor) -> Tensor:
        """Return tokens [N, K] int64 of actions [N, C, A]."""
        coefficients = self.transform @ actions.clamp(-1, 1)
        return rearrange((coefficients * self.resolution).round().long() + self.largest, "n f a -> n (f a)")

    def decode(self, tokens: Tensor) -> Tensor:
        """Return actions [N, C, A] of tokens [N, K]."""
        coefficients = rearrange(tokens - self.largest, "n (f a) -> n f a", a=self.action_size) / self.resolution
        return (self.transform.T @ coefficients).clamp(-1, 1)


def make_action_tokenizer(
    kind: ActionTokens, chunk: int, action_size: int, *, bins: int, resolution: float, frequencies: int
) -> BinTokenizer | FrequencyTokenizer:
    """Return the tokenizer of chunks [N, chunk, action_size]."""
    if kind is ActionTokens.BINS:
        return BinTokenizer(chunk, action_size, bins)
    return FrequencyTokenizer(chunk, action_size, resolution, frequencies)
