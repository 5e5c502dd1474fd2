"""Trainer state as trees for `core.storage`: optimisers, module weights, and a guard against non-finite numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.errors import CheckpointError, ConfigError, NonFiniteError
from robopolicy.core.storage import recover_folder, write_folder_atomic
from robopolicy.core.tensors import Tree, load_tree, save_tree

_NAME = "trainer"


def optimiser_tree(optimiser: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return the per-parameter state of `optimiser`, numbered in the order of its parameters."""
    state: dict[str, dict[str, Tensor]] = {}
    for number, parameter in enumerate(_parameters(optimiser)):
        state[str(number)] = {name: torch.as_tensor(value) for name, value in optimiser.state[parameter].items()}
    return state


def restore_optimiser(optimiser: torch.optim.Optimizer, tree: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Put back what `optimiser_tree` took from an optimiser over the same parameters."""
    parameters = _parameters(optimiser)
    if len(parameters) != len(tree):
        raise CheckpointError(f"The checkpoint's optimiser has {len(tree)} parameters, this one has {len(parameters)}.")
    for number, parameter in enumerate(parameters):
        for name, value in tree[str(number)].items():
            target = parameter.device if value.dim() else value.device
            optimiser.state[parameter][name] = value.clone().to(target)


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` for every parameter."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def adamw(parameters: Sequence[nn.Parameter], rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Return a fused AdamW over `parameters`; raises ConfigError when there is nothing to train."""
    if not parameters:
        raise ConfigError("There are no parameters to train: every parameter is frozen.")
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=weight_decay, fused=True)


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float, where: str) -> Tensor:
    """Scale the gradients to a global norm of at most `limit`; raise NonFiniteError, naming `where`, if not finite."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    require_finite("the gradient norm", norm, where)
    return norm


def require_finite(name: str, value: Tensor, where: str) -> None:
    """Raise NonFiniteError naming the quantity and the step unless `value` is finite everywhere."""
    if not bool(value.isfinite().all()):
        raise NonFiniteError(
            f"{name[0].upper()}{name[1:]} is not finite at {where}. Nothing was updated with it; lower the learning "
            "rate or check the data, then run again: it resumes from the last checkpoint."
        )


def save_trainer(folder: Path, tree: Tree) -> None:
    """Write the trainer's state to `folder`, atomically."""
    write_folder_atomic(folder, lambda inside: save_tree(inside, _NAME, tree))


def load_trainer(folder: Path) -> dict[str, Any] | None:
    """Read the trainer's state, or return None where no run has left one."""
    folder = recover_folder(folder)
    return load_tree(folder, _NAME) if folder.exists() else None


def require_same_parts(saved: Tree, current: Tree, folder: Path) -> None:
    """Raise CheckpointError unless the state in `folder` has the parts that this version goes on from."""
    if saved.keys() != current.keys():
        parts = ", ".join(sorted(set(saved) ^ set(current)))
        raise CheckpointError(
            f"{folder} was left by another version (it differs in: {parts}). Go on with that version, or start over "
            "with run.fresh=true."
        )


def require_same_config(saved: Mapping[str, Any], current: Mapping[str, Any], may_change: Sequence[str]) -> None:
    """Raise ConfigError naming the keys in which a resumed run differs, apart from those that may change."""
    keys = (set(saved) | set(current)) - set(may_change)
    changed = sorted(key for key in keys if saved.get(key) != current.get(key))
    if changed:
        text = ", ".join(f"{key} was {saved.get(key)!r}, now {current.get(key)!r}" for key in changed)
        raise ConfigError(f"This run was started with another configuration ({text}). Use a new run name, or undo it.")


def _parameters(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]
