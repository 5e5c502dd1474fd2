"""Where policies and recordings come from: the world that they were made in, as their files say it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from robopolicy.core.errors import CheckpointError
from robopolicy.core.narrowing import is_mapping, is_sequence


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


def texts(value: Any) -> Iterator[str]:
    """Yield every text inside nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif is_mapping(value):
        yield from texts([*value.values()])
    elif is_sequence(value):
        for inner in value:
            yield from texts(inner)
