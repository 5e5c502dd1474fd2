"""Experiments about world models run, smaller than they are meant to be, and their replays are true."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.benchmarks import coplanner, joint, joint_video, trajectories, video
from robopolicy.benchmarks.replay import replay
from robopolicy.nn.configuration import EdmConfig
from worldmodels.checkpoint import load_world_model
from worldmodels.configuration import ReadoutConfig, TrajectoryConfig, VideoConfig
from worldmodels.data import recorded_transitions

pytestmark = pytest.mark.long


def whole(tables):
    """Return tables after seeing that each has a title and lines as long as its header."""
    for table in tables:
        assert table.title and table.lines and all(len(line) == len(table.header) for line in table.lines)
    return tables


def test_a_replay_from_what_was_seen_goes_where_the_recording_went():
    episodes = trajectories.collect("push_cube", 0, 300, 0.5)
    data = recorded_transitions(episodes)
    first = episodes.starts[episodes.lengths >= 10]
    index = first[:, None] + torch.arange(10)
    next_state = replay(data.state[first], data.action[index])
    assert float((next_state - data.next_state[index]).abs().max()) < 1e-4


@pytest.mark.slow
def test_the_experiments_run():
    small = TrajectoryConfig(length=8, width=32, depth=2, edm=EdmConfig(sigma_data=1.0, steps=4))
    scale = trajectories.Scale(
        recorded=400,
        fit=20,
        guidance=(0.0, 1.0),
        taught_recorded=400,
        taught_fit=20,
        taught_length=8,
        synthetic=16,
        updates=20,
        refresh=10,
        trajectories=small,
    )
    results = trajectories.measure(0, scale)
    assert np.isfinite(list(results["ensemble"]["error_after_steps"].values())).all()
    assert set(results["guidance"]) == {"0.0", "1.0"}
    assert len(results["agents"]) == 4
    assert len(whole(trajectories.tables({"seeds": {"0": results}}))) == 2
    tiny = coplanner.Scale(
        cautious=coplanner.Study("push_cube", 8, 4.0, 8, 0.4),
        imagined=16,
        steps=5,
        curious=coplanner.Study("reach_planar", 8, 30.0, 2, 0.3),
        explored=40,
        rounds=1,
        held_out=8,
        fit=20,
        clone=20,
    )
    figures = coplanner.measure(0, tiny)
    assert set(figures) == {"policy", "planned", "cautious", "curious", "before"}
    assert len(whole(coplanner.tables({"seeds": {"0": figures}}))[0].lines) == 5
    both = joint.measure(0, joint.Scale(episodes=8, noise=(0.2, 1.0), fit=20, candidates=2, judged=8))
    assert len(whole(joint.tables({"seeds": {"0": both}}))[0].lines) == 4


def test_a_joint_policy_of_pictures_starts_from_the_video_or_from_its_autoencoder_alone(tmp_path):
    model = joint_video.Scale().model
    model = replace(model, batch_size=4, futures=1, values=1, video=replace(model.video, width=32, depth=1))
    steps = dict.fromkeys(("autoencoder", "video", "joint", "yardstick"), 2)
    scale = joint_video.Scale(episodes=4, noise=(0.2, 1.0), candidates=2, judged=2, model=model, **steps)
    first = joint_video.measure(0, tmp_path, scale)
    scratch, video_model = (load_world_model(tmp_path / name) for name in ("autoencoder", "video"))
    same = {name: torch.equal(weight, video_model.state_dict()[name]) for name, weight in scratch.state_dict().items()}
    assert all(equal for name, equal in same.items() if name.startswith("autoencoder.network."))
    assert not all(equal for name, equal in same.items() if name.startswith("transformer."))
    lines = whole(joint_video.tables({"seeds": {"0": first, "1": first}}))[0].lines
    assert len(lines) == 1 + 2 * 2 and lines[0][0].startswith(joint_video.YARDSTICK)
    (tmp_path / "from scratch.json").write_text(json.dumps({"one decision": first["from scratch, one decision"]}))
    again = joint_video.measure(0, tmp_path, scale)  # what is stored is not measured again
    assert set(first) - set(again) == {"from scratch, best of 2"}
    assert all(again[name] == first[name] for name in again)


@pytest.mark.slow
def test_the_experiment_with_images_runs_and_finds_its_models_again(tmp_path):
    tiny = VideoConfig(size="tiny", channels=(8, 16, 16), recent=2, memory=1, stride=2, chunk=2, batch_size=4)
    tiny = replace(tiny, view_batch_size=4, readout=ReadoutConfig(batch_size=16, imagined_steps=16))
    scale = video.Scale(
        ablations=("no memory", "no bootstrapping"),
        recorded=200,
        fit=5,
        noise=("low",),
        judged=12,
        judged_noise=("random",),
        begin=2,
        followed=4,
        length=12,
        horizons=(1, 2, 4),
        filmed=2,
        timed=4,
        model=tiny,
    )
    first = video.measure(0, scale, tmp_path)
    figures = {"seeds": {"0": {"fixed_cameras": first}}}
    assert len(whole(video.tables(figures))) == 3
    sections = video.sections(figures, tmp_path / "elsewhere")
    assert sections and all("<svg" in section.svg for section in sections)
    assert (tmp_path / "imagined.mp4").stat().st_size > 1000
    again = video.measure(0, scale, tmp_path)
    assert all(again[name] == first[name] for name in ("model", "no memory", "no bootstrapping"))
