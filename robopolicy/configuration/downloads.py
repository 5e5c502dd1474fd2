"""Settings that name a checkpoint or dataset on the Hugging Face hub: downloaded, and replaced by the local folder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from robopolicy.configuration.config import Config
from robopolicy.core.errors import ConfigError
from robopolicy.core.hub import PREFIX, Kind, local_folder
from robopolicy.core.structured import Tagged

CHECKPOINTS = frozenset(
    (
        *("policy", "base", "model", "models", "policies", "candidate", "incumbent", "teacher", "encoder", "path"),
        *("classifier", "success"),
    )
)
"""Names of settings that contain checkpoints, in any section."""
DATASETS = frozenset(
    (
        *("data", "dataset", "extra_datasets", "reference_dataset", "merge", "source", "expert_datasets"),
        *("positives", "negatives", "demonstrations", "recover_data"),
    )
)
"""Names of settings that contain datasets, in any section."""
NAMES = ("check.target",)
"""Settings that are names as well as checkpoints: USER/NAME may be the task of a suite, so only hf:// is the hub."""

LOCAL = ("watch.path",)
"""Settings that are local folders although their names are among those above."""


def with_downloads(config: Config, sections: Sequence[str]) -> Config:
    """Return `config` with every repository named in `sections` replaced by the folder of its download.

    Returns `config` itself if there is none. Raises ConfigError or StorageError as `core.hub.local_folder`, and
    ConfigError for hf:// in a setting that is a local path, such as an output.
    """
    new_sections = {name: _resolved(getattr(config, name), name) for name in sections}
    new_sections = {name: section for name, section in new_sections.items() if section is not getattr(config, name)}
    return config.replaced(**new_sections) if new_sections else config


def _resolved(section: Any, place: str) -> Any:
    """Return a section with local folders; the section itself if nothing changes."""
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(section):
        value: Any = getattr(section, item.name)
        path = f"{place}.{item.name}"
        new: Any = value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            is_inline = isinstance(section, Tagged) and section.beside and item.name == "config"
            new = _resolved(value, place if is_inline else path)
        elif isinstance(value, tuple) and value and all(isinstance(each, Path) for each in value):
            new = tuple(_folder(each, item.name, path) for each in value)
        elif isinstance(value, Path) or (path in NAMES and str(value).startswith(PREFIX)):
            folder = _folder(Path(value) if isinstance(value, Path) else str(value), item.name, path)
            new = folder if isinstance(value, Path) else str(folder)
        if new is not value and new != value:
            changes[item.name] = new
    return dataclasses.replace(section, **changes) if changes else section


def _folder(value: Path | str, name: str, where: str) -> Path:
    kind: Kind | None = "dataset" if name in DATASETS else "model" if name in CHECKPOINTS or where in NAMES else None
    if kind is not None and where not in LOCAL:
        return local_folder(value, kind)
    if str(value).startswith(PREFIX):
        raise ConfigError(
            f"{where} is a local path, not a name on the hub. To upload: robopolicy push FOLDER USER/NAME."
        )
    return Path(value)
