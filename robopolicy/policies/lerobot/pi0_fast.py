"""Trainable LeRobot pi0_fast: every generated token is a step with a log-probability.

pi0_fast (FAST, arXiv:2501.09747) generates an action chunk as tokens of its language model, "Action: ... |". During
exploration LeRobot's own sampler draws them at a temperature; one pass over prompt and tokens then computes all
log-probabilities over the whole vocabulary, so they are exact. Tokens after the first "|" are not part of a decision.
In LeRobot's sampler the prompt attends to the first answer token, in its training it does not: log-probabilities follow
the sampler, the loss follows the training. Axes: N row, B row of an observation, K maximum number of answer tokens, V
word of the vocabulary, C executed step, A action dimension, S token of the prompt, D width.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.origin import described_origin
from robopolicy.core.policy import CONDITION, Decision, Scores, TensorObservation, is_condition
from robopolicy.core.randomness import use_generator
from robopolicy.core.spec import PolicySpec
from robopolicy.core.world import Rows
from robopolicy.nn.precision import as_cached, cast_for_cache, lowering
from robopolicy.nn.pretrained import quiet_logger
from robopolicy.policies.interface import check_chunks, in_range, register_range
from robopolicy.policies.lerobot.families import TOKEN_MASK, TOKENS
from robopolicy.policies.lerobot.features import LeRobotReader
from robopolicy.policies.lerobot.module import LeRobotModule
from robopolicy.policies.network import Condition, freeze
from robopolicy.policies.steps import probed_actions

IMAGES, SEEN, TEXT, TEXT_MASK = (f"{CONDITION}.{name}" for name in ("images", "seen", "text", "text_mask"))


class Reading(NamedTuple):
    """Prompt inputs: embedded images of every camera [N, S', D] with a mask of present cameras, and the tokens of the
    text.
    """

    images: list[Tensor]
    seen: list[Tensor]
    text: Tensor
    mask: Tensor


class FastTokens(LeRobotModule):
    """A `core.policy.Trainable` over the weights of a LeRobot policy of type pi0_fast.

    The setting `tuning` selects the trainable weights (expert: the language model without the image encoder) and the
    exploration temperature.
    """

    action_low: Tensor
    action_high: Tensor
    lowers_precision = memoryless = True
    reads_instructions = True

    def __init__(self, policy: LeRobotReader):
        inner: Any = policy.policy
        language = inner.model.paligemma_with_expert.paligemma
        super().__init__(policy, [language.model.language_model, language.lm_head])
        if self.tuning.gradient_checkpointing:
            raise ConfigError(
                "gradient_checkpointing recomputes denoising steps, and pi0_fast has none: set it to false."
            )
        tokenizer = inner._paligemma_tokenizer
        self.words = len(tokenizer)
        self.begin: int = tokenizer.bos_token_id
        self.end: int = tokenizer.convert_tokens_to_ids("|")
        self.most: int = inner.config.max_decoding_steps
        register_range(self, policy.spec.action)

    @property
    def spec(self) -> PolicySpec:
        """Inputs and outputs; the number of scored steps is the maximum number of tokens."""
        return replace(self.reader.spec, scored_steps=self.most, categorical=True)

    @property
    def caches_condition(self) -> bool:
        """Whether policy calls cache the embedded images: the image encoder is frozen."""
        return self.tuning.cache_encoder_outputs and not any(
            weight.requires_grad for weight in self.encoder_parameters()
        )

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return a `Decision`, with one action chunk per row; latents: "tokens" [B, K] int64, 0 after the end.

        deterministic: greedy decoding, as in LeRobot at temperature 0, without log-probabilities: mask is False and
        logp zero. While the image encoder is frozen, latents also contain the embedded images and the prompt. Raises
        SpecError or NonFiniteError on an invalid observation, NonFiniteError rather than returning a non-finite action,
        and ConfigError with meta tensors (a dry run), because the output length depends on values.
        """
        condition = self.encode(observation)
        if condition[IMAGES].is_meta:
            raise ConfigError(
                "dry_run is not supported for pi0_fast: its output length depends on the generated tokens."
            )
        model, reading = self._reader(), _reading(condition)
        with use_generator(generator, reading.text.device), lowering(reading.text.device):
            sampled_tokens: Tensor = model.sample_actions_fast_kv_cache(
                *reading, max_decoding_steps=self.most, temperature=0.0 if deterministic else self.tuning.temperature
            )
        live = self._live(sampled_tokens)
        tokens = torch.where(live, sampled_tokens, 0)
        logp = torch.zeros(tokens.shape, device=tokens.device)
        if not deterministic:
            logp = self._scores(condition, tokens).logp
        latents = {"tokens": tokens, **(condition if self.caches_condition else {})}
        return Decision(self._actions(tokens), latents, logp, live & (not deterministic))

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Compute log-probabilities of recorded tokens [N, K]: logp and entropy [N, K] at the exploration temperature,
        0 after the end.

        Optional latents: "chosen" [N, k] int64 selects k of the K tokens per row; "executed" has no effect, because
        every token affects every step; cached image embeddings replace the images while the image encoder is frozen.
        Raises SpecError if tokens or observation have wrong shapes.
        """
        tokens = latents["tokens"]
        if tuple(tokens.shape[1:]) != (self.most,):
            raise SpecError(
                f"The tokens have shape {list(tokens.shape)}, but this policy's tokens have [N, {self.most}]."
            )
        cached_condition = (
            {name: value for name, value in latents.items() if is_condition(name)} if self.caches_condition else {}
        )
        scores = self._scores(as_cached(cached_condition, self) or self.encode(observation), tokens)
        if "chosen" in latents:
            indices = latents["chosen"]
            return Scores(scores.logp.gather(1, indices), scores.entropy.gather(1, indices))
        return scores

    def describe_steps(self) -> dict[str, Any]:
        """Implement `core.steps.DescribesSteps.describe_steps`; the exploration temperature is not included."""
        chunk, action = self.spec.chunk, self.spec.action.size
        probe = probed_actions(self.executed, action, self.action_low.device)
        # A wave that is the same one in every policy's normalised actions: how it is said is vocabulary and tokenizer.
        wave = torch.linspace(-0.5, 0.5, chunk * action, device=self.action_low.device).view(1, chunk, action)
        probe_tokens = self._told(self.executed(wave))[0]
        return {"kind": "words of a language model", "words": self.words, "a chunk in words": probe_tokens, **probe}

    def steps_of(self, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the latents [N, ...] with which `act` would have generated chunks [N, C, A] in world units.

        Raises SpecError when a chunk needs more tokens than the maximum.
        """
        del generator
        # Without the first, which begins an answer and is not said.
        tokens = self._told(actions)[0][:, 1 : self.most + 1]
        tokens = pad(tokens, (0, self.most - tokens.shape[1]))
        if not bool((tokens == self.end).any(1).all()):
            raise SpecError(f"A chunk needs more than the {self.most} tokens of max_decoding_steps in its config.json.")
        return {"tokens": torch.where(self._live(tokens), tokens, 0)}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"tokens": [N]}, LeRobot's cross entropy of each row's tokens.

        batch: "observation" (key -> [N, H, ...]), "actions" [N, C, A] in world units, "action_valid" [N, C]: padding is
        learned, because every token affects every step. Samples are weighted equally, whereas LeRobot's mean weights
        tokens equally. Raises SpecError on wrong shapes, NonFiniteError on NaN or infinity.
        """
        del generator
        actions, _ = check_chunks(batch, self.spec.chunk, self.spec.action.size)
        tokens, token_mask = self._told(actions)
        model, reading = self._reader(), _reading(self.encode(batch["observation"]))
        embedded, padding_mask, sees, *_ = model.embed_prefix_fast(*reading, tokens, token_mask)
        # Shifted by one: the state before a token says it.
        hidden = self._heard(embedded, padding_mask, sees)[:, -tokens.shape[1] : -1]
        cross_entropies = cross_entropy(self._logits(hidden).transpose(1, 2), tokens[:, 1:], reduction="none")
        weight = token_mask[:, 1:].to(cross_entropies.dtype)
        return {"tokens": (cross_entropies * weight).sum(1) / weight.sum(1).clamp_min(1)}

    def encode(self, observation: TensorObservation) -> Condition:
        """Return the embedded images [N, cameras, S', D], the mask of present cameras, and the prompt [N, S].

        Raises SpecError or NonFiniteError as `validate_observation`.
        """
        inner: Any = self.policy
        frame = self.reader.frames(observation)[-1]
        images, image_masks = inner._preprocess_images(frame)
        with lowering(self.reader.device):
            embedded = [inner.model.paligemma_with_expert.embed_image(image) for image in images]
        condition = {
            IMAGES: torch.stack(embedded, 1),
            SEEN: torch.stack(image_masks, 1),
            TEXT: frame[TOKENS],
            TEXT_MASK: frame[TOKEN_MASK].bool(),
        }
        return cast_for_cache(condition)

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Prepare for policy gradients through all tokens; train_encoder False freezes the image encoder.

        Raises ConfigError for a different number of steps.
        """
        if steps not in (None, self.most):
            raise ConfigError(f"pi0_fast is always fine-tuned in all of its {self.most} tokens, not in {steps} steps.")
        if not train_encoder:
            freeze(self.encoder_parameters())

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Weights that an optimiser may change."""
        return [weight for weight in self.parameters() if weight.requires_grad]

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; no row [R] has state between policy calls."""

    def save(self, folder: Path) -> None:
        """Write a LeRobot checkpoint atomically."""
        self.write(folder, replace(self.reader.settings, **described_origin(self)))

    def _scores(self, condition: Condition, tokens: Tensor) -> Scores:
        """Return log-probabilities and entropies [N, K] of tokens [N, K], in one pass over prompt and tokens."""
        live = self._live(tokens)
        # As far as the longest answer: what lies behind it would only be padding.
        answer = tokens[:, : int(live.sum(1).max())]
        model, reading = self._reader(), _reading(condition)
        rows = (len(answer), 1)
        # As in LeRobot's sampler, where the token that begins an answer is the prompt's last and sees all of it.
        begin = torch.full(rows, self.begin, dtype=torch.int64, device=answer.device)
        text, mask = torch.cat([reading.text, begin], 1), pad(reading.mask, (0, 1), value=True)
        embedded, padding_mask, sees, *_ = model.embed_prefix_fast(reading.images, reading.seen, text, mask)
        prompt, answer_steps = embedded.shape[1], answer.shape[1] - 1
        words = model.paligemma_with_expert.embed_language_tokens(answer[:, :-1])
        # The prompt does not see what is said; that sees the prompt, and what was said before it.
        order = (
            torch.ones((answer_steps, answer_steps), dtype=torch.bool, device=answer.device)
            .tril()
            .expand(len(answer), -1, -1)
        )
        visible_mask = torch.cat([padding_mask[:, None].expand(-1, answer_steps, -1), order], 2)
        hidden = self._heard(
            torch.cat([embedded, words.to(embedded.dtype)], 1),
            pad(padding_mask, (0, answer_steps), value=True),
            torch.cat([pad(sees, (0, answer_steps)), visible_mask], 1),
        )
        # The prompt's last token says the first word.
        log_probabilities = (self._logits(hidden[:, prompt - 1 :]) / self.tuning.temperature).log_softmax(-1)
        logp = log_probabilities.gather(-1, answer[..., None]).squeeze(-1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        logp, entropy = (pad(value, (0, self.most - answer.shape[1])) for value in (logp, entropy))
        return Scores(torch.where(live, logp, 0.0), torch.where(live, entropy, 0.0))

    def _heard(self, embedded: Tensor, there: Tensor, sees: Tensor) -> Tensor:
        """Return the last hidden layer [N, S, D] of embedded tokens. there: padding mask, [N, S]; sees: attention mask,
        [N, S, S].
        """
        from lerobot.policies.common.vla_utils import prepare_attention_masks_4d

        inner: Any = self.policy
        joint = inner.model.paligemma_with_expert
        inputs = embedded.to(joint.paligemma.model.language_model.layers[0].self_attn.q_proj.weight.dtype)
        with lowering(inputs.device):
            (output, _), _ = joint.forward(
                attention_mask=prepare_attention_masks_4d(sees, dtype=inputs.dtype),
                position_ids=there.cumsum(1) - 1,
                inputs_embeds=[inputs, None],
                use_cache=False,
            )
        return output

    def _logits(self, heard: Tensor) -> Tensor:
        """Return the logits [N, S, V] of hidden states [N, S, D]."""
        inner: Any = self.policy
        head = inner.model.paligemma_with_expert.paligemma.lm_head
        return head(heard.to(head.weight.dtype)).float()

    def _live(self, tokens: Tensor) -> Tensor:
        """Return the mask [N, K] bool of answer tokens [N, K]: all up to and including the first end token."""
        ends_so_far = (tokens == self.end).cumsum(1)
        return (ends_so_far == 0) | ((ends_so_far == 1) & (tokens == self.end))

    def _actions(self, tokens: Tensor) -> Tensor:
        """Decode tokens [N, K] to actions [N, C, A] in world units and within bounds, whatever their prefix."""
        inner: Any = self.policy
        # Whatever is said must become an action: a policy that explores also says what is none.
        lenient = copy.copy(inner)
        lenient.config = copy.copy(inner.config)
        lenient.config.validate_action_token_prefix = False
        with quiet_logger(""):  # LeRobot makes zeros of what is no action, and a warning each time
            word_tokens = torch.where(tokens < self.words, tokens, 0)  # a model may have more words than its tokenizer
            actions = lenient.detokenize_actions(word_tokens, self.spec.chunk, self.spec.action.size)
        return in_range(self.executed(actions), self.action_low, self.action_high)

    def _told(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return LeRobot's target tokens for chunks [N, C, A] in world units, and their mask, [N, M]."""
        from lerobot.processor import ActionTokenizerProcessorStep

        for step in self.reader.preprocess.steps:
            tokenizer: Any = step
            if isinstance(step, ActionTokenizerProcessorStep):
                return tokenizer._tokenize_action(self.normalised(actions.float()))
        raise ConfigError("The policy's preprocessor has no action tokenizer, which imitation needs.")

    def _reader(self) -> Any:
        """Return a shallow copy of the model that uses embedded images, so that the image encoder runs once per policy
        call.
        """
        inner: Any = self.policy
        model, joint = copy.copy(inner.model), copy.copy(inner.model.paligemma_with_expert)
        joint.embed_image = lambda embedded: embedded
        model._modules = {**inner.model._modules, "paligemma_with_expert": joint}
        return model


def _reading(condition: Condition) -> Reading:
    images, image_masks = (list(condition[name].unbind(1)) for name in (IMAGES, SEEN))
    return Reading(images, image_masks, condition[TEXT], condition[TEXT_MASK])
