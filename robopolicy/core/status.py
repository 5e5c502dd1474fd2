"""Status file of a run, for live displays: one small file next to its folder, `.<seed>.status.json`.

Like the lock, the file is next to the folder, so that the folder's content does not depend on interruptions. It is only
a view: if the disk is full, it is lost and the run continues. A killed process leaves "running" there and releases the
lock, which distinguishes it from a living one (`state_of`).
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from robopolicy.core.errors import RobopolicyError, in_a_sentence, in_one_line, is_interruption
from robopolicy.core.former_names import keep_former_names

RUNNING = "running"
FINISHED = "finished"
FAILED = "failed"
INTERRUPTED = "interrupted"
KILLED = "killed"
EVERY = 0.5
"""Seconds between two writes of the file, so that loops of short steps are not slowed down."""
AT_ONCE = 0.1
"""Seconds in which a resumed phase reports earlier progress, which does not show its speed."""
NOTES = 20
"""Maximum number of stored warnings; the newest are kept."""


@dataclass
class Phase:
    """One phase of work. done, total: its steps; note: such as "loss 0.12"; began, base: time and step from which its
    speed is measured.
    """

    label: str
    total: int
    done: int = 0
    note: str = ""
    began: float = field(default_factory=time.time)
    base: int = 0

    def advance(self, steps: int, note: str) -> None:
        """Count `steps` more."""
        self.done += steps
        self.note = note or self.note
        if time.time() - self.began < AT_ONCE:
            self.base = self.done

    def left(self, now: float) -> float | None:
        """Return the estimated seconds for the remaining steps, None if not known yet."""
        done, seconds = self.done - self.base, now - self.began
        return None if done <= 0 or seconds <= 0 else max(self.total - self.done, 0) * seconds / done


class Status:
    """The state of one run of this process."""

    def __init__(self, folder: Path):
        self.path = status_file(folder)
        self.state = RUNNING
        self.reason = ""
        self.notes: list[str] = []
        self.at_end: list[Callable[[], None]] = []
        self._began = time.time()
        self._written = 0.0
        self.write()

    def write(self, soon: bool = True) -> None:
        """Write the file; soon: also if it was written a moment ago."""
        now = time.monotonic()
        if not soon and now - self._written < EVERY:
            return
        self._written = now
        content = {
            "state": self.state,
            "reason": self.reason,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "command": sys.argv,
            "began": self._began,
            "updated": time.time(),
            "phases": [asdict(phase) for phase in _phases] if self.state == RUNNING else [],
            "notes": self.notes[-NOTES:],
        }
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        with suppress(OSError):  # a full disk: the run itself says so where it matters
            temporary.write_text(json.dumps(content))
            os.replace(temporary, self.path)

    def end(self, state: str, reason: str = "") -> None:
        """Set how the run ended, and call the functions that wait for its end."""
        if _open.pop(self.path, None) is None:
            return
        self.state = state
        self.reason = reason
        self.write()
        for call in self.at_end:
            call()


_open: dict[Path, Status] = {}
_phases: list[Phase] = []


def status_file(folder: Path) -> Path:
    """Return the path of the status file of the run in `folder`."""
    return folder.absolute().with_name(f".{folder.name}.status.json")


def begin(folder: Path) -> Status:
    """Mark the run in `folder` as running, in this process."""
    path = status_file(folder)
    _open[path] = _open.get(path) or Status(folder)
    return _open[path]


def end(folder: Path, state: str = FINISHED) -> None:
    """Mark the run in `folder` as ended; does nothing if this process did not start it."""
    status = _open.get(status_file(folder))
    if status is not None:
        status.end(state)


@contextmanager
def end_on_error() -> Generator[None, None, None]:
    """Mark all open runs as ended by an exception when one passes."""
    try:
        yield
    except BaseException as error:
        interrupted = is_interruption(error)
        reason = "" if interrupted else _reason(error)
        for status in list(_open.values()):
            status.end(INTERRUPTED if interrupted else FAILED, reason)
        raise


def _reason(error: BaseException) -> str:
    text = in_a_sentence(error) if isinstance(error, Exception) else ""
    return text or in_one_line(error)


def note(text: str) -> None:
    """Store a warning for displays of this process's runs."""
    for status in _open.values():
        status.notes.append(text)
        status.write()


@contextmanager
def phase(label: str, total: int) -> Generator[Callable[[int, str], None], None, None]:
    """Report a phase of `total` steps; yields the function that counts them: (steps, note)."""
    entry = Phase(label, total)
    _phases.append(entry)

    def advance(steps: int, note: str) -> None:
        entry.advance(steps, note)
        for status in _open.values():
            status.write(soon=False)

    try:
        advance(0, "")
        yield advance
    finally:
        _phases.remove(entry)


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of a run's status file, {} if it is missing or damaged."""
    from robopolicy.core.storage import read_object  # imports safetensors, which help does without

    try:
        return read_object(status_file(folder))
    except RobopolicyError:
        return {}


def state_of(folder: Path, status: dict[str, Any]) -> str:
    """Return the state of the run in `folder`, given the `status` returned by `read_status`."""
    state = status.get("state")
    if state in (FINISHED, FAILED, INTERRUPTED):
        return state
    if state is not None and is_claimed(folder):
        return RUNNING
    result = folder / "result.json"
    began = status.get("began", 0.0)
    complete = result.exists() and result.stat().st_mtime >= (began if isinstance(began, float) else 0.0)
    return FINISHED if complete else RUNNING if is_claimed(folder) else KILLED


def is_claimed(folder: Path) -> bool:
    """Whether a living process has claimed the folder (`robopolicy.runs.lock_run_folder`)."""
    import fcntl

    try:
        lock = os.open(folder.absolute().with_name(f".{folder.name}.lock"), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for microseconds; `claim` tries again meanwhile
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


keep_former_names(__name__, {"ending": "end_on_error"})
