"""LeRobot's checkpoints among those that are ranked: beside ours, in the simulator and in a world model."""

import json
from pathlib import Path

import pytest
from test_lerobot_policies import FRONT, act_config, diffusion_config, save
from tiny_runs import TINY

from robopolicy.cli import main

pytestmark = pytest.mark.long

SMALL = [*TINY, "rank.episodes=4", "rank.noise=[none]"]
SIZES = {"state": 6, "environment": 6}


def ranked(root: Path, name: str, *policies: Path) -> int:
    chosen = f"rank.policies=[{','.join(map(str, policies))}]"
    model = f"rank.models=[{root / 'worldmodel/reach_planar/0/checkpoint'}]"
    return main(["rank", *SMALL, chosen, model, f"run.root={root}", f"run.name={name}"])


def test_lerobots_policies_are_ranked_beside_ours(root, tmp_path):
    act = save(act_config(**SIZES), tmp_path / "act")
    diffusion = save(diffusion_config(**SIZES), tmp_path / "outputs/push/checkpoints/last/pretrained_model")
    ours = root / "train/reach_planar/0/checkpoint"
    assert ranked(root, "mixed", act, diffusion, ours) == 0
    ranked_policies = json.loads((root / "rank/mixed/0/result.json").read_text())["models"]["ensemble"]["policies"]
    assert {policy["name"] for policy in ranked_policies} == {"act", "push", "reach_planar", "expert, noise none"}
    assert all(0 <= policy[world] <= 1 for policy in ranked_policies for world in ("real", "model"))
    assert {policy["name"]: policy["real"] for policy in ranked_policies}["expert, noise none"] == 1


def test_what_does_not_fit_is_said_in_one_line(root, tmp_path, capsys):
    ours, narrow = root / "train/reach_planar/0/checkpoint", save(act_config(state=4), tmp_path / "narrow")
    assert ranked(root, "narrow", narrow, ours) == 2
    assert "reads 'observation.state' as [4], but the world 'reach_planar' outputs [6]" in capsys.readouterr().err
    (narrow / "policy_preprocessor.json").unlink()
    assert ranked(root, "narrow", narrow, ours) == 2
    assert "policy_preprocessor.json does not exist" in capsys.readouterr().err


def test_a_policy_that_sees_brings_the_size_of_its_images_and_needs_a_model_that_shows_them(root, tmp_path, capsys):
    seeing = save(act_config(**SIZES, cameras=(FRONT,)), tmp_path / "seeing")  # 32 pixels, where worlds have 64
    judged = ["world=reach_planar", "evaluate.episodes=2", "evaluate.videos=0"]
    assert main(["evaluate", str(seeing), *judged, f"run.root={root}"]) == 0
    assert ranked(root, "seeing", seeing, root / "train/reach_planar/0/checkpoint") == 2
    assert "camera 'front', which the world 'imagined reach_planar' does not output" in capsys.readouterr().err
