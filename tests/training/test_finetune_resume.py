"""A run killed with SIGKILL and started again ends byte for byte where an unbroken run ends."""

from pathlib import Path

import pytest
from bandit_toys import run_apart
from mortal_runs import train_streams

from robopolicy.core.run import RunFolder

pytestmark = pytest.mark.long


def test_kill_and_resume_end_in_the_same_place(tmp_path: Path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_streams(whole, kill_at=0)
    assert run_apart(train_streams, broken, kill_at=11) == -9  # in iteration 4, after the checkpoint of iteration 2
    train_streams(broken, kill_at=0)
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    assert files == [path.relative_to(broken) for path in sorted(broken.rglob("*")) if path.is_file()]
    for file in files:
        if file.name != "metrics.jsonl":
            assert (whole / file).read_bytes() == (broken / file).read_bytes(), file
    timeless = [
        [{key: value for key, value in record.items() if not key.startswith("seconds")} for record in records]
        for records in (RunFolder(whole).metrics(), RunFolder(broken).metrics())
    ]
    assert timeless[0] == timeless[1]
    assert [record["iteration"] for record in timeless[0]] == list(range(8))
