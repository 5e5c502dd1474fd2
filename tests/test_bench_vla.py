"""The benchmark of tiny VLAs, much smaller than it is meant to be, and what stands in for a taught language model."""

import dataclasses
import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from robopolicy.benchmarks import tiny_vla, vla
from robopolicy.cli import main
from robopolicy.data.lerobot_reading import read_dataset

pytestmark = pytest.mark.long

OVERRIDES = [
    "collect.episodes=6", "world.image_size=32", "train.fit.steps=3", "train.batch_size=8", "finetune.iterations=1",
    "finetune.num_envs=4", "finetune.rollout_length=2", "finetune.minibatch=8", "finetune.evaluate_episodes=4",
    "finetune.critic_width=8", "world.batch_size=4", "teach.rounds=2", "teach.episodes=4", "teach.fit.steps=2",
    "teach.last_round_steps=3", "teach.batch_size=8", "teach.evaluate_episodes=4",
]  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Sizes with which a run takes seconds."""
    sizes = dataclasses.replace(vla.SIZES, image=32, read=(96, 2), seen=(32, 1), acts=32)
    monkeypatch.setattr(vla, "SIZES", sizes)
    monkeypatch.setattr(vla, "SEEING", 2)
    return sizes


@pytest.mark.parametrize(
    "arm",
    [
        pytest.param("smolvla", marks=pytest.mark.slow),
        "smolvla_taught",
        "pi0",
        pytest.param("pi0_taught", marks=pytest.mark.slow),
    ],
)
def test_every_stage_runs_and_lerobot_loads_what_comes_out(small, arm, tmp_path, capsys):
    changed = ",".join(f"'{setting}'" for setting in OVERRIDES)
    given = ["bench", "vla", "bench.seeds=[0]", f"bench.only=[{arm}]", f"bench.overrides=[{changed}]"]
    assert main([*given, f"run.root={tmp_path}", f"json={tmp_path / 'vla.json'}"]) == 0
    row = json.loads((tmp_path / "vla.json").read_text())["kinds"][arm]["0"]
    assert row["score_difference"] < 1e-4
    assert row["action_difference"] < 1e-5
    assert row["rounds"] == 2 if arm.endswith("taught") else row["iterations"] == 1
    assert vla.ARMS[arm] in " ".join(capsys.readouterr().out.split())
    before = len(list(tmp_path.rglob("model.safetensors")))
    assert main([*given, f"run.root={tmp_path}"]) == 0  # nothing is done twice
    assert len(list(tmp_path.rglob("model.safetensors"))) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
def test_it_learns_to_see_and_what_acts_stays_as_it_was(kind, tmp_path):
    sizes = vla.SIZES
    recorded = ["collect", "world=push_choice", "world.cameras=[top]", "world.image_size=64", "collect.episodes=300"]
    assert main([*recorded, f"run.root={tmp_path}"]) == 0
    data = tmp_path / "collect" / "push_choice" / "0" / "dataset"
    with tiny_vla.pi_of(sizes) if kind == "pi0" else nullcontext():
        start = tiny_vla.write_tiny(kind, tmp_path, data, "observation.images.top", sizes, 0)
        taught = tiny_vla.taught_to_see(start, data, tmp_path / "taught", 300, 0)
        before, after = opened(start), opened(taught)
        errors = [error_in_millimetres(policy, data) for policy in (before, after)]
    print({"kind": kind, "error in mm before and after": errors})
    assert errors[1] < 0.8 * errors[0]
    pairs = zip(before.network.acting, after.network.acting, strict=True)
    for one, other in pairs:
        assert all(
            torch.equal(*both) for both in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        )


def opened(folder) -> Any:
    return tiny_vla.trainable_lerobot(tiny_vla.load_lerobot_policy(folder))


def error_in_millimetres(policy: Any, data) -> float:
    """Return how far off the best linear reading of the cubes' and goals' places is, on the last third of episodes."""
    episodes = read_dataset(data)
    steps = torch.arange(0, episodes.step_count, 2)
    windows = [episodes.windows(some, 1, 1)["observation"] for some in steps.split(100)]
    with torch.no_grad():
        read = torch.cat([policy.encode(one)[tiny_vla.VALUES][:, -1].flatten(1) for one in windows])
    where = torch.cat([one["observation.environment_state"][:, -1][:, [0, 1, 7, 8, 14, 15, 16, 17]] for one in windows])
    read, where = torch.cat([read, torch.ones(len(read), 1)], 1).double(), where.double()
    known = 2 * len(read) // 3
    gram = read[:known].T @ read[:known] + 1e-2 * torch.eye(read.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, read[:known].T @ where[:known])
    return float((read[known:] @ weights - where[known:]).abs().mean() * 1e3)
