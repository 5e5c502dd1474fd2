"""What READMEs and documentation promise holds: links lead somewhere, settings exist, commands and code run."""

import ast
import importlib
import inspect
import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from robopolicy.cli import main, overrides
from robopolicy.configuration import compose
from robopolicy.core.registry import load_dotted
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.testing.world import check_world
from robopolicy.verbs.verb import VERBS, declaration
from sims.engine import MujocoWorld
from sims.recorded import DemonstratedWorld
from sims.suites.gymnasium_suite import GymnasiumWorld, make_gymnasium_world

ROOT = Path(__file__).parents[1]
READMES = sorted(path for path in ROOT.glob("**/README.md") if ".venv" not in path.parts)
DOCS = ROOT / "docs"
GENERATED = {DOCS / "reference" / f"{name}.md" for name in ("verbs", "settings", "algorithms", "api", "results_tables")}
"""Pages that `make docs` writes; it checks the links to them."""
WRITTEN = [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts and path not in GENERATED]
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", *WRITTEN]
CODE = re.compile(r"^```(?:\{code-block\} )?(\w*)\n(?:^:\w[^\n]*\n)*(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A block of code: its language and its text; those of MyST may have a caption."""
DIRECTIVE = re.compile(r"^```\{(?!code-block)[\w-]+\}.*?^```$", re.DOTALL | re.MULTILINE)
SIMULATORS = DOCS / "guides" / "simulators.md"
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(path, language):
    return [text for name, text in CODE.findall(DIRECTIVE.sub("", path.read_text())) if name == language]


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


@each_page
def test_every_block_of_code_names_its_language_and_parses(path):
    prose = DIRECTIVE.sub("", path.read_text())
    for language, text in CODE.findall(prose):
        assert language in PARSERS, f"```{language} above {text[:60]!r}"
        PARSERS[language](text)
    outside = CODE.sub("", prose)
    indented = re.findall(r"^\n {4}\S.*", outside, re.MULTILINE)
    assert not indented, "blocks of code are fenced, ```python or ```sh, so that they can be tested"


@each_page
def test_links_lead_to_files(path):
    prose = re.sub(r"`[^`\n]*`", "", CODE.sub("", path.read_text()))
    links = re.findall(r"\]\(([^)#]+)\)", prose)
    files = [path.parent / link for link in links if not link.startswith("http")]
    assert not [file for file in files if not file.exists() and file.resolve() not in GENERATED]


def slug(heading):
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


NAME = re.compile(r"`((?:robopolicy|sims|worldmodels)(?:\.\w+)+)(?:\([^`]*\))?`")
FILE = re.compile(r"`((?:robopolicy|sims|worldmodels|configs|tests|docs|assets)/[\w./]+\.\w+)`")


@pytest.mark.long
def test_names_and_files_in_the_documentation_exist():
    """A name is a module, what one holds, or a group of entry points, which the code spells out."""
    sources = [path for room in ("robopolicy", "sims", "worldmodels") for path in (ROOT / room).rglob("*.py")]
    spelled = {name for path in sources for name in re.findall(r'"(robopolicy\.\w+)"', path.read_text())}
    lost = set()
    for page in WRITTEN:
        text = DIRECTIVE.sub("", CODE.sub("", page.read_text()))
        lost |= {(page.name, file) for file in FILE.findall(text) if not (ROOT / file).exists()}
        for name in set(NAME.findall(text)) - spelled:
            module, _, attribute = name.rpartition(".")
            try:
                member = importlib.import_module(name)
            except ModuleNotFoundError:
                member = getattr(importlib.import_module(module), attribute, None)
            lost |= set() if member is not None else {(page.name, name)}
    assert not lost


@pytest.mark.long
def test_the_guide_to_world_models_looks_at_a_model(tmp_path, monkeypatch, capsys):
    (code,) = [block for block in blocks(DOCS / "guides" / "world_models.md", "python") if "examine" in block]
    monkeypatch.chdir(tmp_path)
    assert main(["collect", "recipe=push_cube", "collect.episodes=24"]) == 0
    small = "worldmodel.transitions=400", "worldmodel.fit.steps=10", "worldmodel.config.width=16"
    assert main(["worldmodel", "recipe=push_cube", *small, "worldmodel.data=[runs/collect/push_cube/0/dataset]"]) == 0
    (tmp_path / "look.py").write_text(code)
    namespace = runpy.run_path("look.py")
    assert namespace["step"].uncertainty.shape == (8, 4) and np.isfinite(namespace["step"].uncertainty).all()
    assert namespace["figures"]


@each_page
def test_links_lead_to_headings(path):
    for file, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", path.read_text()):
        if not file.startswith("http") and (path.parent / file).resolve() not in GENERATED:
            text = (path.parent / file if file else path).read_text()
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", text, re.MULTILINE)), (file, anchor)


def test_every_benchmark_is_in_the_contents_of_their_page():
    text = (ROOT / "robopolicy" / "benchmarks" / "README.md").read_text()
    headings = set(re.findall(r"^## .*`(\w+)`$", text, re.MULTILINE))
    assert headings == set(re.findall(r"\[`(\w+)`\]\(#", text)) and len(headings) > 20


def test_every_verb_is_in_the_reference_with_an_example(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    page = importlib.import_module("generated").verbs()
    parts = re.split(r"^## (\w+)$", page, flags=re.MULTILINE)[1:]
    assert set(parts[::2]) == set(VERBS.names())
    assert all(f"```sh\nrobopolicy {name}" in text for name, text in zip(parts[::2], parts[1::2], strict=True))


def test_the_readme_fits_a_screen_and_a_half_and_its_results_are_the_figures(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    results = importlib.import_module("results_table")
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 90
    unlinked = [page.name for page in DOCS.glob("guides/*.md") if f"](docs/guides/{page.name})" not in text]
    assert not unlinked, "the README links every guide"
    assert text.count("<!-- headlines -->") == 1 and results.headlines() in text, "run: python docs/results_table.py"
    assert results.PAGE.read_text() == results.page(), "run: python docs/results_table.py"
    rows = re.findall(r"^\| .*README\.md#([\w-]+)\) \|$", results.page(), re.MULTILINE)
    assert len(rows) >= 40 and set(rows) <= set(results.anchors().values())


def test_a_changed_figure_changes_the_headlines_and_a_wrong_interval_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    results = importlib.import_module("results_table")
    figures = json.loads(json.dumps(results.figures("recipes")))
    monkeypatch.setattr(results, "figures", lambda name: figures)
    rate = figures["recipes"]["push_cube"]["14"]["tuned"]
    pattern = ("recipes", "push_cube", "1?", "tuned")
    before = results.pooled("recipes", pattern)
    rate["success_rate"], (rate["low"], rate["high"]) = 0.5, wilson(100, 200)
    after = results.pooled("recipes", pattern)
    assert (before.episodes, before.seeds, after.lowest) == (1000, 5, 0.5) and after.rate < before.rate
    assert (after.low, after.high) == wilson(round(after.rate * 1000), 1000)
    rate["low"] = 0.1
    with pytest.raises(ValueError, match="interval"):
        results.pooled("recipes", pattern)


@pytest.mark.long
def test_the_python_of_the_guide_to_recipes_runs(tmp_path, monkeypatch, capsys):
    (code,) = blocks(DOCS / "guides" / "recipes.md", "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebook.py").write_text(code)
    runpy.run_path("notebook.py")
    printed = capsys.readouterr().out
    assert re.search(
        r"^\d+% \(0\.\d+, [01]\.\d+\), report: runs/finetune/notebook/0/report.html$", printed, re.MULTILINE
    )
    assert (tmp_path / "runs" / "finetune" / "notebook" / "0" / "checkpoint").is_dir()


def test_every_recipe_is_in_the_guide_and_every_recipe_there_exists():
    text = (DOCS / "guides" / "recipes.md").read_text()
    named = first_column(text[text.index("| recipe |") : text.index("Their results")])
    assert named == {path.stem for path in (ROOT / "configs" / "recipe").glob("*.yaml")} - {"none"}


def test_every_option_of_every_world_is_explained():
    text = SIMULATORS.read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    native = options(MujocoWorld)
    outside = options(GymnasiumWorld) | {"env_options"}
    assert options(make_gymnasium_world) <= outside
    assert native | outside <= rows
    recorded = {"tolerance", "patches"}
    assert recorded <= set(inspect.signature(DemonstratedWorld).parameters)
    assert all(f"`{name}`" in text for name in recorded)


def test_the_success_and_reward_of_the_guide_to_simulators_are_what_a_world_asks_for(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(next(each for each in blocks(SIMULATORS, "python") if "on_target" in each))
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"success": "mine:on_target", "reward": "mine:potential", "terminate_on_success": False}
    world = make_gymnasium_world("Reacher-v5", 2, **given)
    world.reset(seeds=[0, 1])
    step = world.step(np.zeros((2, 3, 2)))  # of Reacher these elements are sines, which is all the same to it
    assert step.success.shape == (2,)
    assert np.isfinite(step.rewards["progress"]).all()
    world.close()


def test_the_task_of_the_tutorial_is_a_world_and_its_expert_succeeds(tmp_path, monkeypatch):
    tutorial = DOCS / "tutorials" / "own_mujoco_task.md"
    (scene,), (code,) = blocks(tutorial, "xml"), blocks(tutorial, "python")
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


STANDS_FOR = {
    "my_package.my_module:MyModel": "outside_robotics.model:LatentModel",  # any class of the user's
    "my_package.my_module:MyHead": "contrastive",
    "point:Point": "gymnasium:Reacher-v5",
    "slide:task": "push_t",
}
"""What a page writes itself, and what is installed and of its kind."""


def commands(path):
    """Yield the words of every `robopolicy` command in a page's blocks of shell."""
    for text in blocks(path, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            line = re.sub(r"^\w+=\S+ +(?=robopolicy )", "", line.strip())
            if line.startswith("robopolicy "):
                yield line, [word for word in shlex.split(line, comments=True)[1:] if word != "&"]


@pytest.mark.long
@pytest.mark.parametrize("path", [page for page in PAGES if any(commands(page))], ids=lambda path: path.stem)
def test_every_command_is_a_verb_with_settings_that_compose(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for line, (verb, *words) in commands(path):
        assert verb in VERBS.names(), line
        for mine, installed in STANDS_FOR.items():
            words = [word.replace(mine, installed) for word in words]
        settings = overrides(verb, declaration(verb), [word for word in words if word not in ("--help", "-h")])
        try:
            config = compose(settings, sections=declaration(verb).sections)
        except Exception as error:
            raise AssertionError(f"{line}: {error}") from error
        given = {word.partition("=")[0].partition(".")[0] for word in settings if "." in word.partition("=")[0]}
        unread = given - set(declaration(verb).sections) - {"collect"}  # collect.quality names what others start from
        assert config is not None and not unread, f"{line}: {verb} does not read {unread}"
