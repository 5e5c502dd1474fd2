"""Named generators and episode seeds: stable, distinct, and small enough for floats and Arrow."""

import numpy as np
import torch

from robopolicy.core.randomness import Generators, derive, episode_seeds, uniforms


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
    assert derive(0, "a/b") == derive(0, "a/b")
    assert len({derive(0, "a"), derive(0, "b"), derive(1, "a"), derive(0, "a/b")}) == 4


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
