"""Trackers receive each line of metrics.jsonl once, a failing one never ends a run, and their own readers read it."""

import json

import pytest

from robopolicy.cli import main
from robopolicy.core.errors import RobopolicyWarning
from robopolicy.core.run import RunFolder
from robopolicy.evaluation.trackers import TRACKERS, Following, TensorBoard, TrackedRun, flat, position


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
    following = Following(lambda run: Seen(run, **options), TrackedRun(folder.path, "train-x-0", {}), folder)
    folder.followers.append(following)
    return following.tracker


def test_every_number_arrives_under_its_counter(tmp_path):
    folder = RunFolder(tmp_path)
    tracker = followed(folder)
    folder.log({"iteration": 0, "success": 0.5, "kept": True, "why": "text", "missing": None})
    folder.log({"critic_step": 3, "loss": 1})
    (tmp_path / "base_and_tuned.mp4").write_bytes(b"x")
    folder.followers[0].finish()
    assert tracker.received == [
        (0, {"iteration/success": 0.5}),
        (3, {"critic_step/loss": 1.0}),
        ("base_and_tuned", "base_and_tuned.mp4"),
    ]
    assert tracker.finished


def test_steps_that_a_resumed_run_repeats_are_not_sent_again(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (10, 20, 30):
        folder.log({"step": step, "loss": 1.0})
    again = RunFolder(tmp_path)
    tracker = followed(again)
    again.rewind("step", 20)  # the checkpoint lay there
    for step in (30, 40):
        again.log({"step": step, "loss": 2.0})
    assert tracker.received == [(40, {"step/loss": 2.0})]
    assert [line["step"] for line in again.metrics()] == [10, 20, 30, 40]


def test_a_tracker_that_fails_is_switched_off_and_the_run_goes_on(tmp_path):
    folder = RunFolder(tmp_path)
    tracker = followed(folder, fails=2)
    folder.log({"step": 1, "loss": 1.0})
    with pytest.warns(RobopolicyWarning, match=r"Seen failed and is switched off: .*no space left"):
        folder.log({"step": 2, "loss": 1.0})
    folder.log({"step": 3, "loss": 1.0})
    folder.followers[0].finish()
    assert len(tracker.received) == 1 and len(folder.metrics()) == 3 and not tracker.finished


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
    assert "config/text_summary" in read.Tags()["tensors"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_trackers_without_an_account_record_a_training(name, tmp_path, monkeypatch, root):
    pytest.importorskip(name)
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HOME", str(tmp_path))  # no login of whoever runs the tests
    monkeypatch.setenv("WANDB_SILENT", "true")
    small = "policy.width=16", "policy.depth=1", "train.fit.steps=200", "train.evaluate_episodes=0"
    data = f"train.data={root / 'collect' / 'reach_planar' / '0' / 'dataset'}"
    settings = ["world=reach_planar", "run.threads=1", f"run.root={tmp_path}", f"run.tracker={name}", data, *small]
    assert main(["train", *settings]) == 0
    run = tmp_path / "train" / "reach_planar" / "0"
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if name == "wandb":
        (file,) = run.glob("wandb/offline-run-*/*.wandb")
        assert b"step/denoising" in file.read_bytes()
        return
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("robopolicy", "train-reach_planar-0")
    assert [row["step"] for row in rows] == [line["step"] for line in logged]
    assert [row["step/denoising"] for row in rows] == pytest.approx([line["denoising"] for line in logged])
