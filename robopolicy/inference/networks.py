"""Our networks as the lean engine computes them: what no step changes beforehand, the rest in as few calls as can be.

The networks are so small that calling a layer costs more than computing it. Axes: K step, B row, P predicted step, W
width, M what a time or a condition adds to a network's first layer, or all its modulations.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention, silu

from robopolicy.inference.caching import CachedSteps
from robopolicy.inference.samplers import Predicts
from robopolicy.nn.branches import Caching
from robopolicy.nn.denoisers import Denoiser
from robopolicy.nn.residual_mlp import ResidualMLP
from robopolicy.nn.transformer import TransformerBlock, TransformerDenoiser

CONTEXTS = 2**25
"""Most numbers of a table [K, B, M] that is filled before the first step."""


def at_work(denoiser: Denoiser, table: Tensor, caching: Caching | None) -> Callable[[Tensor], Predicts]:
    """Return what makes a condition [B, D] the denoiser at work on it; table: its features of the times [K, M].

    Raises ConfigError where caching does not fit.
    """
    if caching is not None:
        caching.check(denoiser.block_names, len(table))
        return lambda condition: CachedSteps(denoiser, table, denoiser.encode_condition(condition), caching).one
    if isinstance(denoiser, ResidualMLP):
        return _perceptron(denoiser, table)
    if isinstance(denoiser, TransformerDenoiser):
        return _transformer(denoiser, table)

    def begin(condition: Tensor) -> Predicts:
        features = denoiser.encode_condition(condition)
        return lambda x, step: denoiser.denoise(x, table[step], features)

    return begin


def _contexts(table: Tensor, features: Tensor) -> Callable[[int], Tensor]:
    """Return step -> the sum of time's and condition's features [B, M], added up for all steps at once if that fits."""
    if len(table) * features.numel() <= CONTEXTS:
        return (table[:, None] + features).__getitem__
    return lambda step: table[step] + features


def _perceptron(denoiser: ResidualMLP, table: Tensor) -> Callable[[Tensor], Predicts]:
    reads, table = denoiser.condition.weight.T, table + denoiser.condition.bias
    latent = denoiser.latent.weight.T
    head = denoiser.head.weight.T
    bias = denoiser.head.bias
    hidden = [cast(nn.Linear, layer).weight.T for layer in denoiser.hidden]

    def begin(condition: Tensor) -> Predicts:
        if len(table) == 1:  # one step has one context: both parts of it in one product
            contexts = torch.addmm(table[0], condition, reads)[None].__getitem__
        else:
            contexts = _contexts(table, condition @ reads)

        def predict(x: Tensor, step: int) -> Tensor:
            rows = torch.addmm(contexts(step), x.flatten(1), latent)
            for layer in hidden:
                rows = torch.addmm(rows, silu(rows), layer)
            return torch.addmm(bias, silu(rows), head).view(x.shape)

        return predict

    return begin


def _transformer(denoiser: TransformerDenoiser, table: Tensor) -> Callable[[Tensor], Predicts]:
    width, eps = denoiser.width, denoiser.norm.eps
    # Normalised values are multiplied by 1 + scale: the ones are added to the times' part, once for a checkpoint.
    ones = table.new_zeros(table.shape[-1] // width, width)
    ones[1:-2:3], ones[-1] = 1.0, 1.0
    table = table + ones.flatten()
    embedding, position = denoiser.embedding.weight, denoiser.position + denoiser.embedding.bias
    blocks = [cast(TransformerBlock, block) for block in denoiser.blocks]
    weights = [
        [
            (cast(nn.Linear, layer).weight, cast(nn.Linear, layer).bias)
            for layer in (block.attention_in, block.attention_out, block.feed_forward[0], block.feed_forward[2])
        ]
        for block in blocks
    ]
    heads = blocks[0].heads if blocks else 1

    def one(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return layer_norm(tokens, (width,), scale, shift, eps)

    def many(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return torch.addcmul(shift, layer_norm(tokens, (width,), None, None, eps), scale)

    def begin(condition: Tensor) -> Predicts:
        contexts = _contexts(table, denoiser.encode_condition(condition))
        rows = len(condition)
        # The modulations of a single row are an affine layer norm's weight and bias.
        modulated = one if rows == 1 else many

        def predict(x: Tensor, step: int) -> Tensor:
            context = contexts(step).view(rows, table.shape[-1] // width, width)
            parts = context[0].unbind(0) if rows == 1 else context[:, :, None].unbind(1)
            tokens = linear(x, embedding) + position
            apart = *x.shape[:2], 3, heads, width // heads
            for place, (into, out, up, down) in enumerate(weights):
                shift, scale, gate, shift_forward, scale_forward, gate_forward = parts[6 * place : 6 * place + 6]
                read = linear(modulated(tokens, shift, scale), *into).view(apart).permute(2, 0, 3, 1, 4)
                mixed = scaled_dot_product_attention(read[0], read[1], read[2]).transpose(1, 2).flatten(2)
                tokens = torch.addcmul(tokens, gate, linear(mixed, *out))
                fed = silu(linear(modulated(tokens, shift_forward, scale_forward), *up))
                tokens = torch.addcmul(tokens, gate_forward, linear(fed, *down))
            return linear(modulated(tokens, parts[-2], parts[-1]), denoiser.head.weight, denoiser.head.bias)

        return predict

    return begin
