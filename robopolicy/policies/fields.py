"""Which of a world's fields a policy reads."""

from collections.abc import Mapping

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.spec import TASK, Field


def select_fields(keys: tuple[str, ...], observation: Mapping[str, Field]) -> dict[str, Field]:
    """Return the fields that `keys` name, all but the instruction for (); raises ConfigError for unknown ones."""
    known = {key: spec for key, spec in observation.items() if key != TASK}
    for key in keys:
        if key not in known:
            raise ConfigError(
                f"observation_keys names '{key}', which is no field of the world.{did_you_mean(key, known)}"
            )
    return {key: known[key] for key in (keys or known)}
