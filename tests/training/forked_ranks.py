"""Processes like those of torchrun, forked from one that has imported everything, which takes most of their time.

    ranks = Ranks()
    result = ranks.run(folder, ["finetune", ...])  # exit codes, and the text of all processes

As under torchrun, the store through which they meet is in another process. Nothing ends the others when one has ended:
they have to notice it themselves.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Return the environment of a process that imports modules of tests; without GPUs, since it forks."""
    places = [TESTS / "training", TESTS / "worldmodels", TESTS, TESTS.parent, os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(map(str, places))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Result:
    """Exit codes of the processes, and what all have printed."""

    codes: list[int]
    stdout: str
    stderr: str


class Ranks:
    """The process that the others are forked from."""

    def __init__(self):
        words = [sys.executable, str(Path(__file__))]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def start(
        self,
        folder: Path,
        arguments: Sequence[object],
        fault: str = "",
        call: int = 0,
        count: int = 2,
        jobs: Sequence[str] = (),
    ) -> Any:
        """Start `count` processes with a command line, process 1 with a fault; return their ids.

        Without arguments they compute jobs of `replica_runs.py`, in `folder`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count = folder, count
        words = [str(word) for word in arguments]
        order = {"folder": str(folder), "arguments": words, "fault": fault, "call": call, "count": count}
        order["jobs"] = list(jobs)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def finish(self) -> Result:
        """Wait for all processes."""
        codes = self._answer()
        texts = [
            "".join((self.folder / f"{rank}.{stream}").read_text() for rank in range(self.count))
            for stream in ("out", "err")
        ]
        return Result(codes, *texts)

    def run(self, *arguments: Any, **options: Any) -> Result:
        """Start processes, and wait for them; see `start`."""
        self.start(*arguments, **options)
        return self.finish()

    def close(self) -> None:
        """End the process."""
        self.process.communicate(timeout=60)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def serve() -> None:
    """Fork what is ordered on standard input, after the imports of the first steps of training."""
    import replica_runs
    import torch
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    replica_runs.run("dppo")
    for line in sys.stdin:
        order = json.loads(line)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Objects that own threads, such as worlds, must not be destroyed in a fork, which lacks these threads.
        gc.collect()
        gc.freeze()
        pids = [_forked(rank, order, store.port) for rank in range(order["count"])]
        print(json.dumps(pids), file=answers, flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), file=answers, flush=True)


def _forked(rank: int, order: Any, port: int) -> int:
    """Fork one process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{order['folder']}/{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        size = str(order["count"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        status = _obeyed(order)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _obeyed(order: Any) -> int:
    import replica_runs

    if order["arguments"]:
        return replica_runs.command(order["fault"], order["call"], order["arguments"])
    replica_runs.main(Path(order["folder"]), *order["jobs"])
    return 0


if __name__ == "__main__":
    serve()
