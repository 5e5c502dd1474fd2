"""FAST's action tokenizer as data, where LeRobot would run the Python file that lies beside it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from robopolicy.core.errors import CheckpointError
from robopolicy.core.storage import read_object, reading

FILE = "processor_config.json"


@dataclass(frozen=True)
class FastTokenizer:
    """FAST (arXiv:2501.09747): what moves slowly needs few tokens.

    The discrete cosine transform of every action dimension, times `scale` and rounded, is one whole number for each
    frequency; these, less `min_token`, are the characters of a text, slowest frequency first, all dimensions of it,
    which byte pair encoding makes tokens of. It has the members that LeRobot's pi0_fast calls, which decodes by itself.
    """

    bpe_tokenizer: Any
    scale: float
    min_token: int

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> Self:
        """Read a folder, or a name on the hub that was fetched before; raises OSError where there is none.

        options: as LeRobot gives them to transformers; code that the folder brings is not run.
        """
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.hub import cached_file

        del options
        path: Any = cached_file(name, FILE)
        with reading(Path(path), failure=CheckpointError):
            known = read_object(Path(path))
            scale, least = float(known["scale"]), int(known["min_token"])
        return cls(PreTrainedTokenizerFast.from_pretrained(name), scale, least)

    def __call__(self, actions: Any) -> list[Sequence[int]]:
        """Return the tokens of each row of normalised actions [N, P, A]."""
        from scipy.fft import dct

        waves: Any = dct(np.asarray(actions), axis=1, norm="ortho")
        frequencies = np.around(waves * self.scale)
        characters = np.maximum(frequencies - self.min_token, 0).astype(int)
        texts = ["".join(map(chr, row.flatten())) for row in characters]
        return [self.bpe_tokenizer(text)["input_ids"] for text in texts]


class _PlainTokenizer:
    """In the place of transformers' AutoTokenizer: the same, but for code that a tokenizer brings."""

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name, **{**options, "trust_remote_code": False})


@contextmanager
def tokenizers_as_data(config: Any) -> Iterator[None]:
    """Let LeRobot make a policy of `config` without running code that its tokenizers bring: that of pi0_fast would."""
    if config.type != "pi0_fast":
        yield
        return
    from lerobot.policies.pi0_fast import modeling_pi0_fast

    module: Any = modeling_pi0_fast
    before = module.AutoProcessor, module.AutoTokenizer
    module.AutoProcessor, module.AutoTokenizer = FastTokenizer, _PlainTokenizer
    try:
        yield
    finally:
        module.AutoProcessor, module.AutoTokenizer = before
