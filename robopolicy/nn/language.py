"""Language models of transformers (extra `vla`) that read a prompt and then consume embeddings step by step.

All rows with the same text-only prompt have the same keys and values: they are computed once per distinct text and
copied, in sampling and in training (gradients accumulate through the copies). A prompt with images is processed row by
row by the full vision-language model.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, SpecError, nearest, require_extra
from robopolicy.core.finite_values import join_names
from robopolicy.nn.precision import lowering

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache

EXTRA = "vla"
PADDING = "<pad>"
BEGIN = "<begin>"
UNKNOWN = "<unknown>"
_BEFORE, _AFTER = "\"'([\u201c\u2018", ".,;:!?\"')]\u201d\u2019\u2026"
"""Punctuation to strip before and after a word; a minus or a point before a number is kept."""
_NAMED = 20
"""Maximum number of words listed in an error."""


class TextTokenizer(Protocol):
    """Converts strings to padded token ids."""

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return tokens [U, L] int64 and the text mask [U, L] bool; padding is on the left."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files that `load_text_tokenizer` reads into `folder`."""
        ...


class WordTokenizer:
    """Tokenizer with a fixed vocabulary of lower-case words, for models trained from scratch; it is saved with the
    policy's config. Words are matched regardless of surrounding punctuation.

    texts: source of the vocabulary; unknown: whether other words map to one extra token or are rejected.
    """

    def __init__(self, texts: Sequence[str], *, unknown: bool = False):
        self.words = tuple(sorted({word for text in texts for word in text.lower().split()}))
        words = (PADDING, BEGIN, *self.words, *([UNKNOWN] if unknown else []))
        self._index = {word: index for index, word in enumerate(words)}
        self._bare = {_bare(word): word for word in self.words}
        self.unknown = self._index.get(UNKNOWN)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self._index)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return tokens [U, L] and text mask [U, L]; raises SpecError on unknown words, unless there is a token for
        them.
        """
        rows = [[BEGIN, *self._words_of(text)] for text in texts]
        if self.unknown is not None:
            rows = [[word if word in self._index else UNKNOWN for word in row] for row in rows]
        for row, text in zip(rows, texts, strict=True):
            for word in row:
                if word not in self._index:
                    raise SpecError(
                        f"The policy was not trained with the word '{word}' of '{text}'.{self._known(word)}"
                    )
        longest = max(map(len, rows))
        padded = [[PADDING] * (longest - len(row)) + row for row in rows]
        tokens = torch.tensor([[self._index[word] for word in row] for row in padded])
        return tokens, tokens != self._index[PADDING]

    def save(self, folder: Path) -> None:
        """Save nothing: the instructions in the config are sufficient."""

    def _words_of(self, text: str) -> list[str]:
        """Return the words of a text, replacing words that differ only in punctuation by their known form."""
        words = [word if word in self._index else self._bare.get(_bare(word), word) for word in text.lower().split()]
        return [word for word in words if word in self._index or _bare(word)]

    def _known(self, word: str) -> str:
        suggestion = nearest(word, self.words)
        similar = f" Did you mean '{suggestion}'?" if suggestion else ""
        return f"{similar} Known words: {join_names(list(self.words), _NAMED) or 'no words'}."


def _bare(word: str) -> str:
    """Strip the punctuation around a word."""
    return word.lstrip(_BEFORE).rstrip(_AFTER)


class PretrainedTokenizer:
    """The tokenizer of a Hugging Face checkpoint."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token
        if tokenizer.pad_token is None:
            raise ConfigError("The checkpoint's tokenizer has no padding, end or beginning token: add one of them.")

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return tokens [U, L] and text mask [U, L]; raises SpecError when a text yields no token."""
        batch: Any = self.tokenizer(list(texts), padding=True, padding_side="left", return_tensors="pt")
        text = batch["attention_mask"].bool()
        if text.shape[1] == 0 or not bool(text[:, -1].all()):
            raise SpecError(f"The tokenizer returns no tokens for one of the instructions {list(texts)}: use words.")
        return batch["input_ids"], text

    def save(self, folder: Path) -> None:
        """Write the files of the tokenizer."""
        self.tokenizer.save_pretrained(folder)


@dataclass
class Reading:
    """Key-value cache of N rows; seen: mask of the L entries that are not padding [N, L] bool; position: position id of
    the next token [N] int64 (an image can take fewer positions than tokens).
    """

    cache: "Cache"
    seen: Tensor
    position: Tensor

    def repeat(self, times: int) -> None:
        """Repeat every row `times` times in succession, [N, L] -> [N * times, L]."""
        self.cache.batch_repeat_interleave(times)
        self.seen = self.seen.repeat_interleave(times, 0)
        self.position = self.position.repeat_interleave(times, 0)

    def copied(self, rows: Tensor) -> "Reading":
        """Return a copy of the cache of rows [R], to be extended separately."""
        cache = copy.deepcopy(self.cache)
        cache.batch_select_indices(rows)
        return Reading(cache, self.seen[rows], self.position[rows])


@runtime_checkable
class PlacesImages(Protocol):
    """A vision-language model that computes its own multi-axis position ids for images (Qwen-VL)."""

    def get_rope_index(self, *inputs: Any, **options: Any) -> Any:
        """Return position ids and their offset to the number of tokens."""
        ...


class LanguageModel(nn.Module):
    """A transformers backbone without language head: a language model, or a vision-language model that contains one.

    backbone: e.g. a LlamaModel or the model of a checkpoint. It stays in evaluation mode, because dropout would make
    sampling and log-probabilities differ.
    """

    def __init__(self, backbone: "PreTrainedModel"):
        super().__init__()
        self.backbone = backbone
        # SmolVLM and Idefics write what they see into the text's embeddings, which products in bfloat16 do not change.
        if isinstance(connector := getattr(backbone, "connector", None), nn.Module):
            connector.register_forward_hook(_in_its_weights_precision)
        self.train(False)

    @property
    def width(self) -> int:
        """Size of a token embedding."""
        return self._embedding.weight.shape[1]

    @property
    def decoder(self) -> "PreTrainedModel":
        """The language model inside the backbone."""
        return cast("PreTrainedModel", self.backbone.get_decoder())

    @property
    def _embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.backbone.get_input_embeddings())

    def train(self, mode: bool = True) -> "LanguageModel":
        """Keep the model in evaluation mode."""
        return super().train(False)

    def read(self, tokens: Tensor, text: Tensor, rows: Tensor) -> Reading:
        """Process distinct texts, tokens [U, L] with text mask [U, L] bool, and copy their caches to rows [N] (each <
        U).
        """
        cache = self._cache()
        self._run(
            self.decoder,
            inputs_embeds=self._embedding(tokens),
            attention_mask=_attention_mask(text, tokens.shape[1]),
            position_ids=_counted(text),
            past_key_values=cache,
        )
        cache.batch_select_indices(rows)
        return Reading(cache, text[rows], text[rows].sum(-1))

    def see(self, inputs: Mapping[str, Tensor]) -> Reading:
        """Process N prompts with images, as prepared by the checkpoint's processor.

        inputs: "input_ids" and "attention_mask" [N, L], padded on the left, and the model's image inputs. The attention
        pattern is the model's own: PaliGemma attends bidirectionally within its prompt.
        """
        cache, text = self._cache(), inputs["attention_mask"].bool()
        places = {} if isinstance(self.backbone, PlacesImages) else {"position_ids": _counted(text)}
        output = self._run(self.backbone, **inputs, **places, past_key_values=cache)
        position = text.sum(-1)
        if "rope_deltas" in output:
            position = position + output["rope_deltas"].flatten()
        return Reading(cache, text, position)

    def extend(self, reading: Reading, embeddings: Tensor) -> Tensor:
        """Append embeddings [N, S, width] and return hidden states of the last layer [N, S, width]; `reading` is
        extended in place.
        """
        position, reading.seen = _next_positions(reading, embeddings)
        reading.position = position[:, -1] + 1
        output = self._run(
            self.decoder,
            inputs_embeds=embeddings,
            attention_mask=_attention_mask(reading.seen, embeddings.shape[1]),
            position_ids=position,
            past_key_values=reading.cache,
        )
        return output.last_hidden_state.to(embeddings.dtype)

    def attend(self, reading: Reading, embeddings: Tensor) -> Tensor:
        """Like `extend`, but the S embeddings attend to each other bidirectionally, and `reading` is unchanged.

        embeddings: [N, S, width] -> hidden states of the last layer [N, S, width]. Raises ConfigError when a layer's
        sliding window is shorter than the sequence: its cache would lose entries of `reading`.
        """
        position, mask = _next_positions(reading, embeddings)
        steps = embeddings.shape[1]
        window = _window(reading.cache)
        if window is not None and mask.shape[1] >= window:
            raise ConfigError(
                f"Bidirectional attention has {mask.shape[1]} tokens here, {steps} of them of an action, but a "
                f"{type(self.decoder).__name__} has layers whose attention window is smaller than {window}: reduce "
                "the input (cameras and fields in observation_keys, frames in history, a larger token.patch), "
                "choose another token.model, or set decoding=causal."
            )
        # Four axes [N, head, query, key]: transformers takes such a mask as it is and adds nothing causal to it
        bias = torch.zeros_like(mask, dtype=embeddings.dtype)
        bias = bias.masked_fill(~mask, torch.finfo(embeddings.dtype).min)
        output = self._run(
            self.decoder,
            inputs_embeds=embeddings,
            attention_mask=bias[:, None, None].expand(-1, -1, steps, -1),
            position_ids=position,
            past_key_values=reading.cache,
        )
        reading.cache.crop(-steps)
        return output.last_hidden_state.to(embeddings.dtype)

    @torch.no_grad()
    def require_attend(self, what: str) -> None:
        """Raise ConfigError, naming `what` needs it, if `attend` does not work: some backbones are always causal."""
        weight = self._embedding.weight
        token = torch.zeros((1, 1), dtype=torch.int64, device=weight.device)
        # Two rows, alike but for the second of their two embeddings: a causal backbone gives the first ones the same.
        pairs = torch.linspace(-1, 1, self.width).to(weight).repeat(2, 2, 1)
        pairs[1, 1] *= -1
        try:
            hidden = self.attend(self.read(token, token == 0, token.new_zeros(2)), pairs)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise ConfigError(_causal_by_nature(self.backbone, what)) from error
        if torch.allclose(hidden[0, 0], hidden[1, 0]):
            raise ConfigError(_causal_by_nature(self.backbone, what))

    def freeze_vision(self) -> None:
        """Freeze everything but the language model: in a vision-language model the vision tower and connector."""
        decoder_weights = {id(weight) for weight in self.decoder.parameters()}
        for weight in self.backbone.parameters():
            weight.requires_grad_(weight.requires_grad and id(weight) in decoder_weights)

    def add_lora(self, rank: int, alpha: float) -> None:
        """Freeze the weights and add LoRA adapters to every linear layer (Hu et al. 2021, arXiv:2106.09685).

        The output is initially unchanged, because the second factor is zero. No dropout.
        """
        peft = require_extra("peft", EXTRA)
        settings = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear")
        peft.inject_adapter_in_model(settings, self.backbone)
        for name, weight in self.backbone.named_parameters():
            weight.requires_grad_("lora_" in name)
        self.train(False)

    @torch.no_grad()
    def merge_lora(self) -> None:
        """Merge the adapters into the weights and remove them; all weights become trainable."""
        layer = require_extra("peft.tuners.lora", EXTRA).LoraLayer
        modules: list[tuple[str, Any]] = list(self.backbone.named_modules())
        for name, module in modules:
            if isinstance(module, layer):
                module.merge()
                self.backbone.set_submodule(name, module.get_base_layer())
        self.backbone.requires_grad_(True)

    def _run(self, network: "PreTrainedModel", **inputs: Any) -> Any:
        """Run a network that fills a cache, in the run's training precision."""
        with lowering(self._embedding.weight.device):
            return network(**inputs, use_cache=True)

    def _cache(self) -> "Cache":
        return require_extra("transformers", EXTRA).DynamicCache(config=self.decoder.config)


def _in_its_weights_precision(module: nn.Module, given: Any, made: Tensor) -> Tensor:
    return made.to(next(module.parameters()).dtype)


def _counted(text: Tensor) -> Tensor:
    """Return the position ids [N, L] of padded texts, text mask [N, L] bool; each counts from its first token."""
    return (text.long().cumsum(-1) - 1).clamp_min(0)


def _attention_mask(seen: Tensor, steps: int) -> Tensor:
    """Return the mask with which the last `steps` of L entries attend causally to those in `seen` [N, L] bool.

    transformers makes its own from `seen`, but not while torch traces, when sizes are tensors.
    """
    if not torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return seen.long()
    length = seen.shape[1]
    causal = torch.arange(length) <= torch.arange(length - steps, length)[:, None]
    return (~(causal & seen[:, None, None])).float() * torch.finfo(torch.float32).min


def _next_positions(reading: Reading, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position ids [N, S] of the next embeddings [N, S, width] and the extended mask [N, L + S] bool."""
    rows, steps = embeddings.shape[:2]
    position = reading.position[:, None] + torch.arange(steps, device=embeddings.device)
    return position, torch.cat([reading.seen, reading.seen.new_ones(rows, steps)], 1)


def _window(cache: "Cache") -> int | None:
    """Return the smallest sliding window of any layer in tokens; None if all layers attend to everything."""
    layers: list[Any] = [layer for layer, slides in zip(cache.layers, cache.is_sliding, strict=True) if slides]
    return min((layer.sliding_window for layer in layers), default=None)


def _causal_by_nature(backbone: "PreTrainedModel", what: str) -> str:
    return (
        f"{what} needs bidirectional attention, which a {type(backbone).__name__} does not support: choose another "
        "token.model, or decoding=causal."
    )


def small_backbone(vocabulary: int, width: int, depth: int, heads: int, feed_forward: int) -> "PreTrainedModel":
    """Return a Llama with random weights (drawn from torch's global generator).

    Weights have a standard deviation of width^-1/2: the usual 0.02 suits widths near a thousand; at a hundred it
    attenuates the signal so much that learning starts late. Raises ConfigError unless heads divide the width.
    """
    transformers = require_extra("transformers", EXTRA)
    if width % heads:
        raise ConfigError(f"token.width={width} must be a multiple of token.heads={heads}.")
    return transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=feed_forward,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            initializer_range=width**-0.5,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        )
    )
