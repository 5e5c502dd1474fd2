"""Optimiser utilities: construction, gradient clipping, checks for non-finite values, saving and restoring."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from robopolicy.core.errors import CheckpointError, ConfigError, NonFiniteError, RobopolicyWarning, require_extra
from robopolicy.core.exchange import is_divided
from robopolicy.core.former_names import keep_former_names
from robopolicy.nn.configuration import Optimiser
from robopolicy.nn.fsdp import divided_like

NOTHING_TO_TRAIN = "There are no parameters to train: every parameter is frozen."


def optimiser_tree(optimiser: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return the per-parameter state of `optimiser`, indexed in parameter order.

    Index -> state name -> tensor: [*parameter.shape], such as a running mean, or a scalar [], such as a step count.
    """
    state: dict[str, dict[str, Tensor]] = {}
    for number, parameter in enumerate(_parameters(optimiser)):
        state[str(number)] = {name: torch.as_tensor(value) for name, value in optimiser.state[parameter].items()}
    return state


def restore_optimiser(optimiser: torch.optim.Optimizer, tree: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore the state saved by `optimiser_tree` to an optimiser over the same parameters.

    tree: index -> name -> tensor, [*parameter.shape] or a scalar [], on any device. Raises CheckpointError when the
    number of parameters differs.
    """
    parameters = _parameters(optimiser)
    if len(parameters) != len(tree):
        raise CheckpointError(
            f"The checkpoint's optimiser has {len(tree)} parameters, but this one has {len(parameters)}."
        )
    number = 0
    for group in optimiser.param_groups:
        # Fused and capturable kernels read the count of updates beside the parameter, as float32; the others read it on
        # the CPU, where asking for its value does not wait for the device.
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            for name, value in tree[str(number)].items():
                if name != "step":
                    optimiser.state[parameter][name] = divided_like(value.to(parameter.device), parameter).clone()
                elif not value.is_floating_point():  # counted in Python, as bitsandbytes does
                    optimiser.state[parameter][name] = int(value)
                else:
                    step_count = value.to(parameter.device, torch.float32) if on_device else value.to("cpu")
                    optimiser.state[parameter][name] = step_count.clone()
            number += 1


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group to `rate`."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def make_optimiser(
    kind: Optimiser, parameters: Sequence[nn.Parameter], rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Build an AdamW with 32-bit moments (adamw), or 8-bit moments with one scale per 256 values (adamw8bit).

    bfloat16 parameters are updated in fp32, see `MasterAdamW`; adamw8bit does not support this and warns.

    Source of adamw8bit: 8-bit optimizers via block-wise quantization, Dettmers et al. 2021, arXiv:2110.02861, in the
    authors' package bitsandbytes. Raises ConfigError when there is nothing to train, and for adamw8bit when weights are
    not on CUDA or the package is missing.
    """
    if kind == "adamw":
        return adamw(parameters, rate, weight_decay)
    places = sorted({parameter.device.type for parameter in parameters} - {"cuda"})
    if places:
        raise ConfigError(
            f"optimiser={kind} stores its averages in 8 bits, which needs CUDA, but these weights are on "
            f"{places[0]}: set optimiser=adamw."
        )
    if not parameters:
        raise ConfigError(NOTHING_TO_TRAIN)
    eight = require_extra("bitsandbytes", "cuda").optim.AdamW8bit
    if any(parameter.dtype is torch.bfloat16 for parameter in parameters):
        warnings.warn(
            f"optimiser={kind} updates bfloat16 weights in place: updates smaller than 2^-9 of a weight are lost, "
            "which are most of them at fine-tuning learning rates. optimiser=adamw keeps an fp32 master copy.",
            RobopolicyWarning,
            stacklevel=2,
        )
    return eight(list(parameters), lr=rate, weight_decay=weight_decay)


def optimiser_bytes(kind: Optimiser, parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of an optimiser's moments for the parameters.

    adamw8bit: one byte per value, with a float scale for every block of 256; parameters with fewer than 4096 values use
    32 bits.
    """
    total = 0
    for parameter in parameters:
        count = parameter.numel()
        if kind == "adamw" or count < 4096:
            # Of a bfloat16 parameter there is a copy in fp32 beside them
            total += (3 if kind == "adamw" and parameter.dtype is torch.bfloat16 else 2) * 4 * count
        else:
            total += 2 * (count + 4 * -(-count // 256))
    return total


def adamw(parameters: Sequence[nn.Parameter], rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Build a fused AdamW with fp32 updates, also for bfloat16 parameters; ConfigError when there is nothing to
    train.
    """
    if not parameters:
        raise ConfigError(NOTHING_TO_TRAIN)
    if any(parameter.dtype is torch.bfloat16 for parameter in parameters):
        return MasterAdamW(parameters, lr=rate, weight_decay=weight_decay, fused=True)
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=weight_decay, fused=True)


class MasterAdamW(torch.optim.AdamW):
    """AdamW with an fp32 master copy of each bfloat16 parameter: updates apply to the copy, which is rounded into the
    parameter.

    bfloat16 has 8 significant bits: an update smaller than 2^-9 of a weight is lost, which happens nearly everywhere at
    fine-tuning learning rates. The copy is stored as "master" in the parameter's state, and saved and restored with the
    moments, which are fp32 too. If a parameter was changed externally since the last step, the copy restarts from its
    current value.
    """

    MASTER = "master"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step with the parameters' gradients."""
        lowered = [each for each in _parameters(self) if each.dtype is torch.bfloat16 and each.grad is not None]
        originals: list[tuple[Tensor, Tensor]] = []
        for parameter in lowered:
            low, gradient = parameter.data, parameter.grad
            assert gradient is not None
            originals.append((low, gradient))
            master = self.state[parameter].get(self.MASTER)
            now = low.float()
            parameter.grad = None  # a gradient has its parameter's type
            parameter.data = now if master is None else torch.where(master.to(low.dtype) == low, master, now)
            parameter.grad = gradient.float()
            # AdamW makes the averages where there is no state at all.
            self.state[parameter].pop(self.MASTER, None)
        super().step()
        for parameter, (low, gradient) in zip(lowered, originals, strict=True):
            master = parameter.data
            parameter.grad = None
            parameter.data = low
            parameter.copy_(master)
            parameter.grad = gradient
            self.state[parameter][self.MASTER] = master


SavedWeights = list[tuple[Tensor, Tensor | None]]
"""(weight, fp32 master copy or None) of every parameter."""


def save_weights(optimiser: torch.optim.Optimizer) -> SavedWeights:
    """Save weights [*shape] and their fp32 copies, so that `restore_weights` can undo the optimiser's next step."""
    return [
        (weight.detach().clone(), optimiser.state.get(weight, {}).get(MasterAdamW.MASTER))
        for weight in _parameters(optimiser)
    ]


def saved_weights_bytes(kind: Optimiser, weights: Iterable[nn.Parameter]) -> int:
    """Return the maximum bytes used by `save_weights`."""
    return sum(
        (weight.element_size() + (4 if kind == "adamw" and weight.dtype is torch.bfloat16 else 0)) * weight.numel()
        for weight in weights
    )


@torch.no_grad()
def restore_weights(optimiser: torch.optim.Optimizer, kept: SavedWeights) -> None:
    """Restore the optimiser's weights [*shape] saved by `save_weights`; its moments are unchanged.

    The fp32 copies are restored too: otherwise a step too small to survive rounding would remain in them, and a larger
    one would reset them.
    """
    for weight, (before, master) in zip(_parameters(optimiser), kept, strict=True):
        weight.copy_(before)
        if master is not None:
            optimiser.state[weight][MasterAdamW.MASTER] = master  # no step writes into it: each makes one of its own
        else:
            optimiser.state.get(weight, {}).pop(MasterAdamW.MASTER, None)


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float, where: str) -> Tensor:
    """Clip the gradients to a global norm of at most `limit` and return the norm before clipping, a scalar [].

    Raises NonFiniteError, naming `where`, if it is not finite.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    norm = cast(Any, norm).full_tensor() if is_divided(norm) else norm
    require_finite("the gradient norm", norm, where)
    return norm


def require_finite(name: str, value: Tensor, where: str) -> None:
    """Raise NonFiniteError naming the quantity and the step unless `value` [...] is finite everywhere."""
    if not bool(value.isfinite().all()):
        raise NonFiniteError(
            f"{name[0].upper()}{name[1:]} is not finite at {where}. No update was made with it; lower the learning "
            "rate or check the data, then run again: the run resumes from the last checkpoint."
        )


def _parameters(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


keep_former_names(
    __name__,
    {
        "Kept": "SavedWeights",
        "keep_weights": "save_weights",
        "kept_bytes": "saved_weights_bytes",
        "put_back": "restore_weights",
    },
)
