"""Progress bars for anything that takes longer than two seconds; the run's status file reports the same progress
(`core/status.py`).
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from robopolicy.core.status import phase

console = Console(stderr=True, emoji=False)

_hidden: ContextVar[bool] = ContextVar("hidden", default=False)


class Advance(Protocol):
    """Callback for each completed piece of work, with a short note such as 'loss 0.12'."""

    def __call__(self, steps: int = 1, note: str = "") -> None:
        """Advance the bar by `steps`."""
        ...


@contextmanager
def without_progress() -> Generator[None]:
    """Context in which the current thread shows no progress, because it works parallel to a thread that does."""
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


@contextmanager
def progress(label: str, total: int) -> Generator[Advance, None, None]:
    """Show a bar for `total` pieces of work on a terminal; draws nothing elsewhere (pipes, CI)."""
    if _hidden.get():
        yield lambda steps=1, note="": None
        return
    with phase(label, total) as count:
        if not console.is_terminal:
            yield lambda steps=1, note="": count(steps, note)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(label, total=total, note="")

            def advance(steps: int = 1, note: str = "") -> None:
                bar.update(task, advance=steps, note=note)
                count(steps, note)

            yield advance


def format_duration(seconds: float) -> str:
    """Format a duration, such as 2 min 5 s."""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60} min"
