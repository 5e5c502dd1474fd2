"""Vision-language-action token policy: a transformer reads instruction and observation, then generates the action chunk
as tokens, one by one or several at a time (`decoding`).

A vision-language checkpoint processes images and instruction as one prompt in its own format; other backbones process
the instruction, then image patches. Vectors (the robot's state) follow, one embedding each through a learned
projection: exact, and one position per vector, without spelling digits (OpenVLA-OFT, arXiv:2502.19645).

Every token is a categorical choice with an exact log-probability at the sampling temperature: `log_prob` evaluates the
tokens sampled by `act` in the state in which they were sampled. The action tokens have their own embeddings and head,
so the distribution covers only them (OpenVLA and pi0-FAST overwrite rarely used words instead), and text logits are
never computed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from robopolicy.core.checkpoints import read_weights, require_format, restoring
from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import FormerName
from robopolicy.core.policy import Decision, Scores, TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX, Field, validate_observation
from robopolicy.core.structured import from_plain
from robopolicy.nn.language import (
    LanguageModel,
    Reading,
    TextTokenizer,
    WordTokenizer,
    small_backbone,
)
from robopolicy.nn.normalizer import ACTION, Normalizer
from robopolicy.nn.pretrained import (
    build_described_backbone,
    is_vision_language,
    load_pretrained_tokenizer,
    load_processor,
    pretrained_backbone,
    pretrained_config,
    pretrained_vision_language,
)
from robopolicy.nn.tokens import BinTokenizer, FrequencyTokenizer, ObservationTokens, make_action_tokenizer
from robopolicy.nn.vision_language import VisionLanguageProcessor, describe_prompt, images_of_rows
from robopolicy.policies.categorical import CategoricalPolicy
from robopolicy.policies.checkpoint import save_policy, saved_fields
from robopolicy.policies.interface import check_chunks, instructions_or_default, register_range, select_fields
from robopolicy.policies.steps import probed_actions
from robopolicy.policies.token.configuration import TokenConfig, TokenPolicyConfig, TokenVision
from robopolicy.policies.token.decoding import ActionLanguage, CausalDecoding, MaskedDecoding, Prompt, make_decoding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKEN_POLICY = "token_policy"
"""Kind name in checkpoints."""
TOKENIZER, PROCESSOR = "tokenizer", "processor"
"""Subfolders of a checkpoint."""


class TokenPolicy(CategoricalPolicy[TokenPolicyConfig, BinTokenizer | FrequencyTokenizer]):
    """A `core.policy.Policy` that generates action tokens.

    config, observation, action, fps, values, seed: as in `DenoisingPolicy`; instructions: supported instructions (the
    vocabulary of a model trained from scratch); language: a backbone and its tokenizer or, if it encodes images itself,
    its processor; None for the one set by config.token. Raises ConfigError when config.observation_keys names an
    unknown field, an action is not a vector, the decoding does not fit the tokens or the model, or `values` lack a
    normalised field.
    """

    lowers_precision = True

    def __init__(
        self,
        config: TokenPolicyConfig,
        observation: Mapping[str, Field],
        action: Field,
        *,
        fps: float,
        instructions: tuple[str, ...] = ("",),
        values: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        language: "tuple[PreTrainedModel, TextTokenizer | VisionLanguageProcessor] | None" = None,
    ):
        super().__init__()
        if len(action.shape) != 1:
            raise ConfigError(f"A token policy needs a vector of actions per control step, not {action.shape}.")
        self.config = config
        self.fields = select_fields(config.observation_keys, observation)
        self.action = action
        self.fps = fps
        self.instructions = tuple(instructions)
        token = config.token
        self.action_normalizer = Normalizer(action.shape, config.action_normalization)
        self.action_tokens = make_action_tokenizer(
            token.actions,
            config.chunk,
            action.size,
            bins=token.bins,
            resolution=token.resolution,
            frequencies=token.frequencies,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            backbone, reader = language or _language(config, self.fields, self.instructions)
            self.processor = reader if isinstance(reader, VisionLanguageProcessor) else None
            self.text_tokens = reader.tokenizer if isinstance(reader, VisionLanguageProcessor) else reader
            self.language = LanguageModel(backbone)
            width = self.language.width
            self.observation_tokens = ObservationTokens(
                self.fields,
                config.history,
                width,
                config.state_normalization,
                token.patch if self.processor is None else 0,
                config.image.random_shift,
            )
            self.action_embedding = nn.Embedding(self.action_tokens.vocabulary, width)
            nn.init.normal_(self.action_embedding.weight, std=0.02)
            self.head = nn.Linear(width, self.action_tokens.vocabulary)
            self.decoding = make_decoding(token, self.action_tokens.length, self.language)
            if token.lora_rank:
                self.language.add_lora(token.lora_rank, token.lora_alpha)
        self.described = ""
        self.adapters: dict[str, float] | None = None
        self.finetuning: dict[str, Any] | None = None
        if language is None and self.processor is not None:
            self.described = self._describe(self.processor)
        register_range(self, action)
        if values is not None:
            self.fit_normalizers(values)

    @property
    def is_pretrained(self) -> bool:
        """Whether it started from a pretrained language model; see `abilities.IsPretrained`."""
        return bool(self.config.token.model)

    @property
    def reads_instructions(self) -> bool:
        """Whether actions depend on the instruction."""
        return True

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return a `Decision`, with one action chunk per row; latents: "tokens" [B, K] int64, and in masked decoding
        "order" [B, K] int64.

        deterministic: the most likely token each time, without log-probabilities: mask is False and logp zero. Raises
        SpecError or NonFiniteError on an invalid observation or unknown words, and NonFiniteError rather than returning
        a non-finite action.
        """
        return self.generate_actions(self._prompt(observation), generator, deterministic=deterministic)

    say = FormerName("generate_actions")

    def generate_actions(self, prompt: Prompt, generator: torch.Generator, *, deterministic: bool) -> Decision:
        """Generate actions [B, C, A] after a prompt; see `act`."""
        latents, logp = self.decoding.sample(self._action_language, prompt, generator, deterministic=deterministic)
        mask = torch.zeros_like(logp, dtype=torch.bool) if deterministic else torch.ones_like(logp, dtype=torch.bool)
        return self.decided(latents, logp, mask)

    @torch.no_grad()
    def resume(
        self, observation: TensorObservation, latents: Mapping[str, Tensor], count: Tensor, generator: torch.Generator
    ) -> Decision:
        """Like `act`, but keep the first count[b] tokens of latents["tokens"] [B, K]; see `Resumes`.

        count: [B] int64. Raises ConfigError in masked decoding, which has no first tokens, otherwise the errors of
        `act`.
        """
        if isinstance(self.decoding, MaskedDecoding):
            raise ConfigError("Masked decoding cannot continue from its first tokens: set branch_sampling_step=null.")
        new_latents, logp = self.decoding.sample(
            self._action_language,
            self._prompt(observation),
            generator,
            deterministic=False,
            kept=(latents["tokens"], count),
        )
        # Kept tokens were choices of another decision.
        return self.decided(new_latents, logp, torch.arange(logp.shape[1], device=logp.device) >= count[:, None])

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Compute log-probabilities of tokens [N, K] returned by `act`: logp and entropy [N, K] at the sampling
        temperature.

        Optional latents: "chosen" [N, k] int64 selects k of the K tokens per row; "executed" [N, C] bool: tokens of
        control steps that were not executed have logp 0 (with frequencies every token affects every step, and all
        count). In masked decoding other tokens may depend on those, so this is an approximation there. extras:
        log_probabilities [N, K, V] of the whole action vocabulary. Raises SpecError if tokens or observation have wrong
        shapes.
        """
        self.require_tokens(latents["tokens"])
        return self.scored(self.decoding.score(self._action_language, self._prompt(observation), latents), latents)

    @property
    def answers_in_tokens(self) -> bool:
        """Whether it can go on after the tokens of a chunk, as causal decoding does; see `AnswersInTokens`."""
        return isinstance(self.decoding, CausalDecoding)

    def answer_log_probs(
        self, observation: TensorObservation, latents: Mapping[str, Tensor], answers: Tensor
    ) -> Tensor:
        """Return the log-probabilities [N, L, V] of answers [N, L] after the chunk's tokens; see `AnswersInTokens`.

        Raises ConfigError unless decoding is causal.
        """
        if not isinstance(self.decoding, CausalDecoding):
            raise ConfigError("Only causal decoding goes on after the tokens of a chunk: set decoding=causal.")
        return self.decoding.score_further(self._action_language, self._prompt(observation), latents["tokens"], answers)

    def steps_of(self, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the latents [N, ...] with which `act` would have generated chunks [N, C, A] in world units.

        generator: draws the order of the tokens in masked decoding.
        """
        tokens = self.action_tokens.encode(self.action_normalizer(actions.float()))
        return self.decoding.latents_for(tokens, generator)

    def describe_steps(self) -> dict[str, Any]:
        """Implement `core.steps.DescribesSteps.describe_steps`; the exploration temperature is not included."""
        token, tokenizer = self.config.token, self.action_tokens
        masked = isinstance(self.decoding, MaskedDecoding)
        return {
            "kind": f"tokens, {token.actions.value}",
            "vocabulary": tokenizer.vocabulary,
            "executed steps": self.config.chunk,
            "resolution of frequencies": getattr(tokenizer, "resolution", None),
            "decoding": token.decoding.value,
            "passes of masked decoding": (token.decode_steps, token.decode_schedule.value) if masked else None,
            **probed_actions(self.action_normalizer.inverse, self.action.size, self.action_low.device),
        }

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"tokens": [N]}: the mean cross entropy of the demonstrated tokens, at temperature 1.

        batch: "observation" (key -> [N, H, ...] and `task`, N strings), "actions" [N, C, A] in world units,
        "action_valid" [N, C] bool (padding is ignored, except with frequencies, which encode "hold the last action").
        Raises SpecError on other shapes, NonFiniteError on NaN or infinity.
        """
        actions, valid = check_chunks(batch, self.config.chunk, self.action.size)
        tokens = self.action_tokens.encode(self.action_normalizer(actions.float()))
        token_mask = torch.ones_like(tokens, dtype=torch.bool)
        if self.action_tokens.steps_per_action:
            token_mask = valid.repeat_interleave(self.action_tokens.steps_per_action, dim=1)
        prompt = self._prompt(batch["observation"], generator)
        return {"tokens": self.decoding.loss(self._action_language, prompt, tokens, token_mask, generator)}

    def normalizers(self) -> dict[str, Normalizer]:
        """Return the normalisers by observation key, and the action normaliser under "action"."""
        keys = [key for key in self.fields if not key.startswith(IMAGE_PREFIX)]
        return {ACTION: self.action_normalizer, **{key: self.observation_tokens.normalizer(key) for key in keys}}

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Prepare for policy gradients, which train all K tokens; train_encoder False freezes the observation encoder.

        For a vision-language checkpoint this includes vision tower and connector. Parts frozen in an earlier
        fine-tuning stay frozen. Raises ConfigError for a different number of steps.
        """
        if steps not in (None, self.action_tokens.length):
            raise ConfigError(
                f"A token policy is always fine-tuned in all of its {self.action_tokens.length} tokens, not in "
                f"{steps} steps."
            )
        train_encoder = train_encoder and (self.finetuning is None or self.finetuning["train_encoder"])
        self.finetuning = {"train_encoder": train_encoder}
        if not train_encoder:
            self.observation_tokens.requires_grad_(False)
            self.language.freeze_vision()

    def add_lora(self, rank: int, alpha: float | None = None) -> None:
        """Freeze all weights and train LoRA adapters of the language model only; alpha: scale x rank, 2 x rank.

        Raises ConfigError if there are adapters already.
        """
        if self.adapters is not None or self.config.token.lora_rank:
            raise ConfigError(
                "The policy already has adapters: continue training them, or merge them with merge_lora()."
            )
        self.adapters = {"rank": rank, "alpha": 2.0 * rank if alpha is None else alpha}
        self.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            # A fixed seed: whoever adds adapters of this rank, on loading too, adds the same ones.
            torch.manual_seed(rank)
            self.language.add_lora(rank, self.adapters["alpha"])
        if self.finetuning is not None and not self.finetuning["train_encoder"]:
            self.language.freeze_vision()

    def merge_lora(self) -> None:
        """Merge the adapters of `add_lora` into the weights; actions are unchanged up to rounding.

        Raises ConfigError if there are none.
        """
        if self.adapters is None:
            raise ConfigError("There are no adapters to merge: add_lora() creates them.")
        self.language.merge_lora()
        self.adapters = None
        self.requires_grad_(True)

    def save(self, folder: Path) -> None:
        """Write config.json, model.safetensors and the tokenizer's files atomically.

        All weights are included, so the original Hugging Face checkpoint is not needed for loading.
        """

        def reader(temporary: Path) -> None:
            if self.processor is not None:
                self.processor.save(temporary / PROCESSOR)
            elif self.config.token.model:
                self.text_tokens.save(temporary / TOKENIZER)

        save_policy(
            self,
            folder,
            reader,
            kind=TOKEN_POLICY,
            sees=self.processor is not None,
            backbone=self.language.backbone.config.to_dict(),
            adapters=self.adapters,
            finetuning=self.finetuning,
        )

    @classmethod
    def load(cls, folder: Path, description: Mapping[str, Any], device: torch.device | str = "cpu") -> Self:
        """Load what `save` wrote; raises CheckpointError when the files are inconsistent."""
        require_format(folder, description)
        with restoring(folder, "a policy"):
            observation, action, metadata = saved_fields(description)
            config = from_plain(TokenPolicyConfig, description["config"], "config")
            reader = _saved_reader(folder, description, config.token, metadata["instructions"])
            with torch.random.fork_rng(devices=[]):
                backbone = build_described_backbone(description["backbone"])
            policy = cls(config, observation, action, language=(backbone, reader), **metadata)
            if description["adapters"] is not None:
                policy.add_lora(description["adapters"]["rank"], description["adapters"]["alpha"])
            if description["finetuning"] is not None:
                policy.prepare_finetuning(**description["finetuning"])
        return read_weights(policy, folder, device)

    @property
    def _action_language(self) -> ActionLanguage:
        token = self.config.token
        return ActionLanguage(
            self.language, self.action_embedding, self.head, token.temperature, token.entropy_temperature
        )

    def _prompt(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Prompt:
        """Process the instruction, with images if the checkpoint encodes them, and embed the rest of the
        observation.
        """
        embedded, texts = self.embed(observation, generator), self.texts(observation)
        if self.processor is not None:
            frames = self.observation_tokens.cameras(observation, generator)
            inputs = self.processor(texts, images_of_rows(frames, len(texts)))
            return Prompt(self.language.see({key: each.to(embedded.device) for key, each in inputs.items()}), embedded)
        # Rows of one instruction share what was read of it.
        distinct = sorted(set(texts))
        number = {text: index for index, text in enumerate(distinct)}
        index = torch.tensor([number[text] for text in texts], dtype=torch.int64)
        return Prompt(self.read(distinct, index.to(embedded.device)), embedded)

    def embed(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Tensor:
        """Embed an observation as [N, O, width]; a generator enables random image shifts.

        Raises SpecError or NonFiniteError on an invalid observation.
        """
        validate_observation(observation, self.fields, history=self.config.history)
        return self.observation_tokens(observation, generator)

    def texts(self, observation: TensorObservation) -> list[str]:
        """Return the instruction of each of the N rows; raises SpecError if one is missing or unknown."""
        rows = len(observation[next(iter(self.fields))])
        return instructions_or_default(observation, rows, self.instructions)

    def read(self, texts: Sequence[str], rows: Tensor) -> Reading:
        """Return the cached prompts of rows [N], each one of `texts`, without images."""
        tokens, text = self.text_tokens(texts)
        return self.language.read(tokens.to(rows.device), text.to(rows.device), rows)

    def _describe(self, processor: VisionLanguageProcessor) -> str:
        count = self.action_tokens.length + len(self.fields) + 1
        return describe_prompt(self.language, processor, self.fields, self.config.history, self.instructions, count)


def _language(
    config: TokenPolicyConfig, fields: Mapping[str, Field], instructions: tuple[str, ...]
) -> "tuple[PreTrainedModel, TextTokenizer | VisionLanguageProcessor]":
    token = config.token
    if token.model:
        images = any(key.startswith(IMAGE_PREFIX) for key in fields)
        from_checkpoint = token.vision is TokenVision.CHECKPOINT
        if images and (
            from_checkpoint or (token.vision is TokenVision.AUTO and is_vision_language(pretrained_config(token.model)))
        ):
            return pretrained_vision_language(token.model, token.prompt, split_images=token.split_images)
        return pretrained_backbone(token.model)
    words = WordTokenizer(instructions)
    return small_backbone(words.size, token.width, token.depth, token.heads, token.feed_forward), words


def _saved_reader(
    folder: Path, description: Mapping[str, Any], token: TokenConfig, instructions: tuple[str, ...]
) -> TextTokenizer | VisionLanguageProcessor:
    """Load the tokenizer or processor of a checkpoint; older checkpoints, without image prompts, have a tokenizer."""
    if description.get("sees") is True:
        return load_processor(folder / PROCESSOR, token.prompt, split_images=token.split_images)
    return load_pretrained_tokenizer(folder / TOKENIZER) if token.model else WordTokenizer(instructions)
