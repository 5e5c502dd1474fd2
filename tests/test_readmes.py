"""What the READMEs promise holds: links lead somewhere, settings exist, and their code runs."""

import ast
import inspect
import json
import re
import runpy
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from robopolicy.cli import main
from robopolicy.core.registry import load_dotted
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.testing.world import check_world
from robopolicy.verbs.verb import VERBS
from sims.engine import MujocoWorld
from sims.recorded import DemonstratedWorld
from sims.suites.gymnasium_suite import GymnasiumWorld, make_gymnasium_world

ROOT = Path(__file__).parents[1]
READMES = sorted(path for path in ROOT.glob("**/README.md") if ".venv" not in path.parts)


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def first_column(table):
    """Return the code words in the first column of a table."""
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def options(world):
    given = {"self", "env_id", "name", "task", "make_environment", "batch_size", "cameras", "image_size", "options"}
    return set(inspect.signature(world).parameters) - given


PARSERS = {
    "python": ast.parse,
    "sh": lambda text: subprocess.run(["bash", "-n"], input=text, text=True, check=True),
    "json": json.loads,
    "xml": ElementTree.fromstring,
    "yaml": yaml.safe_load,
    "text": str,
}


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_of_code_names_its_language_and_parses(path):
    prose, fences = path.read_text(), r"^```(\w*)\n(.*?)^```$"
    for language, text in re.findall(fences, prose, re.DOTALL | re.MULTILINE):
        assert language in PARSERS, f"```{language} above {text[:60]!r}"
        PARSERS[language](text)
    outside = re.sub(fences, "", prose, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^\n {4}\S.*", outside, re.MULTILINE)
    assert not indented, "blocks of code are fenced, ```python or ```sh, so that they can be tested"


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    missing = [link for link in links if not link.startswith("http") and not (path.parent / link).exists()]
    assert not missing


def slug(heading):
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.long
def test_the_world_models_readme_looks_at_a_model(tmp_path, monkeypatch, capsys):
    (code,) = [block for block in blocks(ROOT / "worldmodels" / "README.md", "python") if "examine" in block]
    monkeypatch.chdir(tmp_path)
    assert main(["collect", "recipe=push_cube", "collect.episodes=24"]) == 0
    small = "worldmodel.transitions=400", "worldmodel.fit.steps=10", "worldmodel.config.width=16"
    assert main(["worldmodel", "recipe=push_cube", *small, "worldmodel.data=[runs/collect/push_cube/0/dataset]"]) == 0
    (tmp_path / "look.py").write_text(code)
    found = runpy.run_path("look.py")
    assert found["step"].uncertainty.shape == (8, 4) and np.isfinite(found["step"].uncertainty).all()
    assert found["figures"]


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_headings(path):
    for file, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", path.read_text()):
        if not file.startswith("http"):
            text = (path.parent / file if file else path).read_text()
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", text, re.MULTILINE)), (file, anchor)


def test_every_benchmark_is_in_the_contents_of_their_page():
    text = (ROOT / "robopolicy" / "benchmarks" / "README.md").read_text()
    headings = set(re.findall(r"^## .*`(\w+)`$", text, re.MULTILINE))
    assert headings == set(re.findall(r"\[`(\w+)`\]\(#", text)) and len(headings) > 20


def test_every_verb_is_in_the_readme_and_every_verb_there_exists():
    text = (ROOT / "README.md").read_text()
    assert first_column(text[text.index("| verb |") : text.index("`robopolicy VERB --help`")]) == set(VERBS.names())


@pytest.mark.long
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    (code,) = blocks(ROOT / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebook.py").write_text(code)
    runpy.run_path("notebook.py")
    printed = capsys.readouterr().out
    assert re.search(
        r"^\d+% \(0\.\d+, [01]\.\d+\), report: runs/finetune/notebook/0/report.html$", printed, re.MULTILINE
    )
    assert (tmp_path / "runs" / "finetune" / "notebook" / "0" / "checkpoint").is_dir()


def test_every_recipe_in_the_readme_exists():
    text = (ROOT / "README.md").read_text()
    named = first_column(text[text.index("| recipe |") : text.index("What comes of them")])
    assert named == {path.stem for path in (ROOT / "configs" / "recipe").glob("*.yaml")} - {"none"}


def test_every_option_of_every_world_is_explained():
    text = (ROOT / "sims" / "README.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    native = options(MujocoWorld)
    outside = options(GymnasiumWorld) | {"env_options"}
    assert options(make_gymnasium_world) <= outside
    assert native | outside <= rows
    recorded = {"tolerance", "patches"}
    assert recorded <= set(inspect.signature(DemonstratedWorld).parameters)
    assert all(f"`{name}`" in text for name in recorded)


def test_the_success_and_reward_of_the_simulators_readme_are_what_a_world_asks_for(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(blocks(ROOT / "sims" / "README.md", "python")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"success": "mine:on_target", "reward": "mine:potential", "terminate_on_success": False}
    world = make_gymnasium_world("Reacher-v5", 2, **given)
    world.reset(seeds=[0, 1])
    step = world.step(np.zeros((2, 3, 2)))  # of Reacher these elements are sines, which is all the same to it
    assert step.success.shape == (2,)
    assert np.isfinite(step.rewards["progress"]).all()
    world.close()


def test_the_task_of_the_simulators_readme_is_a_world_and_its_expert_succeeds(tmp_path, monkeypatch):
    readme = ROOT / "sims" / "README.md"
    (scene,), (_, code) = blocks(readme, "xml"), blocks(readme, "python")
    (tmp_path / "slide.xml").write_text(scene)
    (tmp_path / "slide.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_dotted("slide:task", "Task")()
    check_world(lambda rows: MujocoWorld(task, rows))
    world = MujocoWorld(task, 8)
    assert evaluate_policy(world, task.expert(), np.arange(8)).success_rate == 1.0
    world.reset(seeds=np.arange(8))
    red, green, blue = np.moveaxis(world.render(camera="top").astype(int), -1, 0)
    assert (red - green > 80).any() and (blue - red > 80).any(), "the ball, or the box, cannot be told from the track"
