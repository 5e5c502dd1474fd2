"""LeRobot's denoising policies as `Trainable`: their networks in our chain, and their checkpoints written again.

A `DenoisingPolicy` has schedules, scores, fine-tuning; here is the network that it needs, made of a LeRobot policy and
its processors. Nothing of LeRobot's is written anew: what `FAMILIES` names are its own modules. All K steps are tuned
unless fewer are asked for, because LeRobot runs one network in all of them. What is frozen is never copied.
Axes: N row, P predicted step, L latent element, A action dimension.
"""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning, require_extra
from robopolicy.core.origin import described_origin, origin_of, remember_origin
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import WorldSpec
from robopolicy.core.storage import recover_folder, write_folder_atomic, write_json
from robopolicy.core.structured import to_plain
from robopolicy.core.tensors import load_tensors
from robopolicy.nn.pieces import recomputed
from robopolicy.nn.precision import lowering, to_keep
from robopolicy.nn.schedules import Schedule
from robopolicy.policies.checkpoint import SETTINGS_FILE
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.lerobot import LeRobotPolicy, load_lerobot_policy, read_settings
from robopolicy.policies.lerobot_configuration import LeRobotStart, Tuned
from robopolicy.policies.lerobot_families import FAMILIES, why_not_trainable
from robopolicy.policies.network import Condition, EveryStep, Steps

BASE_FILE = "robopolicy_base.safetensors"
"""Beside the weights, where the first denoising steps are those of a frozen base."""
EXTRA = "vla"


def trainable_lerobot(policy: LeRobotPolicy, levels_per_sample: int = 1) -> DenoisingPolicy:
    """Return a `DenoisingPolicy` over the weights of `policy`, explored and tuned as its settings' `tuning` says.

    levels_per_sample: noise levels of a sample in its loss, see `DenoisingPolicyConfig`.

    Its noise-free decisions are LeRobot's own from the same noise, to rounding. Raises ConfigError where policies of
    its type, or with its configuration, cannot be trained here, CheckpointError where its frozen base is missing.
    """
    inner: Any = policy.policy
    reason = why_not_trainable(inner)
    if reason:
        raise ConfigError(f"LeRobot's '{inner.config.type}' acts but cannot be trained here: {reason}")
    tuning, network = policy.settings.tuning, LeRobotNetwork(policy)
    chain = network.family.chain(tuning)
    config = DenoisingPolicyConfig(
        **{
            "eta": tuning.eta,
            "noisy_steps": tuning.noisy_steps,
            "min_sampling_std": tuning.least_noise,
            "min_logprob_std": tuning.least_noise,
            "levels_per_sample": levels_per_sample,
            **chain,
        }
    )
    spec = policy.spec
    made = DenoisingPolicy(
        config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions, network=network
    ).to(policy.device)
    remember_origin(made, origin_of(policy))
    base = policy.settings.base
    if base is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RobopolicyWarning)  # who made the checkpoint has seen it
            made.prepare_finetuning(base["steps"], train_encoder=base["train_encoder"])
        _read_base(made, policy.folder)
    return made.eval()


class FromLeRobot:
    """Makes policies of kind lerobot; see `POLICIES`."""

    @staticmethod
    def build(config: LeRobotStart, spec: WorldSpec, episodes: Episodes, seed: int) -> DenoisingPolicy:
        """Return the policy in config.path, which shall learn from data of `spec`; nothing is drawn or fitted.

        Raises ConfigError without a path, and as `load_lerobot_policy` and `trainable_lerobot` do.
        """
        if config.path is None:
            raise ConfigError("Which policy of LeRobot's? Set policy.path=FOLDER, one with a config.json.")
        folder = recover_folder(config.path)
        known = read_settings(folder)
        tuning = replace(known.tuning, tuned=config.tuned)
        settings = replace(known, fps=spec.fps, instructions=spec.instructions, tuning=tuning)
        return trainable_lerobot(load_lerobot_policy(folder, settings=settings), config.levels_per_sample)


class LeRobotNetwork(nn.Module):
    """A LeRobot policy as the network of a `DenoisingPolicy`; see `network.DenoisingNetwork` and `latents.OwnLatents`.

    It shares the policy's weights, and freezes those that its settings do not tune.
    """

    def __init__(self, policy: LeRobotPolicy):
        super().__init__()
        inner: Any = policy.policy
        self.policy: nn.Module = inner.eval()
        self.reader, self.tuning = policy, policy.settings.tuning
        self.family = FAMILIES[inner.config.type](inner)
        self.latent_size, self.first_step = self.family.latent_size, self.family.first_step
        self.reads_instructions = self.family.reads_instructions
        self.keeps_condition = self.tuning.keep_prefix
        self.adapter_rank = 0
        _free(self.policy, self.family.denoising_modules(), self.tuning.tuned)

    def train(self, mode: bool = True) -> "LeRobotNetwork":
        """Note the mode; what is inside stays in evaluation mode, so that scores are those of what acted."""
        super().train(mode)
        self.policy.eval()
        return self

    def forward(self, method: str, *arguments: Any) -> Any:
        """Call a method by its name, so that `functional_call` can call it under other weights."""
        return getattr(self, method)(*arguments)

    def encode(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Condition:
        """Return what LeRobot's processors and encoders make of an observation; nothing is augmented."""
        frames = self.reader.frames(observation)
        with lowering(self.reader.device):
            return to_keep(self.family.read(frames))

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict [N, P, L]; see `DenoisingNetwork`."""
        return self.family.denoise(x, time, condition)

    def steps(self, times: Tensor, condition: Condition) -> Steps:
        """Get ready for steps at times [K]; see `SharesSteps`."""
        every = EveryStep(self, times, condition)
        return Recomputed(every) if self.tuning.checkpointing else every

    def encoder_parameters(self) -> Iterable[nn.Parameter]:
        """All weights but those of the modules that denoise."""
        own = {id(weight) for module in self.family.denoising_modules() for weight in module.parameters()}
        return [weight for weight in self.policy.parameters() if id(weight) not in own]

    def to_latents(self, actions: Tensor) -> Tensor:
        """Return normalised actions [N, P, L], of actions [N, P - first_step, A], padded in front and at the end."""
        from lerobot.processor import NormalizerProcessorStep
        from lerobot.processor.converters import create_transition

        for step in self.reader.preprocess.steps:
            if isinstance(step, NormalizerProcessorStep):
                normalised: Any = step(create_transition(action=actions))
                actions = normalised["action"]
        before = actions[:, :1].expand(-1, self.first_step, -1)
        return pad(torch.cat([before, actions], 1), (0, self.latent_size - actions.shape[-1]))

    def to_actions(self, latents: Tensor) -> Tensor:
        """Return what LeRobot's postprocessor makes of latents [N, S, L], [N, S, A] in the world's units."""
        executed: Tensor = self.reader.postprocess(self.family.finished(latents).flatten(0, 1))
        return executed.unflatten(0, latents.shape[:2]).to(latents.device, torch.float32)

    def schedule(self, config: DenoisingPolicyConfig) -> Schedule:
        """Return the schedule that LeRobot samples by; see `OwnSchedule`."""
        return self.family.schedule(config)

    def errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return what LeRobot's training loss says of each step, [N, P]; see `OwnError`."""
        return self.family.errors(prediction, target)

    def levels(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw levels [count] as LeRobot does in training, from its own law under a seed drawn from `generator`."""
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.family.draw_levels(count)

    def frozen_twin(self) -> "FrozenTwin":
        """Return what goes on predicting as this network does; see `MakesBase`. Raises ConfigError with adapters."""
        if self.adapter_rank:
            raise ConfigError("Adapters learn in all denoising steps: leave finetuned_steps=null.")
        warnings.warn(
            "LeRobot runs one network in all denoising steps, and the first ones shall be a frozen base's: what "
            "LeRobot itself makes of the checkpoint is then not what was tuned. finetuned_steps=null tunes all.",
            RobopolicyWarning,
            stacklevel=2,
        )
        return FrozenTwin(self)

    def add_lora(self, rank: int) -> None:
        """Freeze the weights and put adapters beside every linear layer that is tuned (LoRA, arXiv:2106.09685).

        Nothing changes at first: the second factor is zero. Raises ConfigError where there are adapters already.
        """
        if self.adapter_rank:
            raise ConfigError("The policy has adapters already: they go on learning, or saving takes them in.")
        peft = require_extra("peft", EXTRA)
        names = [
            name
            for name, module in self.policy.named_modules()
            if isinstance(module, nn.Linear) and module.weight.requires_grad
        ]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rank)
            settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=names)
            peft.inject_adapter_in_model(settings, self.policy)
        for name, weight in self.policy.named_parameters():
            weight.requires_grad_("lora_" in name)
        self.adapter_rank = rank
        self.train(self.training)

    def write_checkpoint(self, policy: DenoisingPolicy, folder: Path) -> None:
        """Write what LeRobot's `from_pretrained` reads, processors and robopolicy.json included, atomically.

        Adapters are added to the weights beside them.
        """
        base = policy.finetuning if policy.base is not None else None
        settings = replace(self.reader.settings, base=base, **described_origin(policy))
        inner: Any = self.policy

        def fill(inside: Path) -> None:
            inner.save_pretrained(inside, state_dict=merged_weights(inner) if self.adapter_rank else None)
            for part in (self.reader.preprocess, self.reader.postprocess):
                part.save_pretrained(inside)
            if isinstance(policy.base, FrozenTwin):
                save_file(policy.base.state_dict(), inside / BASE_FILE)
            write_json(inside / SETTINGS_FILE, to_plain(settings))

        write_folder_atomic(Path(folder), fill)


class FrozenTwin(nn.Module):
    """A network as it was: copies of the weights that are tuned, over all the others, which it shares."""

    def __init__(self, network: LeRobotNetwork):
        super().__init__()
        self._shared = (network,)  # in a tuple, so that its weights are not this module's as well
        self.names = [name for name, weight in network.named_parameters() if weight.requires_grad]
        for index, name in enumerate(self.names):
            self.register_buffer(f"weight_{index}", network.get_parameter(name).detach().clone())

    def encode(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Condition:
        """See `DenoisingNetwork`."""
        return functional_call(self._shared[0], self._weights(), ("encode", observation))

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict [N, P, L]; see `DenoisingNetwork`."""
        return functional_call(self._shared[0], self._weights(), ("denoise", x, time, condition))

    def encoder_parameters(self) -> Iterable[nn.Parameter]:
        """None: nothing here learns."""
        return ()

    def _weights(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"weight_{index}") for index, name in enumerate(self.names)}


class Recomputed:
    """`Steps` that keep no activations for the gradient: each is computed again on the way back."""

    def __init__(self, every: EveryStep):
        self.every = every

    def one(self, x: Tensor, step: int) -> Tensor:
        """Predict [N, P, L]; see `Steps`."""
        return self.every.one(x, step)

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """Predict [N, k, P, L], a step at a time; see `Steps`."""
        rows, count = x.shape[:2]
        times = (self.every.times if chosen is None else self.every.times[chosen]).expand(rows, count)
        network, condition = self.every.network, self.every.condition
        found: list[Any] = [recomputed(network.denoise, x[:, step], times[:, step], condition) for step in range(count)]
        return torch.stack(found, 1)


def merged_weights(policy: nn.Module) -> dict[str, Tensor]:
    """Return what a policy with adapters is without them, name -> [...]: each is added to the weight beside it."""
    layer = require_extra("peft.tuners.lora", EXTRA).LoraLayer
    adapted: dict[str, Any] = {name: module for name, module in policy.named_modules() if isinstance(module, layer)}
    found = {}
    for name, value in policy.state_dict().items():
        if "lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner and leaf == "weight":
            value = value + adapted[owner].get_delta_weight("default").to(value.dtype)
        found[f"{owner}.{leaf}" if owner else name] = value.detach().contiguous()
    return found


def _free(policy: nn.Module, denoising: list[nn.Module], tuned: Tuned) -> None:
    """Let the weights learn that `tuned` names, and no others."""
    if tuned is Tuned.LEROBOT:
        return
    policy.requires_grad_(tuned is Tuned.ALL)
    for module in denoising:
        module.requires_grad_(True)


def _read_base(policy: DenoisingPolicy, folder: Path | None) -> None:
    path = (folder or Path()) / BASE_FILE
    if not isinstance(policy.base, FrozenTwin):
        return
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: the policy's first denoising steps are in there.")
    try:
        policy.base.load_state_dict(load_tensors(path))
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the policy beside it: restore both from a copy.") from error
