"""Decoding methods for the K action tokens of a chunk: autoregressive, masked diffusion, or parallel.

Each has `sample`, `score` and `loss`, with exactly matching sampling and log-probabilities: a token's log-probability
is computed in the state in which it was drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.randomness import choice_at, uniform
from robopolicy.core.segments import entropy_level
from robopolicy.core.spec import check_finite
from robopolicy.nn.language import LanguageModel, Reading
from robopolicy.policies.token.configuration import DecodeSchedule, TokenConfig, TokenDecoding


@dataclass(frozen=True)
class ActionLanguage:
    """A language model and its action vocabulary: embedding [V, width] and head (width to V logits)."""

    model: LanguageModel
    embedding: nn.Embedding
    head: nn.Linear
    temperature: float
    entropy_temperature: float = 0.0

    def sampled(self, logp: Tensor) -> Tensor:
        """Return the log-probabilities that tokens are drawn from: logp [..., V], hotter where its entropy is high.

        The temperature is multiplied by 1 + tau h (HAPO, arXiv:2509.16591), with h in [-1, 1] from the log-entropy
        relative to its .8 quantile over these entries: in causal decoding those of one place of all rows that act
        together, so that a row alone is drawn at the plain temperature. What is recorded stays logp, as in the authors'
        code, so the ratio does not correct for it.
        """
        if not self.entropy_temperature:
            return logp
        entropy = -(logp.exp() * logp).sum(-1)
        level = entropy_level(entropy, torch.ones_like(entropy, dtype=torch.bool), 0.8)
        return (logp / (1 + self.entropy_temperature * level)[..., None]).log_softmax(-1)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities of the action vocabulary [..., V] at the sampling temperature, from hidden
        states [..., width].
        """
        return (self.head(hidden).float() / self.temperature).log_softmax(-1)


@dataclass(frozen=True)
class Prompt:
    """Context of the action tokens: the cached instruction, and the embedded observation [N, O, width]."""

    reading: Reading
    observation: Tensor


Kept = tuple[Tensor, Tensor]
"""(tokens [N, K], number of leading tokens that each row keeps [N] int64)."""


class Decoding(Protocol):
    """Decoding method for action tokens; a `Prompt` is valid for one call."""

    def sample(
        self, language: ActionLanguage, prompt: Prompt, generator: torch.Generator, *, deterministic: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the latents, including "tokens" [N, K] int64, and logp [N, K]; deterministic: the most likely
        tokens.
        """
        ...

    def latents_for(self, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return latents with which `sample` could have produced the tokens [N, K]."""
        ...

    def score(self, language: ActionLanguage, prompt: Prompt, latents: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities [N, K, V] from which the K recorded tokens were drawn."""
        ...

    def loss(
        self, language: ActionLanguage, prompt: Prompt, tokens: Tensor, valid: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the mean cross entropy [N] of demonstrated tokens [N, K] at temperature 1, over valid [N, K] bool."""
        ...


class CausalDecoding(nn.Module):
    """Autoregressive decoding from left to right; log-probabilities are computed in one teacher-forced pass."""

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def sample(
        self,
        language: ActionLanguage,
        prompt: Prompt,
        generator: torch.Generator,
        *,
        deterministic: bool,
        kept: Kept | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Sample tokens [N, K] with cached keys and values; see `Decoding`."""
        hidden = language.model.extend(prompt.reading, prompt.observation)
        # All at once: the draw of place k is the same whatever was said before it.
        draws = uniform((len(hidden), self.length), generator, hidden.device)
        tokens, scores = [], []
        for place in range(self.length):
            logp = language.log_probabilities(hidden[:, -1])
            check_finite("log-probabilities of action tokens", logp)
            token = logp.argmax(-1) if deterministic else choice_at(language.sampled(logp), draws[:, place])
            # Kept tokens are scored as drawn ones are; that they are no choices of this decision says the mask.
            if kept is not None:
                token = torch.where(place < kept[1], kept[0][:, place], token)
            tokens.append(token)
            scores.append(_of_tokens(logp, token))
            if place + 1 < self.length:
                hidden = language.model.extend(prompt.reading, language.embedding(token)[:, None])
        return {"tokens": torch.stack(tokens, 1)}, torch.stack(scores, 1)

    def latents_for(self, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tokens [N, K], whose order is fixed."""
        return {"tokens": tokens}

    def score(self, language: ActionLanguage, prompt: Prompt, latents: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities [N, K, V] given each token's predecessors."""
        return language.log_probabilities(self._teacher_forced(language, prompt, latents["tokens"]))

    def loss(
        self, language: ActionLanguage, prompt: Prompt, tokens: Tensor, valid: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the mean over the valid tokens [N]; see `Decoding`."""
        return _mean_error(language.head(self._teacher_forced(language, prompt, tokens)), tokens, valid)

    def score_further(self, language: ActionLanguage, prompt: Prompt, tokens: Tensor, further: Tensor) -> Tensor:
        """Return the log-probabilities [N, L, V] of L further tokens [N, L] after the K tokens [N, K] of a chunk."""
        token_embeddings = language.embedding(torch.cat([tokens, further[:, :-1]], 1))
        hidden = language.model.extend(prompt.reading, torch.cat([prompt.observation, token_embeddings], 1))
        return language.log_probabilities(hidden[:, -further.shape[1] :])

    def _teacher_forced(self, language: ActionLanguage, prompt: Prompt, tokens: Tensor) -> Tensor:
        """Return the hidden states [N, K, width] that predict the tokens [N, K]."""
        # The state before a token says it: the last of the observation the first token, token k - 1 token k.
        token_embeddings = language.embedding(tokens[:, :-1])
        return language.model.extend(prompt.reading, torch.cat([prompt.observation, token_embeddings], 1))[
            :, -self.length :
        ]


class ParallelDecoding(nn.Module):
    """Parallel decoding in one pass over K learned placeholder embeddings (OpenVLA-OFT, Kim et al. 2025,
    arXiv:2502.19645).

    Each position starts from an embedding that encodes only its index; positions attend to the prompt and to each other
    bidirectionally. Given the observation the tokens are independent, so their log-probabilities add up to that of the
    chunk. Dependencies between tokens are limited to what each position can infer from the observation. Differences
    from the paper: the prompt keeps the attention pattern of its checkpoint (there the whole sequence becomes
    bidirectional), and the placeholder embeddings are learned per position (there they are zeros and only the rotary
    embedding distinguishes positions).
    """

    def __init__(self, length: int, width: int):
        super().__init__()
        self.empty = nn.Parameter(0.02 * torch.randn(length, width))

    def sample(
        self,
        language: ActionLanguage,
        prompt: Prompt,
        generator: torch.Generator,
        *,
        deterministic: bool,
        kept: Kept | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Sample tokens [N, K] in one pass; see `Decoding`."""
        log_probabilities = self.score(language, prompt, {})
        check_finite("log-probabilities of action tokens", log_probabilities)
        draws = uniform(log_probabilities.shape[:2], generator, log_probabilities.device)
        tokens = (
            log_probabilities.argmax(-1) if deterministic else choice_at(language.sampled(log_probabilities), draws)
        )
        if kept is not None:
            place = torch.arange(tokens.shape[1], device=tokens.device)
            tokens = torch.where(place < kept[1][:, None], kept[0], tokens)
        return {"tokens": tokens}, _of_tokens(log_probabilities, tokens)

    def latents_for(self, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tokens [N, K], which have no order."""
        return {"tokens": tokens}

    def score(self, language: ActionLanguage, prompt: Prompt, latents: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities [N, K, V], which do not depend on the tokens [N, K]."""
        return language.log_probabilities(self._hidden(language, prompt))

    def loss(
        self, language: ActionLanguage, prompt: Prompt, tokens: Tensor, valid: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the mean over the valid tokens [N]; see `Decoding`."""
        return _mean_error(language.head(self._hidden(language, prompt)), tokens, valid)

    def _hidden(self, language: ActionLanguage, prompt: Prompt) -> Tensor:
        """Return the hidden states [N, K, width] of the K positions."""
        # A copy, for a view of a weight claims a gradient without a gradient graph, at which torch's counters stumble
        empty = self.empty.repeat(len(prompt.observation), 1, 1)
        return language.model.attend(_read(language, prompt), empty)


class MaskedDecoding(nn.Module):
    """Masked discrete diffusion with an absorbing mask: S passes, each of which replaces some masks by tokens.

    All K positions exist from the start. A position contains a learned mask embedding or that of its token, plus a
    learned position embedding. Positions attend to instruction, observation and each other bidirectionally (that prefix
    stays causal and is processed once). Each pass draws a token for every masked position and commits the most
    confident ones, those with the largest probability of the drawn token (MaskGIT, arXiv:2202.04200; LLaDA,
    arXiv:2502.09992; for actions: Discrete Diffusion VLA, arXiv:2508.20072, without its re-masking: a committed token
    stays, so that it has one log-probability). Ties are resolved in favour of the earlier position.

    Log-probabilities follow the trajectory (CJ-GRPO, arXiv:2509.23924): "order" [N, K] int64 records in which of the S
    passes each position was committed, and its log-probability is computed in the masked state before that pass. It is
    that of the committed tokens given the states. The choice of committed positions depends on the draws and is treated
    as part of the environment, as in CJ-GRPO: the sum over K is not the log-probability of the chunk, nor of the
    trajectory. It would be both only with an order fixed in advance. The choice favours likely tokens: samples vary
    less than the model's own distribution at that temperature, and the gradient of the log-probabilities does not
    average to zero over samples, so advantages should (as group-relative ones do).
    """

    def __init__(self, length: int, width: int, steps: int, schedule: DecodeSchedule):
        super().__init__()
        self.schedule = commit_schedule(length, steps, schedule)
        self.mask = nn.Parameter(0.02 * torch.randn(width))
        self.position = nn.Embedding(length, width)
        nn.init.normal_(self.position.weight, std=0.02)

    def sample(
        self, language: ActionLanguage, prompt: Prompt, generator: torch.Generator, *, deterministic: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Sample K tokens in S passes; the latents also contain "order" [N, K] int64, the pass of each; see
        `Decoding`.
        """
        reading, device = _read(language, prompt), prompt.observation.device
        shape = (len(prompt.observation), self.position.num_embeddings)
        steps = len(self.schedule)
        draws = uniform((shape[0], steps, shape[1]), generator, device)
        tokens, logp = torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, device=device)
        # `steps`, a pass that never comes, stands for not said yet.
        order = torch.full(shape, steps, device=device)
        for step, count in enumerate(self.schedule):
            committed_mask = order < step
            log_probabilities = language.log_probabilities(
                language.model.attend(reading, self._embed(language, tokens, committed_mask))
            )
            check_finite("log-probabilities of action tokens", log_probabilities)
            proposal = (
                log_probabilities.argmax(-1)
                if deterministic
                else choice_at(language.sampled(log_probabilities), draws[:, step])
            )
            drawn_logp = _of_tokens(log_probabilities, proposal)
            confidence = drawn_logp.masked_fill(committed_mask, -torch.inf)
            committed = _largest(confidence, count)
            order.scatter_(1, committed, step)
            now = order == step
            tokens, logp = torch.where(now, proposal, tokens), torch.where(now, drawn_logp, logp)
        return {"tokens": tokens, "order": order}, logp

    def latents_for(self, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tokens [N, K] and a random "order" [N, K] in which the S passes commit the scheduled numbers of
        them.
        """
        draws = uniform(tokens.shape, generator, tokens.device)
        ends = torch.tensor(self.schedule, device=tokens.device).cumsum(0)
        return {"tokens": tokens, "order": torch.bucketize(draws.argsort(-1).argsort(-1), ends, right=True)}

    def score(self, language: ActionLanguage, prompt: Prompt, latents: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities [N, K, V], for each position from the pass in which it was committed.

        The S masked states of a row are reconstructed from "order" and processed together, as N x S rows. Raises
        SpecError without a valid order.
        """
        tokens, steps = latents["tokens"], len(self.schedule)
        order = latents.get("order")
        if order is None or order.shape != tokens.shape or bool((order >= steps).any()):
            raise SpecError(
                f"Masked decoding needs an 'order' of the same shape as the tokens, {list(tokens.shape)}: the pass (of "
                f"{steps}) that generated each token. Pass all latents that this policy's act returned."
            )
        reading = _read(language, prompt)
        # The prefix is the same for all S states of a row: its keys and values are read once and repeated.
        reading.repeat(steps)
        committed_mask = order[:, None] < torch.arange(steps, device=order.device)[:, None]
        states = self._embed(language, tokens[:, None].expand_as(committed_mask), committed_mask)
        hidden = language.model.attend(reading, rearrange(states, "n s k d -> (n s) k d"))
        hidden = rearrange(hidden, "(n s) k d -> n s k d", s=steps)
        indices = order[:, None, :, None].expand(-1, -1, -1, hidden.shape[-1])
        return language.log_probabilities(hidden.gather(1, indices).squeeze(1))

    def loss(
        self, language: ActionLanguage, prompt: Prompt, tokens: Tensor, valid: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the mean cross entropy of masked tokens [N] at temperature 1, with a separate masking ratio per row.

        The ratio is uniform in (0, 1] of the row's valid tokens, rounded up, and the masked positions are uniform too.
        The mean is over masked tokens, so every row has the same weight; this is the 1 / t weighting of masked
        diffusion with the exact count in place of its expectation. Thus K times the loss is an upper bound on -log
        p(chunk), with p decoding one token at a time in random order (Hoogeboom et al. 2022, arXiv:2110.02037). Invalid
        tokens stay masked and are not used in training.
        """
        # 1 - rand lies in (0, 1]: of what is valid at least one token is masked.
        share = 1 - torch.rand((len(tokens), 1), generator=generator, device=generator.device)
        place = torch.rand(tokens.shape, generator=generator, device=generator.device)
        share, place = share.to(tokens.device), place.to(tokens.device).masked_fill(~valid, 2.0)
        # argsort twice gives ranks; invalid tokens, at 2, rank last and are never among those masked.
        rank = place.argsort(-1).argsort(-1)
        masked = valid & (rank < (share * valid.sum(-1, keepdim=True)).ceil())
        hidden = language.model.attend(_read(language, prompt), self._embed(language, tokens, valid & ~masked))
        return _mean_error(language.head(hidden), tokens, masked)

    def _embed(self, language: ActionLanguage, tokens: Tensor, said: Tensor) -> Tensor:
        """Return the embeddings [..., K, width]: of tokens [..., K] where `said` is True, of masks elsewhere."""
        return torch.where(said[..., None], language.embedding(tokens), self.mask) + self.position.weight


def commit_schedule(length: int, steps: int, schedule: DecodeSchedule) -> tuple[int, ...]:
    """Return the number of the K = `length` positions that each pass commits; they sum to K. Raises ConfigError.

    EVEN: `steps` passes of sizes as equal as possible. ASCENDING: floor(log2 K) passes of 1, 2, 4, ... and the rest in
    the last one, so that the first tokens, which have the least context, are committed most carefully (ASS,
    arXiv:2509.23924); steps is ignored. All tokens have equal weight in training, whereas the paper averages within
    every pass first.
    """
    if schedule is DecodeSchedule.ASCENDING:
        passes = max(1, length.bit_length() - 1)
        return (*(2**step for step in range(passes - 1)), length - 2 ** (passes - 1) + 1)
    if not 1 <= steps <= length:
        raise ConfigError(
            f"decode_steps={steps}, but a chunk has {length} tokens and every pass generates at least one: set "
            f"decode_steps to 1 .. {length}, or decode_schedule=ascending."
        )
    return tuple((step + 1) * length // steps - step * length // steps for step in range(steps))


def make_decoding(
    config: TokenConfig, length: int, model: LanguageModel
) -> CausalDecoding | MaskedDecoding | ParallelDecoding:
    """Return the decoding set by config.decoding for K = `length` tokens; raises ConfigError if `model` does not
    support it.
    """
    if config.decoding is TokenDecoding.CAUSAL:
        return CausalDecoding(length)
    if config.model:
        model.require_attend(f"decoding={config.decoding.value}")
    if config.decoding is TokenDecoding.PARALLEL:
        return ParallelDecoding(length, model.width)
    return MaskedDecoding(length, model.width, config.decode_steps, config.decode_schedule)


def _read(language: ActionLanguage, prompt: Prompt) -> Reading:
    """Process the observation after the instruction."""
    language.model.extend(prompt.reading, prompt.observation)
    return prompt.reading


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the indices [N, count] of the largest values [N, K], the earlier of equal ones first."""
    # ONNX has no stable sort, but its TopK takes the earlier of equal values
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return values.topk(count).indices
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _of_tokens(every: Tensor, tokens: Tensor) -> Tensor:
    """Gather the entries of tokens [...] from [..., V]."""
    return every.gather(-1, tokens[..., None]).squeeze(-1)


def _mean_error(logits: Tensor, tokens: Tensor, counted: Tensor) -> Tensor:
    """Return the cross entropy of tokens [N, K] under logits [N, K, V], averaged over counted [N, K] bool -> [N]."""
    error = functional.cross_entropy(rearrange(logits, "n k v -> n v k"), tokens, reduction="none")
    weight = counted.to(error.dtype)
    return (error * weight).sum(-1) / weight.sum(-1).clamp_min(1.0)
