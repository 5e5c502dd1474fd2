"""A run says beside its folder what it does now and how it ended; a killed one cannot, and is told by its free lock."""

import subprocess
import sys
import time

import pytest

import robopolicy
from robopolicy.cli import main
from robopolicy.core import status
from robopolicy.core.errors import ConfigError
from robopolicy.core.progress import progress
from robopolicy.core.status import FAILED, FINISHED, INTERRUPTED, KILLED, RUNNING, Phase, read_status, state_of

SHORT = "world=reach_planar", "collect.episodes=2"
HOLD = """
import sys
from pathlib import Path
from robopolicy.core.status import begin
from robopolicy.runs import claim
claim(Path(sys.argv[1]))
begin(Path(sys.argv[1]))
print("held", flush=True)
input()
"""


def test_phases_and_notes_are_told_while_they_last(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "EVERY", 0.0)
    status.begin(tmp_path / "0")
    with progress("Fine-tuning", 10) as advance, progress("validate", 4):
        advance(3, note="success 0.50")
        status.note("Mind this.")
        told = read_status(tmp_path / "0")
    assert [(each["label"], each["done"], each["total"]) for each in told["phases"]] == [
        ("Fine-tuning", 3, 10),
        ("validate", 0, 4),
    ]
    assert told["notes"] == ["Mind this."] and told["phases"][0]["note"] == "success 0.50"
    status.end(tmp_path / "0")
    told = read_status(tmp_path / "0")
    assert told["state"] == FINISHED and told["phases"] == []


def test_time_left_leaves_out_what_was_done_before_a_resumption(monkeypatch):
    phase = Phase("x", 100, began=time.time() - 10)
    assert phase.left(time.time()) is None
    monkeypatch.setattr(status, "AT_ONCE", 20.0)
    phase.advance(50, "")  # a resumed run's
    monkeypatch.setattr(status, "AT_ONCE", 0.0)
    phase.advance(10, "")
    assert phase.left(phase.began + 10) == pytest.approx(40.0)


def test_a_finished_a_failed_and_an_interrupted_run_say_so(tmp_path, monkeypatch):
    folder = tmp_path / "collect" / "reach_planar" / "0"
    assert main(["collect", *SHORT, f"run.root={tmp_path}"]) == 0
    assert state_of(folder, read_status(folder)) == FINISHED

    def fails(error):
        def play(*_, **__):
            raise error

        monkeypatch.setattr("robopolicy.verbs.collect.finish", play)
        return ["collect", *SHORT, f"run.root={tmp_path}", "run.overwrite=true"]

    assert main(fails(ConfigError("The arm fell off: fasten it."))) == 2
    assert state_of(folder, told := read_status(folder)) == FAILED
    assert told["reason"] == "The arm fell off: fasten it."
    assert main(fails(KeyboardInterrupt())) == 130
    assert state_of(folder, read_status(folder)) == INTERRUPTED
    with pytest.raises(ZeroDivisionError):
        robopolicy.collect(*fails(ZeroDivisionError("1 / 0"))[1:])
    assert read_status(folder)["reason"] == "ZeroDivisionError: 1 / 0"


def test_a_killed_process_is_told_by_its_lock(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "0")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert state_of(tmp_path / "0", read_status(tmp_path / "0")) == RUNNING
        other.kill()
    assert state_of(tmp_path / "0", read_status(tmp_path / "0")) == KILLED


def test_a_full_disk_does_not_end_a_run(tmp_path, monkeypatch):
    run_status = status.begin(tmp_path / "0")
    monkeypatch.setattr(status.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with progress("x", 2) as advance:
        advance()
    run_status.end(FINISHED)


def test_runs_of_older_versions_have_no_status(tmp_path):
    folder = tmp_path / "0"
    folder.mkdir()
    assert read_status(folder) == {} and state_of(folder, {}) == KILLED
    (folder / "result.json").write_text("{}")
    assert state_of(folder, {}) == FINISHED
