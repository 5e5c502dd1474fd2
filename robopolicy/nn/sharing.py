"""Weights that do not learn are held once, however many copies of a policy there are.

What reads of a vision-language policy rests while its expert learns, and is nearly all of it: a pi0 has four billion
weights, 0.3 of them of its expert. Fine-tuning holds the policy, its base, the best so far, and by the algorithm more.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from robopolicy.core.modules import Weights


def copied[Held: Weights](module: Held) -> Held:
    """Return a copy with weights of its own where they learn, and those of `module` itself where they rest."""
    return copy.deepcopy(module, {id(weight): weight for weight in module.parameters() if not weight.requires_grad})


def learned(module: Weights) -> dict[str, Tensor]:
    """Return the part of `module.state_dict()` that fine-tuning may change, name -> [...]: all but weights that rest.

    `load_learned` takes it back.
    """
    rest = _resting(module)
    return {name: value for name, value in module.state_dict().items() if name not in rest}


def load_learned(module: Weights, weights: Mapping[str, Tensor]) -> None:
    """Copy what `learned` returned, name -> [...], into `module`; raises KeyError where that is not all that learns."""
    missing, unknown = module.load_state_dict(weights, strict=False)
    if wrong := sorted({*missing} - _resting(module)) + sorted(unknown):
        raise KeyError(f"These weights are missing or unknown: {', '.join(wrong)}.")


def _resting(module: Weights) -> set[str]:
    return {name for name, weight in module.named_parameters() if not weight.requires_grad}


@torch.no_grad()
def share(module: Weights, other: Weights) -> None:
    """Let `other` hold its weights in memory of `module`, wherever they are equal to weights that rest there."""
    known: dict[tuple[torch.Size, torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for weight in module.parameters():
        if not weight.requires_grad:
            known[weight.shape, weight.dtype, weight.device].append(weight)
    for weight in other.parameters():
        alike = known[weight.shape, weight.dtype, weight.device]
        # The order of layers is the same in both, so that the first is nearly always the one.
        index = next((place for place, each in enumerate(alike) if torch.equal(each, weight)), None)
        if index is not None:
            weight.data = alike.pop(index).data
