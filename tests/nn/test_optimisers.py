"""Optimisers come back as they were: the same next update, and every state where the kernels want it."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning
from robopolicy.core.randomness import Generators
from robopolicy.nn.optimisers import (
    make_optimiser,
    optimiser_bytes,
    optimiser_tree,
    restore_optimiser,
    restore_weights,
    save_weights,
    saved_weights_bytes,
)
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit


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
    with pytest.raises(CheckpointError, match="3 parameters, but this one has 2"):
        restore_optimiser(optimiser, {str(number): {} for number in range(3)})


class Averages(torch.optim.Optimizer):
    """Stands for bitsandbytes' AdamW8bit, which has states of its own and counts in Python; not its arithmetic."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("step", 0)
                state.setdefault("state1", torch.zeros(parameter.shape, dtype=torch.uint8))
                state["step"] += 1
                state["state1"] += 1
                parameter -= group["lr"] * parameter.grad / state["step"]


class OnCuda(nn.Parameter):
    """A parameter that says it is on CUDA."""

    device = torch.device("cuda")


def test_averages_of_eight_bits_are_bitsandbytes_on_cuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(optim=SimpleNamespace(AdamW8bit=Averages)))
    made = make_optimiser("adamw8bit", [OnCuda(torch.ones(2))], 0.1, 0.01)
    assert isinstance(made, Averages)
    assert (made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"]) == (0.1, 0.01)
    with pytest.warns(RobopolicyWarning, match="updates smaller than 2\\^-9 of a weight are lost"):
        make_optimiser("adamw8bit", [OnCuda(torch.ones(2, dtype=torch.bfloat16))], 0.1, 0.01)
    with pytest.raises(ConfigError, match="no parameters to train"):
        make_optimiser("adamw8bit", [], 0.1, 0.0)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"'bitsandbytes' is not installed.*robopolicy\[cuda\]"):
        make_optimiser("adamw8bit", [OnCuda(torch.ones(2))], 0.1, 0.0)
    assert isinstance(make_optimiser("adamw", [nn.Parameter(torch.ones(2))], 0.1, 0.0), torch.optim.AdamW)


def test_without_cuda_they_are_refused():
    with pytest.raises(
        ConfigError, match=r"optimiser=adamw8bit stores its averages in 8 bits, which needs CUDA.* are on cpu"
    ):
        make_optimiser("adamw8bit", [nn.Parameter(torch.ones(2)), OnCuda(torch.ones(2))], 0.1, 0.0)
    with pytest.raises(ConfigError, match="set optimiser=adamw"):
        fit(nn.Linear(3, 2), iter(()), FitConfig(optimiser="adamw8bit"), Generators(0))


def test_states_of_any_kind_come_back_and_counts_in_python_as_numbers():
    network = nn.Linear(3, 2)
    optimiser = Averages(network.parameters(), 0.1, 0.0)
    updated(network, optimiser, 3)
    twin = copy.deepcopy(network)
    restored = Averages(twin.parameters(), 0.1, 0.0)
    restore_optimiser(restored, optimiser_tree(optimiser))
    state = restored.state[twin.weight]
    assert (state["step"], type(state["step"]), state["state1"].dtype) == (3, int, torch.uint8)
    updated(network, optimiser, 2)
    updated(twin, restored, 2)
    assert torch.equal(network.weight, twin.weight)
    assert torch.equal(optimiser.state[network.weight]["state1"], state["state1"])


def _rounded(seed: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return weights in bfloat16, as wide as those of a network, and the same in fp32."""
    drawn = (0.05 * torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))).bfloat16()
    return nn.Parameter(drawn), nn.Parameter(drawn.float())


def _learn(pair: tuple[nn.Parameter, ...], optimisers: list, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        gradient = torch.randn(64, 64, generator=generator).bfloat16()
        for weight, optimiser in zip(pair, optimisers, strict=True):
            weight.grad = gradient.to(weight.dtype)
            optimiser.step()


def test_weights_in_bfloat16_learn_as_in_fp32():
    """Against AdamW over fp32 weights, bit for bit; at lr 1e-5 bfloat16 alone would hardly move."""
    low, full = _rounded(0)
    before, optimisers = full.detach().clone(), [make_optimiser("adamw", [each], 1e-5, 0.01) for each in (low, full)]
    _learn((low, full), optimisers, 20, 1)
    master = optimisers[0].state[low]["master"]
    assert torch.equal(master, full) and torch.equal(low, full.bfloat16()) and low.dtype is torch.bfloat16
    assert (master != before).float().mean() > 0.99
    alone = nn.Parameter(before.bfloat16())
    _learn((alone,), [torch.optim.AdamW([alone], lr=1e-5, weight_decay=0.01)], 20, 1)
    away, lost = ((each.detach().float() - before).abs().sum() for each in (low, alone))
    assert lost < 0.2 * away


def test_a_step_that_is_taken_back_leaves_nothing_in_bfloat16_either():
    """As the learner does beyond its target KL: between accepted steps there is one that is undone, as in fp32."""
    pair = _rounded(0)
    optimisers = [make_optimiser("adamw", [each], 1e-5, 0.0) for each in pair]
    for turn in range(30):
        _learn(pair, optimisers, 1, turn)
        kept = [save_weights(optimiser) for optimiser in optimisers]
        _learn(pair, optimisers, 1, 100 + turn)
        for optimiser, before in zip(optimisers, kept, strict=True):
            restore_weights(optimiser, before)
    low, full = pair
    assert torch.equal(optimisers[0].state[low]["master"], full) and torch.equal(low, full.bfloat16())
    fresh, (other, _) = _rounded(1)[0], _rounded(1)
    optimiser = make_optimiser("adamw", [fresh], 1e-2, 0.0)
    before = save_weights(optimiser)
    _learn((fresh,), [optimiser], 1, 0)
    restore_weights(optimiser, before)
    assert torch.equal(fresh, other) and "master" not in optimiser.state[fresh]


def test_what_bfloat16_weights_learn_in_goes_on_after_a_checkpoint_and_after_they_were_put_back():
    low, full = _rounded(0)
    optimisers = [make_optimiser("adamw", [each], 1e-4, 0.0) for each in (low, full)]
    _learn((low, full), optimisers, 5, 1)
    again = nn.Parameter(low.detach().clone())
    restored = make_optimiser("adamw", [again], 1e-4, 0.0)
    restore_optimiser(restored, optimiser_tree(optimisers[0]))
    _learn((low, full, again), [*optimisers, restored], 5, 2)
    assert torch.equal(again, low) and torch.equal(low, full.bfloat16())
    with torch.no_grad():
        low.zero_()
    _learn((low,), optimisers[:1], 1, 3)
    assert low.abs().max() < 2e-4
    assert optimiser_bytes("adamw", [low, full]) == (12 + 8) * 64 * 64
    assert saved_weights_bytes("adamw", [low, full]) == (2 + 4 + 4) * 64 * 64
