"""Runs of a sweep and rows of a benchmark on workers: equal to those in turn, started again when killed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from test_local_pool import alive
from test_recording_on_workers import require_equal

from robopolicy.building import commands
from robopolicy.building.commands import run_command, run_commands
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.core.pools import PoolSettings
from robopolicy.verbs import bench
from robopolicy.verbs.verb import declaration, overrides

pytestmark = pytest.mark.long

COLLECT = (
    "collect", "world=reach_planar", "run.threads=1", "collect.episodes=6", "world.batch_size=6", "run.seed=0,1,2",
)  # fmt: skip


def test_workers_of_a_sweep_are_not_those_of_its_runs():
    config = compose(overrides("sweep", declaration("sweep"), ["train", "run.seed=0,1", "workers.count=2"]))
    assert config.sweep.command == ("train", "run.seed=0,1") and config.workers.count == 2


@pytest.mark.timeout(900)
def test_a_sweep_on_workers_equals_one_in_turn_though_a_worker_is_killed(tmp_path, warm, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pool = warm(PoolSettings(2))
    pool.kill = True
    assert main(["sweep", *COLLECT, "run.root=together", "workers.count=2"]) == 0
    assert not pool.kill
    printed = capsys.readouterr().out
    assert all(f"{place} of 3: seed {place - 1}: finished" in printed for place in (1, 2, 3))
    assert "Recorded 6 episodes" in Path("together/sweep/collect-reach_planar/logs/1.txt").read_text()
    table = json.loads(Path("together/sweep/collect-reach_planar/table.json").read_text())
    assert [each["state"] for each in table["runs"]] == ["finished"] * 3
    assert main([word.replace("0,1,2", "1") for word in COLLECT] + ["run.root=alone"]) == 0
    require_equal(Path("alone/collect/reach_planar/1/dataset"), Path("together/collect/reach_planar/1/dataset"))
    assert main(["sweep", *COLLECT, "run.root=together", "workers.count=2"]) == 0
    assert capsys.readouterr().out.count("is finished already") == 3


def test_a_killed_command_is_started_again(tmp_path, monkeypatch):
    script = "import os, sys; from pathlib import Path; marker = Path(sys.argv[1])\n"
    monkeypatch.setattr(
        commands, "START", script + "if not marker.exists(): marker.touch(); os.kill(os.getpid(), 9)\nprint('went on')"
    )
    reply = run_command([str(tmp_path / "marker")], str(tmp_path / "log.txt"), str(tmp_path))
    assert reply == {"status": 0, "said": "went on\n"}
    monkeypatch.setattr(commands, "START", "import os; os.kill(os.getpid(), 9)")
    assert run_command(["x"], str(tmp_path / "log.txt"), str(tmp_path))["status"] == -9
    assert (tmp_path / "log.txt").read_text().count("$ robopolicy") == 2 + 3


def test_a_command_ends_with_its_worker(tmp_path):
    script = f"""
        from robopolicy.building import commands
        head = commands.START.partition("from robopolicy.cli")[0]
        commands.START = head + "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
        commands.run_command(["x"], {str(tmp_path / "log.txt")!r}, {str(tmp_path)!r})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    limit = time.monotonic() + 120
    while len(lines := (tmp_path / "log.txt").read_text().splitlines() if (tmp_path / "log.txt").exists() else []) < 2:
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while alive(int(lines[1])):
        assert time.monotonic() < limit, "the command outlives its worker"
        time.sleep(0.05)


BENCHMARK = """
import time
from pathlib import Path

from robopolicy.core.storage import read_json, write_json
from robopolicy.verbs.bench import Benchmark, Table


def rows(config):
    return [(only, seed) for only in config.bench.only for seed in config.bench.seeds]


def measure(config, root):
    for only, seed in rows(config):
        path = root / "rows" / f"{only}-{seed}.json"
        if not path.exists():
            (root / f"began-{only}-{seed}").touch()
            while only == "b" and not (root / "began-a-0").exists():  # rows run at the same time
                time.sleep(0.05)
            write_json(path, {"value": seed})
    return {"rows": {path.stem: read_json(path) for path in sorted((root / "rows").glob("?-*.json"))}}


def tables(figures):
    return [Table("Rows", ["row", "value"], [[name, str(row["value"])] for name, row in figures["rows"].items()])]


BENCHMARK = Benchmark("Do rows run side by side?", ("seeds", "only"), measure, tables, rows=rows)
"""


@pytest.mark.timeout(900)
def test_rows_of_a_benchmark_run_side_by_side_on_one_root(tmp_path, warm, monkeypatch, capsys):
    (tmp_path / "side_by_side.py").write_text(BENCHMARK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = ["bench.only=[b,a]", "bench.seeds=[0]"]
    assert main(["bench", "side_by_side:BENCHMARK", *chosen, "workers.count=2"]) == 0
    printed = capsys.readouterr().out
    assert "a, seed 0: measured" in printed and "b, seed 0: measured" in printed
    figures = json.loads(Path("runs/bench/side_by_side-BENCHMARK/benchmark.json").read_text())
    assert figures == {"rows": {"a-0": {"value": 0}, "b-0": {"value": 0}}}


def test_rows_that_share_parts_are_not_divided(tmp_path, warm):
    with pytest.raises(ConfigError, match=r"unset workers\.count"):
        bench.run(compose(["bench.name=ranking", "workers.count=2", f"run.root={tmp_path}"]))


def test_a_row_that_fails_is_named_with_its_output(tmp_path, warm):
    pool = warm(PoolSettings(2))
    given = [["collect", "world=nowhere"]]
    [(index, status, said)] = run_commands(pool, given, [tmp_path / "logs" / "1.txt"], "rows")
    assert (index, status) == (0, 2) and "nowhere" in said
    assert "nowhere" in (tmp_path / "logs" / "1.txt").read_text()
    assert os.getpid() not in pool.processes
