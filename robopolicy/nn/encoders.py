"""Encoders: observations with history [N, H, ...] become one condition vector [N, D], instructions vectors [N, F]."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX, Field, note_large_vectors
from robopolicy.nn.configuration import ImageEncoderConfig, NormalizationMode
from robopolicy.nn.language import WordTokenizer
from robopolicy.nn.normalizer import Normalizer


class ImageEncoder(nn.Module):
    """Convolutions with group norm, spatial softmax (Levine 2016; expected feature positions), and a linear layer.

    At initialisation feature positions hardly change between frames, and the layer's outputs vary a tenth as much as
    states. With layer_norm they vary as much, so the effect of object positions and of the instruction is learned
    early. Raises ConfigError unless every channel count is a multiple of 8.
    """

    def __init__(self, config: ImageEncoderConfig):
        super().__init__()
        sizes = (3, *config.channels)
        layers: list[nn.Module] = []
        for index, (size_in, size_out) in enumerate(itertools.pairwise(sizes)):
            if size_out % 8:
                raise ConfigError(f"image.channels={size_out} must be a multiple of 8, because of group norm.")
            stride = 2 if index < 2 else 1
            layers += [nn.Conv2d(size_in, size_out, 3, stride, 1), nn.GroupNorm(8, size_out), nn.SiLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(2 * sizes[-1], config.features)
        self.norm = nn.LayerNorm(config.features) if config.layer_norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Encode uint8 images [N, height, width, 3] as [N, features]."""
        # Channel by channel in memory: group norm takes up to nine times as long where channels lie innermost.
        pixels = rearrange(images, "n h w c -> n c h w").float().contiguous() / 127.5 - 1
        return self.norm(self.head(spatial_softmax(self.layers(pixels))))


class PatchEncoder(nn.Module):
    """Condenses the feature maps of a frozen vision model: a layer per patch, spatial softmax, a linear layer.

    inputs: channels of the maps; channels: of what is located, a multiple of 8.
    """

    def __init__(self, inputs: int, channels: int, features: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(inputs, channels, 1), nn.GroupNorm(8, channels), nn.SiLU())
        self.head = nn.Linear(2 * channels, features)

    def forward(self, maps: Tensor) -> Tensor:
        """Encode maps [N, inputs, rows, columns] as [N, features]."""
        return self.head(spatial_softmax(self.layers(maps)))


def spatial_softmax(maps: Tensor) -> Tensor:
    """Return the expected position [N, 2 C] of every channel of maps [N, C, rows, columns], in [-1, 1] x [-1, 1]."""
    height, width = maps.shape[-2:]
    # Each channel is a distribution over the pixels; its mean says where the feature is.
    weights = maps.flatten(2).softmax(-1)
    row = torch.linspace(-1, 1, height, device=maps.device)
    column = torch.linspace(-1, 1, width, device=maps.device)
    grid = torch.stack(torch.meshgrid(row, column, indexing="ij"), -1).reshape(-1, 2)
    return (weights @ grid).flatten(1)


class FieldReader(nn.Module):
    """Reads observations field by field: vectors normalised per element and bounded, images as single frames.

    fields: fields to read, by key; bound: limit of normalised vectors, so that a state far from the data cannot
    destabilise the network; random_shift: maximum image shift in pixels in training losses, 0 for none. Raises
    ConfigError when there is no field.
    """

    def __init__(self, fields: Mapping[str, Field], normalization: NormalizationMode, bound: float, random_shift: int):
        super().__init__()
        if not fields:
            raise ConfigError("The policy reads no observations: set at least one observation key.")
        self.keys = tuple(fields)
        note_large_vectors({key: spec for key, spec in fields.items() if not key.startswith(IMAGE_PREFIX)})
        self.bound, self.random_shift = bound, random_shift
        self.normalizers = nn.ModuleDict(
            {
                module_name(key): Normalizer(spec.shape, normalization)
                for key, spec in fields.items()
                if not key.startswith(IMAGE_PREFIX)
            }
        )

    def normalizer(self, key: str) -> Normalizer:
        """Normaliser of a vector field."""
        module = self.normalizers[module_name(key)]
        assert isinstance(module, Normalizer)
        return module

    def vector(self, key: str, value: Tensor) -> Tensor:
        """Return a vector field's values [N, H, *shape] normalised, bounded and flattened: [N, H * size]."""
        return self.normalizer(key)(value.float()).clamp(-self.bound, self.bound).flatten(1)

    def frames(self, key: str, value: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return a camera's images [N, H, height, width, 3] as frames [N * H, height, width, 3].

        A generator enables random shifts. Raises SpecError unless images are uint8.
        """
        if value.dtype != torch.uint8:
            raise SpecError(f"'{key}' has dtype {value.dtype}; images must be uint8, [B, H, height, width, 3].")
        frames = rearrange(value, "n t h w c -> (n t) h w c")
        if generator is not None and self.random_shift:
            return shift_images(frames, self.random_shift, generator)
        return frames


class ObservationEncoder(FieldReader):
    """Concatenates normalised vectors and encoded camera frames of H history frames into conditions [N, D].

    fields: fields to read, by key, in this order; vectors are normalised per element (fit `normalizers`). Every camera
    frame is encoded once. Raises ConfigError when there is no field.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        history: int,
        normalization: NormalizationMode = NormalizationMode.MIN_MAX,
        image: ImageEncoderConfig | None = None,
        bound: float = 10.0,
    ):
        image = image or ImageEncoderConfig()
        super().__init__(fields, normalization, bound, image.random_shift)
        self.frozen_images = image.frozen
        self.cameras = nn.ModuleDict()
        self.dimension = 0
        for key, spec in fields.items():
            if key.startswith(IMAGE_PREFIX):
                self.cameras[module_name(key)] = ImageEncoder(image).requires_grad_(not image.frozen)
                self.dimension += history * image.features
            else:
                self.dimension += history * spec.size

    def forward(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Tensor:
        """Return conditions [N, D]; a generator enables the random shift of images (training losses only).

        observation: vectors [N, H, *shape], images [N, H, height, width, 3]. Raises SpecError unless images are uint8.
        """
        parts: list[Tensor] = []
        for key in self.keys:
            value = observation[key]
            assert isinstance(value, Tensor)
            image = key.startswith(IMAGE_PREFIX)
            parts.append(self._encode_camera(key, value, generator) if image else self.vector(key, value))
        return torch.cat(parts, -1)

    def _encode_camera(self, key: str, value: Tensor, generator: torch.Generator | None) -> Tensor:
        frames = self.frames(key, value, generator)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen_images):
            features = self.cameras[module_name(key)](frames)
        return rearrange(features, "(n t) f -> n (t f)", n=value.shape[0])


def module_name(key: str) -> str:
    """Return an observation key as a module name (which cannot contain dots)."""
    return key.replace(".", "/")


def shift_images(images: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """Shift each image [N, height, width, 3] by up to +-`pixels`, repeating the border; same shape and dtype."""
    count, height, width, _ = images.shape
    padded = functional.pad(rearrange(images, "n h w c -> n c h w").float(), (pixels,) * 4, mode="replicate")
    shift = torch.randint(0, 2 * pixels + 1, (count, 2), generator=generator, device=generator.device).to(images.device)
    rows = shift[:, :1] + torch.arange(height, device=images.device)
    columns = shift[:, 1:] + torch.arange(width, device=images.device)
    index = torch.arange(count, device=images.device)[:, None, None]
    return rearrange(padded, "n c h w -> n h w c")[index, rows[:, :, None], columns[:, None, :]].to(images.dtype)


class WordEncoder(nn.Module):
    """Encodes the words of a text sequentially with a gated recurrent unit (GRU, arXiv:1406.1078).

    texts: source of the vocabulary; features: F, size of word and text vectors; hidden: word dropout probability in
    training (arXiv:1511.06349), so that texts with unknown words can be encoded; at 0 unknown words are rejected. The
    text vector is a linear layer over the mean of the GRU states, so early and late words have equal weight. Unseen
    texts can be encoded. Outputs are deterministic: only `forward` with a generator drops words.
    """

    def __init__(self, texts: Sequence[str], features: int, hidden: float = 0.0):
        super().__init__()
        self.tokenizer, self.hidden = WordTokenizer(texts, unknown=hidden > 0), hidden
        self.embedding = nn.Embedding(self.tokenizer.size, features)
        self.cell = nn.GRUCell(features, features)
        self.head = nn.Linear(features, features)

    def forward(self, texts: Sequence[str], generator: torch.Generator | None = None) -> Tensor:
        """Encode N texts as [N, F], each distinct text once; a generator enables word dropout (training losses only).

        Raises SpecError on unknown words, unless word dropout is enabled.
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
        embedded, text_mask = self.embedding(tokens), text[..., None].to(self.embedding.weight.dtype)
        state = embedded.new_zeros(len(tokens), self.cell.hidden_size)
        total = torch.zeros_like(state)
        for index in range(tokens.shape[1]):
            # Padding comes first and leaves the state at zero: a text means the same beside whatever others
            state = self.cell(embedded[:, index], state) * text_mask[:, index]
            total = total + state
        return self.head(total / text_mask.sum(1))


class Modulation(nn.Module):
    """FiLM conditioning of observation features on text: scale(text) * layer(features) + shift(text)
    (arXiv:1709.07871).

    seen, features: sizes of the observation features and of the text vector. With plain concatenation a network would
    first have to learn this product, e.g. which of three positions the text refers to; FiLM expresses it in one layer.
    """

    def __init__(self, seen: int, features: int):
        super().__init__()
        self.layer = nn.Linear(seen, features)
        self.weights = nn.Linear(features, 2 * features)

    def forward(self, seen: Tensor, told: Tensor) -> Tensor:
        """Modulate observation features [N, S] by text vectors [N, F]; returns [N, F]."""
        scale, shift = self.weights(told).chunk(2, -1)
        return (1 + scale) * self.layer(seen) + shift
