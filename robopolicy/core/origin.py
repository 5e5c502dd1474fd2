"""Where policies and recordings come from: the world that they were made in, as their files say it."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from robopolicy.core.arrays import is_mapping, is_sequence
from robopolicy.core.errors import CameraError, CheckpointError, ConfigError, SpecError, in_one_line
from robopolicy.core.ranges import LARGEST
from robopolicy.core.spec import LATENCY, LONGEST_HISTORY, LONGEST_LATENCY

WORLD = "world"
"""Where config.json says which world a policy or world model was trained in."""
RENAMED = "renamed"
"""Where it says which other names the columns and elements of its data had."""


@dataclass(frozen=True)
class WorldOrigin:
    """The world that a policy was trained in, or episodes recorded in: its name and options, as `make_world` takes
    them; of imagination, the simulator that the world model imitates.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {"name": self.name, "options": dict(self.options)}

    @staticmethod
    def from_json(data: Any, where: object) -> "WorldOrigin | None":
        """Rebuild from `to_json`, None from None; raises CheckpointError where the file `where` holds anything else."""
        if data is None:
            return None
        try:
            name, options = data["name"], dict(data["options"])
        except (KeyError, TypeError, ValueError):
            name, options = None, {}
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"{where} names its world as {str(data)[:80]!r}: expected a name and options.")
        return WorldOrigin(name, options)


def remember_origin(trained: object, origin: WorldOrigin | None) -> None:
    """Let every checkpoint that is written of a policy or world model from now on say which world it was trained in.

    None: it is not known.
    """
    if origin is not None or origin_of(trained) is not None:
        cast(Any, trained).trained_in = origin


def origin_of(trained: object) -> WorldOrigin | None:
    """Return the world that a policy or world model was trained in, None where it is not known (LeRobot's, older)."""
    return getattr(trained, "trained_in", None)


def remember_folder(policy: object, folder: object) -> None:
    """Let errors about a policy say which checkpoint it was loaded from: several may be at work."""
    cast(Any, policy).loaded_from = str(folder)


@contextmanager
def about(policy: object) -> Generator[None]:
    """Let what is wrong with a policy begin with its checkpoint, where it was loaded from one."""
    folder: str | None = getattr(policy, "loaded_from", None)
    try:
        yield
    except (SpecError, ConfigError) as error:
        if folder is None or folder in str(error):
            raise
        named = type(error)(f"{folder}: {error}")
        if isinstance(named, CameraError) and isinstance(error, CameraError):
            named.known = error.known
        raise named from error


def remember_renaming(trained: object, renamed: Mapping[str, str]) -> None:
    """Let every checkpoint that is written of a policy or world model from now on say by which other names it read the
    columns and elements of its data, {the data's: its own}, so that later readings of the same data agree.
    """
    if renamed or renaming_of(trained):
        cast(Any, trained).renamed = dict(renamed)


def renaming_of(trained: object) -> Mapping[str, str]:
    """Return the other names under which a policy or world model read its data, empty where it had none."""
    return getattr(trained, RENAMED, {})


def remember_described(trained: object, description: Mapping[str, Any], where: object) -> None:
    """Let what was loaded say what the entries `described_origin` of its description do; CheckpointError as there."""
    remember_origin(trained, WorldOrigin.from_json(description.get(WORLD), where))
    renamed: object = description.get(RENAMED) or {}
    if not is_mapping(renamed) or not all(isinstance(name, str) for pair in renamed.items() for name in pair):
        raise CheckpointError(f"{where}: '{RENAMED}' is {str(renamed)[:80]!r}, not names and other names for them.")
    remember_renaming(trained, {str(name): str(other) for name, other in renamed.items()})


def described_origin(trained: object) -> dict[str, Any]:
    """Return the entries of config.json that say which world it was trained in and under which other names it read its
    data, none where that is not known.
    """
    origin, renamed = origin_of(trained), renaming_of(trained)
    return ({} if origin is None else {WORLD: origin.to_json()}) | ({RENAMED: dict(renamed)} if renamed else {})


_NUMBERS: Mapping[str, tuple[type, float, float]] = {
    LATENCY: (int, 0, LONGEST_LATENCY),
    "history": (int, 1, LONGEST_HISTORY),
    "horizon": (int, 1, 10**7),
    "threads": (int, 1, 1024),
    "workers": (int, 0, 1024),
    "seed": (int, 0, LARGEST),
    "style": (int, 0, 2**31),
    "fps": (float, 1e-3, 1e6),
}
"""Options of worlds that are numbers, whichever world has them: type, least and largest value."""
_LONGEST_TEXT = 500
_MOST_VALUES = 1000
_LARGEST_NUMBER = 1e9
_DEEPEST = 4
FILES = (
    ".xml",
    ".mjb",
    ".urdf",
    ".usd",
    ".json",
    ".yaml",
    ".yml",
    ".py",
    ".so",
    ".dll",
    ".dylib",
    ".pkl",
    ".npz",
    ".pt",
)
"""Endings of names of files that environments read."""


def check_saved_options(options: Mapping[str, Any], where: object) -> None:
    """Raise CheckpointError unless a world's options, which the file `where` names, are plain values of usual size.

    Which names there are is the world's to say. No text may be the path of a file: an environment opens it.
    """
    left = [_MOST_VALUES]
    for name, value in options.items():
        if said := _wrong_option(name, value, left):
            shown = in_one_line(name, 60)
            raise CheckpointError(
                f"{where} comes from a world with {shown}={in_one_line(value, 60)}, which is {said}: it is not used. "
                f"If you trust it, name it: world.options.{shown}=VALUE."
            )


def _wrong_option(name: str, value: Any, left: list[int], depth: int = 0) -> str:
    """Return what an option is that no world takes, "" for nothing; left: how many values there may still be."""
    left[0] -= 1
    if left[0] < 0 or depth > _DEEPEST:
        return "nested too deeply, or too long"
    kind, low, high = _NUMBERS.get(name, (float, -_LARGEST_NUMBER, _LARGEST_NUMBER))
    if name in _NUMBERS and value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        return "no number"
    if isinstance(value, str):
        if "\\" in value or value.startswith(("/", ".", "~")) or value.lower().endswith(FILES):
            return "the path of a file"
        return "a text too long" if len(value) > _LONGEST_TEXT else ""
    if is_mapping(value) or is_sequence(value):
        inside = value.values() if is_mapping(value) else value
        return next((said for each in inside if (said := _wrong_option("", each, left, depth + 1))), "")
    if value is None or isinstance(value, bool) or (isinstance(value, int | kind) and low <= value <= high):
        return ""
    return f"no {'whole ' if kind is int else ''}number from {low:g} to {high:g}"


def texts(value: Any) -> Iterator[str]:
    """Yield every text inside nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif is_mapping(value):
        yield from texts([*value.values()])
    elif is_sequence(value):
        for inner in value:
            yield from texts(inner)
