"""Write self-describing policy checkpoints: config.json (description) and model.safetensors (weights and normalisers).

They are loaded by `loading`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from robopolicy.core.checkpoints import write_checkpoint
from robopolicy.core.modules import Weights
from robopolicy.core.origin import described_origin
from robopolicy.core.spec import Field
from robopolicy.core.structured import to_plain
from robopolicy.policies.registry import POLICIES


class Describes(Weights, Protocol):
    """A policy (an nn.Module) that stores its construction arguments, so that `save_policy` can write them."""

    @property
    def config(self) -> Any:
        """Configuration dataclass."""
        ...

    @property
    def fields(self) -> Mapping[str, Field]:
        """Observation fields by key."""
        ...

    @property
    def action(self) -> Field:
        """Action field of one control step."""
        ...

    @property
    def fps(self) -> float:
        """Control steps per second."""
        ...

    @property
    def instructions(self) -> tuple[str, ...]:
        """Instructions that the policy supports."""
        ...


def save_policy(
    policy: Describes, folder: Path, more: Callable[[Path], None] | None = None, **description: Any
) -> None:
    """Write a policy's kind, config, fields and weights to `folder` atomically, in the format that `load_policy` reads.

    description: additional entries of config.json, for classes with a custom `load`; `kind` among them replaces the
    registered name or import path. more: called with the folder to write additional files.
    """
    spec = {
        "observation": {key: field.to_json() for key, field in policy.fields.items()},
        "action": policy.action.to_json(),
        "fps": policy.fps,
        "instructions": list(policy.instructions),
    }
    kind = description.pop("kind", None) or POLICIES.name_of(type(policy))
    config = {"kind": kind, "config": to_plain(policy.config), "spec": spec, **described_origin(policy), **description}
    write_checkpoint(folder, config, policy, more)


def saved_fields(description: Mapping[str, Any]) -> tuple[dict[str, Field], Field, dict[str, Any]]:
    """Read the world of a policy saved by `save_policy`: observation fields, action field, and {fps, instructions}.

    Raises KeyError or TypeError when entries are missing.
    """
    spec = description["spec"]
    observation = {key: Field.from_json(field) for key, field in spec["observation"].items()}
    metadata = {"fps": spec["fps"], "instructions": tuple(spec["instructions"])}
    return observation, Field.from_json(spec["action"]), metadata
