"""Single chunks from demonstrated states, paid by where the demonstration went; second attempts within them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from seeing_toys import denoising_policy

from robopolicy.rl.algorithm import build_algorithm
from robopolicy.training.collection import make_collector, start_pool
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.demonstrations import demonstrate, newest_vectors, reached_share
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from sims.registry import make_expert, make_world

CONFIG = FinetuneConfig(
    algorithm="grpo", allocator="one_chunk", hint="pivot", rewards=("as_demonstrated",), iterations=2, groups=4,
    group_size=3, num_initial_states=4, epochs=1, minibatch=64, evaluate_every=0, learning_rate=1e-3,
    auxiliaries=("kl_base",),
)  # fmt: skip


def demonstrated(world):
    return demonstrate(world, make_expert("reach_planar", world.spec), start_pool(0, 4)[0])


@pytest.mark.checks("allocator/one_chunk", "PivotRL")
def test_what_a_demonstration_observed_follows_from_its_states():
    world = make_world("reach_planar", 4)
    expert, demonstrations = make_expert("reach_planar", world.spec), demonstrated(world)
    state, share = demonstrations.state(2, 0.5)
    assert state is not None
    observation = world.restore(state, np.array([1]))
    for _ in range(3):
        observation = world.step(expert.act(observation)[:, None]).observation
    np.testing.assert_allclose(newest_vectors(observation)[1], demonstrations.vector(2, share, 3), atol=1e-6)
    last = demonstrations.vectors[2][-1]
    assert demonstrations.vector(2, share, 999) is last and demonstrations.vector(9, 0.5, 1) is None


@pytest.mark.checks("allocator/one_chunk", "PivotRL")
def test_every_episode_is_one_chunk_and_is_compared_after_as_long():
    world = make_world("reach_planar", 4)
    demonstrations, policy = demonstrated(world), denoising_policy(world)
    algorithm, draws = build_algorithm(CONFIG), torch.Generator().manual_seed(0)
    collector = make_collector(world, policy, algorithm, CONFIG, 0, draws, demonstrations)
    rollouts = collector.collect(0)
    assert rollouts.shape == (12, 1) and bool(rollouts.ended.all())
    for row in range(12):
        start, share = (float(rollouts.extras[name][row, 0]) for name in ("start", "hint"))
        expected = demonstrations.vector(int(start), share, int(rollouts.duration[row, 0]))
        assert rollouts.extras["demonstrated"][row, 0].tolist() == pytest.approx(np.asarray(expected).tolist())
    paid = algorithm.rewards[0](rollouts, None)
    prepared = paid.with_extras(advantage=torch.ones(12, 1, 1), episode_steps=torch.ones(12, 1, dtype=torch.int64))
    collector.observe(paid, prepared)
    rates = collector.hint.rates
    assert len(rates) == 4 and sum(rates.values()) == pytest.approx(float(paid.row_return.sum()) / 3)


@pytest.mark.checks("allocator/retry_state", "Agent-RLVR")
def test_a_second_attempt_begins_beyond_where_the_first_one_failed():
    world = make_world("reach_planar", 4)
    demonstrations, policy = demonstrated(world), denoising_policy(world)
    options = {"retry_state": {"per_failure": True, "rate": 1.0, "ahead": 0.2}}
    config = replace(CONFIG, allocator="retry_state", hint=None, rewards=("success_only",), options=options)
    draws = torch.Generator().manual_seed(0)
    rollouts = make_collector(world, policy, build_algorithm(config), config, 0, draws, demonstrations).collect(0)
    helped = rollouts.extras["helped"][:, 0]
    starts, fields = rollouts.extras["start"][:, 0], [value for _, value in sorted(rollouts.observation.items())]
    places = set()
    for start, shown in demonstrations.vectors.items():
        failures = (~helped & ~rollouts.row_success & (starts == start)).nonzero()[:, 0]
        attempts = (helped & (starts == start)).nonzero()[:, 0]
        path, begins = np.array(shown), []
        for failure in failures:
            episode = np.concatenate([value[failure, rollouts.alive[failure], -1].numpy() for value in fields], -1)
            begins.append(min(int((reached_share(episode, path) + 0.2) * len(path)), len(path) - 1))
        begins = [place for place in begins if place]
        assert len(attempts) == len(begins)
        for attempt, place in zip(attempts, begins, strict=True):
            first = np.concatenate([value[attempt, 0, -1].numpy() for value in fields], -1)
            np.testing.assert_allclose(first, path[place], atol=1e-6)
        places |= {place / len(path) for place in begins}
    assert len(places) > 1 and helped.any()


@pytest.mark.long
@pytest.mark.checks("PivotRL")
def test_a_run_learns_from_single_chunks():
    world = make_world("reach_planar", 4)
    demonstrations, policy = demonstrated(world), denoising_policy(world)
    policy.prepare_finetuning()
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    result = finetune(policy, None, world, CONFIG, guidance=Guidance(demonstrations=demonstrations))
    assert result.env_steps == 24
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
