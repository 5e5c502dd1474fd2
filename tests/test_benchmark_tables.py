"""Tables of the READMEs are what assets/figures say; benchmarks are found by name and refuse what they do not read."""

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from filelock import FileLock

from robopolicy.benchmarks import rates, recipes, tables
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.core.storage import read_json, resource
from robopolicy.evaluation.intervals import wilson
from robopolicy.runs import run_path
from robopolicy.verbs import bench

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]


def run(root, *settings):
    return bench.run(compose([f"run.root={root}", *settings]))


def test_the_benchmark_of_the_readme_runs_and_is_checked(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", tables.READMES[0].read_text(), re.DOTALL)
    (tmp_path / "readme_benchmark.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert run(tmp_path, "bench.name=readme_benchmark:BENCHMARK", "bench.seeds=[0,1]") == 0
    assert "The expert of reach_planar" in capsys.readouterr().out
    root = tmp_path / "bench" / "readme_benchmark-BENCHMARK"
    assert read_json(root / "benchmark.json") == {"success": {"0": 1.0, "1": 1.0}}
    assert (root / "report.html").is_file()
    assert main(["check", "readme_benchmark:BENCHMARK"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "a benchmark" in output and "Does the expert succeed?" in output and "bench.seeds" in output
    with pytest.raises(ConfigError, match=r"does not use bench\.tasks; it uses bench\.seeds"):
        run(tmp_path, "bench.name=readme_benchmark:BENCHMARK", "bench.tasks=[push_t]")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([["a", "1"]], r"returned \['a', '1'\] instead of a robopolicy\.verbs\.bench\.Table"),
        (
            [bench.Table("mine", ["name", "rate"], [["a", "1"], ["b"]])],
            r"'mine'.* the line \['b'\]: a line must have 2 texts",
        ),
        ([bench.Table("mine", ["name", "rate"], [["a", 1.0]])], r"the line \['a', 1\.0\]"),  # type: ignore[list-item]
    ],
)
def test_what_is_no_table_is_said_after_the_figures_are_written(made, said, tmp_path, monkeypatch):
    mine = bench.Benchmark("Mine.", (), lambda config, folder: {"a": 1}, lambda figures: made)
    monkeypatch.setattr(sys.modules[__name__], "MINE", mine, raising=False)
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, f"bench.name={__name__}:MINE", f"json={tmp_path / 'figures.json'}")
    root = tmp_path / "bench" / f"{__name__}-MINE"
    assert read_json(root / "benchmark.json") == {"a": 1} and read_json(tmp_path / "figures.json")["a"] == 1


@pytest.mark.parametrize("path", tables.READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_tables_of_a_readme_are_the_figures(path):
    assert path.read_text() == tables.written(path.read_text(), path.parent), "run: robopolicy bench tables"


def test_every_published_figure_has_a_place_in_the_results_and_every_benchmark_too():
    places = set(tables.PLACE.findall(tables.READMES[0].read_text()))
    assert places == set(bench.BENCHMARKS.names()) - {"tables"}
    assert {path.stem for path in resource("assets", "figures").iterdir()} <= places | set(bench.CLOSED)


@pytest.mark.parametrize("name", bench.CLOSED)
def test_a_closed_benchmark_keeps_its_figures_its_command_and_where_its_code_is(name, tmp_path):
    figures, commit = read_json(tables.figures_of(name)), bench.CLOSED[name]
    assert figures["code"].startswith(commit)
    text = " ".join(tables.READMES[0].read_text().split())
    assert f"*Figures: assets/figures/{name}.json, made by `{figures['command']}` at commit {commit}" in text
    with pytest.raises(ConfigError, match=f"'{name}' was removed: .*commit {commit}"):
        run(tmp_path, f"bench.name={name}")


def pictures() -> list[str]:
    """Return the names of benchmarks whose published figures are drawn."""
    named = set(bench.BENCHMARKS.names()) - {"tables"}
    return sorted(name for name in named if bench.BENCHMARKS.load(name).picture and tables.figures_of(name).exists())


def test_every_plot_is_drawn_from_the_figures_and_every_picture_is_shown():
    drawn = pictures()
    assert {"imagination", "ranking"} <= set(drawn)
    for name in drawn:
        assert tables.picture_of(name).read_text().endswith(tables.drawn_of(name)), "run: robopolicy bench tables"
    text = "".join(path.read_text() for path in (*tables.READMES, *ROOT.glob("docs/guides/*.md")))
    for path in resource("assets", "pictures").iterdir():
        assert f"assets/pictures/{path.name})" in text, f"no page shows {path.name}"


def test_plots_follow_their_figures_and_are_the_same_file_again(tmp_path, monkeypatch):
    published = {name: json.loads(tables.figures_of(name).read_text()) for name in pictures()}
    monkeypatch.setattr(tables, "figures_of", lambda name: tmp_path / f"{name}.json")
    monkeypatch.setattr(tables, "picture_of", lambda name: tmp_path / f"{name}.svg")
    assert not tables.draw("algorithms") and not (tmp_path / "algorithms.svg").exists()
    rate = {"success_rate": 0.4, "low": 0.3, "high": 0.5, "successes": 40, "episodes": 100}
    curves = [[[0, 0.4], [2000, 0.8]], [[0, 0.4], [1000, 0.9]]]
    published["algorithms"] = {"tasks": {"push_t": {"PPO": {"base": rate, "curves": curves}}}}
    changed = {
        "imagination": lambda figures: figures["tasks"]["push_t"]["ensemble"].update(each=[0.1, 0.2, 0.3]),
        "ranking": lambda figures: figures["tasks"]["push_t"]["rssm"]["0"]["policies"][0].update(model=0.9),
        "algorithms": lambda figures: figures["tasks"]["push_t"]["PPO"].update(curves=curves[:1]),
    }
    for name, change in changed.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(published[name]))
        drawn = []
        for times in range(3):
            if times == 2:
                change(published[name])
                (tmp_path / f"{name}.json").write_text(json.dumps(published[name]))
            assert tables.draw(name)
            drawn.append((tmp_path / f"{name}.svg").read_text())
        assert drawn[0] == drawn[1], "a plot that changes by itself hides what has changed"
        assert drawn[0].splitlines()[:-1] != drawn[2].splitlines()[:-1]
        assert drawn[0].count("<svg") == 1 and "push_t" in drawn[0]


def test_every_benchmark_is_listed_in_the_help_of_the_verb():
    assert all(f"- {name}:" in bench.__doc__ for name in bench.BENCHMARKS.names() if name != "tables")


def test_a_changed_figure_changes_the_table(tmp_path, monkeypatch):
    figures = json.loads(tables.figures_of("joint").read_text())
    figures["seeds"]["0"]["all episodes, best of 8"]["success"] = 0.123
    (tmp_path / "joint.json").write_text(json.dumps(figures))
    monkeypatch.setattr(tables, "figures_of", lambda name: tmp_path / f"{name}.json")
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table:joint -->\nold\n<!-- end -->\nafter <!-- table:sims -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "READMES", (readme,))
    monkeypatch.setattr(tables, "HERE", tmp_path / "a" / "b")
    assert run(tmp_path, "bench.name=tables") == 0
    text = readme.read_text()
    assert text.startswith("before\n") and "12.3 %" in text and "old" not in text
    assert "Not measured yet: `robopolicy bench sims json=assets/figures/sims.json`" in text
    readme.write_text("<!-- table:nobody -->\n<!-- end -->")
    with pytest.raises(ConfigError, match="no benchmark 'nobody'"):
        run(tmp_path, "bench.name=tables")


@pytest.mark.parametrize(
    ("name", "setting", "read"),
    [
        ("sims", "bench.seeds=[0]", "bench.rounds"),
        ("joint", "bench.tasks=[push_t]", "bench.seeds"),
        ("tables", "bench.rounds=1", "no bench setting"),
    ],
)
def test_a_setting_that_a_benchmark_does_not_read_is_refused(tmp_path, name, setting, read):
    with pytest.raises(ConfigError, match=f"'{name}' does not use {setting.partition('=')[0]}; it uses {read}"):
        run(tmp_path, f"bench.name={name}", setting)
    assert not list(tmp_path.iterdir()), "nothing was run"


def test_the_command_beside_a_table_can_be_typed():
    """It is quoted for the shell and for the settings' own grammar; a table of runs of several commands names one."""
    for path in resource("assets", "figures").iterdir():
        program, verb, name, *words = shlex.split(read_json(path)["command"])
        if (program, verb) == ("robopolicy", "bench"):
            assert compose([f"bench.name={name}", *words]).bench.name == name


def test_a_benchmarks_command_says_the_same_settings_again():
    settings = ["bench.only=['ensemble, one thread',GRPO]", "bench.overrides=['run.threads=1','a.b=[1,2]']"]
    config = compose(["bench.name=imagination", "bench.seeds=[3,4]", *settings])
    name, *words = shlex.split(bench.command_of(config))[2:]
    assert compose([f"bench.name={name}", *words]).bench == config.bench


def test_a_benchmark_of_another_package_is_run_by_its_dotted_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_claim.py").write_text(
        "from robopolicy.verbs.bench import Benchmark, Table\n"
        "def measure(config, root):\n"
        "    return {'seeds': list(config.bench.seeds), 'details': 1}\n"
        "def tables(figures):\n"
        "    return [Table('Mine', ['seed'], [[str(seed)] for seed in figures['seeds']])]\n"
        "BENCHMARK = Benchmark('Is it so?', ('seeds',), measure, tables, bulky=frozenset({'details'}))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    published = tmp_path / "figures.json"
    assert run(tmp_path, "bench.name=my_claim:BENCHMARK", "bench.seeds=[7,9]", f"json={published}") == 0
    with pytest.raises(ConfigError, match="not a `Benchmark`"):
        run(tmp_path, "bench.name=my_claim:measure")
    sys.modules.pop("my_claim")
    assert "Mine" in capsys.readouterr().out
    figures = json.loads(published.read_text())
    assert figures["seeds"] == [7, 9] and "details" not in figures
    assert figures["command"] == "robopolicy bench my_claim:BENCHMARK 'bench.seeds=[7,9]'"
    assert figures["threads"] >= 1 and figures["versions"]["packages"]["torch"]
    assert "Is it so?" in (tmp_path / "bench" / "my_claim-BENCHMARK" / "report.html").read_text()


def test_a_wheel_leaves_ours_out_says_so_and_runs_those_of_other_packages(tmp_path, monkeypatch, capsys):
    assert (
        "robopolicy/benchmarks"
        in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    )
    monkeypatch.setitem(sys.modules, "robopolicy.benchmarks", None)  # as if it were not installed
    monkeypatch.setattr(bench.BENCHMARKS, "_installed", {"theirs": f"{__name__}:THEIRS"})
    theirs = bench.Benchmark(
        "Theirs?", (), lambda config, folder: {}, lambda figures: [bench.Table("Theirs", ["a"], [])]
    )
    monkeypatch.setattr(sys.modules[__name__], "THEIRS", theirs, raising=False)
    assert main(["bench", "recipes", f"run.root={tmp_path}"]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert (
        "The benchmark 'recipes' is only in a checkout of robopolicy's repository" in output
        and "Traceback" not in output
    )
    assert not list(tmp_path.iterdir())
    assert run(tmp_path, "bench.name=theirs") == 0 and "Theirs" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no benchmark 'recipe'.* Did you mean 'recipes'"):
        run(tmp_path, "bench.name=recipe")


def test_other_seeds_are_measured_in_the_same_folder_at_once(tmp_path, monkeypatch):
    """Another process is at work on seed 7: seed 8 is free, and the way out for 7 is one that works."""
    (tmp_path / "seeded.py").write_text(
        "from robopolicy.verbs.bench import Benchmark, Table\n"
        "def tables(figures):\n"
        "    return [Table('Mine', ['seed'], [[str(seed)] for seed in figures['seeds']])]\n"
        "BENCHMARK = Benchmark('?', ('seeds',), lambda config, root: {'seeds': config.bench.seeds}, tables)\n"
        "ALONE = Benchmark('?', (), lambda config, root: {'seeds': []}, tables)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    root = tmp_path / "bench" / "seeded-BENCHMARK"
    root.mkdir(parents=True)
    begun = root / ".benchmark.json.robopolicy-abcd1234.tmp"
    with FileLock(root / ".7.lock"):
        assert run(tmp_path, "bench.name=seeded:BENCHMARK", "bench.seeds=[8]") == 0
        with pytest.raises(ConfigError, match=r"7 is in use by another process: .* other seeds with bench.seeds="):
            run(tmp_path, "bench.name=seeded:BENCHMARK", "bench.seeds=[7,9]")
    with FileLock(tmp_path / "bench" / ".seeded-ALONE.lock"), pytest.raises(ConfigError, match=r"run\.root=PATH"):
        run(tmp_path, "bench.name=seeded:ALONE")
    begun.touch()
    assert run(tmp_path, "bench.name=seeded:BENCHMARK", "bench.seeds=[8,10]") == 0
    assert not begun.exists()
    assert json.loads((root / "benchmark.json").read_text()) == {"seeds": [8, 10]}
    sys.modules.pop("seeded")


def test_spread_and_interval_are_told_apart():
    rate = rates.rate_of(93, 100)
    assert (rate["low"], rate["high"]) == wilson(93, 100)
    assert rates.rate_text(rate) == "93.0 % [86.3, 96.6]"
    assert rates.spread_text([0.5, 0.75, 1.0]) == "75.0 % (50.0 to 100.0)"
    assert rates.spread_text([0.5]) == "50.0 % (one seed)"
    assert rates.pooled([{"successes": 1, "episodes": 2}, {"successes": 2, "episodes": 2}])["success_rate"] == 0.75
    assert rates.mean_text([1, 2], 1) == "1.5 (1.0, 2.0)" and rates.mean_text([3], 1) == "3.0"


def test_a_recipe_is_measured_once_by_its_name_alone_and_rows_of_seeds_add_up(tmp_path, capsys):
    small = [
        "policy.width=16",
        "policy.depth=1",
        "policy.sampling_steps=2",
        "collect.episodes=6",
        "train.fit.steps=10",
        "train.evaluate_episodes=4",
        "finetune.finetuned_steps=2",
        "finetune.iterations=1",
        "finetune.num_envs=8",
        "finetune.rollout_length=4",
        "finetune.evaluate_episodes=4",
        "finetune.videos=0",
    ]
    published = tmp_path / "recipes.json"
    overrides = ",".join(f"'{setting}'" for setting in small)
    chosen = "bench.name=recipes", "bench.only=[reach_planar]", f"bench.overrides=[{overrides}]"
    assert run(tmp_path, *chosen, "bench.seeds=[0]", f"json={published}") == 0
    row = json.loads(published.read_text())["recipes"]["reach_planar"]["0"]
    assert row["base"]["episodes"] == row["tuned"]["episodes"] == 4
    assert set(row["seconds"]) == {"collect", "train", "finetune"} and min(row["seconds"].values()) > 0
    assert row["threads"] >= 1 and row["packages"]["torch"] and "commit" in row
    assert row["env_steps"] > 0
    assert (tmp_path / "bench" / "recipes" / "finetune" / "reach_planar" / "0" / "checkpoint").is_dir()
    capsys.readouterr()
    assert run(tmp_path, *chosen, "bench.seeds=[0,1]", f"json={published}") == 0
    shown = capsys.readouterr().out
    assert "reach_planar, seed 1, collect" in shown and "reach_planar, seed 0, collect" not in shown
    table = json.loads(published.read_text())
    assert list(table["recipes"]["reach_planar"]) == ["0", "1"] and table["recipes"]["reach_planar"]["0"] == row
    table["recipes"]["reach_planar"]["0_threads_1"] = {**row, "threads": 1}
    spread, each = recipes.tables(table)
    assert [line[2:4] for line in spread.lines] == [["2", "2"], ["1", "1"]], "threads, seeds"
    assert " to " in spread.lines[0][5] and "one seed" in spread.lines[1][5]
    assert [line[0] for line in each.lines] == [f"`reach_planar`, seed {seed}" for seed in (0, 1, 0)]
    alone = compose(["bench.overrides=['run.threads=1']"])
    chosen = recipes.settings_of(alone, tmp_path, "push_cube_pixels", 3)
    assert recipes.row_path(tmp_path, "push_cube_pixels", chosen).name == "3_threads_1.json"
    assert run_path(chosen, "train").parts[-2:] == ("push_cube_pixels_threads_1", "3")
    with pytest.raises(ConfigError, match="there is no 'reach_plana'"):
        run(tmp_path, "bench.name=recipes", "bench.only=[reach_plana]")
