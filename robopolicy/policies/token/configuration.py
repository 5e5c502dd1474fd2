"""Every choice that makes a token policy, with its default."""

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, Positive
from robopolicy.nn.configuration import ActionTokens, ImageEncoderConfig, NormalizationMode

LONGEST = 10_000
"""Steps of a chunk, and frames of a history."""


class TokenDecoding(Enum):
    """causal: token by token from left to right; masked: discrete diffusion, several tokens at a time in any order;
    parallel: all at once, none knowing of the others (OpenVLA-OFT).
    """

    CAUSAL = "causal"
    MASKED = "masked"
    PARALLEL = "parallel"


class TokenVision(Enum):
    """Who reads images. checkpoint: the image processor, vision tower and connector of a vision-language checkpoint;
    patches: layers of our own, learned from nothing; auto: the checkpoint, where it sees.
    """

    AUTO = "auto"
    CHECKPOINT = "checkpoint"
    PATCHES = "patches"


class DecodeSchedule(Enum):
    """even: as many tokens in every pass; ascending: 1, 2, 4, ... tokens until all are said."""

    EVEN = "even"
    ASCENDING = "ascending"


@dataclass(frozen=True)
class TokenConfig:
    """The language model and its action tokens."""

    actions: ActionTokens = ActionTokens.BINS
    """bins: a token for every action element; frequencies: one for every kept frequency of a chunk (FAST without
    merges).
    """
    bins: Count = 33
    """Values an element can have; an odd number includes 0."""
    resolution: Positive = 10.0
    """Frequencies are rounded to one part in this."""
    frequencies: Natural = 0
    """How many are kept, 0 for all."""
    temperature: Positive = 1.0
    """Of sampling, and of log-probabilities."""
    decoding: TokenDecoding = TokenDecoding.CAUSAL
    """causal: token by token; masked: discrete diffusion, several at a time in any order; parallel: all at once."""
    decode_steps: Count = 4
    """Passes in which masked decoding says a chunk evenly."""
    decode_schedule: DecodeSchedule = DecodeSchedule.EVEN
    """even: as many tokens in every pass; ascending: 1, 2, 4 and so on until all are said."""
    model: str = ""
    """Folder or hub name of a Hugging Face causal or vision-language checkpoint, empty for a small Llama from scratch.
    """
    width: Count = 128
    """Of the Llama from scratch."""
    depth: Count = 4
    """Its layers."""
    heads: Count = 4
    """Its attention heads."""
    feed_forward: Count = 384
    """Width of its feed-forward layers."""
    vision: TokenVision = TokenVision.AUTO
    """Who reads images: checkpoint (its own image processor and vision tower), patches of our own, or auto."""
    prompt: str = "What action should the robot take to {instruction}?"
    """What a checkpoint that sees is asked, in its own chat format and after the images."""
    split_images: bool = False
    """Whether its image processor may cut an image into tiles, with many more tokens (SmolVLM)."""
    patch: Count = 16
    """Pixels of an image patch's side, with vision=patches."""
    lora_rank: Natural = 0
    """A checkpoint's weights stay frozen and adapters of this rank learn instead, 0 trains all."""
    lora_alpha: Positive = 16.0
    """Scale of the adapters times their rank."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"token.temperature is {self.temperature}: it must be positive (act deterministically?).")
        if self.decode_steps < 1:
            raise ConfigError(f"decode_steps is {self.decode_steps}: it is at least 1.")
        if min(self.width, self.depth, self.heads, self.feed_forward, self.patch) < 1 or self.lora_rank < 0:
            raise ConfigError("token.width, depth, heads, feed_forward and patch are at least 1, lora_rank at least 0.")
        if "{instruction}" not in self.prompt:
            raise ConfigError(f"token.prompt is '{self.prompt}': write {{instruction}} where the instruction belongs.")
        if self.vision is TokenVision.CHECKPOINT and not self.model:
            raise ConfigError("token.vision=checkpoint needs one that sees: set token.model, or token.vision=patches.")
        if self.lora_rank and not self.model:
            raise ConfigError(
                "token.lora_rank adapts a checkpoint, but a model from scratch has random weights: set token.model, or "
                "train all weights and tune adapters later (lora_rank of fine-tuning)."
            )


@dataclass(frozen=True)
class TokenPolicyConfig:
    """A language-conditioned policy over action tokens.

    Images are read as token.vision says; of `image` only random_shift is used.
    """

    builds: ClassVar[str] = "robopolicy.policies.token.policy:TokenPolicy"

    observation_keys: tuple[str, ...] = ()
    """What it reads beside the instruction, [] for everything the world shows."""
    history: Count = 1
    """Frames H that it reads."""
    chunk: Count = 4
    """Steps C that it executes of a decision, all that it predicts."""
    image: ImageEncoderConfig = field(default_factory=ImageEncoderConfig)
    state_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    """mean_std, min_max (the data's range becomes [-1, 1]) or identity."""
    action_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    """The same of actions."""
    token: TokenConfig = field(default_factory=TokenConfig)

    @property
    def began_elsewhere(self) -> bool:
        """Whether it begins with a checkpoint of a language model; see `abilities.BeganElsewhere`."""
        return bool(self.token.model)

    def __post_init__(self) -> None:
        if min(self.chunk, self.history) < 1:
            raise ConfigError(f"chunk is {self.chunk} and history {self.history}: both are at least 1.")
        if max(self.chunk, self.history) > LONGEST:
            raise ConfigError(f"chunk is {self.chunk} and history {self.history}: both are at most {LONGEST}.")
