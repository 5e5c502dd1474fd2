"""Lean engine: the reference's actions, to 1e-5, without computations that only training needs.

Time embeddings are computed once per checkpoint, the network's terms of the observation once per policy call, and a
step's schedule is a few numbers (`samplers`). Inputs and outputs are validated; between them nothing is validated or
stored, and no log-probability is computed. The networks are so small that calling a layer takes longer than computing
it, so there are as few calls as possible. Token policies process each instruction once: it is the start of the prompt
and does not attend to later tokens, so its keys and values are cached between policy calls.

Axes: B row, K step, P predicted step, C executed step, A action dimension, W width, M summands that a time or a
condition adds to a network's first layer, or all its modulations.
"""

import copy
from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention, silu

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import CONDITION, Decision, Policy, TensorObservation
from robopolicy.core.randomness import normal
from robopolicy.core.spec import PolicySpec, all_finite, validate_observation
from robopolicy.core.world import Rows
from robopolicy.inference.caching import CachedSteps
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.lerobot import lean_lerobot
from robopolicy.inference.samplers import Predicts, Sampler, make_sampler, own_sampler, sample
from robopolicy.nn.branches import Caching
from robopolicy.nn.denoisers import Denoiser, ResidualMLP, TransformerBlock, TransformerDenoiser
from robopolicy.nn.encoders import ObservationEncoder
from robopolicy.nn.language import Reading
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.lerobot.acting import LeRobotPolicy
from robopolicy.policies.likelihood import matching_latents
from robopolicy.policies.network import (
    ChunkNetwork,
    Condition,
    DenoisingNetwork,
    LearnsNoise,
    learns_noise,
    rows_in,
    steps_of,
)
from robopolicy.policies.sampler import NoiseDraws, draw_noise
from robopolicy.policies.token.decoding import Prompt
from robopolicy.policies.token.policy import TokenPolicy


def lean(policy: Policy, config: InferenceConfig, caching: Caching | None = None) -> Policy:
    """Return `policy` computed by the lean engine; see `robopolicy.inference.engine.Engine`."""
    return _lean(policy, config, caching)


@singledispatch
def _lean(policy: Policy, config: InferenceConfig, caching: Caching | None) -> Policy:
    """Build the engine for one class of policies; register a function to support another class."""
    del config, caching
    raise ConfigError(f"engine=lean supports denoising policies only, and this is a {type(policy).__name__}.")


@_lean.register
def _lean_denoising(policy: DenoisingPolicy, config: InferenceConfig, caching: Caching | None) -> Policy:
    return LeanDenoising(policy, config, caching)


@_lean.register
def _lean_tokens(policy: TokenPolicy, config: InferenceConfig, caching: Caching | None) -> Policy:
    _require_exact(policy, config.exact and caching is None)
    if policy.processor is not None:
        raise ConfigError(
            "engine=lean caches the encoded instruction, but in this policy's prompt images come before it, so the "
            "prompt changes with every policy call. Use engine=reference."
        )
    return LeanTokens(policy)


@_lean.register
def _lean_lerobot(policy: LeRobotPolicy, config: InferenceConfig, caching: Caching | None) -> Policy:
    _require_exact(policy, config.exact)
    return lean_lerobot(policy, caching)


def _require_exact(policy: Policy, exact: bool) -> None:
    if not exact:
        raise ConfigError(
            "Other samplers, bf16 and block caching are supported only for denoising policies, not for a "
            f"{type(policy).__name__}."
        )


class LeanDenoising:
    """A `core.policy.Policy` equivalent to a denoising policy; create it with `lean`.

    Its tables follow the policy's weights and are recomputed when these change. Other samplers and block caches apply
    to noise-free decisions only, for which their error is measured; with exploration noise the policy's own chain is
    run in full.
    """

    memoryless = True

    def __init__(self, policy: DenoisingPolicy, config: InferenceConfig, caching: Caching | None = None):
        self.policy = policy
        self.config = config
        self.caching = caching
        schedule = policy.schedule
        own_samplers = {flag: own_sampler(schedule, deterministic=flag) for flag in (True, False)}
        self._still = own_samplers[True]
        self.samplers = own_samplers | (
            {True: make_sampler(config.sampler, schedule, config.steps)} if config.sampler else {}
        )
        """Noise-free or not -> the steps that are taken."""
        if caching is not None and isinstance(policy.network, ChunkNetwork):
            caching.check(policy.network.denoiser.block_names, len(self.samplers[True].steps))
        self._weights = [*policy.parameters(), *policy.buffers()]
        self._known = -1
        self._vectors = Vectors.of(policy)
        self._at: dict[bool, tuple[Prepared, Prepared, int]] = {}

    @property
    def spec(self) -> PolicySpec:
        """As in the wrapped policy."""
        return self.policy.spec

    @property
    def reads_instructions(self) -> bool:
        """As in the wrapped policy."""
        return self.policy.reads_instructions

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; no row [R] has state between policy calls."""

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return actions [B, C, A] for every row, with the policy's own random draws.

        Raises SpecError or NonFiniteError as the policy does.
        """
        return Decision(self.policy.to_actions(self._latents(observation, generator, deterministic)))

    @torch.no_grad()
    def predict(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Tensor:
        """Return all P steps that a policy call predicts, [B, P, A] in the world's units and bounds; see `act`."""
        latents = self._latents(observation, generator, deterministic)
        return self.policy.to_predictions(latents[:, self.policy.part.first :])

    def _latents(self, observation: TensorObservation, generator: torch.Generator, deterministic: bool) -> Tensor:
        """Return the clean latents [B, P, A] of a policy call."""
        policy, noise_free = self.policy, deterministic or self.policy.scored_by_matching
        condition, before = self._conditions(observation)
        if noise_free:  # what `draw_noise` draws for it
            shape = rows_in(condition), *self._noise_shape
            final = self._chain(True, condition, before, NoiseDraws(normal(shape, generator, self._device)))
            if policy.scored_by_matching:  # the next decision's noise is that of the policy itself
                matching_latents(final, policy.schedule, policy.config.matching_samples, generator)
            return final
        draws = draw_noise(
            policy.schedule,
            (rows_in(condition), *policy.noise_shape),
            generator,
            policy.action_low.device,
            noisy=True,
            noise_clip=policy.config.noise_clip,
            scored=slice(policy.first_step, None),
            noisy_steps=policy.config.noisy_steps,
            explored=policy.part.size,
        )
        return self._chain(False, condition, before, draws)

    @torch.no_grad()
    def from_noise(self, observation: TensorObservation, noise: Tensor) -> Tensor:
        """Return the executed actions [B, C, A] for noise [B, P, A], noise-free; see `core.policy.ActsFromNoise`."""
        condition, before = self._conditions(observation)
        return self.policy.to_actions(self._chain(True, condition, before, NoiseDraws(noise)))

    def _conditions(self, observation: TensorObservation) -> tuple[Condition, Condition]:
        """Return the network's condition for an observation, and that of the frozen base for its steps."""
        policy = self.policy
        self._prepare()
        condition = self._encode(observation)
        if self._first and policy.base is not None and not policy.encoder_is_fixed:
            return condition, policy.base.encode(observation)
        return condition, condition

    def _chain(self, quiet: bool, condition: Condition, before: Condition, draws: NoiseDraws) -> Tensor:
        """Return clean latents [B, P, A]; quiet: noise-free; before: condition of the frozen base's steps."""
        sampler = self.samplers[quiet]
        leading, main_network, first = self._at[quiet]
        late_network = main_network(condition)
        early_network = leading(before) if first else late_network
        predict: Predicts = lambda x, step: (early_network if step < first else late_network)(x, step)  # noqa: E731
        if draws.steps is None:
            return sample(sampler, predict if first else late_network, draws.start)
        noise = draws.steps * self._stds(sampler, condition)
        return sample(sampler, predict, draws.start, noise, self._quiet_steps(sampler, draws, noise))

    def _stds(self, sampler: Sampler, condition: Condition) -> Tensor:
        """Return the standard deviations of the noise, broadcastable to [K, B, P, A]."""
        policy, network = self.policy, self.policy.network
        stds = sampler.stds.to(policy.action_low.device)[:, None, None, None]
        if not learns_noise(policy.config):
            return stds
        first = policy.first_step
        noise_std = cast(LearnsNoise, network).noise_std(policy.schedule.times[first:], condition).transpose(0, 1)
        return torch.cat([stds[:first].expand(-1, *noise_std.shape[1:]), noise_std])

    def _quiet_steps(
        self, sampler: Sampler, draws: NoiseDraws, noise: Tensor
    ) -> Mapping[int, tuple[Tensor, Tensor]] | None:
        """Return the weights of x and clean for the steps in which some rows or elements are noise-free.

        Sets their `noise` [K, B, P, A] to 0.
        """
        first = self.policy.first_step
        size = noise.shape[-1]
        explored = self.policy.part.size
        if draws.quiet is None and explored == size:
            return None
        padded = torch.arange(size, device=noise.device) >= explored
        weights_of_step: dict[int, tuple[Tensor, Tensor]] = {}
        for index, steps in enumerate(zip(self._still.steps, sampler.steps, strict=True)):
            pairs = [(pair.latents[0][1], pair.cleans[0][1]) for pair in steps]
            quiet_elements = padded[None, None]
            if draws.quiet is not None and index >= first:
                rows = draws.quiet[:, index - first, None, None]
                noise[index].masked_fill_(rows, 0.0)
                quiet_elements = rows if explored == size else quiet_elements | rows
            elif explored == size or pairs[0] == pairs[1]:
                continue
            of_x, of_clean = (torch.where(quiet_elements, *each) for each in zip(*pairs, strict=True))
            weights_of_step[index] = of_x, of_clean
        return weights_of_step

    def _encode(self, observation: TensorObservation) -> Condition:
        """Return the condition; raises SpecError or NonFiniteError on an invalid observation."""
        if self._vectors is not None:
            return self._vectors.encode(observation)
        policy = self.policy
        validate_observation(observation, policy.fields, history=policy.config.history)
        with torch.autocast(self.policy.action_low.device.type, torch.bfloat16, self.config.precision == "bf16"):
            condition = self.policy.network.encode(observation)
        return (
            condition if self.config.precision == "fp32" else {name: value.float() for name, value in condition.items()}
        )

    def _prepare(self) -> None:
        """Compute the tables, unless the weights are unchanged."""
        version = sum(weight._version for weight in self._weights)
        if version == self._known:
            return
        policy, config = self.policy, self.config
        for flag, sampler in self.samplers.items():
            times = sampler.times.to(policy.action_low.device)
            # The frozen base takes what is noisier than the first step that was fine-tuned.
            first = int((times > policy.schedule.times[policy.first_step] + 1e-6).sum()) if policy.base else 0
            caching, base = self.caching if flag else None, policy.base if first else None
            main_network = prepared(policy.network, times, config.precision, caching)
            leading = prepared(base, times, config.precision, caching) if base is not None else main_network
            self._at[flag] = leading, main_network, first
        self._vectors = Vectors.of(policy)
        self._first = policy.first_step
        self._noise_shape = policy.noise_shape
        self._device = policy.action_low.device
        self._known = version


class Vectors:
    """Encoder of a policy with vector inputs only, [B, H, *shape] of each field, in four operations."""

    def __init__(self, policy: DenoisingPolicy, encoder: ObservationEncoder):
        self.fields = policy.fields
        self.history = policy.config.history
        self.bound = encoder.bound
        parts = [(encoder.normalizer(key), self.history) for key in encoder.keys]
        self.keys = encoder.keys
        self.shapes = [(self.history, *self.fields[key].shape) for key in self.keys]
        self.offset = torch.cat([each.offset.flatten().repeat(times) for each, times in parts])
        self.scale = torch.cat([each.scale.flatten().repeat(times) for each, times in parts])

    @classmethod
    def of(cls, policy: DenoisingPolicy) -> "Vectors | None":
        """Return the encoder of `policy`; None if it reads images or text, or has a custom network."""
        network = policy.network
        if not isinstance(network, ChunkNetwork) or network.reads_instructions or policy.spec.cameras:
            return None
        return cls(policy, network.encoder)

    def encode(self, observation: TensorObservation) -> Condition:
        """Return {"condition": [B, D]}; raises SpecError or NonFiniteError on an invalid observation."""
        values = [value for key in self.keys if isinstance(value := observation.get(key), Tensor)]
        if [value.shape[1:] for value in values] == self.shapes and len({value.shape[0] for value in values}) == 1:
            raw = torch.cat([value.flatten(1) for value in values], 1).float()
            if all_finite(raw):
                # cat has made a copy, which may be written to
                return {CONDITION: raw.sub_(self.offset).div_(self.scale).clamp_(-self.bound, self.bound)}
        validate_observation(observation, self.fields, history=self.history)  # which says what is wrong
        raise SpecError(f"The observation's fields have different numbers of rows: {', '.join(self.keys)}.")


Prepared = Callable[[Condition], Predicts]
"""Function condition -> network bound to it, with everything independent of the observation precomputed."""


def prepared(
    network: DenoisingNetwork, times: Tensor, precision: str = "fp32", caching: Caching | None = None
) -> Prepared:
    """Return `network` prepared for steps at times [K]; caching: block cache between steps.

    Raises ConfigError for bf16 or caching of a custom network, and for a plan that does not fit.
    """
    if not isinstance(network, ChunkNetwork):
        if precision != "fp32" or caching is not None:
            raise ConfigError(
                f"bf16 and block caching support only built-in networks; this is a {type(network).__name__}."
            )
        return lambda condition: steps_of(network, times, condition).one
    denoiser, table = denoiser_in(precision, network, times)
    begin = bind_condition(denoiser, table, caching)
    if precision == "fp32":
        return lambda condition: begin(condition[CONDITION])

    def narrow(condition: Condition) -> Predicts:
        predict = begin(condition[CONDITION].to(table.dtype))
        return lambda x, step: predict(x.to(table.dtype), step).float()

    return narrow


def denoiser_in(precision: str, network: ChunkNetwork, times: Tensor) -> tuple[Denoiser, Tensor]:
    """Return the network's denoiser in this precision, and its features of times [K], [K, E]."""
    denoiser, table = network.denoiser, network.denoiser.encode_time(times)
    if precision == "fp32":
        return denoiser, table
    lower_precision = copy.deepcopy(cast(nn.Module, denoiser)).to(torch.bfloat16)
    return cast(Denoiser, lower_precision), table.bfloat16()


CONTEXTS = 2**25
"""Maximum number of elements of a table [K, B, M] that is filled before the first step."""


def bind_condition(denoiser: Denoiser, table: Tensor, caching: Caching | None) -> Callable[[Tensor], Predicts]:
    """Return a function from condition [B, D] to the denoiser bound to it; table: its features of the times [K, M].

    Raises ConfigError when caching does not fit.
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
    """Return step -> sum of time and condition features [B, M], computed for all steps at once if it fits into
    memory.
    """
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
            shape = *x.shape[:2], 3, heads, width // heads
            for place, (into, out, up, down) in enumerate(weights):
                shift, scale, gate, shift_forward, scale_forward, gate_forward = parts[6 * place : 6 * place + 6]
                projections = linear(modulated(tokens, shift, scale), *into).view(shape).permute(2, 0, 3, 1, 4)
                mixed = (
                    scaled_dot_product_attention(projections[0], projections[1], projections[2])
                    .transpose(1, 2)
                    .flatten(2)
                )
                tokens = torch.addcmul(tokens, gate, linear(mixed, *out))
                hidden = silu(linear(modulated(tokens, shift_forward, scale_forward), *up))
                tokens = torch.addcmul(tokens, gate_forward, linear(hidden, *down))
            return linear(modulated(tokens, parts[-2], parts[-1]), denoiser.head.weight, denoiser.head.bias)

        return predict

    return begin


READINGS = 64
"""Maximum number of cached instruction sets."""


class LeanTokens:
    """A `core.policy.Policy` equivalent to a token policy; its caches follow the policy's weights."""

    memoryless = True

    def __init__(self, policy: TokenPolicy):
        self.policy = policy
        self._weights = list(policy.parameters())
        self._known = -1
        self._readings: dict[tuple[str, ...], Reading] = {}

    @property
    def spec(self) -> PolicySpec:
        """As in the wrapped policy."""
        return self.policy.spec

    @property
    def reads_instructions(self) -> bool:
        """As in the wrapped policy."""
        return self.policy.reads_instructions

    def reset(self, rows: Rows = None) -> None:
        """No memory to clear for any rows [R]."""

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return actions [B, C, A] for every row. Raises as the policy does."""
        version = sum(weight._version for weight in self._weights)
        if version != self._known:
            self._readings.clear()
            self._known = version
        policy = self.policy
        embedded, texts = policy.embed(observation), policy.texts(observation)
        prompt = Prompt(self._reading(texts, embedded.device), embedded)
        return Decision(policy.generate_actions(prompt, generator, deterministic=deterministic).actions)

    def _reading(self, texts: list[str], device: torch.device) -> Reading:
        """Return the cached instructions of N rows, to be extended in one policy call."""
        distinct = tuple(sorted(set(texts)))
        if distinct not in self._readings:
            if len(self._readings) >= READINGS:
                self._readings.pop(next(iter(self._readings)))
            self._readings[distinct] = self.policy.read(list(distinct), torch.arange(len(distinct)).to(device))
        reading = self._readings[distinct]
        number = {text: place for place, text in enumerate(distinct)}
        rows = torch.tensor([number[text] for text in texts], device=device)
        return reading.copied(rows)


keep_former_names(__name__, {"at_work": "bind_condition"})
