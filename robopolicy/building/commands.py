"""Commands that run on workers: each run of a sweep or row of a benchmark is a process that a worker starts.

A command resumes where it stopped, so a killed one is started again, on this or another worker. It ends with its
worker.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from robopolicy.core.pools import MOST_DEATHS, Pool
from robopolicy.core.progress import progress

START = """
import sys, threading
from robopolicy.workers.local import end_with_parent
threading.Thread(target=end_with_parent, daemon=True).start()
from robopolicy.cli import main
sys.argv[0] = "robopolicy"
sys.exit(main(sys.argv[1:]))
"""
"""What the interpreter of a command runs: it ends when its standard input closes, that is, with its worker."""
SHOWN = 8192
"""Number of bytes of a command's output that are returned; its log contains all."""


def run_commands(
    pool: Pool, commands: Sequence[Sequence[str]], logs: Sequence[Path], label: str
) -> Iterator[tuple[int, int, str]]:
    """Run commands (words after `robopolicy`) on the workers; yield each one's index, exit status and last output.

    logs: file that receives the output of each command. A negative status is the signal that ended it, repeatedly.
    """
    for log in logs:
        log.parent.mkdir(parents=True, exist_ok=True)
    here = str(Path.cwd())
    items = [
        {"command": list(command), "log": str(log.absolute()), "folder": here}
        for command, log in zip(commands, logs, strict=True)
    ]
    with progress(label, len(items)) as advance:
        for index, reply in pool.map("robopolicy.building.commands:run_command", items):
            advance()
            yield index, int(reply["status"]), str(reply["said"])


def run_command(command: list[str], log: str, folder: str) -> dict[str, Any]:
    """Run one command in a worker, again if it is killed; see `run_commands`."""
    status, said = -1, b""
    for _ in range(MOST_DEATHS):
        with open(log, "ab") as output:
            output.write(f"$ {shlex.join(['robopolicy', *command])}\n".encode())
            output.flush()
            begin = output.tell()
            words = [sys.executable, "-c", START, *command]
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=folder)
            try:
                status = process.wait()
            finally:
                process.kill()
                process.wait()
                if process.stdin is not None:
                    process.stdin.close()
        with open(log, "rb") as written:
            written.seek(max(begin, Path(log).stat().st_size - SHOWN))
            said = written.read()
        if status >= 0:
            break
    return {"status": status, "said": said.decode(errors="replace")}
