"""Where policies and recordings come from: the world that they were made in, as their files say it."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from robopolicy.core.errors import CameraError, CheckpointError, ConfigError, SpecError
from robopolicy.core.narrowing import is_mapping, is_sequence

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


def texts(value: Any) -> Iterator[str]:
    """Yield every text inside nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif is_mapping(value):
        yield from texts([*value.values()])
    elif is_sequence(value):
        for inner in value:
            yield from texts(inner)
