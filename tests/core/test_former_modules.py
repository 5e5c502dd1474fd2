"""Former names of modules import the present ones, with a warning at the line that imports."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

from robopolicy.core.former_modules import FORMER_MODULES, FORMER_NAMES, FormerModules, keep_former_modules

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def forgotten():
    """Forget former modules that were imported before and after the test."""
    for name in FORMER_MODULES:
        sys.modules.pop(name, None)
    yield
    for name in FORMER_MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("former", FORMER_MODULES)
def test_a_former_module_is_the_present_one(former: str):
    present = importlib.import_module(FORMER_MODULES[former])
    with pytest.warns(DeprecationWarning, match=f"The module {former} is now called {present.__name__}."):
        module = importlib.import_module(former)
    assert module is present
    assert present.__spec__ is not None and present.__spec__.name == present.__name__ == FORMER_MODULES[former]
    assert not (ROOT / (former.replace(".", "/") + ".py")).exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module(former) is present, "one note for each process and module"


def test_both_names_give_the_same_class_and_the_note_points_at_the_import():
    from robopolicy.nn.micro_batches import micro_batches

    with pytest.warns(DeprecationWarning, match="is now called robopolicy.nn.micro_batches") as notes:
        from robopolicy.nn.pieces import micro_batches as former  # pyright: ignore
    assert former is micro_batches
    assert notes[0].filename == __file__


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_names_of_a_former_module_work_in_it(name: str):
    former = next(old for old, present in FORMER_MODULES.items() if present == name)
    with pytest.warns(DeprecationWarning, match="is now called"):
        module = importlib.import_module(former)
    for old, present in FORMER_NAMES[name].items():
        with pytest.warns(DeprecationWarning, match=f"{old} is now called {present}"):
            assert getattr(module, old) is getattr(module, present)


def test_other_modules_are_missing_as_before():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'robopolicy\.nn\.absent'"):
        importlib.import_module("robopolicy.nn.absent")


def test_the_finder_is_added_once():
    keep_former_modules()
    assert sum(isinstance(finder, FormerModules) for finder in sys.meta_path) == 1
