"""The benchmark of a GPU, at tiny sizes on a machine without one."""

import json

import pytest

from robopolicy.benchmarks import gpu
from robopolicy.cli import main

pytestmark = pytest.mark.long


def bench(root, *parts, figures=None):
    words = ["bench", "gpu", "bench.tiny=true", f"bench.only=[{','.join(parts)}]", f"run.root={root}"]
    return main([*words, "run.device=cpu", "run.threads=1", *([f"json={figures}"] if figures else [])])


def test_without_a_gpu_the_rows_of_the_cpu_are_measured_once(tmp_path, capsys):
    parts = ("physics", "states", "inference")
    assert bench(tmp_path, *parts, figures=tmp_path / "gpu.json") == 0
    assert "There is no CUDA device: only the CPU rows are measured." in " ".join(capsys.readouterr().out.split())
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert set(figures["parts"]) == set(parts) and figures["card"] == "" and not figures["left_out"]
    rows = [row for part in figures["parts"].values() for row in part.values()]
    assert len(rows) == 4 and all(row["rate"] > 0 for row in rows)
    assert bench(tmp_path, *parts) == 0
    again = json.loads((tmp_path / "bench" / "gpu" / "benchmark.json").read_text())
    assert again["parts"] == figures["parts"]


def test_what_fails_and_what_is_left_out_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "played", lambda *arguments: 1 / 0)
    assert bench(tmp_path, "physics") == 0
    assert "ZeroDivisionError" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "SECONDS", -1.0)
    assert bench(tmp_path, "physics") == 0
    assert "Left out after eight minutes" in capsys.readouterr().out
    assert bench(tmp_path, "physic") == 2
    assert "Did you mean 'physics'" in capsys.readouterr().err


def test_with_a_gpu_there_are_rows_of_it(tmp_path):
    import torch

    from robopolicy.configuration import compose

    lab = gpu.Lab(compose([]), tmp_path, gpu.FULL, torch.device("cuda"))
    labels = {part: list(rows(lab)) for part, rows in gpu.PARTS.items()}
    assert "push_t: warp, 16,384 environments" in labels["physics"]
    assert labels["states"][-1] == "push_t: warp physics, GPU learner, 4,096 environments"
    assert "1 at once: GPU, compiled" in labels["inference"]
    assert "SmolVLA: GPU, bf16" in labels["smolvla"]
    assert all("CPU" in rows[0] or "native" in rows[0] for rows in labels.values())
