"""What no recipe and no benchmark uses lies in rl/experimental, is found by name like the rest, and is listed apart."""

import json
import re
from pathlib import Path

from robopolicy.cli import main
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.presets import PRESETS
from robopolicy.rl.registry import EXPERIMENTAL, Slot, mechanisms
from robopolicy.training.configuration import NEARNESS
from robopolicy.verbs.algorithms import UNMEASURED, is_measured

ROOT = Path(__file__).parents[2]
UNMEASURED_RECIPES = {"irft", "opa_dpo"}
"""Chains of stages of a paper, which nothing measures, as docs/guides/recipes.md says."""
PAPERS = "paper_measurements", "paper_runs"
FILES = (
    *(path for path in (ROOT / "configs").rglob("*.yaml") if path.stem not in UNMEASURED_RECIPES),
    *(path for path in (ROOT / "robopolicy" / "benchmarks").glob("*.py") if path.stem not in PAPERS),
)
"""bench papers, with its measurements, is about experimental mechanisms, too."""
RESTED_ON = {
    "advantage/dr_grpo": "gigpo adds to it",
    f"auxiliaries/{NEARNESS}": "imagine stays near its base",
}
"""Mechanisms that are used without being named in a setting."""


def used() -> set[str]:
    """Return slot/name of all mechanisms that settings of recipes or benchmarks name, alone or within a preset."""
    presets, mechanism_names = {AlgorithmConfig().algorithm}, set(RESTED_ON)
    named = re.compile(rf"\b(algorithm|{'|'.join(slot.value for slot in Slot)})(?:=|: *)(\[[^\]]*\]|\w+)")
    known = {f"{entry.slot.value}/{entry.name}" for entry in mechanisms()}
    for file in FILES:
        for slot, names in named.findall(file.read_text()):
            for name in re.findall(r"\w+", names):
                if slot == "algorithm" and name in PRESETS:
                    presets.add(name)
                elif f"{slot}/{name}" in known:
                    mechanism_names.add(f"{slot}/{name}")
    resolved = [entry for preset in presets for entry in AlgorithmConfig(preset).resolved().entries]
    return mechanism_names | {f"{entry.slot.value}/{entry.name}" for entry in resolved}


def test_what_is_measured_and_what_is_not_lie_apart():
    ours = {f"{entry.slot.value}/{entry.name}": entry for entry in mechanisms() if entry.path.startswith("robopolicy.")}
    measured = {name for name, entry in ours.items() if entry.measured}
    assert len(ours) == 191 and EXPERIMENTAL.startswith("robopolicy.rl.")
    assert measured - used() == set(), "no recipe and no benchmark uses these: they belong into rl/experimental"
    assert used() - measured == set(), "a recipe or a benchmark uses these: they belong to the module of their slot"


def test_recipes_that_nothing_measures_say_so():
    guide = (ROOT / "docs" / "guides" / "recipes.md").read_text()
    for name in UNMEASURED_RECIPES:
        assert re.search(rf"^\| `{name}` \|.*not measured", guide, re.MULTILINE), name


def test_the_list_shows_what_is_not_measured_under_a_title_of_its_own(tmp_path, capsys):
    figures = tmp_path / "all.json"
    assert main(["algorithms", f"json={figures}"]) == 0
    first, second = capsys.readouterr().out.split(UNMEASURED)
    for entry in mechanisms():
        here = second if entry.path.startswith(EXPERIMENTAL) else first
        assert re.search(rf"^{entry.name} ", here, re.MULTILINE), entry.name
    assert is_measured("grpo") and re.search(r"^grpo ", first, re.MULTILINE)
    assert not is_measured("digi_q") and re.search(r"^digi_q ", second, re.MULTILINE)
    listed = json.loads(figures.read_text())
    assert list(listed["presets"]) == list(PRESETS) and len(listed["mechanisms"]) == len(mechanisms())
    assert main(["algorithms", "bnpo"]) == 0 and UNMEASURED in capsys.readouterr().out
    assert main(["algorithms", "gigpo"]) == 0 and UNMEASURED not in capsys.readouterr().out
