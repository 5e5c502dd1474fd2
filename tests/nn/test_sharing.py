"""Copies hold what learns for themselves and what rests together, and go on as copies do."""

import pytest
import torch
from torch import nn

from robopolicy.nn.sharing import copy_trainable, load_trainable_state, share_frozen, trainable_state


def network() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    made[0].requires_grad_(False)
    return made


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in module.named_parameters()}


def test_a_copy_has_its_own_of_what_learns_alone():
    module = network()
    other = copy_trainable(module)
    same = {name for name, place in addresses(other).items() if place == addresses(module)[name]}
    assert same == {"0.weight", "0.bias"}
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in module.state_dict().items())
    assert other[1].weight.requires_grad and not other[0].weight.requires_grad


def test_what_was_learned_can_be_taken_back():
    module = network()
    kept = {name: value.clone() for name, value in trainable_state(module).items()}
    assert set(module.state_dict()) - set(kept) == {"0.weight", "0.bias"} and "2.running_mean" in kept
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module(torch.randn(8, 3)).square().sum().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()
    assert not torch.equal(module[1].weight, before["1.weight"])
    load_trainable_state(module, kept)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with pytest.raises(KeyError, match=r"missing or unknown: 1.bias, 4.bias"):
        load_trainable_state(
            module, {name: value for name, value in kept.items() if name != "1.bias"} | {"4.bias": kept["1.bias"]}
        )
    module[0].requires_grad_()
    with pytest.raises(KeyError, match=r"0.bias, 0.weight"):  # they rested when the others were kept
        load_trainable_state(module, kept)


def test_equal_weights_that_rest_are_shared_and_no_others():
    module, other = network(), network()
    with torch.no_grad():
        other[0].bias += 1  # it differs
    expected = {name: value.clone() for name, value in other.state_dict().items()}
    share_frozen(module, other)
    same = {name for name, place in addresses(other).items() if place == addresses(module)[name]}
    assert same == {"0.weight"}
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    assert all(weight.requires_grad for weight in other[1].parameters())


def test_each_weight_is_given_away_once():
    module, other = (nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)) for _ in range(2))
    for weight in (*module.parameters(), *other.parameters()):
        nn.init.ones_(weight)
    share_frozen(module.requires_grad_(False), other)
    assert set(addresses(other).values()) == set(addresses(module).values())
    assert len(set(addresses(other).values())) == 2
