"""Workers of a Slurm cluster: every item is a job of its own, submitted with submitit.

    robopolicy sweep finetune recipe=push_t run.seed=0,1,2 workers.pool=slurm workers.count=3 \\
        workers.options='{slurm_partition: gpu, gpus_per_node: 1, timeout_min: 600}'

`workers.count` jobs are in the queue or run at a time. Meant for long items: runs of a sweep and rows of a benchmark. A
job starts an interpreter and imports all it needs, so batches of episodes take longer than on other workers. With
`workers.address=local` the jobs are processes of this machine, to try out a sweep before it is submitted. The folder of
the jobs must be on a file system that all machines share; it is private to the user, because results are read from it
as pickles.
"""

import contextlib
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from robopolicy.core.errors import ConfigError, in_one_line, require_extra
from robopolicy.core.pools import PoolSettings, context, died, perform, received

POLL_SECONDS = {"local": 0.2, "slurm": 5.0}
"""Seconds between two looks at the running jobs; submitit itself asks Slurm at most every few seconds."""
LIMIT_MINUTES = 24 * 60
"""Time limit of a job if workers.options sets no timeout_min."""


class SlurmPool:
    """Pool of at most `settings.count` jobs; settings.options: parameters of submitit's AutoExecutor.

    Raises ConfigError if submitit is missing, there is no Slurm on this machine, or an option is unknown.
    """

    def __init__(self, settings: PoolSettings):
        self.workers = settings.count
        submitit: Any = require_extra("submitit", "slurm")
        cluster = settings.address or "slurm"
        if cluster not in POLL_SECONDS:
            raise ConfigError(
                f"workers.address={cluster}: a Slurm pool submits jobs from this machine. Leave it empty, or set "
                "workers.address=local to run the jobs as processes of this machine."
            )
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise ConfigError(
                "There is no Slurm on this machine (sbatch was not found): run the command on a login node of the "
                "cluster, or set workers.address=local to run the jobs as processes of this machine."
            )
        self._poll = POLL_SECONDS[cluster]
        settings.folder.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=settings.folder)).absolute()  # mode 0700
        try:
            self._executor = submitit.AutoExecutor(folder=self._folder, cluster=cluster)
            self._executor.update_parameters(**{"name": "robopolicy", "timeout_min": LIMIT_MINUTES, **settings.options})
        except Exception as error:
            shutil.rmtree(self._folder)
            raise ConfigError(f"workers.options: {in_one_line(error)}.") from error
        self._incomplete: type[Exception] = submitit.core.utils.UncompletedJobError
        self._running: dict[int, Any] = {}

    def put(self, value: Any) -> Any:
        """Implement `Pool`: the value is written with every item that contains it."""
        return value

    def map(self, function: str, items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        """Implement `Pool`."""
        given, deaths = context(), Counter[int]()
        waiting = deque(range(len(items)))
        running = self._running
        try:
            while running or waiting:
                while waiting and len(running) < self.workers:
                    index = waiting.popleft()
                    running[index] = self._executor.submit(perform, function, dict(items[index]), given)
                ended = [index for index, job in running.items() if job.done()]
                for index in ended:
                    job = running.pop(index)
                    try:
                        reply = job.result()
                    except self._incomplete as error:  # killed, or out of time or memory
                        deaths[index] += 1
                        waiting.appendleft(index)
                        died(deaths[index], f"was job {job.job_id}: {in_one_line(str(error).splitlines()[0])}")
                        continue
                    yield index, received(reply)
                if not ended:
                    time.sleep(self._poll)
        finally:
            self._end()

    def close(self) -> None:
        """Implement `Pool`."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        while self._running:
            _, job = self._running.popitem()
            with contextlib.suppress(Exception):  # it may have ended meanwhile
                job.cancel()
