"""Random processes of a command are killed: its workers, its ranks, a node of Ray, the command itself. Run again until
it ends, it leaves the bytes of a run that nobody disturbed.

ROBOPOLICY_KILLS is the number of kills per command (40: 200 in all, half an hour of a quiet machine).
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from tiny_runs import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

KILLS = int(os.environ.get("ROBOPOLICY_KILLS", "40"))
LONGEST = 20.0
"""Maximum seconds between a start or kill and the next kill; at most half of what the command takes undisturbed."""
HANGS = 600.0
"""Seconds after which an undisturbed process counts as hanging."""
SECONDS = re.compile(rb'"(?:seconds[a-z_]*|bytes_[a-z]+)": [-+.e0-9]+|"seconds": \[[^\]]*\]')

TUNE = (
    *("finetune.shards=4", "finetune.num_envs=32", "finetune.rollout_length=3", "finetune.iterations=8"),
    *("finetune.epochs=1", "finetune.minibatch=64", "finetune.critic_width=16", "finetune.checkpoint_every=1"),
    *("finetune.evaluate_every=4", "finetune.evaluate_episodes=16", "finetune.videos=0", "world.batch_size=8"),
    *(*TINY[:2], "finetune.target_success=null", "run.root=runs"),
)
COLLECT = (*TINY[:2], "collect.episodes=64", "world.batch_size=4", "run.root=runs")
RANK = (*TINY[:2], "rank.policies=[]", "rank.noise=[none,low,medium]", "rank.episodes=32", "world.batch_size=4")
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "robopolicy")
COMMANDS = {
    "collect": (("-m", "robopolicy"), ("collect", *COLLECT, "workers.count=2")),
    "finetune": (("-m", "robopolicy"), ("finetune", *TUNE, "workers.count=2")),
    "ranks": (RANKS, ("finetune", *TUNE)),
    "rank": (("-m", "robopolicy"), ("rank", *RANK, "run.root=runs", "workers.count=2")),
    "sweep": (
        ("-m", "robopolicy"),
        ("sweep", "collect", *COLLECT, "run.seed=0,1", "workers.count=2"),
    ),
    "ray": (("-m", "robopolicy"), ("finetune", *TUNE, "workers.count=2", "workers.pool=ray")),
}
"""Name -> interpreter's words, and the words of a command."""
RESULTS = {"collect": "**/*.parquet", "sweep": "**/*.parquet", "rank": "**/result.json"}
"""Name -> the files that are compared; the weights elsewhere."""


def start(name: str, folder: Path) -> subprocess.Popen:
    before, words = COMMANDS[name]
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen([sys.executable, *before, *words], cwd=folder, stdout=log, stderr=log)


def ended(process: subprocess.Popen, folder: Path) -> int:
    """Wait for a process that nobody disturbs any more; return its exit status."""
    try:
        return process.wait(HANGS)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("the command hangs:\n" + (folder / "log.txt").read_text()[-3000:])


def kill_one(process: subprocess.Popen, draws: random.Random) -> str:
    """Kill this process or one of its descendants; return its name."""
    try:
        whole = psutil.Process(process.pid)
        victim = draws.choice([whole, *whole.children(recursive=True)])
        name = victim.name()
        victim.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:  # it ended meanwhile
        return ""
    return name


def results(name: str, folder: Path) -> dict[str, bytes]:
    found = sorted((folder / "runs").glob(RESULTS.get(name, "finetune/**/checkpoint/*.safetensors")))
    assert found
    return {str(each.relative_to(folder)): SECONDS.sub(b"", each.read_bytes()) for each in found}


@pytest.fixture(params=COMMANDS)
def folders(request, made_once, tmp_path):
    """The command's name, and two folders with the runs that it needs."""
    if request.param == "ray":
        pytest.importorskip("ray", reason="install it with: pip install 'robopolicy[ray]'")
    for each in ("alone", "disturbed"):
        if request.param in ("collect", "sweep"):
            (tmp_path / each / "runs").mkdir(parents=True)
        else:
            shutil.copytree(made_once, tmp_path / each / "runs")
    return request.param, tmp_path / "alone", tmp_path / "disturbed"


def test_a_command_that_is_killed_at_random_ends_with_the_same_bytes(folders):
    name, alone, disturbed = folders
    begin = time.monotonic()
    assert ended(start(name, alone), alone) == 0, (alone / "log.txt").read_text()[-3000:]
    longest = min(LONGEST, (time.monotonic() - begin) / 2)
    draws, killed, process = random.Random(name), [], start(name, disturbed)
    while len(killed) < KILLS:
        limit = time.monotonic() + draws.uniform(0.0, longest)
        while process.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        if process.poll() == 0:  # it was quicker than the kills
            break
        if process.poll() is not None:
            process = start(name, disturbed)
        elif victim := kill_one(process, draws):
            killed.append(victim)
    status = ended(process, disturbed)
    for _ in range(3):  # the last kill may have been of the command
        if status:
            status = ended(start(name, disturbed), disturbed)
    assert status == 0, (disturbed / "log.txt").read_text()[-3000:]
    print(f"{name}: {len(killed)} kills, {dict(Counter(killed))}")
    assert killed and results(name, disturbed) == results(name, alone)
