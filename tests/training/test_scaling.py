"""Time of an iteration on more processes: hand tables of the computed rows."""

import pytest

from robopolicy.training.scaling import HEADER, KEPT, Recorded, scaling_rows


def line(collect, update, evaluate=None):
    seconds = {"seconds_collect": collect, "seconds_update": update}
    return seconds if evaluate is None else {**seconds, "seconds_evaluate": evaluate}


RECORDED = Recorded(3.6, 1.6, 0.9, 4)


def test_recorded_seconds_leave_out_the_first_iteration_and_lines_without_seconds():
    lines = [{"iteration": 0}, line(100.0, 100.0, 100.0), line(1.0, 2.0, 0.0), line(3.0, 2.0, 4.0), line(9.0, 5.0)]
    assert Recorded.of(lines) == Recorded(3.0, 2.0, 4 / 3, 3)
    assert Recorded.of(lines[:2]) is None and Recorded.of([]) is None


def test_workers_divide_collection_and_evaluation_and_replicas_the_update():
    assert RECORDED.on(1, 1) == RECORDED
    four = RECORDED.on(4, 2)
    assert (four.collect, four.update, four.evaluate) == pytest.approx((1.25, 0.8, 0.3)) and KEPT == 0.75


def test_with_staleness_the_longer_of_collection_and_update_counts():
    assert RECORDED.on(1, 1, overlaps=True).total == pytest.approx(3.6 + 0.9)
    assert RECORDED.on(4, 1, overlaps=True).total == pytest.approx(1.6 + 0.3)


def test_only_the_run_itself_is_measured_and_shards_divide_the_environments():
    rows = scaling_rows(RECORDED, 48)
    assert all(len(row) == len(HEADER) for row in rows)
    assert [row[-1] for row in rows] == ["measured"] + ["computed"] * (len(rows) - 1)
    assert rows[0][1:6] == ["3.60 s", "1.60 s", "0.90 s", "6.10 s", "1.0x"]
    assert [row[0] for row in rows[1::2]] == ["4 workers", "16 workers", "48 workers", "48 workers, 8 data-parallel"]
    assert scaling_rows(RECORDED, 30)[3][0] == "15 workers"
    assert rows[1][1:6] == ["1.25 s", "1.60 s", "0.30 s", "3.15 s", "1.9x"]
