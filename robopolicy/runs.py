"""Run folders of the verbs: where one lies, whether it may be continued, and what it leaves behind."""

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table
from rich.text import Text

from robopolicy.configuration import Config, read_yaml, to_yaml
from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning, in_one_line
from robopolicy.core.run import RunFolder
from robopolicy.core.status import begin, end
from robopolicy.core.storage import read_object, recover_folder, storage_errors, sweep, write_json
from robopolicy.core.structured import from_plain, to_plain
from sims.names import OURS

RESULT, REPORT = "result.json", "report.html"
LONGEST_NAME = 200
"""Bytes of a run's name: file systems allow 255, and results are called after it as well."""
FILMS = ("base.mp4", "policy.mp4", "without_planning.mp4")
"""What `evaluate` films."""
MOMENT = 0.2
"""Seconds in which a lock is tried again: whoever looks whether a run is alive holds it for microseconds."""
DESCRIPTION = ("config.yaml", "versions.json")
"""What every run has in its folder from its beginning."""

_claimed: dict[Path, FileLock] = {}

output = Console(highlight=False, emoji=False)
if not output.is_terminal:
    output = Console(highlight=False, emoji=False, width=140)


def run_name(config: Config) -> str:
    """The run's name: `run.name`, else the world's (the simulator behind a world model). Raises ConfigError on ".."."""
    name = config.run.name or config.world.simulator or config.world.name
    if name in (".", ".."):
        raise ConfigError(f"run.name={name} leads out of the folder of the runs: choose a name.")
    if len(name.encode()) > LONGEST_NAME or not name.isprintable():
        raise ConfigError(
            f"run.name={in_one_line(name, 40)!r} cannot be a folder's name: choose one of at most {LONGEST_NAME} "
            "printable characters."
        )
    return name.replace("/", "-").replace(":", "-")


def run_path(config: Config, verb: str) -> Path:
    """Where `verb` keeps its results: root/<verb>/<name>/<seed>; of a dataset of graded quality <name>-<quality>, where
    run.name does not say otherwise.
    """
    graded = verb == "collect" and config.collect.quality and not config.run.name
    name = f"{run_name(config)}-{config.collect.quality}" if graded else run_name(config)
    return config.run.root / verb / name / str(config.run.seed)


def claim(path: Path, way_out: str = "name this run with run.name=NAME") -> None:
    """Keep other processes out of a run folder until this one ends, however it ends.

    The lock lies beside the folder, so that starting over does not remove it. way_out: what else to do than wait.
    Raises ConfigError where another process is at work in it; two of them would mix their metrics and overwrite each
    other's checkpoints.
    """
    file = path.absolute().with_name(f".{path.name}.lock")
    if file in _claimed:
        return
    lock = FileLock(file, timeout=MOMENT)
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(f"{path} is in use by another process: wait until it ends, or {way_out}.") from None
    _claimed[file] = lock


def open_run(config: Config, verb: str, sections: tuple[str, ...]) -> RunFolder:
    """Open the run folder of a verb that can be continued.

    A folder with the same configuration goes on where it stopped, be it an older version's that lacks settings which
    are at their defaults here. Raises ConfigError if it holds another configuration
    (naming what differs), unless run.overwrite=true starts over. What a killed process left half-written is removed.
    """
    path = run_path(config, verb)
    claim(path)
    if config.run.overwrite and path.exists():
        if path.is_symlink():
            raise ConfigError(f"{path} is a link to {path.resolve()}, which run.overwrite does not remove.")
        if any(path.iterdir()) and not any((path / name).exists() for name in DESCRIPTION):
            raise ConfigError(f"{path} holds no run, but other files, which run.overwrite does not remove.")
        _require_outside(config, sections, path)
        shutil.rmtree(path)
    folder = RunFolder(path)
    sweep(path)
    text = to_yaml(config, sections)
    written = path / "config.yaml"
    if written.exists() and _has_begun(path):
        way_out = _way_out(config, verb, path)
        try:  # what an older version had no setting for is at its default
            earlier = from_plain(Config, read_yaml(written))
        except ConfigError as error:
            raise ConfigError(f"{path} holds a run of another version ({error}). {way_out}") from error
        old, new = ({name: to_plain(getattr(each, name)) for name in sections} for each in (earlier, config))
        changed = _differences(_with_default_size(old, new), new)
        if changed:
            raise ConfigError(f"{path} holds a run with other settings ({'; '.join(changed[:4])}). {way_out}")
        if not (path / RESULT).exists():
            _say_other_ground(folder, config.run.threads)
    else:
        folder.describe(text, config.run.seed, config.run.threads)
    if not (path / RESULT).exists():
        begin(path)
        _follow(folder, config, verb, sections)
    return folder


def _follow(folder: RunFolder, config: Config, verb: str, sections: Sequence[str]) -> None:
    """Attach the tracker that run.tracker names. Raises ConfigError where there is none of that name."""
    if not config.run.tracker:
        return
    from robopolicy.evaluation.trackers import TRACKERS, Following, TrackedRun, flat  # numpy and more, only if asked

    plain = to_plain(config)
    run = TrackedRun(
        path=folder.path,
        name=f"{verb}-{run_name(config)}-{config.run.seed}",
        config=flat({name: plain[name] for name in sections}),
    )
    folder.followers.append(Following(TRACKERS.load(config.run.tracker), run, folder))


def _require_outside(config: Config, sections: tuple[str, ...], path: Path) -> None:
    """Raise ConfigError where what a run starts from lies in its own folder, which run.overwrite removes."""
    given = ((f"{name}.{key}", value) for name in sections for key, value in vars(getattr(config, name)).items())
    for setting, value in given:
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Path) and each.resolve().is_relative_to(path.resolve()):
                raise ConfigError(
                    f"{setting}={each} lies in {path}, which run.overwrite=true removes: give this run a name of its "
                    "own, run.name=NAME."
                )


def _way_out(config: Config, verb: str, path: Path) -> str:
    """Return what to do where the folder of a run holds one with other settings."""
    going_on = ""
    if verb in ("train", "finetune", "offline", "online") and (path / "checkpoint").exists():
        going_on = f", go on from what it learned with {verb}.policy={path / 'checkpoint'} run.name=NAME"
    return f"Give this one a name with run.name=NAME{going_on}, or start over with run.overwrite=true."


def open_fresh_run(config: Config, verb: str, sections: tuple[str, ...]) -> RunFolder:
    """Open the run folder of a verb that simply runs again; earlier results are replaced as new ones appear.

    Where they are of other settings that is said, and they go at once: a page shows one run. What a killed process
    left half-written is removed.
    """
    folder, settings = open_folder(run_path(config, verb)), to_yaml(config, sections)
    written = folder.path / "config.yaml"
    if written.exists() and written.read_text() != settings:
        if is_complete(folder.path):
            output.print(
                f"{folder.path} holds a run with other settings, which this one replaces; run.name=NAME keeps both.",
                markup=False,
                soft_wrap=True,
            )
        for name in (RESULT, REPORT, "report.json", *FILMS):
            (folder.path / name).unlink(missing_ok=True)
    folder.describe(settings, config.run.seed, config.run.threads)
    begin(folder.path)
    _follow(folder, config, verb, sections)
    return folder


def _say_other_ground(folder: RunFolder, threads: int) -> None:
    changed = folder.describe_resumption(threads)
    if changed:
        warnings.warn(
            f"{folder.path} goes on, but not to where it would have ended unbroken: {'; '.join(changed)}. It is noted "
            "in versions.json; for figures that repeat, start over with run.overwrite=true.",
            RobopolicyWarning,
            stacklevel=3,
        )


def open_folder(path: Path, parts: Sequence[str] = (), way_out: str = "choose another with run.root=PATH") -> RunFolder:
    """Open a folder for this process alone, without what a killed one left in it half-written.

    parts: names of what this process alone writes there, such as seeds, where others may write other parts at the same
    time; way_out: what to do where they are taken. Raises ConfigError where another process is at work on them.
    """
    for name in parts:
        claim(path / name, way_out)
    if not parts:
        claim(path, way_out)
    folder = RunFolder(path)
    for name in parts or ("",):
        sweep(path, f"{name}.json" if name else "")
    return folder


@contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Wait until no other process is at this point for a folder that processes share, and keep others waiting."""
    with FileLock(path / ".summary.lock"):
        yield


def is_complete(path: Path) -> bool:
    """Whether the run in a folder has left its result, and its report, which comes after that."""
    return (path / RESULT).exists() and (path / REPORT).exists()


def finished(folder: RunFolder) -> dict[str, Any] | None:
    """Return the result of a run that has already ended, else None; a report that a kill prevented is made."""
    path = folder.path / RESULT
    if not path.exists():
        return None
    if folder.checkpoint.exists() and not (folder.path / REPORT).exists():
        from robopolicy.evaluation.report import report_for_run  # draws plots, which most uses of a run folder do not

        report_for_run(folder.path)
    return read_object(path)


def finish(config: Config, folder: RunFolder, result: Mapping[str, Any]) -> None:
    """Write the run's figures to `json=PATH` when asked, and to result.json.

    That comes last: a run that has one is finished, and would not write the other any more.
    """
    plain = json.loads(json.dumps(result))
    publish(config, plain)
    write_json(folder.path / RESULT, plain)
    for follower in folder.followers:
        follower.finish()
    end(folder.path)


def publish(config: Config, result: Mapping[str, Any]) -> None:
    """Write figures to `json=PATH` when asked."""
    if config.json is not None:
        if config.json.parent.is_dir():
            sweep(config.json.parent, config.json.name)
        write_json(config.json, result)


def default_path(config: Config, verb: str, part: str, given: Path | None, key: str) -> Path:
    """Return `given`, else what `verb` left under the same name and seed.

    Raises CheckpointError saying which verb makes it, or which key to set.
    """
    path = given if given is not None else run_path(config, verb) / part
    if not path.exists() and not recover_folder(path).exists():
        made = f"'robopolicy {verb}' makes it; or set" if given is None else "check"
        raise CheckpointError(f"{path} does not exist: {made} {key}=PATH.")
    return path


def _has_begun(path: Path) -> bool:
    """Whether a run has left anything but its description: a start that failed may be made anew with other settings."""
    return any(item.name not in DESCRIPTION for item in path.iterdir())


def _with_default_size(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of before with world.image_size as it is left out now: its default was 64, which is still the
    size in which cameras are drawn, and not that of an environment's own pictures.
    """
    from robopolicy.core.spec import DRAWN  # imports numpy, which help does without

    world = old.get("world")

    if world is None or world["image_size"] != DRAWN[0] or new["world"]["image_size"] is not None:
        return old
    drawn = not world["cameras"] or world["name"] in OURS
    return {**old, "world": {**world, "image_size": None}} if drawn else old


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [key for key in {**old, **new} if not (path == "" and key == "run")]
        return [text for key in keys for text in _differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))]
    return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column is text and whose others are figures, under its title."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for line in lines:
        table.add_row(*line)
    output.print(Text(title, style="italic"))
    output.print(table)


def runs_of(paths: Sequence[Path]) -> list[str]:
    """Return what tells checkpoints apart: those of verb, name and seed in which their run folders differ, and of
    folders that are no run's (LeRobot's, say) the end of their path.

    Raises ConfigError if one comes twice.
    """
    places = [path.absolute() for path in paths]
    own = [place for place in places if _is_of_a_run(place)]
    known = dict(zip(own, _told_apart([place.parts[-4:-1] for place in own]), strict=True))
    for length in range(1, 1 + max((len(place.parts) for place in places), default=1)):
        names = [known.get(place) or _end(place, length) for place in places]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"These do not differ in verb, name or seed: {', '.join(map(str, paths))}.")


def _told_apart(runs: Sequence[Sequence[str]]) -> list[str]:
    """Return names of runs, (verb, name, seed) each, of the columns that are not the same for all."""
    roles = {"train": "base", "finetune": "tuned"}
    differing = [index for index, values in enumerate(zip(*runs, strict=True)) if len(set(values)) > 1] or [1]
    return [" ".join(roles.get(run[index], run[index]) for index in differing) for run in runs]


def _is_of_a_run(place: Path) -> bool:
    """Whether an absolute path is ROOT/<verb>/<name>/<seed>/checkpoint."""
    return place.name == "checkpoint" and len(place.parts) > 5


def _end(place: Path, length: int) -> str:
    """Return the last `length` telling parts of a path; a number, as LeRobot's of training steps, tells too little."""
    parts = [part for part in place.parts if part not in ("checkpoint", "checkpoints", "pretrained_model", "last", "/")]
    numbers = next((count for count, part in enumerate(reversed(parts)) if not part.isdigit()), 0)
    return "/".join(parts[-(length + numbers) :])
