"""A recording that is broken off loses no episode that had ended, and goes on with the others."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from robopolicy.cli import INTERRUPTED, main
from robopolicy.core.errors import DataError
from robopolicy.core.player import Player
from robopolicy.core.storage import write_atomic
from robopolicy.core.tensors import file_hash
from robopolicy.data import record as recording
from robopolicy.data.configuration import CorrectConfig
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.data.record import record, record_chains, record_corrected
from robopolicy.data.recording_cache import RecordingCache
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from sims.registry import load_task, make_world

WORLD, COUNT = "reach_planar", 12
SAID = pytest.mark.filterwarnings("default::robopolicy.core.errors.RobopolicyWarning")


class Stops:
    """A world that is interrupted at a control step, and counts them."""

    def __init__(self, world, after):
        self.world, self.after, self.steps = world, after, 0
        self.spec, self.batch_size = world.spec, world.batch_size

    def reset(self, rows=None, seeds=None, options=None):
        return self.world.reset(rows=rows, seeds=seeds, options=options)

    def step(self, actions):
        if self.steps == self.after:
            raise KeyboardInterrupt
        self.steps += 1
        return self.world.step(actions)

    def close(self):
        self.world.close()


def same(first, second):
    """Whether every entry of two recordings is equal, bit for bit."""
    for item in dataclasses.fields(first):
        one, other = getattr(first, item.name), getattr(second, item.name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), item.name
        elif isinstance(one, dict) and one and isinstance(next(iter(one.values())), torch.Tensor):
            assert list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one), item.name
        else:
            assert one == other, item.name


def policy_of(world, seed=0):
    config = DenoisingPolicyConfig(width=16, depth=1, sampling_steps=2, prediction_steps=4, chunk=2)
    spec = world.spec
    return DenoisingPolicy(config, spec.observation, spec.action, fps=spec.fps, seed=seed).eval()


@pytest.mark.parametrize("successes_only", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_what_was_broken_off_ends_as_if_it_had_not_been(successes_only, share, tmp_path):
    def play(world, kept=None):
        expert = load_task(WORLD).expert()
        return record(world, expert, np.arange(COUNT), successes_only=successes_only, kept=kept)

    unbroken = play(whole := Stops(make_world(WORLD, 4), -1))
    with pytest.raises(KeyboardInterrupt):
        play(Stops(make_world(WORLD, 4), int(share * whole.steps)), RecordingCache(tmp_path / "kept"))
    before = RecordingCache(tmp_path / "kept")
    assert set(before.known) != set(range(COUNT)) and bool(before.known) == (share > 0)
    rest = Stops(make_world(WORLD, 4), -1)
    same(play(rest, before), unbroken)
    assert rest.steps < whole.steps or share == 0


def test_images_labels_chains_and_turns_come_back_bit_for_bit(tmp_path):
    """A second process that finds every episode plays none: its world refuses the first control step."""
    camera = make_world("push_cube", 2, cameras=("top",), image_size=16)
    expert = load_task("push_cube").expert()

    def labelled(world, kept):
        return record(world, expert, np.arange(3), teacher=load_task("push_cube").expert(), kept=kept)

    state = make_world(WORLD, 4)
    policy, draws = policy_of(state), torch.Generator().manual_seed(0)

    def chained(world, kept):
        return record_chains(world, policy, np.arange(6), generator=draws, kept=kept)

    def corrected(world, kept):
        config = CorrectConfig(no_progress_steps=3, rewind=2)
        return record_corrected(
            world, policy, load_task(WORLD).expert(), np.arange(6), config, generator=draws, kept=kept
        )

    for name, world, play in (
        ("labelled", camera, labelled),
        ("chained", state, chained),
        ("corrected", state, corrected),
    ):
        first = play(world, RecordingCache(tmp_path / name))
        second = play(Stops(world, 0), RecordingCache(tmp_path / name))
        for one, other in zip(
            *((each if isinstance(each, tuple) else (each,)) for each in (first, second)), strict=True
        ):
            same(one, other)
    assert {each.name for each in tmp_path.iterdir()} == {"labelled", "chained", "corrected"}


def test_episodes_are_written_while_others_run(tmp_path):
    kept = RecordingCache(tmp_path, seconds=0)
    world = Stops(make_world(WORLD, 4), -1)
    counts = []
    step = world.step

    def counted(actions):
        counts.append(len(RecordingCache(tmp_path).known))
        return step(actions)

    world.step = counted
    record(world, load_task(WORLD).expert(), np.arange(COUNT), kept=kept)
    assert counts[0] == 0 and counts[-1] >= COUNT - 4 and sorted(counts) == counts
    assert sorted(RecordingCache(tmp_path).known) == list(range(COUNT))


def test_a_file_that_is_not_ours_is_named(tmp_path):
    write_atomic(tmp_path / "00000001.npz", b"not a zip file")
    with pytest.raises(DataError, match=r"00000001\.npz is corrupt .* run\.overwrite=true"):
        RecordingCache(tmp_path)
    np.savez(tmp_path / "00000001.npz", **{"0/task": np.array({"code": 1}, dtype=object)})
    with pytest.raises(DataError, match="corrupt"):
        RecordingCache(tmp_path)


def interrupted_after(monkeypatch, steps):
    """Interrupt recordings, of whatever world, after so many control steps; None: never."""
    left = [steps]

    class Interrupted(Player):
        def _decide(self):
            for played in super()._decide():
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                yield played

    monkeypatch.setattr(recording, "Player", Player if steps is None else Interrupted)


@SAID
@pytest.mark.parametrize("quality", ["", "play"])
def test_collect_goes_on_after_an_interruption(quality, tmp_path, monkeypatch, capsys):
    settings = ["collect", f"world={WORLD}", "world.batch_size=4", "run.threads=1", "collect.episodes=12"]
    settings += [
        f"collect.quality={quality}",
        "collect.noise=[none]",
        "collect.reference_episodes=16",
        "collect.trial_episodes=16",
    ]
    whole, broken = ([*settings, f"run.root={tmp_path / name}", "run.name=r"] for name in ("whole", "broken"))
    assert main(whole) == 0
    interrupted_after(monkeypatch, 12)
    assert main(broken) == INTERRUPTED
    assert "Nothing is lost" in capsys.readouterr().err
    interrupted_after(monkeypatch, None)
    assert main(broken) == 0
    assert "of 12 episodes are already recorded" in capsys.readouterr().err
    folder, expected = (tmp_path / name / "collect" / "r" / "0" for name in ("broken", "whole"))
    same(read_dataset(folder / "dataset"), read_dataset(expected / "dataset"))
    tables = [sorted((path / "dataset").rglob("*.parquet")) for path in (folder, expected)]
    assert [file_hash(path) for path in tables[0]] == [file_hash(path) for path in tables[1]]
    text = json.loads((folder / "result.json").read_text())
    assert 0 < text.pop("played_after_interruption") < 12
    assert text == json.loads((expected / "result.json").read_text())
    assert not (folder / "unfinished").exists()


@SAID
@pytest.mark.parametrize("kind", ["policy", "controller"])
def test_episodes_of_who_has_changed_are_recorded_anew(kind, tmp_path, monkeypatch, capsys):
    world = make_world(WORLD, 4)
    policy_of(world).save(tmp_path / "policy")
    monkeypatch.syspath_prepend(tmp_path)
    code = "from sims.registry import load_task\n\ndef make():\n    return load_task('reach_planar').expert()\n"
    (tmp_path / "kept_controller.py").write_text(code)
    settings = ["collect", f"world={WORLD}", "world.batch_size=4", "run.threads=1", "collect.episodes=8"]
    acts = {"policy": f"collect.policy={tmp_path / 'policy'}", "controller": "collect.controller=kept_controller:make"}
    settings += [acts[kind], f"run.root={tmp_path}", "run.name=r"]
    interrupted_after(monkeypatch, {"policy": 30, "controller": 12}[kind])
    assert main(settings) == INTERRUPTED
    unfinished = tmp_path / "collect" / "r" / "0" / "unfinished"
    assert list(unfinished.rglob("*.npz"))
    policy_of(world, seed=1).save(tmp_path / "policy")
    (tmp_path / "kept_controller.py").write_text(f"{code}# mended\n")
    interrupted_after(monkeypatch, None)
    assert main(settings) == 0
    assert "of another policy, or of another version" in capsys.readouterr().err
    assert "played_after_interruption" not in json.loads((unfinished.parent / "result.json").read_text())
    assert not unfinished.exists()


def test_chains_are_recorded_of_no_engine(tmp_path, capsys):
    policy_of(make_world(WORLD, 4)).save(tmp_path / "policy")
    settings = [f"collect.policy={tmp_path / 'policy'}", f"run.root={tmp_path}", "collect.chains=true"]
    assert main(["collect", f"world={WORLD}", *settings, "inference.engine=lean"]) == 2
    assert "inference.engine=lean does not return" in " ".join(capsys.readouterr().err.split())
