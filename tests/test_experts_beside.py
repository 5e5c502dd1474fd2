"""Whose demonstrations fine-tuning imitates on the side: those that are named, else what `collect` left."""

import json

import pytest

from robopolicy.building.guidance import load_guidance
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.errors import CheckpointError
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.registry import Need
from sims.registry import make_world

NOISY = "world=reach_planar", "collect.episodes=24", "collect.noise=[3.0]"


def experts_of(root, *settings):
    config = compose([*NOISY, f"run.root={root}", *settings])
    world = make_world("reach_planar", 2)
    try:
        return load_guidance(config, world).experts
    finally:
        world.close()


def test_what_was_collected_is_imitated_unless_other_datasets_are_named(tmp_path):
    beside = "finetune.auxiliaries=[experts]"
    with pytest.raises(
        CheckpointError, match=r"create it with 'robopolicy collect', or set finetune.expert_datasets=PATH"
    ):
        experts_of(tmp_path, beside)
    assert main(["collect", *NOISY, f"run.root={tmp_path}"]) == 0
    folder = tmp_path / "collect" / "reach_planar" / "0"
    rate = json.loads((folder / "result.json").read_text())["success_rate"]
    assert 0 < rate < 1
    assert experts_of(tmp_path) is None
    for asked in (beside, "finetune.expert_episode_fraction=0.5"):
        experts = experts_of(tmp_path, asked)
        assert experts is not None and len(experts) == round(24 * rate) and experts.success.all()
    elsewhere = f"finetune.expert_datasets=[{folder / 'dataset'}]"
    assert len(experts_of(tmp_path / "other", beside, elsewhere)) == len(experts)
    assert experts_of(tmp_path / "other", elsewhere) is None, "what nobody imitates is not read"


def test_tidys_recipe_imitates_its_demonstrations_beside_ppo():
    for settings, needed in (((), True), (("finetune.auxiliaries=[]",), False)):
        algorithm = build_algorithm(compose(["recipe=tidy", *settings]).finetune)
        assert (Need.EXPERTS in algorithm.needs) == needed and Need.CRITIC in algorithm.needs
