"""Writes self-describing policy checkpoints: config.json (what it is) and model.safetensors (weights and normalisers).

`loading` opens them.
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
    """A policy, an nn.Module, that keeps what it was made of, so that `save_policy` can write it down."""

    @property
    def config(self) -> Any:
        """Its dataclass."""
        ...

    @property
    def fields(self) -> Mapping[str, Field]:
        """What it reads, by key."""
        ...

    @property
    def action(self) -> Field:
        """One control step."""
        ...

    @property
    def fps(self) -> float:
        """Control steps a second."""
        ...

    @property
    def instructions(self) -> tuple[str, ...]:
        """The instructions that it may be given."""
        ...


def save_policy(
    policy: Describes, folder: Path, more: Callable[[Path], None] | None = None, **description: Any
) -> None:
    """Write a policy's kind, config, fields and weights to `folder`, atomically, so that `load_policy` finds all.

    description: further entries of config.json, for classes with a `load` of their own; `kind` among them replaces the
    name under which the class is registered or its dotted path. more: writes further files into the folder it is given.
    """
    spec = {
        "observation": {key: field.to_json() for key, field in policy.fields.items()},
        "action": policy.action.to_json(),
        "fps": policy.fps,
        "instructions": list(policy.instructions),
    }
    kind = description.pop("kind", None) or POLICIES.name_of(type(policy))
    whole = {"kind": kind, "config": to_plain(policy.config), "spec": spec, **described_origin(policy), **description}
    write_checkpoint(folder, whole, policy, more)


def saved_fields(description: Mapping[str, Any]) -> tuple[dict[str, Field], Field, dict[str, Any]]:
    """Return what `save_policy` wrote of a policy's world: observation fields, action field, and {fps, instructions}.

    Raises KeyError or TypeError where the description lacks them.
    """
    spec = description["spec"]
    observation = {key: Field.from_json(field) for key, field in spec["observation"].items()}
    known = {"fps": spec["fps"], "instructions": tuple(spec["instructions"])}
    return observation, Field.from_json(spec["action"]), known
