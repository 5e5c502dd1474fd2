"""The benchmark of failure detectors, smaller than it is meant to be; what its tables say."""

import json
from pathlib import Path

import pytest

from robopolicy.benchmarks import detectors
from robopolicy.cli import main
from robopolicy.evaluation.success import counted_rate

TINY = [
    "policy.width=16",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "collect.episodes=8",
    "train.fit.steps=200",
    "train.evaluate_episodes=0",
    "detect.episodes=80",
    "detect.fault_episodes=8",
    "detect.detectors=[nearest,clock]",
]


@pytest.mark.long
def test_a_policy_is_watched_once_and_scored_with_and_without_faults(tmp_path: Path):
    overrides = ",".join(f"'{each}'" for each in TINY)
    asked = ["bench", "detectors", "bench.tasks=[reach_planar]", "bench.seeds=[3]", f"bench.overrides=[{overrides}]"]
    asked += ["run.threads=1", f"run.root={tmp_path}", f"json={tmp_path}/out.json"]
    assert main(asked) == 0
    row = json.loads((tmp_path / "out.json").read_text())["tasks"]["reach_planar"]["3"]
    assert set(row["detectors"]) == {"nearest", "clock"} and row["success"]["episodes"] == 80
    assert "latency" in row["faults"] and row["faults"]["latency"]["clock"]["success"]["total"] <= 8
    assert (tmp_path / "bench/detectors/reach_planar/train/diffusion/3/detectors/nearest").is_dir()
    plain, faults = detectors.tables({"tasks": {"reach_planar": {"3": row}}})
    assert [line[0] for line in plain.lines] == ["nearest", "clock"] and {len(line) for line in plain.lines} == {9}
    assert [line[0] for line in faults.lines] == list(row["faults"])
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert main(asked) == 0 and times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}


def scores(detected: int, failed: int, area: float | None) -> dict:
    counts = {"detected": counted_rate(detected, failed), "false_alarms": counted_rate(1, 50), "lead_seconds": None}
    areas = {time: {"auroc": area, "failed": failed, "successful": 50} for time in ("25%", "50%", "75%")}
    return {"auroc": areas, **counts, "equal_false_alarms": {**counts, "lead_seconds": 1.25}}


def test_detections_are_counted_over_the_episodes_of_all_seeds():
    rows = {
        str(seed): {
            "success": {"success_rate": 0.5},
            "detectors": {"float": scores(detected, failed, area)},
            "faults": {},
            "calibrated_on": 60,
        }
        for seed, detected, failed, area in ((0, 9, 10, 0.75), (1, 30, 90, None))
    }
    (table,) = detectors.tables({"tasks": {"stack": rows}})
    assert table.title == "stack, 2 seeds, success of the policies 50.0 % (50.0 to 50.0)"
    name, first, *_, detected, false, lead, there, lead_there = table.lines[0]
    assert (name, first, lead, lead_there) == ("float", "0.75 / ", "- / -", "1.2 / 1.2")
    assert detected.startswith("39.0%") and detected == there and false.startswith("2.0%")
