"""VADE's sampler by hand: what it gains, and how beliefs fade on two scales."""

import numpy as np
import pytest

from robopolicy.rl.experimental.initial_states import VadeSampler
from robopolicy.rl.initial_states import MoppsSampler


def observe(sampler, index: list[int], won: list[float], episodes: float = 8.0):
    count = len(index)
    sampler.observe(np.array(index), np.array(won), np.full(count, episodes), np.zeros(count))


@pytest.mark.checks("sampler/vade")
def test_beliefs_fade_fast_where_they_are_measured_anew_and_slowly_everywhere():
    sampler = VadeSampler(visited=0.5, decay=0.9)
    observe(sampler, [0, 1], [6.0, 2.0])
    assert sampler.counts == {0: (1 + 6, 1 + 2), 1: (1 + 2, 1 + 6)}
    observe(sampler, [1], [8.0])
    # everywhere: 0.9 n + 0.1 of the prior's 1; then where it was visited: 0.5 n + 0.5, and what was seen
    assert sampler.counts[0] == pytest.approx((0.9 * 7 + 0.1, 0.9 * 3 + 0.1))
    assert sampler.counts[1] == pytest.approx((0.5 * (0.9 * 3 + 0.1) + 0.5 + 8, 0.5 * (0.9 * 7 + 0.1) + 0.5))
    for _ in range(200):
        observe(sampler, [1], [8.0])
    assert sampler.counts[0] == pytest.approx((1.0, 1.0), abs=1e-6), "nobody looked for long: back at the prior"


@pytest.mark.checks("sampler/vade")
def test_what_rarely_succeeds_gains_more_than_what_rarely_fails():
    """p (1 - p)^2 is .144, .148, .125, .063 and .009 at .4, 1/3, .5, .75 and .9; |p - 1/2| orders them otherwise."""
    rates = [0.75, 0.9, 0.5, 1 / 3, 0.4]
    proposals = {}
    for sampler in (VadeSampler(decay=1.0), MoppsSampler()):
        sampler.counts = {number: (1e6 * rate, 1e6 * (1 - rate)) for number, rate in enumerate(rates)}
        proposals[type(sampler)] = sampler.propose(5, 5, np.random.default_rng(0)).tolist()
    assert proposals[VadeSampler] == [3, 4, 2, 0, 1]
    assert proposals[MoppsSampler] == [2, 4, 3, 0, 1]
