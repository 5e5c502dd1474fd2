"""How cache plans are made: the schedulers against enumeration and by hand, and what they are made of."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import Field
from robopolicy.inference.caching import CachedSteps, CachePlan
from robopolicy.inference.calibration import Calibration, calibrate
from robopolicy.inference.samplers import own_sampler, sample
from robopolicy.inference.schedules import CacheConfig, anchors, bubbling_union, feed_forward_like, make_plan
from robopolicy.nn.configuration import DenoiserKind, FlowNoise
from robopolicy.nn.denoisers import Denoiser
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import PolicyKind
from robopolicy.policies.network import ChunkNetwork

STATE = "observation.state"
NAMES = ("0.attention", "0.feed_forward", "1.attention", "1.feed_forward")


def _random(blocks: int, steps: int, seed: int) -> Tensor:
    """Symmetric, ones on the diagonal, as cosines are; of any sign."""
    values = 2 * torch.rand(blocks, steps, steps, generator=torch.Generator().manual_seed(seed)) - 1
    similarity = (values + values.mT) / 2
    similarity.diagonal(dim1=1, dim2=2).fill_(1.0)
    return similarity


def _gain(similarity: Tensor, chosen: tuple[int, ...]) -> float:
    """What steps gain that are answered from the last chosen one before them, written out."""
    return sum(float(similarity[max(c for c in chosen if c <= step), step]) for step in range(len(similarity)))


def _chosen(row: Tensor) -> tuple[int, ...]:
    return tuple(row.nonzero()[:, 0].tolist())


def _calibration(steps: int = 12, seed: int = 0) -> Calibration:
    surge = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    return Calibration(NAMES, _random(4, steps, seed).double(), surge, 1)


@pytest.mark.checks("BAC")
@pytest.mark.parametrize("last", [0, 2])
def test_anchors_are_the_best_of_all_subsets(last: int):
    for steps, seed in itertools.product((1 + last, 5, 8), range(5)):
        similarity = _random(3, steps, seed)
        for budget in range(1 + last, steps + 1):
            anchor_rows = anchors(similarity, budget, last)
            assert (anchor_rows.sum(1) == budget).all()
            for matrix, row in zip(similarity, anchor_rows, strict=True):
                every = itertools.combinations(range(1, steps), budget - 1)
                allowed = [(0, *rest) for rest in every if set(range(steps - last, steps)) <= {0, *rest}]
                best = max(_gain(matrix, chosen) for chosen in allowed)
                assert _chosen(row) in allowed
                assert _gain(matrix, _chosen(row)) == pytest.approx(best, abs=1e-5)


@pytest.mark.checks("BAC")
def test_anchors_follow_what_is_alike():
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    similarity = (groups[:, None] == groups).double()[None]
    assert _chosen(anchors(similarity, 3)[0]) == (0, 3, 5)
    # Neighbouring steps alone say nothing about drift: here each is like the next one, and the ends are opposite.
    angle = torch.linspace(0, torch.pi, 9, dtype=torch.float64)
    assert _chosen(anchors((angle[:, None] - angle).cos()[None], 3)[0]) == (0, 3, 6)


@pytest.mark.checks("BAC")
def test_the_bubbling_union_by_hand():
    own = [{0, 5}, {0, 2}, {0, 7}, {0, 4}]  # attention, feed-forward, attention, feed-forward
    updates = torch.tensor([[step in row for step in range(8)] for row in own])
    surge = torch.tensor([0.3, 0.1, 0.4, 0.2])
    blocks = bubbling_union(updates, surge, feed_forward_like(NAMES), 2)
    # The two attentions surge most: the first is asked by both feed-forward layers, the second by the one after it.
    assert [set(_chosen(row)) for row in blocks] == [{0, 2, 4, 5}, {0, 2}, {0, 4, 7}, {0, 4}]
    every = bubbling_union(updates, surge, feed_forward_like(NAMES), 9)
    assert [set(_chosen(row)) for row in every] == [{0, 2, 4, 5}, {0, 2, 4}, {0, 4, 7}, {0, 4}]
    assert torch.equal(bubbling_union(updates, surge, feed_forward_like(NAMES), 0), updates)


@pytest.mark.checks("BAC")
def test_the_union_is_that_of_blocks_taken_one_after_another():
    for seed in range(10):
        draws = torch.Generator().manual_seed(seed)
        updates, surge = torch.rand(6, 9, generator=draws) < 0.3, torch.rand(6, generator=draws)
        spreads = torch.rand(6, generator=draws) < 0.6
        slow = updates.clone()
        for block in reversed(range(6)):  # from the end of the network to its beginning
            if block in surge.topk(3).indices:
                for after in range(block, 6):
                    if spreads[after]:
                        slow[block] |= slow[after]
        assert torch.equal(bubbling_union(updates, surge, spreads, 3), slow)


def test_which_blocks_spread_errors():
    assert feed_forward_like(NAMES).tolist() == [False, True, False, True]
    assert feed_forward_like(("down.0", "middle", "up.0")).all()


@pytest.mark.checks("BAC")
@pytest.mark.parametrize("last", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_plans_keep_to_their_budget(seed: int, last: int):
    calibration = _calibration(seed=seed)
    for budget in (last + 1, 5, 12):
        config = CacheConfig("uniform", budget, top_blocks=0, last_steps=last)
        plans = {name: make_plan(calibration, replace(config, scheduler=name)) for name in ("uniform", "shared", "bac")}
        for plan in plans.values():
            assert all(sum(row) == budget and all(row[12 - last :]) for row in plan.updates)
            assert plan.share == pytest.approx(budget / 12)
        assert plans["uniform"].masks <= 2 and plans["shared"].masks <= 2
        united = make_plan(calibration, replace(config, scheduler="bac", top_blocks=2))
        own = torch.tensor(plans["bac"].updates)
        added = torch.tensor(united.updates) & ~own
        assert not added[[0, 3]].any()  # blocks 1 and 2 surge most
        assert not (added[1:3] & ~(own[1] | own[3])).any()
        assert plans["bac"].share <= united.share <= 1
        assert (united.scheduler, united.budget) == ("bac", budget)


def test_uniform_steps_are_evenly_spaced():
    calibration = _calibration()
    steps = [make_plan(calibration, CacheConfig("uniform", 4, last_steps=last)).to_json()["updates"] for last in (0, 1)]
    assert steps == [[[0, 3, 6, 9]] * 4, [[0, 3, 7, 11]] * 4]


def test_a_strangers_scheduler_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "scheduler_of_mine.py").write_text(
        "import torch\n"
        "def first(calibration, config):\n"
        "    return torch.arange(calibration.steps).expand(len(calibration.blocks), -1) < config.budget\n"
        "def none(calibration, config):\n"
        "    return torch.zeros(len(calibration.blocks), calibration.steps, dtype=torch.bool)\n"
        "def wrong(calibration, config):\n"
        "    return torch.ones(2, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    plan = make_plan(_calibration(), CacheConfig("scheduler_of_mine:first", 3))
    assert plan.to_json()["updates"] == [[0, 1, 2]] * 4
    with pytest.raises(ConfigError, match="first"):
        make_plan(_calibration(), CacheConfig("scheduler_of_mine:none", 3))
    with pytest.raises(ConfigError, match=r"wrong.*float32"):
        make_plan(_calibration(), CacheConfig("scheduler_of_mine:wrong", 3))
    with pytest.raises(ConfigError, match="uniform"):
        make_plan(_calibration(), CacheConfig("unifrom", 3))


def test_impossible_budgets_are_refused():
    with pytest.raises(ConfigError, match="at least 3"):
        CacheConfig(budget=2, last_steps=2)
    with pytest.raises(ConfigError, match="budget=0"):
        CacheConfig(budget=0, last_steps=0)
    with pytest.raises(ConfigError, match="negative"):
        CacheConfig(top_blocks=-1)
    with pytest.raises(ConfigError, match="12 steps"):
        make_plan(_calibration(), CacheConfig(budget=13))


CONFIG = DenoisingPolicyConfig(
    denoiser=DenoiserKind.TRANSFORMER, width=16, depth=2, heads=2, sampling_steps=5, denoising_steps=20
)


def _policy(config: DenoisingPolicyConfig = CONFIG) -> DenoisingPolicy:
    draws = torch.Generator().manual_seed(0)
    values = {"action": 3 * torch.rand(50, 2, generator=draws) - 1, STATE: 5 * torch.randn(50, 3, generator=draws)}
    return DenoisingPolicy(config, {STATE: Field((3,))}, Field((2,), low=-1.0, high=1.0), fps=10, values=values)


def _observation() -> dict[str, Any]:
    return {STATE: torch.randn(5, 1, 3, generator=torch.Generator().manual_seed(1))}


def _denoiser(policy: DenoisingPolicy) -> Denoiser:
    assert isinstance(policy.network, ChunkNetwork)
    return policy.network.denoiser


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@torch.no_grad()
def _slow_calibration(policy: DenoisingPolicy, chain: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and changes of the blocks on latents [N, K, P, A], pair of steps by pair, row by row."""
    denoiser, condition = _denoiser(policy), policy.encode(_observation())["condition"]
    features: dict[int, list[Tensor]] = {}

    def keep(index: int, branch: Any) -> Tensor:
        features.setdefault(index, []).append(branch())
        return features[index][-1]

    steps = chain.shape[1]
    for step in range(steps):
        time = denoiser.encode_time(policy.schedule.times[step])
        denoiser.denoise(chain[:, step], time, denoiser.encode_condition(condition), keep)
    similarity, surge = torch.zeros(len(features), steps, steps), torch.zeros(len(features))
    for index, each in features.items():
        for row in range(len(chain)):
            for a, b in itertools.product(range(steps), repeat=2):
                one, other = each[a][row].flatten(), each[b][row].flatten()
                similarity[index, a, b] += one @ other / (one.norm() * other.norm()) / len(chain)
                surge[index] += (one - other).abs().mean() / len(chain) / (steps * (steps - 1))
    return similarity, surge


@pytest.mark.checks("BAC")
@pytest.mark.parametrize(
    ("config", "deterministic"),
    [
        (CONFIG, True),
        (CONFIG, False),
        (replace(CONFIG, kind=PolicyKind.FLOW, flow_noise=FlowNoise.LEARNED), False),
    ],
)
def test_a_calibration_is_what_the_blocks_do_in_the_chain(config: DenoisingPolicyConfig, deterministic: bool):
    policy = _policy(config)
    decision = policy.act(_observation(), _generator(), deterministic=deterministic)
    similarity, surge = _slow_calibration(policy, decision.latents["chain"][:, :-1])
    calibration = calibrate(policy, _observation(), _generator(), deterministic=deterministic)
    assert (calibration.blocks, calibration.rows, calibration.steps) == (NAMES, 5, 5)
    torch.testing.assert_close(calibration.similarity.float(), similarity, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(calibration.surge.float(), surge, atol=1e-5, rtol=1e-4)


def test_a_few_rows_at_a_time_are_averaged_alike():
    policy = _policy()
    alone = [
        calibrate(policy, {STATE: _observation()[STATE][row : row + 1]}, _generator(), rows=1).similarity
        for row in range(2)
    ]
    generator = _generator()
    # The rows draw their noise one after another: the first one here is the first one above.
    together = calibrate(policy, {STATE: _observation()[STATE][:2]}, generator, rows=1)
    # Features have 32 bits, and processors round them differently.
    torch.testing.assert_close(together.similarity[:, 0, 0], torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0)
    second = calibrate(policy, {STATE: _observation()[STATE][1:2]}, _after_one(policy), rows=1)
    torch.testing.assert_close(together.similarity, (alone[0] + second.similarity) / 2, atol=1e-6, rtol=0)


def _after_one(policy: DenoisingPolicy) -> torch.Generator:
    """Return the generator after the noise of one decision was drawn."""
    generator = _generator()
    torch.randn(1, *policy.noise_shape, generator=generator)
    return generator


def test_a_fine_tuned_policys_first_steps_are_its_bases():
    policy = _policy(replace(CONFIG, kind=PolicyKind.FLOW))
    before = calibrate(policy, _observation(), _generator())
    policy.prepare_finetuning(2)
    assert torch.equal(calibrate(policy, _observation(), _generator()).similarity, before.similarity)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.mul_(1.3)
    after = calibrate(policy, _observation(), _generator())
    assert torch.equal(after.similarity[:, :3, :3], before.similarity[:, :3, :3])
    assert not torch.allclose(after.similarity[:, 3:, 3:], before.similarity[:, 3:, 3:], atol=1e-4)


@pytest.mark.parametrize("kind", list(DenoiserKind))
@torch.no_grad()
def test_a_planned_chain_comes_near_the_whole_one(kind: DenoiserKind):
    policy = _policy(replace(CONFIG, denoiser=kind))
    start = torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(0))
    calibration = calibrate(policy, _observation(), _generator())
    whole = policy.trajectory(_observation(), start)[:, -1]
    denoiser, condition = _denoiser(policy), policy.encode(_observation())["condition"]

    def play(plan: CachePlan) -> Tensor:
        times, features = denoiser.encode_time(policy.schedule.times), denoiser.encode_condition(condition)
        steps = CachedSteps(denoiser, times, features, plan)
        return sample(own_sampler(policy.schedule, deterministic=True), steps.one, start)

    every = make_plan(calibration, CacheConfig("shared", 5))
    torch.testing.assert_close(play(every), whole, atol=1e-5, rtol=0)
    some = make_plan(calibration, CacheConfig("bac", 4, last_steps=1))
    assert 0 < float((play(some) - whole).abs().max()) < 0.5


def test_calibrations_without_anything_are_refused():
    policy = _policy(replace(CONFIG, denoiser=DenoiserKind.MLP, depth=1))
    with pytest.raises(ConfigError, match="depth 1"):
        calibrate(policy, _observation(), _generator())
    with pytest.raises(ConfigError, match="0 observations"):
        calibrate(_policy(), {STATE: torch.zeros(0, 1, 3)}, _generator())
