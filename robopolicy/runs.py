"""Run folders of the verbs: their location, whether a run may be resumed, and the files they contain."""

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table
from rich.text import Text

from robopolicy.configuration import Config, read_yaml, to_yaml
from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning, in_one_line
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.run import RunFolder
from robopolicy.core.status import RUNNING, begin, end, status_file
from robopolicy.core.storage import read_object, recover_folder, remove_leftovers, storage_errors, write_json
from robopolicy.core.structured import from_plain, to_plain
from sims.names import OURS

RESULT, REPORT = "result.json", "report.html"
LONGEST_NAME = 200
"""Maximum bytes of a run's name: file systems allow 255, and result files append to it."""
FILMS = ("base.mp4", "policy.mp4", "without_planning.mp4")
"""Videos that `evaluate` writes."""
MOMENT = 0.2
"""Seconds for which a lock is retried: a process that checks whether a run is alive holds it for microseconds."""
WITHOUT_EFFECT = ("workers",)
"""Sections that do not affect results: a run may resume with others."""
TRACKER = "tracker.json"
"""File with the identifier of this run in experiment trackers."""
DESCRIPTION = ("config.yaml", "versions.json")
"""Files that every run folder contains from its start."""

_claimed: dict[Path, FileLock] = {}

output = Console(highlight=False, emoji=False)
if not output.is_terminal:
    output = Console(highlight=False, emoji=False, width=140)


def run_name(config: Config) -> str:
    """Return the run's name: `run.name`, else the world's (the simulator behind a world model). Raises ConfigError on
    "..".
    """
    name = config.run.name or config.world.simulator or config.world.name
    if name in (".", ".."):
        raise ConfigError(f"run.name={name} points outside the folder of the runs: choose another name.")
    if len(name.encode()) > LONGEST_NAME or not name.isprintable():
        raise ConfigError(
            f"run.name={in_one_line(name, 40)!r} cannot be a folder name: choose one of at most {LONGEST_NAME} "
            "printable characters."
        )
    return name.replace("/", "-").replace(":", "-")


def run_path(config: Config, verb: str) -> Path:
    """Return the results folder of `verb`: root/<verb>/<name>/<seed>. For datasets with a quality level the name is
    <name>-<quality>, unless run.name is set.
    """
    graded = verb == "collect" and config.collect.quality and not config.run.name
    name = f"{run_name(config)}-{config.collect.quality}" if graded else run_name(config)
    return config.run.root / verb / name / str(config.run.seed)


def input_path(config: Config, verb: str) -> Path:
    """Return the results folder of `verb` that this run reads by default: that of the name run.inputs, else its own."""
    if not config.run.inputs:
        return run_path(config, verb)
    return run_path(config.replaced(run=replace(config.run, name=config.run.inputs)), verb)


def lock_run_folder(path: Path, way_out: str = "name this run with run.name=NAME") -> None:
    """Lock a run folder against other processes until this one ends.

    The lock file lies beside the folder, so that starting over does not remove it. way_out: alternative to waiting, for
    the error message. Raises ConfigError when another process uses the folder; two processes would mix their metrics
    and overwrite each other's checkpoints.
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
            owner = _owner(path)
            raise ConfigError(
                f"{path} is in use by another process{owner}: wait until it ends, or {way_out}."
            ) from None
    _claimed[file] = lock


def _owner(path: Path) -> str:
    """Return " (1234 on HOST)" for the process that uses a run folder, "" if unknown."""
    try:
        status = read_object(status_file(path))
        return f" ({int(status['process'])} on {in_one_line(status['host'], 60)})" if status["state"] == RUNNING else ""
    except (CheckpointError, OSError, KeyError, TypeError, ValueError):
        return ""


def decisive(sections: Sequence[str]) -> tuple[str, ...]:
    """Return the sections that affect results, which config.yaml in the run folder contains."""
    return tuple(name for name in sections if name not in WITHOUT_EFFECT)


def open_run(config: Config, verb: str, sections: tuple[str, ...]) -> RunFolder:
    """Open the run folder of a resumable verb.

    A folder with the same configuration resumes where it stopped; settings missing in an older version's folder count
    as default. Raises ConfigError if it contains another configuration (naming the differences), unless
    run.overwrite=true starts over. Files left half-written by a killed process are removed.
    """
    path, sections = run_path(config, verb), decisive(sections)
    lock_run_folder(path)
    if config.run.overwrite and path.exists():
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link to {path.resolve()}, which run.overwrite does not remove.")
        if any(path.iterdir()) and not any((path / name).exists() for name in DESCRIPTION):
            raise ConfigError(f"{path} contains other files and no run: run.overwrite does not remove it.")
        _require_outside(config, sections, path)
        shutil.rmtree(path)
    folder = RunFolder(path)
    remove_leftovers(path)
    text = to_yaml(config, sections)
    grounds = {"shards": config.finetune.shards} if "finetune" in sections else {}
    config_file = path / "config.yaml"
    if config_file.exists() and _has_begun(path):
        way_out = _way_out(config, verb, path)
        try:  # what an older version had no setting for is at its default
            earlier = from_plain(Config, read_yaml(config_file))
        except ConfigError as error:
            raise ConfigError(f"{path} contains a run of another version ({error}). {way_out}") from error
        old, new = ({name: to_plain(getattr(each, name)) for name in sections} for each in (earlier, config))
        changes = _differences(_with_default_size(old, new), new)
        if not (path / RESULT).exists():  # said below, and recorded
            changes = [text for text in changes if not text.startswith("finetune.shards ")]
        if changes:
            raise ConfigError(f"{path} contains a run with other settings ({'; '.join(changes[:4])}). {way_out}")
        if not (path / RESULT).exists():
            _say_other_ground(folder, config.run.threads, **grounds)
    else:
        folder.describe(text, config.run.seed, config.run.threads, **grounds)
    if not (path / RESULT).exists():
        begin(path)
        _follow(folder, config, verb, sections)
    return folder


def _follow(folder: RunFolder, config: Config, verb: str, sections: Sequence[str]) -> None:
    """Attach the tracker that run.tracker names. Raises ConfigError where there is none of that name."""
    if not config.run.tracker:
        return
    from robopolicy.evaluation.trackers import TRACKERS, Following, TrackedRun, flat, identifier_in  # only if requested

    if (folder.path / RESULT).exists():  # of an evaluation before this one
        (folder.path / TRACKER).unlink(missing_ok=True)
    plain = to_plain(config)
    run = TrackedRun(
        path=folder.path,
        name=f"{verb}-{run_name(config)}-{config.run.seed}",
        config=flat({name: plain[name] for name in sections}),
        identifier=identifier_in(folder.path),
    )
    following = Following(TRACKERS.load(config.run.tracker), run, folder)
    folder.followers.append(following)
    begin(folder.path).at_end.append(following.finish)  # where the run fails or is interrupted, too


def _require_outside(config: Config, sections: tuple[str, ...], path: Path) -> None:
    """Raise ConfigError when an input of the run lies in its own folder, which run.overwrite would remove."""
    inputs = ((f"{name}.{key}", value) for name in sections for key, value in vars(getattr(config, name)).items())
    for setting, value in inputs:
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Path) and each.resolve().is_relative_to(path.resolve()):
                raise ConfigError(
                    f"{setting}={each} is inside {path}, which run.overwrite=true removes: choose another name for "
                    "this run, run.name=NAME."
                )


def _way_out(config: Config, verb: str, path: Path) -> str:
    """Return advice for a run folder that contains a run with other settings."""
    going_on = ""
    if verb in ("train", "finetune", "offline", "online") and (path / "checkpoint").exists():
        going_on = f", continue training from its checkpoint with {verb}.policy={path / 'checkpoint'} run.name=NAME"
    return f"Choose another name with run.name=NAME{going_on}, or start over with run.overwrite=true."


def open_fresh_run(config: Config, verb: str, sections: tuple[str, ...]) -> RunFolder:
    """Open the run folder of a verb that always starts over; earlier results are replaced as new ones appear.

    Earlier results with other settings are announced and removed at once, because a report shows one run. Files left
    half-written by a killed process are removed.
    """
    sections = decisive(sections)
    folder, settings = open_folder(run_path(config, verb)), to_yaml(config, sections)
    config_file = folder.path / "config.yaml"
    if config_file.exists() and config_file.read_text() != settings and not _is_saved_in(config_file, config, sections):
        if is_complete(folder.path):
            output.print(
                f"{folder.path} contains a run with other settings, which this run replaces; run.name=NAME keeps both.",
                markup=False,
                soft_wrap=True,
            )
        for name in (RESULT, REPORT, "report.json", *FILMS):
            (folder.path / name).unlink(missing_ok=True)
    folder.describe(settings, config.run.seed, config.run.threads)
    begin(folder.path)
    _follow(folder, config, verb, sections)
    return folder


def _is_saved_in(path: Path, config: Config, sections: Sequence[str]) -> bool:
    """Whether a config.yaml has these settings, perhaps under former names of an earlier version."""
    try:
        earlier = from_plain(Config, read_yaml(path))
    except ConfigError:
        return False
    return all(to_plain(getattr(earlier, name)) == to_plain(getattr(config, name)) for name in sections)


def _say_other_ground(folder: RunFolder, threads: int, **grounds: int) -> None:
    changes = folder.describe_resumption(threads, **grounds)
    if changes:
        warnings.warn(
            f"{folder.path} resumes in another environment, so its results will differ from an uninterrupted run: "
            f"{'; '.join(changes)}. versions.json records this; for reproducible results, start over with "
            "run.overwrite=true.",
            RobopolicyWarning,
            stacklevel=3,
        )


def open_folder(path: Path, parts: Sequence[str] = (), way_out: str = "choose another with run.root=PATH") -> RunFolder:
    """Open a folder for this process only and remove files left half-written by a killed process.

    parts: names of the files that this process writes there, such as seeds, when others may write other parts at the
    same time; way_out: advice when they are locked. Raises ConfigError when another process uses them.
    """
    for name in parts:
        lock_run_folder(path / name, way_out)
    if not parts:
        lock_run_folder(path, way_out)
    folder = RunFolder(path)
    for name in parts or ("",):
        remove_leftovers(path, f"{name}.json" if name else "")
    return folder


@contextmanager
def lock_shared_folder(path: Path) -> Iterator[None]:
    """Wait until no other process holds the summary lock of a shared folder, and hold it inside the body."""
    with FileLock(path / ".summary.lock"):
        yield


def is_complete(path: Path) -> bool:
    """Whether the run in a folder has written its result and its report, which is written last."""
    return (path / RESULT).exists() and (path / REPORT).exists()


def finished(folder: RunFolder) -> dict[str, Any] | None:
    """Return the result of a finished run, else None; writes the report if an interruption prevented that."""
    path = folder.path / RESULT
    if not path.exists():
        return None
    if folder.checkpoint.exists() and not (folder.path / REPORT).exists():
        from robopolicy.evaluation.report import report_for_run  # draws plots, which most uses of a run folder do not

        report_for_run(folder.path)
    return read_object(path)


def finish(config: Config, folder: RunFolder, result: Mapping[str, Any]) -> None:
    """Write the run's results to `json=PATH` if requested, and to result.json.

    result.json is written last: a run that has one counts as finished and would not write the other file any more.
    """
    plain = json.loads(json.dumps(result))
    publish(config, plain)
    write_json(folder.path / RESULT, plain)
    for follower in folder.followers:
        follower.finish()
    end(folder.path)


def publish(config: Config, result: Mapping[str, Any]) -> None:
    """Write results to `json=PATH` if requested."""
    if config.json is not None:
        if config.json.parent.is_dir():
            remove_leftovers(config.json.parent, config.json.name)
        write_json(config.json, result)


def default_path(config: Config, verb: str, part: str, given: Path | None, key: str) -> Path:
    """Return `given`, else the path of `verb`'s output with the same seed and name (or run.inputs).

    Raises CheckpointError naming the verb that creates it, or the setting to change.
    """
    path = given if given is not None else input_path(config, verb) / part
    if not path.exists() and not recover_folder(path).exists():
        advice = f"create it with 'robopolicy {verb}', or set" if given is None else "check"
        raise CheckpointError(f"{path} does not exist: {advice} {key}=PATH.")
    return path


def _has_begun(path: Path) -> bool:
    """Whether a run has written more than its description: a start that failed may be repeated with other settings."""
    return any(item.name not in (*DESCRIPTION, TRACKER) for item in path.iterdir())


def _with_default_size(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return earlier settings with world.image_size unset if it had its old default 64. Cameras are still rendered at
    64 by default, but an environment's own images are not.
    """
    from robopolicy.core.spec import DEFAULT_IMAGE_SIZE  # imports numpy, which help does without

    world = old.get("world")

    if world is None or world["image_size"] != DEFAULT_IMAGE_SIZE[0] or new["world"]["image_size"] is not None:
        return old
    had_default = not world["cameras"] or world["name"] in OURS
    return {**old, "world": {**world, "image_size": None}} if had_default else old


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [key for key in {**old, **new} if not (path == "" and key in ("run", "workers"))]
        return [text for key in keys for text in _differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))]
    return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table with a title, whose first column is text and whose other columns are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for line in lines:
        table.add_row(*line)
    output.print(Text(title, style="italic"))
    output.print(table)


def runs_of(paths: Sequence[Path]) -> list[str]:
    """Return distinguishing names of checkpoints: the parts of verb, name and seed in which their run folders differ,
    or the end of the path for other folders (such as LeRobot's).

    Raises ConfigError if one occurs twice.
    """
    places = [path.absolute() for path in paths]
    run_folders = [place for place in places if _is_of_a_run(place)]
    name_of = dict(zip(run_folders, _told_apart([place.parts[-4:-1] for place in run_folders]), strict=True))
    for length in range(1, 1 + max((len(place.parts) for place in places), default=1)):
        names = [name_of.get(place) or _end(place, length) for place in places]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"These runs have the same verb, name and seed: {', '.join(map(str, paths))}.")


def _told_apart(runs: Sequence[Sequence[str]]) -> list[str]:
    """Return names of runs, (verb, name, seed) each, from the columns in which they differ."""
    roles = {"train": "base", "finetune": "tuned"}
    differing = [index for index, values in enumerate(zip(*runs, strict=True)) if len(set(values)) > 1] or [1]
    return [" ".join(roles.get(run[index], run[index]) for index in differing) for run in runs]


def _is_of_a_run(place: Path) -> bool:
    """Whether an absolute path is ROOT/<verb>/<name>/<seed>/checkpoint."""
    return place.name == "checkpoint" and len(place.parts) > 5


def _end(place: Path, length: int) -> str:
    """Return the last `length` distinctive parts of a path; numbers, such as LeRobot's training steps, are not."""
    parts = [part for part in place.parts if part not in ("checkpoint", "checkpoints", "pretrained_model", "last", "/")]
    numbers = next((count for count, part in enumerate(reversed(parts)) if not part.isdigit()), 0)
    return "/".join(parts[-(length + numbers) :])


keep_former_names(__name__, {"claim": "lock_run_folder", "alone_in": "lock_shared_folder"})
