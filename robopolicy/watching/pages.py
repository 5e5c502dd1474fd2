"""Pages of `robopolicy watch`: list of runs, report of one run, comparison of several."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from robopolicy.core.errors import RobopolicyError
from robopolicy.core.progress import format_duration
from robopolicy.core.status import Phase
from robopolicy.evaluation.report import Report, Section, report_of, templates
from robopolicy.watching.comparison import Compared, curves, default_metrics, metrics_of, open_runs, settings, table
from robopolicy.watching.listing import METRICS, Listing, Run, signature

COLUMNS: Mapping[str, tuple[str, Callable[[Run], Any]]] = {
    "run": ("run", lambda run: (run.name, run.seed)),
    "verb": ("verb", lambda run: run.verb),
    "task": ("recipe or world", lambda run: run.task),
    "state": ("state", lambda run: run.state),
    "now": ("now", lambda run: -run.seconds),
    "success": ("success", lambda run: -run.outcome.value if run.outcome else 1e9),
    "changed": ("changed", lambda run: -run.updated),
}
"""Columns of the list: key -> (heading, sort key)."""
SHARE, LONGEST_WAIT = 10, 10.0
"""A changed page is drawn again after SHARE times the duration of its last drawing, at most after LONGEST_WAIT seconds:
so that runs keep the CPU.
"""


class Pages:
    """Renders pages and caches them until the files of the runs change."""

    def __init__(self, listing: Listing):
        self.listing = listing
        self._drawn: dict[Hashable, tuple[Hashable, float, float, Any]] = {}

    def all_runs(self, sort: str) -> str:
        """Return the list of runs, sorted by a key of COLUMNS (descending after a minus), else by last change."""
        runs = self.listing.runs()
        key = sort.removeprefix("-")
        if key in COLUMNS:
            runs.sort(key=COLUMNS[key][1], reverse=sort.startswith("-"))
        states = [run.state for run in runs]
        counts = " · ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
        columns = [
            (name, label, "?" + urlencode({"sort": f"-{name}" if sort == name else name}))
            for name, (label, _) in COLUMNS.items()
        ]
        rows = [self._shown(run) for run in runs]
        return self._render("list.html.jinja", runs=rows, counts=counts, columns=columns)

    def one_run(self, run: Run) -> str:
        """Return the report of a run with its current state and progress."""

        def draw() -> Report:
            try:
                return report_of(run.path, self._film_address)[0]
            except RobopolicyError as error:
                return Report(title=run.title, subtitle=str(error))

        films = tuple(path.stat().st_mtime_ns for path in sorted(run.path.glob("*.mp4")))
        report = self._kept(("run", run.identifier), (signature(run.path)[:-1], films), draw)
        metrics = f"/compare?{urlencode({'run': run.identifier})}" if (run.path / METRICS).exists() else ""
        return self._render("run.html.jinja", run=self._shown(run), report=report, metrics=metrics)

    def comparison(self, runs: Sequence[Run], chosen: Sequence[str]) -> str:
        """Return a comparison of runs, with curves of the metrics `chosen` or of the default ones."""

        def draw() -> tuple[list[Section], list[str], list[str], list[str]]:
            compared_runs = open_runs(runs)
            logged_metrics = metrics_of(compared_runs)
            metrics = [name for name in chosen if name in logged_metrics] or default_metrics(logged_metrics)
            return _sections(compared_runs, metrics), logged_metrics, metrics, [each.name for each in compared_runs]

        identifiers = [run.identifier for run in runs]
        mark = tuple((signature(run.path)[:-1], run.state) for run in runs)
        sections, metric_names, metrics, names = self._kept(("compare", *identifiers, "", *chosen), mark, draw)
        chips = [(name, _toggled(identifiers, metrics, name), name in metrics) for name in metric_names]
        heading = "Runs compared" if len(runs) > 1 else f"Metrics of {runs[0].title}"
        links = [(name, run_address(run)) for name, run in zip(names, runs, strict=True)]
        return self._render("compare.html.jinja", heading=heading, links=links, sections=sections, chips=chips)

    def _film_address(self, video: Path) -> str:
        """Return the URL of a video, which contains its modification time so that browsers reload it."""
        of = video.parent.resolve().relative_to(self.listing.root).as_posix()
        return f"/film?{urlencode({'of': '' if of == '.' else of, 'name': video.name, 'at': video.stat().st_mtime_ns})}"

    def _kept(self, key: Hashable, mark: Hashable, draw: Callable[[], Any]) -> Any:
        """Return the cached result for `key`; call `draw` again if `mark` has changed and enough time has passed."""
        entry = self._drawn.get(key)
        now = time.monotonic()
        if entry is None or (entry[0] != mark and now - entry[1] > min(SHARE * entry[2], LONGEST_WAIT)):
            page = draw()
            if len(self._drawn) > 100:
                self._drawn.clear()
            entry = self._drawn[key] = (mark, time.monotonic(), time.monotonic() - now, page)
        return entry[3]

    def _shown(self, run: Run) -> dict[str, Any]:
        phases = [_phase(phase) for phase in run.phases] if run.state == "running" else []
        inside = run.path.relative_to(self.listing.root).parts[:-3]
        return {
            **asdict(run),
            "title": run.title,
            "link": run_address(run),
            "phases": phases,
            "phase": phases[0] if phases else None,
            "inside": "/".join(inside),
            "took": format_duration(run.seconds) if run.seconds else "",
            "when": moment(run.updated),
        }

    def _render(self, name: str, **values: Any) -> str:
        return templates(Path(__file__).parent).get_template(name).render(root=str(self.listing.root), **values)


def _sections(runs: Sequence[Compared], metrics: Sequence[str]) -> list[Section]:
    sections = [table(runs)] if len(runs) > 1 else []
    if svg := curves(runs, metrics):
        sections.append(Section("Curves", svg=svg))
    return [*sections, settings(runs)] if len(runs) > 1 else sections


def _toggled(identifiers: Sequence[str], metrics: Sequence[str], name: str) -> str:
    """Return the URL of a comparison with the metric `name` added or removed."""
    metric_list = [each for each in metrics if each != name] if name in metrics else [*metrics, name]
    return "/compare?" + urlencode(
        [*(("run", each) for each in identifiers), *(("metric", each) for each in metric_list)]
    )


def run_address(run: Run) -> str:
    """Return the URL of a run's page."""
    return f"/run/{quote(run.identifier)}"


def _phase(phase: Phase) -> dict[str, Any]:
    seconds_left = phase.left(time.time()) if phase.done < phase.total else None
    share = min(1.0, phase.done / phase.total) if phase.total else 0.0
    return {
        "label": phase.label,
        "note": phase.note,
        "percent": f"{100 * share:.0f}",
        "counted": f"{phase.done:,} of {phase.total:,}",
        "left": "" if seconds_left is None else f"about {format_duration(seconds_left)} left",
    }


def moment(when: float) -> str:
    """Format a time: 13:45:02 for today, else 2026-11-28 13:45."""
    moment_time = datetime.fromtimestamp(when)
    return f"{moment_time:%H:%M:%S}" if moment_time.date() == datetime.now().date() else f"{moment_time:%Y-%m-%d %H:%M}"
