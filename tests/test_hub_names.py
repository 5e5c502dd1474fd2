"""Names on the hub: what is one, which settings take one, and which local folder wins."""

import dataclasses
import typing
from pathlib import Path

import pytest

from robopolicy.configuration import Config, compose, with_downloads
from robopolicy.configuration.downloads import CHECKPOINTS, DATASETS
from robopolicy.core.errors import ConfigError, RobopolicyNote
from robopolicy.core.hub import blobs_of, hub_name, local_folder, repository_of
from robopolicy.core.structured import Tagged

LOCAL = {
    *(
        "root",
        "target",
        "run",
        "preference_pairs",
        "certificate",
        "certificate_key",
        "json",
        "folder",
        "dppo",
        "output",
        "record",
        "teachers",
        "detector",
        "detect",
        "gate",
    ),
}
"""Settings that are paths on this machine and nothing else."""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("lerobot/act_aloha", "hf://lerobot/act_aloha"),
        ("hf://a/b", "hf://a/b"),
        ("hf:/a/b", "hf://a/b"),  # what a path makes of it
        ("hf://models/a/b@v1.0", "hf://a/b@v1.0"),
        ("hf://datasets/a/b@refs/pr/3", "hf://datasets/a/b@refs/pr/3"),
        ("datasets/b", "hf://datasets/b"),  # a user of that name
        ("a/b/c", None),
        ("a", None),
        ("/a/b", None),
        ("./a", None),
        ("../b", None),
        ("a/..", None),
        ("a--b/c", None),
        ("runs/finetune/push_t/0", None),
        ("C:/x", None),
    ],
)
def test_what_is_a_name(text, name):
    parsed_name = hub_name(text, "model")
    assert (None if parsed_name is None else str(parsed_name)) == name


def test_the_kind_of_setting_decides_what_a_name_means():
    assert str(hub_name("a/b", "dataset")) == "hf://datasets/a/b"
    assert str(hub_name("hf://models/a/b", "dataset")) == "hf://a/b"


def path_settings(kind, place=""):
    """Yield every setting that is a path, of every kind of every section."""
    for item in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind)[item.name]
        where = f"{place}.{item.name}".lstrip(".")
        if isinstance(hint, type) and issubclass(hint, Tagged):
            for name in hint.kinds.ours:
                yield from path_settings(hint.kinds.configuration(name), f"{where}.{name}")
        elif dataclasses.is_dataclass(hint):
            yield from path_settings(hint, where)
        elif "Path" in str(hint):
            yield where


def test_every_path_is_a_checkpoint_a_dataset_or_local():
    """A new setting says which, or a name on the hub would not be downloaded for it."""
    endings = {where: where.rpartition(".")[2] for where in path_settings(Config)}
    assert len(endings) > 40
    unknown = [where for where, name in endings.items() if name not in CHECKPOINTS | DATASETS | LOCAL]
    assert not unknown, unknown
    assert not (CHECKPOINTS & DATASETS) | ((CHECKPOINTS | DATASETS) & LOCAL)


def test_a_local_folder_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alice" / "policy").mkdir(parents=True)
    assert local_folder("alice/policy", "model") == Path("alice/policy")
    with pytest.warns(RobopolicyNote, match=r"read as a path, because the folder alice exists.*hf://alice/other"):
        assert local_folder("alice/other", "model") == Path("alice/other")


def test_a_repository_of_the_same_name_in_the_cache_is_pointed_out(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for folder in ("alice/policy", "cache/models--alice--policy"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.warns(
        RobopolicyNote, match=r"read as the local folder; the repository on the hub is hf://alice/policy"
    ):
        assert local_folder("alice/policy", "model") == Path("alice/policy")


def test_what_is_no_name_and_what_is_no_input_is_refused():
    with pytest.raises(ConfigError, match="'hf://a' is not a name on the hub: write hf://USER/NAME"):
        local_folder(Path("hf://a"), "model")
    config = compose(["convert.target=hf://a/b"])
    with pytest.raises(ConfigError, match=r"convert\.target is a local path.*robopolicy push FOLDER USER/NAME"):
        with_downloads(config, ("convert",))


def test_settings_without_a_name_stay_the_same_object():
    config = compose(["evaluate.policy=/nowhere/policy", "rank.policies=[/a,/b]"])
    assert with_downloads(config, ("run", "world", "evaluate", "rank", "policy", "worldmodel")) is config


def test_names_are_read_back_from_the_cache():
    snapshot = Path("/home/x/.cache/huggingface/hub/models--alice--my-policy/snapshots/0123abcd")
    assert str(repository_of(snapshot)) == "hf://alice/my-policy@0123abcd"
    assert str(repository_of(snapshot / "config.json")) == "hf://alice/my-policy@0123abcd"
    assert repository_of("runs/train/push_t/0") is None
    assert blobs_of(snapshot) == snapshot.parents[1] / "blobs"
    assert blobs_of(Path("runs/snapshots/0")) is None
