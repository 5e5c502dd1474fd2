"""Base of trainable LeRobot policies: weights, trainable subset and saving.

Axes: N row, S steps of a chunk, A action dimension.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from robopolicy.core.errors import ConfigError, require_extra
from robopolicy.core.spec import WorldSpec
from robopolicy.core.storage import write_folder_atomic, write_json
from robopolicy.core.structured import to_plain
from robopolicy.policies.foreign import SETTINGS_FILE
from robopolicy.policies.lerobot.configuration import LeRobotSettings, TrainableWeights
from robopolicy.policies.lerobot.features import LeRobotReader, executed

EXTRA = "vla"


class LeRobotModule(nn.Module):
    """Weights of a LeRobot policy; those that its settings do not tune are frozen.

    acting: its modules after the observation encoder.
    """

    def __init__(self, policy: LeRobotReader, acting: Sequence[nn.Module]):
        super().__init__()
        inner: Any = policy.policy
        self.policy: nn.Module = inner.eval()
        self.reader, self.tuning = policy, policy.settings.tuning
        names = {module: name for name, module in self.policy.named_modules()}
        self._acting = tuple(names[module] for module in acting)  # adapters put another module at a layer's name
        self.adapter_rank = 0
        if self.tuning.trainable is not TrainableWeights.LEROBOT:
            self.policy.requires_grad_(self.tuning.trainable is TrainableWeights.ALL)
            for module in self.acting:
                module.requires_grad_(True)

    @property
    def acting(self) -> tuple[nn.Module, ...]:
        """Its modules after the observation encoder, with their adapters."""
        return tuple(map(self.policy.get_submodule, self._acting))

    @property
    def is_pretrained(self) -> bool:
        """Whether the policy starts from pretrained weights, always True; see `abilities.IsPretrained`."""
        return True

    def mapping_for(self, world: WorldSpec) -> str:
        """Implement `abilities.MapsFeatures.mapping_for`."""
        return self.reader.mapping_for(world)

    def train(self, mode: bool = True) -> Self:
        """Store the mode; inner modules stay in evaluation mode, so that log-probabilities match acting."""
        super().train(mode)
        self.policy.eval()
        return self

    def encoder_parameters(self) -> Iterable[nn.Parameter]:
        """All weights except those of the acting modules."""
        acting_weights = {id(weight) for module in self.acting for weight in module.parameters()}
        return [weight for weight in self.policy.parameters() if id(weight) not in acting_weights]

    def normalised(self, actions: Tensor) -> Tensor:
        """Convert actions [N, S, A] in world units to the normalised actions used in LeRobot's training."""
        from lerobot.processor import NormalizerProcessorStep
        from lerobot.processor.converters import create_transition

        for step in self.reader.preprocess.steps:
            if isinstance(step, NormalizerProcessorStep):
                normalised: Any = step(create_transition(action=actions))
                actions = normalised["action"]
        return actions

    def executed(self, actions: Tensor) -> Tensor:
        """Apply LeRobot's postprocessor to normalised actions [N, S, A]; returns world units."""
        return executed(self.reader.postprocess, actions).to(actions.device, torch.float32)

    def add_lora(self, rank: int) -> None:
        """Freeze the weights and add LoRA adapters to every tuned linear layer (arXiv:2106.09685).

        The output is initially unchanged, because the second factor is zero. Raises ConfigError if there are adapters
        already.
        """
        if self.adapter_rank:
            raise ConfigError("The policy already has adapters: continue training them, or merge them by saving.")
        peft = require_extra("peft", EXTRA)
        names = [
            name
            for name, module in self.policy.named_modules()
            if isinstance(module, nn.Linear)
            and not isinstance(module, NonDynamicallyQuantizableLinear)  # nn.MultiheadAttention never calls its own
            and module.weight.requires_grad
        ]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rank)
            settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=names)
            peft.inject_adapter_in_model(settings, self.policy)
        for name, weight in self.policy.named_parameters():
            weight.requires_grad_("lora_" in name)
        self.adapter_rank = rank
        # New layers come in training mode: this puts what is inside back into evaluation mode.
        self.train(self.training)

    def write(self, folder: Path, settings: LeRobotSettings, beside: Callable[[Path], None] | None = None) -> None:
        """Write a checkpoint for LeRobot's `from_pretrained`, including processors and robopolicy.json, atomically.

        Adapters are merged into the weights; beside: called with the folder to write additional files.
        """
        inner: Any = self.policy

        def fill(inside: Path) -> None:
            inner.save_pretrained(inside, state_dict=merged_weights(inner) if self.adapter_rank else None)
            for part in (self.reader.preprocess, self.reader.postprocess):
                part.save_pretrained(inside)
            if beside is not None:
                beside(inside)
            write_json(inside / SETTINGS_FILE, to_plain(settings))

        write_folder_atomic(Path(folder), fill)


def merged_weights(policy: nn.Module) -> dict[str, Tensor]:
    """Return the weights with LoRA adapters merged, name -> [...].

    Computed in fp32 and rounded once to the weight's dtype.
    """
    layer = require_extra("peft.tuners.lora", EXTRA).LoraLayer
    adapted: dict[str, Any] = {name: module for name, module in policy.named_modules() if isinstance(module, layer)}
    weights = {}
    for name, value in policy.state_dict().items():
        if "lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner and leaf == "weight":
            value = _with_adapter(value, adapted[owner])
        weights[f"{owner}.{leaf}" if owner else name] = value.detach().contiguous()
    return weights


def _with_adapter(weight: Tensor, layer: Any) -> Tensor:
    """Return a weight [out, in] with the adapter in `layer` merged."""
    if weight.dtype is torch.float32:
        return weight + layer.get_delta_weight("default").to(weight.dtype)
    first, second = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    return (weight.float() + layer.scaling["default"] * (second @ first)).to(weight.dtype)
