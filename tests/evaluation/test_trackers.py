"""Trackers receive each line of metrics.jsonl once, a failing one never ends a run, and their own readers read it."""

import json
from threading import Event

import pytest

from robopolicy.cli import main
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.run import RunFolder
from robopolicy.evaluation import trackers
from robopolicy.evaluation.trackers import (
    TRACKERS,
    Following,
    TensorBoard,
    TrackedRun,
    flat,
    identifier_in,
    position,
)


class Seen:
    """Keeps what it receives; `fails` from that step on."""

    def __init__(self, run, fails=None):
        self.run, self.fails, self.received, self.finished = run, fails, [], False

    def log(self, metrics, step):
        if self.fails is not None and step >= self.fails:
            raise OSError("no space left")
        self.received.append((step, dict(metrics)))

    def media(self, name, path):
        self.received.append((name, path.name))

    def finish(self):
        self.finished = True


def followed(folder, **options):
    """Follow a folder; returns the trackers made for it, one of them."""
    run_trackers = []

    def make(run):
        run_trackers.append(Seen(run, **options))
        return run_trackers[0]

    folder.followers.append(Following(make, TrackedRun(folder.path, "train-x-0", {}), folder))
    return run_trackers


def test_every_number_arrives_under_its_counter(tmp_path):
    folder = RunFolder(tmp_path)
    run_trackers = followed(folder)
    folder.log({"iteration": 0, "success": 0.5, "kept": True, "why": "text", "missing": None})
    folder.log({"critic_step": 3, "loss": 1})
    (tmp_path / "base_and_tuned.mp4").write_bytes(b"x")
    folder.followers[0].finish()
    assert run_trackers[0].received == [
        (0, {"iteration/success": 0.5}),
        (3, {"critic_step/loss": 1.0}),
        ("base_and_tuned", "base_and_tuned.mp4"),
    ]
    assert run_trackers[0].finished


def test_steps_that_a_resumed_run_repeats_are_not_sent_again(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (10, 20, 30):
        folder.log({"step": step, "loss": 1.0})
    again = RunFolder(tmp_path)
    run_trackers = followed(again)
    again.rewind("step", 20)  # the checkpoint lay there
    for step in (30, 40):
        again.log({"step": step, "loss": 2.0})
    again.log({"step": 10, "error": 3.0})  # of another fit of the same run
    again.followers[0].finish()
    assert run_trackers[0].received == [(40, {"step/loss": 2.0}), (10, {"step/error": 3.0})]
    assert [line["step"] for line in again.metrics()] == [10, 20, 30, 40, 10]


def test_a_tracker_that_fails_is_switched_off_and_the_run_goes_on(tmp_path):
    folder = RunFolder(tmp_path)
    run_trackers = followed(folder, fails=2)
    folder.log({"step": 1, "loss": 1.0})
    folder.log({"step": 2, "loss": 1.0})
    with pytest.warns(RobopolicyWarning, match=r"run.tracker failed and is disabled: .*no space left"):
        folder.followers[0].finish()
    folder.log({"step": 3, "loss": 1.0})
    folder.followers[0].finish()
    assert len(run_trackers[0].received) == 1 and len(folder.metrics()) == 3 and not run_trackers[0].finished


def test_a_tracker_that_cannot_begin_is_switched_off_but_a_missing_package_is_said_first(tmp_path):
    def unreachable(run):
        raise OSError("no route to host")

    def missing(run):
        raise ConfigError("'wandb' is not installed.")

    folder = RunFolder(tmp_path)
    with pytest.warns(RobopolicyWarning, match="no route to host"):
        folder.followers.append(Following(unreachable, TrackedRun(tmp_path, "x", {}), folder))
    folder.log({"step": 1, "loss": 1.0})
    folder.followers[0].finish()
    with pytest.raises(ConfigError, match="not installed"):
        Following(missing, TrackedRun(tmp_path, "x", {}), folder)


def test_a_tracker_that_waits_for_a_network_does_not_hold_up_the_run(tmp_path, monkeypatch):
    released = Event()

    class Waits(Seen):
        def log(self, metrics, step):
            released.wait()

    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    for lines, wrong in ((1, "did not accept all data"), (9, "queue of 3 records is full")):
        folder = RunFolder(tmp_path / str(lines))
        folder.followers.append(Following(Waits, TrackedRun(folder.path, "x", {}), folder))
        with pytest.warns(RobopolicyWarning, match=wrong):
            for step in range(lines):
                folder.log({"step": step, "loss": 1.0})
            folder.followers[0].finish()
        assert len(folder.metrics()) == lines
    released.set()


def test_a_run_that_starts_over_is_another_run_of_the_tracker(tmp_path):
    first = identifier_in(tmp_path)
    assert identifier_in(tmp_path) == first
    (tmp_path / "tracker.json").unlink()
    assert identifier_in(tmp_path) != first


def test_settings_are_flat_and_counters_are_found():
    assert flat({"run": {"seed": 1}, "policy": {"image": {"size": 2}}}) == {"run.seed": 1, "policy.image.size": 2}
    assert position({"success": 1.0}) == ("", 0) and position({"round": 2, "x": 1}) == ("round", 2)
    assert set(TRACKERS.names()) >= {"tensorboard", "wandb", "trackio"}


def test_an_unknown_tracker_is_refused_before_the_run_starts(tmp_path, capsys):
    assert main(["train", "world=reach_planar", f"run.root={tmp_path}", "run.tracker=tensorbord"]) == 2
    assert "tensorboard" in " ".join(capsys.readouterr().err.split())


def test_tensorboards_own_reader_reads_numbers_and_videos(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    imageio = pytest.importorskip("imageio.v3")
    import numpy as np

    video = tmp_path / "policy.mp4"
    imageio.imwrite(video, np.zeros((4, 32, 32, 3), np.uint8), fps=4)
    folder = RunFolder(tmp_path)
    following = Following(TensorBoard, TrackedRun(tmp_path, "x", {"run.seed": 0}), folder)
    for step, loss in ((0, 2.0), (5, 1.0)):
        following({"step": step, "loss": loss})
    following.finish()
    read = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("step/loss")] == [(0, 2.0), (5, 1.0)]
    assert read.Images("policy")[0].encoded_image_string.startswith(b"GIF8")
    assert "_hparams_/session_start_info" in read.summary_metadata


TINY = ("finetune.iterations=3", "finetune.num_envs=8", "finetune.rollout_length=4", "finetune.minibatch=32")
JUDGED = ("finetune.evaluate_every=1", "finetune.evaluate_episodes=4", "finetune.videos=1", "finetune.critic_width=16")


def in_wandb(path):
    """Return the records of a .wandb file, which is a log in LevelDB's format: blocks of 32 KiB, a header a piece."""
    from wandb.proto import wandb_internal_pb2

    data, records, whole, place = path.read_bytes(), [], b"", 7
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:
            place += 2**15 - place % 2**15
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            records.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return records


def read_back(name, run, tmp_path):
    """Return what a tracker's own reader reads: values of success by step, settings, and names of films."""
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        read = EventAccumulator(str(run / "tensorboard"))
        read.Reload()
        start = HParamsPluginData.FromString(read.summary_metadata["_hparams_/session_start_info"].plugin_data.content)
        settings = start.session_start_info.hparams["run.seed"].number_value
        success = [(event.step, event.value) for event in read.Scalars("iteration/deterministic_success")]
        result = read.Scalars("result/tuned.deterministic.success_rate")[0].value
        return success, settings, read.Tags()["images"], result
    if name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        known = f"finetune-reach_planar-0-{identifier_in(run)}"
        assert known in SQLiteStorage.get_runs("robopolicy")  # its database is shared: other runs may be there
        rows = SQLiteStorage.get_logs("robopolicy", known)
        success = [(row["step"], row[key]) for row in rows if (key := "iteration/deterministic_success") in row]
        (result,) = [row[key] for row in rows if (key := "result/tuned.deterministic.success_rate") in row]
        films = [key for row in rows for key in row if key == "base_and_tuned"]
        return success, float(SQLiteStorage.get_run_config("robopolicy", known)["run.seed"]), films, result
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    records = [record for file in files for record in in_wandb(file)]
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    success = [(row["iteration"], row[key]) for row in rows if (key := "iteration/deterministic_success") in row]
    (result,) = [row[key] for row in rows if (key := "result/tuned.deterministic.success_rate") in row]
    settings = {i.key: json.loads(i.value_json) for r in records if r.HasField("run") for i in r.run.config.update}
    films = [key for row in rows for key in row if key.startswith("base_and_tuned")]
    assert len({file.stem for file in files}) == 1  # one run, however often it was resumed
    return success, settings["run.seed"], films, result


@pytest.mark.long
@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_its_own_reader_reads_back_a_finetuning_that_was_interrupted(name, tmp_path, monkeypatch, root):
    """Interrupted after its checkpoint at iteration 2 was followed by iteration 3, which is repeated and sent once."""
    pytest.importorskip(name)
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio", raising=False) if name == "trackio" else None
    monkeypatch.setenv("HOME", str(tmp_path))  # no login of whoever runs the tests
    monkeypatch.setenv("WANDB_SILENT", "true")
    policy = f"finetune.policy={root / 'train' / 'reach_planar' / '0' / 'checkpoint'}"
    settings = ["world=reach_planar", "run.threads=1", f"run.root={tmp_path}", f"run.tracker={name}", policy]
    command = ["finetune", *settings, *TINY, *JUDGED, "finetune.checkpoint_every=2"]
    with monkeypatch.context() as patch:
        patch.setattr("robopolicy.verbs.job.Job.judge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert main(command) == 130
    run = tmp_path / "finetune" / "reach_planar" / "0"
    assert main(command) == 0
    success, seed, films, result = read_back(name, run, tmp_path)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = [(line["iteration"], line["deterministic_success"]) for line in logged]
    assert len(expected) == 4 and success == expected
    assert seed == 0 and "base_and_tuned" in " ".join(films)
    success_rate = json.loads((run / "result.json").read_text())["tuned"]["deterministic"]["success_rate"]
    assert result == pytest.approx(success_rate)
