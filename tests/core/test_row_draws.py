"""Random numbers of some rows are those that are drawn for them with all others."""

import pytest
import torch

from robopolicy.core.randomness import integers, normal, uniform
from robopolicy.core.row_draws import RowDraws

DRAWS = {
    "randn": lambda n, draws: torch.randn(n, 4, generator=draws),
    "randn of a shape": lambda n, draws: torch.randn((n, 4), generator=draws),
    "rand": lambda n, draws: torch.rand(n, generator=draws),
    "randint": lambda n, draws: torch.randint(9, (n, 2), generator=draws),
    "randint from": lambda n, draws: torch.randint(2, 9, size=(n, 2), generator=draws),
    "multinomial": lambda n, draws: torch.multinomial(torch.ones(5), n, replacement=True, generator=draws),
    "normal": lambda n, draws: normal((n, 3), draws),
    "normal along another axis": lambda n, draws: normal((3, n, 2), draws, axis=1).movedim(1, 0),
    "uniform": lambda n, draws: uniform((n, 3), draws),
    "integers": lambda n, draws: integers(50, (n, 3), draws),
    "globally": lambda n, draws: torch.randn_like(torch.empty(n, 2)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("own", [slice(0, None, 2), slice(2, None, 3)])
def test_rows_draw_their_numbers_of_the_whole_minibatch(name: str, own: slice):
    def drawn(count: int) -> torch.Tensor:
        torch.manual_seed(4)
        numbers = DRAWS[name](count, generator)
        return torch.cat([numbers.float().flatten(), torch.rand(1, generator=generator)])

    generator = torch.Generator().manual_seed(3)
    everything = drawn(23)
    rows = everything[:-1].reshape(23, -1)[own]
    generator.manual_seed(3)
    with RowDraws(23, own) as draws:
        part = drawn(len(rows))
    assert torch.equal(part[:-1].reshape(len(rows), -1), rows)
    assert torch.equal(part[-1], everything[-1])  # and the generator continues alike
    assert draws.shared == ["[1]"]


def test_draws_of_no_row_are_as_without_and_listed():
    generator = torch.Generator().manual_seed(3)
    alone = torch.randperm(5, generator=generator), torch.randn(3, generator=generator)
    generator.manual_seed(3)
    with RowDraws(9, slice(0, None, 2)) as draws:
        together = torch.randperm(5, generator=generator), torch.randn(3, generator=generator)
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert draws.shared == ["randperm", "[3]"]
    assert torch.equal(normal((5,), generator.manual_seed(3)), torch.randn(5, generator=generator.manual_seed(3)))
