"""Coverage: steps like the data of a model count as such, others do not; by a slow reference and in a ranking."""

import json
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from robopolicy.cli import main
from robopolicy.core.errors import DataError
from robopolicy.core.spec import ENVIRONMENT_STATE, WorldSpec
from robopolicy.data.record import record
from robopolicy.evaluation.coverage import Coverage, drawn, elements, nearest, thumbnails
from robopolicy.evaluation.tables import coverage_table, coverage_warnings
from robopolicy.verbs import rank
from sims.experts import NoisyController
from sims.registry import make_expert, make_world


@dataclass
class Predicting:
    """A model of a world's vectors, as far as coverage asks."""

    spec: WorldSpec


def recorded(episodes, seed=0, noise=0.3):
    world = make_world("push_cube", 20, seed=seed)
    actor = NoisyController(make_expert("push_cube", world.spec), noise, seed, world.spec.action)
    played = record(world, actor, np.arange(episodes) + 1000 * seed)
    world.close()
    return Predicting(world.spec), played


def test_what_was_recorded_alike_is_covered_and_what_was_not_is_not():
    model, data = recorded(120)
    draws = torch.Generator().manual_seed(0)
    coverage = Coverage.of(model, data, draws)
    alike = elements(model, recorded(40, seed=1)[1])
    assert coverage.unlike(alike, draws) < 0.04
    wild = elements(model, recorded(40, seed=1, noise=3.0)[1])
    assert coverage.unlike(wild, draws) > 2 * coverage.unlike(alike, draws)
    elsewhere = alike.clone()
    actions = data.actions.shape[1]
    elsewhere[: len(elsewhere) // 2, actions:] += 5 * data.observation[ENVIRONMENT_STATE].std()
    assert 0.45 < coverage.unlike(elsewhere, draws) < 0.6


def test_distances_and_standardisation_by_a_slow_reference():
    model, data = recorded(30)
    draws = torch.Generator().manual_seed(0)
    coverage = Coverage.of(model, data, draws)
    assert torch.allclose(coverage.known.mean(0), torch.zeros(coverage.known.shape[1]), atol=1e-4)
    varying = coverage.scale < 99
    assert torch.allclose(coverage.known.std(0)[varying], torch.ones(int(varying.sum())), atol=1e-3)
    steps = torch.randn(7, 3, generator=draws)
    known = torch.randn(11, 3, generator=draws)
    slow = torch.tensor([min(float((step - other).norm()) for other in known) for step in steps])
    assert torch.allclose(nearest(steps, known), slow, atol=1e-5)
    assert len(drawn(known, 5, draws)) == 5 and drawn(known, 20, draws) is known
    images = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    images[1, :2, :2] = 255
    small = thumbnails(images)
    assert small.shape == (2, 192) and float(small[1].sum()) == pytest.approx(3) and not small[0].any()
    with pytest.raises(DataError, match="two recorded episodes"):
        Coverage.of(model, recorded(1)[1], draws)


def test_an_element_that_never_changed_in_the_data_counts_when_it_does():
    model, data = recorded(30)
    data.observation[ENVIRONMENT_STATE][:, 2] = 0.7
    draws = torch.Generator().manual_seed(0)
    coverage = Coverage.of(model, data, draws)
    alike = elements(model, data)
    assert coverage.unlike(alike, draws) < 0.04
    moved = alike.clone()
    moved[:, data.actions.shape[1] + 2 + _before(model, ENVIRONMENT_STATE)] += 0.5
    assert coverage.unlike(moved, draws) == 1


def _before(model, key):
    widths = {each: model.spec.observation[each].shape[0] for each in model.spec.observation}
    return sum(widths[each] for each in list(widths)[: list(widths).index(key)])


def test_warnings_name_policy_and_remedy():
    shares = {"ensemble": {"a": 0.02, "b": 0.34}, "rssm": {"a": 0.0}}
    header, lines = coverage_table(shares)
    assert header == ["policy", "ensemble", "rssm"] and lines == [["a", "2.0%", "0.0%"], ["b", "34.0%", "-"]]
    (warning,) = coverage_warnings(shares)
    assert warning.startswith("34% of the steps of b are unlike") and "worldmodel.policies" in warning


@pytest.mark.long
def test_a_ranking_says_where_its_model_has_no_data(tmp_path, capsys, monkeypatch):
    root = f"run.root={tmp_path}"
    small = ("worldmodel.fit.steps=30", "worldmodel.transitions=1500", "worldmodel.behaviour_episodes=0")
    narrow = ("worldmodel.include_base=false", "worldmodel.noise=[none]", "worldmodel.config.width=16")
    demonstrations = "collect.episodes=40", "collect.noise=[none]", 'collect.label_policy=""'
    assert main(["collect", "recipe=push_cube", root, *demonstrations]) == 0
    assert main(["worldmodel", "recipe=push_cube", root, *small, *narrow]) == 0
    levels = 'rank.noise=["none","0.1","random"]'
    trained = tmp_path / "worldmodel" / "push_cube" / "0"
    shutil.copytree(trained, tmp_path / "worldmodel" / "copy" / "0")
    recordings = []
    monkeypatch.setattr(rank, "record", lambda *given, **options: recordings.append(1) or record(*given, **options))
    both = f"rank.models=[{trained}/checkpoint,{tmp_path}/worldmodel/copy/0/checkpoint]"
    assert main(["rank", "recipe=push_cube", root, "rank.episodes=16", levels, both]) == 0
    assert "Steps unlike" in capsys.readouterr().out
    assert len(recordings) == 3 * 32 / rank.RECORDED, "each expert acts once for both models"
    folder = tmp_path / "rank" / "push_cube" / "0"
    figures, copy = json.loads((folder / "result.json").read_text())["models"].values()
    shares = figures["coverage"]
    assert shares == copy["coverage"]
    assert shares["expert, noise none"] < 0.05 and shares["expert, noise random"] > 0.5
    assert "its imagined success is a guess" in (folder / "report.html").read_text()
