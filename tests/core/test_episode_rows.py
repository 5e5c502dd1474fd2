"""The bookkeeping of episodes against one row stepped by hand, and its errors."""

import numpy as np
import pytest

from robopolicy.core.episode_rows import EpisodeRows, require_sizes
from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.spec import STATE, TASK, Field, WorldSpec
from robopolicy.core.world import Snapshot

BATCH, CHUNK, HORIZON = 64, 3, 11


def make(*, terminate_on_success: bool = True, cuts: bool = False, history: int = 2) -> EpisodeRows:
    spec = WorldSpec(
        "toy",
        {STATE: Field((1,))},
        Field((1,)),
        10.0,
        HORIZON,
        history,
        rewards=("paid",),
        instructions=("wait", "go"),
        terminate_on_success=terminate_on_success,
    )
    return EpisodeRows(spec, BATCH, np.arange, cuts=cuts)


def started(**options) -> EpisodeRows:
    rows = make(**options)
    index, _ = rows.reset_rows(None, None)
    rows.start(index, {STATE: np.zeros((BATCH, 1, 1))}, instruction=index % 2, own={"load": np.arange(BATCH)})
    return rows


def by_hand(row: dict, success, terminated, truncated, cut, terminate_on_success: bool) -> tuple[int, list[bool]]:
    """Play one running row's chunk step by step; returns its length and where success came first."""
    first = []
    for now in range(CHUNK):
        row["steps"] += 1
        first.append(bool(success[now]) and not row["success"])
        row["success"] |= bool(success[now])
        row["terminated"] = bool(terminated[now]) or (row["success"] and terminate_on_success)
        row["truncated"] = not row["terminated"] and (bool(truncated[now]) or row["steps"] >= HORIZON)
        row["horizon_end"] = not row["terminated"] and not row["truncated"] and bool(cut[now])
        if row["terminated"] or row["truncated"] or row["horizon_end"]:
            return now + 1, first + [False] * (CHUNK - now - 1)
    return CHUNK, first


@pytest.mark.parametrize("terminate_on_success", [True, False])
def test_episodes_end_as_by_hand(terminate_on_success):
    rows, draws = started(terminate_on_success=terminate_on_success, cuts=True), np.random.default_rng(3)
    names = ("success", "terminated", "truncated", "horizon_end")
    hand: list[dict] = [{"steps": 0, **dict.fromkeys(names, False)} for _ in range(BATCH)]
    patterns = set()
    for _ in range(5):
        running, index = np.flatnonzero(rows.running), rows.running_index
        flags = [draws.random((len(running), CHUNK)) < 0.07 for _ in range(4)]
        moved = rows.advance(index, flags[0], terminated=flags[1], truncated=flags[2], cut=flags[3])
        for place, row in enumerate(running):
            success, terminated, truncated, cut = (flag[place] for flag in flags)
            length, first = by_hand(hand[row], success, terminated, truncated, cut, terminate_on_success)
            assert moved.length[place] == length
            assert moved.live[place].sum() == length
            assert moved.first[place].tolist() == first
            patterns.add(tuple(hand[row][name] for name in names[1:]))
        for name in ("steps", *names):
            assert rows.arrays[name].tolist() == [row[name] for row in hand]
    assert len(patterns) == 4
    assert not rows.running.any()
    assert np.asarray(rows.running_index).tolist() == []


def test_ended_rows_stay_at_their_last_frame_and_earn_nothing():
    rows = started()
    success = np.zeros((BATCH, CHUNK), dtype=bool)
    success[0, 1] = True
    frames = {STATE: np.arange(1.0, CHUNK + 1)[None, :, None].repeat(BATCH, 0).astype(np.float32)}
    index = rows.running_index
    moved = rows.advance(index, success)
    assert rows.trace(index, frames, moved.length)[STATE][0, :, 0].tolist() == [1, 2, 2]
    rows.update_history(index, rows.extended_history(index, frames), moved.length)
    assert rows.observation()[STATE][:2, :, 0].tolist() == [[1, 2], [2, 3]]
    index = rows.running_index
    assert np.asarray(index).tolist() == list(range(1, BATCH))
    moved = rows.advance(index, success[1:])
    later = {STATE: frames[STATE][1:] + 10}
    trace = rows.trace(index, later, moved.length)
    rows.update_history(index, rows.extended_history(index, later), moved.length)
    step = rows.step(trace, {"paid": rows.scatter(index, np.ones((BATCH - 1, CHUNK)))}, rows.scatter(index, moved.live))
    assert step.observation[STATE][:2, :, 0].tolist() == [[1, 2], [12, 13]]
    assert step.trace[STATE][:2, :, 0].tolist() == [[2, 2, 2], [11, 12, 13]]
    assert step.rewards["paid"][:2].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert step.valid[:2].tolist() == [[False] * 3, [True] * 3]
    assert step.horizon_end is None
    assert step.observation[TASK][:2].tolist() == ["wait", "go"]


def test_a_reset_clears_its_rows_alone_and_an_idle_step_changes_nothing():
    rows = started(cuts=True)
    rows.advance(rows.running_index, np.ones((BATCH, CHUNK), dtype=bool))
    before = rows.observation()
    step = rows.idle(CHUNK)
    assert not step.valid.any()
    assert not step.rewards["paid"].any()
    assert step.terminated.all()
    assert step.horizon_end is not None
    index, seeds = rows.reset_rows([3, 1], [7, 8])
    assert seeds.tolist() == [7, 8]
    rows.start(index, {STATE: np.full((2, 1, 1), 5.0)}, instruction=1, own={"load": np.array([30, 10])})
    assert np.flatnonzero(rows.running).tolist() == [1, 3]
    assert rows.arrays["load"][:5].tolist() == [0, 10, 2, 30, 4]
    after = rows.observation()
    others = np.setdiff1d(np.arange(BATCH), [1, 3])
    assert np.array_equal(before[STATE][others], after[STATE][others])
    assert after[STATE][3].tolist() == [[5.0], [5.0]]
    assert after[STATE].dtype == np.float32


def test_snapshots_carry_everything_into_other_rows():
    rows = started()
    rows.advance(rows.running_index, np.zeros((BATCH, CHUNK), dtype=bool))
    saved = Snapshot(rows.snapshot([2]))
    rows.advance(rows.running_index, np.ones((BATCH, CHUNK), dtype=bool))
    assert rows.restore(saved, [5]).tolist() == [5]
    assert rows.arrays["load"][5] == 2
    assert rows.arrays["steps"][5] == CHUNK
    assert np.flatnonzero(rows.running).tolist() == [5]
    with pytest.raises(SpecError, match=r"1 row\(s\), but 2"):
        rows.restore(saved, [0, 1])
    with pytest.raises(SpecError, match="does not fit"):
        started(history=3).restore(saved, [0])
    with pytest.raises(SpecError, match="'load'"):
        rows.restore(Snapshot({name: value for name, value in saved.arrays.items() if name != "load"}), [0])


def test_wrong_use_is_explained():
    rows = make()
    for use in (rows.observation, lambda: rows.snapshot(None), lambda: rows.running_index, rows.require_started):
        with pytest.raises(SpecError, match=r"call reset\(\) first"):
            use()
    with pytest.raises(SpecError, match="every row"):
        rows.reset_rows([0], [1])
    for wrong in ([0, 0], [-1], [BATCH]):
        with pytest.raises(SpecError, match="distinct"):
            rows.index(wrong)
    with pytest.raises(SpecError, match="one seed per row"):
        rows.reset_rows(None, [1])
    with pytest.raises(ConfigError, match="history=0"):
        make(history=0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        require_sizes(batch_size=0, history=1)


def test_seeds_are_copied_and_an_instruction_that_the_spec_does_not_list_is_shown_whole():
    rows, given = make(), np.arange(BATCH)[::-1]
    index, seeds = rows.reset_rows(None, given)
    assert np.array_equal(seeds, given)
    assert seeds.base is None
    told = ["go", "a text longer than any that the spec lists"] * (BATCH // 2)
    rows.start(index, {STATE: np.zeros((BATCH, 1, 1))}, instruction=rows.instruction_index(told))
    assert rows.observation()[TASK].tolist() == told
