"""GAE against hand tables, a slow reference and its fixed point."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from robopolicy.rl.advantages.gae import chunk_rewards, gae, next_values, standardise


def _f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _flags(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


@pytest.mark.checks("advantage/gae")
def test_hand_table_of_single_steps():
    rewards, values, after = _f64([[[1.0], [2.0], [3.0]]]), _f64([[0.5, 1.0, 1.5]]), _f64([[1.0, 1.5, 2.0]])
    no = _flags([[False] * 3])
    estimate = gae(rewards, ~no[..., None], values, after, no, no, gamma=0.5, gae_lambda=0.5)
    # deltas 1 + .5 - .5 = 1, 2 + .75 - 1 = 1.75, 3 + 1 - 1.5 = 2.5; chained with .25
    torch.testing.assert_close(estimate.advantages, _f64([[1 + 0.25 * (1.75 + 0.25 * 2.5), 1.75 + 0.625, 2.5]]))
    torch.testing.assert_close(estimate.returns, estimate.advantages + values)


@pytest.mark.checks("advantage/gae")
def test_chunks_discount_inside_and_bootstrap_by_their_duration():
    rewards = _f64([[[1.0, 1.0, 1.0], [1.0, 1.0, 9.0]]])
    valid = _flags([[[True, True, True], [True, True, False]]])
    no = _flags([[False, False]])
    values, after = _f64([[0.0, 4.0]]), _f64([[4.0, 8.0]])
    torch.testing.assert_close(chunk_rewards(rewards, valid, 0.5), _f64([[1.75, 1.5]]))
    estimate = gae(rewards, valid, values, after, no, no, gamma=0.5, gae_lambda=1.0)
    second = 1.5 + 0.25 * 8.0 - 4.0
    torch.testing.assert_close(estimate.advantages, _f64([[1.75 + 0.125 * 4.0 + 0.125 * second, second]]))


@pytest.mark.parametrize(
    ("terminated", "ended", "expected"),
    [(True, True, 1.0 - 3.0), (False, True, 1.0 + 0.9 * 5.0 - 3.0), (False, False, 1.0 + 0.9 * 5.0 - 3.0 + 0.81 * 7.1)],
    ids=["terminated: no bootstrap, no chain", "time limit: bootstrap, no chain", "goes on: bootstrap and chain"],
)
def test_terminated_and_truncated_are_apart(terminated: bool, ended: bool, expected: float):
    rewards, values, after = _f64([[[1.0], [1.0]]]), _f64([[3.0, 3.0]]), _f64([[5.0, 7.0 + 7 / 3]])
    estimate = gae(
        rewards,
        _flags([[[True], [True]]]),
        values,
        after,
        _flags([[terminated, False]]),
        _flags([[ended, False]]),
        gamma=0.9,
        gae_lambda=0.9,
    )
    second = 1.0 + 0.9 * (7.0 + 7 / 3) - 3.0
    torch.testing.assert_close(estimate.advantages[0, 1], _f64([second])[0])
    wanted = expected if ended else 1.0 + 0.9 * 5.0 - 3.0 + 0.81 * second
    torch.testing.assert_close(estimate.advantages[0, 0], _f64([wanted])[0])


def test_a_row_that_had_ended_before_has_no_advantage():
    rewards = torch.full((1, 2, 2), 7.0)
    valid = _flags([[[True, True], [False, False]]])
    ended = _flags([[True, True]])
    estimate = gae(rewards, valid, torch.ones(1, 2), torch.ones(1, 2), ended, ended, 0.9, 0.9)
    assert estimate.advantages[0, 1] == 0
    assert estimate.returns[0, 1] == 1


def test_next_values_read_the_end_only_where_an_episode_was_cut():
    values = torch.tensor([[1.0, 2.0, 3.0]])
    at_end = torch.tensor([[10.0, 20.0, 30.0]])
    next_ones = next_values(values, at_end, _flags([[False, True, False]]))
    assert next_ones.tolist() == [[2.0, 20.0, 30.0]]


def _random_case(seed: int, rows: int, columns: int, steps: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, steps + 1, (rows, columns, 1), generator=generator)
    ended = torch.rand(rows, columns, generator=generator) < 0.3
    return {
        "rewards": torch.randn(rows, columns, steps, generator=generator, dtype=torch.float64),
        "valid": torch.arange(steps) < lengths,
        "values": torch.randn(rows, columns, generator=generator, dtype=torch.float64),
        "next_values": torch.randn(rows, columns, generator=generator, dtype=torch.float64),
        "terminated": ended & (torch.rand(rows, columns, generator=generator) < 0.5),
        "ended": ended,
    }


SHAPES = {
    "seed": st.integers(0, 999),
    "rows": st.integers(1, 4),
    "columns": st.integers(1, 6),
    "steps": st.integers(1, 3),
}


@pytest.mark.checks("advantage/gae")
@settings(max_examples=40, deadline=None)
@given(**SHAPES, gamma=st.floats(0.1, 1.0), gae_lambda=st.floats(0.0, 1.0))
def test_equals_a_slow_forward_sum(seed, rows, columns, steps, gamma, gae_lambda):
    case = _random_case(seed, rows, columns, steps)
    advantages = gae(**case, gamma=gamma, gae_lambda=gae_lambda).advantages
    for row in range(rows):
        for start in range(columns):
            total, factor = 0.0, 1.0
            for column in range(start, columns):
                discount = 1.0
                reward = 0.0
                for step in range(steps):
                    if case["valid"][row, column, step]:
                        reward += discount * float(case["rewards"][row, column, step])
                        discount *= gamma
                bootstrap = 0.0 if case["terminated"][row, column] else float(case["next_values"][row, column])
                total += factor * (reward + discount * bootstrap - float(case["values"][row, column]))
                factor *= discount * gae_lambda
                if case["ended"][row, column]:
                    break
            assert float(advantages[row, start]) == pytest.approx(total, abs=1e-10)


@settings(max_examples=40, deadline=None)
@given(**SHAPES, gamma=st.floats(0.1, 1.0), gae_lambda=st.floats(0.0, 1.0))
def test_is_zero_where_values_satisfy_the_bellman_equation(seed, rows, columns, steps, gamma, gae_lambda):
    case = _random_case(seed, rows, columns, steps)
    discount = gamma ** case["valid"].sum(-1).double()
    bootstrap = torch.where(case["terminated"], 0.0, case["next_values"])
    case["values"] = chunk_rewards(case["rewards"], case["valid"], gamma) + discount * bootstrap
    estimate = gae(**case, gamma=gamma, gae_lambda=gae_lambda)
    assert estimate.advantages.abs().max() < 1e-10


def test_standardise_ignores_what_is_masked_out():
    advantages = torch.tensor([[1.0, 3.0, 1e6]])
    scaled_advantages = standardise(advantages, _flags([[True, True, False]]))
    torch.testing.assert_close(scaled_advantages, torch.tensor([[-1.0, 1.0, 0.0]]))
    assert standardise(torch.full((2, 2), 5.0)).abs().max() == 0
