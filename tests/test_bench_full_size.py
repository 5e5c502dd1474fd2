"""The benchmark of large VLAs, with small ones."""

import dataclasses
import json

import pytest
import torch

from robopolicy.benchmarks import full_size, tiny_vla
from robopolicy.cli import main

pytestmark = pytest.mark.long

SMALL = dataclasses.replace(
    full_size.OWN, image=32, patch=4, seen=(32, 1), read=(64, 2), head=32, shared=1, acts=64, chunk=12, steps=2
)
OVERRIDES = [
    "world.image_size=32", "finetune.num_envs=4", "finetune.rollout_length=1", "finetune.minibatch=4",
    "finetune.iterations=2", "finetune.evaluate_episodes=1", "finetune.critic_width=8", "finetune.optimiser=adamw",
]  # fmt: skip


@pytest.mark.skipif(not bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()), reason="no bfloat16 on this CPU")
@pytest.mark.parametrize(("kind", "ways"), [("smolvla", ["fp32", "many"]), ("pi0", ["expert"])])
def test_a_row_says_what_was_held_and_what_was_planned(kind, ways, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(full_size, "OWN", SMALL)
    monkeypatch.setattr(full_size, "TEXT", {})
    monkeypatch.setattr(full_size, "PI_SIDE", 32)
    monkeypatch.setattr(full_size, "ROWS", (1, 2))
    monkeypatch.setattr(full_size, "WAYS", {way: full_size.WAYS[way] for way in ways})
    changed = ",".join(f"'{setting}'" for setting in OVERRIDES)
    given = ["bench", "full_size", f"bench.only=[{kind}]", "bench.rounds=1", f"bench.overrides=[{changed}]"]
    given += [f"run.root={tmp_path}", "run.device=cpu"]
    with tiny_vla.pi_of(SMALL):
        assert main([*given, f"json={tmp_path / 'figures.json'}"]) == 0
        capsys.readouterr()
        assert main(given) == 0  # nothing is done twice
    assert "Fine-tuning" not in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    decided, learned = (figures[part][kind] for part in ("decisions", "finetuning"))
    assert decided["chunk"] == 12 and decided["steps"] == 2 and decided["tokens"] > 48
    assert set(decided["bf16"]) == {"1", "2"} and decided["fp32"]["2"]["median_ms"] > 0
    assert set(learned) == set(ways)
    for row in learned.values():
        assert row["decisions"] == 4 and row["planned"] > 0 and row["bytes"] is None
        assert row["seconds_collect"] > 0 and row["seconds_update"] > 0
    assert not list(tmp_path.glob("bench/full_size/finetune/*/*/checkpoint"))  # they are large
