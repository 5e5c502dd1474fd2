"""Dotted paths: found, or refused in a sentence that names what is missing."""

import importlib.metadata

import pytest

from robopolicy.core.errors import ConfigError, extra_conflict
from robopolicy.core.registry import load_dotted


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text("NUMBER = 3\nclass Thing:\n    inner = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_what_is_there_is_found():
    assert load_dotted("of_mine:NUMBER", "Thing") == 3
    assert load_dotted("of_mine:Thing.inner", "Thing") == 5


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("of_mine:Thin", "Did you mean 'Thing'"),
        ("of_mine:NUMBER.part", r"has no 'NUMBER\.part'"),
        ("of_mine:Thing.iner", r"has no 'Thing\.iner'"),
        ("of_min:Thing", "there is no module 'of_min'"),
        ("of_mine", "not an import path"),
        ("of mine:x", "not an import path"),
    ],
)
def test_what_is_not_is_refused(path, text):
    with pytest.raises(ConfigError, match=text):
        load_dotted(path, "Thing")


def test_a_package_that_an_extra_does_not_allow_is_named(monkeypatch):
    installed = {"mujoco": "4.0.0", "gymnasium-robotics": "1.4.2"}
    monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
    sentence = extra_conflict("robotics")
    assert (
        "mujoco 4.0.0 is installed, and robotics works with mujoco<3.12: pip install 'robopolicy[robotics]'" in sentence
    )
    installed["mujoco"] = "3.11.0"
    assert extra_conflict("robotics") == "" and extra_conflict("no_extra") == ""
