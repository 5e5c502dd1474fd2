"""The recurrent state-space model proper: frames in, latents along the way, frames out; it knows no episodes.

Axes: N rows, M subsequences of T + 1 frames with T actions between them, V elements of standardised vectors, E
embedding, F summary of the latent, S categoricals of C classes, D deterministic units.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn

from robopolicy.core.spec import Field
from robopolicy.nn.blocks import dense, perceptron
from robopolicy.nn.encoders import module_name
from worldmodels.data.statistics import BOUND
from worldmodels.images.decoder import ImageDecoder, ImageEncoder
from worldmodels.rssm.configuration import RssmConfig
from worldmodels.rssm.networks import RecurrentCore, straight_through


@dataclass(frozen=True)
class Unrolled:
    """Latents of subsequences.

    deter: [M, T + 1, D]; sample: [M, T + 1, S * C]; prior, posterior: log-probabilities [M, T + 1, S, C]; summary: what
    decoders and heads read of deter and sample, [M, T + 1, F]; decoded: [M, T + 1, V], the first of them given; state:
    the same, but true where the frame was seen.
    """

    deter: Tensor
    sample: Tensor
    prior: Tensor
    posterior: Tensor
    summary: Tensor
    decoded: Tensor
    state: Tensor


class LatentDynamics(nn.Module):
    """Encoders, recurrent core and decoders of vectors with `elements` elements and of `images`, key -> field.

    The vector is carried beside the latent: the core and the decoder read the last one, seen or decoded, and the
    decoder predicts changes, so that one step is as exact as that of a model without a latent.
    """

    def __init__(self, config: RssmConfig, elements: int, actions: int, free: int, images: Mapping[str, Field]):
        super().__init__()
        size, self.images = config.networks, tuple(images)
        width, flat = size.hidden, size.stochastic * size.classes
        encoders: dict[str, nn.Module] = {}
        decoders: dict[str, nn.Module] = {}
        if elements:
            hidden = (dense(width, width) for _ in range(config.layers - 1))
            encoders["vector"] = nn.Sequential(dense(elements, width), *hidden)
        for key, field in images.items():
            encoders[module_name(key)] = ImageEncoder(field.shape, size.channels, width)
            decoders[module_name(key)] = ImageDecoder(field.shape, size.channels, width)
        self.encoders, self.decoders = nn.ModuleDict(encoders), nn.ModuleDict(decoders)
        self.core = RecurrentCore(
            deter=size.deter,
            blocks=size.blocks,
            hidden=width,
            stochastic=size.stochastic,
            classes=size.classes,
            unimix=config.unimix,
            inputs=len(encoders) * width,
        )
        self.input_encoder = dense(actions + elements, width)
        self.read_latent = dense(size.deter + flat, width)
        self.change_decoder = perceptron(width + elements, width, config.layers, free) if free else None

    def embed(self, state: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """Return embeddings [M, T, E] of vectors [M, T, V] and images, key -> [M, T, height, width, 3]."""
        parts = [self.encoders["vector"](state)] if "vector" in self.encoders else []
        for key in self.images:
            flat = self.encoders[module_name(key)](rearrange(frames[key], "m t h w c -> (m t) h w c"))
            parts.append(flat.unflatten(0, state.shape[:2]))
        return torch.cat(parts, -1)

    def summary(self, deter: Tensor, sample: Tensor) -> Tensor:
        """Return what decoders and heads read of a latent, [N, F]."""
        return self.read_latent(torch.cat([deter, sample], -1))

    def step(self, deter: Tensor, sample: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """Return the deterministic state [N, D] after standardised actions [N, A] in vectors [N, V]."""
        return self.core.step(deter, sample, self.input_encoder(torch.cat([action, state], -1)))

    def advance(self, summary: Tensor, state: Tensor, spread: Tensor) -> Tensor:
        """Return the vector [N, V] that follows `state`, given the summary [N, F] of the new latent.

        spread: [free, V], what a change of the free elements does to all.
        """
        if self.change_decoder is None:
            return state
        change = self.change_decoder(torch.cat([summary, state], -1))
        # Limited at every step: beyond the data an error would feed itself along a rollout.
        return (state + change @ spread).clamp(-BOUND, BOUND)

    def image(self, key: str, summary: Tensor) -> Tensor:
        """Return images [N, height, width, 3] in 0 to 1."""
        return self.decoders[module_name(key)](summary)

    def unroll(
        self, state: Tensor, embedding: Tensor, actions: Tensor, seen: Tensor, draws: Tensor, spread: Tensor
    ) -> Unrolled:
        """Follow subsequences of frames, vectors [M, T + 1, V] and embeddings [M, T + 1, E], and standardised actions
        [M, T, A].

        seen: [M, T + 1] bool, whether the frame is read or guessed (the first is always read); draws: [T + 1, M, S]
        uniforms that choose the samples.
        """
        # The frames' half of the posterior does not depend on the recurrence: one matrix product for all of them.
        core, frames = self.core, self.core.posterior_frame(embedding).unbind(1)
        deter = core.start(embedding[:, 0])
        sample = state[:, 0, :0]
        current = state[:, 0]
        found = []
        for index, (frame, true) in enumerate(zip(frames, state.unbind(1), strict=True)):
            if index:
                deter = self.step(deter, sample, current, actions[:, index - 1])
            read = seen[:, index, None]
            # An unseen frame goes on from the prior and from its own decoded vector, exactly as imagination does.
            prior, posterior = core.prior(deter), core.posterior(deter, frame)
            sample = straight_through(torch.where(read[..., None], posterior, prior), draws[index]).flatten(1)
            summary = self.summary(deter, sample)
            decoded = self.advance(summary, current, spread) if index else true
            current = torch.where(read, true, decoded) if index else true
            found.append((deter, sample, prior, posterior, summary, decoded, current))
        return Unrolled(*(torch.stack(values, 1) for values in zip(*found, strict=True)))
