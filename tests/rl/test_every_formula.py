"""Every mechanism of ours has a test that checks its mathematics, and says so."""

from pathlib import Path

from marked import marked

from robopolicy.rl.registry import mechanisms

TESTS = Path(__file__).resolve().parents[1]


def test_every_mechanism_has_a_test_of_its_formula():
    ours = {f"{entry.slot.value}/{entry.name}" for entry in mechanisms() if entry.path.startswith("robopolicy.")}
    marked_tests = marked(TESTS)
    assert len(ours) >= 99
    missing = sorted(ours - set(marked_tests))
    assert not missing, f"No test is marked with checks(...) for: {', '.join(missing)}"
    slots = {name.split("/")[0] for name in ours}
    unknown = sorted(name for name in marked_tests if name.split("/")[0] in slots and "/" in name and name not in ours)
    assert not unknown, f"Tests are marked with names that are no mechanisms: {', '.join(unknown)}"


def test_marks_are_found_wherever_they_may_stand(tmp_path: Path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.checks('all/of_them')\n"
        "@pytest.mark.checks('a/b', 'A Paper')\n"
        "def test_one(): ...\n"
        "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.checks('a/c'))])\n"
        "def test_two(x): ...\n"
        "@pytest.mark.checks('a/d')\n"
        "class TestThree:\n"
        "    def test_four(self): ...\n"
        "def helper(): ...\n"
    )
    assert marked(folder) == {
        "A Paper": ["tests/test_a.py::test_one"],
        "a/b": ["tests/test_a.py::test_one"],
        "a/c": ["tests/test_a.py::test_two"],
        "a/d": ["tests/test_a.py::TestThree::test_four"],
        "all/of_them": [
            "tests/test_a.py::TestThree::test_four",
            "tests/test_a.py::test_one",
            "tests/test_a.py::test_two",
        ],
    }
