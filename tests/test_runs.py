"""A run folder belongs to one process at a time, survives kills, and says what its numbers depend on."""

import json
import subprocess
import sys

import pytest
import torch

from robopolicy.building.policies import choose_device
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError, DataError, RobopolicyWarning
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import recover_folder, remove_leftovers, write_folder_atomic
from robopolicy.runs import finish, lock_run_folder, open_fresh_run, open_run, run_path
from robopolicy.verbs.job import Job

HOLD = """
import sys
from pathlib import Path
from robopolicy.runs import claim
claim(Path(sys.argv[1]))
print("held", flush=True)
input()
"""
COLLECT = "collect", "world=reach_planar", "collect.episodes=2"


@pytest.mark.long
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
    lock_run_folder(tmp_path / "0")
    lock_run_folder(tmp_path / "0")


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


def test_a_run_from_before_image_sizes_were_the_environments_own_goes_on(tmp_path):
    """world.image_size was 64 where nobody said it: for a camera that is drawn it still is."""

    def opened(*settings):
        return open_run(compose([f"run.root={tmp_path}", "run.name=x", *settings]), "train", ("run", "world"))

    folder = opened("world.image_size=64", "world.cameras=[top]").path
    (folder / "metrics.jsonl").write_text("")
    opened("world.cameras=[top]")
    opened("world.cameras=[top]", "world.image_size=64")
    with pytest.raises(ConfigError, match=r"world\.image_size was 64, now \[48, 64\]"):
        opened("world.cameras=[top]", "world.image_size=[48,64]")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("name: push_cube", "name: gymnasium:package:Id-v0"))
    with pytest.raises(ConfigError, match=r"world\.image_size was 64, now None"):
        opened("world.name=gymnasium:package:Id-v0", "world.cameras=[top]")


def test_a_recording_killed_before_its_result_goes_on(tmp_path):
    """The dataset is in its place, result.json is not: the same command must not stumble over its own work."""
    assert main([*COLLECT, f"run.root={tmp_path}"]) == 0
    folder = tmp_path / "collect" / "reach_planar" / "0"
    (folder / "result.json").unlink()
    assert main([*COLLECT, f"run.root={tmp_path}"]) == 0
    assert (folder / "result.json").exists()


def test_what_a_kill_leaves_lying_is_swept_up(tmp_path):
    folder = open_run(compose([f"run.root={tmp_path}", "run.name=x"]), "train", ("run",)).path
    (folder / ".dataset.robopolicy-ab12_xyz.tmp").mkdir()
    (folder / ".dataset.robopolicy-ab12_xyz.tmp" / "big").write_text("")
    (folder / ".config.yaml.robopolicy-qwertyui.tmp").write_text("")
    (folder / "dataset").mkdir()
    open_run(compose([f"run.root={tmp_path}", "run.name=x"]), "train", ("run",))
    assert sorted(item.name for item in folder.iterdir()) == ["config.yaml", "dataset", "versions.json"]


def test_what_a_user_keeps_in_a_run_folder_stays(tmp_path):
    """Backups, notes and films of theirs, through starting again, saving anew, another evaluation and reading."""
    folder = open_run(compose([f"run.root={tmp_path}", "run.name=x"]), "train", ("run",)).path
    mine = ["dataset.old/a", "checkpoint.old/a", ".notes.markdown", ".x.abcdefgh/a", "model.5/a", "film.mp4"]
    for name in mine:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    open_run(compose([f"run.root={tmp_path}", "run.name=x"]), "train", ("run",))
    for _ in range(2):
        write_folder_atomic(folder / "checkpoint", lambda inside: None)
    recover_folder(folder / "dataset")
    (folder / "result.json").write_text("{}")
    open_fresh_run(compose([f"run.root={tmp_path}", "run.name=x", "run.device=cpu"]), "train", ("run",))
    remove_leftovers(folder)
    assert [(folder / name).read_text() for name in mine] == ["mine"] * len(mine)
    assert not (folder / "dataset").exists() and not (folder / "result.json").exists()


def test_overwrite_removes_no_folder_that_is_not_of_a_run(tmp_path):
    config = compose([f"run.root={tmp_path}", "run.name=x", "run.overwrite=true"])
    run_path(config, "train").mkdir(parents=True)
    (run_path(config, "train") / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"contains other files and no run"):
        open_run(config, "train", ("run",))


def test_what_was_put_aside_goes_and_comes_back_where_nothing_took_its_place(tmp_path):
    for name in ("resume", ".resume.robopolicy-old", ".checkpoint.robopolicy-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    remove_leftovers(tmp_path)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["checkpoint", "resume"]
    assert (tmp_path / "resume" / "which").read_text() == "resume"
    for name in ("a.json", "b.json", "long" * 63):
        (tmp_path / f".{name[:200]}.robopolicy-qwertyui.tmp").write_text("")
        if name != "b.json":
            remove_leftovers(tmp_path, name)
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == [
        ".b.json.robopolicy-qwertyui.tmp"
    ]


def test_a_report_that_a_kill_prevented_is_made_by_the_same_command(tmp_path):
    settings = ["world=reach_planar", f"run.root={tmp_path}", "world.batch_size=4"]
    small = ["policy.width=16", "policy.depth=1", "train.fit.steps=5", "train.evaluate_episodes=4"]
    assert main(["collect", *settings, "collect.episodes=4"]) == 0
    assert main(["train", *settings, *small]) == 0
    report = tmp_path / "train" / "reach_planar" / "0" / "report.html"
    report.unlink()
    assert main(["train", *settings, *small]) == 0
    assert report.exists()


@pytest.mark.parametrize("left", [None, "a file"])
def test_a_run_that_has_ended_and_lost_its_checkpoint_is_not_called_done(tmp_path, left):
    config = compose([f"run.root={tmp_path}"])
    folder = open_run(config, "train", ("run",))
    finish(config, folder, {"steps": 1})
    if left is not None:
        folder.checkpoint.write_text(left)
    with pytest.raises(DataError, match=r"its checkpoint is missing.*run\.overwrite=true"):
        Job.open(config, "train", ("run",))


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
    result = json.loads((folder / "versions.json").read_text())
    assert result["threads"] == 2
    assert result["processor"]
    assert result["instructions"] == torch.backends.cpu.get_cpu_capability()
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
    result = json.loads((folder / "versions.json").read_text())
    assert result["threads"] == 1 and result["resumed_with"] == [{"threads": 2}]
    (folder / "result.json").write_text("{}")
    opened(2)


def test_a_run_that_goes_on_in_another_number_of_processes_says_so(tmp_path, monkeypatch):
    arguments = [f"run.root={tmp_path}", "run.name=x", "run.threads=1"]
    folder = open_run(compose(arguments), "train", ("run",)).path
    (folder / "metrics.jsonl").write_text("")
    monkeypatch.setattr("robopolicy.core.replicas.count", lambda: 2)
    with pytest.warns(RobopolicyWarning, match="replicas was 1, now 2"):
        open_run(compose(arguments), "train", ("run",))


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
