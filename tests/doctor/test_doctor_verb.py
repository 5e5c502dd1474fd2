"""`robopolicy doctor` on the command line: names the break, says what to do, and its exit status tells a script."""

import json
import shutil

import broken_data
import pytest
from tiny_runs import TINY

from robopolicy.cli import main
from robopolicy.core.spec import STATE
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.training.configuration import FitConfig, PretrainConfig
from robopolicy.training.pretrain import pretrain

SMALL = [*TINY, "doctor.episodes=12"]


@pytest.fixture(scope="module")
def root(made_once, tmp_path_factory):
    """A folder with a recording, and without a policy that would be examined too."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copytree(made_once / "collect", root / "collect")
    return root


def examine(root, *arguments):
    """Return the exit status and the problems: check -> {"measured": texts, "remedy": texts}."""
    figures = root / "doctor.json"
    status = main(["doctor", *SMALL, f"run.root={root}", f"json={figures}", *arguments])
    findings = json.loads(figures.read_text())["findings"]
    assert all(set(item) == {"check", "health", "measured", "remedy"} for item in findings)
    findings_of_checks = {}
    for item in findings:
        if item["health"] in ("warning", "bad"):
            texts = findings_of_checks.setdefault(item["check"], {"measured": [], "remedy": []})
            for key, values in texts.items():
                values.append(item[key])
    return status, findings_of_checks


def test_its_own_recording_has_no_problem(root, capsys):
    assert examine(root) == (0, {})
    assert "No problem found." in capsys.readouterr().out


def test_episodes_that_are_chosen_are_examined_alone(root, monkeypatch):
    examined, every = [], len(read_dataset(root / "collect" / "reach_planar" / "0" / "dataset"))

    def noticed(episodes, *arguments, **options):
        examined.append(len(episodes))
        return []

    monkeypatch.setattr("robopolicy.verbs.doctor.examine", noticed)
    for settings in (
        ["doctor.episodes=[0,2,3]"],
        ["doctor.exclude_episodes=[1]"],
        ["doctor.episodes=[0,2]", "doctor.exclude_episodes=[2]"],
    ):
        assert examine(root, *settings) == (0, {})  # statistics are those of the whole
    assert examined == [3, every - 1, 1]
    assert main(["doctor", *SMALL, f"run.root={root}", "doctor.exclude_episodes=[999]"]) == 2


@pytest.mark.long
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
    status, findings = examine(root, f"doctor.data={tmp_path / 'broken'}")
    assert status == 1
    assert text in findings[check]["measured"][0]
    assert all(findings[check]["remedy"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Fix or check:" in printed
    assert check in printed


@pytest.mark.long
def test_a_policy_is_examined_with_the_data_it_was_trained_on_and_with_other_data(root, tmp_path):
    data = read_dataset(root / "collect" / "reach_planar" / "0" / "dataset")
    config = DenoisingPolicyConfig(width=64, depth=2, sampling_steps=3)
    values = {**data.observation, "action": data.actions}
    policy = DenoisingPolicy(config, data.observation_fields, data.action_field, fps=data.fps, values=values)
    pretrain(policy, data, PretrainConfig(batch_size=64, fit=FitConfig(steps=150)))
    policy.save(tmp_path / "policy")
    assert examine(root, f"doctor.policy={tmp_path / 'policy'}") == (0, {})
    write_dataset(broken_data.flipped(data, 0), tmp_path / "broken")
    _, findings = examine(root, f"doctor.policy={tmp_path / 'policy'}", f"doctor.data={tmp_path / 'broken'}")
    assert "'shoulder' has the opposite sign (after the fix replays follow" in findings["action sign"]["measured"][0]
    assert "'shoulder' has the opposite sign of the policy's" in findings["action sign"]["measured"][1]
    write_dataset(broken_data.with_frames(data, STATE, lambda frames: frames / 57.29578), tmp_path / "radians")
    _, findings = examine(root, f"doctor.policy={tmp_path / 'policy'}", f"doctor.data={tmp_path / 'radians'}")
    assert "radians instead of degrees" in findings["normaliser"]["measured"][0]


def test_another_world_is_named(root):
    status, findings = examine(root, "world=push_cube", f"doctor.data={root / 'collect/reach_planar/0/dataset'}")
    assert status == 1
    assert any("world (13,)" in item["measured"][0] for item in findings.values())
