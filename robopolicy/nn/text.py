"""A small text encoder that is trained with what it is part of: instructions become vectors [N, F]."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robopolicy.nn.language import WordTokenizer


class WordEncoder(nn.Module):
    """Reads the words of a text one after the other with a gated recurrent unit (GRU, arXiv:1406.1078).

    texts: whose words it knows, and no others; features: F, of words and texts alike. The text's vector is a layer
    over the mean of what the unit says after each word, so that an early word counts as much as the last one. Texts
    that were never seen are read too, as long as every word was. No dropout, so that scores are exact.
    """

    def __init__(self, texts: Sequence[str], features: int):
        super().__init__()
        self.tokenizer = WordTokenizer(texts)
        self.embedding = nn.Embedding(self.tokenizer.size, features)
        self.cell = nn.GRUCell(features, features)
        self.head = nn.Linear(features, features)

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Return [N, F] of N texts, each distinct one read once; raises SpecError for words it does not know."""
        distinct = sorted(set(texts))
        place = {text: index for index, text in enumerate(distinct)}
        rows = torch.tensor([place[text] for text in texts], dtype=torch.int64, device=self.embedding.weight.device)
        return self._read(distinct)[rows]

    def _read(self, texts: Sequence[str]) -> Tensor:
        tokens, text = (part.to(self.embedding.weight.device) for part in self.tokenizer(texts))
        embedded, counted = self.embedding(tokens), text[..., None].to(self.embedding.weight.dtype)
        state = embedded.new_zeros(len(texts), self.cell.hidden_size)
        total = torch.zeros_like(state)
        for index in range(tokens.shape[1]):
            # Padding comes first and leaves the state at zero: a text means the same beside whatever others
            state = self.cell(embedded[:, index], state) * counted[:, index]
            total = total + state
        return self.head(total / counted.sum(1))
