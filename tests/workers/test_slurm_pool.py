"""Jobs of submitit: its local executor, and a Slurm whose commands are scripts that run a job on this machine."""

import json
import os
import stat
import textwrap
from pathlib import Path

import pytest

from robopolicy.cli import main
from robopolicy.core.errors import ConfigError
from robopolicy.core.pools import PoolSettings, WorkerDiedError, open_pool
from robopolicy.workers.slurm import SlurmPool

pytest.importorskip("submitit", reason="install it with: pip install 'robopolicy[slurm]'")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LOCAL = "test_local_pool:"

SLURM = {
    "sbatch": """
        number=$(($(ls "$SLURM_FAKE" | grep -c script) + 1))
        cp "${!#}" "$SLURM_FAKE/script-$number"
        echo RUNNING > "$SLURM_FAKE/state-$number"
        export SLURM_JOB_ID=$number SLURM_JOBID=$number SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
        export SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=here SLURM_NNODES=1
        (setsid bash "$SLURM_FAKE/script-$number" && state=COMPLETED || state=FAILED
            echo $state > "$SLURM_FAKE/state-$number") > /dev/null 2>&1 < /dev/null &
        echo "Submitted batch job $number"
    """,
    "srun": """
        while [[ "$1" == -* ]]; do
            case "$1" in --output|--error) shift 2 ;; *) shift ;; esac
        done
        exec "$@"
    """,
    "scancel": 'echo CANCELLED > "$SLURM_FAKE/state-${!#}"',
    "sacct": """
        echo "JobID|State|NodeList"
        for file in "$SLURM_FAKE"/state-*[0-9]; do echo "${file##*-}|$(cat "$file")|here"; done
    """,
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Put the commands of a Slurm of one machine on the path; return the folder with the submitted scripts."""
    commands, jobs = tmp_path / "bin", tmp_path / "jobs"
    commands.mkdir()
    jobs.mkdir()
    for name, text in SLURM.items():
        (commands / name).write_text("#!/usr/bin/env bash\n" + textwrap.dedent(text))
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_FAKE", str(jobs))
    monkeypatch.setattr("robopolicy.workers.slurm.POLL_SECONDS", {"slurm": 0.2, "local": 0.1})
    return jobs


def settings(tmp_path: Path, **changes) -> PoolSettings:
    return PoolSettings(**{"count": 2, "address": "local", "folder": tmp_path / "workers", **changes})


def test_jobs_on_this_machine(tmp_path):
    items = [{"marker": str(tmp_path / "died"), "number": number} for number in range(3)]
    with open_pool("slurm", settings(tmp_path)) as pool:
        [folder] = (tmp_path / "workers").iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert dict(pool.map(LOCAL + "die_once", items)) == {0: 0, 1: 1, 2: 2}
        assert (tmp_path / "died").exists()
        with pytest.raises(ConfigError, match=r"set finetune\.x=1"):
            list(pool.map(LOCAL + "refuse", [{"text": "set finetune.x=1"}]))
        with pytest.raises(WorkerDiedError, match="3 workers died on the same item"):
            list(pool.map("os:abort", [{}]))
    assert not any((tmp_path / "workers").iterdir())


def test_jobs_of_slurm_with_their_resources(tmp_path, slurm):
    options = {"slurm_partition": "gpu", "cpus_per_task": 4, "timeout_min": 30}
    items = [{"marker": str(tmp_path / "died"), "number": number} for number in range(3)]
    with open_pool("slurm", settings(tmp_path, address="", options=options)) as pool:
        assert dict(pool.map(LOCAL + "die_once", items)) == {0: 0, 1: 1, 2: 2}
    scripts = [each.read_text() for each in slurm.glob("script-*")]
    assert len(scripts) == 4, "three items, one of them twice"
    for script in scripts:
        for line in ("--partition=gpu", "--cpus-per-task=4", "--time=30", "--job-name=robopolicy"):
            assert f"#SBATCH {line}" in script


def test_refused_in_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"workers\.options: .*partitoin"):
        SlurmPool(settings(tmp_path, options={"partitoin": "gpu"}))
    with pytest.raises(ConfigError, match=r"workers\.address=HOST:6379: a Slurm pool submits"):
        SlurmPool(settings(tmp_path, address="HOST:6379"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"sbatch was not found.*workers\.address=local"):
        SlurmPool(settings(tmp_path, address=""))
    assert not list((tmp_path / "workers").glob("*"))


def test_a_sweep_as_jobs_of_slurm(tmp_path, slurm, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["collect", "world=reach_planar", "run.threads=1", "collect.episodes=3", "run.seed=0,1"]
    assert main(["sweep", *given, "workers.pool=slurm", "workers.count=2", "workers.options={timeout_min: 9}"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2: seed 0: finished" in printed and "2 of 2: seed 1: finished" in printed
    table = json.loads(Path("runs/sweep/collect-reach_planar/table.json").read_text())
    assert [each["state"] for each in table["runs"]] == ["finished"] * 2
    assert all("#SBATCH --time=9" in each.read_text() for each in slurm.glob("script-*"))
