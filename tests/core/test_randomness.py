"""Named generators and episode seeds: stable, distinct, and small enough for floats and Arrow."""

import numpy as np
import pytest
import torch
from scipy import stats

from robopolicy.core.errors import RobopolicyWarning, SpecError
from robopolicy.core.randomness import (
    EpisodeGenerator,
    Generators,
    derive_seed,
    episode_seeds,
    integers,
    normal,
    uniform,
    uniforms,
    use_generator,
)


def test_episode_seeds_are_distinct_stable_and_exact_in_a_float():
    seeds = episode_seeds(3, "collect", 5000)
    assert seeds.dtype == np.int64
    assert len(np.unique(seeds)) == 5000
    assert seeds.min() >= 0
    assert seeds.max() < 2**53
    np.testing.assert_array_equal(seeds.astype(np.float64).astype(np.int64), seeds)
    np.testing.assert_array_equal(episode_seeds(3, "collect", 10), seeds[:10])


def test_purposes_and_roots_do_not_share_episodes():
    sets = [set(episode_seeds(root, name, 2000).tolist()) for root in (0, 1) for name in ("train", "evaluate")]
    for index, one in enumerate(sets):
        for other in sets[index + 1 :]:
            assert not one & other


def test_derived_seeds_depend_on_the_whole_name():
    assert derive_seed(0, "a/b") == derive_seed(0, "a/b")
    assert len({derive_seed(0, "a"), derive_seed(0, "b"), derive_seed(1, "a"), derive_seed(0, "a/b")}) == 4


def test_generators_are_independent_by_name_and_resume_where_they_were():
    first = Generators(7, "cpu")
    second = Generators(7, "cpu")
    torch.rand(5, generator=second["noise"])
    torch.testing.assert_close(torch.rand(3, generator=first["batches"]), torch.rand(3, generator=second["batches"]))
    kept = first.state()
    wanted = torch.rand(4, generator=first["batches"])
    third = Generators(7, "cpu")
    third.restore(kept)
    torch.testing.assert_close(torch.rand(4, generator=third["batches"]), wanted, rtol=0, atol=0)


def test_uniforms_are_a_function_of_the_seed_and_look_uniform():
    draws = uniforms(np.arange(20_000), 3)
    assert draws.shape == (20_000, 3)
    np.testing.assert_array_equal(uniforms(np.array([5]), 3)[0], draws[5])
    assert (draws >= 0).all()
    assert (draws < 1).all()
    np.testing.assert_allclose(draws.mean(0), 0.5, atol=0.01)
    np.testing.assert_allclose(np.corrcoef(draws.T), np.eye(3), atol=0.03)


def begun(seeds, noise: int = 0) -> EpisodeGenerator:
    generator = EpisodeGenerator(noise)
    generator.begin(np.asarray(seeds))
    return generator


def drawn(seeds, draw, noise: int = 0, decisions: int = 1) -> list[torch.Tensor]:
    """What `draw(generator, B)` gives the rows of these seeds in each of some decisions."""
    generator, values = begun(seeds, noise), []
    for _ in range(decisions):
        with generator.decision():
            values.append(draw(generator, len(seeds)))
    return values


OWN = {
    "normal": lambda g, rows: normal((rows, 3, 2), g),
    "normal_of_steps": lambda g, rows: normal((5, rows, 3), g, axis=1).movedim(1, 0),
    "normal_of_candidates": lambda g, rows: normal((rows * 4, 3), g).unflatten(0, (rows, 4)),
    "uniform": lambda g, rows: uniform((rows, 3), g, dtype=torch.float64),
    "integers": lambda g, rows: integers(2**62, (rows, 3), g),
    "two_draws": lambda g, rows: torch.cat([normal((rows, 3), g), uniform((rows, 2), g)], 1),
}
WEIGHTS = torch.tensor([0.2, 0.5, 0.3])
STRANGERS = {
    "randn": lambda g, rows: torch.randn((rows, 3, 2), generator=g, device=g.device),
    "randn_of_numbers": lambda g, rows: torch.randn(rows * 4, 3, generator=g).unflatten(0, (rows, 4)),
    "randn_of_steps": lambda g, rows: torch.randn(5, rows, 3, generator=g).movedim(1, 0),
    "global_randn": lambda g, rows: torch.randn(rows, 3),
    "randn_like": lambda g, rows: torch.randn_like(torch.zeros(rows, 3)),
    "rand": lambda g, rows: torch.rand(size=(rows, 3), generator=g),
    "normal": lambda g, rows: torch.normal(0.5, 2.0, size=(rows, 3), generator=g),
    "normal_of_means": lambda g, rows: torch.normal(torch.zeros(rows, 3), torch.ones(3), generator=g),
    "normal_": lambda g, rows: torch.zeros(rows, 3).normal_(1.0, 0.5, generator=g),
    "uniform_": lambda g, rows: torch.zeros(rows, 3).uniform_(-1, 1, generator=g),
    "randint": lambda g, rows: torch.randint(1, 1000, (rows, 3), generator=g),
    "bernoulli": lambda g, rows: torch.bernoulli(torch.full((rows, 64), 0.5), generator=g),
    "exponential_": lambda g, rows: torch.zeros(rows, 3).exponential_(generator=g),
    "multinomial": lambda g, rows: torch.multinomial(WEIGHTS.expand(rows, 3), 20, True, generator=g),
    "distribution": lambda g, rows: torch.distributions.Normal(torch.zeros(rows, 3), 1.0).sample(),
    "categorical": lambda g, rows: torch.distributions.Categorical(WEIGHTS.expand(rows, 64, 3)).sample(),
}


@pytest.mark.parametrize(
    "draw", [*OWN.values(), *STRANGERS.values()], ids=[*OWN, *(f"torch_{name}" for name in STRANGERS)]
)
def test_what_a_row_draws_is_its_episodes_alone(draw):
    seeds = np.arange(100, 107)
    whole = drawn(seeds, draw, decisions=3)
    order = [4, 1, 6]
    for one, some in zip(whole, drawn(seeds[order], draw, decisions=3), strict=True):
        torch.testing.assert_close(some, one[order], rtol=0, atol=0)
    for other in (whole[1], drawn(seeds + 50, draw)[0], drawn(seeds, draw, noise=1)[0]):
        assert not torch.equal(other, whole[0])
    assert len({tuple(row.flatten().tolist()) for row in whole[0]}) == len(seeds)


def test_an_episode_that_begins_later_in_another_row_draws_the_same():
    wanted = drawn([5, 6], OWN["two_draws"], decisions=2)
    generator = begun([1, 2, 3])
    for _ in range(4):
        with generator.decision():
            normal((3, 9), generator)
    generator.begin([6, 5], rows=[0, 2])
    for each in wanted:
        with generator.decision(np.array([0, 2])):
            torch.testing.assert_close(OWN["two_draws"](generator, 3)[[2, 0]], each, rtol=0, atol=0)


def test_a_part_of_the_rows_draws_what_all_rows_would_draw_for_them():
    rows, draws = np.array([2, 0]), EpisodeGenerator(1)
    draws.begin([5, 6, 7])
    for first in (0, 3):
        with draws.decision():
            normal([3, first], draws)
            with draws.part(rows) as part:
                own = normal([2, 4], part)
            assert torch.equal(own, normal([3, 4], draws)[rows])


def test_an_ordinary_generator_draws_what_torch_draws():
    one, two = (torch.Generator().manual_seed(3) for _ in range(2))
    torch.testing.assert_close(normal((4, 3), one), torch.randn(4, 3, generator=two), rtol=0, atol=0)
    torch.testing.assert_close(normal((2, 4), one, axis=1), torch.randn(2, 4, generator=two), rtol=0, atol=0)
    torch.testing.assert_close(
        uniform((40,), one, dtype=torch.float64), torch.rand(40, generator=two, dtype=torch.float64), rtol=0, atol=0
    )
    torch.testing.assert_close(integers(99, (40,), one), torch.randint(99, (40,), generator=two), rtol=0, atol=0)


def test_normals_have_the_moments_of_normals_and_nothing_follows_from_a_neighbour():
    """Episodes of adjacent seeds, decisions and numbers in a row: [decision, seed, number]."""
    values = torch.stack(drawn(np.arange(400), lambda g, rows: normal((rows, 40), g), decisions=20)).double()
    count, flat = values.numel(), values.flatten()
    error = count**-0.5
    assert abs(float(flat.mean())) < 4 * error
    assert abs(float(flat.var()) - 1) < 4 * 2**0.5 * error
    assert abs(float((flat**3).mean())) < 4 * 15**0.5 * error
    assert abs(float((flat**4).mean()) - 3) < 4 * 96**0.5 * error
    assert stats.kstest(flat.numpy(), "norm").pvalue > 1e-3
    for axis in range(3):
        size = values.shape[axis]
        for by in (1, 2, 7):
            first, second = values.narrow(axis, 0, size - by), values.narrow(axis, by, size - by)
            for one, other in ((first, second), (first**2 - 1, second**2 - 1)):
                assert abs(float((one * other).mean())) < 4.5 * (one * other).std() * first.numel() ** -0.5
    noises = torch.stack([drawn(np.arange(400), lambda g, rows: normal((rows, 40), g), noise=n)[0] for n in range(8)])
    assert abs(float((noises[1:] * noises[:-1]).mean())) < 4.5 * noises[1:].numel() ** -0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniforms_of_rows_stay_below_one(dtype):
    values = drawn(np.arange(50), lambda g, rows: uniform((rows, 2000), g, dtype=dtype))[0]
    assert values.dtype == dtype and bool((values >= 0).all()) and bool((values < 1).all())
    np.testing.assert_allclose(values.double().mean(), 0.5, atol=0.01)


def test_the_numbers_of_strangers_have_the_law_that_they_ask_for():
    rows = np.arange(3000)
    values = {name: drawn(rows, draw)[0].double() for name, draw in STRANGERS.items()}
    for name in ("randn", "randn_of_steps", "global_randn", "randn_like", "normal_of_means", "distribution"):
        assert stats.kstest(values[name].flatten().numpy(), "norm").pvalue > 1e-3, name
    assert stats.kstest((values["normal"].flatten().numpy() - 0.5) / 2, "norm").pvalue > 1e-3
    assert stats.kstest((values["normal_"].flatten().numpy() - 1) / 0.5, "norm").pvalue > 1e-3
    assert stats.kstest(values["rand"].flatten().numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest((values["uniform_"].flatten().numpy() + 1) / 2, "uniform").pvalue > 1e-3
    assert stats.kstest(values["exponential_"].flatten().numpy(), "expon").pvalue > 1e-3
    assert (values["randint"].min(), values["randint"].max()) == (1, 999)
    for name in ("multinomial", "categorical"):
        shares = torch.bincount(values[name].flatten().long()) / values[name].numel()
        np.testing.assert_allclose(shares, WEIGHTS, atol=0.01)
    np.testing.assert_allclose(values["bernoulli"].mean(), 0.5, atol=0.01)
    alone = drawn(rows, lambda g, count: torch.multinomial(WEIGHTS.expand(count, 3), 2))[0]
    assert bool((alone[:, 0] != alone[:, 1]).all())
    np.testing.assert_allclose(torch.bincount(alone[:, 0]) / len(rows), WEIGHTS, atol=0.03)


def test_what_cannot_be_of_rows_is_said_and_global_randomness_stays_as_it_was():
    state = torch.get_rng_state()
    with pytest.warns(RobopolicyWarning, match=r"shape \[2\] for 5 rows .* world.batch_size"):
        first = drawn(range(5), lambda g, rows: torch.rand(2))[0]
    assert torch.equal(state, torch.get_rng_state())
    with pytest.warns(RobopolicyWarning, match="has no per-row replacement"):
        drawn(range(5), lambda g, rows: torch.poisson(torch.ones(rows), generator=g))
    with pytest.warns(RobopolicyWarning):  # what nobody owns is the same for all
        assert torch.equal(first, drawn(range(7, 10), lambda g, rows: torch.rand(2))[0])


def test_a_policy_that_draws_by_torch_later_only_is_said_once_and_watched_from_then_on():
    generator = begun([1, 2, 3])
    for _ in range(2):  # an unwatched decision, since the first drew nothing by torch
        with generator.decision():
            normal((3, 2), generator)
    with pytest.warns(RobopolicyWarning, match="world.batch_size"), generator.decision():
        torch.randn(3, 2, generator=generator)
    with generator.decision():
        values = torch.randn(3, 2, generator=generator)
    torch.testing.assert_close(
        values, drawn([1, 2, 3], lambda g, rows: torch.randn(rows, 2), decisions=4)[3], rtol=0, atol=0
    )


def test_draws_from_the_global_generator_are_of_rows_within_drawing_from():
    def draw(generator: EpisodeGenerator, rows: int) -> torch.Tensor:
        with use_generator(generator, torch.device("cpu")):
            return torch.randn(rows, 2)

    state = torch.get_rng_state()
    whole = drawn(range(6), draw)[0]
    torch.testing.assert_close(drawn([3, 1], draw)[0], whole[[3, 1]], rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(SpecError, match="begin"), EpisodeGenerator(0).decision():
        pass
    with pytest.raises(SpecError, match="axis 0 must be the row axis"):
        drawn(range(6), lambda g, rows: normal((4, 2), g))
