"""A run folder belongs to one process at a time, survives kills, and says what its numbers depend on."""

import json
import subprocess
import sys

import pytest
import torch

from robopolicy.build import choose_device
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import sweep
from robopolicy.runs import claim, open_run

HOLD = """
import sys
from pathlib import Path
from robopolicy.runs import claim
claim(Path(sys.argv[1]))
print("held", flush=True)
input()
"""
COLLECT = "collect", "world=reach_planar", "collect.episodes=2"


def test_a_folder_in_use_by_another_process_is_refused_until_that_ends(tmp_path, capsys):
    folder = tmp_path / "collect" / "reach_planar" / "0"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert main([*COLLECT, f"run.root={tmp_path}"]) == 2
        assert "in use by another process" in " ".join(capsys.readouterr().err.split())
        assert not folder.exists()
        other.kill()
    assert main([*COLLECT, f"run.root={tmp_path}"]) == 0


def test_a_process_comes_back_to_its_own_folder(tmp_path):
    claim(tmp_path / "0")
    claim(tmp_path / "0")


def test_a_run_of_another_kind_than_the_default_goes_on_and_a_changed_setting_of_it_is_named(tmp_path):
    def opened(*settings):
        return open_run(compose([f"run.root={tmp_path}", "policy.kind=token", *settings]), "train", ("run", "policy"))

    (opened().path / "metrics.jsonl").write_text("")
    opened()
    with pytest.raises(ConfigError, match=r"policy\.token\.bins was 33, now 17"):
        opened("policy.token.bins=17")
    written = opened().path / "config.yaml"
    written.write_text("\n".join(line for line in written.read_text().splitlines() if "decode_steps" not in line))
    opened()
    written.write_text(written.read_text() + "\n  unheard_of: 3\n")
    with pytest.raises(ConfigError, match=r"another version.*unheard_of"):
        opened()


def test_a_recording_killed_before_its_result_goes_on(tmp_path):
    """The dataset is in its place, result.json is not: the same command must not stumble over its own work."""
    assert main([*COLLECT, f"run.root={tmp_path}"]) == 0
    folder = tmp_path / "collect" / "reach_planar" / "0"
    (folder / "result.json").unlink()
    assert main([*COLLECT, f"run.root={tmp_path}"]) == 0
    assert (folder / "result.json").exists()


def test_what_a_kill_leaves_lying_is_swept_up(tmp_path):
    folder = open_run(compose([f"run.root={tmp_path}", "run.name=x"]), "train", ("run",)).path
    (folder / ".dataset.ab12_xyz").mkdir()
    (folder / ".dataset.ab12_xyz" / "big").write_text("")
    (folder / ".config.yaml.qwertyui").write_text("")
    (folder / ".mine").write_text("kept")
    (folder / "dataset").mkdir()
    open_run(compose([f"run.root={tmp_path}", "run.name=x"]), "train", ("run",))
    assert sorted(item.name for item in folder.iterdir()) == [".mine", "config.yaml", "dataset", "versions.json"]


def test_what_was_put_aside_goes_and_comes_back_where_nothing_took_its_place(tmp_path):
    for name in ("resume", "resume.old", "checkpoint.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    (tmp_path / "notes.old").write_text("mine")
    sweep(tmp_path)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["checkpoint", "notes.old", "resume"]
    assert (tmp_path / "resume" / "which").read_text() == "resume"
    (tmp_path / ".a.json.qwertyui").write_text("")
    (tmp_path / ".b.json.qwertyui").write_text("")
    sweep(tmp_path, "a.json")
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == [".b.json.qwertyui"]


def test_a_report_that_a_kill_prevented_is_made_by_the_same_command(tmp_path):
    settings = ["world=reach_planar", f"run.root={tmp_path}", "world.batch_size=4"]
    small = ["policy.width=16", "policy.depth=1", "train.fit.steps=5", "train.evaluate_episodes=4"]
    assert main(["collect", *settings, "collect.episodes=4"]) == 0
    assert main(["train", *settings, *small]) == 0
    report = tmp_path / "train" / "reach_planar" / "0" / "report.html"
    report.unlink()
    assert main(["train", *settings, *small]) == 0
    assert report.exists()


def test_results_stay_inside_their_root_and_links_are_not_followed(tmp_path):
    for name in ("..", "."):
        with pytest.raises(ConfigError, match=r"run\.name"):
            open_run(compose([f"run.root={tmp_path}", f"run.name='{name}'"]), "train", ("run",))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "train" / "linked").mkdir(parents=True)
    (tmp_path / "train" / "linked" / "0").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="link"):
        open_run(compose([f"run.root={tmp_path}", "run.name=linked", "run.overwrite=true"]), "train", ("run",))
    assert elsewhere.exists()


def test_versions_say_what_else_a_number_depends_on(tmp_path):
    folder = open_run(compose([f"run.root={tmp_path}", "run.name=x"]), "train", ("run",)).path
    found = json.loads((folder / "versions.json").read_text())
    assert found["threads"] == 2
    assert found["processor"]
    assert found["instructions"] == torch.backends.cpu.get_cpu_capability()
    with pytest.raises(ConfigError, match="threads"):
        compose(["run.threads=-1"])


@pytest.mark.threads
@pytest.mark.parametrize("machine", [1, 3])
def test_the_number_of_threads_does_not_depend_on_the_machine_unless_asked_to(machine: int):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(machine)
        choose_device(compose(["run.threads=0"]).run)
        assert torch.get_num_threads() == machine
        choose_device(compose([]).run)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_run_that_goes_on_with_other_threads_says_so(tmp_path):
    def opened(threads: int):
        arguments = [f"run.root={tmp_path}", "run.name=x", f"run.threads={threads}"]
        return open_run(compose(arguments), "train", ("run",)).path

    folder = opened(1)
    (folder / "metrics.jsonl").write_text("")
    before = (folder / "versions.json").read_bytes()
    opened(1)
    assert (folder / "versions.json").read_bytes() == before
    for _ in range(2):
        with pytest.warns(RobopolicyWarning, match="threads was 1, now 2"):
            opened(2)
    found = json.loads((folder / "versions.json").read_text())
    assert found["threads"] == 1 and found["resumed_with"] == [{"threads": 2}]
    (folder / "result.json").write_text("{}")
    opened(2)


def test_the_time_of_a_run_is_that_of_every_process_that_was_at_it(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("robopolicy.core.run.time.perf_counter", lambda: now[0])
    killed = RunFolder(tmp_path)
    killed.clock()
    now[0] += 5
    killed.log({"step": 1})
    now[0] += 4  # of which nobody knows any more
    after = RunFolder(tmp_path)
    clock = after.clock()
    now[0] += 2
    assert clock.seconds == 7 and after.clock() is clock
    after.describe("", 0)  # another run in the same place
    assert RunFolder(tmp_path).clock().seconds == 0
