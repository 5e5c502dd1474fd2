"""The benchmark of learning from operators, smaller than it is meant to be; what its tables say."""

import json
from pathlib import Path

import pytest

from robopolicy.benchmarks import corrections
from robopolicy.benchmarks.rates import rate_of
from robopolicy.cli import main

TINY = [
    "policy.width=16",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "collect.episodes=2",
    "train.fit.steps=5",
    "train.evaluate_episodes=8",
    "world.batch_size=8",
]


@pytest.mark.long
def test_rounds_go_on_from_their_base_with_a_budget_and_nothing_is_done_twice(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(corrections, "CONTINUED", ("train.fit.steps=2",))
    monkeypatch.setitem(corrections.FRAMES, "pick_place", 40)
    overrides = ",".join(f"'{each}'" for each in TINY)
    asked = ["bench", "corrections", "bench.tasks=[pick_place]", "bench.seeds=[3]", f"bench.overrides=[{overrides}]"]
    asked += ["bench.only=[rac,demonstrations]", "run.threads=1", f"run.root={tmp_path}", f"json={tmp_path}/out.json"]
    assert main(asked) == 0
    figures = json.loads((tmp_path / "out.json").read_text())["tasks"]["pick_place"]["3"]
    assert figures["base"]["deterministic"]["episodes"] == 8
    for number in ("1", "2"):
        helped = figures["rac"][number]
        assert helped["operator_steps"] >= 40 and helped["takeovers"] >= 1 and helped["recovering_steps"] > 0
        assert figures["demonstrations"][number]["recorded_episodes"] == 1
    assert "deterministic" not in figures["rac"]["1"] and figures["rac"]["2"]["stochastic"]["episodes"] == 8
    root = tmp_path / "bench/corrections/pick_place"
    second = json.loads((root / "train/rac_2/3/result.json").read_text())
    assert second["base_checkpoint"] == str(root / "train/rac_1/3/checkpoint") and second["training_steps"] == 2
    times = {path: path.stat().st_mtime_ns for path in root.rglob("result.json")}
    assert main(asked) == 0 and times == {path: path.stat().st_mtime_ns for path in root.rglob("result.json")}


def one(successes: int, steps: int, takeovers: int) -> dict:
    rate = rate_of(successes, 200)
    return {
        "deterministic": rate,
        "stochastic": rate,
        "difference": {"difference": 0.1, "low": 0.05, "high": 0.15},
        "recorded_episodes": 40,
        "recorded_success": 0.9,
        "operator_steps": steps,
        "recovering_steps": steps // 4,
        "takeovers": takeovers,
    }


def test_tables_say_what_operators_did_and_what_came_of_it():
    base = {mode: rate_of(100, 200) for mode in ("deterministic", "stochastic")}
    first = {name: value for name, value in one(0, 100, 8).items() if name not in (*base, "difference")}
    fleet = {str(number): one(100 + 20 * number, 40, 40 - 10 * number) for number in (1, 2, 3)}
    row = {"base": base, "rac": {"1": first, "2": one(150, 120, 9)}, "detector": fleet}
    equal, rounds = corrections.tables({"tasks": {"stack": {"0": row, "1": row}}})
    assert [line[0] for line in equal.lines] == ["base", "recovery and correction (RaC)"]
    assert equal.lines[1][1] == "75.0 % (75.0 to 75.0)" and equal.lines[1][5:] == [
        "220 (220, 220)",
        "55 (55, 55)",
        "17 (17, 17)",
    ]
    assert "+10.0 points [+5.0, +15.0]" in equal.lines[1][4]
    assert [line[1] for line in rounds.lines] == ["", "1", "2", "3"]
    assert [line[5] for line in rounds.lines[1:]] == ["0.75 (0.75, 0.75)", "0.50 (0.50, 0.50)", "0.25 (0.25, 0.25)"]
    assert all(len(line) == len(table.header) for table in (equal, rounds) for line in table.lines)
