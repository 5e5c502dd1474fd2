"""A downloaded folder runs no code: every name in it that leads to a module, tried through every verb that reads it."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY

from robopolicy.cli import main
from robopolicy.core import registry
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.plan import InferencePlan, save_plan, weights_hash
from robopolicy.policies.configuration import JointConfig
from robopolicy.policies.joint import JointModel
from sims.registry import make_world
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import EnsembleConfig, RssmConfig
from worldmodels.encoding import save_encoder
from worldmodels.ensemble import EnsembleModel
from worldmodels.rssm.model import RssmModel

SMALL = [*TINY, "evaluate.episodes=4", "evaluate.videos=0", "rank.episodes=4"]
PLACE = "runs.worldmodel.reach_planar.s0.checkpoint.payload"
PAYLOAD = "import pathlib\npathlib.Path('ran').touch()\nEvil = dict\n"


@pytest.fixture(scope="module")
def root(made_once, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("planted")
    shutil.copytree(made_once, root / "trusted")
    shutil.copytree(root / "trusted/train/reach_planar/0/checkpoint", root / "policy")
    episodes = read_dataset(root / "trusted/collect/reach_planar/0/dataset")
    world = make_world("reach_planar", 1)
    config = EnsembleConfig(members=2, width=8, depth=1, head_width=8)
    save_world_model(EnsembleModel.build(config, world.spec, episodes, 0), root / "model")
    latent = RssmConfig(size="tiny", members=2, deter=16, blocks=2, hidden=8, stochastic=2, classes=4)
    rssm = RssmModel.build(latent, world.spec, episodes, 0)
    save_world_model(rssm, root / "rssm")
    JointModel(JointConfig(chunk=2, width=16, depth=1, heads=2), world.spec).save(root / "joint")
    world.close()
    return root


@pytest.fixture
def home(root, tmp_path, monkeypatch) -> Path:
    """A working folder in which a downloaded world model brings a module, as in the attack that once worked."""
    checkpoint = tmp_path / "runs/worldmodel/reach_planar/s0/checkpoint"
    checkpoint.parent.mkdir(parents=True)
    shutil.copytree(root / "model", checkpoint)
    (checkpoint / "payload.py").write_text(PAYLOAD)
    shutil.copytree(root / "policy", tmp_path / "policy")
    shutil.copytree(root / "joint", tmp_path / "joint")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_asked_for", set())
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    description = json.loads((folder / "config.json").read_text())
    change(description)
    (folder / "config.json").write_text(json.dumps(description))


def in_spec(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda found: found["spec"].update(name=name)


def in_config(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda found: found["model"]["config"].update(success_head=name)


def in_kind(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda found: found.update(kind=name)


MODEL = "runs/worldmodel/reach_planar/s0/checkpoint"
PLANTED = {
    "gymnasium": in_spec(f"gymnasium:{PLACE}:CartPole-v1"),
    "metaworld": in_spec(f"metaworld/{PLACE}:Evil"),
    "task": in_spec(f"{PLACE}:Evil"),
    "kind": in_kind(f"world_model/{PLACE}:Evil"),
    "success head": in_config(f"{PLACE}:Evil"),
}
VERBS = {
    "evaluate": ["evaluate", "policy", "world=worldmodel", f"world.model={MODEL}"],
    "finetune": ["finetune", "finetune.policy=policy", "world=worldmodel", f"world.model={MODEL}"],
    "imagine": ["imagine", "finetune.policy=policy", f"imagine.model={MODEL}"],
    "rank": ["rank", "rank.policies=[policy]", "rank.noise=[none,high]", f"rank.models=[{MODEL}]"],
    "plan": ["evaluate", "policy", f"plan.model={MODEL}"],
    "serve": ["serve", "serve.policy=policy", "serve.port=0", f"plan.model={MODEL}"],
    "check": ["check", MODEL],
}
NAMED = ("gymnasium", "metaworld", "task")
TRIED = [(verb, how) for verb in VERBS for how in PLANTED if verb in ("evaluate", "finetune") or how not in NAMED]
"""Imagination alone makes the world that a model names; other verbs have it from the user, or need none."""


@pytest.mark.parametrize(("verb", "how"), TRIED)
def test_a_world_model_chooses_no_code(home, capsys, verb: str, how: str):
    edit(home / MODEL, PLANTED[how])
    assert main([*VERBS[verb], *([] if verb == "check" else SMALL if verb == "imagine" else SMALL[1:])]) == 2
    output = " ".join(capsys.readouterr().err.split())
    # Meta-World's names are looked up among its tasks; no module is read from them.
    refused = "Meta-World has no task" if how == "metaworld" else "not part of robopolicy"
    assert refused in output and PLACE in output, output
    assert not (home / "ran").exists() and PLACE not in sys.modules


@pytest.mark.long
@pytest.mark.parametrize("how", NAMED)
@pytest.mark.parametrize("verb", ["plan", "rank"])
def test_a_name_that_is_not_needed_is_not_followed(home, verb: str, how: str):
    edit(home / MODEL, PLANTED[how])
    main([*VERBS[verb], *SMALL])
    assert not (home / "ran").exists() and PLACE not in sys.modules


def test_it_would_have_run(home):
    """The module is found from here, and who names it gets it: it was not refused for want of it."""
    registry.import_plugins([PLACE])
    assert (home / "ran").exists()
    sys.modules.pop(PLACE)


@pytest.mark.filterwarnings("ignore::robopolicy.core.errors.RobopolicyWarning")
@pytest.mark.parametrize("folder", ["policy", "joint"])
@pytest.mark.parametrize(
    "change",
    [
        in_kind(f"{PLACE}:Evil"),
        lambda found: found.update(network={"class": f"{PLACE}:Evil", "settings": {}}),
        lambda found: found.update(world={"name": f"gymnasium:{PLACE}:CartPole-v1", "options": {}}),
        lambda found: found["spec"].update(name=f"gymnasium:{PLACE}:CartPole-v1"),
        lambda found: found.update(encoder="encoder"),
    ],
    ids=["kind", "network", "world", "spec", "encoder"],
)
def test_a_policy_chooses_no_code(home, folder: str, change):
    edit(home / folder, change)
    shutil.copytree(home / MODEL, home / folder / "encoder")
    edit(home / folder / "encoder", in_kind(f"world_model/{PLACE}:Evil"))
    main(["evaluate", folder, *SMALL[1:]])
    assert not (home / "ran").exists() and PLACE not in sys.modules


@pytest.mark.parametrize("verb", ["evaluate", "collect", "serve"])
@pytest.mark.parametrize("config", [{"engine": f"{PLACE}:Evil"}, {"engine": "lean", "sampler": f"{PLACE}:Evil"}])
def test_a_stored_way_of_deciding_chooses_no_code(home, capsys, verb: str, config: dict[str, str]):
    save_plan(home / "policy", InferencePlan(InferenceConfig(**config), weights_hash(home / "policy")))
    assert main([verb, f"{verb}.policy=policy", *([] if verb == "serve" else SMALL[1:]), "run.name=planned"]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "inference.json needs the" in output and f"run.plugins=[{PLACE}]" in output, output
    assert not (home / "ran").exists() and PLACE not in sys.modules


@pytest.mark.parametrize("change", [in_kind(f"world_model/{PLACE}:Evil"), in_config(f"{PLACE}:Evil")])
def test_an_encoder_chooses_no_code(root, home, capsys, change):
    model: Any = load_world_model(root / "rssm")  # decides nothing here, so that it may as well have a decoder
    save_encoder(model, home / "policy")
    edit(home / "policy/encoder", change)
    assert main(["evaluate", "policy", *SMALL]) == 2
    assert "not part of robopolicy" in " ".join(capsys.readouterr().err.split())
    assert not (home / "ran").exists() and PLACE not in sys.modules
