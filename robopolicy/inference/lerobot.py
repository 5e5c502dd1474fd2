"""Lean inference of LeRobot's denoising policies: the same chunks without repeated computations.

For `diffusion` and `multi_task_dit` (0.6.1), terms that depend on the step alone are computed once per policy, and
terms that depend on the observation alone once per policy call. The modulation of a block is linear in SiLU or Mish of
[t; c], so W f([t; c]) + b is a table over the steps plus one product with c; in adaLN that product is most of a step at
batch 1. A step of the scheduler is a weighted sum with six weights. On a CPU, weights are stored in the memory layout
of their matrix products, instead of being converted in every call (which is most of a convolution over 16 steps).
Features of an instruction are cached between policy calls, because LeRobot's text encoder is frozen. Random numbers are
drawn in LeRobot's order.

The remaining network is a function of latents [B, T, A] and the index of a time. It requests its residual branches by
number, so that they can be cached (`robopolicy.nn.branches.Blocks`). Axes: B row, T predicted step, A action dimension,
K evaluation of the network, C channel, H width, L block.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.origin import origin_of, remember_origin
from robopolicy.nn.branches import FEED_FORWARD, Blocks, Caching, fresh
from robopolicy.policies.lerobot.acting import LeRobotPolicy


class BoundNetwork(Protocol):
    """A network bound to B observations."""

    def __call__(self, x: Tensor, index: int, blocks: Blocks = fresh) -> Tensor:
        """Return the network's prediction [B, T, A] for latents x [B, T, A] at time index `index`."""
        ...


@dataclass(frozen=True)
class LeanNetwork:
    """A network prepared for K times.

    blocks: names of its residual branches in computation order; bind: condition [B, D] -> network bound to it.
    """

    blocks: tuple[str, ...]
    bind: Callable[[Tensor], BoundNetwork]


Maps = Callable[[Tensor], Tensor]


def lean_transformer(network: Any, times: Tensor) -> LeanNetwork:
    """Prepare LeRobot's DiffusionTransformer for `times` [K]."""
    layers, split = list(network.transformer_blocks), network.timestep_embed_dim
    modulation_layers = [block.adaLN_modulation[-1] for block in layers]
    time_embedding = functional.silu(network.time_mlp(times))
    # Of adaLN's W SiLU([t; c]) + b the part of t, [K, L, 6 H]; scales multiply (1 + scale), and 1 is added here.
    table = torch.stack(
        [functional.linear(time_embedding, layer.weight[:, :split], layer.bias) for layer in modulation_layers], 1
    )
    for scale in (1, 4):
        table[..., scale * network.hidden_size : (scale + 1) * network.hidden_size] += 1
    attend = [_attention(block) for block in layers]
    expand = [_linear(block.mlp[0], gelu=True) for block in layers]
    shrink = [_linear(block.mlp[2]) for block in layers]

    def bind(condition: Tensor) -> BoundNetwork:
        condition_embedding = functional.silu(condition)
        condition_terms = torch.stack(
            [functional.linear(condition_embedding, layer.weight[:, split:]) for layer in modulation_layers]
        )[:, :, None]

        def predict(x: Tensor, index: int, blocks: Blocks = fresh) -> Tensor:
            x = network.input_proj(x)
            if network.pos_embedding is not None:
                x = x + network.pos_embedding[:, : x.shape[1]]
            modulation = (table[index][:, None, None] + condition_terms).chunk(6, -1)
            for place in range(len(layers)):
                modulation_parts = tuple(part[place] for part in modulation)
                shift, scale, gate, shift_after, scale_after, gate_after = modulation_parts
                x = torch.addcmul(x, gate, blocks(2 * place, partial(attention, place, x, scale, shift)))
                after = partial(feed_forward, place, x, scale_after, shift_after)
                x = torch.addcmul(x, gate_after, blocks(2 * place + 1, after))
            return network.output_proj(x)

        return predict

    def attention(place: int, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return attend[place](_modulated(x, scale, shift, layers[place].norm1.eps))

    def feed_forward(place: int, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return shrink[place](expand[place](_modulated(x, scale, shift, layers[place].norm2.eps)))

    names = tuple(f"{place}.{kind}" for place in range(len(layers)) for kind in ("attention", FEED_FORWARD))
    return LeanNetwork(names, bind)


def _modulated(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return scale * norm(x) + shift for x [B, T, H]; scale, shift: [B, 1, H]. For one row this is a single layer
    norm.
    """
    if len(x) == 1:
        return functional.layer_norm(x, x.shape[-1:], scale[0, 0], shift[0, 0], eps)
    return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=eps), scale)


def _attention(block: Any) -> Maps:
    """Return the self-attention of a block, [B, T, H] -> [B, T, H]."""
    rotate: tuple[Tensor, Tensor] | None = None
    layer: Any = block.attn if block.use_rope else block.multihead_attn
    heads, leave = layer.num_heads, _linear(layer.out_proj)
    if not block.use_rope:
        enter = _linear(layer.in_proj_weight, layer.in_proj_bias)
    else:
        enter = _linear(layer.qkv_proj)
        # Rotation of pairs (x1, x2) by an angle: x cos + (-x2, x1) sin. Rolling x by half gives (x2, x1), and the sign
        # goes to the sine. Both are written out for all heads of queries and keys: products of whole rows, [T, 2 H].
        cos, sin = layer.rope._cos_cached[0, 0], layer.rope._sin_cached[0, 0].clone()
        sin[:, : sin.shape[1] // 2] *= -1
        rotate = cos.repeat(1, 2 * heads), sin.repeat(1, 2 * heads)

    def attend(x: Tensor) -> Tensor:
        rows, steps, width = x.shape
        projections = enter(x)
        query_key, value = projections[..., : 2 * width], projections[..., 2 * width :]
        if rotate is not None:
            cos, sin = rotate
            halves = query_key.unflatten(-1, (2 * heads, 2, -1))
            query_key = torch.addcmul(query_key * cos[:steps], halves.roll(1, -2).flatten(2), sin[:steps])
        query, key = query_key.view(rows, steps, 2, heads, -1).permute(2, 0, 3, 1, 4)
        value = value.view(rows, steps, heads, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return leave(mixed.transpose(1, 2).reshape(rows, steps, width))

    return attend


def _linear(weight: Tensor | nn.Linear, bias: Tensor | None = None, *, gelu: bool = False) -> Maps:
    """Return a linear layer, [..., inputs] -> [..., outputs]; on a CPU by oneDNN with weights in its own layout.

    gelu: whether GELU (tanh approximation) follows, which oneDNN fuses into the product.
    """
    if isinstance(weight, nn.Linear):
        weight, bias = weight.weight, weight.bias
    matrix = weight.detach()
    if _packs(matrix):
        packed = torch.ops.mkldnn._reorder_linear_weight(matrix)
        after = ("gelu", [], "tanh") if gelu else ("none", [], "")
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, *after)
    if gelu:
        return lambda x: functional.gelu(functional.linear(x, matrix, bias), approximate="tanh")
    return lambda x: functional.linear(x, matrix, bias)


def lean_unet(network: Any, times: Tensor) -> LeanNetwork:
    """Prepare LeRobot's DiffusionConditionalUnet1d for `times` [K]."""
    parts = {"down": network.down_modules, "middle": [network.mid_modules], "up": network.up_modules}
    block_of_name = {
        f"{part}.{place}": block for part, stages in parts.items() for place, block in enumerate(_residual(stages))
    }
    modulation_layers = [block.cond_encoder[-1] for block in block_of_name.values()]
    time_embedding = functional.mish(network.diffusion_step_encoder(times))
    split, sizes = time_embedding.shape[1], [layer.out_features for layer in modulation_layers]
    table = torch.cat(
        [functional.linear(time_embedding, layer.weight[:, :split], layer.bias) for layer in modulation_layers], 1
    )[..., None]
    residual = [_residual_block(block) for block in block_of_name.values()]
    down = [_layer(stage[2]) for stage in network.down_modules]
    up = [_layer(stage[2]) for stage in network.up_modules]
    leave = _conv_block(network.final_conv[0]), _layer(network.final_conv[1])

    def bind(condition: Tensor) -> BoundNetwork:
        condition_embedding = functional.mish(condition)
        condition_terms = torch.cat(
            [functional.linear(condition_embedding, layer.weight[:, split:]) for layer in modulation_layers], 1
        )[..., None]

        def predict(x: Tensor, index: int, blocks: Blocks = fresh) -> Tensor:
            todo = zip(count(), residual, (table[index] + condition_terms).split(sizes, 1))
            x, skipped = x.transpose(1, 2), list[Tensor]()
            for shrink in down:
                x = _two(x, todo, blocks)
                skipped.append(x)
                x = shrink(x)
            x = _two(x, todo, blocks)
            for grow in up:
                x = grow(_two(torch.cat([x, skipped.pop()], 1), todo, blocks))
            return leave[1](leave[0](x)).transpose(1, 2)

        return predict

    return LeanNetwork(tuple(block_of_name), bind)


def _residual(stages: Any) -> Iterator[Any]:
    """Yield the residual blocks of stages, the first two modules of each."""
    for stage in stages:
        yield from (stage[0], stage[1])


Residual = tuple[Callable[[Tensor, Tensor], Tensor], Maps]
"""(branch, shortcut) of a block: the branch takes maps [B, C, T] and FiLM's modulation [B, C' or 2 C', 1]; both return
[B, C', T].
"""


def _two(x: Tensor, todo: Iterator[tuple[int, Residual, Tensor]], blocks: Blocks) -> Tensor:
    """Apply the next two residual blocks to maps [B, C, T]."""
    for _ in range(2):
        number, (branch, shortcut), modulation = next(todo)
        x = blocks(number, partial(branch, x, modulation)) + shortcut(x)
    return x


def _residual_block(block: Any) -> Residual:
    """Return branch and shortcut of a residual block."""
    first, second = _conv_block(block.conv1), _conv_block(block.conv2)

    def run(x: Tensor, modulation: Tensor) -> Tensor:
        hidden = first(x)
        if block.use_film_scale_modulation:
            scale, bias = modulation.chunk(2, 1)
            hidden = torch.addcmul(bias, hidden, scale)
        else:
            hidden = hidden + modulation
        return second(hidden)

    return run, _layer(block.residual_conv)


def _conv_block(block: Any) -> Maps:
    convolve, norm = _layer(block.block[0]), block.block[1]
    return lambda x: functional.mish(
        functional.group_norm(convolve(x), norm.num_groups, norm.weight, norm.bias, norm.eps)
    )


def _layer(layer: nn.Module) -> Maps:
    """Return a layer of the U-Net, maps [B, C, T] -> [B, C', T']: unchanged, or with packed weights."""
    if isinstance(layer, nn.Conv1d):
        return Convolution(layer.weight, layer.bias, layer.stride[0], int(layer.padding[0]))
    if isinstance(layer, nn.ConvTranspose1d):
        return _doubling(layer)
    return layer


def _doubling(layer: nn.ConvTranspose1d) -> Maps:
    """Convert a transposed convolution with 4 taps and stride 2 to an ordinary one that computes both output phases.

    y[2 t] = w[1] x[t] + w[3] x[t - 1] and y[2 t + 1] = w[2] x[t] + w[0] x[t + 1].
    """
    taps = layer.weight.transpose(0, 1).unbind(-1)  # four of [outputs, inputs]
    none = torch.zeros_like(taps[0])
    phases = torch.stack([taps[3], taps[1], none], -1), torch.stack([none, taps[2], taps[0]], -1)
    assert layer.bias is not None
    convolve = Convolution(torch.cat(phases), layer.bias.repeat(2), 1, 1)

    def double(x: Tensor) -> Tensor:
        return convolve(x).unflatten(1, (2, -1)).permute(0, 2, 3, 1).flatten(2)

    return double


SMALL = 2**20
"""Number of weights up to which one matrix product is faster on a CPU than oneDNN's convolution in its own layout."""


class Convolution:
    """Convolution over time, [B, inputs, T] -> [B, outputs, T'].

    On a CPU it is one matrix product with the windows of the maps, or, with many weights, oneDNN's convolution with
    weights in its own layout. That layout depends on the input size, so weights are packed again when it changes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, stride: int, padding: int):
        self.weight = weight.detach()
        self.bias = bias
        self.stride = stride
        self.padding = padding
        self._packs = _packs(weight)
        self._packed: tuple[torch.Size, Tensor] | None = None
        is_small = self._packs and bias is not None and weight.numel() <= SMALL
        self._matrix = self.weight.permute(2, 1, 0).flatten(0, 1).contiguous() if is_small else None

    def __call__(self, x: Tensor) -> Tensor:
        """Convolve maps [B, inputs, T]."""
        if not self._packs:
            return functional.conv1d(x, self.weight, self.bias, self.stride, self.padding)
        if self._matrix is not None and self.bias is not None:
            return self._multiply(x, self._matrix, self.bias)
        wide, geometry = x.unsqueeze(2), ((0, self.padding), (1, self.stride), (1, 1), 1)
        if self._packed is None or self._packed[0] != x.shape:
            weight = self.weight.unsqueeze(2).contiguous().to_mkldnn()
            self._packed = x.shape, torch.ops.aten.mkldnn_reorder_conv2d_weight(weight, *geometry, wide.shape)
        run = torch.ops.mkldnn._convolution_pointwise
        return run(wide, self._packed[1], self.bias, *geometry, "none", [], "").squeeze(2)

    def _multiply(self, x: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        taps = self.weight.shape[2]
        padded = functional.pad(x, (self.padding, self.padding)) if self.padding else x
        rows, channels, length = padded.shape
        steps = (length - taps) // self.stride + 1
        row, channel, step = padded.stride()
        windows = padded.as_strided((rows, steps, taps, channels), (row, self.stride * step, step, channel))
        return torch.addmm(bias, windows.reshape(rows * steps, -1), matrix).view(rows, steps, -1).transpose(1, 2)


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN can store these weights in its own layout."""
    has_mkldnn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_convolution_pointwise")
    return has_mkldnn and weight.device.type == "cpu" and weight.dtype == torch.float32


Predict = Callable[[Tensor, int], Tensor]
"""Function (latents x [B, T, A], evaluation k) -> network output [B, T, A]."""

TEXTS = 4096
"""Maximum number of instructions whose features are cached."""


class StepWeights(NamedTuple):
    """One step of a diffusion scheduler: clean = clip(a x + b output), then a weighted sum of all, and noise.

    x' = clean_weight * clean + x_weight * x + output_weight * output + std * noise.
    """

    a: float
    b: float
    clean_weight: float
    x_weight: float
    output_weight: float
    std: float


def lean_lerobot(policy: LeRobotPolicy, caching: Caching | None = None) -> LeRobotPolicy:
    """Return a policy equivalent to `policy` to 1e-5, with the same random numbers, without repeated computations.

    caching: cache of the network's blocks between steps (not exact), None for none. Its tables are computed from the
    current weights; weights are shared, except copies in another layout on a CPU. Raises ConfigError when lean
    inference is not supported: see `why_not_lean`; and for caching with Runge-Kutta's method, which revisits times, or
    with a plan for another network or chain.
    """
    reason = why_not_lean(policy)
    if reason:
        raise ConfigError(reason)
    inner: Any = policy.policy
    with torch.no_grad():
        if inner.config.type == "diffusion":
            model = inner.diffusion
            steps, weights = _scheduled(model.noise_scheduler, model.num_inference_steps)
            network = CachedNetwork(lean_unet(model.unet, steps.to(policy.device)), len(weights), caching)
            denoise = _diffusion(network, weights, _limit(inner.config))
            replaced_parts = {
                "diffusion": _sampling(model, lambda rows, global_cond, noise: denoise(global_cond, noise))
            }
        else:
            replaced_parts = _transformer_parts(inner, policy.device, caching)
    lean_policy = LeRobotPolicy(_with(inner, replaced_parts), policy.preprocess, policy.postprocess, policy.settings)
    remember_origin(lean_policy, origin_of(policy))
    return lean_policy


def why_not_lean(policy: LeRobotPolicy) -> str:
    """Return the reason why lean inference does not support this policy, "" if it does."""
    config: Any = policy.policy.config
    if config.type not in ("diffusion", "multi_task_dit"):
        return (
            f"engine=lean does not support LeRobot's '{config.type}', only diffusion and multi_task_dit. Use "
            "engine=reference."
        )
    if policy.settings.base is not None:
        return (
            "This policy's first denoising steps use a frozen base, which engine=lean does not support: use "
            "engine=reference."
        )
    if getattr(config, "compile_model", False):
        return "LeRobot compiles this policy itself (compile_model): set compile_model=false in config.json first."
    if _diffuses(config) and config.prediction_type not in ("epsilon", "sample"):
        return f"prediction_type={config.prediction_type} is not one that LeRobot trains (epsilon, sample)."
    return ""


def _diffuses(config: Any) -> bool:
    return config.type == "diffusion" or config.objective == "diffusion"


def _limit(config: Any) -> float | None:
    return config.clip_sample_range if config.clip_sample else None


def _with(module: Any, parts: dict[str, nn.Module]) -> Any:
    """Return a shallow copy of a module with the submodules in `parts` replaced, by name."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **parts}
    return twin


def _sampling(module: nn.Module, sample: Callable[..., Tensor]) -> nn.Module:
    """Return a shallow copy of a LeRobot module whose `conditional_sample` is `sample`."""
    twin: Any = copy.copy(module)
    twin.conditional_sample = sample
    return twin


class CachedNetwork:
    """A network with block caching by `caching` in chains of `steps` evaluations; see `CachedSteps`."""

    def __init__(self, network: LeanNetwork, steps: int, caching: Caching | None):
        if caching is not None:
            caching.check(network.blocks, steps)
        self.network, self.caching = network, caching

    def begin(self, condition: Tensor) -> Predict:
        """Return the network bound to a condition [B, D], for one chain."""
        predict = self.network.bind(condition)
        if self.caching is None:
            return predict
        memory = self.caching.begin()
        return lambda x, index: predict(x, index, memory.at(index))


def _transformer_parts(inner: Any, device: torch.device, caching: Caching | None) -> dict[str, nn.Module]:
    """Return the replacements for parts of a multi_task_dit: its sampling and its instruction encoder."""
    config, objective = inner.config, inner.objective
    shape = objective.horizon, objective.action_dim
    if _diffuses(config):
        times, weights = _scheduled(objective.noise_scheduler, objective.num_inference_steps)
        network = CachedNetwork(lean_transformer(inner.noise_predictor, times.to(device)), len(weights), caching)
        denoise = _diffusion(network, weights, _limit(config))
    else:
        if caching is not None and config.integration_method == "rk4":
            raise ConfigError(
                "Block caching needs monotonic times, but integration_method=rk4 revisits times: set "
                "integration_method=euler, or disable caching."
            )
        doubled = 2 if config.integration_method == "rk4" else 1
        times = torch.linspace(0, 1, doubled * config.num_integration_steps + 1, device=device)
        network = CachedNetwork(lean_transformer(inner.noise_predictor, times), config.num_integration_steps, caching)
        denoise = _flow(network, config.num_integration_steps, doubled == 2)

    def sample(model: nn.Module, batch_size: int, conditioning_vec: Tensor) -> Tensor:
        del model
        noise = torch.randn((batch_size, *shape), dtype=conditioning_vec.dtype, device=device)
        return denoise(conditioning_vec, noise)

    encoder = inner.observation_encoder
    remembering = _with(encoder, {"text_encoder": CachedTexts(encoder.text_encoder)})
    return {"objective": _sampling(objective, sample), "observation_encoder": remembering}


class CachedTexts(nn.Module):
    """A frozen text encoder that caches the features of every text."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder
        self._known: dict[bytes, Tensor] = {}

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the features [B, F] of texts given as tokens [B, L] with a mask [B, L], False on padding."""
        keys = [row.numpy().tobytes() for row in torch.cat([tokens, mask.to(tokens.dtype)], 1).cpu()]
        new = list(dict.fromkeys(key for key in keys if key not in self._known))
        if len(self._known) + len(new) > TEXTS:
            self._known, new = {}, list(dict.fromkeys(keys))
        if new:
            rows = torch.tensor([keys.index(key) for key in new], device=tokens.device)
            self._known |= zip(new, self.encoder(tokens[rows], mask[rows]), strict=True)
        return torch.stack([self._known[key] for key in keys])


def _diffusion(
    network: CachedNetwork, weights: Sequence[StepWeights], limit: float | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function from condition [B, D] and noise [B, T, A] to actions [B, T, A], with clean ones within
    `limit`.
    """

    def denoise(condition: Tensor, x: Tensor) -> Tensor:
        predict = network.begin(condition)
        for index, step in enumerate(weights):
            output = predict(x, index)
            clean = torch.add(step.a * x, output, alpha=step.b)
            if limit is not None:
                clean.clamp_(-limit, limit)
            x = torch.add(step.clean_weight * clean, x, alpha=step.x_weight)
            if step.output_weight:
                x.add_(output, alpha=step.output_weight)
            if step.std:
                x.add_(torch.randn(x.shape, dtype=x.dtype, device=x.device), alpha=step.std)
        return x

    return denoise


def _flow(network: CachedNetwork, steps: int, fourth_order: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function from condition [B, D] and noise [B, T, A] to actions [B, T, A], by Euler or Runge-Kutta.

    Network evaluation k is at time k / steps, or k / (2 steps) with fourth-order Runge-Kutta.
    """
    width = 1 / steps

    def integrate(condition: Tensor, x: Tensor) -> Tensor:
        predict = network.begin(condition)
        for step in range(steps):
            if not fourth_order:
                x = torch.add(x, predict(x, step), alpha=width)
                continue
            first = predict(x, 2 * step)
            second = predict(torch.add(x, first, alpha=width / 2), 2 * step + 1)
            third = predict(torch.add(x, second, alpha=width / 2), 2 * step + 1)
            fourth = predict(torch.add(x, third, alpha=width), 2 * step + 2)
            x = torch.add(x, first + 2 * second + 2 * third + fourth, alpha=width / 6)
        return x

    return integrate


def _scheduled(scheduler: Any, count: int) -> tuple[Tensor, list[StepWeights]]:
    """Return the training steps [K] that a diffusers scheduler visits in `count` steps, and the weights of each.

    DDPM with the posterior variance (fixed_small), or DDIM without noise, as configured by LeRobot.
    """
    scheduler.set_timesteps(count)
    steps = scheduler.timesteps.clone()
    stochastic = type(scheduler).__name__ == "DDPMScheduler"
    cumulative = scheduler.alphas_cumprod.double()
    last = 1.0 if stochastic else float(scheduler.final_alpha_cumprod)
    weights: list[StepWeights] = []
    for step in steps.tolist():
        before = int(scheduler.previous_timestep(step)) if stochastic else step - len(cumulative) // count
        alpha, next_alpha = float(cumulative[step]), float(cumulative[before]) if before >= 0 else last
        # x = sqrt(alpha) clean + sqrt(1 - alpha) noise.
        signal, noise = alpha**0.5, (1 - alpha) ** 0.5
        from_noise = scheduler.config.prediction_type == "epsilon"
        a, b = (1 / signal, -noise / signal) if from_noise else (0.0, 1.0)
        if stochastic:
            # The posterior q(x' | x, clean) of Ho et al. 2020, arXiv:2006.11239, equation 7.
            beta = 1 - alpha / next_alpha
            clean, from_x = (
                next_alpha**0.5 * beta / (1 - alpha),
                (alpha / next_alpha) ** 0.5 * (1 - next_alpha) / (1 - alpha),
            )
            variance = max((1 - next_alpha) / (1 - alpha) * beta, 1e-20) if step > 0 else 0.0
            weights.append(StepWeights(a, b, clean, from_x, 0.0, variance**0.5))
        else:
            # Song et al. 2021, arXiv:2010.02502, equation 12 without noise; the direction is that of the unclipped
            # prediction: what was predicted, or (x - signal output) / noise.
            towards = (1 - next_alpha) ** 0.5
            direction_weights = (0.0, towards) if from_noise else (towards / noise, -towards * signal / noise)
            weights.append(StepWeights(a, b, next_alpha**0.5, *direction_weights, 0.0))
    return steps, weights


keep_former_names(
    __name__,
    {"AtWork": "BoundNetwork", "Lean": "LeanNetwork", "Remembered": "CachedNetwork", "RememberedTexts": "CachedTexts"},
)
