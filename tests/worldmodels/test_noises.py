"""Rollouts under several noises: the policy sees the first, and success counts once all have succeeded."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.core.returns import SUCCESS
from robopolicy.core.spec import STATE, Field, WorldSpec
from worldmodels.env import ImaginedWorld
from worldmodels.protocol import Context, Imagined

SPEC = WorldSpec(
    name="luck",
    observation={STATE: Field((1,))},
    action=Field((1,), low=-1.0, high=1.0),
    rewards=("progress", SUCCESS),
    fps=10.0,
    horizon=12,
    terminate_on_success=True,
)


@dataclass
class Luck:
    """A model whose success comes in a step of the noise's choosing, between 1 and 9, and lasts one step."""

    spec: WorldSpec = SPEC
    success_bonus: float = 5.0
    context: int = 1

    def initial(self, context, seeds):
        """Choose the step of success from the seed."""
        return {"step": torch.zeros(len(seeds)), "when": torch.from_numpy(1 + np.asarray(seeds) % 9).float()}

    def imagine(self, latent, actions):
        """Count a step."""
        step = latent["step"] + 1
        success = step == latent["when"]
        rewards = {"progress": actions[:, 0].float(), SUCCESS: self.success_bonus * success.float()}
        outcome = Imagined({STATE: step[:, None]}, rewards, success, success, torch.zeros(len(step)))
        return {"step": step, "when": latent["when"]}, outcome


def starts(seeds):
    return Context({STATE: np.zeros((len(seeds), 1, 1), dtype=np.float32)}, np.array([""] * len(seeds)))


def play(world, seeds, chunk):
    """Success [R], steps until it [R], and what it paid [R]."""
    world.reset(seeds=seeds)
    paid, lengths = np.zeros(len(seeds)), np.zeros(len(seeds), dtype=int)
    for _ in range(12 // chunk):
        step = world.step(np.full((len(seeds), chunk, 1), 0.5))
        paid += step.rewards[SUCCESS].sum(1)
        lengths += step.valid.sum(1)
    return step.success, lengths, paid


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_success_comes_with_the_last_noise_to_succeed(chunk):
    seeds = np.arange(6)
    world = ImaginedWorld(Luck(), starts, 6, noises=2)
    drawn = [1 + each % 9 for each in world._noise_seeds(seeds)]
    success, lengths, paid = play(world, seeds, chunk)
    assert success.all() and lengths.tolist() == np.maximum(*drawn).tolist() and paid.tolist() == [5.0] * 6
    alone, lengths, paid = play(ImaginedWorld(Luck(), starts, 6), seeds, chunk)
    assert alone.all() and lengths.tolist() == drawn[0].tolist() and paid.tolist() == [5.0] * 6
    assert (drawn[0] != drawn[1]).any()


class Unlucky(Luck):
    """A model that succeeds only under the noise of an episode's own seed."""

    def initial(self, context, seeds):
        """Succeed in step 3 for small seeds, those of episodes, and never for others."""
        when = np.where(np.isin(seeds, range(100)), 3, 99)
        return {"step": torch.zeros(len(seeds)), "when": torch.from_numpy(when).float()}


def test_success_that_hangs_on_the_noise_does_not_count():
    success, lengths, paid = play(ImaginedWorld(Unlucky(), starts, 4), np.arange(4), 2)
    assert success.all() and lengths.tolist() == [3] * 4
    success, lengths, paid = play(ImaginedWorld(Unlucky(), starts, 4, noises=3), np.arange(4), 2)
    assert not success.any() and lengths.tolist() == [12] * 4 and not paid.any()


@pytest.mark.parametrize("noises", [1, 2])
def test_a_flash_of_success_neither_counts_nor_pays_where_it_must_last(noises):
    for chunk in (1, 4):
        world = ImaginedWorld(Luck(), starts, 6, noises=noises, debounce=2)
        success, lengths, paid = play(world, np.arange(6), chunk)
        assert not success.any() and lengths.tolist() == [12] * 6 and not paid.any()


class Lasting(Luck):
    """A model whose success, once come, stays."""

    def imagine(self, latent, actions):
        """Count a step."""
        latent, outcome = super().imagine(latent, actions)
        success = latent["step"] >= latent["when"]
        rewards = {**outcome.rewards, SUCCESS: self.success_bonus * success.float()}
        return latent, replace(outcome, success=success, terminated=success, rewards=rewards)


@pytest.mark.parametrize("chunk", [1, 4])
def test_success_counts_once_it_has_lasted_under_every_noise(chunk):
    world = ImaginedWorld(Lasting(), starts, 6, noises=2, debounce=3)
    latest = np.max([1 + each % 9 for each in world._noise_seeds(np.arange(6))], 0)
    success, lengths, paid = play(world, np.arange(6), chunk)
    assert success.all() and lengths.tolist() == (latest + 2).tolist() and paid.tolist() == [5.0] * 6


def test_a_snapshot_holds_all_noises():
    world = ImaginedWorld(Luck(), starts, 5, noises=2)
    world.reset(seeds=range(5))
    world.step(np.zeros((5, 2, 1)))
    saved = world.snapshot()
    first = [world.step(np.zeros((5, 2, 1))).success for _ in range(5)]
    world.restore(saved)
    again = [world.step(np.zeros((5, 2, 1))).success for _ in range(5)]
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert {"latent/step", "latent_1/step"} <= saved.arrays.keys()


def test_it_is_a_setting_and_refused_where_a_return_decides():

    with pytest.raises(ConfigError, match="return decides"):
        ImaginedWorld(Luck(replace(SPEC, success="return >= 3")), starts, 2, noises=2)
    with pytest.raises(ConfigError, match="noises"):
        ImaginedWorld(Luck(), starts, 2, noises=0)
    assert compose(["world.imagination.noises=2"]).world.imagination.noises == 2
