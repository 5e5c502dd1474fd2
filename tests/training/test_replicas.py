"""Training in several processes, started by torchrun, compared with one process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked_ranks import Ranks, Result, environment
from replica_runs import JOBS, MODELS, REFUSED, REGRESSIONS, WITH_NOISE
from tiny_runs import TINY as MADE

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
WITHOUT_SUCCESS = {"pacs", "spear", "drpo", "digi_q", "truncated_ppo"}
"""Presets that have no gradient here: they learn from successes, both outcomes or finished episodes, or warm up."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """The process that others are forked from."""
    ranks = Ranks()
    yield ranks
    ranks.close()


def ours(stderr: str) -> list[str]:
    """Return robopolicy's error messages, without those of torchrun."""
    return [line for line in stderr.splitlines() if line.startswith("Error:")]


@pytest.fixture(scope="module")
def jobs(ranks: Ranks, tmp_path_factory) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Results of one process, and of each of two."""
    folder = tmp_path_factory.mktemp("jobs")
    for count in (1, 2):
        result = ranks.run(folder, (), count=count)
        assert result.codes == [0] * count, result.stderr
    results = []
    for name in ("1-0", "2-0", "2-1"):
        result, errors = torch.load(folder / f"{name}.pt", weights_only=True)
        assert set(errors) == ({"parts of different sizes"} if name == "1-0" else set(REFUSED)), errors
        assert name == "1-0" or all(REFUSED[job] in error for job, error in errors.items())
        results.append(result)
    return results


@pytest.mark.parametrize("job", [job for job in (*JOBS, *REGRESSIONS, *MODELS) if job not in REFUSED])
def test_two_processes_have_the_gradients_of_one_and_equal_weights(jobs, job: str):
    one, first, second = (each[job] for each in jobs)
    assert one.keys() == first.keys() == second.keys()
    gradients = [name for name in one if name.startswith("gradient")]
    assert gradients
    for name, value in one.items():
        assert torch.equal(first[name], second[name]), name
        if name in gradients:
            assert job in WITHOUT_SUCCESS or bool(value.any())
    for name in gradients[: WITH_NOISE.get(job)]:
        limit = 1e-5 * float(one[name].abs().max())
        torch.testing.assert_close(first[name], one[name], rtol=0, atol=limit)
    if job in WITH_NOISE:
        return
    assert torch.equal(one["stats"], first["stats"])  # as many steps, stopped at the same one
    # Where a gradient is almost 0, its rounding decides the sign of Adam's step.
    torch.testing.assert_close(first["weights"], one["weights"], rtol=0, atol=1e-3)


@pytest.mark.slow
def test_a_tiny_smolvla_has_the_gradients_of_one_process_when_divided(ranks, tmp_path):
    for count in (1, 2):
        result = ranks.run(tmp_path, (), count=count, jobs=["SmolVLA"])
        assert result.codes == [0] * count, result.stderr
    (one, errors), (two, _) = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("1-0", "2-1"))
    assert not errors
    names = [name for name in one["SmolVLA"] if name.startswith("gradient")]
    assert len(names) == 2
    for name in names:
        value = one["SmolVLA"][name]
        torch.testing.assert_close(two["SmolVLA"][name], value, rtol=0, atol=1e-5 * float(value.abs().max()))


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


@pytest.fixture(scope="module")
def root(ranks: Ranks, tmp_path_factory) -> Path:
    """A folder of runs in which collect and train of reach_planar are done."""
    root = tmp_path_factory.mktemp("runs")
    for verb in ("collect", "train"):
        result = ranks.run(root / "text", (verb, *MADE, f"run.root={root}"), count=1)
        assert result.codes == [0], result.stderr
    return root


@pytest.fixture
def data(root: Path) -> tuple[str, ...]:
    """Settings of a run with the data of `root`."""
    return f"run.root={root}", "run.inputs=reach_planar"


def under_torchrun(*words: object) -> "subprocess.Popen[str]":
    """Start a command line in two processes of torchrun, process 1 with a fault: fault, call, verb, settings."""
    command = [*TORCHRUN, str(SCRIPT), *map(str, words)]
    return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_a_killed_process_ends_all_and_the_same_command_resumes_exactly(ranks, root, data, tmp_path):
    whole = ranks.run(tmp_path / "whole", ("finetune", *TINY, *data, "run.name=whole"))
    assert whole.codes == [0, 0], whole.stderr
    assert "divide every minibatch, 8 of 16 action chunks each" in whole.stdout
    assert whole.stdout.count("Stopped after") == 1
    command = "finetune", *TINY, *data, "run.name=parts"
    killed = ranks.run(tmp_path / "killed", command, fault="killed", call=14)
    assert killed.codes == [2, -signal.SIGKILL]
    (error,) = ours(killed.stderr)
    assert "One of the 2 processes of this run has ended" in error
    assert not (root / "finetune/parts/0/result.json").exists()
    steps = len((root / "finetune/parts/0/metrics.jsonl").read_text().splitlines())
    assert 1 < steps < 6
    again = ranks.run(tmp_path / "again", command)
    assert again.codes == [0, 0], again.stderr
    results = [contents(root / "finetune" / name / "0") for name in ("whole", "parts")]
    assert results[0] == results[1]


def test_divided_weights_resume_exactly_and_load_in_one_process(ranks, root, data, tmp_path):
    command = ("finetune", *TINY, *data, "finetune.fsdp=true")
    whole = ranks.run(tmp_path / "whole", (*command, "run.name=fsdp"))
    assert whole.codes == [0, 0], whole.stderr
    killed = ranks.run(tmp_path / "killed", (*command, "run.name=fsdp_parts"), fault="killed", call=14)
    assert killed.codes == [2, -signal.SIGKILL]
    again = ranks.run(tmp_path / "again", (*command, "run.name=fsdp_parts"))
    assert again.codes == [0, 0], again.stderr
    results = [contents(root / "finetune" / name / "0") for name in ("fsdp", "fsdp_parts")]
    assert results[0] == results[1]
    settings = ("world=reach_planar", "evaluate.episodes=8", "run.threads=1")
    checkpoint = root / "finetune/fsdp/0/checkpoint"
    alone = ranks.run(tmp_path / "alone", ("evaluate", checkpoint, *settings, f"run.root={root}"), count=1)
    assert alone.codes == [0], alone.stderr


@pytest.mark.slow
def test_a_killed_process_ends_torchrun(root, data):
    process = under_torchrun("killed", 14, "finetune", *TINY, *data, "run.name=torchrun_killed")
    _, errors = process.communicate(timeout=400)
    assert process.returncode != 0
    (error,) = ours(errors)
    assert "One of the 2 processes of this run has ended" in error


@pytest.mark.parametrize("fault", ["nan", "raises"])
def test_a_fault_of_one_process_ends_all_with_one_error(ranks, data, tmp_path, fault):
    result: Result = ranks.run(tmp_path, ("finetune", *TINY, *data, f"run.name={fault}"), fault=fault, call=14)
    (error,) = ours(result.stderr)
    text = {
        "nan": "The log-probability is not finite at fine-tuning iteration",
        "raises": "Process 1 has a problem of its own.",
    }
    assert text[fault] in error
    assert "Traceback" not in result.stderr
    assert result.codes == [2, 2]


def wait_for_iterations(root: Path, name: str, is_over: Callable[[], bool]) -> None:
    """Wait until a run has two iterations, after which process 1 soon hangs."""
    metrics = root / f"finetune/{name}/0/metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert not is_over()
        time.sleep(0.2)
    time.sleep(2)


INTERRUPTED = "Interrupted. Nothing is lost: run the same command again to resume."


def test_ctrl_c_ends_all_also_where_one_hangs(ranks, root, data, tmp_path):
    processes = ranks.start(tmp_path, ("finetune", *TINY, *data, "run.name=hang"), fault="hangs", call=14)
    wait_for_iterations(root, "hang", lambda: (tmp_path / "0.err").read_text() != "")
    for _ in range(2):  # the terminal's, then torchrun's
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGINT)
        time.sleep(0.5)
    result = ranks.finish()
    assert result.stderr.count(INTERRUPTED) == 1
    assert result.codes == [130, 130]


@pytest.mark.slow
def test_ctrl_c_ends_torchrun(root, data):
    process = under_torchrun("hangs", 14, "finetune", *TINY, *data, "run.name=torchrun")
    wait_for_iterations(root, "torchrun", lambda: process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.count(INTERRUPTED) == 1
    assert process.returncode != 0


@pytest.mark.slow
def test_accelerate_launches_the_same(ranks, root, data, tmp_path):
    pytest.importorskip("accelerate")
    command = ("finetune", *TINY, *data, "finetune.iterations=2")
    forked = ranks.run(tmp_path, (*command, "run.name=forked"))
    assert forked.codes == [0, 0], forked.stderr
    accelerate = "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    words = [sys.executable, "-m", *accelerate.split(), "--dynamo_backend", "no", "-m", "robopolicy", *command]
    launched = subprocess.run(
        [*words, "run.name=launched"], env=environment(), capture_output=True, text=True, check=False
    )
    assert launched.returncode == 0, launched.stderr
    assert "Data-parallel training in 2 processes" in launched.stdout
    results = [contents(root / "finetune" / name / "0") for name in ("forked", "launched")]
    assert results[0] == results[1]


def test_verbs_of_one_process_are_refused_in_several(ranks, root, tmp_path):
    result = ranks.run(tmp_path, ("evaluate", root / "train/reach_planar/0/checkpoint"))
    assert result.codes == [2, 2]
    (error,) = ours(result.stderr)
    assert "'evaluate' runs in one process, but 2 were started" in error


def test_training_of_two_processes_is_that_of_one(ranks, root, data, tmp_path):
    settings = ("world=reach_planar", "run.threads=1", *data, "train.fit.steps=6", "train.batch_size=33")
    settings += ("train.evaluate_episodes=0", "policy.width=32", "policy.depth=1", "policy.sampling_steps=2")
    for count in (1, 2):
        result = ranks.run(tmp_path, ("train", *settings, f"run.name={count}"), count=count)
        assert result.codes == [0] * count, result.stderr
    trees = [load_tree(root / "train" / name / "0/resume", "trainer") for name in ("1", "2")]
    for key, value in trees[0]["model"].items():
        torch.testing.assert_close(trees[1]["model"][key], value, rtol=0, atol=2e-4)
    for key, value in trees[0]["history"].items():
        torch.testing.assert_close(trees[1]["history"][key], value, rtol=1e-4, atol=1e-6)
    for name, state in trees[0]["generators"].items():
        assert torch.equal(state, trees[1]["generators"][name])
