"""Options of a world that come from a file are plain values of usual size, and are said where they apply."""

import pytest

from robopolicy.building.origins import with_world_of
from robopolicy.configuration import compose
from robopolicy.core.delayed import with_latency_of
from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.origin import WorldOrigin, check_saved_options
from sims.registry import make_world, trusted_options

ODD = {
    "latency_steps": (10_000_000, -1, 1.5, float("nan"), "3", True, [3], {}),
    "history": (10**9, 0, [[[]]]),
    "style": ([[[[]]]], "x", 10**20),
    "workers": (10**6,),
    "threads": (10**6, 0),
    "seed": (2**70, -1),
    "fps": (0, float("inf"), 1e308),
    "reward": ("/etc/passwd", "../x", "a" * 10_000, "~/x"),
    "env_options": (
        {"xml_file": "/tmp/evil.xml"},
        {"xml_file": "evil.XML"},
        {"a": [[[[[[1]]]]]]},
        {"a": [0] * 5000},
        {"a": 1e300},
        {"a": float("nan")},
        {"a": {"b": "plugin.so"}},
    ),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ODD.items() for value in values])
def test_what_no_world_takes_is_refused_by_name(name, value):
    with pytest.raises(CheckpointError, match=name) as error:
        check_saved_options({name: value}, "somewhere")
    assert len(str(error.value)) < 400
    origin = WorldOrigin("reach_planar", {name: value})
    with pytest.raises(CheckpointError, match=name):
        trusted_options(origin, "somewhere", {})
    assert trusted_options(origin, "somewhere", {name: value}) == {}  # the user has named it


def test_what_worlds_take_is_taken():
    options = {
        "latency_steps": 4,
        "latency_hold": "zero",
        "terminate_on_success": False,
        "style": 3,
        "cameras": ["top"],
        "image_size": {"top": [48, 64]},
        "reward_scale": 0.5,
        "fps": None,
        "success": "package.module:function",
        "env_options": {"frame_skip": 5, "render_mode": "rgb_array", "task": "a/b-v1"},
    }
    check_saved_options(options, "somewhere")


def test_options_of_a_checkpoint_are_said(capsys):
    section = compose(["world=push_t"]).world
    with_world_of(section, WorldOrigin("reach_planar", {"latency_steps": 4, "style": 2}), "the checkpoint")
    assert "World options from the checkpoint: latency_steps=4, style=2" in capsys.readouterr().out
    with_world_of(section, WorldOrigin("reach_planar"), "the checkpoint")
    assert "World options" not in capsys.readouterr().out


def test_a_latency_without_end_is_refused_of_the_user_as_well():
    with pytest.raises(ConfigError, match=r"latency_steps is 1000000000.*from 0 to 1000"):
        with_latency_of({"latency_steps": 10**9}, make_world("reach_planar", 1))
