"""Former names of public classes and functions work with a warning, and each leads to a present one."""

import ast
import importlib
import inspect
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from robopolicy.core.former_names import FormerName, accept_former_arguments, keep_former_names

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
    made.__dict__["present"] = object()
    sys.modules[made.__name__] = made
    keep_former_names(made.__name__, {"former": "present"})
    yield made
    del sys.modules[made.__name__]


def test_a_former_name_returns_the_present_object_and_says_its_name(module):
    with pytest.warns(DeprecationWarning, match="made_for_former_names.former is now called present"):
        assert module.former is module.present
    with pytest.warns(DeprecationWarning, match="is now called present") as notes:
        from made_for_former_names import former  # pyright: ignore[reportMissingImports]
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


@accept_former_arguments({"oversight": "stopping"})
def present_function(stopping: int, target: float = 0.5) -> tuple[int, float]:
    return stopping, target


def test_a_former_argument_sets_the_present_one_and_the_note_points_at_the_call():
    with pytest.warns(DeprecationWarning, match="present_function.oversight=. is now called stopping") as notes:
        assert present_function(oversight=3) == (3, 0.5)  # pyright: ignore[reportCallIssue]
    assert notes[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert present_function(3, target=0.2) == present_function(stopping=3, target=0.2) == (3, 0.2)


def test_an_argument_under_both_names_is_refused():
    with pytest.raises(TypeError, match="'oversight' is the former name of 'stopping', and both are given"):
        present_function(stopping=1, oversight=2)  # pyright: ignore[reportCallIssue]


def former_members() -> list[tuple[str, str, str]]:
    """Return module, class and former member of each `FormerName` in the three packages, read without importing."""
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), scope.name, node.targets[0].id)
        for package in ("robopolicy", "worldmodels", "sims")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "FormerName(" in path.read_text()
        for scope in ast.walk(ast.parse(path.read_text()))
        if isinstance(scope, ast.ClassDef)
        for node in scope.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("FormerName(")
        if isinstance(node.targets[0], ast.Name)
    ]


def test_every_former_member_leads_to_a_member_that_exists():
    members = former_members()
    assert {member for _, _, member in members} >= {"start_wave", "take_left", "begin_to_act", "say", "PARTED"}
    for module_name, owner_name, member in members:
        owner = getattr(importlib.import_module(module_name), owner_name)
        with pytest.warns(DeprecationWarning, match=f"{owner_name}.{member} is now called"):
            assert getattr(owner, member) is getattr(owner, vars(owner)[member].present)


def former_arguments() -> list[tuple[str, str, dict[str, str]]]:
    """Return module, function and former arguments of each decorated function in the three packages."""
    result = []
    for package in ("robopolicy", "worldmodels", "sims"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "@accept_former_arguments(" not in path.read_text() or path.stem == "former_names":
                continue
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for scope in ast.walk(ast.parse(path.read_text())):
                prefix = f"{scope.name}." if isinstance(scope, ast.ClassDef) else ""
                for node in scope.body if isinstance(scope, ast.Module | ast.ClassDef) else []:
                    for call in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                        text = ast.unparse(call)
                        if text.startswith("accept_former_arguments("):
                            names = ast.literal_eval(text.removeprefix("accept_former_arguments"))
                            result.append((module, prefix + getattr(node, "name", ""), names))
    return result


def test_every_former_argument_leads_to_an_argument_that_exists():
    functions = former_arguments()
    assert {name for _, name, _ in functions} >= {"finetune", "StoppingRule.__init__", "EpisodePlayer.__init__"}
    for module_name, path, names in functions:
        function: Any = importlib.import_module(module_name)
        for part in path.split("."):
            function = getattr(function, part)
        arguments = inspect.signature(function).parameters
        assert set(names.values()) <= arguments.keys() and not names.keys() & arguments.keys(), path


def test_a_resume_point_of_version_0_1_names_the_reason_why_its_run_ended():
    from robopolicy.training.stopping import EndReason, StoppingRule, StoppingSettings

    rule = StoppingRule(StoppingSettings())
    rule.restore({**rule.tree(), "ended": "gap with no real gain"})
    assert rule.ended is EndReason.DIVERGED


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
