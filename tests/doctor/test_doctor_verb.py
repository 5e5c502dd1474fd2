"""`robopolicy doctor` on the command line: names the break, says what to do, and its exit status tells a script."""

import json

import broken_data
import pytest

from robopolicy.cli import main
from robopolicy.data.lerobot_format import read_dataset, write_dataset

SMALL = ["world=reach_planar", "collect.episodes=12", "doctor.episodes=12"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    assert main(["collect", *SMALL, f"run.root={root}"]) == 0
    return root


def examine(root, *arguments):
    """Return the exit status and the problems, check -> what was measured."""
    figures = root / "doctor.json"
    status = main(["doctor", *SMALL, f"run.root={root}", f"json={figures}", *arguments])
    findings = json.loads(figures.read_text())["findings"]
    assert all(set(item) == {"check", "health", "measured", "remedy"} for item in findings)
    return status, {item["check"]: item for item in findings if item["health"] in ("warning", "bad")}


def test_its_own_recording_has_no_problem(root, capsys):
    assert examine(root) == (0, {})
    assert "No problem found." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "check", "text"),
    [
        (lambda data: broken_data.flipped(data, 1), "action sign", "'elbow' has the opposite sign"),
        (lambda data: broken_data.permuted(data, 1, 0), "action order", "'shoulder' and 'elbow' are swapped"),
        (broken_data.late, "time shift", "actions are stored one step too late"),
        (broken_data.doubled, "control rate", "as if recorded at 20 steps/s"),
    ],
)
def test_a_break_in_a_dataset_on_disk_is_named_with_the_way_out(root, tmp_path, capsys, change, check, text):
    data = read_dataset(root / "collect" / "reach_planar" / "0" / "dataset")
    write_dataset(change(data), tmp_path / "broken")
    status, found = examine(root, f"doctor.data={tmp_path / 'broken'}")
    assert status == 1
    assert text in found[check]["measured"]
    assert found[check]["remedy"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "Look at:" in printed
    assert check in printed


def test_a_policy_is_examined_when_there_is_one(root):
    training = ["train.fit.steps=150", "train.batch_size=64", "train.evaluate_episodes=0", "policy.width=64", "policy.depth=2"]
    sampling = ["policy.sampling_steps=3"]
    assert main(["train", *SMALL, *training, *sampling, f"run.root={root}"]) == 0
    status, found = examine(root)
    assert status == 0, found
    assert not found


def test_another_world_is_named(root):
    status, found = examine(root, "world=push_cube", f"doctor.data={root / 'collect/reach_planar/0/dataset'}")
    assert status == 1
    assert any("world (13,)" in item["measured"] for item in found.values())
