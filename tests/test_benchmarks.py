"""Experiments about world models run, smaller than they are meant to be, and their replays are true."""

import numpy as np
import pytest
import torch

from robopolicy.benchmarks import joint, planning, styles, trajectories
from robopolicy.benchmarks.replay import replay
from robopolicy.verbs.bench_worlds import EXPERIMENTS
from worldmodels.edm import EdmConfig
from worldmodels.rssm_dynamics import RssmConfig
from worldmodels.trajectory_diffusion import TrajectoryConfig
from worldmodels.transitions import TransitionData


def test_a_replay_from_what_was_seen_goes_where_the_recording_went():
    episodes = trajectories.collect(0, 300)
    data = TransitionData.of(episodes)
    first = episodes.starts[episodes.lengths >= 10]
    index = first[:, None] + torch.arange(10)
    seen = replay(data.state[first], data.action[index])
    assert float((seen - data.next_state[index]).abs().max()) < 1e-4


@pytest.mark.slow
def test_the_experiments_run():
    small = TrajectoryConfig(length=8, width=32, depth=2, edm=EdmConfig(sigma_data=1.0, steps=4))
    scale = trajectories.Scale(
        recorded=400, fit=20, synthetic=16, updates=20, refresh=10, guidance=(0.0, 1.0), trajectories=small
    )
    found = trajectories.measure(0, scale)
    assert np.isfinite(found["ensemble"]["error"]).all() and set(found["guidance"]) == {"0.0", "1.0"}
    tiny = planning.Scale(demonstrations=8, explored=4, held_out=8, imagined=16, steps=5, fit=20, clone=20)
    figures = planning.measure(0, tiny)
    assert set(figures) == {"policy", "planned", "cautious", "curious", "before"}
    title, header, lines = EXPERIMENTS["planning"].tables([figures])[0]
    assert title and len(lines) == 5 and all(len(line) == len(header) for line in lines)
    looks = styles.Scale(episodes=8, held_out=4, looks=1, unseen=1, fit=5, model=RssmConfig(size="tiny"))
    seen = styles.measure(0, looks)
    assert len(EXPERIMENTS["styles"].tables([seen])[0][2]) == 4
    both = joint.measure(0, joint.Scale(episodes=8, noise=(0.2, 1.0), fit=20, candidates=2, judged=8))
    assert len(EXPERIMENTS["joint"].tables([both])[0][2]) == 4
