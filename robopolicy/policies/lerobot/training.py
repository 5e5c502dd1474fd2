"""Trainable LeRobot policies: denoising ones as networks of `DenoisingPolicy`, others by their own classes.

A `DenoisingPolicy` provides schedules, log-probabilities and fine-tuning; this module provides its network from a
LeRobot policy and its processors. LeRobot's code is not reimplemented: `FAMILIES` use its own modules. All K steps are
fine-tuned by default, because LeRobot runs one network in all of them. Frozen weights are never copied. Axes: N row, P
predicted step, L latent element, A action dimension.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.origin import described_origin, origin_of, remember_origin, remember_renaming, renaming_of
from robopolicy.core.policy import TensorObservation, Trainable
from robopolicy.core.randomness import use_generator
from robopolicy.core.tensors import load_tensors
from robopolicy.nn.configuration import FlowNoise
from robopolicy.nn.micro_batches import recomputed
from robopolicy.nn.precision import cast_for_cache, lowering
from robopolicy.nn.schedules import Schedule
from robopolicy.nn.sharing import copy_trainable
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.lerobot.act import GaussianACT
from robopolicy.policies.lerobot.configuration import LeRobotTuning
from robopolicy.policies.lerobot.families import (
    FAMILIES,
    WITHOUT_STEPS,
    BatchesSteps,
    SquaredErrorFamily,
    why_not_trainable,
    why_steps_are_fixed,
)
from robopolicy.policies.lerobot.features import LeRobotReader
from robopolicy.policies.lerobot.module import LeRobotModule
from robopolicy.policies.lerobot.pi0_fast import FastTokens
from robopolicy.policies.lerobot.statistics import require_statistics
from robopolicy.policies.network import Condition, IndependentSteps, Steps

READ_BY: Mapping[str, tuple[str, ...]] = {
    "flow_noise": ("flow",),
    "flow_noise_level": ("flow",),
    "eta": ("diffusion",),
    "min_std": ("flow", "diffusion"),
    "noisy_steps": ("flow", "diffusion"),
    "exploration_std": ("act",),
    "learn_std": ("act",),
    "temperature": ("pi0_fast",),
}
"""`LeRobotTuning` option -> kinds of policies that it applies to; others apply to all."""

BASE_FILE = "robopolicy_base.safetensors"
"""File next to the weights, with the frozen base of the first denoising steps."""


def trainable_lerobot(policy: LeRobotReader, levels_per_sample: int = 1) -> Trainable:
    """Return a trainable policy over the weights of `policy`, with the exploration and training settings `tuning`.

    levels_per_sample: noise levels per sample in its loss, see `DenoisingPolicyConfig`.

    Noise-free decisions equal LeRobot's own from the same noise, up to rounding. Raises ConfigError when its type or
    configuration cannot be trained here, CheckpointError when its frozen base is missing.
    """
    inner: Any = policy.policy
    reason = why_not_trainable(inner)
    if reason:
        raise ConfigError(f"LeRobot's '{inner.config.type}' can act but cannot be trained here: {reason}")
    require_statistics(policy)
    policy_class = {"act": GaussianACT, "pi0_fast": FastTokens}.get(inner.config.type)
    if policy_class is not None:
        learner = policy_class(policy).to(policy.device)
        remember_origin(learner, origin_of(policy))
        remember_renaming(learner, renaming_of(policy))
        return learner.eval()
    tuning, network = policy.settings.tuning, LeRobotNetwork(policy)
    chain = network.family.chain(tuning)
    config = DenoisingPolicyConfig(
        **{
            "eta": tuning.eta,
            "noisy_steps": tuning.noisy_steps,
            **_least_noise(tuning, chain),
            "levels_per_sample": levels_per_sample,
            **chain,
        }
    )
    spec = policy.spec
    denoising_policy = DenoisingPolicy(
        config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions, network=network
    ).to(policy.device)
    remember_origin(denoising_policy, origin_of(policy))
    remember_renaming(denoising_policy, renaming_of(policy))
    base = policy.settings.base
    if base is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RobopolicyWarning)  # who made the checkpoint has seen it
            denoising_policy.prepare_finetuning(base["steps"], train_encoder=base["train_encoder"])
        _read_base(denoising_policy, policy.folder)
    return denoising_policy.eval()


def require_read(policy: LeRobotReader, tuning: LeRobotTuning) -> None:
    """Raise ConfigError if `tuning` sets options that have no effect on policies like `policy`."""
    inner: Any = policy.policy
    if why_not_trainable(inner):
        return  # which is what has to be said
    kind = inner.config.type
    defaults, settings = LeRobotTuning(), policy.settings
    known_stds = (defaults.exploration_std, settings.tuning.exploration_std)
    if kind == "act" and settings.log_std is not None and tuning.exploration_std not in known_stds:
        raise ConfigError(
            f"lerobot.exploration_std={tuning.exploration_std:g} is the initial exploration noise of an act policy, "
            f"but this one has trained "
            "its standard deviations: unset it, or remove log_std from its robopolicy.json."
        )
    of = kind if kind in WITHOUT_STEPS else FAMILIES[kind](inner).chain(defaults)["kind"].value
    for name, readers in READ_BY.items():
        if of not in readers and getattr(tuning, name) != getattr(defaults, name):
            its = ", ".join(each for each, kinds in READ_BY.items() if of in kinds)
            raise ConfigError(
                f"'{kind}' does not read lerobot.{name}, which applies to {' and '.join(readers)} policies; its "
                f"exploration settings are {its}."
            )


def _least_noise(tuning: LeRobotTuning, chain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lower bounds of noise, and bounds of an element's log-probability suitable for such small noise."""
    lower_bound = tuning.min_std
    if chain.get("flow_noise") is FlowNoise.CONSTANT:  # a smaller constant is no accident
        lower_bound = min(lower_bound, tuning.flow_noise_level)
    # The log-density of a Gaussian is at most -log(std) - 0.92, so this bound never holds at the smallest std.
    highest = max(2.0, -math.log(lower_bound)) if lower_bound > 0 else None
    clamp = None if highest is None else (-5.0, highest)
    return {"min_sampling_std": lower_bound, "min_logprob_std": lower_bound, "logp_clamp": clamp}


class LeRobotNetwork(LeRobotModule):
    """A LeRobot policy as the network of a `DenoisingPolicy`: a `DenoisingNetwork` with `latents.CustomLatents`."""

    def __init__(self, policy: LeRobotReader):
        inner: Any = policy.policy
        family = FAMILIES[inner.config.type](inner)
        super().__init__(policy, family.denoising_modules())
        self.family = family
        self.latent_size, self.first_step = self.family.latent_size, self.family.first_step
        self.reads_instructions = self.family.reads_instructions
        self.keeps_condition = self.tuning.cache_encoder_outputs
        crops = getattr(inner.config, "crop_is_random", False) or getattr(inner.config, "image_crop_is_random", False)
        self.cropping = tuple(each for each in self.policy.modules() if crops and getattr(each, "do_crop", False))
        drops = inner.config.type == "multi_task_dit" and inner.config.dropout
        self.dropping = tuple(inner.noise_predictor.modules()) if drops else ()
        flow = self.family.chain(self.tuning)["kind"] is PolicyKind.FLOW
        noise_free = flow and self.tuning.flow_noise is FlowNoise.ODE
        setting = "flow_noise_level" if flow else "eta or min_std"
        self.how_to_explore = "choose a flow_noise other than ode" if noise_free else f"raise {setting}"

    @property
    def denoises_actions(self) -> bool:
        """Whether its latents are (padded) normalised actions rather than a representation from which actions are
        computed.
        """
        return isinstance(self.family, SquaredErrorFamily)

    def forward(self, method: str, *arguments: Any) -> Any:
        """Call a method by name, so that `functional_call` can call it with other weights."""
        return getattr(self, method)(*arguments)

    def encode(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Condition:
        """Encode an observation with LeRobot's processors and encoders; a generator enables random image crops.

        Only in training mode and if LeRobot's training crops, with one crop for all images.
        """
        frames = self.reader.frames(observation)
        with lowering(self.reader.device), self._at_random(self.cropping, generator):
            return cast_for_cache(self.family.read(frames))

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict [N, P, L]; see `DenoisingNetwork`."""
        return self.family.denoise(x, time, condition)

    def denoise_in_loss(self, x: Tensor, time: Tensor, condition: Condition, generator: torch.Generator) -> Tensor:
        """Predict [N, P, L] in training mode with LeRobot's dropout; see `HasDropout`."""
        with self._at_random(self.dropping, generator):
            return self.denoise(x, time, condition)

    @contextmanager
    def _at_random(self, modules: Sequence[nn.Module], generator: torch.Generator | None) -> Iterator[None]:
        """Context that sets the given modules to training mode if this one is, with random draws from `generator`, if
        given.
        """
        if generator is None or not modules or not self.training:
            yield
            return
        try:
            for module in modules:
                module.training = True
            with use_generator(generator, self.reader.device):
                yield
        finally:
            for module in modules:
                module.training = False

    def steps(self, times: Tensor, condition: Condition) -> Steps:
        """Prepare steps at times [K]; see `SharesSteps`."""
        each_step = IndependentSteps(self, times, condition)
        if self.tuning.gradient_checkpointing:
            return CheckpointedSteps(each_step)
        # In bfloat16 products differ with the shape, by more than scores of what acted may.
        weights = [weight for module in self.family.denoising_modules() for weight in module.parameters()]
        exact = all(weight.dtype == torch.float32 for weight in weights)
        return BatchedSteps(each_step, self.family) if exact and isinstance(self.family, BatchesSteps) else each_step

    def to_latents(self, actions: Tensor) -> Tensor:
        """Convert actions [N, P, A] to normalised actions [N, P, L], padded at the end."""
        return pad(self.normalised(actions), (0, self.latent_size - actions.shape[-1]))

    def to_actions(self, latents: Tensor) -> Tensor:
        """Apply LeRobot's postprocessor to latents [N, S, L]; returns [N, S, A] in world units."""
        return self.executed(self.family.finished(latents))

    def schedule(self, config: DenoisingPolicyConfig) -> Schedule:
        """Return the schedule that LeRobot samples by; see `CustomLatents`."""
        return self.family.schedule(config)

    def errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return LeRobot's training loss of each step, [N, P]; see `CustomLatents`."""
        return self.family.errors(prediction, target)

    def levels(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw noise levels [count] from LeRobot's training distribution, seeded from `generator`."""
        with use_generator(generator, torch.device("cpu")):
            return self.family.draw_levels(count)

    def why_always_as_many(self) -> str:
        """Return the reason why LeRobot cannot take fewer steps with these weights, "" if it can; see
        `CustomLatents`.
        """
        inner: Any = self.policy
        return why_steps_are_fixed(inner, self.family.steps_setting)

    def of_steps(self, steps: int) -> Self:
        """Return a copy with `steps` denoising steps in its config, the number that LeRobot then takes; see
        `CustomLatents`.

        Raises ConfigError when LeRobot's sampler cannot reproduce the copy's decisions.
        """
        if reason := self.why_always_as_many():
            raise ConfigError(f"It cannot be distilled to fewer steps: {reason}")
        network = copy_trainable(self)
        inner: Any = network.policy
        setattr(inner.config, network.family.steps_setting, steps)
        network.tuning = replace(network.tuning, noisy_steps=None)  # it may be more than there are now
        network.reader = network.reader.tuned_by(network.tuning)
        return network

    def frozen_twin(self) -> "FrozenCopy":
        """Return a frozen copy of this network's current function; see `CopiesFrozenBase`. Raises ConfigError with
        adapters.
        """
        if self.adapter_rank:
            raise ConfigError("Adapters train all denoising steps: set finetuned_steps=null.")
        warnings.warn(
            "With finetuned_steps set, a frozen base runs the first denoising steps, which LeRobot does not "
            "support: the checkpoint would behave differently when run by LeRobot itself. finetuned_steps=null "
            "fine-tunes all steps.",
            RobopolicyWarning,
            stacklevel=2,
        )
        return FrozenCopy(self)

    def write_checkpoint(self, policy: DenoisingPolicy, folder: Path) -> None:
        """Write a checkpoint for LeRobot's `from_pretrained`, including processors and robopolicy.json, atomically.

        Adapters are merged into the weights.
        """
        base = policy.finetuning if policy.base is not None else None

        def beside(inside: Path) -> None:
            if isinstance(policy.base, FrozenCopy):
                save_file(policy.base.named_weights(), inside / BASE_FILE)

        self.write(folder, replace(self.reader.settings, base=base, **described_origin(policy)), beside)


class FrozenCopy(nn.Module):
    """Frozen copy of a network: copies of the trainable weights, sharing all others.

    weights: by name, as from `named_weights`; None: the network's current trainable weights.
    """

    def __init__(self, network: LeRobotNetwork, weights: Mapping[str, Tensor] | None = None):
        super().__init__()
        self._shared = (network,)  # in a tuple, so that its weights are not this module's as well
        if weights is None:
            weights = {name: each.detach().clone() for name, each in network.named_parameters() if each.requires_grad}
        self.names = list(weights)
        for index, weight in enumerate(weights.values()):
            self.register_buffer(f"weight_{index}", weight)

    def encode(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Condition:
        """Implement `DenoisingNetwork.encode`."""
        # The copies take the places of the network's weights during this call alone.
        return functional_call(self._shared[0], self.named_weights(), ("encode", observation))

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict [N, P, L]; see `DenoisingNetwork`."""
        return functional_call(self._shared[0], self.named_weights(), ("denoise", x, time, condition))

    def encoder_parameters(self) -> Iterable[nn.Parameter]:
        """Empty: no weight here is trainable."""
        return ()

    def named_weights(self) -> dict[str, Tensor]:
        """Return the copied weights by the network's names, [*shape] each."""
        return {name: self.get_buffer(f"weight_{index}") for index, name in enumerate(self.names)}


class BatchedSteps:
    """`Steps` of a family that evaluates several steps without copying the condition for each."""

    def __init__(self, every: IndependentSteps, family: BatchesSteps):
        self.every, self.family = every, family

    def one(self, x: Tensor, step: int) -> Tensor:
        """Predict [N, P, L]; see `Steps`."""
        return self.every.one(x, step)

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """Predict [N, k, P, L]; see `Steps`."""
        if not self.family.is_faster(x, self.every.condition):
            return self.every.several(x, chosen)
        times = self.every.times if chosen is None else self.every.times[chosen]
        return self.family.denoise_several(x, times.expand(x.shape[:2]), self.every.condition)


class CheckpointedSteps:
    """`Steps` with activation checkpointing: each step is recomputed in the backward pass."""

    def __init__(self, every: IndependentSteps):
        self.every = every

    def one(self, x: Tensor, step: int) -> Tensor:
        """Predict [N, P, L]; see `Steps`."""
        return self.every.one(x, step)

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """Predict [N, k, P, L], one step at a time; see `Steps`."""
        rows, count = x.shape[:2]
        times = (self.every.times if chosen is None else self.every.times[chosen]).expand(rows, count)
        network, condition = self.every.network, self.every.condition
        predictions: list[Any] = [
            recomputed(network.denoise, x[:, step], times[:, step], condition) for step in range(count)
        ]
        return torch.stack(predictions, 1)


def _read_base(policy: DenoisingPolicy, folder: Path | None) -> None:
    """Load the policy's frozen base from the file next to its checkpoint, whichever weights were trained there."""
    network, path = policy.network, (folder or Path()) / BASE_FILE
    if not isinstance(policy.base, FrozenCopy) or not isinstance(network, LeRobotNetwork):
        return
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: it contains the network of the policy's first denoising steps.")
    base_weights, parameters = load_tensors(path), dict(network.named_parameters())
    if "weight_0" in base_weights and len(base_weights) == len(
        policy.base.names
    ):  # numbered, as they were written at first
        base_weights = {name: base_weights[f"weight_{index}"] for index, name in enumerate(policy.base.names)}
    if not all(name in parameters and parameters[name].shape == value.shape for name, value in base_weights.items()):
        raise CheckpointError(f"{path} does not match the policy next to it: restore both from a copy.")
    policy.base = FrozenCopy(network, {name: value.to(parameters[name].device) for name, value in base_weights.items()})


keep_former_names(__name__, {"FrozenTwin": "FrozenCopy", "AtOnce": "BatchedSteps", "Recomputed": "CheckpointedSteps"})
