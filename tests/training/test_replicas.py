"""Training in several processes, started by torchrun, compared with one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from replica_runs import JOBS, MODELS, REFUSED, REGRESSIONS

from robopolicy.core.tensors import load_tree
from robopolicy.rl.presets import PRESETS

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("replica_runs.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
TINY = (
    "world=reach_planar",
    "run.threads=1",
    "finetune.iterations=5",
    "finetune.num_envs=8",
    "finetune.rollout_length=4",
    "finetune.minibatch=16",
    "finetune.epochs=2",
    "finetune.evaluate_episodes=8",
    "finetune.evaluate_every=3",
    "finetune.checkpoint_every=2",
    "finetune.videos=0",
)
WITHOUT_SUCCESS = {"pacs", "spear", "digi_q"}
"""Presets that have no gradient here: they learn from successes, or warm up."""


def environment() -> dict[str, str]:
    tests = SCRIPT.parents[1]
    places = [SCRIPT.parent, tests / "worldmodels", tests, tests.parent, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"}


def run(*command: object) -> "subprocess.CompletedProcess[str]":
    words = [str(word) for word in command]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=850, check=False)


def ours(result: "subprocess.CompletedProcess[str]") -> list[str]:
    """Return robopolicy's error messages, without those of torchrun."""
    assert result.stderr.count("Traceback") <= 1, result.stderr  # torchrun's own
    return [line for line in result.stderr.splitlines() if line.startswith("Error:")]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Results of one process, and of each of two."""
    folder = tmp_path_factory.mktemp("jobs")
    assert run(sys.executable, SCRIPT, folder).returncode == 0
    assert run(*TORCHRUN, SCRIPT, folder).returncode == 0
    results = []
    for name in ("1-0", "2-0", "2-1"):
        result, errors = torch.load(folder / f"{name}.pt", weights_only=True)
        assert set(errors) == (set() if name == "1-0" else set(REFUSED))
        assert all(REFUSED[job] in error for job, error in errors.items())
        results.append(result)
    return results


@pytest.mark.parametrize("job", [job for job in (*JOBS, *REGRESSIONS, *MODELS) if job not in REFUSED])
def test_two_processes_have_the_gradients_of_one_and_equal_weights(jobs, job: str):
    one, first, second = (each[job] for each in jobs)
    assert one.keys() == first.keys() == second.keys()
    assert any(name.startswith("gradient") for name in one)
    for name, value in one.items():
        assert torch.equal(first[name], second[name]), name
        if name.startswith("gradient"):
            assert job in WITHOUT_SUCCESS or bool(value.any())
            torch.testing.assert_close(first[name], value, rtol=0, atol=1e-5 * float(value.abs().max()))
    assert torch.equal(one["stats"], first["stats"])  # as many steps, stopped at the same one
    # Where a gradient is almost 0, its rounding decides the sign of Adam's step.
    torch.testing.assert_close(first["weights"], one["weights"], rtol=0, atol=1e-3)


def test_every_preset_is_compared_and_the_divergence_stops_some(jobs):
    assert set(PRESETS) <= set(JOBS)
    actor_steps, was_stopped = jobs[0]["KL stop"]["stats"].reshape(-1, 2).unbind(1)
    assert bool((was_stopped == 1).any())
    assert float(actor_steps.max()) > 1


def contents(folder: Path) -> dict[str, bytes]:
    """Return what a run has learned: its checkpoints, and its metrics without seconds."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines]
    return {**files, "metrics": json.dumps(metrics).encode()}


def test_a_killed_process_ends_all_and_the_same_command_resumes_exactly(root: Path, tmp_path: Path):
    data = f"run.inputs=reach_planar run.root={root}".split()
    whole = run(*TORCHRUN, "-m", "robopolicy", "finetune", *TINY, *data, "run.name=whole")
    assert whole.returncode == 0, whole.stderr
    assert "divide every minibatch, 8 of 16 action chunks each" in whole.stdout
    assert whole.stdout.count("Stopped after") == 1
    killed = run(*TORCHRUN, SCRIPT, "command", "killed", 14, "finetune", *TINY, *data, "run.name=parts")
    assert killed.returncode != 0
    (error,) = ours(killed)
    assert "One of the 2 processes of this run has ended" in error
    assert not (root / "finetune/parts/0/result.json").exists()
    steps = len((root / "finetune/parts/0/metrics.jsonl").read_text().splitlines())
    assert 1 < steps < 6
    again = run(*TORCHRUN, "-m", "robopolicy", "finetune", *TINY, *data, "run.name=parts")
    assert again.returncode == 0, again.stderr
    results = [contents(root / "finetune" / name / "0") for name in ("whole", "parts")]
    assert results[0] == results[1]


def test_a_value_that_is_not_finite_in_one_process_ends_all_with_one_error(root: Path):
    data = f"run.inputs=reach_planar run.root={root} run.name=nan".split()
    result = run(*TORCHRUN, SCRIPT, "command", "nan", 14, "finetune", *TINY, *data)
    assert result.returncode != 0
    (error,) = ours(result)
    assert "The log-probability is not finite at fine-tuning iteration" in error


def test_an_error_of_one_process_ends_all(root: Path):
    data = f"run.inputs=reach_planar run.root={root} run.name=raises".split()
    result = run(*TORCHRUN, SCRIPT, "command", "raises", 14, "finetune", *TINY, *data)
    assert result.returncode != 0
    assert ours(result) == ["Error: Process 1 has a problem of its own."]


def test_ctrl_c_ends_all_also_where_one_hangs(root: Path):
    words = [
        "command",
        "hangs",
        "14",
        "finetune",
        *TINY,
        f"run.root={root}",
        "run.inputs=reach_planar",
        "run.name=hang",
    ]
    metrics = root / "finetune/hang/0/metrics.jsonl"
    process = subprocess.Popen(
        [*TORCHRUN, str(SCRIPT), *words], env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None
        time.sleep(0.2)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert errors.count("Interrupted. Nothing is lost: run the same command again to resume.") == 1
    assert process.returncode != 0


def test_verbs_of_one_process_and_the_wrong_number_of_them_are_refused(root: Path):
    result = run(*TORCHRUN, "-m", "robopolicy", "evaluate", root / "train/reach_planar/0/checkpoint")
    assert result.returncode != 0
    (error,) = ours(result)
    assert "'evaluate' runs in one process, but 2 were started" in error


def test_training_of_two_processes_is_that_of_one(root: Path):
    settings = ("world=reach_planar", "run.threads=1", f"run.root={root}", "train.fit.steps=6", "train.batch_size=33")
    settings += ("train.evaluate_episodes=0", "policy.width=32", "policy.depth=1", "policy.sampling_steps=2")
    settings += ("run.inputs=reach_planar",)
    one = run(sys.executable, "-m", "robopolicy", "train", *settings, "run.name=one")
    two = run(*TORCHRUN, "-m", "robopolicy", "train", *settings, "run.name=two")
    assert one.returncode == two.returncode == 0, two.stderr
    trees = [load_tree(root / "train" / name / "0/resume", "trainer") for name in ("one", "two")]
    for key, value in trees[0]["model"].items():
        torch.testing.assert_close(trees[1]["model"][key], value, rtol=0, atol=2e-4)
    for key, value in trees[0]["history"].items():
        torch.testing.assert_close(trees[1]["history"][key], value, rtol=1e-4, atol=1e-6)
    for name, state in trees[0]["generators"].items():
        assert torch.equal(state, trees[1]["generators"][name])
