"""Worker processes: the same episodes as in one process, and clear errors when one of them dies."""

import os
import signal

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError, RobopolicyWarning, SpecError
from robopolicy.testing.world import check_same, check_same_step
from sims.suites.gymnasium_suite import make_gymnasium_world
from sims.suites.vector import WorkerError

pytestmark = pytest.mark.long

POINT = "suite_toys:Point-v0"


@pytest.fixture
def spread():
    """A world of five rows over two processes."""
    world = make_gymnasium_world(POINT, 5, workers=2, history=2, cameras=("pixels",), image_size=4)
    yield world
    world.close()


def test_workers_play_the_same_episodes_as_one_process(spread):
    alone = make_gymnasium_world(POINT, 5, history=2, cameras=("pixels",), image_size=4)
    seeds = np.arange(5) + 100
    check_same(alone, alone.reset(seeds=seeds), spread.reset(seeds=seeds), "starts are equal", 0.0)
    draw = np.random.default_rng(0)
    for rows in ([4, 0], [3], [1, 2, 4]):
        actions = draw.uniform(-1, 1, (5, 4, 2))
        check_same_step(alone, alone.step(actions), spread.step(actions), "steps are equal", 0.0)
        fresh = [world.reset(rows=rows, seeds=np.asarray(rows) + 7) for world in (alone, spread)]
        check_same(alone, *fresh, "partial resets are equal", 0.0)
        images = [world.render(rows=rows, height=6, width=5) for world in (alone, spread)]
        assert np.array_equal(*images)
    assert len(spread.pool.process_ids) == 2 and not alone.pool.process_ids


def test_a_killed_worker_is_named_with_the_way_out(spread):
    spread.reset(seeds=np.arange(5))
    victim = spread.pool.process_ids[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"worker 1.*process {victim}, rows 3 to 4.*SIGKILL.*workers=0"):
        for _ in range(2):
            spread.step(np.zeros((5, 3, 2)))
    spread.close()
    assert not spread.pool.process_ids
    with pytest.raises(ConfigError, match="closed"):
        spread.step(np.zeros((5, 3, 2)))


def test_after_a_dead_worker_no_stale_answer_is_read(spread):
    spread.reset(seeds=np.arange(5))
    os.kill(spread.pool.process_ids[0], signal.SIGKILL)
    for _ in range(3):
        with pytest.raises(WorkerError, match="worker 0"):
            spread.step(np.zeros((5, 3, 2)))
    with pytest.raises(WorkerError, match="worker 0"):
        spread.reset(rows=[4], seeds=[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_inside_the_environment_is_told_and_leaves_the_world_usable(workers):
    world = make_gymnasium_world(POINT, 3, workers=workers, env_options={"fail_at": 3})
    world.reset(seeds=[1, 2, 3])
    with pytest.raises(WorkerError, match=r"ArithmeticError: the point fell off its edge \(at .*suite_toys.py"):
        world.step(np.zeros((3, 4, 2)))
    observation = world.reset(seeds=[1, 2, 3])
    assert (world.step(np.zeros((3, 2, 2))).valid).all() and len(observation["task"]) == 3
    world.close()


def test_notes_cross_the_border():
    world = make_gymnasium_world(POINT, 2, workers=1, success_key="solved")
    world.reset(seeds=[1, 2])
    with pytest.warns(RobopolicyWarning, match="without 'solved'") as notes:
        world.step(np.zeros((2, 12, 2)))
    assert len(notes) == 1
    world.close()


def test_errors_of_ours_keep_their_kind_across_the_border():
    world = make_gymnasium_world(POINT, 2, workers=1, success_key="solved", success="suite_toys:one_number")
    world.reset(seeds=[1, 2])
    with pytest.raises(SpecError, match="must return a single boolean"):
        world.step(np.zeros((2, 12, 2)))
    world.close()
    with pytest.raises(ConfigError, match="could not be created"):
        make_gymnasium_world(POINT, 2, workers=1, env_options={"unknown": 1})


def test_snapshots_cross_the_border():
    pytest.importorskip("gymnasium_robotics")
    worlds = [make_gymnasium_world("FetchPush-v4", 3, workers=workers) for workers in (0, 2)]
    draw = np.random.default_rng(0)
    before, after = draw.uniform(-1, 1, (3, 5, 4)), draw.uniform(-1, 1, (3, 7, 4))
    for world in worlds:
        world.reset(seeds=[1, 2, 3])
        world.step(before)
    saved = worlds[0].snapshot()
    future = worlds[0].step(after)
    worlds[1].restore(saved.take([2, 0, 1]))
    step = worlds[1].step(after[[2, 0, 1]])
    for key, value in future.trace.items():
        assert np.array_equal(value[[2, 0, 1]], step.trace[key])
    for world in worlds:
        world.close()
