"""One dataset of each foreign layout is converted, learned from, followed by its policy, and examined."""

import json

import numpy as np
import pytest
from foreign_data import (
    LENGTHS,
    arrays,
    write_aloha,
    write_minari,
    write_older_lerobot,
    write_push_t,
    write_robomimic,
)

from robopolicy.cli import main

pytestmark = pytest.mark.long
pytest.importorskip("h5py", reason="pip install 'robopolicy[convert]'")
pytest.importorskip("zarr", reason="pip install 'robopolicy[convert]'")


def write_npz(path):
    np.savez(path, **arrays(), episode_ends=np.cumsum(LENGTHS))
    return path


MADE = {
    "robomimic": (write_robomimic, "demo.hdf5"),
    "aloha": (write_aloha, "aloha"),
    "zarr": (write_push_t, "push_t.zarr"),
    "zarr.zip": (write_push_t, "push_t.zarr.zip"),
    "minari": (write_minari, "toy"),
    "lerobot": (write_older_lerobot, "old"),
    "npz": (write_npz, "demos.npz"),
}


@pytest.mark.parametrize("kind", MADE)
def test_every_layout_is_converted_learned_and_judged(tmp_path, kind, capsys):
    write, name = MADE[kind]
    data = tmp_path / "data"
    own, shared = [f"world.data={data}", "world=demonstrations"], [f"run.root={tmp_path / 'runs'}", "run.name=toy"]
    assert main(["convert", str(write(tmp_path / name)), str(data), "convert.fps=10"]) == 0
    small = ["policy.width=16", "policy.depth=1", "policy.sampling_steps=2", "policy.denoising_steps=4"]
    quick = ["train.fit.steps=5", "train.batch_size=4", "train.evaluate_episodes=0"]
    assert main(["train", str(data), *own, *shared, *small, *quick]) == 0
    checkpoint = tmp_path / "runs/train/toy/0/checkpoint"
    judged = ["evaluate.episodes=3", "evaluate.videos=0"]
    assert main(["evaluate", str(checkpoint), *own, *shared, *judged]) == 0
    assert main(["doctor", str(data), "world=demonstrations", f"json={tmp_path / 'found.json'}", *shared]) in (0, 1)
    findings = json.loads((tmp_path / "found.json").read_text())["findings"]
    wrong = [each for each in findings if each["check"] in ("statistics", "finite values", "duplicate episodes")]
    assert wrong and all(each["health"] == "good" for each in wrong), capsys.readouterr().out
