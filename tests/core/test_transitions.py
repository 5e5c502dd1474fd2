"""Transitions are selected and joined column by column; what a part does not know, the whole does not."""

from dataclasses import replace

import pytest
import torch

from robopolicy.core.errors import DataError, NonFiniteError
from robopolicy.core.returns import discounted_sums
from robopolicy.core.transitions import Transitions


def steps(count=4, success=True):
    state = torch.arange(2.0 * count).reshape(count, 2)
    won = torch.arange(count) == count - 1
    reward = torch.arange(float(count))
    return Transitions(state, -state[:, :1], reward, state + 1, won, won if success else None)


def test_selecting_and_joining():
    part = steps().take(torch.tensor([3, 0]))
    assert part.reward.tolist() == [3.0, 0.0] and part.won.tolist() == [True, False] and part.episode is None
    assert steps().take(torch.tensor([True, False, False, True])).state.tolist() == [[0.0, 1.0], [6.0, 7.0]]
    whole = Transitions.join([steps(2), steps(3)])
    assert len(whole) == 5 and whole.won.tolist() == [False, True, False, False, True]
    mixed = Transitions.join([steps(2), steps(3, success=False)])
    assert len(mixed) == 5 and mixed.success is None
    with pytest.raises(DataError, match="do not record success"):
        _ = mixed.won
    with pytest.raises(NonFiniteError, match="transitions: action"):
        replace(steps(), action=torch.full((4, 1), torch.nan)).check()


def test_sums_start_anew_where_it_does_not_go_on():
    reward, discount = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 0.25, 0.5]])
    on = torch.tensor([[True, True, True]])
    assert discounted_sums(reward, discount, on).tolist() == [[1 + 0.5 * 3, 2 + 0.25 * 4, 4.0]]
    assert discounted_sums(reward, discount, torch.tensor([[True, False, True]])).tolist() == [[2.0, 2.0, 4.0]]
