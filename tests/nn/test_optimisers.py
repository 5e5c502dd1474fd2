"""Optimisers come back as they were: the same next update, and every state where the kernels want it."""

import copy

import pytest
import torch
from torch import nn

from robopolicy.core.errors import CheckpointError
from robopolicy.nn.optimisers import optimiser_tree, restore_optimiser


def updated(network: nn.Module, optimiser: torch.optim.Optimizer, times: int) -> None:
    """Take `times` steps on a loss that depends on the step alone."""
    for step in range(times):
        optimiser.zero_grad()
        network(torch.linspace(-1, 1, 6).reshape(2, 3) + step).square().sum().backward()
        optimiser.step()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_a_restored_optimiser_goes_on_as_if_never_stopped(options):
    network = nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.1, **options)
    updated(network, optimiser, 3)
    twin = copy.deepcopy(network)
    restored = torch.optim.AdamW(twin.parameters(), lr=0.1, **options)
    tree = optimiser_tree(optimiser)
    restore_optimiser(restored, tree)
    updated(network, optimiser, 4)  # the restored state is a copy: this must not reach it
    updated(twin, restored, 4)
    for ours, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("switch", ["fused", "capturable", None])
def test_the_count_of_updates_is_where_the_kernels_want_it(switch):
    """A parameter on the meta device stands for one on an accelerator, a checkpoint is read to the CPU."""
    network = nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.1)
    updated(network, optimiser, 1)
    tree = optimiser_tree(optimiser)
    for state in tree.values():
        state["step"] = state["step"].double()
    elsewhere = nn.Linear(3, 2, device="meta")
    target = torch.optim.AdamW(elsewhere.parameters(), lr=0.1)
    if switch is not None:
        target.param_groups[0][switch] = True
    restore_optimiser(target, tree)
    for parameter in elsewhere.parameters():
        state = target.state[parameter]
        assert state["exp_avg"].device == state["exp_avg_sq"].device == parameter.device
        assert state["step"].device.type == ("cpu" if switch is None else "meta")
        if switch is not None:
            assert state["step"].dtype == torch.float32  # fused kernels take no other


def test_moments_of_a_scalar_parameter_follow_it():
    scalar = nn.Parameter(torch.tensor(1.0))
    optimiser = torch.optim.Adam([scalar])
    scalar.square().backward()
    optimiser.step()
    elsewhere = nn.Parameter(torch.tensor(1.0, device="meta"))
    target = torch.optim.Adam([elsewhere])
    restore_optimiser(target, optimiser_tree(optimiser))
    devices = {name: value.device.type for name, value in target.state[elsewhere].items()}
    assert devices == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_placement_agrees_with_torch():
    """What `load_state_dict` of torch itself makes of the same state."""
    network = nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
    updated(network, optimiser, 2)
    for capturable in (False, True):
        twins = [torch.optim.AdamW(nn.Linear(3, 2, device="meta").parameters(), lr=0.1) for _ in range(2)]
        for twin in twins:
            twin.param_groups[0]["capturable"] = capturable
        groups = twins[0].state_dict()["param_groups"]
        twins[0].load_state_dict({"state": optimiser.state_dict()["state"], "param_groups": groups})
        restore_optimiser(twins[1], optimiser_tree(optimiser))
        placed = [
            [
                (name, value.device, value.dtype, value.shape)
                for state in twin.state.values()
                for name, value in state.items()
            ]
            for twin in twins
        ]
        assert placed[0] == placed[1]


def test_another_number_of_parameters_is_refused():
    network = nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="3 parameters, this one has 2"):
        restore_optimiser(optimiser, {str(number): {} for number in range(3)})
