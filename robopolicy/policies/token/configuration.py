"""Settings of a token policy with defaults."""

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative, Positive
from robopolicy.core.structured import FormerNames
from robopolicy.nn.configuration import ActionTokens, ImageEncoderConfig, NormalizationMode

LONGEST = 10_000
"""Maximum steps of a chunk, and frames of a history."""


class TokenDecoding(Enum):
    """causal: autoregressive, left to right; masked: discrete diffusion, several tokens per pass in any order;
    parallel: all tokens in one pass, independent of each other (OpenVLA-OFT).
    """

    CAUSAL = "causal"
    MASKED = "masked"
    PARALLEL = "parallel"


class TokenVision(Enum):
    """Image encoder. checkpoint: image processor, vision tower and connector of a vision-language checkpoint; patches:
    built-in layers trained from scratch; auto: the checkpoint's if it has one.
    """

    AUTO = "auto"
    CHECKPOINT = "checkpoint"
    PATCHES = "patches"


class DecodeSchedule(Enum):
    """even: equally many tokens in every pass; ascending: 1, 2, 4, ... tokens until all are decoded."""

    EVEN = "even"
    ASCENDING = "ascending"


@dataclass(frozen=True)
class TokenConfig(FormerNames):
    """Settings of the language model and its action tokens."""

    actions: ActionTokens = ActionTokens.BINS
    """Action tokens: bins (one token per action element) or frequencies (one per kept frequency of a chunk; FAST
    without merges).
    """
    bins: Count = 33
    """Number of bins per action element; an odd number includes 0."""
    resolution: Positive = 10.0
    """Frequencies are rounded to multiples of 1 / resolution."""
    frequencies: Natural = 0
    """Number of frequencies to keep, 0 for all."""
    temperature: Positive = 1.0
    """Temperature of sampling and of log-probabilities."""
    entropy_temperature: NonNegative = 0.0
    """Sampling only: how much hotter than `temperature` uncertain tokens are drawn, and colder certain ones, among
    those drawn together (HAPO: .05).
    """
    decoding: TokenDecoding = TokenDecoding.CAUSAL
    """Decoding: causal (token by token), masked (discrete diffusion, several tokens at a time in any order) or parallel
    (all at once).
    """
    decode_steps: Count = 4
    """Number of passes in which masked decoding generates a chunk."""
    decode_schedule: DecodeSchedule = DecodeSchedule.EVEN
    """Tokens per pass of masked decoding: even (equal numbers) or ascending (1, 2, 4 and so on until all are
    generated).
    """
    model: str = ""
    """Folder or hub name of a Hugging Face causal or vision-language checkpoint, empty for a small Llama from scratch.
    """
    width: Count = 128
    """Width of the Llama trained from scratch."""
    depth: Count = 4
    """Number of layers of the transformer."""
    heads: Count = 4
    """Number of attention heads of the transformer."""
    feed_forward: Count = 384
    """Width of the feed-forward layers of the Llama trained from scratch."""
    vision: TokenVision = TokenVision.AUTO
    """Image encoder: checkpoint (its own image processor and vision tower), patches (built in), or auto."""
    prompt: str = "What action should the robot take to {instruction}?"
    """Prompt for a vision-language checkpoint, in its own chat format and after the images."""
    split_images: bool = False
    """Whether the checkpoint's image processor may split an image into tiles, with many more tokens (SmolVLM)."""
    patch: Count = 16
    """Side of an image patch in pixels, for vision=patches."""
    lora_rank: Natural = 0
    """Rank of LoRA adapters trained on a frozen checkpoint; 0 trains all weights."""
    lora_alpha: Positive = 16.0
    """LoRA alpha: scale of the adapters times their rank."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"token.temperature={self.temperature} must be positive (for deterministic actions, act "
                "deterministically)."
            )
        if self.decode_steps < 1:
            raise ConfigError(f"decode_steps={self.decode_steps} must be at least 1.")
        if min(self.width, self.depth, self.heads, self.feed_forward, self.patch) < 1 or self.lora_rank < 0:
            raise ConfigError(
                "token.width, depth, heads, feed_forward and patch must be at least 1, and lora_rank at least 0."
            )
        if "{instruction}" not in self.prompt:
            raise ConfigError(
                f"token.prompt is '{self.prompt}': write {{instruction}} at the place of the instruction."
            )
        if self.vision is TokenVision.CHECKPOINT and not self.model:
            raise ConfigError(
                "token.vision=checkpoint needs a vision-language checkpoint: set token.model, or token.vision=patches."
            )
        if self.lora_rank and not self.model:
            raise ConfigError(
                "token.lora_rank adapts a checkpoint, but a model from scratch has random weights: set token.model, "
                "or train all weights and fine-tune adapters later (lora_rank of fine-tuning)."
            )


@dataclass(frozen=True)
class TokenPolicyConfig(FormerNames):
    """Settings of a language-conditioned policy over action tokens.

    Images are encoded as set by token.vision; of `image` only random_shift is used.
    """

    builds: ClassVar[str] = "robopolicy.policies.token.policy:TokenPolicy"

    observation_keys: tuple[str, ...] = ()
    """Observation keys that the policy reads in addition to the instruction, [] for all of the world's."""
    history: Count = 1
    """Number H of observation frames that the policy reads."""
    chunk: Count = 4
    """Number C of control steps per action chunk, all of which are executed."""
    image: ImageEncoderConfig = field(default_factory=ImageEncoderConfig)
    state_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    """State normalisation: mean_std, min_max (the data's range becomes [-1, 1]) or identity."""
    action_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    """Action normalisation, with the same choices as for states."""
    token: TokenConfig = field(default_factory=TokenConfig)

    @property
    def is_pretrained(self) -> bool:
        """Whether it starts from a pretrained language model; see `abilities.IsPretrained`."""
        return bool(self.token.model)

    def __post_init__(self) -> None:
        if min(self.chunk, self.history) < 1:
            raise ConfigError(f"chunk={self.chunk} and history={self.history} must be at least 1.")
        if max(self.chunk, self.history) > LONGEST:
            raise ConfigError(f"chunk={self.chunk} and history={self.history} must be at most {LONGEST}.")
