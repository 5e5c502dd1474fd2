"""Provenance of policies and recordings: the world they were made in, as stored in their files."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from robopolicy.core.arrays import is_mapping, is_sequence
from robopolicy.core.errors import CameraError, CheckpointError, ConfigError, SpecError, in_one_line
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.ranges import LARGEST
from robopolicy.core.spec import LATENCY, LONGEST_HISTORY, LONGEST_LATENCY

WORLD = "world"
"""Key in config.json of the world that a policy or world model was trained in."""
RENAMED = "renamed"
"""Key in config.json of the renaming of data columns and elements."""


@dataclass(frozen=True)
class WorldOrigin:
    """World in which a policy was trained or episodes were recorded: name and options as for `make_world`; for imagined
    data, the simulator that the world model imitates.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {"name": self.name, "options": dict(self.options)}

    @staticmethod
    def from_json(data: Any, where: object) -> "WorldOrigin | None":
        """Rebuild from `to_json`, None from None; raises CheckpointError if the file `where` contains anything else."""
        if data is None:
            return None
        try:
            name, options = data["name"], dict(data["options"])
        except (KeyError, TypeError, ValueError):
            name, options = None, {}
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"{where} describes its world as {str(data)[:80]!r}: expected a name and options.")
        return WorldOrigin(name, options)


def remember_origin(trained: object, origin: WorldOrigin | None) -> None:
    """Record the training world of a policy or world model, to be written to its checkpoints from now on.

    None: unknown.
    """
    if origin is not None or origin_of(trained) is not None:
        cast(Any, trained).trained_in = origin


def origin_of(trained: object) -> WorldOrigin | None:
    """Return the world that a policy or world model was trained in; None if unknown (LeRobot checkpoints, older
    ones).
    """
    return getattr(trained, "trained_in", None)


def remember_folder(policy: object, folder: object) -> None:
    """Record the checkpoint folder that a policy was loaded from, so that its error messages name it."""
    cast(Any, policy).loaded_from = str(folder)


@contextmanager
def prefix_errors(policy: object) -> Generator[None]:
    """Prefix errors about a policy with its checkpoint folder, if it was loaded from one."""
    folder: str | None = getattr(policy, "loaded_from", None)
    try:
        yield
    except (SpecError, ConfigError) as error:
        if folder is None or folder in str(error):
            raise
        prefixed = type(error)(f"{folder}: {error}")
        if isinstance(prefixed, CameraError) and isinstance(error, CameraError):
            prefixed.known = error.known
        raise prefixed from error


def remember_renaming(trained: object, renamed: Mapping[str, str]) -> None:
    """Record the renaming {dataset name: policy name} of columns and elements for a policy or world model. It is
    written to its checkpoints from now on, so that later reads of the same data agree.
    """
    if renamed or renaming_of(trained):
        cast(Any, trained).renamed = dict(renamed)


def renaming_of(trained: object) -> Mapping[str, str]:
    """Return the renaming that a policy or world model applied to its data; empty if none."""
    return getattr(trained, RENAMED, {})


def remember_described(trained: object, description: Mapping[str, Any], where: object) -> None:
    """Restore the entries written by `described_origin` from a description; raises CheckpointError on invalid
    entries.
    """
    remember_origin(trained, WorldOrigin.from_json(description.get(WORLD), where))
    renaming: object = description.get(RENAMED) or {}
    if not is_mapping(renaming) or not all(isinstance(name, str) for pair in renaming.items() for name in pair):
        raise CheckpointError(f"{where}: '{RENAMED}' is {str(renaming)[:80]!r}, not a mapping from names to new names.")
    remember_renaming(trained, {str(name): str(other) for name, other in renaming.items()})


def described_origin(trained: object) -> dict[str, Any]:
    """Return the config.json entries for the training world and the renaming of data columns; empty if unknown."""
    origin, renaming = origin_of(trained), renaming_of(trained)
    return ({} if origin is None else {WORLD: origin.to_json()}) | ({RENAMED: dict(renaming)} if renaming else {})


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
"""Numeric options common to all worlds: type, minimum and maximum."""
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
"""Extensions of files that environments read."""


def check_saved_options(options: Mapping[str, Any], where: object) -> None:
    """Raise CheckpointError unless a world's options, stored in the file `where`, are plain values of reasonable size.

    Option names are checked by the world. No string may be a file path, because an environment would open it.
    """
    budget = [_MOST_VALUES]
    for name, value in options.items():
        if reason := _wrong_option(name, value, budget):
            label = in_one_line(name, 60)
            raise CheckpointError(
                f"{where} stores the world option {label}={in_one_line(value, 60)}, which is {reason}, and is "
                f"therefore rejected. If you trust it, set it yourself: world.options.{label}=VALUE."
            )


def _wrong_option(name: str, value: Any, left: list[int], depth: int = 0) -> str:
    """Return the reason why an option value is invalid, "" if it is valid; left: number of values still allowed."""
    left[0] -= 1
    if left[0] < 0 or depth > _DEEPEST:
        return "nested too deeply, or too long"
    kind, low, high = _NUMBERS.get(name, (float, -_LARGEST_NUMBER, _LARGEST_NUMBER))
    if name in _NUMBERS and value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        return "not a number"
    if isinstance(value, str):
        if "\\" in value or value.startswith(("/", ".", "~")) or value.lower().endswith(FILES):
            return "a file path"
        return "too long a text" if len(value) > _LONGEST_TEXT else ""
    if is_mapping(value) or is_sequence(value):
        values = value.values() if is_mapping(value) else value
        return next((reason for each in values if (reason := _wrong_option("", each, left, depth + 1))), "")
    if value is None or isinstance(value, bool) or (isinstance(value, int | kind) and low <= value <= high):
        return ""
    return f"not a {'whole ' if kind is int else ''}number from {low:g} to {high:g}"


def texts(value: Any) -> Iterator[str]:
    """Yield every string inside nested mappings, of which keys too may name classes, and lists."""
    if isinstance(value, str):
        yield value
    elif is_mapping(value):
        yield from texts([*value, *value.values()])
    elif is_sequence(value):
        for inner in value:
            yield from texts(inner)


keep_former_names(__name__, {"about": "prefix_errors"})
