"""Former names of public classes and functions work with a warning, and each leads to a present one."""

import ast
import importlib
import sys
import types
import warnings
from pathlib import Path

import pytest

from robopolicy.core.former_names import FormerName, keep_former_names

ROOT = Path(__file__).resolve().parents[2]


def tables() -> list[tuple[str, dict[str, str]]]:
    """Return module and former names of each table in the three packages, read without importing it."""
    result = []
    for package in ("robopolicy", "worldmodels", "sims"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if "keep_former_names(__name__" not in "".join(text.split()):
                continue
            for node in ast.parse(text).body:
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    call = node.value
                    if isinstance(call.func, ast.Name) and call.func.id == "keep_former_names":
                        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                        result.append((module, ast.literal_eval(call.args[1])))
    return result


@pytest.fixture
def module():
    made = types.ModuleType("made_for_former_names")
    made.present = object()
    sys.modules[made.__name__] = made
    keep_former_names(made.__name__, {"former": "present"})
    yield made
    del sys.modules[made.__name__]


def test_a_former_name_returns_the_present_object_and_says_its_name(module):
    with pytest.warns(DeprecationWarning, match="made_for_former_names.former is now called present"):
        assert module.former is module.present
    with pytest.warns(DeprecationWarning, match="is now called present") as notes:
        from made_for_former_names import former
    assert former is module.present
    assert notes[0].filename == __file__, "the note points at the line that uses the former name"


def test_an_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="module 'made_for_former_names' has no attribute 'other'"):
        _ = module.other


def test_a_former_member_returns_the_present_one():
    class Holder:
        share = FormerName("progress")

        def __init__(self):
            self.progress = 0.5

    with pytest.warns(DeprecationWarning, match="Holder.share is now called progress"):
        assert Holder().share == 0.5


def test_every_former_name_leads_to_a_name_that_exists():
    known = tables()
    assert known
    for module_name, names in known:
        target = importlib.import_module(module_name)
        for former, present in names.items():
            assert former not in vars(target), f"{module_name}.{former} exists beside {present}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert getattr(target, former) is getattr(target, present)


def test_a_policy_that_declares_its_origin_by_the_former_member_is_pretrained():
    from robopolicy.policies.abilities import is_pretrained

    assert is_pretrained(types.SimpleNamespace(began_elsewhere=True))
    assert is_pretrained(types.SimpleNamespace(is_pretrained=True))
    assert not is_pretrained(types.SimpleNamespace(is_pretrained=False))
