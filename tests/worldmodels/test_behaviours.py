"""Recorded behaviours act in a model of their world: in one that is true, in one that flatters, and who cannot."""

from dataclasses import replace

import numpy as np
import point_world
import pytest
import torch
from point_world import SPEC

from robopolicy.building import behaviours as building
from robopolicy.building.behaviours import Behaviour, imagined_success, warnings_of
from robopolicy.configuration import compose
from robopolicy.configuration.sections.run import ImaginationSection, WorldSection
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit
from robopolicy.verbs.worldmodel import note_unread_cameras, warn_of_successes
from worldmodels.configuration import EnsembleConfig
from worldmodels.ensemble import EnsembleModel
from worldmodels.env import ImaginedWorld

pytestmark = pytest.mark.long


class Goes:
    """Goes to the goal at full speed, or only starts to."""

    def __init__(self, gain=2.0):
        self.gain = gain

    def reset(self, rows=None):
        """Nothing to forget."""

    def act(self, observation):
        """Return actions along the way to the goal."""
        return np.clip(self.gain * observation[ENVIRONMENT_STATE][:, -1, 2:], -1, 1)


def recorded_by(actor, count=60, steps=12):
    """Episodes of a controller in the point world, in which nothing is random but the beginning."""
    generator = torch.Generator().manual_seed(4)
    positions, goals, actions, lengths, progress, won = [], [], [], [], [], []
    for _ in range(count):
        position, goal = (2 * torch.rand(2, generator=generator) - 1 for _ in range(2))
        positions.append(position)
        for step in range(steps):
            seen = {ENVIRONMENT_STATE: torch.cat([goal, goal - position]).numpy()[None, None]}
            actions.append(torch.from_numpy(actor.act(seen))[0].float())
            after = position + point_world.GAIN * actions[-1]
            progress.append((goal - position).norm() - (goal - after).norm())
            won.append((goal - after).norm() < 0.15)
            position = after
            positions.append(position)
            if won[-1] or step == steps - 1:
                lengths.append(step + 1)
                goals.append(goal.expand(step + 2, 2))
                break
    return point_world.assembled(SPEC, positions, goals, actions, lengths, progress, won)


def test_recordings_that_hardly_fail_and_leave_no_room_for_failures_are_named(capsys):
    warn_of_successes(recorded_by(Goes(0.1), count=10), transitions=20)
    assert not capsys.readouterr().out
    warn_of_successes(recorded_by(Goes(), count=10, steps=40), transitions=20)
    assert "100% of the recorded episodes succeed" in (said := " ".join(capsys.readouterr().out.split()))
    assert "set worldmodel.transitions=" in said


def test_cameras_that_a_model_does_not_read_are_named(capsys):
    config = EnsembleConfig(members=2, width=8, depth=1, head_width=8)
    model = EnsembleModel.build(config, SPEC, recorded_by(Goes(), count=4), 0)
    note_unread_cameras(compose([]), model)
    assert not capsys.readouterr().out
    note_unread_cameras(compose(["world.cameras=[top]"]), model)
    assert "kind=ensemble does not read the images of top" in (said := " ".join(capsys.readouterr().out.split()))
    assert "worldmodel.kind=latent_ensemble" in said


@pytest.fixture(scope="module")
def learned():
    torch.set_num_threads(1)
    train, held = point_world.recorded().split(0.1, torch.Generator().manual_seed(0))
    model = EnsembleModel.build(EnsembleConfig(members=2, width=48, depth=2, head_width=48), SPEC, train, seed=0)
    generators = Generators(0)
    fit(model, model.batches(train, generators["batches"]), FitConfig(steps=400, learning_rate=3e-3), generators)
    model.calibrate(held)
    return model.eval()


@pytest.fixture(scope="module")
def behaviours():
    actors = {"fast": Goes(), "slow": Goes(0.2)}
    return [Behaviour(name, actor, recorded_by(actor)) for name, actor in actors.items()]


SECTION = WorldSection(name="points", batch_size=32)


def test_a_true_model_repeats_what_was_recorded(learned, behaviours):
    figures = imagined_success(SECTION, learned, behaviours, 50, 0)
    assert list(figures) == ["fast", "slow"] and figures["fast"]["episodes"] == 50
    assert figures["fast"]["recorded"] > 0.9 > 0.5 > figures["slow"]["recorded"]
    for row in figures.values():
        assert abs(row["imagined"] - row["recorded"]) <= 0.1
    assert warnings_of(figures) == []


def test_a_model_that_sees_success_too_soon_is_found_out(learned, behaviours):
    threshold = learned.heads.success_threshold.clone()
    learned.heads.success_threshold.fill_(-1e6)
    figures = imagined_success(SECTION, learned, behaviours[1:], 50, 0)
    learned.heads.success_threshold.copy_(threshold)
    assert figures["slow"]["imagined"] == 1
    (warning,) = warnings_of(figures)
    assert "flatters slow: 100% of its episodes" in warning
    assert "undercounts a" in warnings_of({"a": {"recorded": 0.5, "imagined": 0.3}})[0]


def test_who_reads_what_is_not_there_is_left_out(learned, behaviours):
    fields = {STATE: SPEC.observation[STATE], "observation.other": Field((3,))}
    config = DenoisingPolicyConfig(chunk=2, prediction_steps=2, sampling_steps=2, width=8, depth=1)
    policy = DenoisingPolicy(config, fields, SPEC.action, fps=SPEC.fps, instructions=SPEC.instructions)
    blind = Behaviour("blind", policy, behaviours[0].episodes)
    unknown = Behaviour("unknown", Goes(), replace(behaviours[0].episodes, step_success=None))
    assert list(imagined_success(SECTION, learned, [blind, unknown, behaviours[0]], 5, 0)) == ["fast"]


def test_they_act_under_the_settings_of_imagination(learned, behaviours, monkeypatch):
    made = []

    def recording(*given, **settings):
        made.append(settings)
        return ImaginedWorld(*given, **settings)

    monkeypatch.setattr(building, "ImaginedWorld", recording)
    section = replace(SECTION, imagination=ImaginationSection(debounce=2, noises=3))
    assert imagined_success(section, learned, behaviours[:1], 4, 0)["fast"]["episodes"] == 4
    assert (made[0]["debounce"], made[0]["noises"]) == (2, 3)
