"""Columns and elements of somebody else's dataset are read under other names, {its name: ours}."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from moving_episodes import moving_episodes

from robopolicy.core.errors import CheckpointError, DataError, as_setting
from robopolicy.core.origin import described_origin, remember_described, remember_renaming, renaming_of
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.data.lerobot_reading import SIDECAR, _field, read_dataset, read_information, require_known

FRONT = IMAGE_PREFIX + "front"
THEIRS = {STATE: "state", ENVIRONMENT_STATE: "objects", FRONT: "image", "action": "actions"}
OURS = {theirs: ours for ours, theirs in THEIRS.items()}


def foreign(folder, images="png", names=THEIRS):
    """Write a dataset whose columns are called as openpi calls them, and whose elements are motor_0 and so on."""
    write_dataset(moving_episodes(image=True), folder, images=images)
    shutil.rmtree(folder / SIDECAR)
    for path in [*folder.glob("data/*/*.parquet"), *folder.glob("meta/episodes/*/*.parquet")]:
        table = pq.read_table(path)
        parts = [name.split("/") for name in table.column_names]
        pq.write_table(table.rename_columns(["/".join(names.get(part, part) for part in each) for each in parts]), path)
    for camera in folder.glob("videos/*"):
        camera.rename(camera.with_name(names.get(camera.name, camera.name)))
    path = folder / "meta" / "info.json"
    information = json.loads(path.read_text())
    features = {names.get(name, name): feature for name, feature in information["features"].items()}
    state = features[names.get(STATE, STATE)]
    state["names"] = {"motors": [f"motor_{index}" for index in range(state["shape"][0])]}
    path.write_text(json.dumps({**information, "features": features}))
    return folder


@pytest.mark.parametrize("images", ["png", "video"])
def test_columns_and_elements_are_read_under_other_names(tmp_path, images):
    folder, own = foreign(tmp_path / "theirs", images), tmp_path / "ours"
    write_dataset(moving_episodes(image=True), own, images=images)
    shutil.rmtree(own / SIDECAR)
    read, same = read_dataset(folder, rename={**OURS, "motor_0": "left"}), read_dataset(own)
    assert set(read.observation) == set(same.observation) and FRONT in read.observation
    assert all(torch.equal(read.observation[key], same.observation[key]) for key in same.observation)
    assert torch.equal(read.actions, same.actions)
    assert read.observation_fields[STATE].names[0] == "left"
    assert "state" not in read_information(folder, OURS)["features"]


def test_names_are_read_in_every_form_that_lerobot_writes():
    for names in (
        ["x", "y", "z"],
        {"motors": ["x", "y", "z"]},
        {"arm": ["x", "y"], "hand": ["z"]},
        {"z": 2, "x": 0, "y": 1},
    ):
        assert _field(Path("data"), "action", {"shape": [3], "names": names}).names == ("x", "y", "z")
    for names in (None, ["x"], {"motors": None}, {"x": "y"}):
        assert _field(Path("data"), "action", {"shape": [3], "names": names}).names == ()


def test_our_own_dataset_keeps_its_last_observations_under_other_names(tmp_path):
    write_dataset(moving_episodes(), tmp_path / "data")
    plain, other = read_dataset(tmp_path / "data"), read_dataset(tmp_path / "data", rename={STATE: "observation.arm"})
    assert torch.equal(other.observation["observation.arm"], plain.observation[STATE])
    assert other.observation_fields["observation.arm"] == plain.observation_fields[STATE]


def test_what_lacks_our_names_is_refused_with_the_setting_that_gives_them(tmp_path):
    folder = foreign(tmp_path / "theirs")
    with pytest.raises(DataError, match="policies need") as caught:
        read_dataset(folder)
    setting = str(caught.value).partition('"')[2].partition('"')[0]
    given = OverridesParser.create().parse_override(setting).value()
    assert given == {"state": STATE, "image": IMAGE_PREFIX + "image", "actions": "action"}
    assert set(read_dataset(folder, rename=given).observation) == {STATE, IMAGE_PREFIX + "image"}
    with pytest.raises(
        DataError, match=r"no 'action' column.*rename=\{image: observation.images.image, actions: action"
    ):
        read_dataset(folder, rename={"state": STATE})
    with pytest.raises(DataError, match=r"no column or element 'motor_9' to rename. Did you mean 'motor_"):
        require_known({"motor_9": "x"}, (folder,))
    require_known({"motor_0": "x", "state": STATE}, (folder,))
    with pytest.raises(DataError, match="two columns 'state' after 'actions' is renamed to it"):
        read_information(folder, {"actions": "state"})


def test_a_setting_is_printed_as_the_command_line_reads_it():
    pairs = {"agent_pos[0]": "robot x", "shoulder.pos": "motor[1]", "a:b": "c"}
    text = as_setting("train.rename", pairs).strip('"')
    assert OverridesParser.create().parse_override(text).value() == pairs


def test_a_checkpoint_remembers_the_names_it_learned_by(tmp_path):
    policy = torch.nn.Linear(1, 1)
    remember_renaming(policy, OURS)
    other = torch.nn.Linear(1, 1)
    remember_described(other, described_origin(policy), "config.json")
    assert renaming_of(other) == OURS and renaming_of(None) == {}
    with pytest.raises(CheckpointError, match="'renamed' is"):
        remember_described(other, {"renamed": ["x"]}, "config.json")


def test_names_that_a_renaming_takes_away_or_gives_twice_are_said(tmp_path):
    write_dataset(moving_episodes(), tmp_path / "data")
    with pytest.raises(DataError, match=r"train.rename renames 'action', .*: remove that entry"):
        read_dataset(tmp_path / "data", rename={"action": "actions"})
    first, second = read_dataset(tmp_path / "data").action_field.names[:2]
    with pytest.raises(DataError, match=f"Two elements would be named '{second}' after renaming"):
        read_dataset(tmp_path / "data", rename={first: second})
    swapped = read_dataset(tmp_path / "data", rename={first: second, second: first})
    assert swapped.action_field.names[:2] == (second, first)
