"""Share frozen weights between copies of a policy.

While the action expert of a vision-language policy trains, its frozen backbone is nearly all of it: pi0 has four
billion weights, of which 0.3 billion are the expert. Fine-tuning keeps the policy, its base, the best so far and,
depending on the algorithm, more copies.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.modules import Weights


def copy_trainable[Held: Weights](module: Held) -> Held:
    """Return a copy with separate trainable weights and shared frozen weights."""
    return copy.deepcopy(module, {id(weight): weight for weight in module.parameters() if not weight.requires_grad})


def trainable_state(module: Weights) -> dict[str, Tensor]:
    """Return the part of `module.state_dict()` that fine-tuning may change, name -> [...]: all but frozen weights.

    Restored by `load_trainable_state`.
    """
    frozen_names = _resting(module)
    return {name: value for name, value in module.state_dict().items() if name not in frozen_names}


def load_trainable_state(module: Weights, weights: Mapping[str, Tensor]) -> None:
    """Load the output of `trainable_state`, name -> [...], into `module`; raises KeyError unless it matches all
    trainable weights.
    """
    missing_keys, unexpected_keys = module.load_state_dict(weights, strict=False)
    if wrong_keys := sorted({*missing_keys} - _resting(module)) + sorted(unexpected_keys):
        raise KeyError(f"These weights are missing or unknown: {', '.join(wrong_keys)}.")


def _resting(module: Weights) -> set[str]:
    return {name for name, weight in module.named_parameters() if not weight.requires_grad}


@torch.no_grad()
def share_frozen(module: Weights, other: Weights) -> None:
    """Let weights of `other` that equal frozen weights of `module` share their memory."""
    weights_of_kind: dict[tuple[torch.Size, torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for weight in module.parameters():
        if not weight.requires_grad:
            weights_of_kind[weight.shape, weight.dtype, weight.device].append(weight)
    for weight in other.parameters():
        candidates = weights_of_kind[weight.shape, weight.dtype, weight.device]
        # The order of layers is the same in both, so that the first is nearly always the one.
        index = next((place for place, each in enumerate(candidates) if torch.equal(each, weight)), None)
        if index is not None:
            weight.data = candidates.pop(index).data


keep_former_names(
    __name__,
    {
        "copied": "copy_trainable",
        "learned": "trainable_state",
        "load_learned": "load_trainable_state",
        "share": "share_frozen",
    },
)
