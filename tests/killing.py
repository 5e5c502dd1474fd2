"""What a kill leaves at every moment of a run, and what the same command makes of it.

A run in a process that is killed leaves what is on the disk at that moment, and a disk changes by operations: so one
run is enough, which copies its folder before every operation (and in the midst of every write), and each copy is what
a kill there leaves. Runs are forked from a process that has imported everything and computed nothing.
"""

import builtins
import filecmp
import importlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import robopolicy.core.run
import robopolicy.core.status
from robopolicy.cli import main
from robopolicy.verbs.verb import VERBS

TEMPORARY = re.compile(r"(\..+\.robopolicy-)[a-z0-9_]{8}(?=\.tmp(/|$))")
CLOCK = re.compile(
    r'("(?:seconds[a-z_]*|times_faster)": )(?:\[[^\]]*\]|[-+.e0-9]+)|<b>[0-9]+ s</b>|<b>[0-9.]+x</b>|'
    r'<td class="short">[0-9]+\.[0-9]</td>'
)
"""All that may differ between two runs: seconds, in metrics.jsonl, result.json, report.json, benchmark.json, json=PATH
(keys `seconds`, `seconds_collect`, `seconds_update`, `seconds_evaluate`, and their ratio `times_faster`), and what a
report says of them: its cards in seconds and in times, and a benchmark's column of minutes."""

NAMED = ("replace", "rename", "mkdir", "rmdir", "unlink", "remove", "fsync", "chmod", "link", "symlink", "truncate")
LIBRARIES = (
    ("robopolicy.core.tensors", "save_file"),
    ("robopolicy.core.checkpoints", "save_file"),
    ("pyarrow.parquet", "write_table"),
    ("pyarrow.parquet.ParquetWriter", "write_table"),
    ("pyarrow.parquet.ParquetWriter", "close"),
    ("imageio.v2", "mimwrite"),
)
"""What writes files without Python's own functions."""


@dataclass
class Job:
    """A command line, run in a folder whose neighbour `base` holds what other verbs made."""

    name: str
    arguments: tuple[str, ...]
    stride: int = 1


@dataclass
class Found:
    """What became of a job. operations: on the disk; states: different ones that a kill can leave; wrong: what was
    otherwise after the same command was run again, by the operation before which the kill came.
    """

    name: str
    operations: int = 0
    states: int = 0
    tried: int = 0
    wrong: dict[str, list[str]] = field(default_factory=dict)


class Recorder:
    """Copies the working folder before every operation on the disk, where it is in another state than before."""

    def __init__(self, here: Path, into: Path, only: int | None = None):
        self.here, self.into, self.only = here, into, only
        self.operations, self.states, self.busy = 0, 0, False
        self.last: Any = None

    def note(self, what: str) -> None:
        """Note that `what` is about to happen; or end the process here, if that was wanted of this operation."""
        if self.busy:
            return
        self.operations += 1
        if self.only is not None:
            if self.operations == self.only:
                os._exit(137)
            return
        self.busy = True
        try:
            state = tree(self.here)
            if state != self.last:
                self.last = state
                shutil.copytree(self.here, self.into / f"{self.operations:05d} {what}", symlinks=True)
                self.states += 1
        finally:
            self.busy = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every operation of this process until the end of the context."""
        kept: list[tuple[Any, str, Any]] = []

        def put(place: Any, name: str, made: Callable[[Any], Any]) -> None:
            kept.append((place, name, getattr(place, name)))
            setattr(place, name, made(getattr(place, name)))

        for name in NAMED:
            put(os, name, lambda real, name=name: self._noted(real, name))
        put(os, "open", self._opened_by_number)
        put(os, "fdopen", self._opened)
        put(builtins, "open", self._opened)
        put(io, "open", self._opened)
        for place, name in LIBRARIES:
            put(_at(place), name, lambda real, name=name: self._noted(real, name))
        try:
            yield
        finally:
            for place, name, real in reversed(kept):
                setattr(place, name, real)

    def _noted(self, real: Any, name: str) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            self.note(name)
            return real(*arguments, **options)

        return noted

    def _opened_by_number(self, real: Any) -> Any:
        def opened(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                self.note("open")
            return real(path, flags, *arguments, **options)

        return opened

    def _opened(self, real: Any) -> Any:
        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if self.busy or not set(mode) & set("wax+"):
                return real(file, mode, *arguments, **options)
            self.note("open")
            handle = real(file, mode, *arguments, **options)
            return Halved(handle, self) if isinstance(handle, io.TextIOBase | io.BufferedIOBase) else handle

        return opened


class Halved:
    """A file whose every write is in two halves, so that a kill can come between them."""

    def __init__(self, file: Any, recorder: Recorder):
        self._file, self._recorder = file, recorder

    def write(self, data: Any) -> int:
        """Write one half, note it, write the other."""
        self._recorder.note("write")
        if self._recorder.busy:
            return self._file.write(data)
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._recorder.note("half a write")
        self._file.write(data[len(data) // 2 :])
        return len(data)

    def __enter__(self) -> "Halved":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def serve(pipe: Any) -> None:
    """Answer requests (function, arguments) with what the function returns or raises, until None comes."""
    settle()
    while (request := pipe.recv()) is not None:
        try:
            pipe.send(request[0](*request[1:]))
        except Exception as error:
            pipe.send(error)


def _at(path: str) -> Any:
    module, target = path, None
    while target is None:
        try:
            target = importlib.import_module(module)
        except ModuleNotFoundError:
            module = module.rpartition(".")[0]
    for name in path[len(module) :].split(".")[1:]:
        target = getattr(target, name)
    return target


def tree(folder: Path) -> dict[str, Any]:
    """Return what lies in a folder: path, without the random part of temporary names -> size and time, or None."""
    entries: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = TEMPORARY.sub(r"\1", str(path.relative_to(folder)))
        entries[name] = None if path.is_dir() else (path.stat().st_size, path.stat().st_mtime_ns)
    return entries


def differences(wanted: Path, found: Path) -> list[str]:
    """Return in what a folder differs from an uninterrupted run's, the clock apart."""
    names = [{str(path.relative_to(each)) for path in each.rglob("*")} for each in (wanted, found)]
    wrong = [f"lacks {name}" for name in sorted(names[0] - names[1])]
    wrong += [f"has {name} besides" for name in sorted(names[1] - names[0])]
    for name in sorted(names[0] & names[1]):
        pair = wanted / name, found / name
        if pair[0].is_dir() or filecmp.cmp(*pair, shallow=False):
            continue
        if pair[0].suffix in (".json", ".jsonl", ".html"):
            first, second = (CLOCK.sub(r"\1", path.read_text()) for path in pair)
            if first == second:
                continue
        wrong.append(f"has another {name}")
    return wrong


def forked(folder: Path, arguments: tuple[str, ...], recorder: Recorder | None = None) -> int:
    """Run a command of robopolicy in a process of its own, in `folder`; return its exit status."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        import_like_the_last(folder.parent / "modules")
        return status
    status = 1
    try:
        os.chdir(folder)
        log = os.open(folder.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if recorder is None:
            status = main(list(arguments))
        else:
            with recorder.watching():
                status = main(list(arguments))
            (folder.parent / "operations").write_text(json.dumps([recorder.operations, recorder.states]))
        (folder.parent / "modules").write_text(json.dumps(sorted(sys.modules)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def prepare(folder: Path, jobs: list[Job]) -> None:
    """Run what the jobs lean on in `folder`/base. Raises RuntimeError where one fails."""
    (folder / "base").mkdir(parents=True, exist_ok=True)
    for job in jobs:
        if forked(folder / "base", job.arguments):
            raise RuntimeError(f"{job.name} failed: {(folder / 'log.txt').read_text()[-2000:]}")


def examine(folder: Path, job: Job) -> Found:
    """Kill `job` before each of its operations, run it again, and compare with a run that nobody disturbed."""
    report, whole, states = Found(job.name), folder / f"{job.name} whole", folder / f"{job.name} states"
    for each in (whole, states):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir()
    if forked(whole, job.arguments):
        raise RuntimeError(f"{job.name} failed: {(folder / 'log.txt').read_text()[-2000:]}")
    here = folder / f"{job.name} here"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    if forked(here, job.arguments, Recorder(here, states)):
        raise RuntimeError(f"{job.name} failed while it was watched: {(folder / 'log.txt').read_text()[-2000:]}")
    report.operations, report.states = json.loads((folder / "operations").read_text())
    if wrong := differences(whole, here):
        report.wrong["(two whole runs)"] = wrong
    for state in sorted(states.iterdir())[:: job.stride]:
        place = folder / f"{job.name} again"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(state, place, symlinks=True)
        status = forked(place, job.arguments)
        wrong = [f"exit status {status}"] * bool(status) + differences(whole, place) + processes_in(folder)
        report.tried += 1
        if wrong:
            report.wrong[state.name] = wrong
    shutil.rmtree(states)
    return report


def import_like_the_last(names: Path) -> None:
    """Import what the last run imported, so that the next one need not; but nothing that opens a display."""
    for name in json.loads(names.read_text()) if names.exists() else ():
        if name not in sys.modules and not re.search("egl|opengl|glfw|osmesa|gl_context", name.lower()):
            with suppress(Exception):
                importlib.import_module(name)
    names.unlink(missing_ok=True)


def kill_at(folder: Path, job: Job, operations: tuple[int, ...]) -> Found:
    """Kill `job` for good before each of `operations`, run it again, and compare as `examine` does."""
    report, whole, place = Found(job.name), folder / f"{job.name} whole", folder / f"{job.name} again"
    whole.mkdir()
    if forked(whole, job.arguments):
        raise RuntimeError(f"{job.name} failed: {(folder / 'log.txt').read_text()[-2000:]}")
    for operation in operations:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        ends = [forked(place, job.arguments, Recorder(place, folder, operation)), forked(place, job.arguments)]
        report.tried += 1
        wrong = differences(whole, place) + ([] if ends == [137, 0] else [f"exit statuses {ends}"])
        if wrong := wrong + processes_in(folder):
            report.wrong[str(operation)] = wrong
    return report


def processes_in(folder: Path) -> list[str]:
    """Return what processes work in `folder`: servers and workers that outlived theirs."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").resolve().is_relative_to(folder.resolve()):
                processes.append(f"process {process.name} runs on: {(process / 'cmdline').read_text()[:100]!r}")
    return processes


def settle() -> None:
    """Import what the verbs import, and let nothing that is outside the run's folder get into its files."""
    for name in VERBS.names():
        importlib.import_module(f"robopolicy.verbs.{name}")
    for place, _ in LIBRARIES:
        _at(place)
    torch.set_num_threads(1)
    commit = robopolicy.core.run.versions()["commit"]
    robopolicy.core.run._commit = lambda: commit
    robopolicy.core.status.Status.write = lambda self, soon=True: None  # it tells the time
    sys.argv = ["robopolicy"]
    tempfile.gettempdir()
