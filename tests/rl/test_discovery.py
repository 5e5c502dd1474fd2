"""Mechanisms are read off source files; what is read is what an import would register."""

import ast
import importlib
import importlib.metadata
import pkgutil

import pytest

from robopolicy import rl
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.rl import registry
from robopolicy.rl.registry import Mechanism, Slot, _of_module, get_mechanism, mechanism, mechanisms


def test_what_is_read_is_what_an_import_registers():
    for module in pkgutil.walk_packages(rl.__path__, "robopolicy.rl."):
        importlib.import_module(module.name)
    ours = {key: entry for key, entry in registry._registered.items() if entry.path.startswith("robopolicy.rl")}
    assert ours == registry._ours()
    for entry in mechanisms():
        assert entry.line and callable(entry.function)


def test_constants_inherited_constructors_and_missing_defaults_are_read():
    source = """
WIDTH = 3

class Base:
    def __init__(self, tools, *, width: int = WIDTH, depth):
        pass

@mechanism(Slot.MODEL, "it", source="a " "paper", needs=(Need.CRITIC,), gives=(Need.VALUES, Need.BASE))
class It(Base):
    \"\"\"First.

    Second.
    \"\"\"
"""
    (entry,) = _of_module(ast.parse(source), "a.b")
    assert (entry.path, entry.slot, entry.name, entry.source) == ("a.b:It", "MODEL", "it", "a paper")
    assert (entry.needs, entry.gives, entry.text) == (("CRITIC",), ("VALUES", "BASE"), "First.\n\nSecond.")
    assert entry.options["width"] == 3 and list(entry.options) == ["width", "depth"]
    assert Mechanism(Slot.MODEL, "it", "a.b:It", text=entry.text).line == "First."


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="Two mechanisms are named advantage 'grpo'"):
        mechanism(Slot.ADVANTAGE, "grpo")(lambda rollouts, context: rollouts)


def test_a_mistake_names_the_nearest():
    with pytest.raises(ConfigError, match=r"advantage: there is no mechanism 'grop'. Did you mean 'grpo'"):
        get_mechanism(Slot.ADVANTAGE, "grop")


BROKEN = {
    "gone": (None, "there is no module 'gone'"),
    "half_typed": ("def (", "SyntaxError"),
    "raises": ("raise RuntimeError('no licence')", "no licence"),
    "unknown_slot": ('@mechanism(Slot.NOWHERE, "it")\ndef it(rollouts, context): ...', "NOWHERE"),
}
"""Module of another package -> its source, and what is said of it."""


@pytest.mark.parametrize("module", BROKEN)
def test_a_broken_package_is_said_and_stops_nobody(module, tmp_path, monkeypatch):
    source, message = BROKEN[module]
    if source is not None:
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("theirs", module, registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **chosen: [point])
    registry._installed.cache_clear()
    try:
        with pytest.warns(RobopolicyWarning, match=f"not available .entry point theirs = {module}.*{message}"):
            assert get_mechanism(Slot.ADVANTAGE, "grpo").name == "grpo"
        assert get_mechanism(Slot.ADVANTAGE, "gae")  # and it is said once
    finally:
        registry._installed.cache_clear()
