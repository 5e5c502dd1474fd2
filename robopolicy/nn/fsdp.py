"""Weights divided among the data-parallel processes of a run (FSDP2), for policies whose gradients and optimiser state
do not fit on one device.

Between steps a process has its part of every weight, gradient and optimiser state. The weights are complete during
`log_prob` and the backward pass, and while the policy acts; the sum of the gradients is divided at once. They are one
group: policies call layers of pretrained models in their own order, so there is no smaller part whose use FSDP sees.

`Scores` are registered as a pytree. Otherwise FSDP finds no tensors in the result of `log_prob`, and gradients would
silently stay in each process.
"""

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from robopolicy.core import replicas
from robopolicy.core.arrays import is_mapping
from robopolicy.core.exchange import is_divided
from robopolicy.core.modules import Weights
from robopolicy.core.policy import Scores

_METHODS = ("log_prob", "act", "loss")
"""Methods of a policy before which FSDP completes the weights."""
_registered: set[type] = set()


def divided_copy[Held: nn.Module](policy: Held) -> Held:
    """Return a copy of `policy` whose weights are divided; `policy` moves to the CPU. All processes call it.

    Copy its weights back with `whole_tree`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    from torch.utils import _pytree

    if Scores not in _registered:
        _pytree.register_dataclass(Scores)
        _registered.add(Scores)
    device = next(policy.parameters()).device
    divided = copy.deepcopy(policy.to("cpu")).to(device)
    mesh = init_device_mesh(device.type, (replicas.count(),))
    # Gradients are summed, not averaged: each process's loss is its share of that of the whole minibatch.
    options = {"reshard_after_forward": False, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    group: Any = fully_shard(divided, mesh=mesh, **options)
    group.set_gradient_divide_factor(1.0)
    group.set_force_sum_reduction_for_comms(True)  # gloo has no other
    for name in _METHODS:
        register_fsdp_forward_method(divided, name)
    return divided


@contextmanager
def whole_weights(policy: object) -> Generator[None]:
    """Complete the weights of `policy` for the time of the context, if they are divided; all processes enter it.

    Within, a process may use the policy alone.
    """
    group = cast(Any, policy)
    if not hasattr(group, "unshard"):
        yield
        return
    group.reshard()  # complete weights of before the last step
    group.unshard()
    try:
        yield
    finally:
        group.reshard()


def whole_tree(tree: Any) -> Any:
    """Return nested mappings with divided tensors [...] as complete ones, on the CPU; all processes call it."""
    if is_mapping(tree):
        return {key: whole_tree(value) for key, value in tree.items()}
    return cast(Any, tree).full_tensor().cpu() if is_divided(tree) else tree


def divided_like(value: Tensor, other: Tensor) -> Tensor:
    """Return this process's part of a complete tensor [...] if `other` [...] is divided and of equal shape; else
    `value`.
    """
    if not is_divided(other) or is_divided(value) or value.shape != other.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    divided = cast(Any, other)
    return distribute_tensor(value.to(other.device), divided.device_mesh, divided.placements, src_data_rank=None)


def divided_state(module: Weights, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state of complete tensors, name -> [...], for `load_state_dict` of `module`, of which weights may be
    divided.
    """
    own = module.state_dict()
    return {name: divided_like(value, own[name]) if name in own else value for name, value in state.items()}
