"""Whatever config.json says, a checkpoint loads or is refused in one line, soon, and without taking memory."""

import copy
import json
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from point_world import SPEC, recorded

from robopolicy.core.errors import CheckpointError, RobopolicyError
from robopolicy.policies import (
    DenoisingPolicy,
    DenoisingPolicyConfig,
    TokenConfig,
    TokenPolicy,
    TokenPolicyConfig,
    load_policy,
)
from robopolicy.policies.configuration import JointConfig
from robopolicy.policies.joint import JointModel
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import EnsembleConfig, RssmConfig
from worldmodels.ensemble import EnsembleModel
from worldmodels.rssm.model import RssmModel

SECONDS, MEGABYTES = 15.0, 1000
"""Of one try on a busy machine, and of all tries together; these checkpoints load in .05 s and fill less than 1 MB."""
KINDS = ("denoising", "token", "joint", "ensemble", "rssm")
STRANGE: tuple[Any, ...] = (
    None, True, "x", "", "inf", 0, 1, -1, 3, 1000, 10**6, 10**9, 10**18, 10**40, -(10**9), 0.5, 1e308, float("nan"),
    float("inf"), [], {}, [1] * 50, ["a"], {"a": 1}, [[[]]], {"kind": "os:system"}, "os:system", "../..", "\n\n",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("strange")
    known: dict[str, Any] = {"fps": 10.0, "instructions": SPEC.instructions}
    fields, action = SPEC.observation, SPEC.action
    denoising = DenoisingPolicyConfig(width=16, depth=1, sampling_steps=2, denoising_steps=4, history=2)
    policy = DenoisingPolicy(denoising, fields, action, **known)
    policy.prepare_finetuning(2, train_encoder=True)
    policy.save(root / "denoising")
    token = TokenConfig(width=16, depth=1, heads=2, feed_forward=16, bins=5)
    TokenPolicy(TokenPolicyConfig(chunk=2, token=token), fields, action, **known).save(root / "token")
    JointModel(JointConfig(chunk=2, width=16, depth=1, heads=2), SPEC).save(root / "joint")
    episodes = recorded(20)
    ensemble = EnsembleConfig(members=2, width=8, depth=1, head_width=8)
    save_world_model(EnsembleModel.build(ensemble, SPEC, episodes, 0), root / "ensemble")
    rssm = RssmConfig(size="tiny", members=2, deter=16, blocks=2, hidden=8, stochastic=2, classes=4)
    save_world_model(RssmModel.build(rssm, SPEC, episodes, 0), root / "rssm")
    return {kind: root / kind for kind in KINDS}


def load(kind: str, folder: Path) -> None:
    load_world_model(folder) if kind in ("ensemble", "rssm") else load_policy(folder)


def refused(kind: str, folder: Path, text: str) -> str:
    """Put `text` into config.json and load: return the refusal, "" where it loads, and raise what else is raised."""
    (folder / "config.json").write_text(text)
    began = time.monotonic()
    try:
        load(kind, folder)
    except RobopolicyError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 3000
        return message
    finally:
        assert time.monotonic() - began < SECONDS
    return ""


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything inside nested lists and mappings."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(description: dict[str, Any], draw: Any) -> dict[str, Any]:
    """Drop, replace or add something in a copy of `description`."""
    changed_description = copy.deepcopy(description)
    path = draw(st.sampled_from([each for each in places(changed_description) if each != ("sha256",)]))
    node = changed_description
    for key in path[:-1]:
        node = node[key]
    what = draw(st.sampled_from(["replace", "replace", "replace", "drop", "add", "wrap", "text"]))
    if what == "drop":
        del node[path[-1]]
    elif what == "add" and isinstance(node[path[-1]], dict):
        node[path[-1]]["strange"] = draw(st.sampled_from(STRANGE))
    elif what == "wrap":
        node[path[-1]] = [node[path[-1]]]
    elif what == "text":
        node[path[-1]] = str(node[path[-1]])
    else:
        node[path[-1]] = draw(st.sampled_from(STRANGE))
    return changed_description


def fuzz(kind: str, folder: Path, tries: int) -> None:
    description = json.loads((folder / "config.json").read_text())
    before, outcomes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, {True: 0, False: 0}

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]

    @settings(max_examples=tries, deadline=None, derandomize=True, suppress_health_check=checks, database=None)
    @given(st.data())
    def change(data: Any) -> None:
        content = description
        for _ in range(data.draw(st.sampled_from([1, 1, 2]))):
            content = changed(content, data.draw)
        outcomes[bool(refused(kind, folder, json.dumps(content)))] += 1

    change()
    assert outcomes[True] > tries / 4  # not a test that everything loads
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES * 1024
    assert not refused(kind, folder, json.dumps(description))


@pytest.mark.parametrize("kind", KINDS)
def test_strange_descriptions_load_or_are_refused(folders, tmp_path: Path, kind: str):
    fuzz(kind, shutil.copytree(folders[kind], tmp_path / kind), 40)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_may_be_a_billion(folders, tmp_path: Path, kind: str):
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    description = json.loads((folder / "config.json").read_text())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for *path, key in places(description):
        content = copy.deepcopy(description)
        node = content
        for each in path:
            node = node[each]
        if isinstance(node[key], int) and not isinstance(node[key], bool):
            node[key] = 10**9
            refused(kind, folder, json.dumps(content))
            taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
            assert taken < MEGABYTES, (*path, key)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_strange_descriptions_load_or_are_refused(folders, tmp_path: Path, kind: str):
    fuzz(kind, shutil.copytree(folders[kind], tmp_path / kind), 2000)


def put(description: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    changed_description = copy.deepcopy(description)
    *parts, last = place.split(".")
    node = changed_description
    for key in parts:
        node = node[key]
    node[last] = value
    return changed_description


@pytest.mark.parametrize(
    ("kind", "place", "value", "complaint"),
    [
        ("denoising", "kind", ["a"], "its kind is a list instead of a text"),
        ("ensemble", "kind", ["a"], "its kind is a list instead of a text"),
        ("denoising", "config.width", 10**6, "far more memory"),
        ("denoising", "config.width", 10**9, "config.json"),
        ("denoising", "config.depth", 10**9, "far more memory"),
        ("denoising", "config.history", 10**9, "far more memory"),
        ("denoising", "config.denoising_steps", 10**9, "denoising_steps=1000000000 must be at most"),
        ("denoising", "spec.fps", 0, "its fps is 0, not a positive number"),
        ("denoising", "spec.fps", "x", "its fps is x, not a positive number"),
        ("denoising", "spec.fps", float("nan"), "its fps is nan, not a positive number"),
        ("token", "config.chunk", 10**9, "must be at most"),
        ("denoising", "kind", "a\nb", "its kind is text of 3 characters"),
        ("joint", "model.config.candidates", 10**9, "at most"),
        ("joint", "model.config.edm.steps", 10**9, "at most"),
        ("token", "backbone.hidden_size", 10**6, "far more memory"),
        ("token", "backbone.num_hidden_layers", 10**9, "not a valid size of a language model"),
        ("joint", "model.config.width", 10**6, "far more memory"),
        ("joint", "model.config.depth", 10**9, "far more memory"),
        ("joint", "spec.fps", 0, "its fps is 0, not a positive number"),
        ("ensemble", "model.config.members", 10**9, "far more memory"),
        ("ensemble", "model.config.success_head", "\n\n", "contains '\\n\\n', which is not a known success head"),
        ("ensemble", "spec.fps", "x", "its fps is x, not a positive number"),
        ("rssm", "model.config.layers", 10**9, "far more memory"),
        ("rssm", "spec.horizon", -1, "its horizon is -1"),
        ("rssm", "spec.observation", [], "its observation is not a mapping"),
    ],
)  # fmt: skip
def test_what_was_tried(folders, tmp_path: Path, kind: str, place: str, value: Any, complaint: str):
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    description = json.loads((folder / "config.json").read_text())
    began = time.monotonic()
    assert complaint in refused(kind, folder, json.dumps(put(description, place, value)))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nested", ["[", '{"kind":'])
def test_nesting_without_end(folders, tmp_path: Path, kind: str, nested: str):
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    assert "corrupt" in refused(kind, folder, nested * 100_000)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_seen(folders, tmp_path: Path, kind: str):
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    whole = bytearray((folder / "model.safetensors").read_bytes())
    whole[-2] ^= 1
    (folder / "model.safetensors").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not the file"):
        load(kind, folder)


def test_loading_draws_nothing(folders):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for kind in KINDS:
        load(kind, folders[kind])
    assert torch.equal(torch.get_rng_state(), state)
