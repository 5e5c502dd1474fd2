"""`optimize` of a world model: which blocks of its transformer to compute, kept beside it, read by what imagines."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robopolicy.building.planning import load_imagining
from robopolicy.cli import main
from robopolicy.core.errors import RobopolicyWarning
from robopolicy.core.origin import WorldOrigin, remember_origin
from robopolicy.core.spec import IMAGE_PREFIX, WorldSpec
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.data.record import record
from robopolicy.inference.caching import CachePlan
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.plan import InferencePlan, load_plan, save_plan, weights_hash
from robopolicy.verbs.optimize_model import Chains, errors_of
from sims.registry import make_expert, make_world
from worldmodels.checkpoint import load_world_model, save_world_model
from worldmodels.configuration import VideoConfig
from worldmodels.ensemble import EnsembleConfig, EnsembleModel
from worldmodels.initial_states import context_at
from worldmodels.video.model import VideoModel

K, CHUNK, CAMERA = 6, 3, IMAGE_PREFIX + "top"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A dataset of reach_planar seen by a camera, and its episodes."""
    world = make_world("reach_planar", 3, cameras=("top",), image_size=16)
    expert = make_expert("reach_planar", world.spec)
    assert expert is not None
    episodes = record(world, expert, np.arange(6))
    world.close()
    folder = tmp_path_factory.mktemp("recorded") / "dataset"
    write_dataset(episodes, folder)
    return folder, episodes


def spec_seen() -> WorldSpec:
    world = make_world("reach_planar", 1, cameras=("top",), image_size=16)
    world.close()
    return world.spec


def video_model(episodes: Any, seed: int = 0) -> VideoModel:
    """Weights that nobody has trained, but none of which is zero."""
    spec, base = spec_seen(), VideoConfig(size="tiny", memory=2, stride=2, chunk=CHUNK, precision="float32")
    model = VideoModel.build(replace(base, edm=replace(base.edm, steps=K)), spec, episodes, seed)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.transformer.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=draws))
    remember_origin(model, WorldOrigin("reach_planar"))
    return model.eval()


@pytest.fixture(scope="module")
def saved(recorded: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video") / "checkpoint"
    save_world_model(video_model(recorded[1]), folder)
    return folder


def optimized(saved: Path, recorded: tuple[Path, Any], root: Path, *more: str) -> dict[str, Any]:
    small = "optimize.rounds=2", "optimize.budgets=[3]", "optimize.observations=8", "run.threads=1"
    given = "optimize", str(saved), f"optimize.data=[{recorded[0]}]", f"run.root={root}", *small, *more
    assert main(list(given)) == 0
    (result,) = root.rglob("result.json")
    return json.loads(result.read_text())


def image(model: Any, episodes: Any) -> Tensor:
    begin = torch.tensor([0, 5])
    latent = model.initial(context_at(episodes, begin, model.context), begin.numpy())
    steps = model.generate(latent, episodes.actions[begin[:, None] + torch.arange(CHUNK)])[1]
    return torch.stack([step.observation[CAMERA] for step in steps])


@pytest.mark.long
def test_without_an_allowed_error_nothing_changes(saved: Path, recorded: tuple[Path, Any], tmp_path: Path):
    result = optimized(saved, recorded, tmp_path)
    assert result["chosen"] == "reference" and result["ways"]["reference"]["error"] == 0
    assert {"uniform cache 3", "shared cache 3", "bac cache 3", "shared cache 3, order 1"} < set(result["ways"])
    assert all(row["error"] > 0 for name, row in result["ways"].items() if name != "reference")
    own, kept = load_world_model(saved), load_imagining(saved)
    assert torch.equal(image(own, recorded[1]), image(kept, recorded[1]))


@pytest.mark.long
def test_what_is_chosen_is_kept_and_imagined_with(
    saved: Path, recorded: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    result = optimized(saved, recorded, tmp_path, "optimize.max_action_error=1e9", "optimize.rounds=1")
    fastest = min(result["ways"], key=lambda name: result["ways"][name]["least_ms"])
    plan = load_plan(saved)
    assert plan is not None and result["chosen"] == fastest and plan.measured == result["ways"][fastest]
    assert f"Chosen: {fastest}" in capsys.readouterr().out
    assert plan.weights == weights_hash(saved) and (plan.cache is None) == (fastest == "reference")


def test_what_imagines_remembers_as_the_plan_says(recorded: tuple[Path, Any], tmp_path: Path):
    model = video_model(recorded[1], seed=1)
    save_world_model(model, tmp_path)
    updates = torch.zeros(len(model.block_names), K, dtype=torch.bool)
    updates[:, 0] = True
    held = CachePlan.of(model.block_names, updates)
    save_plan(tmp_path, InferencePlan(InferenceConfig(), weights_hash(tmp_path), held))
    cached = image(load_imagining(tmp_path), recorded[1])
    assert torch.equal(cached, image(model.with_caching(held), recorded[1]))
    assert not torch.equal(cached, image(model, recorded[1]))


def test_a_plan_for_other_weights_is_refused_and_nothing_is_remembered(recorded: tuple[Path, Any], tmp_path: Path):
    model = video_model(recorded[1], seed=2)
    save_world_model(model, tmp_path)
    held = CachePlan.of(model.block_names, torch.eye(1, K, dtype=torch.bool).repeat(len(model.block_names), 1))
    save_plan(tmp_path, InferencePlan(InferenceConfig(), "of others", held))
    with pytest.warns(RobopolicyWarning, match="created for other weights.*then the world model uses no block cache"):
        loaded = load_imagining(tmp_path)
    assert torch.equal(image(loaded, recorded[1]), image(model, recorded[1]))


def test_a_plan_for_other_chains_is_refused_as_one_of_a_policy_is(recorded: tuple[Path, Any], tmp_path: Path):
    """The weights are the same, and config.json asks for other steps; or it was made with another torch."""
    model = video_model(recorded[1], seed=3)
    save_world_model(model, tmp_path)
    file_hash = weights_hash(tmp_path)
    for steps, made, message in ((K + 1, {}, r"7 steps, .* has 6\. .* uses no"), (K, {"version": "1"}, "torch 1")):
        held = CachePlan.of(model.block_names, torch.ones(len(model.block_names), steps, dtype=torch.bool))
        plan = InferencePlan(InferenceConfig(), file_hash, held, **made)
        save_plan(tmp_path, plan)
        with pytest.warns(RobopolicyWarning, match=message):
            loaded: Any = load_imagining(tmp_path)
        assert (loaded.caching is None) == (steps != K)


@dataclass
class Drawn:
    """A model whose images are a given number everywhere."""

    value: float

    def generate(self, latent: Any, actions: Tensor) -> tuple[None, list[Any]]:
        """Imagine as many steps as there are actions."""
        shape = (len(actions), 2, 2, 3)
        return None, [SimpleNamespace(observation={CAMERA: torch.full(shape, self.value)})] * actions.shape[1]


def test_errors_are_shares_of_what_changes():
    # the present is 10, the reference sees 14: a model that sees 12 is half wrong, one that sees 10 stood still
    models: Any = {"reference": Drawn(14.0), "half": Drawn(12.0), "still": Drawn(10.0), "beyond": Drawn(18.0)}
    chains = Chains({}, torch.zeros(3, CHUNK, 2))
    errors = errors_of(models, chains, {CAMERA: torch.full((3, 2, 2, 3), 10, dtype=torch.uint8)})
    assert errors == pytest.approx({"reference": 0.0, "half": 0.5, "still": 1.0, "beyond": 1.0})


def test_models_and_data_with_nothing_to_try_are_refused(
    saved: Path, recorded: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    states = tmp_path / "ensemble"
    ensemble = EnsembleModel.build(EnsembleConfig(width=8), spec_seen(), recorded[1], 0)
    remember_origin(ensemble, WorldOrigin("reach_planar"))
    save_world_model(ensemble, states)
    assert main(["optimize", str(states), f"run.root={tmp_path / 'a'}"]) == 2
    assert "without denoising steps" in capsys.readouterr().err
    missing = tmp_path / "missing"
    assert main(["optimize", str(saved), f"optimize.data=[{missing}]", f"run.root={tmp_path / 'b'}"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["optimize", str(saved), "optimize.evaluate_episodes=8", f"run.root={tmp_path / 'b'}"]) == 2
    assert "leave optimize.evaluate_episodes=0" in capsys.readouterr().err
    result = optimized(saved, recorded, tmp_path / "c", "optimize.budgets=[20]")
    assert list(result["ways"]) == ["reference"]
    assert f"calls its network {K} times" in capsys.readouterr().out.replace("\n", " ")
