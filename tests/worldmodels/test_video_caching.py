"""A video model that remembers its transformer's branches: as a slow reference does, exactly where all are computed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dot_world import IMAGE, SPEC, imagined_world, recorded
from torch import Tensor
from torch.nn.functional import cosine_similarity

from robopolicy.core.errors import ConfigError
from robopolicy.inference.caching import CachePlan, FirstBlockCaching
from robopolicy.inference.calibration import Recorder, calibrate_model
from robopolicy.inference.schedules import CacheConfig, make_plan
from worldmodels.configuration import VideoConfig
from worldmodels.initial_states import context_at
from worldmodels.protocol import Cacheable
from worldmodels.video.model import VideoModel

K, CHUNK = 6, 3
BASE = VideoConfig(size="tiny", memory=2, stride=2, chunk=CHUNK, precision="float32")
CONFIG = replace(BASE, edm=replace(BASE.edm, steps=K))


@pytest.fixture(scope="module")
def episodes():
    return recorded(20, seed=3)


@pytest.fixture(scope="module")
def model(episodes: Any) -> VideoModel:
    """Weights that nobody has trained, but none of which is zero: a fresh model's gates are closed."""
    made = VideoModel.build(CONFIG, SPEC, episodes, 0)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in made.transformer.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=draws))
    return made.eval()


def plan_of(model: VideoModel, seed: int) -> CachePlan:
    updates = torch.rand(len(model.block_names), K, generator=torch.Generator().manual_seed(seed)) < 0.4
    updates[:, 0] = True
    return CachePlan.of(model.block_names, updates)


def generated(model: VideoModel, episodes: Any, steps: int = CHUNK) -> Tensor:
    begin = torch.tensor([0, 4, 9])
    latent = model.initial(context_at(episodes, begin, model.context), begin.numpy())
    actions = episodes.actions[begin[:, None] + torch.arange(steps)]
    return model._predict(latent, actions)


def test_a_plan_that_computes_everything_changes_no_bit(model: VideoModel, episodes: Any):
    every = CachePlan.of(model.block_names, torch.ones(len(model.block_names), K, dtype=torch.bool))
    assert isinstance(model, Cacheable)
    assert torch.equal(generated(model.with_caching(every), episodes), generated(model, episodes))
    assert model.caching is None


class Held:
    """In the place of a method that computes a branch: answers with its last output where the table says so."""

    def __init__(self, method: Any, row: list[bool], pair: bool):
        self.method, self.row, self.pair, self.call = method, row, pair, 0

    def __call__(self, *given: Any) -> Any:
        if self.row[self.call % K]:
            self.output = self.method(*given)
        self.call += 1
        return self.output


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_plans_are_executed_as_a_slow_reference_does(model: VideoModel, episodes: Any, seed: int, monkeypatch: Any):
    plan = plan_of(model, seed)
    cached = generated(model.with_caching(plan), episodes)
    own = generated(model, episodes)
    net, rows = model.transformer, [list(row) for row in plan.updates]
    branches = [(net.fine[0], "_convolve")]
    for block in net.blocks:
        branches += [(block, "_attend"), (block, "_feed")]
    branches += [(block, "_convolve") for block in net.fine[1:]]
    memory = {}
    remember = net.remember

    def first(*given: Any) -> Any:  # the history is computed by the same blocks, once: hold nothing of it
        block_memory = remember(*given)
        for (block, name), row in zip(branches, rows, strict=True):
            monkeypatch.setattr(block, name, Held(getattr(block, name), row, name == "_attend"))
        memory["began"] = True
        return block_memory

    monkeypatch.setattr(net, "remember", first)
    slow = generated(model, episodes)
    assert memory and torch.allclose(cached, slow, atol=1e-6)
    assert not torch.allclose(cached, own, atol=1e-3), "held branches change what is imagined"


def test_calibration_is_the_cosine_of_every_two_steps(model: VideoModel, episodes: Any):
    begin = episodes.starts[:4]
    calibration = calibrate_model(model, episodes, begin, CHUNK, rows=3)
    recorder = Recorder()
    watched = model.with_caching(recorder)
    latent = watched.initial(context_at(episodes, begin, model.context), begin.numpy())
    watched.generate(latent, episodes.actions[begin[:, None] + torch.arange(CHUNK)])
    assert calibration.blocks == model.block_names and calibration.steps == K and calibration.rows == 4
    for block, outputs in enumerate(recorder.features):
        for one in range(K):
            for other in range(K):
                pair = outputs[one].flatten(1), outputs[other].flatten(1)
                assert float(calibration.similarity[block, one, other]) == pytest.approx(
                    float(cosine_similarity(*pair).mean()), abs=1e-5
                )
        changes = [(outputs[i] - outputs[j]).abs().mean() for i in range(K) for j in range(i)]
        assert float(calibration.surge[block]) == pytest.approx(float(torch.stack(changes).mean()), rel=1e-4)


@pytest.mark.parametrize("scheduler", ["uniform", "shared", "bac"])
def test_plans_of_every_scheduler_imagine_rows_apart(model: VideoModel, episodes: Any, scheduler: str):
    calibration = calibrate_model(model, episodes, torch.tensor([0, 4, 9]), CHUNK)
    plan = make_plan(calibration, CacheConfig(scheduler, budget=3, last_steps=1))
    cached = model.with_caching(plan)
    alone, together = imagined_world(cached, 1), imagined_world(cached, 3)
    alone.reset(seeds=[2])
    together.reset(seeds=[1, 2, 3])
    for _ in range(4):
        one, several = (world.step(np.full((rows, 1, 2), 0.5)) for world, rows in ((alone, 1), (together, 3)))
        assert np.abs(one.trace[IMAGE][0].astype(int) - several.trace[IMAGE][1].astype(int)).max() <= 1


def test_first_block_caching_plugs_in_and_misfits_are_refused(model: VideoModel, episodes: Any):
    never = generated(model.with_caching(FirstBlockCaching(0.0)), episodes)
    assert torch.equal(never, generated(model, episodes)), "every change is above nothing"
    with pytest.raises(ConfigError, match="another network"):
        model.with_caching(CachePlan(("a",), ((True,) * K,)))
    with pytest.raises(ConfigError, match="chains of 2 steps"):
        model.with_caching(CachePlan.of(model.block_names, torch.ones(len(model.block_names), 2, dtype=torch.bool)))
    with pytest.raises(ConfigError, match="exceed one chain"):
        calibrate_model(model, episodes, torch.tensor([0]), CHUNK + 1)
    with pytest.raises(ConfigError, match="at least 1"):
        calibrate_model(model, episodes, torch.tensor([], dtype=torch.long), CHUNK)
