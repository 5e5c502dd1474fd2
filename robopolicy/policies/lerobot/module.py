"""What LeRobot's policies share that learn here: whose weights they are, which of them learn, how they are saved.

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
from robopolicy.policies.lerobot.configuration import LeRobotSettings, Tuned
from robopolicy.policies.lerobot.features import LeRobotReader, executed

EXTRA = "vla"


class LeRobotModule(nn.Module):
    """A LeRobot policy's weights; those that its settings do not tune are frozen.

    acting: its modules that are behind what reads the observation, and not part of it.
    """

    def __init__(self, policy: LeRobotReader, acting: Sequence[nn.Module]):
        super().__init__()
        inner: Any = policy.policy
        self.policy: nn.Module = inner.eval()
        self.reader, self.tuning = policy, policy.settings.tuning
        names = {module: name for name, module in self.policy.named_modules()}
        self._acting = tuple(names[module] for module in acting)  # adapters put another module at a layer's name
        self.adapter_rank = 0
        if self.tuning.tuned is not Tuned.LEROBOT:
            self.policy.requires_grad_(self.tuning.tuned is Tuned.ALL)
            for module in self.acting:
                module.requires_grad_(True)

    @property
    def acting(self) -> tuple[nn.Module, ...]:
        """Its modules that are behind what reads the observation, with their adapters."""
        return tuple(map(self.policy.get_submodule, self._acting))

    @property
    def began_elsewhere(self) -> bool:
        """True: see `abilities.BeganElsewhere`."""
        return True

    def mapping_for(self, world: WorldSpec) -> str:
        """See `abilities.MapsFeatures`."""
        return self.reader.mapping_for(world)

    def train(self, mode: bool = True) -> Self:
        """Note the mode; what is inside stays in evaluation mode, so that scores are those of what acted."""
        super().train(mode)
        self.policy.eval()
        return self

    def encoder_parameters(self) -> Iterable[nn.Parameter]:
        """All weights but those of the modules that act."""
        own = {id(weight) for module in self.acting for weight in module.parameters()}
        return [weight for weight in self.policy.parameters() if id(weight) not in own]

    def normalised(self, actions: Tensor) -> Tensor:
        """Return actions [N, S, A] in the world's units as LeRobot's policy learns them."""
        from lerobot.processor import NormalizerProcessorStep
        from lerobot.processor.converters import create_transition

        for step in self.reader.preprocess.steps:
            if isinstance(step, NormalizerProcessorStep):
                normalised: Any = step(create_transition(action=actions))
                actions = normalised["action"]
        return actions

    def executed(self, actions: Tensor) -> Tensor:
        """Return what LeRobot's postprocessor makes of normalised actions [N, S, A], in the world's units."""
        return executed(self.reader.postprocess, actions).to(actions.device, torch.float32)

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
        """Write what LeRobot's `from_pretrained` reads, processors and robopolicy.json included, atomically.

        Adapters are added to the weights beside them; beside: writes further files into the folder that it is given.
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
    """Return what a policy with adapters is without them, name -> [...]: each is added to the weight beside it.

    In fp32, and rounded once to what the weight is.
    """
    layer = require_extra("peft.tuners.lora", EXTRA).LoraLayer
    adapted: dict[str, Any] = {name: module for name, module in policy.named_modules() if isinstance(module, layer)}
    found = {}
    for name, value in policy.state_dict().items():
        if "lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner and leaf == "weight":
            value = _with_adapter(value, adapted[owner])
        found[f"{owner}.{leaf}" if owner else name] = value.detach().contiguous()
    return found


def _with_adapter(weight: Tensor, layer: Any) -> Tensor:
    """Return a weight [out, in] with what the adapter in `layer` adds to it."""
    if weight.dtype is torch.float32:
        return weight + layer.get_delta_weight("default").to(weight.dtype)
    first, second = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    return (weight.float() + layer.scaling["default"] * (second @ first)).to(weight.dtype)
