"""A small text encoder that is trained with what it is part of: instructions become vectors [N, F]."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robopolicy.nn.language import WordTokenizer


class WordEncoder(nn.Module):
    """Reads the words of a text one after the other with a gated recurrent unit (GRU, arXiv:1406.1078).

    texts: whose words it knows; features: F, of words and texts alike; hidden: share of the words that training hides
    (word dropout, arXiv:1511.06349), so that it learns to read texts in which it does not know every word; at 0 these
    are refused. The text's vector is a layer over the mean of what the unit says after each word, so that an early word
    counts as much as the last one. Texts that were never seen are read too. Scores are exact: only `forward` with a
    generator hides anything.
    """

    def __init__(self, texts: Sequence[str], features: int, hidden: float = 0.0):
        super().__init__()
        self.tokenizer, self.hidden = WordTokenizer(texts, unknown=hidden > 0), hidden
        self.embedding = nn.Embedding(self.tokenizer.size, features)
        self.cell = nn.GRUCell(features, features)
        self.head = nn.Linear(features, features)

    def forward(self, texts: Sequence[str], generator: torch.Generator | None = None) -> Tensor:
        """Return [N, F] of N texts, each distinct one read once; a generator hides words (training losses only).

        Raises SpecError for words it does not know, unless words are hidden.
        """
        device = self.embedding.weight.device
        if generator is not None and self.tokenizer.unknown is not None:
            tokens, text = (part.to(device) for part in self.tokenizer(texts))
            draws = torch.rand(tokens.shape, generator=generator, device=generator.device).to(device)
            words = text & text.roll(1, 1)  # every text begins with a token that is no word
            words[:, 0] = False
            return self._read(tokens.masked_fill(words & (draws < self.hidden), self.tokenizer.unknown), text)
        distinct = sorted(set(texts))
        place = {text: index for index, text in enumerate(distinct)}
        rows = torch.tensor([place[text] for text in texts], dtype=torch.int64, device=device)
        return self._read(*(part.to(device) for part in self.tokenizer(distinct)))[rows]

    def _read(self, tokens: Tensor, text: Tensor) -> Tensor:
        embedded, counted = self.embedding(tokens), text[..., None].to(self.embedding.weight.dtype)
        state = embedded.new_zeros(len(tokens), self.cell.hidden_size)
        total = torch.zeros_like(state)
        for index in range(tokens.shape[1]):
            # Padding comes first and leaves the state at zero: a text means the same beside whatever others
            state = self.cell(embedded[:, index], state) * counted[:, index]
            total = total + state
        return self.head(total / counted.sum(1))


class Modulation(nn.Module):
    """What is seen, weighed by what was read: scale(text) * layer(seen) + shift(text) (FiLM, arXiv:1709.07871).

    seen, features: sizes of what is seen and of a text's vector. A network that is given both side by side has to learn
    that product first, say which of three positions the text is about; here one layer can say it.
    """

    def __init__(self, seen: int, features: int):
        super().__init__()
        self.layer = nn.Linear(seen, features)
        self.weights = nn.Linear(features, 2 * features)

    def forward(self, seen: Tensor, told: Tensor) -> Tensor:
        """Return [N, F] of what is seen [N, S] and texts' vectors [N, F]."""
        scale, shift = self.weights(told).chunk(2, -1)
        return (1 + scale) * self.layer(seen) + shift
